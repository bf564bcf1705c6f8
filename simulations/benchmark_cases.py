"""What the benchmark times, one case to a process (see :mod:`simulations.benchmark`)."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from flwr_modulated import Distance, Guarantee, Mechanism, ModulatedStrategy, Modulation, Moments
from flwr_modulated._typing import FloatArray
from flwr_modulated.exact_law import draw_moments

from .data import SYNTHETIC_R2
from .settings import SYNTHETIC, Cell
from .synthetic import SyntheticRows

GUARANTEE = Guarantee(2.0, 1e-5, Distance(1.0))
_BLOCK_ROWS = 8192


def floor(num_clients: int, num_features: int, num_rounds: int, num_threads: int) -> dict[str, Any]:
    """Draw n·d normals in blocks and form their Gram matrix: what no release can do without."""
    shares = [len(part) for part in np.array_split(np.empty(num_clients, dtype=bool), num_threads)]

    def work(share: tuple[int, int]) -> FloatArray:
        seed, rows = share
        rng = np.random.Generator(np.random.SFC64(seed))
        block, gram = np.empty((_BLOCK_ROWS, num_features)), np.zeros((num_features, num_features))
        for start in range(0, rows, _BLOCK_ROWS):
            part = block[: min(_BLOCK_ROWS, rows - start)]
            rng.standard_normal(out=part)
            gram += part.T @ part
        return gram

    with ThreadPoolExecutor(num_threads) as pool:
        return _repeat(lambda: sum(pool.map(work, enumerate(shares))), num_rounds)


def kernel(num_clients: int, num_features: int, num_rounds: int, payload: str) -> dict[str, Any]:
    """Release and sum without Flower: block by block, all rows first, or from the exact law."""
    features, labels = _rows(num_clients, num_features).load()
    mechanism = Mechanism(Modulation(), GUARANTEE, num_releases=num_rounds)
    std, seed = mechanism.noise_std, 0
    noise_free = Moments.from_rows(features, labels, noise_std=0.0)

    def once() -> Moments:
        nonlocal seed
        seed += 1
        rng = np.random.Generator(np.random.SFC64(seed))
        if payload == "moments":
            return Moments.from_blocks(mechanism.release_blocks(features, rng=rng), labels, noise_std=std)
        if payload == "rows":
            return Moments.from_rows(mechanism.release(features, rng=rng), labels, noise_std=std)
        return draw_moments(noise_free, std, rng=rng)

    return _repeat(once, num_rounds)


def hosted(
    num_clients: int,
    num_features: int,
    num_rounds: int,
    engine: str,
    num_nodes: int | str = "auto",
    payload: str = "auto",
    sampling: str = "rows",
    precision: str = "float64",
) -> dict[str, Any]:
    """The project's own path: the study's ClientApp under the strategy, one release a round."""
    from flwr.app import ArrayRecord
    from flwr.serverapp import Grid

    from .engines import run_federation
    from .hosting import Engine
    from .study import CellTable, make_client_app

    cell = Cell(
        task=SYNTHETIC,
        method=(("name", "auto"), ("num_rounds", num_rounds)),
        epsilon=GUARANTEE.epsilon,
        delta=GUARANTEE.delta,
        relation="distance",
        radius=1.0,
        label_scale=1.0,
        accounting="exact",
        seed=0,
        num_clients=num_clients,
        num_features=num_features,
    )
    # In this process, a thread for each processor where nodes host many.
    cpus = (1 if num_nodes == "clients" else os.cpu_count() or 1) if engine == "inprocess" else None
    host = Engine(engine, num_nodes, num_cpus=cpus, payload=payload, sampling=sampling, precision=precision)
    layout = host.layout(num_clients)
    host = replace(host, num_nodes=layout.num_nodes)
    strategy = ModulatedStrategy(
        mode="iterative",
        payload=layout.payload,
        precision=layout.precision,
        min_available_nodes=layout.num_nodes,
        min_replies=layout.num_nodes,
        evaluation_folds=0,
        study=CellTable.of([cell]).name(cell, 0),
    )
    clock = _Clock(strategy)

    def server(grid: Grid) -> None:
        initial = ArrayRecord([np.zeros(num_features)])
        clock.finish(strategy.start(grid, initial_arrays=initial, num_rounds=num_rounds))

    try:
        _rows(num_clients, num_features).load()  # the machine's file, where the task needs one
        run_federation(server, make_client_app(CellTable.of([cell]), 0, sampling), host)
    finally:
        _rows(num_clients, num_features).discard()
    received = strategy.bytes_received / num_rounds / num_clients
    return clock.result() | {"num_nodes": layout.num_nodes, "bytes_per_client": received}


def empty(num_clients: int, num_features: int, num_rounds: int, engine: str) -> dict[str, Any]:
    """A node for each of `num_clients`, which answers at once with nothing, to the same requests."""
    from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord
    from flwr.client import Client, NumPyClient
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid

    from flwr_modulated.flower.nodes import wait_for_nodes
    from flwr_modulated.flower.records import Request

    from .engines import run_federation
    from .hosting import Engine

    class Nothing(NumPyClient):
        def fit(self, parameters: Any, config: Any) -> tuple[list[Any], int, dict[str, Any]]:
            return [], 1, {}

    def client_fn(context: Context) -> Client:
        return Nothing().to_client()

    class AskForNothing(ModulatedStrategy):
        def configure_train(
            self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
        ) -> Iterable[Message]:
            content = Request(server_round, Modulation(), np.zeros((num_features, 0))).to_recorddict()
            nodes = wait_for_nodes(grid, num_clients, timeout=600.0)
            return [Message(content, dst_node_id=node, message_type="train") for node in nodes]

        def aggregate_train(
            self, server_round: int, replies: Iterable[Message]
        ) -> tuple[ArrayRecord, MetricRecord]:
            failed = sum(reply.has_error() for reply in replies)
            assert not failed
            return ArrayRecord([np.zeros(num_features)]), MetricRecord({})

    strategy = AskForNothing(evaluation_folds=0)
    clock = _Clock(strategy)

    def server(grid: Grid) -> None:
        initial = ArrayRecord([np.zeros(num_features)])
        clock.finish(strategy.start(grid, initial_arrays=initial, num_rounds=num_rounds))

    run_federation(server, ClientApp(client_fn), Engine(engine, num_clients))
    return clock.result() | {"num_nodes": num_clients, "bytes_per_client": 0.0}


def flower_dp(num_clients: int, num_features: int, num_rounds: int, engine: str) -> dict[str, Any]:
    """Flower's DP FedAvg in the stock layout: FedAvg and ``LocalDpMod``, one node a client."""
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.clientapp.mod import LocalDpMod
    from flwr.serverapp import Grid
    from flwr.serverapp.strategy import FedAvg

    from .engines import run_federation
    from .hosting import Engine

    app = ClientApp(mods=[LocalDpMod(0.1, 0.2, 8.0, 1e-5)])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        features, labels = _cached_rows(num_clients, num_features)
        row = int(context.node_config["partition-id"])
        beta = message.content["arrays"].to_numpy_ndarrays()[0]  # type: ignore[union-attr]
        update = 0.1 * (labels[row] - features[row] @ beta) * features[row]
        content = {"arrays": ArrayRecord([beta + update]), "metrics": MetricRecord({"num-examples": 1})}
        return Message(RecordDict(content), reply_to=message)  # type: ignore[arg-type]

    strategy = FedAvg(min_train_nodes=num_clients, min_available_nodes=num_clients)
    strategy.fraction_evaluate = 0.0
    clock = _Clock(strategy)

    def server(grid: Grid) -> None:
        initial = ArrayRecord([np.zeros(num_features)])
        result = strategy.start(grid, initial_arrays=initial, num_rounds=num_rounds)
        clock.finish(result)
        assert len(result.train_metrics_clientapp) == num_rounds

    run_federation(server, app, Engine(engine, num_clients))
    return clock.result() | {"num_nodes": num_clients, "bytes_per_client": 8.0 * num_features}


