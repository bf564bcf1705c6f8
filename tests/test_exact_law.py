"""A node's moments from their exact law: the same law as releasing every row and summing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from scipy import stats

from flwr_modulated import (
    Distance,
    Guarantee,
    InvalidParameterError,
    Mechanism,
    Modulation,
    Moments,
    Replace,
    ReplaceRecord,
    draw_directions,
    exact_law,
)
from flwr_modulated.exact_law import draw_moments, noise_free_moments
from flwr_modulated.privacy import Relation

REPLICATIONS = 4_000
# Per check of one case: 1e-7, shared by all its statistics.
FALSE_ALARM = 1e-7


@dataclass(frozen=True)
class Case:
    """A node: how many rows, what map, what relation. q = d + 2 is the width of [F, y, 1]."""

    num_rows: int
    num_features: int
    modulation: Modulation = Modulation()  # noqa: RUF009
    relation: Relation = Distance(1.0)  # noqa: RUF009

    @property
    def mechanism(self) -> Mechanism:
        # A mild guarantee: with σ far above the features nothing but the noise would be tested.
        return Mechanism(self.modulation, Guarantee(8.0, 1e-5, self.relation))

    def data(self) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
        rng = np.random.default_rng([self.num_rows, self.num_features])
        features = rng.standard_normal((self.num_rows, self.num_features)) + 0.5
        labels = features.sum(axis=1) + rng.standard_normal(self.num_rows)
        directions = draw_directions(self.num_features, self.modulation.num_directions, rng=rng)
        return features, None if self.relation.hides_labels else labels, directions


CASES = {
    "one row": Case(1, 3),
    "fewer rows than columns": Case(3, 3),
    "one row beyond the columns": Case(6, 3),
    "Bartlett": Case(9, 3),
    "one feature": Case(8, 1),
    "clipped": Case(7, 2, relation=Replace(1.0)),
    "joint records": Case(7, 3, relation=ReplaceRecord(2.0, 1.0)),
    "modulated": Case(8, 3, Modulation(0.2, 0.8, 0.5, 2)),
}


def entries(gram: np.ndarray, cross: np.ndarray, total: np.ndarray) -> np.ndarray:
    """All distinct entries of moments, the last axis of the result."""
    upper = np.triu_indices(gram.shape[-1])
    return np.concatenate([gram[..., upper[0], upper[1]], cross, total], axis=-1)


def from_rows(case: Case, rng: np.random.Generator) -> np.ndarray:
    """Entries of moments of rows that are each released: one call, summed by plain NumPy."""
    features, labels, directions = case.data()
    released = case.mechanism.release(np.tile(features, (REPLICATIONS, 1)), directions, rng=rng)
    released = released.reshape(REPLICATIONS, *features.shape)
    y = np.zeros(len(features)) if labels is None else labels
    return entries(np.einsum("rni,rnj->rij", released, released), y @ released, released.sum(axis=1))


def from_law(case: Case, rng: np.random.Generator) -> np.ndarray:
    """Entries of moments drawn from their law."""
    features, labels, directions = case.data()
    mechanism = case.mechanism
    draws = []
    noise_free = noise_free_moments(mechanism, features, labels, directions, rng=rng)
    for _ in range(REPLICATIONS):
        if not case.modulation.is_plain:
            noise_free = noise_free_moments(mechanism, features, labels, directions, rng=rng)
        drawn = draw_moments(noise_free, mechanism.noise_std, rng=rng)
        draws.append(entries(drawn.gram, drawn.cross, drawn.total))
    return np.array(draws)


def faults(a: np.ndarray, b: np.ndarray) -> list[str]:
    """How two samples of the same law differ.

    Statistics: means and all products of centred entries, each with SE √(s_a²/R + s_b²/R) from the
    samples' own variances; two-sample Kolmogorov–Smirnov on every entry and 10 random projections.
    R draws each. The false-alarm rate 1e-7 is shared by all of them (Bonferroni).
    """
    keep = a.std(axis=0) > 0  # the label sums of joint records are zero
    a, b = a[:, keep], b[:, keep]
    scale = a.std(axis=0)
    a, b = (a - a.mean(axis=0)) / scale, (b - a.mean(axis=0)) / scale
    p = a.shape[1]
    first, second = np.triu_indices(p)
    centred_a, centred_b = a - a.mean(axis=0), b - b.mean(axis=0)
    samples = {
        "mean": (a, b),
        "covariance": (
            centred_a[:, first] * centred_a[:, second],
            centred_b[:, first] * centred_b[:, second],
        ),
    }
    projections = np.hstack([np.eye(p), np.random.default_rng(1).standard_normal((p, 10))])
    count = p + len(first) + projections.shape[1]
    bound = stats.norm.isf(FALSE_ALARM / count / 2)
    found = []
    for name, (x, y) in samples.items():
        error = np.sqrt(x.var(axis=0) / len(x) + y.var(axis=0) / len(y))
        z = np.abs(x.mean(axis=0) - y.mean(axis=0)) / error
        if z.max() > bound:
            found.append(f"{name} {z.max():.1f} > {bound:.1f}")
    for x, y in zip((a @ projections).T, (b @ projections).T, strict=True):
        value = stats.ks_2samp(x, y).pvalue
        if value < FALSE_ALARM / count:
            found.append(f"Kolmogorov-Smirnov {value:.1e}")
            break
    return found


@pytest.mark.statistical
@pytest.mark.parametrize("name", CASES)
def test_same_law_as_rows(name: str, rng: np.random.Generator) -> None:
    """All first and second moments and projections agree; see `faults`. The mutants below are caught."""
    assert faults(from_rows(CASES[name], rng), from_law(CASES[name], rng)) == []


ROOT, WISHART = exact_law._root, exact_law._standard_wishart

MUTANTS: dict[str, tuple[str, Callable[..., np.ndarray], str]] = {
    "degrees n instead of n - r": (
        "_standard_wishart",
        lambda d, df, rng: WISHART(d, df + d + 2, rng),
        "Bartlett",
    ),
    "degrees off by one": ("_standard_wishart", lambda d, df, rng: WISHART(d, df - 1, rng), "Bartlett"),
    "one degree where there are none": (
        "_standard_wishart",
        lambda d, df, rng: WISHART(d, df + 1, rng),
        "one row",
    ),
    "no Wishart term": ("_standard_wishart", lambda d, df, rng: np.zeros((d, d)), "clipped"),
    "no cross term": ("_root", lambda gram: np.zeros_like(gram), "modulated"),
    "cross terms independent of each other": (
        "_root",
        lambda gram: np.diag(np.sqrt(np.diag(gram))),
        "Bartlett",
    ),
    "root transposed": ("_root", lambda gram: ROOT(gram).T, "clipped"),
}


@pytest.mark.statistical
@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(name: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control of the test above: the same check rejects a wrong law."""
    target, replacement, case = MUTANTS[name]
    monkeypatch.setattr(exact_law, target, replacement)
    assert faults(from_rows(CASES[case], rng), from_law(CASES[case], rng)) != []


