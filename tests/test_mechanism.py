"""The mechanism: its sensitivity, the law of what it adds, and its contract."""

from __future__ import annotations

import math
import random
from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest
from designs import Scripted
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from flwr_modulated import (
    Distance,
    Guarantee,
    Mechanism,
    Modulation,
    Replace,
    ReplaceRecord,
    draw_directions,
)
from flwr_modulated.privacy import Relation

FloatArray = NDArray[np.float64]
FALSE_ALARM = 1e-6
WITHIN_ONE = Distance(1.0)
WAVY = Modulation(alpha=0.2, amplitude=1.5, frequency=0.8, num_directions=2)


def mechanism_of(
    modulation: Modulation = WAVY, relation: Relation = WITHIN_ONE, epsilon: float = 2.0
) -> Mechanism:
    return Mechanism(modulation, Guarantee(epsilon, 1e-5, relation))


def noise_free(
    mechanism: Mechanism, rows: FloatArray, directions: FloatArray, turns: FloatArray
) -> FloatArray:
    """What is released before noise, with given phases."""
    return mechanism.release(rows, directions, rng=Scripted(turns, np.zeros_like(rows)))


# A2 ---------------------------------------------------------------------------------------------------

ANY_ROW = st.lists(
    st.one_of(
        st.floats(-5, 5),
        st.sampled_from([0.0, 5e-324, -2.3e-308, 1e-160]),
        st.floats(allow_nan=False, allow_infinity=False, allow_subnormal=True),
    ),
    min_size=3,
    max_size=3,
)


class TestSensitivity:
    @given(
        row=ANY_ROW,
        other=ANY_ROW,
        relation=st.sampled_from([Replace(0.5), Replace(3.0), ReplaceRecord(1.0)]),
        m=st.integers(0, 3),
        seed=st.integers(0, 2**32 - 1),
    )
    def test_replaced_rows(
        self, row: list[float], other: list[float], relation: Relation, m: int, seed: int
    ) -> None:
        """Any two rows, however large, with the same phases; 1e-12 of slack is rounding."""
        mechanism = mechanism_of(Modulation(0.3, 2.0, 1.5, m), relation)
        rng = np.random.default_rng(seed)
        directions, turns = draw_directions(3, m, rng=rng), rng.random((1, m))
        pair = [noise_free(mechanism, np.array([r]), directions, turns)[0] for r in (row, other)]
        assert np.linalg.norm(pair[1] - pair[0]) <= mechanism.l2_sensitivity * (1 + 1e-12)

    @given(
        row=st.lists(st.floats(-1e3, 1e3, allow_subnormal=True), min_size=3, max_size=3),
        share=st.floats(0, 1),
        m=st.integers(0, 3),
        seed=st.integers(0, 2**32 - 1),
    )
    def test_rows_within_the_distance(self, row: list[float], share: float, m: int, seed: int) -> None:
        """Rows are not clipped under this relation: 1e-10 of slack is the rounding of cos(ωu) at u ≤ 2e3."""
        mechanism = mechanism_of(Modulation(0.3, 2.0, 1.5, m), Distance(0.5))
        rng = np.random.default_rng(seed)
        directions, turns = draw_directions(3, m, rng=rng), rng.random((1, m))
        step = rng.standard_normal(3)
        other = np.array(row) + share * 0.5 * step / np.linalg.norm(step)
        pair = [noise_free(mechanism, np.array([r]), directions, turns)[0] for r in (row, other)]
        assert np.linalg.norm(pair[1] - pair[0]) <= mechanism.l2_sensitivity + 1e-10

    def test_bound_holds_and_is_attained(self) -> None:
        check_sensitivity()


def check_sensitivity() -> None:
    """The worst pair of each relation differs by exactly the stated sensitivity.

    Under the replacing relations the rows given are far outside the ball, so this also sees a missing
    clip; the pair is along v₁, where the cosine is steepest, with ω so small that the chord is the tangent.
    """
    for relation, apart in ((Distance(0.7), 0.7), (Replace(0.7), 1.4), (ReplaceRecord(0.7), 1.4)):
        for m in (0, 1, 2, 3):
            omega = 1e-4
            mechanism = mechanism_of(Modulation(0.2, 0.5 / omega, omega, m), relation)
            directions = np.eye(4)[:, :m]
            reach = 0.35 if isinstance(relation, Distance) else 1e5
            ends = np.array([[-reach, 0.0, 0.0, 0.0], [reach, 0.0, 0.0, 0.0]])
            low, high = noise_free(mechanism, ends, directions, np.full((2, m), 0.75))
            wanted = (0.8 + (0.5 / math.sqrt(m) if m else 0.0)) * apart
            assert np.linalg.norm(high - low) == pytest.approx(wanted, rel=1e-8)
            assert mechanism.l2_sensitivity == pytest.approx(wanted, rel=1e-8)
            secret = replace(mechanism, sensitivity="marginal")
            assert secret.l2_sensitivity == pytest.approx(0.8 * apart, rel=1e-12)


