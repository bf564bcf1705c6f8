"""How much a release tells about its row: Fisher information and the bounds that follow from it.

The attacker knows everything public (the map, the directions, σ, the coefficients) and sees one
release g̃ of a row, and its label where labels are public. Bounds are mean squared errors per
feature, in squared feature units. κ = 1 − α, ρ = λ/√m and θ_j = ω⟨x, v_j⟩ + φ_j.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from ._typing import FloatArray
from ._validate import check_int, check_matrix, check_real, check_vector
from .errors import InvalidDataError, InvalidParameterError
from .modulation import Modulation, check_directions

__all__ = [
    "ErrorBound",
    "averaged_error_bound",
    "cosine_noise_information",
    "cosine_noise_log_density",
    "error_bound",
    "fisher_information",
    "mean_fisher_information",
    "secret_phase_information",
]


@dataclass(frozen=True, slots=True)
class ErrorBound:
    """Cramér–Rao bounds on the mean squared error per feature of an unbiased attacker.

    Attributes
    ----------
    trace : float
        (1/d) tr(I⁻¹), in squared feature units.
    jensen : float
        d / tr(I), the weaker and simpler form.
    """

    trace: float
    jensen: float


def fisher_information(
    row: ArrayLike,
    directions: ArrayLike,
    phases: ArrayLike,
    *,
    modulation: Modulation,
    noise_std: float,
    beta: ArrayLike | None = None,
    residual_std: float | None = None,
) -> FloatArray:
    """Information of one release about its row, to an attacker who knows the phases.

    Parameters
    ----------
    row : array_like of shape (d,)
        The row x at which the information is taken.
    directions : array_like of shape (d, m)
        Orthonormal columns v_j.
    phases : array_like of shape (m,)
        φ, in radians.
    modulation : Modulation
        The client map.
    noise_std : float
        σ > 0, in units of the released rows.
    beta : array_like of shape (d,), optional
        Coefficients; given with `residual_std` when the label is public and leaks too.
    residual_std : float, optional
        Standard deviation σ_y > 0 of y − xᵀβ, in label units.

    Returns
    -------
    ndarray of shape (d, d)
        JᵀJ/σ² + ββᵀ/σ_y², J = κI − ρω Σ sin θ_j v_jv_jᵀ, in inverse squared feature units.

    Raises
    ------
    InvalidDataError, InvalidParameterError
        If an argument is out of range or shapes do not fit.
    """
    x = check_vector("row", row)
    v = check_directions(directions, num_features=x.shape[0], num_directions=modulation.num_directions)
    phi = check_vector("phases", phases, length=v.shape[1])
    slopes = _slopes(modulation, np.sin(modulation.frequency * (x @ v) + phi))
    return _information(v, slopes**2, modulation, noise_std) + label_information(beta, residual_std, len(x))


def mean_fisher_information(
    directions: ArrayLike,
    *,
    modulation: Modulation,
    noise_std: float,
    beta: ArrayLike | None = None,
    residual_std: float | None = None,
) -> FloatArray:
    """Average of :func:`fisher_information` over uniform phases, which no longer depends on the row.

    Parameters
    ----------
    directions, modulation, noise_std, beta, residual_std
        As in :func:`fisher_information`.

    Returns
    -------
    ndarray of shape (d, d)
        (κ²I + (λω)²/(2m) VVᵀ)/σ² + ββᵀ/σ_y²: **more** than without modulation. Known phases
        are part of what the attacker sees, so its inverse bounds everybody who knows them and is
        unbiased on average over them.

    Raises
    ------
    InvalidDataError, InvalidParameterError
        If an argument is out of range or shapes do not fit.
    """
    v = frame_of(directions, modulation)
    mean_square = modulation.contraction**2 + 0.5 * _wave(modulation) ** 2
    squares = np.full(v.shape[1], mean_square)
    return _information(v, squares, modulation, noise_std) + label_information(beta, residual_std, len(v))


def secret_phase_information(
    directions: ArrayLike,
    *,
    modulation: Modulation,
    noise_std: float,
    beta: ArrayLike | None = None,
    residual_std: float | None = None,
) -> FloatArray:
    """Information of one release about its row, to an attacker who does not know the phases.

    Parameters
    ----------
    directions, modulation, noise_std, beta, residual_std
        As in :func:`fisher_information`.

    Returns
    -------
    ndarray of shape (d, d)
        κ²(I − VVᵀ)/σ² + κ² i VVᵀ + ββᵀ/σ_y², with i ≤ 1/σ² of :func:`cosine_noise_information`:
        **less** than without modulation, along the directions only.

    Raises
    ------
    InvalidDataError, InvalidParameterError
        If an argument is out of range or shapes do not fit.
    """
    v = frame_of(directions, modulation)
    sigma = check_real("noise_std", noise_std, low=0, low_open=True)
    amplitude = modulation.effective_amplitude / np.sqrt(max(modulation.num_directions, 1))
    along = cosine_noise_information(amplitude, sigma) * sigma**2
    squares = np.full(v.shape[1], modulation.contraction**2 * along)
    return _information(v, squares, modulation, sigma) + label_information(beta, residual_std, len(v))


def error_bound(information: ArrayLike) -> ErrorBound:
    """Both forms of the Cramér–Rao bound.

    Parameters
    ----------
    information : array_like of shape (d, d)
        Positive semidefinite, in inverse squared feature units.

    Returns
    -------
    ErrorBound
        The trace form is infinite where the information is singular.

    Raises
    ------
    InvalidDataError
        If `information` is not square.

    Examples
    --------
    >>> error_bound([[1.0, 0.0], [0.0, 4.0]])
    ErrorBound(trace=0.625, jensen=0.4)
    """
    matrix = check_matrix("information", information)
    d = matrix.shape[1]
    if matrix.shape != (d, d):
        raise InvalidDataError(f"information must be square, got shape {matrix.shape}")
    values = np.linalg.eigvalsh(matrix)
    if values[-1] <= 0:
        return ErrorBound(np.inf, np.inf)
    singular = values[0] <= d * np.finfo(np.float64).eps * values[-1]
    return ErrorBound(np.inf if singular else float(np.mean(1 / values)), float(1 / np.mean(values)))


def averaged_error_bound(
    directions: ArrayLike,
    *,
    modulation: Modulation,
    noise_std: float,
    beta: ArrayLike | None = None,
    residual_std: float | None = None,
    num_phases: int = 4096,
) -> ErrorBound:
    """Average over uniform phases of both bounds for an attacker unbiased at **every** phase.

    Parameters
    ----------
    directions, modulation, noise_std, beta, residual_std
        As in :func:`fisher_information`.
    num_phases : int, default 4096
        Points of the deterministic lattice of phases that is averaged over.

    Returns
    -------
    ErrorBound
        Infinite in the trace form where λω/√m ≥ κ: at some phase the map then has a flat
        spot, and no attacker is unbiased there with finite error on average.

    Raises
    ------
    InvalidDataError, InvalidParameterError
        If an argument is out of range or shapes do not fit.

    Notes
    -----
    This demands more of the attacker than :func:`mean_fisher_information` and so lies above
    its bound. Without the label the trace form is σ²[(d − m)/κ² + mκ/(κ² − (ρω)²)^{3/2}]/d.
    """
    v = frame_of(directions, modulation)
    n = check_int("num_phases", num_phases, low=1)
    label = label_information(beta, residual_std, len(v))
    # A Kronecker lattice; in one dimension it is the trapezoidal rule, exact to rounding here.
    turns = np.outer(np.arange(n), np.append(1 / n, np.sqrt([2.0, 3, 5, 7, 11, 13, 17, 19])))
    if v.shape[1] > turns.shape[1]:
        raise InvalidParameterError(
            f"num_directions must be at most {turns.shape[1]} for an average over phases, got {v.shape[1]}; "
            "use mean_fisher_information"
        )
    squares = _slopes(modulation, np.sin(2 * np.pi * turns[:, : v.shape[1]])) ** 2
    stack = np.array([_information(v, row, modulation, noise_std) for row in squares]) + label
    values = np.linalg.eigvalsh(stack)
    flat = _wave(modulation) >= modulation.contraction
    trace = np.inf if flat else float(np.mean(1 / values))
    return ErrorBound(trace, float(np.mean(1 / values.mean(axis=1))))


def cosine_noise_log_density(value: ArrayLike, amplitude: float, noise_std: float) -> FloatArray:
    """Log density of ρ cos U + N(0, σ²), U uniform: what is added along a direction with secret phases.

    Parameters
    ----------
    value : array_like
        Where to evaluate, any shape, in units of the released rows.
    amplitude : float
        ρ ≥ 0.
    noise_std : float
        σ > 0.

    Returns
    -------
    ndarray
        Of the shape of `value`.
    """
    value = np.asarray(value, dtype=np.float64)
    return _log_density_and_score(value.ravel(), amplitude, noise_std)[0].reshape(value.shape)


def cosine_noise_information(amplitude: float, noise_std: float) -> float:
    """Fisher information about the location of ρ cos U + N(0, σ²), by quadrature.

    Parameters
    ----------
    amplitude : float
        ρ ≥ 0, in units of the released rows.
    noise_std : float
        σ > 0, in the same units.

    Returns
    -------
    float
        Between 1/(σ² + ρ²/2) and 1/σ², in inverse squared units.

    Raises
    ------
    InvalidParameterError
        If an argument is out of range.

    Examples
    --------
    >>> round(cosine_noise_information(0.0, 2.0), 9)
    0.25
    """
    rho = check_real("amplitude", amplitude, low=0)
    sigma = check_real("noise_std", noise_std, low=0, low_open=True)
    reach = rho + 10 * sigma
    grid = np.linspace(-reach, reach, 2 * int(np.ceil(16 * reach / sigma)) + 1)
    log_density, score = _log_density_and_score(grid, rho, sigma)
    # The trapezoidal rule on a smooth function that vanishes at both ends converges geometrically.
    return float(np.sum(np.exp(log_density) * score**2) * (grid[1] - grid[0]))


def _log_density_and_score(x: FloatArray, rho: float, sigma: float) -> tuple[FloatArray, FloatArray]:
    nodes = 32 + int(np.ceil(8 * rho / sigma))
    gap = (x[:, None] - rho * np.cos(np.pi * (np.arange(nodes) + 0.5) / nodes)) / sigma
    exponent = -0.5 * gap**2
    top = exponent.max(axis=1)
    weight = np.exp(exponent - top[:, None])
    total = weight.sum(axis=1)
    log_density = np.asarray(top + np.log(total / nodes) - np.log(sigma) - 0.5 * np.log(2 * np.pi))
    return log_density, -np.sum(weight * gap, axis=1) / total / sigma


def frame_of(directions: ArrayLike, modulation: Modulation) -> FloatArray:
    """Checked directions of shape (d, m), where d is only known from them."""
    v = np.asarray(directions, dtype=np.float64)
    rows = v.shape[0] if v.ndim == 2 else -1
    return check_directions(v, num_features=rows, num_directions=modulation.num_directions)


def _wave(modulation: Modulation) -> float:
    # ρω, the steepest slope of the cosine term.
    return (
        modulation.effective_amplitude * modulation.frequency / math.sqrt(max(modulation.num_directions, 1))
    )


def _slopes(modulation: Modulation, sines: FloatArray) -> FloatArray:
    return modulation.contraction - _wave(modulation) * sines


def _information(v: FloatArray, squares: FloatArray, modulation: Modulation, noise_std: float) -> FloatArray:
    # (κ²(I − VVᵀ) + Σ squares_j v_jv_jᵀ)/σ².
    sigma = check_real("noise_std", noise_std, low=0, low_open=True)
    plain = modulation.contraction**2
    return np.asarray((plain * np.eye(len(v)) + (v * (squares - plain)) @ v.T) / sigma**2)


def label_information(beta: ArrayLike | None, residual_std: float | None, length: int) -> FloatArray:
    """What a public label adds, ββᵀ/σ_y², shape (d, d); zero where neither is given."""
    if beta is None and residual_std is None:
        return np.zeros((length, length))
    if beta is None or residual_std is None:
        raise InvalidParameterError("beta and residual_std must be given together, or neither")
    b = check_vector("beta", beta, length=length)
    return np.outer(b, b) / check_real("residual_std", residual_std, low=0, low_open=True) ** 2
