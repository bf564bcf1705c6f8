"""A study on Ray whose workers are killed in mid-round; a script, since Ray leaves traces in a process.

    python ray_kill.py OUTPUT.json MARK [always]

Node 1 kills its worker once, in the first of two cells; MARK is the file that says it has. With
``always``, it kills its worker whenever it is asked in a third cell.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from flwr_modulated import ModulatedError
from simulations import study
from simulations.hosting import Engine
from simulations.settings import Cell

CELL = Cell(
    task="modechoice",
    method=(("name", "auto"), ("num_rounds", 1)),
    epsilon=4.0,
    delta=1e-5,
    relation="distance",
    radius=1.0,
    label_scale=1.0,
    accounting="exact",
    seed=11,
)
CELLS = [CELL, replace(CELL, epsilon=2.0), replace(CELL, epsilon=1.0)]


class Killer(ClientApp):
    """A study's ClientApp, whose node 1 ends its own process as the system would: without a word."""

    def __init__(self, app: ClientApp, mark: str) -> None:
        super().__init__()
        self._app, self._mark = app, Path(mark)

    def __call__(self, message: Message, context: Context) -> Message:
        study_name = str(message.content.config_records["fitins.config"]["study"])
        epsilon = float(study_name.split("/")[1])
        if context.node_config["partition-id"] == 1:
            if epsilon == 4.0 and not self._mark.exists():
                self._mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            if epsilon == 1.0:
                os.kill(os.getpid(), signal.SIGKILL)
        return self._app(message, context)


def main(output: str, mark: str, *how: str) -> None:
    make, records = study.make_client_app, []
    study.make_client_app = lambda *arguments: Killer(make(*arguments), mark)
    begin, found = time.monotonic(), {}  # type: ignore[var-annotated]

    def keep(record: dict[str, Any]) -> None:
        records.append(record["beta"])

    try:
        study.run_study(CELLS[2:] if how else CELLS[:2], Engine("ray", 4, num_cpus=2), keep)
    except ModulatedError as error:
        found["error"] = f"{type(error).__name__}: {error} {getattr(error, '__notes__', '')}"
    found |= {"betas": records, "seconds": time.monotonic() - begin}
    Path(output).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
