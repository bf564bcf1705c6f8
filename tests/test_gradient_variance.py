"""The gradient's variance is Eq. (5), for m = 1, 2, 3: once exactly, once by sampling.

The formula is written out here from the README's notation, independently of the package's.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from designs import VARIANCES, all_releases
from numpy.typing import NDArray
from scipy import stats

from flwr_modulated import Distance, Guarantee, Mechanism, Modulation, Moments, draw_directions, gradient

FloatArray = NDArray[np.float64]

ALPHA, LAM, OMEGA = 0.2, 1.6, 0.5
ROWS = np.array([[1.0, -0.5, 0.25, 0.8], [-0.6, 1.2, 0.9, -0.4], [0.3, 0.7, -1.1, 0.5]])
LABELS = np.array([0.9, -1.3, 0.4])
BETA = np.array([0.6, -0.2, 0.5, 0.3])


def expected_variance(rows: FloatArray, labels: FloatArray, beta: FloatArray, sigma: float) -> float:
    """E‖G − ∇F‖² by Eq. (5), for directions orthogonal to β."""
    K, d = rows.shape
    residual = rows @ beta - labels
    S_r2 = residual @ residual / K
    b = beta @ rows.T @ residual / K
    tau_x = (rows**2).sum() / K
    size = beta @ beta
    within = S_r2 * (LAM**2 / 2 + d * sigma**2) + 2 * sigma**2 * b + sigma**2 * size * tau_x
    between = size * (LAM**2 * sigma**2 / 2 + (d + 1) * sigma**4)
    return within / (K * (1 - ALPHA) ** 2) + between / (K * (1 - ALPHA) ** 4)


def mechanism_of(m: int, epsilon: float = 3.0) -> Mechanism:
    # At ε = 3 σ is 0.66: noise and modulation both matter in the sum. At ε = 1 σ is 1.5.
    return Mechanism(Modulation(ALPHA, LAM, OMEGA, m), Guarantee(epsilon, 1e-2, Distance(1.0)), 1, "marginal")


def check_exact_variance() -> None:
    """Eq. (5) to 1e-11, with noise and phases replaced by points that integrate degree four exactly.

    Rows are independent, so the variance of their mean is the sum of their variances over K².
    """
    truth = ROWS * (ROWS @ BETA - LABELS)[:, None]
    for m in (1, 2):
        mechanism = mechanism_of(m)
        directions = draw_directions(4, m, orthogonal_to=BETA, rng=np.random.default_rng(8))
        total = 0.0
        for row, label, exact in zip(ROWS, LABELS, truth, strict=True):
            released, weights = all_releases(mechanism, row, directions, VARIANCES)
            gradients = gradients_of(released[:, None, :], np.array([label]), mechanism, directions, BETA)
            np.testing.assert_allclose(weights @ gradients, exact, rtol=0, atol=1e-12)
            total += weights @ ((gradients - exact) ** 2).sum(axis=1)
        wanted = expected_variance(ROWS, LABELS, BETA, mechanism.noise_std)
        assert total / len(ROWS) ** 2 == pytest.approx(wanted, rel=1e-11)


def gradients_of(
    released: FloatArray, labels: FloatArray, mechanism: Mechanism, directions: FloatArray, beta: FloatArray
) -> FloatArray:
    """G of each replication, (R, d), through the package's own moments and debiasing."""
    std, modulation = mechanism.noise_std, mechanism.modulation
    moments = (Moments.from_rows(rows, labels, noise_std=std) for rows in released)
    return np.array([gradient(beta, part.debias(modulation, directions)) for part in moments])


def replicate(rng: np.random.Generator, m: int, epsilon: float, beta: FloatArray) -> tuple[FloatArray, float]:
    """Errors G − ∇F of R = 12 000 independent releases of the same rows, and σ."""
    replications, mechanism = 12_000, mechanism_of(m, epsilon)
    directions = draw_directions(4, m, orthogonal_to=BETA, rng=rng)
    released = mechanism.release(np.tile(ROWS, (replications, 1)), directions, rng=rng)
    gradients = gradients_of(released.reshape(replications, 3, 4), LABELS, mechanism, directions, beta)
    return gradients - (ROWS @ beta - LABELS) @ ROWS / 3, mechanism.noise_std


def check_sampled_variance(rng: np.random.Generator, sizes: tuple[int, ...] = (2,)) -> None:
    """The mean of ‖G − ∇F‖² over R = 12 000 replications is Eq. (5).

    Standard error: the sample standard deviation of ‖G − ∇F‖² over √R, about 1 % of the mean; five of them
    (two-sided 6e-7). Catches σ² off by 10 % (10 of them) and the scale λ/m for λ/√m (16 at m = 2).
    """
    for m in sizes:
        errors, sigma = replicate(rng, m, 3.0, BETA)
        squares = (errors**2).sum(axis=1)
        standard_error = squares.std() / math.sqrt(len(squares))
        assert standard_error < 0.015 * squares.mean()
        assert abs(squares.mean() - expected_variance(ROWS, LABELS, BETA, sigma)) < 5 * standard_error


def check_sampled_mean(rng: np.random.Generator, sizes: tuple[int, ...] = (2,)) -> None:
    """G is unbiased, also at a β that is not orthogonal to the directions.

    Statistic: Hotelling's T² of the mean of G − ∇F over R = 12 000 replications with much noise, χ²₄ under
    the null; rejected below p = 1e-6, above 33. Catches a missing λ²/(2m) term, which is invisible where
    β ⊥ V (T² about 300), and σ² off by 10 % in the debiasing (T² about 120).
    """
    for m in sizes:
        errors, _ = replicate(rng, m, 1.0, np.ones(4))
        mean = errors.mean(axis=0)
        distance = len(errors) * mean @ np.linalg.solve(np.cov(errors.T), mean)
        assert stats.chi2(4).sf(distance) > 1e-6


def test_exact_variance() -> None:
    check_exact_variance()


@pytest.mark.statistical
@pytest.mark.parametrize("m", [1, 2, 3])
def test_sampled_variance(m: int, rng: np.random.Generator) -> None:
    check_sampled_variance(rng, (m,))


@pytest.mark.statistical
@pytest.mark.parametrize("m", [1, 2, 3])
def test_sampled_mean(m: int, rng: np.random.Generator) -> None:
    check_sampled_mean(rng, (m,))
