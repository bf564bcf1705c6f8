"""Devices with ε of 1, 4 and 16 in one federation: each its own σ, and its own weight.

That the weights are inverse variances is pinned in test_moments, that intervals keep their coverage in the
inference tests; here what a federation makes of it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fakes import SpyGrid, parts
from flwr.app import ArrayRecord, Context, Message
from flwr.clientapp import ClientApp

from flwr_modulated import (
    Auto,
    DebiasedMoments,
    Distance,
    Guarantee,
    ModulatedClient,
    ModulatedStrategy,
    Modulation,
    Moments,
    Policy,
    ReplaceRecord,
    Ridge,
)
from flwr_modulated.flower.records import Reply, Request, RowsReply
from flwr_modulated.flower.screening import Screen
from flwr_modulated.flower.state import Round, StudyState
from simulations.engines import InProcessGrid

pytestmark = pytest.mark.usefixtures("task_identity")

EPSILONS = (1.0, 4.0, 16.0)
BETA = np.array([1.0, -0.5, 0.25])
D, ERROR = len(BETA), 0.5
PLAIN = Modulation()
MODULATED = Modulation(alpha=0.2, amplitude=0.5, frequency=0.5, num_directions=2)


def policy(epsilon: float, relation: Any = None) -> Policy:
    return Policy(Guarantee(epsilon, 1e-5, relation or Distance(1.0)))


def std(epsilon: float, modulation: Modulation = PLAIN) -> float:
    return policy(epsilon).mechanism(modulation).noise_std


def rows(count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    x = rng.standard_normal((count, D))
    return x, x @ BETA + ERROR * rng.standard_normal(count)


class Federation:
    """Nodes of 5 rows each; node i holds the budget `epsilons[i % 3]`."""

    def __init__(
        self, rng: np.random.Generator, epsilons: Any = EPSILONS, num_nodes: int = 60, relation: Any = None
    ) -> None:
        self.epsilons = [epsilons[node % len(epsilons)] for node in range(num_nodes)]
        data = [rows(5, rng) for _ in self.epsilons]
        app = ClientApp()

        @app.train()
        def train(message: Message, context: Context) -> Message:
            node = int(context.node_config["partition-id"])
            client = ModulatedClient(
                lambda: data[node],
                policy(self.epsilons[node], relation),
                rng=lambda r: np.random.default_rng([11, node, r]),
            )
            return client.train(message)

        self.grid = SpyGrid(InProcessGrid(app, num_nodes))

    def run(self, **options: Any) -> ModulatedStrategy:
        strategy = ModulatedStrategy(study="own budgets", **options)
        strategy.start(self.grid, ArrayRecord([np.zeros(D)]), num_rounds=1)
        return strategy

    def sent(self, *, joint: bool) -> list[tuple[np.ndarray, np.ndarray, float]]:
        """Released rows, labels and σ that each node sent in the last run, by node."""
        replies = sorted(self.grid.received[0], key=lambda m: m.metadata.src_node_id)
        return [parts(reply.content, joint=joint) for reply in replies]

    def directions(self) -> np.ndarray:
        return self.grid.sent[0][0].content.array_records["fitins.parameters"].to_numpy_ndarrays()[0]


@pytest.mark.parametrize("modulation", [PLAIN, MODULATED], ids=["plain", "modulated"])
@pytest.mark.parametrize("label_scale", [None, 1.5], ids=["labels public", "labels private"])
def test_the_server_subtracts_and_weighs_each_rows_own_noise(
    modulation: Modulation, label_scale: float | None, rng: np.random.Generator
) -> None:
    """A naive twin: row by row, with weights written out from Eq. (4)."""
    relation = None if label_scale is None else ReplaceRecord(8.0, label_scale)
    federation = Federation(rng, relation=relation)
    strategy = federation.run(modulation=modulation, label_scale=label_scale)
    V, shrink, lam = federation.directions(), modulation.contraction, modulation.effective_amplitude
    m = max(modulation.num_directions, 1)
    released, labels, sigma = [], [], []
    for g, y, s in federation.sent(joint=label_scale is not None):
        released += list(g)
        labels += list(y)
        sigma += [s] * len(g)
    for epsilon, s in zip(federation.epsilons, sigma[::5], strict=True):
        assert s == policy(epsilon, relation).mechanism(modulation).noise_std
    second = [
        (np.outer(g, g) - lam**2 / (2 * m) * V @ V.T - s**2 * np.eye(len(g))) / shrink**2
        for g, s in zip(released, sigma, strict=True)
    ]
    d, s2 = V.shape[0], (np.array(sigma) / shrink) ** 2
    t = max(np.trace(np.mean(second, axis=0)), 0.0)
    noise = (d + 1) * s2**2 + 2 * s2 * t + (lam / shrink) ** 2 * s2
    weights = 1 / (noise + t**2 * (d + 1) / d**2)
    weights /= weights.sum()
    assert weights.max() > 20 * weights.min()
    sigma_hat = np.tensordot(weights, second, axes=1)
    if label_scale is None:
        cross = (
            np.array([w * y * g for w, y, g in zip(weights, labels, released, strict=True)]).sum(0) / shrink
        )
    else:
        cross, sigma_hat = label_scale * sigma_hat[:D, D], sigma_hat[:D, :D]
    assert strategy.debiased is not None
    np.testing.assert_allclose(strategy.debiased.second_moment, sigma_hat, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(strategy.debiased.cross_moment, cross, rtol=1e-9, atol=1e-9)
    assert strategy.noise_std_range == (min(sigma), max(sigma))


def test_rows_and_sums_weigh_the_same(rng: np.random.Generator) -> None:
    federation = Federation(rng)
    found = [federation.run(payload=payload).iterates[0] for payload in ("rows", "moments")]
    np.testing.assert_allclose(*found, rtol=1e-10)


def test_with_equal_budgets_nothing_changes(rng: np.random.Generator) -> None:
    """To the last digits, the estimate from all rows in one pot; τ² takes one rounding more."""
    federation = Federation(rng, epsilons=(4.0,))
    strategy = federation.run()
    sent = federation.sent(joint=False)
    order = sorted(range(len(sent)), key=lambda i: sent[i][0][0].tobytes())  # as the server orders them
    released = np.concatenate([sent[i][0] for i in order])
    labels = np.concatenate([sent[i][1] for i in order])
    plain = Moments.from_rows(released, labels, noise_std=std(4.0)).debias()
    assert strategy.debiased is not None
    np.testing.assert_array_equal(strategy.debiased.second_moment, plain.second_moment)
    np.testing.assert_array_equal(strategy.debiased.cross_moment, plain.cross_moment)
    np.testing.assert_allclose(strategy.iterates[0], Auto().estimate(plain), rtol=1e-14)


@pytest.mark.parametrize(
    ("allowed", "left"),
    [((4.0, 16.0), {4.0, 16.0}), ((1.0, 4.0), {1.0, 4.0}), ((4.0, 4.0), {4.0})],
)
def test_noise_outside_what_the_study_allows_is_refused(
    allowed: tuple[float, float], left: set[float], rng: np.random.Generator
) -> None:
    """Both ends are allowed themselves; the fit is that of the devices within."""
    federation = Federation(rng)
    weakest, strongest = allowed
    screen = Screen(min_noise_std=std(strongest), max_noise_std=std(weakest))
    strategy = federation.run(screen=screen)
    inside = [node for node, epsilon in enumerate(federation.epsilons) if epsilon in left]
    assert strategy.num_nodes == len(inside)
    assert strategy.refused == {"noise_std outside what the study allows": 60 - len(inside)}
    sent = federation.sent(joint=False)
    groups = [
        Moments.from_rows(
            np.concatenate([sent[node][0] for node in inside if federation.epsilons[node] == epsilon]),
            np.concatenate([sent[node][1] for node in inside if federation.epsilons[node] == epsilon]),
            noise_std=std(epsilon),
        ).debias()
        for epsilon in sorted(left)
    ]
    expected = Auto().estimate(DebiasedMoments.combine(groups))
    np.testing.assert_allclose(strategy.iterates[0], expected, rtol=1e-9)


@pytest.mark.parametrize("bounded", [False, True])
def test_noise_that_nothing_bounds_is_warned_of(
    bounded: bool, rng: np.random.Generator, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever states none would count for most: docs/trust.md has the numbers."""
    Federation(rng).run(screen=Screen(min_noise_std=std(16.0) if bounded else 0.0))
    assert ("the less they state the more they count" in caplog.text) != bounded
    caplog.clear()
    Federation(rng, epsilons=(4.0,)).run()
    assert "the less they state" not in caplog.text


