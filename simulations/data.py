"""The split of a cell: a task's rows, or rows drawn from a model with known coefficients."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from flwr_modulated._typing import FloatArray
from flwr_modulated.datasets import Split, load_task, split_task, synthetic_task

from .settings import SYNTHETIC, Cell

# The synthetic task: Gaussian rows with identity covariance.
SYNTHETIC_FEATURES = 8
SYNTHETIC_R2 = 0.5
_HELD_OUT_ROWS = 10_000


def cell_split(cell: Cell) -> Split:
    """The split of a cell; for the synthetic task ``num_clients`` training rows."""
    if cell.task == SYNTHETIC:
        return _synthetic(cell.seed, cell.num_clients)[0]
    return _real(cell.task, cell.seed)


def true_coefficients(cell: Cell) -> FloatArray | None:
    """The coefficients that generated the labels, where they are known."""
    return _synthetic(cell.seed, cell.num_clients)[1] if cell.task == SYNTHETIC else None


@lru_cache(maxsize=32)
def _real(task: str, seed: int) -> Split:
    return split_task(load_task(task), seed)


@lru_cache(maxsize=2)  # a million rows each
def _synthetic(seed: int, num_clients: int) -> tuple[Split, FloatArray]:
    rng = np.random.default_rng(np.random.SeedSequence([seed], spawn_key=(2,)))
    task, beta = synthetic_task(
        num_clients + 2 * _HELD_OUT_ROWS, SYNTHETIC_FEATURES, r2=SYNTHETIC_R2, rng=rng
    )
    train = slice(0, num_clients)
    validation = slice(num_clients, num_clients + _HELD_OUT_ROWS)
    test = slice(num_clients + _HELD_OUT_ROWS, None)
    # Mean 0 and variance 1 in the population: nothing is standardised.
    split = Split(
        task=task.name,
        seed=seed,
        feature_names=task.feature_names,
        label_name=task.label_name,
        train_features=task.features[train],
        train_labels=task.labels[train],
        validation_features=task.features[validation],
        validation_labels=task.labels[validation],
        test_features=task.features[test],
        test_labels=task.labels[test],
        centre=np.zeros(SYNTHETIC_FEATURES),
        scale=np.ones(SYNTHETIC_FEATURES),
        label_centre=0.0,
        label_scale=1.0,
    )
    return split, beta
