"""Moments add up, and what debiasing makes of them has the right expectation: exactly, without sampling."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import numpy as np
import pytest
from designs import SECOND_MOMENTS, all_releases
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from flwr_modulated import (
    DebiasedMoments,
    Distance,
    Guarantee,
    InvalidDataError,
    InvalidParameterError,
    Mechanism,
    Modulation,
    Moments,
    ReplaceRecord,
    draw_directions,
    gradient,
)

FloatArray = NDArray[np.float64]

ROWS = np.array([[0.5, -1.0, 0.25, 2.0], [1.5, 0.0, -0.75, -0.5], [-1.0, 2.0, 0.5, 1.0]])
LABELS = np.array([1.0, -2.0, 0.5])
BETA = np.array([0.3, -0.7, 1.1, 0.2])
EPSILONS = (2.0, 6.0, 3.0)  # each row has a budget of its own
MODULATIONS = [Modulation(0.3, 1.3, 0.9, m) for m in range(4)]


def expected_moments(
    modulation: Modulation, directions: FloatArray, chosen: tuple[int, ...] = (0, 1, 2)
) -> Moments:
    """Moments whose averages are the exact expectations over noise and phases.

    Every row is released once for every point of the design: as many times as every other row.
    """
    parts = []
    for i in chosen:
        mechanism = Mechanism(modulation, Guarantee(EPSILONS[i], 1e-3, Distance(1.0)))
        released, _ = all_releases(mechanism, ROWS[i], directions, SECOND_MOMENTS)
        labels = np.full(len(released), LABELS[i])
        parts.append(Moments.from_rows(released, labels, noise_std=mechanism.noise_std))
    return Moments.sum(parts)


def check_debiasing() -> None:
    """E Σ̂ = Σ, E ẑ = z, E G = ∇F to 1e-12, for m = 0 … 3 and rows with noise of their own (Eq. 3)."""
    for modulation in MODULATIONS:
        directions = draw_directions(4, modulation.num_directions, rng=np.random.default_rng(3))
        debiased = expected_moments(modulation, directions).debias(modulation, directions)
        tight = {"rtol": 0, "atol": 1e-12}
        np.testing.assert_allclose(debiased.second_moment, ROWS.T @ ROWS / 3, **tight)
        np.testing.assert_allclose(debiased.cross_moment, LABELS @ ROWS / 3, **tight)
        np.testing.assert_allclose(debiased.feature_mean, ROWS.mean(axis=0), **tight)
        np.testing.assert_allclose(gradient(BETA, debiased), (ROWS @ BETA - LABELS) @ ROWS / 3, **tight)
        assert debiased.label_mean == pytest.approx(LABELS.mean(), abs=1e-12)
        assert debiased.label_square == pytest.approx((LABELS**2).mean(), abs=1e-12)


def check_pool() -> None:
    """Rounds with their own rows, directions and maps pool to the exact moments of all rows."""
    parts = []
    for chosen, modulation, seed in (((0, 1), MODULATIONS[2], 4), ((2,), MODULATIONS[2], 5)):
        directions = draw_directions(4, 2, rng=np.random.default_rng(seed))
        parts.append(expected_moments(modulation, directions, chosen).debias(modulation, directions))
    pooled = DebiasedMoments.pool(parts)
    assert pooled.num_samples == parts[0].num_samples + parts[1].num_samples
    np.testing.assert_allclose(pooled.second_moment, ROWS.T @ ROWS / 3, rtol=0, atol=1e-12)
    np.testing.assert_allclose(pooled.cross_moment, LABELS @ ROWS / 3, rtol=0, atol=1e-12)
    np.testing.assert_allclose(pooled.feature_mean, ROWS.mean(axis=0), rtol=0, atol=1e-12)
    assert pooled.label_mean == pytest.approx(LABELS.mean(), abs=1e-12)
    assert pooled.label_square == pytest.approx((LABELS**2).mean(), abs=1e-12)
    squares = [part.noise_scale**2 for part in parts]
    assert pooled.noise_scale**2 == pytest.approx((2 * squares[0] + squares[1]) / 3, rel=1e-12)


def check_joint_records() -> None:
    """With private labels, every moment read off the joint second moment is exact to 1e-12."""
    scale, d = 2.5, 3
    records = np.column_stack([ROWS[:, :d], LABELS / scale])
    for m in range(3):
        modulation = Modulation(0.3, 1.3, 0.9, m)
        mechanism = Mechanism(modulation, Guarantee(8.0, 1e-2, ReplaceRecord(4.0, scale)))
        directions = draw_directions(d + 1, m, rng=np.random.default_rng(6))
        parts = [
            Moments.from_rows(
                all_releases(mechanism, record, directions, SECOND_MOMENTS)[0],
                None,
                noise_std=mechanism.noise_std,
            )
            for record in records
        ]
        joint = Moments.sum(parts).debias(modulation, directions)
        read = DebiasedMoments.from_joint(joint, label_scale=scale)
        rows = ROWS[:, :d]
        np.testing.assert_allclose(read.second_moment, rows.T @ rows / 3, rtol=0, atol=1e-12)
        np.testing.assert_allclose(read.cross_moment, LABELS @ rows / 3, rtol=0, atol=1e-12)
        np.testing.assert_allclose(read.feature_mean, rows.mean(axis=0), rtol=0, atol=1e-12)
        assert read.label_mean == pytest.approx(LABELS.mean(), abs=1e-12)
        assert read.label_square == pytest.approx((LABELS**2).mean(), abs=1e-12)
        assert read.num_samples == joint.num_samples
        assert read.noise_scale == pytest.approx(mechanism.noise_std / 0.7, rel=1e-12)


class TestExpectations:
    def test_debiasing(self) -> None:
        check_debiasing()

    def test_pool(self) -> None:
        check_pool()

    def test_joint_records(self) -> None:
        check_joint_records()

    def test_scales(self) -> None:
        """s² is the mean of the rows' σ² over (1−α)²; the modulation scale is λ/(1−α)."""
        moments = Moments.from_rows(ROWS, LABELS, noise_std=[1.0, 2.0, 3.0])
        modulation = MODULATIONS[1]
        debiased = moments.debias(modulation, np.eye(4)[:, :1])
        assert debiased.noise_scale == pytest.approx(math.sqrt(14 / 3) / 0.7, rel=1e-14)
        assert debiased.modulation_scale == pytest.approx(1.3 / 0.7, rel=1e-14)
        assert moments.debias(Modulation(0.3, 0.0, 0.9, 1)).modulation_scale == 0

    def test_without_noise_nothing_is_subtracted(self) -> None:
        debiased = Moments.from_rows(ROWS, LABELS, noise_std=0).debias()
        np.testing.assert_allclose(debiased.second_moment, ROWS.T @ ROWS / 3, rtol=1e-15)
        np.testing.assert_array_equal(debiased.second_moment, debiased.second_moment.T)
        assert debiased.noise_scale == 0
        assert debiased.num_samples == 3
        assert debiased.num_features == 4

    def test_centred(self) -> None:
        debiased = Moments.from_rows(ROWS, LABELS, noise_std=0).debias().centred()
        joint = np.cov(np.column_stack([ROWS, LABELS]).T, bias=True)
        np.testing.assert_allclose(debiased.second_moment, joint[:4, :4], atol=1e-14)
        np.testing.assert_allclose(debiased.cross_moment, joint[:4, 4], atol=1e-14)
        assert debiased.label_square == pytest.approx(joint[4, 4], rel=1e-13)
        assert not debiased.feature_mean.any()
        assert debiased.label_mean == 0


