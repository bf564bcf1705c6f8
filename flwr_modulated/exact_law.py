"""A node's moments drawn from their exact law, in place of every row's noise: a shortcut of simulations."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from ._typing import FloatArray
from ._validate import check_real
from .errors import InvalidParameterError
from .mechanism import Mechanism
from .moments import Moments
from .noise import NumpyNoise

__all__ = ["draw_moments", "noise_free_moments"]


def noise_free_moments(
    mechanism: Mechanism,
    features: ArrayLike,
    labels: ArrayLike | None,
    directions: ArrayLike | None = None,
    *,
    rng: np.random.Generator,
) -> Moments:
    """Moments of clipped, modulated rows before any noise. **Not private**: never send them.

    Parameters
    ----------
    mechanism : Mechanism
        What the rows' clients would release with.
    features : array_like of shape (n, d)
        Private rows (joint records under ``ReplaceRecord``); may be memory-mapped.
    labels : array_like of shape (n,) or None
        Labels; None for joint records.
    directions : array_like of shape (d, m), optional
        The round's directions; may be left out for m = 0.
    rng : numpy.random.Generator
        Source of the phases. Not used where the modulation is plain: the result is then
        the same in every round and may be kept.

    Raises
    ------
    InvalidDataError, InvalidParameterError
        As :meth:`Mechanism.release`.
    """
    mapped, _ = mechanism._map_blocks(features, directions, NumpyNoise(rng))
    return Moments.from_blocks(mapped, labels, noise_std=0.0)


def draw_moments(noise_free: Moments, noise_std: float, *, rng: np.random.Generator) -> Moments:
    """Draw the moments of released rows, given the moments of the rows before noise.

    Same law as adding N(0, σ²) to each of the n·d entries and summing, at a cost that
    does not depend on n: O(d²) random numbers.

    Parameters
    ----------
    noise_free : Moments
        From :func:`noise_free_moments`.
    noise_std : float
        Standard deviation σ ≥ 0 of each row's noise, in units of the released row.
    rng : numpy.random.Generator
        Source of the noise.

    Returns
    -------
    Moments

    Raises
    ------
    InvalidParameterError
        If `noise_free` already holds noise, or `noise_std` is negative.

    Notes
    -----
    Let F be the noise-free rows, Ξ their noise and A = [F, y, 1] (n × q). Let Q have
    r = min(q, n) orthonormal columns whose span holds A's columns, A = QR. Completed to
    a basis, Q turns Ξ into independent normals: N = QᵀΞ (r × d) and a rest of n − r
    rows that only enters through its Gram matrix W ~ Wishart_d(n − r, σ² I). Hence

        AᵀΞ = RᵀN   and   ΞᵀΞ = NᵀN + W   jointly in law,

    and Σ g̃g̃ᵀ = FᵀF + FᵀΞ + ΞᵀF + ΞᵀΞ, Σ y g̃ = Fᵀy + Ξᵀy, Σ g̃ = Fᵀ1 + Ξᵀ1. Any R with
    RᵀR = AᵀA and r rows will do, also where A has a lower rank.

    A simulation shortcut: rows whose noise nobody ever drew were never released. A
    device has no use for it.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_modulated import Moments
    >>> noise_free = Moments.from_rows(np.eye(3), np.ones(3), noise_std=0.0)
    >>> drawn = draw_moments(noise_free, 2.0, rng=np.random.default_rng(0))
    >>> drawn.num_samples, drawn.noise_variance_sum, drawn.gram.shape
    (3, 12.0, (3, 3))
    """
    if noise_free.noise_variance_sum != 0:
        raise InvalidParameterError("noise_free must hold no noise; make it with noise_free_moments")
    sigma = check_real("noise_std", noise_std, low=0)
    n, d = noise_free.num_samples, noise_free.num_features
    R = _root(_gram_with_labels(noise_free))[-n:]
    r = R.shape[0]
    N = sigma * rng.standard_normal((r, d))
    cross = R.T @ N  # AᵀΞ, of shape (d + 2, d)
    gram = noise_free.gram + cross[:d] + cross[:d].T + N.T @ N
    return Moments(
        num_samples=n,
        gram=gram + sigma**2 * _standard_wishart(d, n - r, rng),
        cross=noise_free.cross + cross[d],
        total=noise_free.total + cross[d + 1],
        label_sum=noise_free.label_sum,
        label_square_sum=noise_free.label_square_sum,
        noise_variance_sum=n * sigma**2,
    )


def _gram_with_labels(noise_free: Moments) -> FloatArray:
    """AᵀA of A = [F, y, 1], of shape (d + 2, d + 2)."""
    d = noise_free.num_features
    gram = np.empty((d + 2, d + 2))
    gram[:d, :d] = noise_free.gram
    gram[d, :d] = gram[:d, d] = noise_free.cross
    gram[d + 1, :d] = gram[:d, d + 1] = noise_free.total
    gram[d, d] = noise_free.label_square_sum
    gram[d, d + 1] = gram[d + 1, d] = noise_free.label_sum
    gram[d + 1, d + 1] = noise_free.num_samples
    return gram


def _root(gram: FloatArray) -> FloatArray:
    """R with RᵀR = `gram`, its rows in increasing order of length."""
    values, vectors = np.linalg.eigh(gram)
    # Rounding leaves a zero eigenvalue at about ±1e-16 of the largest.
    return np.asarray(np.sqrt(np.maximum(values, 0.0))[:, None] * vectors.T)


def _standard_wishart(dimension: int, degrees: int, rng: np.random.Generator) -> FloatArray:
    """Gram matrix of `degrees` standard normal rows (Bartlett 1933's triangle where there are enough)."""
    if degrees < dimension:
        rows = rng.standard_normal((degrees, dimension))
        return rows.T @ rows
    triangle = np.tril(rng.standard_normal((dimension, dimension)), -1)
    np.fill_diagonal(triangle, np.sqrt(rng.chisquare(degrees - np.arange(dimension))))
    return triangle @ triangle.T