# A3 ---------------------------------------------------------------------------------------------------


def check_noise_law(rng: np.random.Generator) -> None:
    """Noise is N(0, σ²) with the σ that the mechanism states.

    n = 200 000. Kolmogorov-Smirnov at 1e-6 (distance 0.006: sees a 3 % error of σ). Mean of squares over
    σ²: standard error √(2/n) = 0.0032, five of them (two-sided 6e-7): sees σ off by 1 %.
    """
    n, mechanism = 200_000, mechanism_of(Modulation(alpha=0.2))
    noise = mechanism.release(np.zeros((n // 4, 4)), rng=rng).ravel() / mechanism.noise_std
    assert stats.kstest(noise, "norm").pvalue > FALSE_ALARM
    assert abs((noise**2).mean() - 1) < 5 * math.sqrt(2 / n)


def check_noise_is_independent(rng: np.random.Generator) -> None:
    """Coordinates, neighbouring rows and successive releases are uncorrelated; nothing is drawn twice.

    n = 50 000 rows. A mean product of independent standard normals has standard error 1/√n; twelve pairs,
    5.4 of them each (two-sided, 8e-7 in all): sees a correlation of 0.05. Catches noise that coordinates,
    rows or releases share.
    """
    n, mechanism = 50_000, mechanism_of(Modulation())
    first, second = (mechanism.release(np.zeros((n, 4)), rng=rng) / mechanism.noise_std for _ in range(2))
    products = [
        *(first[:, i] * first[:, j] for i in range(4) for j in range(i)),
        *(first[:, i] * np.roll(first, 1, axis=0)[:, i] for i in range(2)),
        *(first[:, i] * second[:, i] for i in range(4)),
    ]
    assert len(products) == 12
    for product in products:
        assert abs(product.mean()) < 5.4 / math.sqrt(n)
    assert len(np.unique(np.concatenate([first, second]))) > 0.999 * 8 * n


def check_phases_are_fresh(rng: np.random.Generator) -> None:
    """Each row, direction and release has its own phase.

    With ε so large that no noise is left, the same row is released n = 50 000 times. √2·cos has variance 1,
    so a product of two has standard error 1/√n; eight pairs, 5.4 of them each (6e-7 in all): sees a
    correlation of 0.05. Catches phases that rows, directions or releases share.
    """
    n = 50_000
    mechanism = mechanism_of(WAVY, epsilon=1e12)
    row = np.array([0.3, -0.4, 0.5])
    directions = np.eye(3)[:, :2]

    def waves() -> FloatArray:
        term = mechanism.release(np.tile(row, (n, 1)), directions, rng=rng) - 0.8 * row
        return math.sqrt(2) * term[:, :2] / (1.5 / math.sqrt(2))

    first, second = waves(), waves()
    products = [
        first[:, 0] * first[:, 1],
        second[:, 0] * second[:, 1],
        *(first[:, i] * second[:, j] for i in range(2) for j in range(2)),
        *(first[:, i] * np.roll(first[:, i], 1) for i in range(2)),
    ]
    assert len(products) == 8
    for product in products:
        assert abs(product.mean()) < 5.4 / math.sqrt(n)
    assert np.abs(first).max() == pytest.approx(math.sqrt(2), abs=1e-4)


class TestSampler:
    def test_noise_law(self, rng: np.random.Generator) -> None:
        check_noise_law(rng)

    def test_noise_is_independent(self, rng: np.random.Generator) -> None:
        check_noise_is_independent(rng)

    def test_phases_are_fresh(self, rng: np.random.Generator) -> None:
        check_phases_are_fresh(rng)


# A7 ---------------------------------------------------------------------------------------------------

CASES = {
    "plain": (mechanism_of(Modulation()), 0),
    "contracted": (mechanism_of(Modulation(alpha=0.5), Replace(1.0)), 0),
    "modulated": (mechanism_of(), 2),
    "modulated, clipped": (mechanism_of(WAVY, Replace(1.0)), 2),
    "joint": (mechanism_of(WAVY, ReplaceRecord(2.0)), 2),
    "marginal": (replace(mechanism_of(), sensitivity="marginal"), 2),
    "no amplitude": (mechanism_of(Modulation(0.1, 0.0, 1.0, 2)), 2),
}


def check_contract() -> None:
    """Inputs stay, outputs are new, and the given stream decides every byte."""
    for case, (mechanism, m) in CASES.items():
        rows = np.linspace(-2, 2, 15).reshape(5, 3)
        directions = draw_directions(3, m, rng=np.random.default_rng(5))
        before = rows.copy(), directions.copy()
        state = random.getstate(), np.random.get_state()[1].tobytes()  # noqa: NPY002
        first, again, other = (
            mechanism.release(rows, directions, rng=np.random.default_rng(seed)) for seed in (1, 1, 2)
        )
        assert first.shape == rows.shape, case
        assert first.dtype == np.float64
        assert not np.shares_memory(first, rows)
        np.testing.assert_array_equal(rows, before[0])
        np.testing.assert_array_equal(directions, before[1])
        np.testing.assert_array_equal(first, again)
        assert not (first == other).any()
        assert (random.getstate(), np.random.get_state()[1].tobytes()) == state  # noqa: NPY002
        stream = np.random.default_rng(1)
        one, two = (mechanism.release(rows, directions, rng=stream) for _ in range(2))
        np.testing.assert_array_equal(one, first)
        assert not (one == two).any()
        unlimited = replace(mechanism, guarantee=replace(mechanism.guarantee, epsilon=1e300))
        turns = np.random.default_rng(9).random((5, m))
        norms = np.linalg.norm(rows, axis=1, keepdims=True)
        radius = mechanism.guarantee.relation.clip_radius or math.inf
        clipped = rows * np.minimum(1, radius / norms)
        wanted = mechanism.modulation.contraction * clipped
        if mechanism.modulation.amplitude:
            waves = np.cos(0.8 * clipped @ directions + 2 * math.pi * turns)
            wanted = wanted + 1.5 / math.sqrt(2) * waves @ directions.T
        unnoised = unlimited.release(rows, directions, rng=Scripted(turns, np.ones_like(rows)))
        np.testing.assert_allclose(unnoised, wanted, rtol=0, atol=1e-14)


class TestContract:
    def test_all(self) -> None:
        check_contract()

    @pytest.mark.parametrize("case", CASES)
    def test_read_only_and_other_layouts(self, case: str) -> None:
        mechanism, m = CASES[case]
        rows = np.arange(6, dtype=np.int64).reshape(2, 3)
        directions = np.asfortranarray(np.eye(3)[:, :m])
        wanted = mechanism.release(rows.astype(float), directions, rng=np.random.default_rng(3))
        rows.setflags(write=False)
        directions.setflags(write=False)
        for given_rows in (rows, rows.tolist(), rows.astype(np.float32), np.asfortranarray(rows)):
            got = mechanism.release(given_rows, directions, rng=np.random.default_rng(3))
            assert got.dtype == np.float64
            np.testing.assert_allclose(got, wanted, rtol=1e-14)

    @pytest.mark.parametrize("modulation", [Modulation(), Modulation(0.2, 0.0, 1.0, 2)])
    def test_plain_modulation_draws_no_phases(self, modulation: Modulation) -> None:
        used, wanted = np.random.default_rng(4), np.random.default_rng(4)
        directions = np.eye(3)[:, : modulation.num_directions]
        mechanism_of(modulation).release(np.zeros((7, 3)), directions, rng=used)
        wanted.standard_normal((7, 3))
        assert used.bit_generator.state == wanted.bit_generator.state

    def test_directions_may_be_left_out_without_modulation(self) -> None:
        a = mechanism_of(Modulation()).release([[1.0, 2.0]], rng=np.random.default_rng(4))
        b = mechanism_of(Modulation()).release([[1.0, 2.0]], np.zeros((2, 0)), rng=np.random.default_rng(4))
        np.testing.assert_array_equal(a, b)

    @pytest.mark.parametrize("case", CASES)
    def test_blocks_are_the_same_release(self, case: str) -> None:
        """More rows than one block holds: byte for byte, phases and noise never repeated."""
        mechanism, m = CASES[case]
        rows, directions = np.tile([0.3, -0.2, 0.1], (50_000, 1)), np.eye(3)[:, :m]
        whole = mechanism.release(rows, directions, rng=np.random.default_rng(3))
        blocks = list(mechanism.release_blocks(rows, directions, rng=np.random.default_rng(3)))
        assert len(blocks) > 1
        np.testing.assert_array_equal(np.concatenate(blocks), whole)
        assert len(np.unique(whole)) > 0.999 * whole.size

    def test_frozen(self) -> None:
        with pytest.raises(FrozenInstanceError):
            mechanism_of().num_releases = 3  # type: ignore[misc]

    def test_one_feature(self, rng: np.random.Generator) -> None:
        mechanism = mechanism_of(Modulation(0.2, 0.5, 1.0, 1))
        assert mechanism.release([[1.0]], [[-1.0]], rng=rng).shape == (1, 1)
