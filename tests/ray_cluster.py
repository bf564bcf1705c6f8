"""Studies on a Ray cluster of two nodes, the second of which is killed in mid-round; a script.

    python ray_cluster.py OUTPUT.json ADDRESS SECOND_PID PLACES

PLACES is a directory where each client leaves the id of the Ray node that ran it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from ray_kill import CELLS

from flwr_modulated import ModulatedError
from simulations import study
from simulations.hosting import Engine


class Slow(ClientApp):
    """A study's ClientApp that takes a second, and says where it ran."""

    def __init__(self, app: ClientApp, places: str) -> None:
        super().__init__()
        self._app, self._places = app, Path(places)

    def __call__(self, message: Message, context: Context) -> Message:
        import ray

        (self._places / ray.get_runtime_context().get_node_id()).touch()
        time.sleep(1.0)
        return self._app(message, context)


def wait_for_machines(address: str, wanted: int) -> None:
    import ray

    ray.init(address=address, log_to_driver=False)
    while sum(node["Alive"] for node in ray.nodes()) < wanted:
        time.sleep(0.5)
    ray.shutdown()


def main(output: str, address: str, second: str, places: str) -> None:
    wait_for_machines(address, 2)
    make, engine = study.make_client_app, Engine("ray", 4, address=address)
    study.make_client_app = lambda *arguments: Slow(make(*arguments), places)
    found: dict[str, Any] = {"betas": [], "seconds": []}
    for cell in CELLS[:2]:  # a run each: the cluster outlives the first
        begin = time.monotonic()
        found["betas"] += [record["beta"] for record in study.run_study([cell], engine)]
        found["seconds"].append(time.monotonic() - begin)
    found["places"] = len(list(Path(places).iterdir()))

    def kill(record: object) -> None:
        threading.Timer(0.5, lambda: os.killpg(int(second), signal.SIGKILL)).start()

    try:
        study.run_study([CELLS[0], CELLS[1]], engine, kill)
    except ModulatedError as error:
        found["error"] = f"{type(error).__name__}: {error}"
    Path(output).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
