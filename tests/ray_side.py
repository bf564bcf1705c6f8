"""One study under either engine; as a script, on Ray in a process of its own.

Ray leaves threads, environment variables and open files behind, so the tests start it once, in
another process::

    python ray_side.py OUTPUT.pickle
"""

from __future__ import annotations

import pickle
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from fakes import SpyGrid, wire_bytes
from flwr.app import ArrayRecord, Context, Message
from flwr.client import Client
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from flwr_modulated import (
    Distance,
    Guarantee,
    InsufficientRepliesError,
    ModulatedClient,
    ModulatedStrategy,
    Policy,
)
from simulations import study
from simulations.engines import run_federation
from simulations.settings import Cell, Engine

NUM_NODES = 4
SENTINEL = "alice 31337.271828"
SEED = 918273645

MODULATED = (("alpha", 0.2), ("amplitude", 0.2), ("frequency", 0.5), ("num_directions", 1))
AUTO = Cell(
    task="modechoice",
    method=(("name", "auto"), ("num_rounds", 1), *MODULATED),
    epsilon=4.0,
    delta=1e-5,
    relation="distance",
    radius=1.0,
    label_scale=1.0,
    accounting="zcdp",
    seed=SEED,
)
CELLS = {
    "auto": AUTO,
    "auto with labels private": replace(AUTO, relation="replace_record", radius=4.0),
    "iterative": replace(
        AUTO,
        method=(("name", "iterative"), ("num_rounds", 3), ("step", 1.0), ("radius", 10.0), *MODULATED),
    ),
    "local DP FedAvg": replace(
        AUTO, method=(("name", "local_dp_fedavg"), ("num_rounds", 3), ("clip", 1.8), ("step", 0.05))
    ),
}


class Sabotaged(ClientApp):
    """A study's ClientApp, whose node 1 fails when it is asked for the study "broken"."""

    def __init__(self, app: ClientApp) -> None:
        super().__init__()
        self._app = app

    def __call__(self, message: Message, context: Context) -> Message:
        if message.content.config_records["fitins.config"]["study"] != "broken":
            return self._app(message, context)
        node = int(context.node_config["partition-id"])

        def load() -> Any:
            if node == 1:
                raise KeyError(SENTINEL)
            return np.eye(3), np.ones(3)

        def client_fn(context: Context) -> Client:
            policy = Policy(Guarantee(2.0, 1e-5, Distance(1.0)))
            return ModulatedClient(load, policy, rng=lambda r: np.random.default_rng([node, r])).to_client()

        return ClientApp(client_fn)(message, context)


def run(engine_name: str) -> dict[str, Any]:
    """Everything that the tests compare: releases, coefficients, errors, bytes."""
    engine = Engine(engine_name, NUM_NODES, num_cpus=2)
    table = study.CellTable.of(CELLS.values())
    found: dict[str, Any] = {"cells": {}, "bytes": b""}

    def server(grid: Grid) -> None:
        for label, cell in CELLS.items():
            spy = SpyGrid(grid)
            record = study._run_cell(cell, table.name(cell, SEED), spy, engine)
            found["cells"][label] = {
                "beta": record["beta"],
                "r2": record["r2"],
                "asked": [len(round_) for round_ in spy.asked],
                "replies": [
                    [reply.content.array_records["fitres.parameters"].to_numpy_ndarrays() for reply in round_]
                    for round_ in spy.received[::2]
                ],
            }
            for round_ in spy.sent + spy.received:
                found["bytes"] += b"".join(map(wire_bytes, round_))
        spy = SpyGrid(grid)
        broken = ModulatedStrategy(
            study="broken", min_available_nodes=NUM_NODES, min_replies=3, evaluation_folds=0
        )
        broken.start(spy, ArrayRecord([np.zeros(3)]), num_rounds=2)
        found["asked of the broken"] = [len(round_) for round_ in spy.asked]
        found["bytes"] += b"".join(wire_bytes(reply) for round_ in spy.received for reply in round_)
        whole = ModulatedStrategy(study="broken", min_available_nodes=NUM_NODES, min_replies=NUM_NODES)
        try:
            whole.start(grid, ArrayRecord([np.zeros(3)]), num_rounds=1)
        except InsufficientRepliesError as error:
            found["too few"] = str(error)
        raise InsufficientRepliesError("the server stops on purpose")

    try:
        run_federation(server, Sabotaged(study.make_client_app(table, SEED)), engine)
    except Exception as error:
        found["raised"] = f"{type(error).__name__}: {error}"
    return found


if __name__ == "__main__":
    Path(sys.argv[1]).write_bytes(pickle.dumps(run("ray")))
