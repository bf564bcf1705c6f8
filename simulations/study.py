"""A study: cells run one after another over the same nodes, each giving one record.

One Flower run hosts many cells. A request names its cell; the simulated device looks
up there what it has decided for itself, and hosts its share of the training split's
one-row clients.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib.metadata import version
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.client import Client, NumPyClient
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from scipy.linalg import lstsq

from flwr_modulated import (
    Auto,
    GradientDescent,
    InvalidDataError,
    ModulatedClient,
    ModulatedError,
    ModulatedStrategy,
    Policy,
    Ridge,
)
from flwr_modulated._typing import FloatArray
from flwr_modulated.datasets import r2_score
from flwr_modulated.estimators import Estimator
from flwr_modulated.reconstruction import inversion_error, prior_error

from .baselines import LocalDpClient, fedavg_for_numpy_clients
from .data import (
    cell_split,
    data_key,
    discard_files,
    feature_covariance,
    least_squares_r2,
    node_share,
    true_coefficients,
)
from .engines import OnReply, run_federation
from .exact_client import ExactLawClient
from .flower_dp import run_flower_dp
from .hosting import Layout
from .local_dp import REPLACE_ANY_RECORD, LocalDp, noise_multiplier
from .records import Record
from .settings import FLOWER_DP, LOCAL_DP, MODULATED, NOT_PRIVATE, Cell, Engine


@dataclass(frozen=True, slots=True)
class CellTable:
    """Cells by name. Compact, since Ray pickles it with every message.

    Cells that differ only in ε and seed share an entry; the name carries those two.
    """

    prototypes: tuple[Cell, ...]
    # What was found: cells and policies check themselves when made, which costs as much as a release.
    _found: dict[tuple[str, int], tuple[Cell, Policy | None]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @classmethod
    def of(cls, cells: Iterable[Cell]) -> CellTable:
        """Collect the prototypes of `cells`."""
        return cls(tuple(dict.fromkeys(map(cls._prototype, cells))))

    @staticmethod
    def _prototype(cell: Cell) -> Cell:
        return replace(cell, epsilon=1.0, seed=0)

    def name(self, cell: Cell, first_seed: int) -> str:
        """Public name of a cell; splits are numbered from 0, so that no seed travels."""
        return f"{self.prototypes.index(self._prototype(cell))}/{cell.epsilon!r}/{cell.seed - first_seed}"

    def find(self, name: str, first_seed: int) -> tuple[Cell, Policy | None]:
        """The cell of a name, and what its devices have decided where it is a modulated method."""
        if (name, first_seed) not in self._found:
            index, epsilon, split = name.split("/")
            cell = replace(self.prototypes[int(index)], epsilon=float(epsilon), seed=first_seed + int(split))
            policy = cell.policy if cell.method_name in MODULATED else None
            self._found[name, first_seed] = cell, policy
        return self._found[name, first_seed]


def make_client_app(table: CellTable, first_seed: int, sampling: str = "rows") -> ClientApp:
    """Build the ClientApp of all nodes of a study."""

    def client_fn(context: Context) -> Client:
        node, num_nodes = int(context.node_config["partition-id"]), int(context.node_config["num-partitions"])
        return _StudyClient(table, first_seed, sampling, node, num_nodes).to_client()

    return ClientApp(client_fn)


class _StudyClient(NumPyClient):
    """Hands a request to the client of the cell that it names."""

    def __init__(self, table: CellTable, first_seed: int, sampling: str, node: int, num_nodes: int) -> None:
        self._table, self._first_seed, self._sampling = table, first_seed, sampling
        self._node, self._num_nodes = node, num_nodes

    def fit(self, parameters: list[Any], config: dict[str, Any]) -> tuple[list[Any], int, dict[str, Any]]:
        return self._client(*self._table.find(str(config["study"]), self._first_seed)).fit(parameters, config)

    def _client(self, cell: Cell, policy: Policy | None) -> NumPyClient:
        def load() -> tuple[FloatArray, FloatArray]:
            return node_share(cell, self._node, self._num_nodes)

        def rng(server_round: int) -> np.random.Generator:
            return noise_stream(cell.seed, self._node, server_round)

        if policy is None:
            features, labels = load()
            return LocalDpClient(
                features,
                labels,
                settings=local_dp_settings(cell),
                multiplier=local_dp_multiplier(cell),
                rng=rng,
            )
        if self._sampling == "moments":
            key = (data_key(cell), self._node, self._num_nodes)
            return ExactLawClient(load, policy, key=key, rng=rng)
        return ModulatedClient(load, policy, rng=rng)


def noise_stream(seed: int, node: int, server_round: int) -> np.random.Generator:
    """Randomness of a simulated node in a round; a device would ask its operating system."""
    # As words of 32 bits, where they are: NumPy takes three times as long over Python's integers.
    key = np.array([seed, node, server_round], dtype=np.uint32 if seed < 2**32 else object)
    return np.random.Generator(np.random.SFC64(np.random.SeedSequence(key)))  # type: ignore[arg-type]


def run_study(
    cells: Sequence[Cell],
    engine: Engine,
    on_record: Callable[[Record], None] | None = None,
    on_reply: OnReply | None = None,
) -> list[Record]:
    """Run cells in order over the nodes of one engine.

    Cells of Flower's own differential privacy have one node a client, which only the
    engine in this process can host; they run there, whatever the engine of the others.

    Parameters
    ----------
    cells : sequence of Cell
        What to run.
    engine : Engine
        Where to run it.
    on_record : callable, optional
        Called with each record as soon as its cell is done, so that a later
        failure loses nothing.
    on_reply : callable, optional
        Progress within a round: see :func:`~simulations.engines.run_federation`.

    Returns
    -------
    list of dict
        One record a cell.
    """
    records: list[Record] = []

    def keep(record: Record) -> None:
        records.append(record)
        if on_record is not None:
            on_record(record)

    hosted: dict[int, list[Cell]] = {}
    for cell in cells:
        if cell.method_name in (*MODULATED, *LOCAL_DP):
            hosted.setdefault(_layout(cell, engine).num_nodes, []).append(cell)
    for num_nodes, group in hosted.items():
        _run_hosted(group, replace(engine, num_nodes=num_nodes), keep, on_reply)
    for cell in cells:
        if cell.method_name in FLOWER_DP:
            with _named(cell):
                keep(_run_flower_dp(cell))
        elif cell.method_name == NOT_PRIVATE:
            keep(_run_ols(cell))
    for cell in cells:
        discard_files(cell)
    return records


def _run_hosted(
    cells: Sequence[Cell], engine: Engine, keep: Callable[[Record], None], on_reply: OnReply | None
) -> None:
    """Run cells over the same nodes."""
    table, first_seed = CellTable.of(cells), min(cell.seed for cell in cells)

    def server(grid: Grid) -> None:
        for cell in cells:
            with _named(cell):
                keep(_run_cell(cell, table.name(cell, first_seed), grid, engine))

    run_federation(server, make_client_app(table, first_seed, engine.sampling), engine, on_reply)


def _layout(cell: Cell, engine: Engine) -> Layout:
    return engine.layout(len(cell_split(cell).train_labels))


@contextmanager
def _named(cell: Cell) -> Iterator[None]:
    """Add to an error which cell it comes from."""
    try:
        yield
    except ModulatedError as error:
        error.add_note(f"{cell.task} {cell.method_name} ε={cell.epsilon:g} seed={cell.seed}")
        raise


def local_dp_settings(cell: Cell) -> LocalDp:
    """A cell's settings of local DP FedAvg."""
    return LocalDp(
        cell.num_rounds,
        cell.setting("clip"),
        cell.setting("step"),
        cell.setting("clip_ratio", 1.0),
        cell.setting("tail", 0.0),
    )


