"""From debiased moments to coefficients: gradient steps, ridge, and the tuning-free rule (4).

Everything here is post-processing of what was released: it costs no privacy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike
from scipy import linalg

from ._typing import FloatArray
from ._validate import check_int, check_real, check_vector
from .moments import DebiasedMoments

__all__ = [
    "Auto",
    "Estimator",
    "GradientDescent",
    "Ridge",
    "gradient",
    "second_moment_noise",
    "with_intercept",
]

# Relative size below which an eigenvalue of a second moment counts as zero: some hundred times its
# rounding error, which is a few machine epsilons however many rows were summed.
RANK_TOLERANCE = 1e-13


class Estimator(Protocol):
    """What the strategy needs of an estimator."""

    def estimate(self, debiased: DebiasedMoments) -> FloatArray:
        """Coefficients of shape (d,), in units of label per feature."""
        ...


def gradient(beta: ArrayLike, debiased: DebiasedMoments) -> FloatArray:
    """Unbiased gradient G = Σ̂β − ẑ of the least-squares loss (Eq. 3).

    Parameters
    ----------
    beta : array_like of shape (d,)
        Where to evaluate.
    debiased : DebiasedMoments
        Unbiased moments of the private rows.

    Returns
    -------
    ndarray of shape (d,)
        Unbiased for ∇F(β), F(β) = (1/2K) Σ (xᵀβ − y)².
    """
    beta = check_vector("beta", beta, length=debiased.num_features)
    return debiased.second_moment @ beta - debiased.cross_moment


def with_intercept(estimator: Estimator, debiased: DebiasedMoments) -> tuple[FloatArray, float]:
    """Fit slopes on moments about the mean, and the intercept from the means.

    Parameters
    ----------
    estimator : Estimator
        Fits the slopes.
    debiased : DebiasedMoments
        Unbiased moments of the private rows.

    Returns
    -------
    slopes : ndarray of shape (d,)
        In units of label per feature.
    intercept : float
        In units of the label.

    Notes
    -----
    For the unregularised moment estimator this is the solution of the augmented
    system [[Σ̂, mean], [meanᵀ, 1]], whose constant carries no noise; for every other
    estimator it leaves the intercept unshrunk.
    """
    slopes = estimator.estimate(debiased.centred())
    return slopes, debiased.label_mean - float(debiased.feature_mean @ slopes)


def second_moment_noise(debiased: DebiasedMoments) -> float:
    """Noise scale τ of the debiased second moment (Eq. 4).

    Parameters
    ----------
    debiased : DebiasedMoments
        Unbiased moments of the private rows.

    Returns
    -------
    float
        τ, in squared feature units: about the root mean square over unit vectors u of
        the noise in Σ̂u (whose second and third terms are (d+1)/d times those of
        Eq. 4). Known from public quantities and Σ̂ itself, so nothing is tuned.
    """
    signal = max(float(np.trace(debiased.second_moment)), 0.0)
    return float(np.sqrt(debiased.noise_variance(signal) / debiased.num_samples))


@dataclass(frozen=True, slots=True)
class Auto:
    """Tuning-free one-shot estimator, the default (Eq. 4).

    With Σ̂ = U diag(w) Uᵀ it returns ``U diag(1/√(max(w, 0)² + τ²)) Uᵀ ẑ``, τ the
    known noise scale of Σ̂: plain least squares as the noise vanishes, a smooth
    shrinkage where noise dominates.

    Notes
    -----
    =============================  =================================================
    Edge case                      Result
    =============================  =================================================
    no noise, full rank            least squares
    no noise, rank deficient       minimum-norm least squares
    K < d                          defined; noise directions are shrunk
    Σ̂ indefinite                   negative eigenvalues count as zero
    =============================  =================================================
    """

    def estimate(self, debiased: DebiasedMoments) -> FloatArray:
        """Coefficients of shape (d,), in units of label per feature."""
        w, u = np.linalg.eigh(debiased.second_moment)
        scale = np.hypot(np.maximum(w, 0.0), second_moment_noise(debiased))
        # Without noise, eigenvalues below rounding are zeros: the pseudo-inverse leaves them out.
        keep = scale > RANK_TOLERANCE * scale.max()
        weights = np.zeros_like(scale)
        weights[keep] = 1.0 / scale[keep]
        return np.asarray(u @ (weights * (u.T @ debiased.cross_moment)))


@dataclass(frozen=True, slots=True)
class Ridge:
    """One-shot ridge of the paper: β = (Σ̂ + γI)⁻¹ ẑ.

    Parameters
    ----------
    penalty : float
        γ ≥ 0, in squared feature units. Zero is the unregularised moment estimator.

    Notes
    -----
    Σ̂ + γI is solved as it is, even where noise makes it indefinite, as in the paper.
    A singular system gives the minimum-norm least-squares solution.
    """

    penalty: float

    def __post_init__(self) -> None:
        check_real("penalty", self.penalty, low=0)

    def estimate(self, debiased: DebiasedMoments) -> FloatArray:
        """Coefficients of shape (d,), in units of label per feature."""
        system = debiased.second_moment + self.penalty * np.eye(debiased.num_features)
        # A symmetric pseudo-inverse through lstsq: indefinite systems are allowed, singular ones too.
        solution, *_ = linalg.lstsq(system, debiased.cross_moment, cond=RANK_TOLERANCE, lapack_driver="gelsd")
        return np.asarray(solution)


@dataclass(frozen=True, slots=True)
class GradientDescent:
    """Projected gradient descent of the paper, β ← Π_B(β − (c/λ_max(Σ̂))·G).

    Parameters
    ----------
    step : float
        c > 0, relative to the inverse of the largest eigenvalue of Σ̂.
    radius : float, default 10.0
        Radius B > 0 of the ball that β is projected onto, in coefficient units.
    num_steps : int, default 100
        Steps that :meth:`estimate` takes on one set of moments; iterating after a
        release is free post-processing. :meth:`update` takes one.
    """

    step: float
    radius: float = 10.0
    num_steps: int = 100

    def __post_init__(self) -> None:
        check_real("step", self.step, low=0, low_open=True)
        check_real("radius", self.radius, low=0, low_open=True)
        check_int("num_steps", self.num_steps, low=1)

    def update(self, beta: ArrayLike, debiased: DebiasedMoments) -> FloatArray:
        """One step from `beta`; no step where noise leaves Σ̂ without a positive eigenvalue.

        Parameters
        ----------
        beta : array_like of shape (d,)
            Current coefficients.
        debiased : DebiasedMoments
            This round's moments.

        Returns
        -------
        ndarray of shape (d,)
        """
        moved = check_vector("beta", beta, length=debiased.num_features).copy()
        largest = float(linalg.eigvalsh(debiased.second_moment)[-1])
        if largest > 0:
            moved -= (self.step / largest) * gradient(moved, debiased)
        norm = float(np.linalg.norm(moved))
        return moved * (self.radius / norm) if norm > self.radius else moved

    def estimate(self, debiased: DebiasedMoments) -> FloatArray:
        """Coefficients of shape (d,) after `num_steps` steps from zero on the same moments."""
        beta = np.zeros(debiased.num_features)
        for _ in range(self.num_steps):
            beta = self.update(beta, debiased)
        return beta
