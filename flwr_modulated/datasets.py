"""Tasks, their splits and shares, the R² to compare with, and the reader of a device's own file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy.linalg import lstsq

from ._tables import read_table
from ._tasks import TASKS, Task, load_task, read_only
from ._typing import FloatArray
from ._validate import check_int, check_matrix, check_real, check_varying, check_vector
from .errors import InvalidDataError

__all__ = [
    "TASKS",
    "Split",
    "Task",
    "load_task",
    "ols_r2",
    "partition",
    "r2_score",
    "read_table",
    "split_task",
    "synthetic_task",
]


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """A task cut into 60 % training, 20 % validation and 20 % test rows, standardised.

    Attributes
    ----------
    task : str
        Name of the task.
    seed : int
        Seed of the permutation.
    feature_names : tuple of str
        One name a column.
    label_name : str
        Name of the label.
    train_features, validation_features, test_features : ndarray of shape (k, d)
        ``(features - centre) / scale``.
    train_labels, validation_labels, test_labels : ndarray of shape (k,)
        ``(labels - label_centre) / label_scale``.
    centre, scale : ndarray of shape (d,)
        Mean and standard deviation (divisor n) of the training features, original units.
    label_centre, label_scale : float
        The same of the training labels.

    Notes
    -----
    Centre and scale are **non-private** statistics of the training rows, as in the paper
    (arXiv:2605.07233): no guarantee covers them. In a deployment they are public
    constants of the study, chosen without looking at the data.
    """

    task: str
    seed: int
    feature_names: tuple[str, ...]
    label_name: str
    train_features: FloatArray
    train_labels: FloatArray
    validation_features: FloatArray
    validation_labels: FloatArray
    test_features: FloatArray
    test_labels: FloatArray
    centre: FloatArray
    scale: FloatArray
    label_centre: float
    label_scale: float

    @property
    def num_features(self) -> int:
        """Number of columns d."""
        return len(self.feature_names)


def split_task(task: Task, seed: int) -> Split:
    """Split at random into 60/20/20 and standardise on the training rows (see `Split`).

    Parameters
    ----------
    task : Task
        At least 5 rows.
    seed : int
        At least 0; the same seed gives the same split of the same task.

    Raises
    ------
    InvalidParameterError
        If the seed is not a whole number of at least 0.
    InvalidDataError
        If there are fewer than 5 rows, or a column or the label is constant on the
        training rows.
    """
    seed = check_int("seed", seed, low=0)
    n = task.features.shape[0]
    if n < 5:
        raise InvalidDataError(f"task must have at least 5 rows for a 60/20/20 split, got {n}; add rows")
    order = np.random.default_rng(np.random.SeedSequence(seed)).permutation(n)
    train, validation, test = np.split(order, [n * 3 // 5, n * 3 // 5 + n // 5])
    x, y = task.features[train], task.labels[train]
    check_varying("the training split", x, task.feature_names)
    check_varying("the training split", y[:, None], [task.label_name])
    centre, scale = x.mean(axis=0), x.std(axis=0)
    label_centre, label_scale = float(y.mean()), float(y.std())

    def features_of(rows: np.ndarray[Any, Any]) -> FloatArray:
        return read_only((task.features[rows] - centre) / scale)

    def labels_of(rows: np.ndarray[Any, Any]) -> FloatArray:
        return read_only((task.labels[rows] - label_centre) / label_scale)

    return Split(
        task=task.name,
        seed=seed,
        feature_names=task.feature_names,
        label_name=task.label_name,
        train_features=features_of(train),
        train_labels=labels_of(train),
        validation_features=features_of(validation),
        validation_labels=labels_of(validation),
        test_features=features_of(test),
        test_labels=labels_of(test),
        centre=read_only(centre),
        scale=read_only(scale),
        label_centre=label_centre,
        label_scale=label_scale,
    )


def r2_score(features: ArrayLike, labels: ArrayLike, beta: ArrayLike) -> float:
    """R² = 1 − Σ(y − xᵀβ)² / Σ(y − ȳ)², with ȳ the mean of the given labels.

    Parameters
    ----------
    features : array_like of shape (n, d)
        Rows x, without an intercept.
    labels : array_like of shape (n,)
        Labels y.
    beta : array_like of shape (d,)
        Coefficients β.

    Returns
    -------
    float
        At most 1; negative where β predicts worse than the mean does.

    Raises
    ------
    InvalidDataError
        If shapes do not fit, a value is not finite, or all labels are equal.

    Examples
    --------
    >>> r2_score([[1.0], [2.0], [3.0]], [1.0, 2.0, 3.0], [1.0])
    1.0
    """
    x = check_matrix("features", features)
    y = check_vector("labels", labels, length=x.shape[0])
    b = check_vector("beta", beta, length=x.shape[1])
    if np.ptp(y) == 0:
        raise InvalidDataError("labels must not all be equal: R² is undefined; use more rows")
    residual, centred = y - x @ b, y - y.mean()
    return float(1 - residual @ residual / (centred @ centred))


def ols_r2(split: Split) -> float:
    """Test R² of the non-private least squares fit on the training rows.

    Parameters
    ----------
    split : Split
        Standardised, hence no intercept.

    Raises
    ------
    InvalidDataError
        If all test labels are equal.
    """
    # A minimum-norm solution: collinear columns predict as well as their independent part.
    beta = lstsq(split.train_features, split.train_labels)[0]
    return r2_score(split.test_features, split.test_labels, beta)


def partition(num_rows: int, num_partitions: int, partition_id: int) -> slice:
    """The contiguous share of rows that a partition holds; shares differ by at most one row.

    Parameters
    ----------
    num_rows : int
        At least 1.
    num_partitions : int
        From 1 to `num_rows`: nobody is left without a row.
    partition_id : int
        From 0 to ``num_partitions - 1``.

    Raises
    ------
    InvalidParameterError
        If a number is outside its range.

    Examples
    --------
    >>> [partition(10, 3, i) for i in range(3)]
    [slice(0, 4, None), slice(4, 7, None), slice(7, 10, None)]
    """
    n = check_int("num_rows", num_rows, low=1)
    hint = f"there are {n} rows; use fewer partitions or more rows"
    parts = check_int("num_partitions", num_partitions, low=1, high=n, hint=hint)
    i = check_int("partition_id", partition_id, low=0, high=parts - 1)
    size, extra = divmod(n, parts)
    start = i * size + min(i, extra)
    return slice(start, start + size + (i < extra))


def synthetic_task(
    num_samples: int,
    num_features: int,
    *,
    r2: float = 0.5,
    correlation: float = 0.0,
    rng: np.random.Generator,
) -> tuple[Task, FloatArray]:
    """Draw a Gaussian design with known coefficients and the population R² asked for.

    Parameters
    ----------
    num_samples, num_features : int
        Rows n and columns d, at least 1 each.
    r2 : float, default 0.5
        Population R² in [0, 1].
    correlation : float, default 0.0
        ρ in (−1, 1): columns j and k correlate by ρ^|j − k| (a first-order autoregression).
    rng : numpy.random.Generator
        Source of the coefficients and the rows.

    Returns
    -------
    task : Task
        Columns and label have mean 0 and variance 1 in the population, so it can be used
        with or without a split.
    beta : ndarray of shape (d,)
        The true coefficients: a random direction, scaled so that βᵀΣβ = r2.

    Raises
    ------
    InvalidParameterError
        If a parameter is outside its range.
    """
    n = check_int("num_samples", num_samples, low=1)
    d = check_int("num_features", num_features, low=1)
    r2 = check_real("r2", r2, low=0, high=1)
    rho = check_real("correlation", correlation, low=-1, high=1, low_open=True, high_open=True)
    lag = np.arange(d)
    Sigma = rho ** np.abs(lag[:, None] - lag)
    beta = rng.standard_normal(d)
    beta *= np.sqrt(r2 / (beta @ Sigma @ beta))
    x = rng.standard_normal((n, d))
    for j in range(1, d):
        x[:, j] = rho * x[:, j - 1] + np.sqrt(1 - rho**2) * x[:, j]
    y = x @ beta + np.sqrt(1 - r2) * rng.standard_normal(n)
    task = Task(
        name="synthetic",
        features=read_only(x),
        labels=read_only(y),
        feature_names=tuple(f"x{j}" for j in range(1, d + 1)),
        label_name="y",
        description=f"Gaussian design, population R² {r2:g}, neighbouring columns correlate by {rho:g}",
    )
    return task, read_only(beta)