def local_dp_multiplier(cell: Cell) -> float:
    """A cell's noise multiplier of each round of local DP FedAvg."""
    return noise_multiplier(cell.epsilon, cell.delta, cell.num_rounds, cell.accounting)


def _estimator(cell: Cell) -> Estimator:
    if cell.method_name == "ridge":
        return Ridge(cell.setting("penalty"))
    if cell.method_name == "iterative":
        return GradientDescent(cell.setting("step"), radius=cell.setting("radius"))
    return Auto()


def _run_cell(cell: Cell, name: str, grid: Grid, engine: Engine) -> Record:
    layout = _layout(cell, engine)
    run = _run_fedavg if cell.method_name in LOCAL_DP else _run_modulated
    begin = time.perf_counter()
    beta, details = run(cell, name, grid, layout)
    return _record(cell, beta, time.perf_counter() - begin, engine.name, layout.num_nodes, details)


def _run_flower_dp(cell: Cell) -> Record:
    split = cell_split(cell)
    begin = time.perf_counter()
    beta, details = run_flower_dp(
        cell.method_name,
        split.train_features,
        split.train_labels,
        num_rounds=cell.num_rounds,
        clip=cell.setting("clip"),
        step=cell.setting("step"),
        epsilon=cell.epsilon,
        delta=cell.delta,
        accounting=cell.accounting,
        seed=cell.seed,
    )
    seconds = time.perf_counter() - begin
    return _record(cell, beta, seconds, "inprocess", len(split.train_labels), details)