def numbers(moments: Moments) -> FloatArray:
    return np.concatenate([np.ravel(getattr(moments, field.name)) for field in fields(moments)])


def check_monoid(table: FloatArray, groups: list[int]) -> None:
    """Whole numbers add without rounding, so every order and grouping gives the same bits."""

    def of(rows: FloatArray) -> Moments:
        return Moments.from_rows(rows[:, :2], rows[:, 2], noise_std=np.abs(rows[:, 3]))

    whole = of(table)
    singles = [of(row[None, :]) for row in table]
    parts = [of(table[np.equal(groups, g)]) for g in sorted(set(groups))]
    for total in (
        Moments.sum(parts),
        Moments.sum(reversed(parts)),
        Moments.sum(iter(singles)),
        Moments.sum(singles[:1]) if len(singles) == 1 else singles[0] + Moments.sum(singles[1:]),
    ):
        np.testing.assert_array_equal(numbers(total), numbers(whole))
    nothing = replace(whole, **{f.name: 0 * getattr(whole, f.name) for f in fields(whole)})
    np.testing.assert_array_equal(numbers(nothing + whole), numbers(whole))
    np.testing.assert_array_equal(numbers(whole + nothing), numbers(whole))
    naive = sum(np.outer(row[:2], row[:2]) for row in table)
    np.testing.assert_array_equal(whole.gram, naive)
    np.testing.assert_array_equal(whole.cross, sum(row[2] * row[:2] for row in table))
    np.testing.assert_array_equal(whole.total, table[:, :2].sum(axis=0))
    assert whole.num_samples == len(table)
    assert (whole.label_sum, whole.label_square_sum) == (table[:, 2].sum(), (table[:, 2] ** 2).sum())
    assert whole.noise_variance_sum == (table[:, 3] ** 2).sum()


