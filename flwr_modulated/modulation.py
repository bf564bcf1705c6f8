"""The cosine modulation: the noise-free client map (1), its Lipschitz constant (2), its directions."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from ._typing import FloatArray, Sensitivity
from ._validate import check_choice, check_int, check_real
from .errors import InvalidParameterError
from .noise import NoiseSource

__all__ = ["Modulation", "check_directions", "draw_directions"]

ORTHONORMAL_TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True)
class Modulation:
    r"""Public parameters of the client map.

    The noise-free part of what a client releases for one row `x` is

    .. math:: (1-α) x + (λ/√m) Σ_j \cos(ω⟨x, v_j⟩ + φ_j) v_j

    with public orthonormal directions `v_j` and secret phases `φ_j`, iid
    uniform on [0, 2π), fresh for every row, direction and release (Eq. 1).

    Parameters
    ----------
    alpha : float, default 0.0
        Contraction α in [0, 1).
    amplitude : float, default 0.0
        Cosine amplitude λ ≥ 0, in units of the features.
    frequency : float, default 0.0
        Cosine frequency ω ≥ 0, in radians per unit of the features.
    num_directions : int, default 0
        Number m ≥ 0 of modulation directions.

    Raises
    ------
    InvalidParameterError
        If a parameter is outside its range.

    Notes
    -----
    With ``num_directions=0`` or ``amplitude=0`` the release is the plain Gaussian
    one. That is also what serves utility best at a given guarantee: modulation
    adds uncertainty along the directions and, under conditional sensitivity,
    noise in every direction.

    Examples
    --------
    >>> Modulation(alpha=0.2, amplitude=0.2, frequency=0.5, num_directions=1).lipschitz()
    0.9
    """

    alpha: float = 0.0
    amplitude: float = 0.0
    frequency: float = 0.0
    num_directions: int = 0

    def __post_init__(self) -> None:
        check_real("alpha", self.alpha, low=0, high=1, high_open=True)
        check_real("amplitude", self.amplitude, low=0)
        check_real("frequency", self.frequency, low=0)
        check_int("num_directions", self.num_directions, low=0)

    @property
    def is_plain(self) -> bool:
        """Whether the cosine term vanishes, so that no phase is ever drawn."""
        return self.num_directions == 0 or self.amplitude == 0

    @property
    def contraction(self) -> float:
        """The factor 1 − α on the features."""
        return 1.0 - self.alpha

    @property
    def effective_amplitude(self) -> float:
        """Cosine amplitude λ, or 0 where the cosine term vanishes."""
        return 0.0 if self.is_plain else self.amplitude

    def lipschitz(self, sensitivity: Sensitivity = "conditional") -> float:
        """Lipschitz constant L of the map, from features to released row.

        Parameters
        ----------
        sensitivity : {"conditional", "marginal"}, default "conditional"
            ``"conditional"`` holds even if the phases leak:
            ``|1-α| + λω/√m`` (Eq. 2). ``"marginal"`` averages over the secret
            phases, which makes the cosine term independent of the features, so
            that ``|1-α|`` gives the same guarantee.

        Returns
        -------
        float
            L > 0, dimensionless.

        Raises
        ------
        InvalidParameterError
            If `sensitivity` is neither of the two.
        """
        check_choice("sensitivity", sensitivity, Sensitivity)
        if sensitivity == "marginal" or self.is_plain:
            return self.contraction
        return self.contraction + self.amplitude * self.frequency / math.sqrt(self.num_directions)

    def apply(
        self, features: FloatArray, directions: FloatArray, *, rng: np.random.Generator | NoiseSource
    ) -> FloatArray:
        """Evaluate the noise-free map with fresh phases (the first two terms of Eq. 1).

        Parameters
        ----------
        features : ndarray of shape (n, d)
            Private rows.
        directions : ndarray of shape (d, m)
            Orthonormal columns, already checked.
        rng : numpy.random.Generator or NoiseSource
            Source of the phases; advanced only if the modulation is not plain.

        Returns
        -------
        ndarray of shape (n, d)
            Not private: noise must still be added. `features` itself where the map is
            the identity, else a new array.
        """
        mapped = features if self.alpha == 0 and self.is_plain else self.contraction * features
        if not self.is_plain:
            m = self.num_directions
            phases = rng.random((features.shape[0], m))
            phases *= 2.0 * math.pi
            waves = np.cos(self.frequency * (features @ directions) + phases)
            waves *= self.amplitude / math.sqrt(m)
            mapped += waves @ directions.T
        return mapped

    def second_moment(self, directions: FloatArray) -> FloatArray:
        """Expected second moment of the cosine term, (λ²/2m) V Vᵀ.

        Parameters
        ----------
        directions : ndarray of shape (d, m)
            Orthonormal columns.

        Returns
        -------
        ndarray of shape (d, d)
            Zero where the modulation is plain.
        """
        if self.is_plain:
            return np.zeros((directions.shape[0],) * 2)
        scale = self.amplitude**2 / (2.0 * self.num_directions)
        return scale * (directions @ directions.T)


def draw_directions(
    num_features: int,
    num_directions: int,
    *,
    orthogonal_to: ArrayLike | None = None,
    rng: np.random.Generator,
) -> FloatArray:
    """Draw a uniformly random orthonormal frame, optionally orthogonal to a vector.

    Parameters
    ----------
    num_features : int
        Dimension d ≥ 1.
    num_directions : int
        Number of columns m; at most ``d - 1`` when `orthogonal_to` is a non-zero
        vector, else at most ``d``.
    orthogonal_to : array_like of shape (d,), optional
        The current coefficients. Directions orthogonal to them keep the variance
        of the cosine term out of the gradient.
    rng : numpy.random.Generator
        Source of the (public) randomness.

    Returns
    -------
    ndarray of shape (d, m)
        Columns with VᵀV = I.

    Raises
    ------
    InvalidParameterError
        If m is too large for d, or `orthogonal_to` is not a finite vector of length d.

    Examples
    --------
    >>> import numpy as np
    >>> v = draw_directions(3, 2, orthogonal_to=[1.0, 0.0, 0.0], rng=np.random.default_rng(0))
    >>> bool(np.allclose(v.T @ v, np.eye(2))), bool(np.allclose(v[0], 0))
    (True, True)
    """
    d = check_int("num_features", num_features, low=1)
    m = check_int("num_directions", num_directions, low=0)
    axis = _unit_vector(orthogonal_to, d)
    room = d if axis is None else d - 1
    if m > room:
        reason = "" if axis is None else " orthogonal to the non-zero coefficients"
        raise InvalidParameterError(
            f"num_directions must be at most {room} for num_features={d}{reason}, got {m}; "
            "lower num_directions"
        )
    if m == 0:
        return np.zeros((d, 0))
    gaussian = rng.standard_normal((d, m))
    if axis is not None:
        # Twice: one projection leaves rounding errors along the axis that the QR step may enlarge.
        for _ in range(2):
            gaussian -= np.outer(axis, axis @ gaussian)
    frame, triangle = np.linalg.qr(gaussian)
    # Fixed signs of R's diagonal make the frame uniform (Mezzadri 2007, arXiv:math-ph/0609050).
    return np.ascontiguousarray(frame * np.where(np.diag(triangle) < 0, -1.0, 1.0))


def check_directions(directions: ArrayLike, *, num_features: int, num_directions: int) -> FloatArray:
    """Check what a client must check for itself: shape, finiteness, VᵀV = I within 1e-9.

    A longer or repeated direction would raise the true sensitivity of the release
    without raising its noise, so a client never takes orthonormality on trust.

    Parameters
    ----------
    directions : array_like of shape (d, m)
        What the server sent.
    num_features, num_directions : int
        The d and m expected.

    Returns
    -------
    ndarray of shape (d, m)

    Raises
    ------
    InvalidParameterError
        If any of the three does not hold.
    """
    try:
        frame = np.asarray(directions, dtype=np.float64)
    except (TypeError, ValueError):
        raise InvalidParameterError("directions must be numeric") from None
    if frame.shape != (num_features, num_directions):
        raise InvalidParameterError(
            f"directions must have shape ({num_features}, {num_directions}), got {frame.shape}"
        )
    if num_directions == 0:
        return frame
    if not np.isfinite(frame).all():
        raise InvalidParameterError("directions must be finite, got NaN or infinity")
    with np.errstate(over="ignore", invalid="ignore"):
        error = np.abs(frame.T @ frame - np.eye(num_directions)).max(initial=0.0)
    if not error <= ORTHONORMAL_TOLERANCE:
        raise InvalidParameterError(
            f"directions must have orthonormal columns within {ORTHONORMAL_TOLERANCE:g}; "
            "draw them with draw_directions"
        )
    return frame


def _unit_vector(vector: ArrayLike | None, length: int) -> FloatArray | None:
    if vector is None:
        return None
    try:
        array = np.asarray(vector, dtype=np.float64)
    except (TypeError, ValueError):
        raise InvalidParameterError("orthogonal_to must be numeric") from None
    if array.shape != (length,):
        raise InvalidParameterError(f"orthogonal_to must have shape ({length},), got {array.shape}")
    if not np.isfinite(array).all():
        raise InvalidParameterError("orthogonal_to must be finite, got NaN or infinity")
    largest = np.abs(array).max()
    if largest == 0:
        return None
    array = array / largest  # keeps the norm finite for huge or tiny coefficients
    return np.asarray(array / np.linalg.norm(array))