def _run_ols(cell: Cell) -> Record:
    split = cell_split(cell)
    begin = time.perf_counter()
    beta = lstsq(split.train_features, split.train_labels)[0]
    nothing = dict.fromkeys(("epsilon", "delta", "relation", "unit", "accounting"))
    details = {**nothing, "threat_model": "not private"}
    return _record(cell, beta, time.perf_counter() - begin, "none", 0, details)


def _record(
    cell: Cell, beta: FloatArray, seconds: float, engine: str, num_nodes: int, details: Record
) -> Record:
    """The record of a run; `details` overrides what the cell says."""
    with np.errstate(over="ignore", invalid="ignore"):
        if not np.isfinite(beta @ beta):
            raise InvalidDataError("coefficients must be finite: the run diverged; lower method.step")
    split = cell_split(cell)
    truth = true_coefficients(cell)
    return {
        "kind": "run",
        "id": cell.identity,
        "experiment": cell.experiment,
        "task": cell.task,
        "method": cell.method_name,
        "variant": cell.variant,
        "epsilon": cell.epsilon,
        "delta": cell.delta,
        "relation": str(cell.guarantee_relation),
        "unit": "row",
        "threat_model": "local",
        "accounting": cell.accounting,
        "sensitivity": cell.setting("sensitivity"),
        "alpha": cell.modulation.alpha,
        "amplitude": cell.modulation.amplitude,
        "frequency": cell.modulation.frequency,
        "num_directions": cell.modulation.num_directions,
        "num_rounds": cell.num_rounds,
        **{
            name: cell.setting(name)
            for name in ("pool", "step", "penalty", "radius", "clip", "clip_ratio", "tail", "tuning")
        },
        "num_clients": len(split.train_labels),
        "num_features": split.num_features,
        "num_rows": sum(map(len, (split.train_labels, split.validation_labels, split.test_labels))),
        "num_nodes": num_nodes,
        "engine": engine,
        # What nodes answer with, and what their noise is drawn for; modulated methods say.
        "payload": "model",
        "sampling": "rows",
        "seed": cell.seed,
        "r2": r2_score(split.test_features, split.test_labels, beta),
        "r2_validation": r2_score(split.validation_features, split.validation_labels, beta),
        "r2_ols": least_squares_r2(cell),
        "coefficient_error": None if truth is None else float(np.sum((beta - truth) ** 2)),
        "beta": beta.tolist(),
        "feature_names": list(split.feature_names),
        "seconds": round(seconds, 4),
        "versions": versions(),
        **details,
    }