def check_monoid_example() -> None:
    table = np.array([[1.0, 2.0, 3.0, 1.0], [-4.0, 5.0, -6.0, 2.0], [7.0, -8.0, 9.0, 4.0]])
    check_monoid(table, [0, 1, 0])


class TestSums:
    @given(st.lists(st.tuples(*[st.integers(-99, 99)] * 4, st.integers(0, 3)), min_size=1, max_size=8))
    def test_monoid(self, rows: list[tuple[int, ...]]) -> None:
        table = np.array(rows, dtype=float)
        check_monoid(table[:, :4], table[:, 4].astype(int).tolist())

    def test_inputs_stay(self) -> None:
        a = Moments.from_rows(ROWS, LABELS, noise_std=1.0)
        before = numbers(a).copy()
        _ = a + a
        a.debias()
        np.testing.assert_array_equal(numbers(a), before)

    @pytest.mark.parametrize("std", [2.0, [2.0], [2.0, 2.0, 2.0], np.full(3, 2)])
    def test_one_noise_or_one_a_row(self, std: object) -> None:
        assert Moments.from_rows(ROWS, LABELS, noise_std=std).noise_variance_sum == 12

    def test_blocks_are_rows(self) -> None:
        """More rows than one block holds, with their own labels and noise; whole numbers, so to the bit."""
        rng = np.random.default_rng(2)
        rows, labels = rng.integers(-9, 10, (40_000, 3)) * 1.0, rng.integers(-9, 10, 40_000) * 1.0
        std = np.arange(40_000) % 5 * 1.0
        whole = Moments.from_rows(rows, labels, noise_std=std)
        np.testing.assert_array_equal(whole.gram, np.einsum("ni,nj->ij", rows, rows))
        np.testing.assert_array_equal(whole.cross, np.einsum("n,ni->i", labels, rows))
        cut = Moments.from_blocks(np.split(rows, [1, 7, 30_000]), labels, noise_std=std)
        np.testing.assert_array_equal(numbers(cut), numbers(whole))

    def test_other_types_do_not_add(self) -> None:
        with pytest.raises(TypeError):
            Moments.from_rows(ROWS, LABELS, noise_std=1.0) + 1  # type: ignore[operator]


class TestCombine:
    """Groups of rows with different noise."""

    def groups(self, *sigmas: float) -> list[DebiasedMoments]:
        rng = np.random.default_rng(1)
        counts = (30, 50, 20)
        return [
            Moments.from_rows(rng.standard_normal((k, 2)), rng.standard_normal(k), noise_std=s).debias()
            for k, s in zip(counts, sigmas, strict=False)
        ]

    def test_equal_noise_pools(self) -> None:
        groups = self.groups(0.7, 0.7, 0.7)
        got, wanted = DebiasedMoments.combine(groups), DebiasedMoments.pool(groups)
        for field in fields(DebiasedMoments):
            np.testing.assert_allclose(getattr(got, field.name), getattr(wanted, field.name), rtol=1e-12)

    def test_weights_are_informations(self) -> None:
        """Each row weighs 1/(s⁴(d+1) + 2s²t + t²(d+1)/d²), t the trace of the pooled second moment."""
        groups = self.groups(0.3, 0.9, 3.0)
        t = max(float(np.trace(DebiasedMoments.pool(groups).second_moment)), 0.0)
        rows = np.repeat([0.3, 0.9, 3.0], [30, 50, 20])
        weights = 1 / (3 * rows**4 + 2 * rows**2 * t + 0.75 * t**2)
        weights /= weights.sum()
        combined = DebiasedMoments.combine(groups)
        shares = [weights[:30].sum(), weights[30:80].sum(), weights[80:].sum()]
        for name in ("second_moment", "cross_moment", "feature_mean", "label_mean", "label_square"):
            wanted = sum(share * getattr(group, name) for share, group in zip(shares, groups, strict=True))
            np.testing.assert_allclose(getattr(combined, name), wanted, rtol=1e-12)
        assert combined.num_samples == 100
        assert combined.noise_scale**2 == pytest.approx(100 * weights**2 @ rows**2, rel=1e-12)
        assert combined.noise_fourth == pytest.approx(100 * weights**2 @ rows**4, rel=1e-12)

    def test_a_useless_group_does_not_hurt(self) -> None:
        first, useless, _ = self.groups(0.3, 1e6, 1.0)
        combined = DebiasedMoments.combine([first, useless])
        np.testing.assert_allclose(combined.cross_moment, first.cross_moment, atol=1e-9)

    def test_neither_noise_nor_signal(self) -> None:
        nothing = Moments.from_rows(np.zeros((2, 2)), np.ones(2), noise_std=0).debias()
        assert not DebiasedMoments.combine([nothing, nothing]).second_moment.any()


