"""The split of a cell: a task's rows, or rows drawn from a model with known coefficients."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np

from flwr_modulated import Moments
from flwr_modulated._typing import FloatArray
from flwr_modulated.datasets import Split, load_task, ols_r2, partition, r2_score, split_task

from .settings import SYNTHETIC, Cell
from .synthetic import SyntheticRows

# The synthetic task: Gaussian rows with identity covariance.
SYNTHETIC_R2 = 0.5
_HELD_OUT_ROWS = 10_000


# What tells the data of two cells apart: task, seed, clients, features.
DataKey = tuple[str, int, int, int]


def data_key(cell: Cell) -> DataKey:
    """The key of a cell's data: all cells that share it share a split."""
    return cell.task, cell.seed, cell.num_clients, cell.num_features


def cell_split(cell: Cell) -> Split:
    """The split of a cell; for the synthetic task ``num_clients`` training rows."""
    return _split(data_key(cell))


def node_share(cell: Cell, node: int, num_nodes: int) -> tuple[FloatArray, FloatArray]:
    """Features and labels of the one-row clients that a node hosts."""
    split = cell_split(cell)
    share = partition(len(split.train_labels), num_nodes, node)
    return split.train_features[share], split.train_labels[share]


def true_coefficients(cell: Cell) -> FloatArray | None:
    """The coefficients that generated the labels, where they are known."""
    return _rows(data_key(cell)).beta if cell.task == SYNTHETIC else None


def least_squares_r2(cell: Cell) -> float:
    """Test R² of the non-private fit on the training rows."""
    return _least_squares_r2(data_key(cell))


def feature_covariance(cell: Cell) -> FloatArray:
    """Covariance (d, d) of the training features."""
    return _covariance(data_key(cell))


def discard_files(cell: Cell) -> None:
    """Remove what the cell's task has left on this machine's disk."""
    if cell.task == SYNTHETIC:
        rows = _rows(data_key(cell))
        for part in (rows, *_held_out(rows)):
            part.discard()


def _rows(key: DataKey) -> SyntheticRows:
    _, seed, num_clients, num_features = key
    return SyntheticRows(seed, num_clients, num_features, SYNTHETIC_R2)


def _split(key: DataKey) -> Split:
    return _synthetic(key) if key[0] == SYNTHETIC else _real(*key[:2])


@lru_cache(maxsize=32)
def _real(task: str, seed: int) -> Split:
    return split_task(load_task(task), seed)


@lru_cache(maxsize=64)
def _training_sums(key: DataKey) -> Moments:
    split = _split(key)
    return Moments.from_rows(split.train_features, split.train_labels, noise_std=0.0)


@lru_cache(maxsize=64)
def _least_squares_r2(key: DataKey) -> float:
    split = _split(key)
    if key[0] != SYNTHETIC:
        return ols_r2(split)
    # By normal equations: the rows may be too many for a copy in memory, and are well conditioned.
    sums = _training_sums(key)
    return r2_score(split.test_features, split.test_labels, np.linalg.solve(sums.gram, sums.cross))


@lru_cache(maxsize=64)
def _covariance(key: DataKey) -> FloatArray:
    sums = _training_sums(key)
    n, total = sums.num_samples, sums.total
    return np.asarray((sums.gram - np.outer(total, total) / n) / (n - 1))


def _held_out(rows: SyntheticRows) -> list[SyntheticRows]:
    return [replace(rows, num_rows=_HELD_OUT_ROWS, part=part) for part in (1, 2)]


@lru_cache(maxsize=2)
def _synthetic(key: DataKey) -> Split:
    rows = _rows(key)
    train_features, train_labels = rows.load()
    validation, test = (part.load() for part in _held_out(rows))
    # Mean 0 and variance 1 in the population: nothing is standardised.
    return Split(
        task=SYNTHETIC,
        seed=rows.seed,
        feature_names=tuple(f"x{j}" for j in range(1, rows.num_features + 1)),
        label_name="y",
        train_features=train_features,
        train_labels=train_labels,
        validation_features=validation[0],
        validation_labels=validation[1],
        test_features=test[0],
        test_labels=test[1],
        centre=np.zeros(rows.num_features),
        scale=np.ones(rows.num_features),
        label_centre=0.0,
        label_scale=1.0,
    )
