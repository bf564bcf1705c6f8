"""Reads a device's own CSV or Parquet file; no message shows a value or the path.

This runs on the device and its exceptions may travel, so whatever a parser says about
the text that it failed on is dropped, not chained.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ._typing import FloatArray
from .errors import InvalidDataError, InvalidParameterError

__all__ = ["read_table"]

Constants = Mapping[str, float] | ArrayLike | None

# A first line that does not look like names may be a person's row in a file without header.
_NAME_LIKE = re.compile(r"[^\W\d][\w .%()/-]*")


def read_table(
    path: str | PathLike[str],
    *,
    label: str,
    features: Sequence[str] | None = None,
    centre: Constants = None,
    scale: Constants = None,
) -> tuple[FloatArray, FloatArray, tuple[str, ...]]:
    """Read features and labels from a device's own file; a single row is fine.

    Parameters
    ----------
    path : str or PathLike
        A ``.csv`` (comma separated, UTF-8, names on the first line) or ``.parquet`` file.
    label : str
        Column of the labels.
    features : sequence of str, optional
        Columns of the features, in the study's order; default all other columns.
    centre, scale : mapping of column name to float, or array_like of shape (d,), optional
        **Public constants** of the study, in the units of the file; the result is
        ``(value - centre) / scale``. Do not compute them from the file: that would
        release a statistic of it outside the guarantee. A mapping names every feature and
        may name the label; an array is in the order of the features and leaves the
        label as it is. Default 0 and 1.

    Returns
    -------
    features : ndarray of shape (n, d)
        Shifted and scaled features.
    labels : ndarray of shape (n,)
        Labels; shifted and scaled if `centre` and `scale` name them.
    feature_names : tuple of str
        One name a column.

    Raises
    ------
    InvalidParameterError
        If there is no such file, its ending is unknown, `label` or `features` are not
        different columns of it, or `centre` or `scale` do not fit or are out of range.
    InvalidDataError
        If the file cannot be parsed, has no rows, or a column in use is not numeric, has
        gaps or is not finite.
    ImportError
        If pandas (or pyarrow, for Parquet) is not installed.
    """
    frame = _read(Path(path))
    names = _feature_names(frame, Path(path), label, features)
    columns = (*names, label)
    if len(frame) == 0:
        raise InvalidDataError("the file must have at least one row of data, got none")
    numeric = import_module("pandas").api.types.is_numeric_dtype
    text = [column for column in columns if not numeric(frame[column].dtype)]
    if text:
        raise InvalidDataError(
            f"column(s) {', '.join(text)} must be numeric: encode text as numbers or leave them out"
        )
    table = frame[list(columns)].to_numpy(dtype=np.float64, na_value=np.nan)
    gaps = [
        column for column, whole in zip(columns, np.isfinite(table).all(axis=0), strict=True) if not whole
    ]
    if gaps:
        raise InvalidDataError(
            f"column(s) {', '.join(gaps)} must be finite, got empty, NaN or infinite cells: "
            "fill or drop such rows"
        )
    centres = _constants("centre", centre, names, label, default=0.0)
    scales = _constants("scale", scale, names, label, default=1.0)
    if (scales <= 0).any():
        raise InvalidParameterError(
            "scale must be in (0, ∞) for every column; use 1 to keep a column as it is"
        )
    table = (table - centres) / scales
    return np.ascontiguousarray(table[:, :-1]), table[:, -1].copy(), names


def _read(path: Path) -> Any:
    """The whole file as a data frame."""
    if path.suffix.lower() not in (".csv", ".parquet"):
        raise InvalidParameterError("path must end in .csv or .parquet; convert the file or rename it")
    if not path.is_file():
        raise InvalidParameterError(
            "path must be an existing file, found none; a relative path starts at the working directory"
        )
    parquet = path.suffix.lower() == ".parquet"
    for module in ("pandas", "pyarrow") if parquet else ("pandas",):
        try:
            import_module(module)
        except ImportError as error:
            raise ImportError(
                f"reading this file needs {module}: pip install {module}, "
                "or pip install 'flwr-modulated[simulation]'"
            ) from error
    pandas = import_module("pandas")
    frame = None
    try:
        if parquet:
            frame = pandas.read_parquet(path)
        else:
            frame = pandas.read_csv(path, skipinitialspace=True, low_memory=False)
    except Exception:  # a parser's message may quote the row, so none of it may go on
        frame = None
    # With more fields in a row than names pandas makes an index of the first and shifts the rest.
    if frame is None or (not parquet and not isinstance(frame.index, pandas.RangeIndex)):
        raise InvalidDataError(
            "the file could not be read as a table: check that it is readable, that CSV is comma separated "
            "UTF-8, that no row has more fields than the first line has names, and that no name is repeated"
        )
    frame.columns = [str(column) for column in frame.columns]
    return frame


def _feature_names(frame: Any, path: Path, label: str, features: Sequence[str] | None) -> tuple[str, ...]:
    """Check label and features against the columns of the file."""
    available = list(frame.columns)
    if isinstance(features, str):
        raise InvalidParameterError("features must be a sequence of column names, got str; use a list")
    wanted = [column for column in available if column != label] if features is None else list(features)
    if features is None and label in available and any(name.startswith("Unnamed: ") for name in wanted):
        raise InvalidParameterError(
            "features must be listed, as the file has a column without a name (a saved index?)"
        )
    if not wanted:
        raise InvalidParameterError("features must name at least one column besides the label, got none")
    if len({label, *wanted}) != len(wanted) + 1:
        raise InvalidParameterError("label and features must all be different columns; drop the repeated one")
    unknown = [column for column in (label, *wanted) if column not in available]
    if not unknown:
        return tuple(wanted)
    argument = "label" if label in unknown else "features"
    found_some = len(unknown) < 1 + (0 if features is None else len(wanted))
    is_header = path.suffix.lower() == ".parquet" or found_some
    if is_header or all(_NAME_LIKE.fullmatch(column) for column in available):
        advice = f"available: {', '.join(available)}"
    else:
        advice = "the file's first line does not look like column names; add a header, separated by commas"
    raise InvalidParameterError(
        f"{argument} must be columns of the file, which has no {', '.join(map(str, unknown))}; {advice}"
    )


def _constants(
    name: str, value: Constants, features: tuple[str, ...], label: str, *, default: float
) -> FloatArray:
    """One public constant a column, the label's last."""
    d = len(features)
    if value is None:
        return np.full(d + 1, default)
    if isinstance(value, Mapping):
        unknown = sorted(set(map(str, value)) - {*features, label})
        missing = [column for column in features if column not in value]
        if unknown or missing:
            raise InvalidParameterError(
                f"{name} must name every feature, the label if wanted, and nothing else; "
                f"unknown: {', '.join(unknown) or 'none'}; missing: {', '.join(missing) or 'none'}"
            )
        value = [*(value[column] for column in features), value.get(label, default)]
    else:
        value = [*np.ravel(np.asarray(value)), default] if np.ndim(value) == 1 else []
    try:
        array = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError):
        array = np.array([])
    if array.shape != (d + 1,) or not np.isfinite(array).all():
        raise InvalidParameterError(
            f"{name} must hold one finite number for each of the {d} feature(s): {', '.join(features)}"
        )
    return array