class TestBadInput:
    @pytest.mark.parametrize(
        ("std", "error", "message"),
        [
            (-1.0, InvalidParameterError, "noise_std must be finite and at least 0"),
            (math.nan, InvalidParameterError, "noise_std must be finite and at least 0"),
            (None, InvalidParameterError, "noise_std must be finite and at least 0"),
            ([1.0, -1.0, 1.0], InvalidParameterError, "noise_std must be finite and at least 0"),
            ("small", InvalidParameterError, "noise_std must be numeric"),
            ([1.0, 1.0], InvalidDataError, r"noise_std must be a number or have shape \(3,\), got \(2,\)"),
        ],
    )
    def test_noise(self, std: object, error: type[Exception], message: str) -> None:
        with pytest.raises(error, match=message):
            Moments.from_rows(ROWS, LABELS, noise_std=std)

    def test_overflow(self) -> None:
        with pytest.raises(InvalidDataError, match="released must be small enough to square"):
            Moments.from_rows([[1e200, 1.0]], [1.0], noise_std=1.0)
        with pytest.raises(InvalidDataError, match="labels must be small enough to square"):
            Moments.from_rows([[1.0, 1.0]], [1e200], noise_std=1.0)

    @pytest.mark.parametrize("num_labels", [2, 4])
    def test_blocks_and_labels_must_fit(self, num_labels: int) -> None:
        with pytest.raises(InvalidDataError, match="labels must have one entry a released row"):
            Moments.from_blocks([ROWS[:1], ROWS[1:]], np.ones(num_labels), noise_std=1.0)

    def test_no_blocks(self) -> None:
        with pytest.raises(InvalidDataError, match="at least one released row"):
            Moments.from_blocks([], None, noise_std=1.0)

    def test_nothing_to_sum(self) -> None:
        with pytest.raises(InvalidDataError, match="at least one group"):
            Moments.sum([])
        with pytest.raises(InvalidDataError, match="at least one round"):
            DebiasedMoments.pool([])

    def test_different_features(self) -> None:
        parts = [Moments.from_rows(np.ones((2, d)), np.ones(2), noise_std=1.0) for d in (2, 3)]
        with pytest.raises(InvalidDataError, match="same number of features, got 2 and 3"):
            Moments.sum(parts)
        with pytest.raises(InvalidDataError, match="same number of features"):
            DebiasedMoments.pool(part.debias() for part in parts)

    def test_no_rows(self) -> None:
        with pytest.raises(InvalidDataError, match="at least 1 row"):
            Moments.from_rows(np.zeros((0, 3)), np.zeros(0), noise_std=1.0)
        empty = replace(Moments.from_rows(ROWS, LABELS, noise_std=1.0), num_samples=0)
        with pytest.raises(InvalidDataError, match="at least one released row"):
            empty.debias()

    def test_directions(self) -> None:
        moments = Moments.from_rows(ROWS, LABELS, noise_std=1.0)
        with pytest.raises(InvalidParameterError, match="directions must be given"):
            moments.debias(MODULATIONS[1])
        with pytest.raises(InvalidParameterError, match=r"directions must have shape \(4, 1\)"):
            moments.debias(MODULATIONS[1], np.eye(4)[:, :2])
        with pytest.raises(InvalidParameterError, match="orthonormal"):
            moments.debias(MODULATIONS[1], 2 * np.eye(4)[:, :1])

    def test_joint(self) -> None:
        joint = Moments.from_rows(ROWS, None, noise_std=1.0).debias()
        for scale in (0.0, -1.0, math.nan, "1"):
            with pytest.raises(InvalidParameterError, match="label_scale must be"):
                DebiasedMoments.from_joint(joint, label_scale=scale)
        with pytest.raises(InvalidDataError, match="at least one feature beside the label"):
            DebiasedMoments.from_joint(
                Moments.from_rows(ROWS[:, :1], None, noise_std=1.0).debias(), label_scale=1.0
            )
