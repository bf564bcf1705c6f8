"""The five regression tasks, from data that statsmodels ships (imported on first use)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike

from ._typing import FloatArray
from ._validate import check_choice, check_matrix, check_vector

__all__ = ["TASKS", "Task", "load_task"]

TaskName = Literal["co2", "fair", "modechoice", "randhie_lncoins", "randhie_fmde"]
TASKS: tuple[str, ...] = get_args(TaskName)


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """A regression task in its original units.

    Attributes
    ----------
    name : str
        Short name.
    features : ndarray of shape (n, d)
        One row a client; no intercept column.
    labels : ndarray of shape (n,)
        What is regressed on the features.
    feature_names : tuple of str
        One name a column.
    label_name : str
        Name of the label.
    description : str
        Source and meaning, in one sentence.

    Raises
    ------
    InvalidDataError
        If the shapes do not fit together or a value is not finite.
    """

    name: str
    features: FloatArray
    labels: FloatArray
    feature_names: tuple[str, ...]
    label_name: str
    description: str

    def __post_init__(self) -> None:
        rows = check_matrix("features", self.features, num_columns=len(self.feature_names))
        check_vector("labels", self.labels, length=rows.shape[0])


@cache
def load_task(name: str) -> Task:
    """One of the five tasks of `TASKS`, with read-only arrays; loaded once a process.

    Parameters
    ----------
    name : str
        ``"co2"`` (2284 × 7), ``"fair"`` (6366 × 8), ``"modechoice"`` (840 × 7),
        ``"randhie_lncoins"`` or ``"randhie_fmde"`` (20190 × 9).

    Raises
    ------
    InvalidParameterError
        If there is no such task.
    ImportError
        If statsmodels or pandas is not installed.

    Notes
    -----
    The data ship with statsmodels. The paper (arXiv:2605.07233) does not list the columns
    of ``co2`` and ``modechoice``; ours are inferred from its numbers of rows and columns
    and its R². ``modechoice`` has four rows a traveller and ``randhie`` several years a
    person: a client here is a row, and a random split cuts through persons.
    """
    check_choice("name", name, TaskName)
    if name == "co2":
        return _co2()
    if name == "fair":
        about = "Fair (1978), extramarital affairs survey: years married on the other columns"
        return _regress(name, "fair", "yrs_married", about)
    if name == "modechoice":
        about = (
            "Greene, travel mode choice: generalised cost on the other columns, without the traveller's id"
        )
        return _regress(name, "modechoice", "gc", about, drop=("individual",))
    about = "RAND health insurance experiment: {} on the other columns"
    if name == "randhie_lncoins":
        return _regress(name, "randhie", "lncoins", about.format("log(coinsurance rate + 1)"))
    return _regress(name, "randhie", "fmde", about.format("log deductible expenditure limit"))


def _co2() -> Task:
    """Weekly CO₂ at Mauna Loa on a cubic trend and two yearly harmonics."""
    level = _shipped("co2")["co2"].interpolate()
    u = np.arange(len(level)) / len(level)
    angle = 2 * np.pi * level.index.day_of_year.to_numpy() / 365.25
    columns = {"u": u, "u2": u**2, "u3": u**3}
    for k in (1, 2):
        columns |= {f"sin{k}": np.sin(k * angle), f"cos{k}": np.cos(k * angle)}
    return Task(
        name="co2",
        features=read_only(np.column_stack(list(columns.values()))),
        labels=read_only(level.to_numpy(dtype=np.float64)),
        feature_names=tuple(columns),
        label_name="co2",
        description="Weekly atmospheric CO₂ at Mauna Loa, 1958 to 2001, 59 gaps interpolated: "
        "level on a cubic trend and two yearly harmonics",
    )


def _regress(name: str, source: str, label: str, description: str, drop: tuple[str, ...] = ()) -> Task:
    """A task of one column of a data set that statsmodels ships on its other columns."""
    data = _shipped(source)
    rest = data.drop(columns=[label, *drop])
    return Task(
        name=name,
        features=read_only(rest.to_numpy(dtype=np.float64)),
        labels=read_only(data[label].to_numpy(dtype=np.float64)),
        feature_names=tuple(rest.columns),
        label_name=label,
        description=description,
    )


def _shipped(source: str) -> Any:
    """The data frame of a data set of statsmodels."""
    try:
        # Not statsmodels.api: that loads every model and takes four times as long.
        module = import_module(f"statsmodels.datasets.{source}")
    except ImportError as error:
        raise ImportError(
            "the tasks need statsmodels and pandas: pip install 'flwr-modulated[simulation]'"
        ) from error
    return module.load_pandas().data


def read_only(array: ArrayLike) -> FloatArray:
    """A read-only contiguous copy: tasks are cached, so nobody may write into them."""
    copy = np.array(array, dtype=np.float64, order="C")
    copy.setflags(write=False)
    return copy
