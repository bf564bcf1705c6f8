"""Telling two rows apart: trade-off curves of guarantees, and the best test against one release.

A test that looks at a release and says "first" or "second" row has a false positive rate (it says
second, it was the first) and a true positive rate. A guarantee bounds one by the other.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import ndtr, ndtri

from ._roots import bracketed_root
from ._typing import FloatArray
from ._validate import check_matrix, check_real, check_vector
from .errors import InvalidDataError
from .information import cosine_noise_log_density
from .mechanism import Mechanism
from .modulation import check_directions
from .privacy import gaussian_delta

__all__ = [
    "best_guess",
    "exact_epsilon",
    "gaussian_roc_bound",
    "log_likelihood_ratio",
    "privacy_loss_distribution",
    "roc_bound",
    "roc_curve",
]


def roc_bound(false_positive_rate: ArrayLike, *, epsilon: float, delta: float) -> FloatArray:
    """Largest true positive rate of any test against an (ε, δ) guarantee, between its neighbours.

    Parameters
    ----------
    false_positive_rate : array_like
        a in [0, 1], any shape.
    epsilon : float
        ε ≥ 0.
    delta : float
        δ in [0, 1).

    Returns
    -------
    ndarray
        1 − f_{ε,δ}(a) = min(1, e^ε a + δ, 1 − e^{−ε}(1 − δ − a)), of the same shape.

    Raises
    ------
    InvalidDataError, InvalidParameterError
        If an argument is out of range.

    References
    ----------
    Wasserman and Zhou (2010), arXiv:0811.2501, Theorem 2.4; Dong, Roth and Su (2022),
    arXiv:1905.02383, Equation (3), whose f is the false negative rate.

    Examples
    --------
    >>> roc_bound([0.0, 0.5], epsilon=0.0, delta=0.1)
    array([0.1, 0.6])
    """
    rate = _rates(false_positive_rate)
    eps = check_real("epsilon", epsilon, low=0)
    delta = check_real("delta", delta, low=0, high=1, high_open=True)
    with np.errstate(over="ignore", divide="ignore"):
        steep = np.exp(np.minimum(eps + np.log(rate), 1.0)) + delta  # beyond 1 the minimum is 1 anyway
    shallow = 1 - math.exp(-eps) * (1 - delta - rate)
    return np.asarray(np.minimum(1.0, np.minimum(steep, shallow)))


def gaussian_roc_bound(false_positive_rate: ArrayLike, *, noise_multiplier: float) -> FloatArray:
    """Largest true positive rate of any test against Gaussian noise: Φ(Φ⁻¹(a) + 1/multiplier).

    Parameters
    ----------
    false_positive_rate : array_like
        a in [0, 1], any shape.
    noise_multiplier : float
        σ/Δ > 0 of one release; σ/(√T Δ) of T.

    Returns
    -------
    ndarray
        Of the same shape. The exact curve of the mechanism, below :func:`roc_bound` of every
        (ε, δ) that it keeps.

    Raises
    ------
    InvalidDataError, InvalidParameterError
        If an argument is out of range.

    References
    ----------
    Dong, Roth and Su (2022), *Gaussian differential privacy*, arXiv:1905.02383, Equation (6).
    """
    rate = _rates(false_positive_rate)
    multiplier = check_real("noise_multiplier", noise_multiplier, low=0, low_open=True)
    return np.asarray(ndtr(ndtri(rate) + 1 / multiplier))


def best_guess(noise_multiplier: float) -> float:
    """Chance that the best attacker names the right one of two equally likely neighbours.

    Parameters
    ----------
    noise_multiplier : float
        σ/Δ > 0 of one release; σ/(√T Δ) of T.

    Returns
    -------
    float
        Φ(Δ/2σ), from 0.5 (a coin) to 1.

    Raises
    ------
    InvalidParameterError
        If the multiplier is not positive.
    """
    return float(ndtr(0.5 / check_real("noise_multiplier", noise_multiplier, low=0, low_open=True)))


def exact_epsilon(noise_multiplier: float, delta: float) -> float:
    """Smallest ε of Gaussian noise at a given δ.

    Parameters
    ----------
    noise_multiplier : float
        σ/Δ > 0 of one release; σ/(√T Δ) of T.
    delta : float
        δ in (0, 1).

    Returns
    -------
    float
        The ε at which the exact δ(ε) of Balle and Wang (2018) is `delta`; 0 where noise hides
        everything up to δ.

    Raises
    ------
    InvalidParameterError
        If an argument is out of range.

    Examples
    --------
    >>> from flwr_modulated.privacy import calibrate_noise_multiplier
    >>> round(exact_epsilon(calibrate_noise_multiplier(2.0, 1e-5), 1e-5), 6)
    2.0
    """
    check_real("delta", delta, low=0, high=1, low_open=True, high_open=True)
    multiplier = check_real("noise_multiplier", noise_multiplier, low=0, low_open=True)
    if gaussian_delta(0.0, multiplier) <= delta:
        return 0.0
    high = 1.0
    while gaussian_delta(high, multiplier) > delta:
        high *= 2.0
    target = math.log(delta)

    def excess(epsilon: float) -> float:  # in logarithms, since δ falls over many orders of magnitude
        return math.log(max(gaussian_delta(epsilon, multiplier), 1e-300)) - target

    return bracketed_root(excess, 0.0, high, tolerance=1e-12)


def log_likelihood_ratio(
    released: ArrayLike,
    first: ArrayLike,
    second: ArrayLike,
    *,
    mechanism: Mechanism,
    directions: ArrayLike | None = None,
    phases: ArrayLike | None = None,
) -> FloatArray:
    """Score of the best test of which of two rows was released (Neyman and Pearson).

    Tests membership (is it this person's row?) and attributes (two rows that differ in one).

    Parameters
    ----------
    released : array_like of shape (n, d)
        Releases, one a row.
    first, second : array_like of shape (d,)
        The two candidates, clipped already where the relation clips.
    mechanism : Mechanism
        What made the releases.
    directions : array_like of shape (d, m), optional
        The directions; may be left out for m = 0.
    phases : array_like of shape (n, m), optional
        The phases, to an attacker who has them. By default they are secret.

    Returns
    -------
    ndarray of shape (n,)
        log p(g̃ | second) − log p(g̃ | first).

    Raises
    ------
    InvalidDataError, InvalidParameterError
        If shapes do not fit.
    """
    g = check_matrix("released", released)
    d, modulation, sigma = g.shape[1], mechanism.modulation, mechanism.noise_std
    v = check_directions(
        np.zeros((d, 0)) if directions is None else directions,
        num_features=d,
        num_directions=modulation.num_directions,
    )
    rho = modulation.effective_amplitude / math.sqrt(max(modulation.num_directions, 1))
    logs = []
    for row in (check_vector("first", first, length=d), check_vector("second", second, length=d)):
        gap = g - modulation.contraction * row
        if phases is None:
            along = gap @ v
            outside = gap - along @ v.T
            logs.append(
                -0.5 * np.sum(outside**2, axis=1) / sigma**2
                + np.sum(cosine_noise_log_density(along, rho, sigma), axis=1)
            )
        else:
            phi = np.asarray(phases, dtype=np.float64)
            if phi.shape != (len(g), v.shape[1]):
                raise InvalidDataError(f"phases must have shape ({len(g)}, {v.shape[1]}), got {phi.shape}")
            gap = gap - rho * np.cos(modulation.frequency * (row @ v) + phi) @ v.T
            logs.append(-0.5 * np.sum(gap**2, axis=1) / sigma**2)
    return np.asarray(logs[1] - logs[0])


def roc_curve(first_scores: ArrayLike, second_scores: ArrayLike) -> tuple[FloatArray, FloatArray]:
    """Empirical rates of the tests "second if the score is at least t", over all t.

    Parameters
    ----------
    first_scores : array_like of shape (n,)
        Scores of releases of the first row.
    second_scores : array_like of shape (k,)
        Scores of releases of the second row.

    Returns
    -------
    false_positive_rate, true_positive_rate : ndarray of shape (n + k + 1,)
        Both from 0 to 1, not decreasing.

    Raises
    ------
    InvalidDataError
        If the scores are not finite vectors.
    """
    first = check_vector("first_scores", first_scores)
    second = check_vector("second_scores", second_scores)
    if first.size == 0 or second.size == 0:
        raise InvalidDataError("first_scores and second_scores must have at least one score each")
    thresholds = np.sort(np.concatenate([first, second]))[::-1]

    def rate(scores: FloatArray) -> FloatArray:
        below = np.searchsorted(np.sort(scores), thresholds, side="left")
        return np.concatenate([[0.0], (scores.size - below) / scores.size])

    return rate(first), rate(second)


def privacy_loss_distribution(mechanism: Mechanism) -> Any:
    """Privacy-loss distribution of all releases of a row, from dp-accounting.

    Parameters
    ----------
    mechanism : Mechanism
        Its worst neighbours, conditional on the phases where its sensitivity is.

    Returns
    -------
    dp_accounting.pld.privacy_loss_distribution.PrivacyLossDistribution
        With methods ``get_epsilon_for_delta`` and ``get_delta_for_epsilon``; pessimistic.
    """
    from dp_accounting.pld import privacy_loss_distribution as pld

    multiplier = mechanism.noise_std / mechanism.l2_sensitivity
    one = pld.from_gaussian_mechanism(multiplier, value_discretization_interval=1e-3)
    return one.self_compose(mechanism.num_releases * mechanism.guarantee.rows_per_client)


def _rates(false_positive_rate: ArrayLike) -> FloatArray:
    rate = np.asarray(false_positive_rate, dtype=np.float64)
    if not ((rate >= 0) & (rate <= 1)).all():
        raise InvalidDataError("false_positive_rate must be in [0, 1]")
    return rate
