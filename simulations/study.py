"""A study: cells run one after another over the same nodes, each giving one record.

One Flower run hosts many cells. A request names its cell; the simulated device looks
up there what it has decided for itself, and hosts its share of the training split's
one-row clients.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.client import Client, NumPyClient
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from flwr_modulated import Auto, GradientDescent, ModulatedClient, ModulatedStrategy, Ridge
from flwr_modulated._typing import FloatArray
from flwr_modulated.datasets import Split, load_task, ols_r2, partition, r2_score, split_task
from flwr_modulated.estimators import Estimator

from .baselines import REPLACE_ANY_RECORD, LocalDpClient, fedavg_for_numpy_clients, local_dp_noise_std
from .engines import run_federation
from .settings import Cell, Engine

Record = dict[str, Any]


@lru_cache(maxsize=32)
def _split(task: str, seed: int) -> Split:
    return split_task(load_task(task), seed)


@dataclass(frozen=True, slots=True)
class CellTable:
    """Cells by name. Compact, since Ray pickles it with every message.

    Cells that differ only in ε and seed share an entry; the name carries those two.
    """

    prototypes: dict[str, Cell]

    @classmethod
    def of(cls, cells: Iterable[Cell]) -> CellTable:
        """Collect the prototypes of `cells`."""
        return cls({cls._prototype_key(cell): cell for cell in cells})

    @staticmethod
    def _prototype_key(cell: Cell) -> str:
        return f"{cell.task}/{cell.method_name}"

    def name(self, cell: Cell, first_seed: int) -> str:
        """Public name of a cell; splits are numbered from 0, so that no seed travels."""
        return f"{self._prototype_key(cell)}/{cell.epsilon!r}/{cell.seed - first_seed}"

    def find(self, name: str, first_seed: int) -> Cell:
        """The cell of a name."""
        task, method, epsilon, split = name.split("/")
        prototype = self.prototypes[f"{task}/{method}"]
        return replace(prototype, epsilon=float(epsilon), seed=first_seed + int(split))


def make_client_app(table: CellTable, first_seed: int) -> ClientApp:
    """Build the ClientApp of all nodes of a study."""

    def client_fn(context: Context) -> Client:
        node, num_nodes = int(context.node_config["partition-id"]), int(context.node_config["num-partitions"])
        return _StudyClient(table, first_seed, node, num_nodes).to_client()

    return ClientApp(client_fn)


class _StudyClient(NumPyClient):
    """Hands a request to the client of the cell that it names."""

    def __init__(self, table: CellTable, first_seed: int, node: int, num_nodes: int) -> None:
        self._table, self._first_seed = table, first_seed
        self._node, self._num_nodes = node, num_nodes

    def fit(self, parameters: list[Any], config: dict[str, Any]) -> tuple[list[Any], int, dict[str, Any]]:
        cell = self._table.find(str(config["study"]), self._first_seed)
        split = _split(cell.task, cell.seed)
        share = partition(len(split.train_labels), self._num_nodes, self._node)
        features, labels = split.train_features[share], split.train_labels[share]

        def rng(server_round: int) -> np.random.Generator:
            return noise_stream(cell.seed, self._node, server_round)

        client: NumPyClient
        if cell.method_name == "local_dp_fedavg":
            client = LocalDpClient(
                features,
                labels,
                clip=cell.setting("clip"),
                step=cell.setting("step"),
                noise_std=local_dp_noise_std(cell),
                rng=rng,
            )
        else:
            client = ModulatedClient(lambda: (features, labels), cell.policy, rng=rng)
        return client.fit(parameters, config)


def noise_stream(seed: int, node: int, server_round: int) -> np.random.Generator:
    """Randomness of a simulated node in a round; a device would ask its operating system."""
    return np.random.Generator(np.random.SFC64(np.random.SeedSequence([seed, node, server_round])))


def run_study(
    cells: Sequence[Cell], engine: Engine, on_record: Callable[[Record], None] | None = None
) -> list[Record]:
    """Run cells in order over the nodes of one engine.

    Parameters
    ----------
    cells : sequence of Cell
        What to run.
    engine : Engine
        Where to run it.
    on_record : callable, optional
        Called with each record as soon as its cell is done, so that a later
        failure loses nothing.

    Returns
    -------
    list of dict
        One record a cell.
    """
    table, first_seed = CellTable.of(cells), min(cell.seed for cell in cells)
    records: list[Record] = []

    def server(grid: Grid) -> None:
        for cell in cells:
            record = _run_cell(cell, table.name(cell, first_seed), grid, engine)
            records.append(record)
            if on_record is not None:
                on_record(record)

    run_federation(server, make_client_app(table, first_seed), engine)
    return records


def append_record(path: Path, record: Record) -> None:
    """Append one JSON line."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record, allow_nan=False) + "\n")


