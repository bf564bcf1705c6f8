"""Estimators against NumPy's own solvers, naive twins and their edge cases. Nothing is sampled but data."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from flwr_modulated import (
    Auto,
    DebiasedMoments,
    GradientDescent,
    InvalidDataError,
    InvalidParameterError,
    Modulation,
    Moments,
    Ridge,
    gradient,
)
from flwr_modulated.estimators import second_moment_noise, with_intercept

FloatArray = NDArray[np.float64]


def data(seed: int, k: int, d: int) -> tuple[FloatArray, FloatArray]:
    """Rows whose singular values lie within a factor of four, and labels."""
    rng = np.random.default_rng(seed)
    left = np.linalg.qr(rng.standard_normal((k, d)))[0]
    right = np.linalg.qr(rng.standard_normal((d, d)))[0]
    rank = min(k, d)
    rows = math.sqrt(k) * left[:, :rank] * rng.uniform(0.5, 2.0, rank) @ right[:rank]
    return rows, rows @ rng.standard_normal(d) + 0.3 * rng.standard_normal(k)


def noiseless(rows: FloatArray, labels: FloatArray) -> DebiasedMoments:
    return Moments.from_rows(rows, labels, noise_std=0).debias()


def noisy(seed: int = 0, d: int = 4, k: int = 30, sigma: float = 1.5) -> DebiasedMoments:
    """Debiased moments with much noise: some eigenvalues are negative."""
    rng = np.random.default_rng(seed)
    released = rng.standard_normal((k, d)) * 0.5 + sigma * rng.standard_normal((k, d))
    modulation = Modulation(0.2, 0.9, 1.0, 1)
    moments = Moments.from_rows(released, rng.standard_normal(k), noise_std=sigma)
    return moments.debias(modulation, np.eye(d)[:, :1])


ROOTS = [Auto(), Ridge(0.0)]


class TestLeastSquares:
    @given(seed=st.integers(0, 2**32 - 1), k=st.integers(8, 60), d=st.integers(1, 8))
    def test_without_noise(self, seed: int, k: int, d: int) -> None:
        rows, labels = data(seed, k, d)
        wanted = np.linalg.lstsq(rows, labels, rcond=None)[0]
        for estimator in ROOTS:
            got = estimator.estimate(noiseless(rows, labels))
            np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-10)

    @pytest.mark.parametrize("estimator", ROOTS, ids=str)
    @pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
    @pytest.mark.parametrize("seed", range(5))
    def test_fewer_rows_than_features(self, estimator: Auto | Ridge, scale: float, seed: int) -> None:
        """K < d: the minimum-norm solution."""
        rows, labels = data(seed, 3, 6)
        got = estimator.estimate(noiseless(scale * rows, labels))
        np.testing.assert_allclose(scale * got, np.linalg.pinv(rows) @ labels, rtol=0, atol=1e-10)

    @pytest.mark.parametrize("estimator", ROOTS, ids=str)
    @pytest.mark.parametrize("k", [20, 5000])
    @pytest.mark.parametrize("seed", range(5))
    def test_dependent_columns(self, estimator: Auto | Ridge, k: int, seed: int) -> None:
        """A column that is a sum of others, a constant zero one: the minimum-norm solution."""
        rows, labels = data(seed, k, 5)
        rows[:, 4] = rows[:, 0] - 0.3 * rows[:, 1]
        rows[:, 3] = 0
        got = estimator.estimate(noiseless(rows, labels))
        np.testing.assert_allclose(got, np.linalg.pinv(rows, rcond=1e-10) @ labels, rtol=0, atol=1e-9)

    @pytest.mark.parametrize("estimator", [*ROOTS, Ridge(1.0), GradientDescent(0.5)], ids=str)
    def test_nothing_but_zeros(self, estimator: Auto | Ridge | GradientDescent) -> None:
        got = estimator.estimate(noiseless(np.zeros((4, 3)), np.ones(4)))
        np.testing.assert_array_equal(got, np.zeros(3))

    @pytest.mark.parametrize("estimator", [*ROOTS, GradientDescent(1.0, num_steps=400)], ids=str)
    def test_one_feature(self, estimator: Auto | Ridge | GradientDescent) -> None:
        got = estimator.estimate(noiseless(np.array([[1.0], [2.0], [-1.0]]), np.array([2.0, 3.0, 1.0])))
        assert got == pytest.approx([7 / 6], abs=1e-12)

    def test_one_row(self) -> None:
        for estimator in ROOTS:
            assert estimator.estimate(noiseless(np.array([[2.0]]), np.array([3.0]))) == pytest.approx([1.5])


def naive_auto(debiased: DebiasedMoments) -> tuple[FloatArray, float]:
    """Eq. (4), one eigenvalue at a time, and τ; with λ²s²/(1−α)² where there is modulation."""
    K, d = debiased.num_samples, debiased.num_features
    s, t = debiased.noise_scale, max(sum(debiased.second_moment[j, j] for j in range(d)), 0.0)
    tau = math.sqrt((s**4 * (d + 1) + 2 * s**2 * t + (debiased.modulation_scale * s) ** 2) / K)
    values, vectors = np.linalg.eig(debiased.second_moment)
    beta = np.zeros(d)
    for w, u in zip(values.real, vectors.real.T, strict=True):
        beta += float(u @ debiased.cross_moment) / math.sqrt(max(w, 0.0) ** 2 + tau**2) * u
    return beta, tau


def check_auto() -> None:
    """Auto is Eq. (4) where noise matters, also where it leaves eigenvalues negative."""
    negative = 0
    for seed in range(8):
        debiased = noisy(seed)
        wanted, tau = naive_auto(debiased)
        np.testing.assert_allclose(Auto().estimate(debiased), wanted, rtol=1e-9)
        assert second_moment_noise(debiased) == pytest.approx(tau, rel=1e-12)
        negative += int((np.linalg.eigvalsh(debiased.second_moment) < 0).any())
    assert negative >= 3
    # By hand: d = 1, K = 4, rows ±1 and σ = 1: Σ̂ = 0, ẑ = 1, t̂ = 0, τ = √(2/4).
    by_hand = Moments.from_rows([[1.0], [1.0], [-1.0], [-1.0]], [1.0, 1.0, -1.0, -1.0], noise_std=1.0)
    assert Auto().estimate(by_hand.debias()) == pytest.approx([math.sqrt(2.0)], rel=1e-14)


class TestAuto:
    def test_formula(self) -> None:
        check_auto()

    def test_noise_shrinks_smoothly(self) -> None:
        """The same moments with more and more noise stated: a shorter β, down to nothing."""
        rows, labels = data(1, 40, 3)
        clean = noiseless(rows, labels)
        lengths = []
        for scale in (0.0, 1e-4, 0.1, 1.0, 10.0, 1e4):
            stated = DebiasedMoments(
                clean.num_samples,
                clean.second_moment,
                clean.cross_moment,
                clean.feature_mean,
                clean.label_mean,
                clean.label_square,
                noise_scale=scale,
            )
            lengths.append(float(np.linalg.norm(Auto().estimate(stated))))
        assert lengths == sorted(lengths, reverse=True)
        assert lengths[1] == pytest.approx(lengths[0], rel=1e-6)
        assert lengths[-1] < 1e-6 * lengths[0]

    def test_fewer_rows_than_features_with_noise(self) -> None:
        """K < d is defined: finite, and no longer than ẑ over the noise scale τ."""
        debiased = noisy(d=8, k=3)
        beta = Auto().estimate(debiased)
        assert np.isfinite(beta).all()
        assert np.linalg.norm(beta) <= np.linalg.norm(debiased.cross_moment) / second_moment_noise(debiased)


def check_ridge() -> None:
    for seed in range(4):
        debiased = noisy(seed)
        for penalty in (0.0, 0.5, 20.0):
            wanted = np.linalg.solve(debiased.second_moment + penalty * np.eye(4), debiased.cross_moment)
            np.testing.assert_allclose(Ridge(penalty).estimate(debiased), wanted, rtol=1e-8)


def check_gradient_descent() -> None:
    """One step is β − (c/λ_max)G, then the projection; many steps are least squares."""
    debiased = noisy(5)
    beta = np.array([0.5, -1.0, 0.25, 2.0])
    largest = np.linalg.eigvals(debiased.second_moment).real.max()
    assert largest > 0
    slope = debiased.second_moment @ beta - debiased.cross_moment
    free = beta - 0.7 / largest * slope
    np.testing.assert_allclose(GradientDescent(0.7, radius=100.0).update(beta, debiased), free, rtol=1e-12)
    short = GradientDescent(0.7, radius=0.1).update(beta, debiased)
    np.testing.assert_allclose(short, 0.1 * free / np.linalg.norm(free), rtol=1e-12)
    rows, labels = data(2, 40, 4)
    got = GradientDescent(1.0, radius=100.0, num_steps=2000).estimate(noiseless(rows, labels))
    np.testing.assert_allclose(got, np.linalg.lstsq(rows, labels, rcond=None)[0], rtol=0, atol=1e-9)


class TestRidge:
    def test_against_solve(self) -> None:
        check_ridge()

    @pytest.mark.parametrize("penalty", [-1.0, math.nan, math.inf, True, "1", None])
    def test_bad_penalty(self, penalty: object) -> None:
        with pytest.raises(InvalidParameterError, match="penalty must be"):
            Ridge(penalty)


class TestGradientDescent:
    def test_steps(self) -> None:
        check_gradient_descent()

    @pytest.mark.parametrize("steps", [1, 3])
    def test_estimate_starts_from_zero(self, steps: int) -> None:
        debiased, beta = noisy(5), np.zeros(4)
        method = GradientDescent(0.7, num_steps=steps)
        for _ in range(steps):
            beta = method.update(beta, debiased)
        np.testing.assert_array_equal(method.estimate(debiased), beta)

    def test_no_positive_eigenvalue_no_step(self) -> None:
        """Where noise leaves nothing to descend on, β stays, but inside the ball."""
        debiased = Moments.from_rows(np.ones((3, 2)), np.ones(3), noise_std=5.0).debias()
        assert np.linalg.eigvalsh(debiased.second_moment)[-1] < 0
        beta = np.array([3.0, 4.0])
        np.testing.assert_array_equal(GradientDescent(0.5).update(beta, debiased), beta)
        np.testing.assert_allclose(GradientDescent(0.5, radius=1.0).update(beta, debiased), [0.6, 0.8])

    def test_inputs_stay(self) -> None:
        beta = np.ones(4)
        beta.setflags(write=False)
        assert GradientDescent(0.5).update(beta, noisy()) is not beta

    @pytest.mark.parametrize(
        ("change", "name"),
        [
            ({"step": 0.0}, "step"),
            ({"step": -1.0}, "step"),
            ({"step": "1"}, "step"),
            ({"radius": 0.0}, "radius"),
            ({"radius": math.inf}, "radius"),
            ({"num_steps": 0}, "num_steps"),
            ({"num_steps": 1.5}, "num_steps"),
        ],
    )
    def test_bad_parameters(self, change: dict[str, object], name: str) -> None:
        with pytest.raises(InvalidParameterError, match=f"{name} must be"):
            GradientDescent(**({"step": 1.0} | change))


class TestGradient:
    def test_is_the_losss_own(self) -> None:
        """Central differences of F(β) = (1/2K) Σ (xᵀβ − y)², exact for a quadratic."""
        rows, labels = data(3, 12, 3)
        beta = np.array([0.4, -1.2, 2.0])

        def loss(at: FloatArray) -> float:
            return float(((rows @ at - labels) ** 2).mean() / 2)

        wanted = [(loss(beta + step) - loss(beta - step)) / 2 for step in np.eye(3)]
        np.testing.assert_allclose(gradient(beta, noiseless(rows, labels)), wanted, rtol=0, atol=1e-12)
        np.testing.assert_allclose(gradient(beta.tolist(), noiseless(rows, labels)), wanted, atol=1e-12)

    @pytest.mark.parametrize("beta", [[1.0], [[1.0, 2.0, 3.0, 4.0]], [1.0, 2.0, 3.0, math.nan], ["a"] * 4])
    def test_bad_coefficients(self, beta: object) -> None:
        with pytest.raises(InvalidDataError, match="beta must"):
            gradient(beta, noisy())
        with pytest.raises(InvalidDataError, match="beta must"):
            GradientDescent(1.0).update(beta, noisy())


@pytest.mark.parametrize("estimator", ROOTS, ids=str)
def test_intercept(estimator: Auto | Ridge) -> None:
    rows, labels = data(4, 30, 3)
    rows, labels = rows + np.array([5.0, -3.0, 0.5]), labels + 7.0
    slopes, intercept = with_intercept(estimator, noiseless(rows, labels))
    wanted = np.linalg.lstsq(np.column_stack([rows, np.ones(30)]), labels, rcond=None)[0]
    np.testing.assert_allclose([*slopes, intercept], wanted, rtol=0, atol=1e-10)
