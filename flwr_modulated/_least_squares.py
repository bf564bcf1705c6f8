"""The unregularised moment estimator Σ̂⁻¹ẑ and its sandwich covariance, in standardised units."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import linalg

from ._typing import FloatArray
from .estimators import second_moment_noise
from .moments import DebiasedMoments
from .sample import Sample


@dataclass(frozen=True, slots=True, eq=False)
class LeastSquares:
    """What inference needs of a fit; the intercept, where fitted, comes last."""

    moments: DebiasedMoments
    solution: FloatArray  # (p,)
    covariance: FloatArray  # (p, p); NaN where there is none
    spectrum: FloatArray  # (d,) eigenvalues of Σ̂, about the mean row with an intercept
    noise_level: float  # τ of the same matrix


def fit_least_squares(sample: Sample, fit_intercept: bool) -> LeastSquares:
    """Solve for the coefficients and, where Σ̂ is positive definite, their covariance."""
    moments = sample.moments()
    about_mean = moments.centred() if fit_intercept else moments
    spectrum = linalg.eigvalsh(about_mean.second_moment)
    bread, right = moments.second_moment, moments.cross_moment
    if fit_intercept:
        mean = moments.feature_mean
        bread = np.block([[bread, mean[:, None]], [mean, 1.0]])  # the constant carries no noise
        right = np.append(right, moments.label_mean)
    # A least-norm solution: singular without noise means collinear features.
    solution = linalg.lstsq(bread, right)[0]
    covariance = np.full(bread.shape, np.nan)
    if is_definite(spectrum) and not (sample.grouped and sample.effective_units <= 1):
        covariance = _sandwich(sample, bread, solution)
    return LeastSquares(moments, solution, covariance, spectrum, second_moment_noise(about_mean))


def is_definite(spectrum: FloatArray) -> bool:
    """Whether the smallest of ascending eigenvalues is positive beyond rounding."""
    return bool(spectrum[0] > len(spectrum) * np.finfo(np.float64).eps * abs(spectrum[-1]))


def _sandwich(sample: Sample, bread: FloatArray, solution: FloatArray) -> FloatArray:
    p = len(solution)
    vector = np.zeros(sample.num_features + 2)
    vector[:p] = solution
    vector[-1] = -1.0
    psi = sample.products(vector)[:, :p]
    # The scores sum to zero at the solution: their sum of squares is centred already.
    half = np.linalg.solve(bread, psi.T @ psi)
    covariance = np.linalg.solve(bread, half.T) / sample.weights.sum() ** 2
    if sample.grouped:
        g = sample.effective_units
        covariance *= g / (g - 1.0)
    return np.asarray(0.5 * (covariance + covariance.T))