def _estimator(cell: Cell) -> Estimator:
    if cell.method_name == "ridge":
        return Ridge(cell.setting("penalty"))
    if cell.method_name == "iterative":
        return GradientDescent(cell.setting("step"), radius=cell.setting("radius"))
    return Auto()


def _run_cell(cell: Cell, name: str, grid: Grid, engine: Engine) -> Record:
    split = _split(cell.task, cell.seed)
    begin = time.perf_counter()
    if cell.method_name == "local_dp_fedavg":
        beta, details = _run_fedavg(cell, name, grid, engine, split.num_features)
    else:
        beta, details = _run_modulated(cell, name, grid, engine, split.num_features)
    seconds = time.perf_counter() - begin
    return {
        "task": cell.task,
        "method": cell.method_name,
        "epsilon": cell.epsilon,
        "delta": cell.delta,
        "relation": str(cell.guarantee_relation),
        "unit": "row",
        "accounting": cell.accounting,
        "sensitivity": cell.setting("sensitivity"),
        "alpha": cell.modulation.alpha,
        "amplitude": cell.modulation.amplitude,
        "frequency": cell.modulation.frequency,
        "num_directions": cell.modulation.num_directions,
        "num_rounds": cell.num_rounds,
        "step": cell.setting("step"),
        "penalty": cell.setting("penalty"),
        "radius": cell.setting("radius"),
        "clip": cell.setting("clip"),
        "num_clients": len(split.train_labels),
        "num_features": split.num_features,
        "num_nodes": engine.num_nodes,
        "engine": engine.name,
        "seed": cell.seed,
        "r2": r2_score(split.test_features, split.test_labels, beta),
        "r2_ols": ols_r2(split),
        "beta": beta.tolist(),
        "feature_names": list(split.feature_names),
        "seconds": round(seconds, 4),
        "versions": _versions(),
        **details,
    }


def _run_modulated(
    cell: Cell, name: str, grid: Grid, engine: Engine, num_features: int
) -> tuple[FloatArray, Record]:
    relation = cell.guarantee_relation
    iterative = cell.method_name == "iterative"
    strategy = ModulatedStrategy(
        _estimator(cell),
        modulation=cell.modulation,
        mode="iterative" if iterative else "one-shot",
        label_scale=getattr(relation, "label_scale", None),
        min_available_nodes=engine.num_nodes,
        min_replies=engine.num_nodes,
        study=name,
        # Public randomness: directions only. A stream apart from every node's noise.
        rng=np.random.default_rng(np.random.SeedSequence([cell.seed], spawn_key=(1,))),
    )
    strategy.start(grid, initial_arrays=ArrayRecord([np.zeros(num_features)]), num_rounds=cell.num_rounds)
    details: Record = {
        "noise_std": cell.policy.mechanism(cell.modulation).noise_std,
        "bytes_received": strategy.bytes_received,
    }
    if iterative:
        split = _split(cell.task, cell.seed)
        details["r2_average_iterate"] = r2_score(
            split.test_features, split.test_labels, strategy.average_iterate
        )
    return strategy.iterates[-1], details


def _run_fedavg(
    cell: Cell, name: str, grid: Grid, engine: Engine, num_features: int
) -> tuple[FloatArray, Record]:
    result = fedavg_for_numpy_clients(engine.num_nodes).start(
        grid,
        initial_arrays=ArrayRecord([np.zeros(num_features)]),
        num_rounds=cell.num_rounds,
        train_config=ConfigRecord({"study": name}),
    )
    beta = np.asarray(result.arrays.to_numpy_ndarrays()[0], dtype=np.float64)
    # Its noise hides any replacement of a record, whatever relation the others have.
    return beta, {"noise_std": local_dp_noise_std(cell), "relation": REPLACE_ANY_RECORD}


@lru_cache(maxsize=1)
def _cached_versions() -> dict[str, str]:
    names = ("flwr-modulated", "flwr", "ray", "numpy", "scipy", "statsmodels", "dp-accounting")
    return {"python": platform.python_version(), **{name: version(name) for name in names}}


def _versions() -> dict[str, str]:
    return dict(_cached_versions())