# Many federations


def replications(number: int, counts: dict[float, int], rng: np.random.Generator) -> Iterator[Round]:
    """Released rows of fresh federations, so many at each ε and those in one reply."""
    edges = np.cumsum([0, *counts.values()])
    sigma = np.repeat([std(epsilon) for epsilon in counts], list(counts.values()))
    for _ in range(number):
        x, y = rows(len(sigma), rng)
        released = x + sigma[:, None] * rng.standard_normal(x.shape)
        together = np.column_stack([released, y])
        replies: dict[int, Reply] = {
            node: RowsReply(1, together[start:end], sigma[start])
            for node, (start, end) in enumerate(itertools.pairwise(edges))
        }
        yield Round(Request(1, PLAIN, np.zeros((D, 0))), replies)


def debias(round_: Round) -> DebiasedMoments:
    """The path of the strategy, without messages."""
    return StudyState([round_]).debias(None)


def check_unbiased(rng: np.random.Generator) -> None:
    number = 1000
    found = [debias(round_) for round_ in replications(number, dict.fromkeys(EPSILONS, 300), rng)]
    upper = np.triu_indices(D)
    statistics = np.array(
        [[*m.second_moment[upper], *m.cross_moment, *m.feature_mean, m.label_square] for m in found]
    )
    expected = [*np.eye(D)[upper], *BETA, *np.zeros(D), BETA @ BETA + ERROR**2]
    errors = statistics.std(axis=0, ddof=1) / math.sqrt(number)
    assert (np.abs(statistics.mean(axis=0) - expected) < 5.5 * errors).all()