def _run_modulated(cell: Cell, name: str, grid: Grid, layout: Layout) -> tuple[FloatArray, Record]:
    split = cell_split(cell)
    relation = cell.guarantee_relation
    iterative = cell.method_name == "iterative" or cell.num_rounds > 1
    strategy = ModulatedStrategy(
        _estimator(cell),
        modulation=cell.modulation,
        mode="iterative" if iterative else "one-shot",
        pool=bool(cell.setting("pool", False)),
        label_scale=getattr(relation, "label_scale", None),
        payload=layout.payload,
        precision=layout.precision,
        min_available_nodes=layout.num_nodes,
        min_replies=layout.num_nodes,
        evaluation_folds=0,  # records hold the true test R²
        study=name,
        # Public randomness: directions only. A stream apart from every node's noise.
        rng=np.random.default_rng(np.random.SeedSequence([cell.seed], spawn_key=(1,))),
    )
    initial = ArrayRecord([np.zeros(split.num_features)])
    strategy.start(grid, initial_arrays=initial, num_rounds=cell.num_rounds)
    details: Record = {
        "noise_std": cell.policy.mechanism(cell.modulation).noise_std,
        "bytes_received": strategy.bytes_received,
        "payload": layout.payload,
        "sampling": layout.sampling,
        "precision": layout.precision if layout.payload == "rows" else "float64",
    }
    details |= _reconstruction(cell, details["noise_std"])
    if iterative:
        details["r2_average_iterate"] = r2_score(
            split.test_features, split.test_labels, strategy.average_iterate
        )
    return strategy.iterates[-1], details


def _reconstruction(cell: Cell, noise_std: float) -> Record:
    """Mean squared error per feature of two attackers who hold all T releases of a row.

    One is unbiased and averages them; one knows mean and covariance of the population. Only where
    rows are released whole: elsewhere they would reconstruct the clipped row.
    """
    if cell.relation != "distance":
        return {}
    root = np.sqrt(cell.num_rounds)  # T releases are one with 1/T of the noise and of the cosines
    modulation = replace(cell.modulation, amplitude=cell.modulation.amplitude / root)
    split = cell_split(cell)
    return {
        "reconstruction_error": inversion_error(
            num_features=split.num_features, modulation=modulation, noise_std=noise_std / root
        ),
        "reconstruction_error_prior": prior_error(
            np.eye(split.num_features)[:, : modulation.num_directions],
            modulation=modulation,
            noise_std=noise_std / root,
            prior_covariance=feature_covariance(cell),
        ),
    }


def _run_fedavg(cell: Cell, name: str, grid: Grid, layout: Layout) -> tuple[FloatArray, Record]:
    settings = local_dp_settings(cell)
    iterates: list[FloatArray] = []  # the first is the start

    def keep_iterate(server_round: int, arrays: ArrayRecord) -> None:
        iterates.append(np.asarray(arrays.to_numpy_ndarrays()[0], dtype=np.float64))

    fedavg_for_numpy_clients(layout.num_nodes).start(
        grid,
        initial_arrays=ArrayRecord([np.zeros(cell_split(cell).num_features)]),
        num_rounds=cell.num_rounds,
        train_config=ConfigRecord({"study": name}),
        evaluate_fn=keep_iterate,
    )
    beta = np.mean(iterates[-settings.tail_length :], axis=0)
    # Its noise hides any replacement of a record, whatever relation the others have.
    noise_std = 2.0 * settings.clip * local_dp_multiplier(cell)
    return beta, {"noise_std": noise_std, "relation": REPLACE_ANY_RECORD}


@lru_cache(maxsize=1)
def _cached_versions() -> dict[str, str]:
    names = ("flwr-modulated", "flwr", "ray", "numpy", "scipy", "statsmodels", "dp-accounting")
    return {"python": platform.python_version(), **{name: version(name) for name in names}}


def versions() -> dict[str, str]:
    """Versions of what a run depends on."""
    return dict(_cached_versions())
