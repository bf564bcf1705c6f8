"""The data that simulated devices of the reference app hold, and the server's test rows."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from ..datasets import TASKS, Split, Task, load_task, read_table, split_task, synthetic_task
from ..errors import InvalidParameterError
from .run_config import RunConfig

__all__ = ["simulated_split"]

_SYNTHETIC_ROWS, _SYNTHETIC_FEATURES = 10_000, 5


def simulated_split(config: RunConfig) -> Split:
    """Split and standardise the run's task; loaded once a process.

    Parameters
    ----------
    config : RunConfig
        Of a simulated run.

    Returns
    -------
    Split
        Simulated devices hold its training rows; test rows only measure.

    Raises
    ------
    InvalidParameterError, InvalidDataError
        If there is no such task, or the file cannot be used.
    ImportError
        If a library that reads it is missing.
    """
    return _split(config.task, config.label, config.feature_names, config.seed)


@lru_cache(maxsize=2)
def _split(name: str, label: str, feature_names: tuple[str, ...], seed: int) -> Split:
    if name.endswith((".csv", ".parquet")):
        features, labels, names = read_table(name, label=label, features=feature_names or None)
        task = Task(name, features, labels, names, label, "a file")
    elif name == "synthetic":
        rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(1,)))
        task, _ = synthetic_task(_SYNTHETIC_ROWS, _SYNTHETIC_FEATURES, rng=rng)
    elif name in TASKS:
        task = load_task(name)
    else:
        raise InvalidParameterError(
            f"task must be one of {', '.join(TASKS)}, synthetic, or a file that ends in .csv or .parquet"
        )
    return split_task(task, seed)