@pytest.mark.statistical
def test_unbiased(rng: np.random.Generator) -> None:
    """Σ̂, ẑ and the means of 1000 federations of 900 rows against the population's.

    SE: the standard deviation over federations / √1000, about 0.003 on the diagonal of Σ̂; two-sided at
    5.5 SE for 13 numbers, 5e-7 together. Weights depend on the estimated trace, which biases by O(1/K):
    5e-4 here. One σ² for all rows, or σ for σ², is off by more than 0.1.
    """
    check_unbiased(rng)


def test_one_noise_level_for_all_is_seen(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    right = Round.row_moments

    def levelled(self: Round) -> list[Moments]:
        parts = right(self)
        variance = float(np.mean([math.sqrt(p.noise_variance_sum / p.num_samples) for p in parts])) ** 2
        # (3) needs the mean of the squares
        return [replace(part, noise_variance_sum=part.num_samples * variance) for part in parts]

    monkeypatch.setattr(Round, "row_moments", levelled)
    with pytest.raises(AssertionError):
        check_unbiased(rng)


def predicted_ratio(counts: dict[float, int]) -> float:
    """Variance of β̂ = Σ̂⁻¹ẑ with the package's weights over that with equal ones, to first order.

    For x ~ N(0, I) and a row with noise s, ψ = (g̃g̃ᵀ − s²I)β − y g̃ at the truth has the trace
    d[(1 + s²)e² + s²‖β‖²] + s⁴(d + 1)‖β‖² of its covariance, e the standard deviation of y about xᵀβ
    (compare Eq. 5 with λ = 0).
    """
    s2 = np.array([std(epsilon) for epsilon in counts]) ** 2
    shares = np.array(list(counts.values())) / sum(counts.values())
    size = BETA @ BETA
    spread = D * ((1 + s2) * ERROR**2 + s2 * size) + s2**2 * (D + 1) * size
    weights = 1 / ((D + 1) * s2**2 + 2 * s2 * D + D + 1)  # tr Σ = d
    weights /= shares @ weights
    return float((shares @ (weights**2 * spread)) / (shares @ spread))


@pytest.mark.statistical
@pytest.mark.parametrize(
    ("counts", "factor"),
    [({1.0: 16_000, 4.0: 16_000, 16.0: 16_000}, 0.0124), ({2.0: 19_200, 4.0: 3840, 8.0: 960}, 0.4078)],
    ids=["equal parts", "few with little noise"],
)
def test_weights_make_coefficients_as_much_better_as_theory_says(
    counts: dict[float, int], factor: float, rng: np.random.Generator
) -> None:
    """Mean squared error of β̂, weighted over unweighted, against its prediction.

    R = 150 federations of 48,000 or 24,000 rows; the ratio r of two means over the same federations has
    the SE sd(a − r b)/(b̄√R), about 10 % of r; two-sided at 5 SE (6e-7) and 8 % more for what the first
    order leaves out, of the size of τ²/λ_min², up to 0.008, times some ten terms. Equal weights give 1,
    weights by 1/s give 0.049 and 0.71, the least noisy devices alone 0.93 in the second federation.
    """
    assert predicted_ratio(counts) == pytest.approx(factor, rel=1e-2)
    estimator = Ridge(0.0)
    weighted, equal = [], []
    for round_ in replications(150, counts, rng):
        pooled = DebiasedMoments.pool([part.debias() for part in round_.row_moments()])
        for errors, moments in ((weighted, debias(round_)), (equal, pooled)):
            errors.append(float(np.sum((estimator.estimate(moments) - BETA) ** 2)))
    a, b = np.array(weighted), np.array(equal)
    ratio = a.mean() / b.mean()
    error = (a - ratio * b).std(ddof=1) / b.mean() / math.sqrt(len(b))
    assert error < 0.15 * factor
    assert abs(ratio - factor) < 5 * error + 0.08 * factor
