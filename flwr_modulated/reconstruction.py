"""Attacks that reconstruct one row from its release, and the errors of the two that matter.

What the attacker knows, and the symbols, are those of :mod:`flwr_modulated.information`, which has
the bounds on them. Errors are mean squares per feature, in squared feature units.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike

from ._typing import FloatArray
from ._validate import check_int, check_matrix, check_real, check_vector
from .errors import InvalidParameterError
from .information import cosine_noise_log_density, frame_of, label_information
from .modulation import Modulation, check_directions

__all__ = [
    "average_of_releases",
    "inversion_error",
    "invert",
    "likelihood_known_phases",
    "likelihood_secret_phases",
    "prior_error",
    "prior_least_squares",
]


def invert(released: ArrayLike, *, modulation: Modulation) -> FloatArray:
    """The unbiased attack x̂ = g̃/κ.

    Parameters
    ----------
    released : array_like of shape (n, d)
        Releases, one a row.
    modulation : Modulation
        The client map.

    Returns
    -------
    ndarray of shape (n, d)
        Unbiased over noise and secret phases; :func:`inversion_error` is its error.
    """
    return check_matrix("released", released) / modulation.contraction


def inversion_error(*, num_features: int, modulation: Modulation, noise_std: float) -> float:
    """Mean squared error per feature of :func:`invert`: σ²/κ² + λ²/(2dκ²).

    Parameters
    ----------
    num_features : int
        d.
    modulation : Modulation
        The client map.
    noise_std : float
        σ ≥ 0, in units of the released rows.

    Returns
    -------
    float
        In squared feature units.
    """
    d = check_int("num_features", num_features, low=1)
    sigma = check_real("noise_std", noise_std, low=0)
    return (sigma**2 + modulation.effective_amplitude**2 / (2 * d)) / modulation.contraction**2


def average_of_releases(
    modulation: Modulation, noise_std: float, num_releases: int
) -> tuple[Modulation, float]:
    """The single release that the average of T releases of one row amounts to.

    Parameters
    ----------
    modulation : Modulation
        The client map, with fresh phases in each release.
    noise_std : float
        σ ≥ 0 of each release.
    num_releases : int
        T ≥ 1.

    Returns
    -------
    modulation : Modulation
        With amplitude λ/√T: the cosines' variance falls like the noise's.
    noise_std : float
        σ/√T.
    """
    root = math.sqrt(check_int("num_releases", num_releases, low=1))
    averaged = replace(modulation, amplitude=modulation.amplitude / root)
    return averaged, check_real("noise_std", noise_std, low=0) / root


def prior_least_squares(
    released: ArrayLike,
    directions: ArrayLike,
    *,
    modulation: Modulation,
    noise_std: float,
    prior_mean: ArrayLike,
    prior_covariance: ArrayLike,
    labels: ArrayLike | None = None,
    beta: ArrayLike | None = None,
    residual_std: float | None = None,
) -> FloatArray:
    """Best linear guess of a row from its release, its label and what is known of the population.

    Parameters
    ----------
    released : array_like of shape (n, d)
        Releases, one a row.
    directions, modulation, noise_std
        As in :func:`fisher_information`.
    prior_mean : array_like of shape (d,)
        Mean row of the population.
    prior_covariance : array_like of shape (d, d)
        Its covariance, positive definite.
    labels : array_like of shape (n,), optional
        Public labels; with them give `beta` and `residual_std`.
    beta : array_like of shape (d,), optional
        Coefficients.
    residual_std : float, optional
        σ_y > 0, in label units.

    Returns
    -------
    ndarray of shape (n, d)
        Biased towards the population, hence able to beat the bound on unbiased attackers.
        For Gaussian rows without modulation nothing has a smaller error.

    Raises
    ------
    InvalidDataError, InvalidParameterError
        If an argument is out of range or shapes do not fit.
    """
    g = check_matrix("released", released)
    mean = check_vector("prior_mean", prior_mean, length=g.shape[1])
    precision, posterior = _posterior(directions, modulation, noise_std, prior_covariance, beta, residual_std)
    pull = modulation.contraction * (g - modulation.contraction * mean) @ precision
    if labels is not None:
        if beta is None or residual_std is None:
            raise InvalidParameterError("beta and residual_std must be given together with labels")
        b = check_vector("beta", beta, length=g.shape[1])
        y = check_vector("labels", labels, length=g.shape[0])
        pull = pull + np.outer(y - float(mean @ b), b) / residual_std**2
    elif beta is not None:
        raise InvalidParameterError("labels must be given together with beta and residual_std")
    return np.asarray(mean + pull @ posterior)


def prior_error(
    directions: ArrayLike,
    *,
    modulation: Modulation,
    noise_std: float,
    prior_covariance: ArrayLike,
    beta: ArrayLike | None = None,
    residual_std: float | None = None,
) -> float:
    """Mean squared error per feature of :func:`prior_least_squares`, on rows of that population.

    Parameters
    ----------
    directions, modulation, noise_std, prior_covariance, beta, residual_std
        As in :func:`prior_least_squares`.

    Returns
    -------
    float
        (1/d) tr (P⁻¹ + κ²N⁻¹ + ββᵀ/σ_y²)⁻¹ with P the prior covariance and N = σ²I + (λ²/2m)VVᵀ,
        in squared feature units.

    Raises
    ------
    InvalidDataError, InvalidParameterError
        If an argument is out of range or shapes do not fit.
    """
    posterior = _posterior(directions, modulation, noise_std, prior_covariance, beta, residual_std)[1]
    return float(np.trace(posterior)) / len(posterior)


def _posterior(
    directions: ArrayLike,
    modulation: Modulation,
    noise_std: float,
    prior_covariance: ArrayLike,
    beta: ArrayLike | None,
    residual_std: float | None,
) -> tuple[FloatArray, FloatArray]:
    # N⁻¹ and the posterior covariance of a row.
    v = frame_of(directions, modulation)
    sigma = check_real("noise_std", noise_std, low=0, low_open=True)
    prior = check_matrix("prior_covariance", prior_covariance, num_columns=len(v))
    precision = np.linalg.inv(sigma**2 * np.eye(len(v)) + modulation.second_moment(v))
    known = np.linalg.inv(prior) + label_information(beta, residual_std, len(v))
    return np.asarray(precision), np.asarray(np.linalg.inv(known + modulation.contraction**2 * precision))


def likelihood_known_phases(
    released: ArrayLike, directions: ArrayLike, phases: ArrayLike, *, modulation: Modulation
) -> FloatArray:
    """Maximum likelihood attack of one who knows the phases: the map undone exactly.

    Parameters
    ----------
    released : array_like of shape (n, d)
        Releases, one a row.
    directions : array_like of shape (d, m)
        Orthonormal columns.
    phases : array_like of shape (n, m)
        The phases of each row, in radians.
    modulation : Modulation
        The client map.

    Returns
    -------
    ndarray of shape (n, d)
        x̂ with zero residual. Where λω/√m > κ the map folds and several rows fit equally
        well; one of them is returned.

    Raises
    ------
    InvalidDataError, InvalidParameterError
        If shapes do not fit.
    """
    g = check_matrix("released", released)
    v = check_directions(directions, num_features=g.shape[1], num_directions=modulation.num_directions)
    phi = check_matrix("phases", phases, num_columns=v.shape[1]) if v.shape[1] else np.zeros((len(g), 0))
    kappa, omega = modulation.contraction, modulation.frequency
    rho = modulation.effective_amplitude / np.sqrt(max(modulation.num_directions, 1))
    target = g @ v
    # κt + ρ cos(ωt + φ) = target has a root between (target − ρ)/κ and (target + ρ)/κ.
    low, high = (target - rho) / kappa, (target + rho) / kappa
    for _ in range(60):
        middle = 0.5 * (low + high)
        above = kappa * middle + rho * np.cos(omega * middle + phi) > target
        low, high = np.where(above, low, middle), np.where(above, middle, high)
    return np.asarray(g / kappa + (0.5 * (low + high) - target / kappa) @ v.T)


def likelihood_secret_phases(
    released: ArrayLike,
    directions: ArrayLike,
    *,
    modulation: Modulation,
    noise_std: float,
    rng: np.random.Generator,
) -> FloatArray:
    """Maximum likelihood attack of one who does not know the phases.

    Parameters
    ----------
    released : array_like of shape (n, d)
        Releases, one a row.
    directions, modulation, noise_std
        As in :func:`fisher_information`.
    rng : numpy.random.Generator
        Breaks the tie between the two modes that the likelihood has along a direction once ρ is
        large against σ.

    Returns
    -------
    ndarray of shape (n, d)
        g̃/κ, moved along each direction onto a mode of the density of the added noise. Its error
        is never below that of :func:`invert`, which for a location family with one observation
        is the best attack whose error does not depend on the row.

    Raises
    ------
    InvalidDataError, InvalidParameterError
        If an argument is out of range or shapes do not fit.
    """
    g = check_matrix("released", released)
    v = check_directions(directions, num_features=g.shape[1], num_directions=modulation.num_directions)
    sigma = check_real("noise_std", noise_std, low=0, low_open=True)
    rho = modulation.effective_amplitude / np.sqrt(max(modulation.num_directions, 1))
    grid = np.linspace(0.0, rho, 4097)
    mode = grid[np.argmax(cosine_noise_log_density(grid, rho, sigma))]
    signs = rng.integers(0, 2, size=(len(g), v.shape[1])) * 2 - 1
    return np.asarray((g - mode * signs @ v.T) / modulation.contraction)
