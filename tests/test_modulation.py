"""The noise-free map, its Lipschitz constant, and the directions."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from flwr_modulated import InvalidParameterError, Modulation, draw_directions
from flwr_modulated.modulation import check_directions

FloatArray = NDArray[np.float64]
FALSE_ALARM = 1e-6


def apply_with(seed: int, modulation: Modulation, row: FloatArray, directions: FloatArray) -> FloatArray:
    """The map of one row with the phases that belong to `seed`."""
    return modulation.apply(row[None, :], directions, rng=np.random.default_rng(seed))[0]


class TestLipschitz:
    @pytest.mark.parametrize(
        ("modulation", "conditional", "marginal"),
        [
            (Modulation(), 1.0, 1.0),
            (Modulation(alpha=0.25), 0.75, 0.75),
            (Modulation(0.2, 0.2, 0.5, 1), 0.9, 0.8),
            (Modulation(0.5, 3.0, 2.0, 4), 3.5, 0.5),
            (Modulation(0.5, 3.0, 2.0, 0), 0.5, 0.5),
            (Modulation(0.5, 0.0, 2.0, 4), 0.5, 0.5),
            (Modulation(0.5, 3.0, 0.0, 4), 0.5, 0.5),
        ],
    )
    def test_values_by_hand(self, modulation: Modulation, conditional: float, marginal: float) -> None:
        assert modulation.lipschitz() == pytest.approx(conditional, rel=1e-15)
        assert modulation.lipschitz("marginal") == pytest.approx(marginal, rel=1e-15)

    @given(
        alpha=st.floats(0, 0.99),
        amplitude=st.floats(0, 100),
        frequency=st.floats(0, 100),
        m=st.integers(0, 3),
        seed=st.integers(0, 2**32 - 1),
        row=st.lists(st.floats(-1e3, 1e3, allow_subnormal=True), min_size=3, max_size=3),
        log_distance=st.floats(-12, 3),
    )
    def test_no_pair_is_further_apart(
        self,
        alpha: float,
        amplitude: float,
        frequency: float,
        m: int,
        seed: int,
        row: list[float],
        log_distance: float,
    ) -> None:
        """With the same phases; the slack is the rounding of inputs up to 1e3 times ω."""
        modulation = Modulation(alpha, amplitude, frequency, m)
        rng = np.random.default_rng(seed)
        directions = draw_directions(3, m, rng=rng)
        x = np.array(row)
        step = rng.standard_normal(3)
        other = x + 10.0**log_distance * step / np.linalg.norm(step)
        apart = apply_with(seed, modulation, x, directions) - apply_with(seed, modulation, other, directions)
        rounding = 1e-12 * (1 + amplitude * (1 + frequency))
        bound = modulation.lipschitz() * np.linalg.norm(x - other)
        assert np.linalg.norm(apart) <= bound * (1 + 1e-12) + rounding

    def test_is_attained(self) -> None:
        check_lipschitz_is_attained()


def check_lipschitz_is_attained() -> None:
    """A pair along v₁ where its cosine is steepest differs by L times its distance, neither more nor less.

    A chord of length h is flatter than the tangent by (ωh)²/24, here below 1e-10.
    """
    h, omega = 1e-4, 0.5
    for m in (1, 2, 3):
        modulation = Modulation(0.2, 0.8, omega, m)
        directions = np.eye(3)[:, :m]
        for seed in range(3):
            turns = np.random.default_rng(seed).random((1, m))
            # cos(ωu + φ) is steepest upwards where ωu + φ = −π/2.
            centre = (-0.5 * math.pi - 2 * math.pi * turns[0, 0]) / omega
            low, high = (np.array([centre + s * h / 2, 0.3, -0.2]) for s in (-1, 1))
            apart = np.linalg.norm(
                apply_with(seed, modulation, high, directions) - apply_with(seed, modulation, low, directions)
            )
            assert apart / h == pytest.approx(0.8 + 0.4 / math.sqrt(m), rel=1e-8)
            assert modulation.lipschitz() == pytest.approx(apart / h, rel=1e-8)


def check_cosine_is_independent_of_the_row(rng: np.random.Generator) -> None:
    """The cosine term's law is that of λ cos(U)/√m whatever the row, which marginal sensitivity rests on.

    Statistic: one-sample Kolmogorov-Smirnov against the arcsine law 1 − arccos(w)/π, n = 100 000, for four
    rows; rejected below p = 1e-6/4, which is a distance of 2.8/√n = 0.009. Catches phases on a half
    circle (distance 0.5) or a third of the circle.
    """
    n, modulation = 100_000, Modulation(0.3, 2.0, 1.7, 2)
    directions = np.eye(3)[:, :2]
    for scale in (0.0, 0.4, 3.0, 1e6):
        rows = np.tile(scale * np.array([1.0, -2.0, 0.5]), (n, 1))
        term = modulation.apply(rows, directions, rng=rng) - modulation.contraction * rows
        waves = np.clip(term[:, 0] * math.sqrt(2) / 2.0, -1.0, 1.0)
        assert np.abs(term[:, 2]).max() <= 1e-9 * (1 + scale)
        law = stats.kstest(waves, lambda w: 1 - np.arccos(w) / np.pi)
        assert law.pvalue > FALSE_ALARM / 4


class TestMap:
    def test_cosine_is_independent_of_the_row(self, rng: np.random.Generator) -> None:
        check_cosine_is_independent_of_the_row(rng)

    @pytest.mark.parametrize("m", [0, 1, 2, 3])
    def test_against_a_loop(self, m: int, rng: np.random.Generator) -> None:
        modulation = Modulation(0.3, 1.1, 0.7, m)
        directions = draw_directions(4, m, rng=rng)
        rows = rng.standard_normal((5, 4))
        turns = np.random.default_rng(7).random((5, m)) if m else None
        wanted = np.empty_like(rows)
        for i in range(5):
            wanted[i] = 0.7 * rows[i]
            for j in range(m):
                phase = 2 * math.pi * turns[i, j]
                wave = math.cos(0.7 * float(rows[i] @ directions[:, j]) + phase)
                wanted[i] += 1.1 / math.sqrt(m) * wave * directions[:, j]
        mapped = modulation.apply(rows, directions, rng=np.random.default_rng(7))
        np.testing.assert_allclose(mapped, wanted, rtol=0, atol=1e-14)

    @pytest.mark.parametrize("m", [0, 1, 2, 3])
    def test_second_moment_over_all_phases(self, m: int, rng: np.random.Generator) -> None:
        """Three equally spaced phases integrate products of two cosines exactly."""
        modulation = Modulation(0.3, 1.1, 0.7, m)
        v = draw_directions(4, m, rng=rng)
        u = rng.standard_normal(m)
        grid = np.array(list(product(range(3), repeat=m))) / 3
        waves = np.cos(u + 2 * math.pi * grid) @ v.T * (1.1 / math.sqrt(max(m, 1)))
        wanted = waves.T @ waves / len(waves)
        np.testing.assert_allclose(modulation.second_moment(v), wanted, rtol=0, atol=1e-15)

    def test_plain_has_no_second_moment(self) -> None:
        np.testing.assert_array_equal(Modulation(num_directions=2).second_moment(np.eye(3)[:, :2]), 0)

    @pytest.mark.parametrize(
        ("change", "name"),
        [
            ({"alpha": 1.0}, "alpha"),
            ({"alpha": -0.1}, "alpha"),
            ({"alpha": math.nan}, "alpha"),
            ({"alpha": True}, "alpha"),
            ({"alpha": "0.1"}, "alpha"),
            ({"amplitude": -1.0}, "amplitude"),
            ({"amplitude": math.inf}, "amplitude"),
            ({"frequency": -1.0}, "frequency"),
            ({"frequency": None}, "frequency"),
            ({"num_directions": -1}, "num_directions"),
            ({"num_directions": 1.0}, "num_directions"),
            ({"num_directions": True}, "num_directions"),
        ],
    )
    def test_bad_parameters(self, change: dict[str, object], name: str) -> None:
        with pytest.raises(InvalidParameterError, match=f"{name} must be"):
            Modulation(**change)

    def test_bad_sensitivity(self) -> None:
        with pytest.raises(
            InvalidParameterError, match="sensitivity must be one of 'conditional', 'marginal'"
        ):
            Modulation().lipschitz("phases")


def check_directions_are_uniform(rng: np.random.Generator) -> None:
    """Frames are uniform on the orthonormal frames (orthogonal to β, where it is given).

    Statistic: Kolmogorov-Smirnov of one coordinate u of each column, n = 4000. On the unit sphere in D
    dimensions (D = d − 1 with β) (u+1)/2 is Beta((D−1)/2, (D−1)/2): uniform for D = 3. Six columns, each
    rejected below 1e-6/6, which is a distance of 2.9/√n = 0.045. Catches a QR step without fixed signs:
    the last column of a square frame then prefers one side.
    """
    n = 4000
    square = np.array([draw_directions(3, 3, rng=rng)[0] for _ in range(n)])
    beta = [0.0, 0.0, 0.0, 7.0]
    around = np.array([draw_directions(4, 3, orthogonal_to=beta, rng=rng)[0] for _ in range(n)])
    for frames in (square, around):
        for column in frames.T:
            assert stats.kstest((column + 1) / 2, stats.beta(1, 1).cdf).pvalue > FALSE_ALARM / 6


class TestDrawDirections:
    @given(
        d=st.integers(1, 8),
        data=st.data(),
        scale=st.sampled_from([1e-320, 1e-200, 1.0, 1e200, 1.7e308]),
        seed=st.integers(0, 2**32 - 1),
    )
    def test_orthonormal_and_orthogonal(self, d: int, data: st.DataObject, scale: float, seed: int) -> None:
        rng = np.random.default_rng(seed)
        beta = scale * rng.uniform(-1, 1, d) if data.draw(st.booleans()) else None
        m = data.draw(st.integers(0, d if beta is None else d - 1))
        v = draw_directions(d, m, orthogonal_to=beta, rng=rng)
        assert v.shape == (d, m)
        np.testing.assert_allclose(v.T @ v, np.eye(m), rtol=0, atol=1e-13)
        if beta is not None:
            largest = np.abs(beta).max()
            np.testing.assert_allclose(beta / largest @ v, 0, atol=1e-13)
        check_directions(v, num_features=d, num_directions=m)

    def test_uniform(self, rng: np.random.Generator) -> None:
        check_directions_are_uniform(rng)

    def test_one_dimension_has_two_frames(self, rng: np.random.Generator) -> None:
        """+1 and −1 equally often: Binomial(200, 1/2), outside [65, 135] with probability 3e-7."""
        signs = np.array([draw_directions(1, 1, rng=rng)[0, 0] for _ in range(200)])
        np.testing.assert_array_equal(np.abs(signs), 1)
        assert 65 <= (signs > 0).sum() <= 135

    def test_zero_coefficients_leave_all_dimensions(self, rng: np.random.Generator) -> None:
        assert draw_directions(2, 2, orthogonal_to=np.zeros(2), rng=rng).shape == (2, 2)

    def test_only_the_given_stream(self) -> None:
        first, again, other = (draw_directions(5, 2, rng=np.random.default_rng(s)) for s in (1, 1, 2))
        np.testing.assert_array_equal(first, again)
        assert not np.allclose(first, other)

    @pytest.mark.parametrize(
        ("d", "m", "beta", "message"),
        [
            (3, 3, [1.0, 0.0, 0.0], r"num_directions must be at most 2.*orthogonal to the non-zero"),
            (3, 4, None, r"num_directions must be at most 3 for num_features=3, got 4"),
            (3, 4, [0.0, 0.0, 0.0], r"num_directions must be at most 3"),
            (1, 1, [2.0], r"num_directions must be at most 0 .* lower num_directions"),
            (3, -1, None, "num_directions must be in"),
            (0, 0, None, "num_features must be in"),
            (True, 0, None, "num_features must be a whole number"),
            (3, 1.0, None, "num_directions must be a whole number"),
            (3, 1, [1.0, math.nan, 0.0], "orthogonal_to must be finite"),
            (3, 1, [1.0, math.inf, 0.0], "orthogonal_to must be finite"),
            (3, 1, [1.0, 0.0], r"orthogonal_to must have shape \(3,\)"),
            (3, 1, ["a", "b", "c"], "orthogonal_to must be numeric"),
        ],
    )
    def test_bad_arguments(self, d: int, m: int, beta: object, message: str) -> None:
        with pytest.raises(InvalidParameterError, match=message):
            draw_directions(d, m, orthogonal_to=beta, rng=np.random.default_rng(0))


def check_bad_directions_are_refused() -> None:
    """A frame that would raise the true sensitivity is refused."""
    good = np.eye(3)[:, :2]
    bad = {
        "scaled": 1000 * good,
        "a little longer": (1 + 1e-8) * good,
        "repeated": good[:, [0, 0]],
        "oblique": np.column_stack([good[:, 0], [1e-8, 1.0, 0.0]]),
        "huge": 1e300 * good,
        "NaN": np.where(good == 1, np.nan, good),
        "infinite": np.where(good == 1, np.inf, good),
        "transposed": good.T,
        "one column": good[:, :1],
        "flat": good.ravel(),
        "text": [["a", "b"], ["c", "d"], ["e", "f"]],
        "ragged": [[1.0, 0.0], [0.0], [0.0, 1.0]],
        "nothing": None,
    }
    for directions in bad.values():
        with pytest.raises(InvalidParameterError, match="directions must"):
            check_directions(directions, num_features=3, num_directions=2)


class TestCheckDirections:
    def test_bad(self) -> None:
        check_bad_directions_are_refused()

    def test_good_to_rounding(self) -> None:
        good = np.eye(3)[:, :2] * (1 + 1e-10)
        np.testing.assert_array_equal(check_directions(good, num_features=3, num_directions=2), good)
        assert check_directions(np.zeros((3, 0)), num_features=3, num_directions=0).shape == (3, 0)
