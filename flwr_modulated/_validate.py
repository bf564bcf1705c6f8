"""Argument checks that name the argument, its constraint and the next step.

Checks on data name the fault and never a value: a device's exception may travel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import get_args

import numpy as np
from numpy.typing import ArrayLike

from ._typing import FloatArray
from .errors import InvalidDataError, InvalidParameterError

_MANY = 1024


def check_real(
    name: str,
    value: object,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    low_open: bool = False,
    high_open: bool = False,
    hint: str = "",
) -> float:
    """Return `value` as a float if it is a finite number in the interval."""
    number = math.nan
    if type(value) is float or (isinstance(value, Real) and not isinstance(value, bool)):
        number = float(value)
        inside = (number > low if low_open else number >= low) and (
            number < high if high_open else number <= high
        )
        if inside and math.isfinite(number):
            return number
    interval = f"{'(' if low_open else '['}{low:g}, {high:g}{')' if high_open else ']'}"
    advice = f"; {hint}" if hint else ""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InvalidParameterError(
            f"{name} must be a number in {interval}, got {type(value).__name__}{advice}"
        )
    raise InvalidParameterError(f"{name} must be finite and in {interval}, got {number:g}{advice}")


def check_int(name: str, value: object, *, low: int, high: int | None = None, hint: str = "") -> int:
    """Return `value` as an int if it is a whole number in ``[low, high]``."""
    if type(value) is int and value >= low and (high is None or value <= high):
        return value
    interval = f"[{low}, {'∞' if high is None else high}]"
    advice = f"; {hint}" if hint else ""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InvalidParameterError(
            f"{name} must be a whole number in {interval}, got {type(value).__name__}{advice}"
        )
    number = int(value)
    if number < low or (high is not None and number > high):
        raise InvalidParameterError(f"{name} must be in {interval}, got {number}{advice}")
    return number


def check_choice(name: str, value: object, alias: object) -> None:
    """Raise unless `value` is one of the strings of the ``Literal`` `alias`."""
    choices = get_args(alias)
    if value not in choices:
        listed = ", ".join(repr(choice) for choice in choices)
        raise InvalidParameterError(f"{name} must be one of {listed}, got {value!r}")


def check_matrix(
    name: str, value: ArrayLike, *, num_columns: int | None = None, min_rows: int = 1, finite: bool = True
) -> FloatArray:
    """Return `value` as a finite (n, d) float array; the error never shows a value.

    With ``finite=False`` the values are left to a caller that looks at them anyway.
    """
    try:
        array = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError):
        raise InvalidDataError(f"{name} must be numeric; encode text and drop missing columns") from None
    if array.ndim != 2:
        raise InvalidDataError(
            f"{name} must have shape (rows, features), got {array.ndim} dimension(s); "
            "use reshape(1, -1) for a single row"
        )
    if array.shape[0] < min_rows or array.shape[1] < 1:
        raise InvalidDataError(
            f"{name} must have at least {min_rows} row(s) and one column, got shape {array.shape}"
        )
    if num_columns is not None and array.shape[1] != num_columns:
        raise InvalidDataError(f"{name} must have {num_columns} column(s), got {array.shape[1]}")
    if finite:
        require_finite(name, array)
    return array


def check_vector(name: str, value: ArrayLike, *, length: int | None = None) -> FloatArray:
    """Return `value` as a finite (n,) float array; the error never shows a value."""
    try:
        array = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError):
        raise InvalidDataError(f"{name} must be numeric") from None
    if array.ndim != 1 or (length is not None and array.shape[0] != length):
        wanted = "(n,)" if length is None else f"({length},)"
        raise InvalidDataError(f"{name} must have shape {wanted}, got {array.shape}")
    require_finite(name, array)
    return array


def check_varying(name: str, array: FloatArray, columns: Sequence[str]) -> None:
    """Raise if a column is constant, naming the columns (never their values)."""
    spread = np.ptp(array, axis=0)
    constant = [column for column, width in zip(columns, spread, strict=True) if width == 0]
    if constant:
        raise InvalidDataError(
            f"{name} has constant column(s) {', '.join(constant)}: they cannot be standardised; drop them"
        )


def require_finite(name: str, array: FloatArray) -> None:
    """Raise if a value is NaN or infinite; the error never shows a value."""
    if array.size > _MANY:  # a finite sum has finite terms only, and needs no array of flags
        with np.errstate(over="ignore", invalid="ignore"):
            if math.isfinite(array.sum()):
                return
    if not np.isfinite(array).all():
        raise InvalidDataError(f"{name} must be finite, got NaN or infinity; drop or fill such rows first")
