"""Standard errors before any data: the sandwich of the moment estimator in population terms.

Pure functions; nothing is sampled. κ = 1 − α, K is the number of rows, and the rows enter by
second moments only, so nothing here assumes that they are Gaussian.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from ._typing import FloatArray
from ._validate import check_int, check_matrix, check_real, check_vector
from .errors import InvalidParameterError
from .modulation import Modulation, check_directions

__all__ = ["coefficient_covariance", "score_covariance"]


def score_covariance(
    second_moment: ArrayLike,
    beta: ArrayLike,
    residual_variance: float,
    *,
    modulation: Modulation,
    noise_std: float,
    directions: ArrayLike | None = None,
    num_releases: int = 1,
    score_moment: ArrayLike | None = None,
    label_scale: float | None = None,
) -> FloatArray:
    """Covariance of one row's estimating function at the coefficients of its population.

    The estimating function is ψ = κ⁻²[g̃g̃ᵀ − E noise]β − κ⁻¹ y g̃, of mean zero at β.

    Parameters
    ----------
    second_moment : array_like of shape (d, d)
        Σ = E xxᵀ of the population, positive definite.
    beta : array_like of shape (d,)
        Its least-squares coefficients.
    residual_variance : float
        E e² ≥ 0 of e = y − xᵀβ, in squared label units.
    modulation : Modulation
        The client map.
    noise_std : float
        σ ≥ 0 of each release, in units of the released rows.
    directions : array_like of shape (p, m), optional
        The public directions. By default the average over uniformly random ones.
    num_releases : int, default 1
        Releases of every row whose moments are averaged, with fresh noise each.
    score_moment : array_like of shape (d, d), optional
        E e²xxᵀ; by default ``residual_variance * second_moment``, which holds where e is
        independent of x.
    label_scale : float, optional
        s_y of joint records (x, y / s_y), whose label carries noise too
        (``ReplaceRecord``); then p = d + 1, else p = d.

    Returns
    -------
    ndarray of shape (d, d)
        In squared units of label × feature.

    Raises
    ------
    InvalidDataError, InvalidParameterError
        If an argument is out of range or shapes do not fit.

    Notes
    -----
    Let η be all that is added to κ-rescaled rows, N = E ηηᵀ, and b = (β, −s_y) for joint
    records, else b = β. Since η is symmetric and independent of the row, for any distribution
    of (x, e) with E xe = 0

    Cov ψ = E e²xxᵀ + [ (bᵀNb) Σ + E e² N + E ηηᵀ(ηᵀb)² − N b bᵀ N ] / T,

    read in the first d coordinates. The law of the rows enters by second moments only.
    """
    sigma = check_matrix("second_moment", second_moment)
    d = sigma.shape[1]
    b = check_vector("beta", beta, length=d)
    e2 = check_real("residual_variance", residual_variance, low=0)
    s2 = (check_real("noise_std", noise_std, low=0) / modulation.contraction) ** 2
    check_int("num_releases", num_releases, low=1)
    scores = e2 * sigma if score_moment is None else check_matrix("score_moment", score_moment, num_columns=d)
    if label_scale is not None:
        b = np.append(b, -check_real("label_scale", label_scale, low=0, low_open=True))
    noise, spread = _noise_moments(b, s2, modulation, directions)
    release = (b @ noise @ b) * sigma + (e2 * noise + spread)[:d, :d]
    return np.asarray(scores + release / num_releases)


def coefficient_covariance(
    second_moment: ArrayLike,
    beta: ArrayLike,
    residual_variance: float,
    *,
    num_samples: int,
    modulation: Modulation,
    noise_std: float,
    directions: ArrayLike | None = None,
    num_releases: int = 1,
    score_moment: ArrayLike | None = None,
    label_scale: float | None = None,
) -> FloatArray:
    """Asymptotic covariance Σ⁻¹ Cov(ψ) Σ⁻¹ / K of the unregularised estimator Σ̂⁻¹ẑ.

    Parameters
    ----------
    second_moment, beta, residual_variance, modulation, noise_std, directions, num_releases, \
score_moment, label_scale
        As in :func:`score_covariance`.
    num_samples : int
        K.

    Returns
    -------
    ndarray of shape (d, d)
        In squared coefficient units; standard errors are the roots of its diagonal.

    Raises
    ------
    InvalidDataError, InvalidParameterError
        If an argument is out of range or shapes do not fit.

    Notes
    -----
    Good while the noise scale τ (Eq. 4) is below about 0.3 of the smallest eigenvalue of Σ;
    beyond, Σ̂ is nearly singular and the estimator has no useful standard error.
    """
    scores = score_covariance(
        second_moment,
        beta,
        residual_variance,
        modulation=modulation,
        noise_std=noise_std,
        directions=directions,
        num_releases=num_releases,
        score_moment=score_moment,
        label_scale=label_scale,
    )
    inverse = np.linalg.inv(check_matrix("second_moment", second_moment))
    return np.asarray(inverse @ scores @ inverse / check_int("num_samples", num_samples, low=1))


def _noise_moments(
    b: FloatArray, s2: float, modulation: Modulation, directions: ArrayLike | None
) -> tuple[FloatArray, FloatArray]:
    # N = E ηηᵀ and E ηηᵀ(ηᵀb)² − N b bᵀ N for η = w + n, n ~ N(0, s² I) and w the cosines over κ.
    p, m = b.shape[0], modulation.num_directions
    bb, b2, eye = np.outer(b, b), float(b @ b), np.eye(b.shape[0])
    if modulation.is_plain:
        return s2 * eye, s2**2 * (b2 * eye + bb)
    if m > p:
        raise InvalidParameterError(f"num_directions must be at most the {p} released columns, got {m}")
    c = modulation.amplitude**2 / (2 * m * modulation.contraction**2)  # E ww^T = c V V^T
    if directions is None:
        frame_moment = (m / p) * eye
        # P = V V^T is a random projection with b^T P b / b^T b ~ Beta(m/2, (p−m)/2).
        second = m * (m + 2) / (p * (p + 2))
        projected = _isotropic(bb, b2, trace=m / p, along=second)
        weighted = _isotropic(bb, b2, trace=m * m / p, along=second)
        squares = (m / (p * (p + 2))) * (b2 * eye + 2 * bb)
    else:
        v = check_directions(directions, num_features=p, num_directions=m)
        a = v.T @ b
        frame_moment = v @ v.T
        projected = np.outer(v @ a, v @ a)
        weighted = float(a @ a) * frame_moment
        squares = (v * a**2) @ v.T
    # E cos² = 1/2 and E cos⁴ = 3/8: Gaussian fourth moments less 3/8 on equal indices.
    cosines = c**2 * (weighted + 2 * projected - 1.5 * squares)
    w_b = c * (frame_moment @ b)
    mixed = s2 * (c * b2 * frame_moment + float(b @ w_b) * eye + 2 * (np.outer(w_b, b) + np.outer(b, w_b)))
    normal = s2**2 * (b2 * eye + 2 * bb)
    product = s2**2 * bb + s2 * (np.outer(w_b, b) + np.outer(b, w_b)) + c**2 * projected
    return s2 * eye + c * frame_moment, cosines + mixed + normal - product


def _isotropic(bb: FloatArray, b2: float, *, trace: float, along: float) -> FloatArray:
    # The matrix x·b²I + z·bbᵀ with the given trace, and quadratic form along b, in units of b².
    p = bb.shape[0]
    x = (trace - along) / (p - 1) if p > 1 else 0.0
    return x * b2 * np.eye(p) + (along - x) * bb
