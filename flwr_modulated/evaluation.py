"""How well a private fit predicts, estimated from the same release at no privacy cost.

The debiased squared error of coefficients is unbiased only for coefficients that were not
fitted to the same rows, so units are split into folds: fit on the rest, evaluate on the fold.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ._typing import FloatArray
from ._validate import check_int
from .errors import InvalidDataError
from .estimators import Auto, Estimator, with_intercept
from .moments import DebiasedMoments
from .sample import Sample

__all__ = ["Evaluation", "cross_validate"]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Evaluation:
    """Estimated error of an estimator on new rows of the same population.

    Attributes
    ----------
    mse, mse_se : float
        Mean squared error of prediction and its standard error, in squared units of the
        released labels. An unbiased estimate, which noise can make negative.
    r2, r2_se : float
        R² = 1 − MSE/Var(y), and its standard error.
    nominal_r2 : float
        R² of the fit to all units on those same units: optimistic, the more so the
        stronger the noise. To compare with, not to report.
    num_folds : int
        Number of folds.
    fold_params : ndarray of shape (num_folds, p)
        Coefficients of each fold's fit, in units of the released rows; an intercept,
        where fitted, comes last.
    """

    mse: float
    mse_se: float
    r2: float
    r2_se: float
    nominal_r2: float
    num_folds: int
    fold_params: FloatArray

    def __str__(self) -> str:
        return (
            f"estimated R² {self.r2:.3f} ± {self.r2_se:.3f}, MSE {self.mse:.4g} ± {self.mse_se:.2g} "
            f"(standard errors; {self.num_folds} folds)"
        )


def cross_validate(
    sample: Sample,
    estimator: Estimator | None = None,
    *,
    num_folds: int = 5,
    fit_intercept: bool = False,
) -> Evaluation:
    """Estimate MSE and R² of an estimator by cross-fitting over independent units.

    Parameters
    ----------
    sample : Sample
        What was released: rows, or moments of nodes.
    estimator : Estimator, optional
        What is fitted; default :class:`Auto`.
    num_folds : int, default 5
        Folds F; lowered to the number of units where there are fewer.
    fit_intercept : bool, default False
        Whether to fit an intercept too.

    Returns
    -------
    Evaluation

    Raises
    ------
    InvalidDataError
        If there are fewer than two units.
    InvalidParameterError
        If `num_folds` is below 2.

    Notes
    -----
    With v = (β, intercept, −1) of the other folds' fit, a unit's squared error is
    estimated by vᵀW_g v, which is unbiased because its noise is independent of v (for one
    unit: βᵀΣ̂β − 2βᵀẑ + mean y²). Unit g belongs to fold g mod F: shuffle rows whose
    order has a period.

    1. It estimates the error of fits to (F−1)/F of the units, slightly larger than that
       of the fit to all.
    2. Standard errors come from the spread of the units' squared errors, each with its
       fold's coefficients held fixed; Bayle et al. (2020), arXiv:2007.12671, show when
       this is right for the cross-fitted mean. Folds share noise through each other's
       fits, which it leaves out: simulated, it is 4 % too small at little noise and up to
       25 % where noise dominates.
    3. The variance of labels is estimated from all units, for joint records without
       their noise. With few rows and much noise it may come out small or negative, and R²
       with it meaningless; its standard error then is large, or NaN.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_modulated.sample import Sample
    >>> rng = np.random.default_rng(0)
    >>> x = rng.standard_normal((20000, 2))
    >>> y = x @ [1.0, -1.0] + rng.standard_normal(20000)
    >>> released = x + rng.standard_normal(x.shape)
    >>> result = cross_validate(Sample.from_rows(released, y, noise_std=1.0))
    >>> bool(abs(result.r2 - 2 / 3) < 5 * result.r2_se)
    True
    """
    chosen: Estimator = Auto() if estimator is None else estimator
    check_int("num_folds", num_folds, low=2)
    sample = sample.weighted()
    n = sample.num_units
    if n < 2:
        raise InvalidDataError(f"cross_validate needs at least 2 units, got {n}; use more rows or nodes")
    num_folds = min(num_folds, n)
    fold = np.arange(n) % num_folds
    errors = np.empty(n)
    contrasts = []
    for k in range(num_folds):
        held_out = fold == k
        contrasts.append(_contrast(chosen, sample.moments(~held_out), fit_intercept))
        errors[held_out] = sample.quadratic(contrasts[-1])[held_out]
    full = sample.moments()
    full_contrast = _contrast(chosen, full, fit_intercept)
    # Labels about their mean: (y − ȳ)² is the quadratic form of (0, ȳ, −1).
    label_contrast = np.zeros(sample.num_features + 2)
    label_contrast[-2:] = full.label_mean, -1.0
    squares = sample.quadratic(label_contrast)
    mse, mse_se = _ratio_mean(sample, errors)
    variance, _ = _ratio_mean(sample, squares)
    with np.errstate(divide="ignore", invalid="ignore"):
        # Delta method for the ratio of the two means.
        _, r2_se = _ratio_mean(sample, (errors - mse / np.float64(variance) * squares) / variance)
        r2 = 1.0 - np.float64(mse) / variance
        nominal = 1.0 - np.float64(sample.quadratic(full_contrast).sum()) / squares.sum()
    params = np.array(contrasts)[:, : sample.num_features + fit_intercept]
    return Evaluation(
        mse=mse,
        mse_se=mse_se,
        r2=float(r2),
        r2_se=r2_se,
        nominal_r2=float(nominal),
        num_folds=num_folds,
        fold_params=params,
    )


def _contrast(estimator: Estimator, moments: DebiasedMoments, fit_intercept: bool) -> FloatArray:
    """The vector v over (x, 1, y) whose product with a row is its residual, negated."""
    if fit_intercept:
        slopes, intercept = with_intercept(estimator, moments)
    else:
        slopes, intercept = estimator.estimate(moments), 0.0
    return np.concatenate([slopes, [intercept, -1.0]])


def _ratio_mean(sample: Sample, totals: FloatArray) -> tuple[float, float]:
    """Mean over rows of units' totals, and its standard error over units."""
    weight = sample.weights.sum()
    mean = float(totals.sum() / weight)
    gaps = totals - mean * sample.weights
    g = sample.effective_units
    if g <= 1.0:  # a single unit has all the weight, and says nothing of the spread
        return mean, float("nan")
    return mean, float(np.sqrt((gaps @ gaps) * g / (g - 1.0)) / weight)