class TestWithoutSampling:
    """What holds exactly."""

    def test_no_noise_changes_nothing(self, rng: np.random.Generator) -> None:
        features = rng.standard_normal((7, 3))
        noise_free = Moments.from_rows(features, features[:, 0], noise_std=0.0)
        drawn = draw_moments(noise_free, 0.0, rng=rng)
        np.testing.assert_allclose(drawn.gram, noise_free.gram, rtol=0, atol=1e-12)
        np.testing.assert_array_equal(drawn.cross, noise_free.cross)
        np.testing.assert_array_equal(drawn.total, noise_free.total)
        assert drawn.noise_variance_sum == 0

    @pytest.mark.parametrize("n", [1, 3, 5, 40])
    @pytest.mark.parametrize("rank", [1, 3])
    def test_root_reproduces_the_gram_matrix(self, n: int, rank: int, rng: np.random.Generator) -> None:
        """The r = min(q, n) rows kept give RᵀR = AᵀA, also where columns of A are linearly dependent."""
        base = rng.standard_normal((n, rank))
        features = base @ rng.standard_normal((rank, 3))
        noise_free = Moments.from_rows(features, features[:, 0], noise_std=0.0)
        A = np.column_stack([features, features[:, 0], np.ones(n)])
        root = exact_law._root(exact_law._gram_with_labels(noise_free))[-n:]
        np.testing.assert_allclose(root.T @ root, A.T @ A, rtol=0, atol=1e-10)

    def test_noise_free_moments_are_those_of_clipped_contracted_rows(self, rng: np.random.Generator) -> None:
        features, labels = 3 * rng.standard_normal((50, 4)), rng.standard_normal(50)
        mechanism = Mechanism(Modulation(alpha=0.3), Guarantee(1.0, 1e-5, Replace(2.0)))
        got = noise_free_moments(mechanism, features, labels, rng=rng)
        clipped = features * np.minimum(1.0, 2.0 / np.linalg.norm(features, axis=1))[:, None]
        np.testing.assert_allclose(got.gram, 0.49 * clipped.T @ clipped, rtol=1e-12)
        np.testing.assert_allclose(got.cross, 0.7 * labels @ clipped, rtol=1e-11)
        np.testing.assert_allclose(got.total, 0.7 * clipped.sum(axis=0), rtol=1e-10)
        assert (got.num_samples, got.noise_variance_sum) == (50, 0.0)

    def test_plain_rows_draw_nothing(self) -> None:
        used, fresh = np.random.default_rng(1), np.random.default_rng(1)
        mechanism = Mechanism(Modulation(), Guarantee(1.0, 1e-5, Distance(1.0)))
        noise_free_moments(mechanism, np.ones((3, 2)), np.ones(3), rng=used)
        assert used.bit_generator.state == fresh.bit_generator.state

    def test_same_stream_same_moments(self) -> None:
        noise_free = Moments.from_rows(np.eye(3), np.ones(3), noise_std=0.0)
        one, two, other = (draw_moments(noise_free, 1.0, rng=np.random.default_rng(s)) for s in (1, 1, 2))
        np.testing.assert_array_equal(one.gram, two.gram)
        assert not np.array_equal(one.gram, other.gram)

    def test_cost_does_not_grow_with_the_rows(self) -> None:
        """A billion rows: more than could be drawn one by one in the time of a test."""
        n = 10**9
        noise_free = Moments(n, n * np.eye(2), np.zeros(2), np.zeros(2), 0.0, float(n), 0.0)
        drawn = draw_moments(noise_free, 1.0, rng=np.random.default_rng(3))
        # E Σ g̃g̃ᵀ = 2n I; the standard deviation of a diagonal entry is √(6n), of the other √(3n).
        assert np.abs(drawn.gram - 2 * n * np.eye(2)).max() < 6 * np.sqrt(6 * n)


def test_noisy_moments_are_refused(rng: np.random.Generator) -> None:
    noisy = Moments.from_rows(np.eye(2), np.ones(2), noise_std=1.0)
    with pytest.raises(InvalidParameterError, match="noise_free must hold no noise"):
        draw_moments(noisy, 1.0, rng=rng)
    with pytest.raises(InvalidParameterError, match="noise_std must be finite and in"):
        draw_moments(Moments.from_rows(np.eye(2), None, noise_std=0.0), -1.0, rng=rng)
