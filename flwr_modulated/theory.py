"""Closed forms: gradient variance (5), convergence, and what no estimator can beat.

Pure functions of numbers and matrices; nothing is sampled. Features, labels and coefficients
are in the units of the (standardised) data, K is the number of rows and κ = 1 − α.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from ._validate import check_int, check_matrix, check_real, check_vector
from .modulation import Modulation

__all__ = [
    "convergence_bound",
    "convergence_floor",
    "convergence_floor_as_printed",
    "gradient_variance",
    "gradient_variance_bound",
    "least_squares_floor",
    "private_least_squares_floor",
]


def gradient_variance(
    features: ArrayLike,
    labels: ArrayLike,
    beta: ArrayLike,
    *,
    modulation: Modulation,
    noise_std: float,
) -> float:
    """Total variance E‖G − ∇F(β)‖² of one gradient estimate, given the rows (Eq. 5).

    Parameters
    ----------
    features : array_like of shape (K, d)
        The rows x that are released.
    labels : array_like of shape (K,)
        Their labels y.
    beta : array_like of shape (d,)
        Where the gradient is taken; the directions are orthogonal to it.
    modulation : Modulation
        The client map.
    noise_std : float
        σ ≥ 0, in units of the released rows.

    Returns
    -------
    float
        In squared units of label × feature. It falls as 1/K.

    Raises
    ------
    InvalidDataError
        If features, labels and beta do not fit together.
    InvalidParameterError
        If `noise_std` is negative.

    References
    ----------
    arXiv:2605.07233; the scale of the cosines is λ/√m, hence no m here.

    Examples
    --------
    >>> gradient_variance([[1.0], [2.0]], [1.0, 2.0], [1.0], modulation=Modulation(), noise_std=1.0)
    2.25
    """
    x = check_matrix("features", features)
    y = check_vector("labels", labels, length=x.shape[0])
    b = check_vector("beta", beta, length=x.shape[1])
    residual = x @ b - y
    return _variance(
        num_samples=x.shape[0],
        num_features=x.shape[1],
        residual_square=float(residual @ residual) / x.shape[0],
        fit_residual=float((x @ b) @ residual) / x.shape[0],
        feature_square=float(np.sum(x**2)) / x.shape[0],
        beta_square=float(b @ b),
        modulation=modulation,
        noise_std=noise_std,
    )


def gradient_variance_bound(
    *,
    num_samples: int,
    num_features: int,
    feature_radius: float,
    label_radius: float,
    beta_radius: float,
    modulation: Modulation,
    noise_std: float,
) -> float:
    """Uniform bound σ̄_g² on (5) over ‖x‖ ≤ R, |y| ≤ M and ‖β‖ ≤ B.

    Parameters
    ----------
    num_samples, num_features : int
        K and d.
    feature_radius, label_radius, beta_radius : float
        R, M and B, all at least 0.
    modulation : Modulation
        The client map.
    noise_std : float
        σ ≥ 0, in units of the released rows.

    Returns
    -------
    float
        In squared units of label × feature. It already contains the factor 1/K.

    Raises
    ------
    InvalidParameterError
        If an argument is out of range.
    """
    r = check_real("feature_radius", feature_radius, low=0)
    m = check_real("label_radius", label_radius, low=0)
    b = check_real("beta_radius", beta_radius, low=0)
    worst = r * b + m
    return _variance(
        num_samples=check_int("num_samples", num_samples, low=1),
        num_features=check_int("num_features", num_features, low=1),
        residual_square=worst**2,
        fit_residual=b * r * worst,
        feature_square=r**2,
        beta_square=b**2,
        modulation=modulation,
        noise_std=noise_std,
    )


def _variance(
    *,
    num_samples: int,
    num_features: int,
    residual_square: float,
    fit_residual: float,
    feature_square: float,
    beta_square: float,
    modulation: Modulation,
    noise_std: float,
) -> float:
    d, kappa = num_features, modulation.contraction
    s2 = check_real("noise_std", noise_std, low=0) ** 2
    lam2 = modulation.effective_amplitude**2
    linear = residual_square * (lam2 / 2 + d * s2) + 2 * s2 * fit_residual + s2 * beta_square * feature_square
    square = beta_square * (lam2 * s2 / 2 + (d + 1) * s2**2)
    return (linear / kappa**2 + square / kappa**4) / num_samples


def convergence_floor(*, smoothness: float, variance_bound: float) -> float:
    """Term σ̄_g²/L_F of the convergence bound that more rounds do not reduce.

    Parameters
    ----------
    smoothness : float
        L_F > 0, the largest eigenvalue of the second moment, in squared feature units.
    variance_bound : float
        σ̄_g² ≥ 0 of :func:`gradient_variance_bound`, which already contains 1/K.

    Returns
    -------
    float
        Excess loss, in squared label units.

    Raises
    ------
    InvalidParameterError
        If an argument is out of range.
    """
    smoothness = check_real("smoothness", smoothness, low=0, low_open=True)
    return check_real("variance_bound", variance_bound, low=0) / smoothness


def convergence_floor_as_printed(*, smoothness: float, variance_bound: float, num_samples: int) -> float:
    """The floor as the paper prints it, σ̄_g²/(2 L_F K). It is **not** a bound.

    σ̄_g² already contains 1/K, so this divides by K twice. Kept for the record; a test shows
    runs above it. Use :func:`convergence_floor`.

    Parameters
    ----------
    smoothness, variance_bound : float
        As in :func:`convergence_floor`.
    num_samples : int
        K.

    Returns
    -------
    float
        In squared label units.

    Raises
    ------
    InvalidParameterError
        If an argument is out of range.
    """
    floor = convergence_floor(smoothness=smoothness, variance_bound=variance_bound)
    return floor / (2 * check_int("num_samples", num_samples, low=1))


def convergence_bound(
    *, num_rounds: int, initial_distance: float, smoothness: float, variance_bound: float
) -> float:
    """Bound on E F(β̄_T) − F* for averaged projected gradient steps of size 1/L_F.

    Parameters
    ----------
    num_rounds : int
        T ≥ 1; β̄_T averages β₁ … β_T.
    initial_distance : float
        ‖β₀ − β*‖ ≥ 0, in coefficient units.
    smoothness, variance_bound : float
        L_F and σ̄_g², as in :func:`convergence_floor`.

    Returns
    -------
    float
        L_F‖β₀ − β*‖²/(2T) + σ̄_g²/L_F, in squared label units.

    Raises
    ------
    InvalidParameterError
        If an argument is out of range.

    Notes
    -----
    One projected step with unbiased G gives F(β_{t+1}) − F* ≤ (L_F/2)(‖β_t − β*‖² − ‖β_{t+1} − β*‖²)
    + ⟨∇F − G, β_{t+1} − β*⟩, whose last term has expectation at most σ̄_g²/L_F because the
    projection is non-expansive; average over t and use convexity.
    """
    rounds = check_int("num_rounds", num_rounds, low=1)
    distance = check_real("initial_distance", initial_distance, low=0)
    floor = convergence_floor(smoothness=smoothness, variance_bound=variance_bound)
    return smoothness * distance**2 / (2 * rounds) + floor


def least_squares_floor(*, num_samples: int, num_features: int, residual_variance: float) -> float:
    """Lower bound on the worst-case excess risk of any estimator **without** privacy.

    Parameters
    ----------
    num_samples, num_features : int
        K ≥ d.
    residual_variance : float
        E e² ≥ 0, in squared label units.

    Returns
    -------
    float
        E e² · d / (K − d + 1), of E (β̂ − β)ᵀΣ(β̂ − β), in squared label units. For Gaussian
        rows least squares has E e² · d / (K − d − 1), which is minimax.

    Raises
    ------
    InvalidParameterError
        If an argument is out of range.

    References
    ----------
    Mourtada (2022), *Exact minimax risk for linear least squares, and the lower tail of sample
    covariance matrices*, arXiv:1912.10754.
    """
    d = check_int("num_features", num_features, low=1)
    k = check_int("num_samples", num_samples, low=d, hint="at least one row a feature is needed")
    return check_real("residual_variance", residual_variance, low=0) * d / (k - d + 1)


def private_least_squares_floor(
    second_moment: ArrayLike,
    beta: ArrayLike,
    residual_variance: float,
    *,
    num_samples: int,
    modulation: Modulation,
    noise_std: float,
) -> float:
    """Asymptotic lower bound on the excess risk of any estimator from the releases.

    Parameters
    ----------
    second_moment : array_like of shape (d, d)
        Σ of Gaussian rows x ~ N(0, Σ), given to the estimator for nothing.
    beta : array_like of shape (d,)
        Coefficients at which the local minimax risk is taken.
    residual_variance : float
        E e² ≥ 0 of Gaussian e independent of x, in squared label units.
    num_samples : int
        K.
    modulation : Modulation
        The client map; labels travel as they are.
    noise_std : float
        σ ≥ 0, in units of the released rows.

    Returns
    -------
    float
        tr(Σ I⁻¹)/K, in squared label units, I the Fisher information of (g̃, y) about β.

    Raises
    ------
    InvalidDataError, InvalidParameterError
        If an argument is out of range or shapes do not fit.

    Notes
    -----
    With u = g̃/κ, s = σ/κ and M = Σ + s²I, y given u is N(βᵀΣM⁻¹u, v), v = E e² +
    βᵀ(Σ − ΣM⁻¹Σ)β. An unknown E e² makes v free, which leaves I = ΣM⁻¹Σ/v; the Hájek–Le Cam
    theorem turns it into a local asymptotic minimax bound (van der Vaart 1998, *Asymptotic
    Statistics*, Theorem 8.11). Cosines with secret phases only add noise, so this bounds
    modulated releases too. Where Σ is unknown, Σ̂⁻¹ẑ is the maximum likelihood estimator of
    Gaussian rows, and :func:`coefficient_covariance` is what cannot be beaten.
    """
    sigma = check_matrix("second_moment", second_moment)
    b = check_vector("beta", beta, length=sigma.shape[1])
    s2 = (check_real("noise_std", noise_std, low=0) / modulation.contraction) ** 2
    e2 = check_real("residual_variance", residual_variance, low=0)
    seen = sigma @ np.linalg.solve(sigma + s2 * np.eye(b.shape[0]), sigma)
    v = e2 + float(b @ (sigma - seen) @ b)
    k = check_int("num_samples", num_samples, low=1)
    return v * float(np.trace(np.linalg.solve(seen, sigma))) / k