def _repeat(work: Callable[[], object], times: int) -> dict[str, Any]:
    ready, seconds = time.time(), []
    for _ in range(times):
        begin = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begin)
    return {"ready": ready, "seconds": seconds}


class _Clock:
    """Times the rounds of a strategy: from one request to the next."""

    def __init__(self, strategy: Any) -> None:
        self._marks: list[float] = []
        self._ready = 0.0
        configure = strategy.configure_train

        def timed(*arguments: Any, **named: Any) -> Any:
            if not self._marks:
                self._ready = time.time()
            self._marks.append(time.perf_counter())
            return configure(*arguments, **named)

        strategy.configure_train = timed

    def finish(self, result: object) -> None:
        """Note the end of the last round."""
        self._marks.append(time.perf_counter())

    def result(self) -> dict[str, Any]:
        """Seconds of each round, and when the first began."""
        return {"ready": self._ready, "seconds": np.diff(self._marks).tolist()}


def _rows(num_clients: int, num_features: int) -> SyntheticRows:
    return SyntheticRows(0, num_clients, num_features, SYNTHETIC_R2)


@lru_cache(maxsize=1)
def _cached_rows(num_clients: int, num_features: int) -> tuple[FloatArray, FloatArray]:
    return _rows(num_clients, num_features).load()


CASES: dict[str, Callable[..., dict[str, Any]]] = {
    function.__name__: function for function in (floor, kernel, hosted, empty, flower_dp)
}


def main() -> None:
    """Run the case that the argument describes as JSON, and print its result as the last line."""
    arguments = json.loads(sys.argv[1])
    logging.getLogger("flwr").setLevel(logging.WARNING)
    print(json.dumps(CASES[arguments.pop("case")](**arguments)))
