"""Devices of the reference app in this process: files, policies and ledgers on disk, no SuperNode."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from fakes import FakeGrid, error_reply
from flwr.app import Context, Message, RecordDict

from flwr_modulated.flower import client_app
from flwr_modulated.ledger import Release

FEATURES, LABEL = ("age", "hours"), "stress"

POLICY = """\
num_releases = {num_releases}
release_labels = true

[guarantee]
epsilon = {epsilon}
delta = 1e-5
relation = "replace"
radius = 3.0

[columns]
centre = [40.0, 7.0]
scale = [12.0, 1.5]
label_centre = 10.0
label_scale = 5.0
"""


class Fleet:
    """Devices by number, each with a CSV file of its own."""

    def __init__(
        self,
        folder: Path,
        rng: np.random.Generator,
        *,
        num_devices: int = 6,
        rows: int = 1,
        epsilon: float = 8.0,
        num_releases: int = 1,
    ) -> None:
        self.folder = folder
        self.policy = folder / "policy.toml"
        self.policy.write_text(POLICY.format(epsilon=epsilon, num_releases=num_releases))
        self.node_configs: dict[int, dict[str, Any]] = {}
        self.calls: list[int] = []
        for device in range(num_devices):
            table = rng.normal([40.0, 7.0, 10.0], [12.0, 1.5, 5.0], (rows, 3))
            lines = [",".join((*FEATURES, LABEL)), *(",".join(f"{x:.4f}" for x in row) for row in table)]
            (folder / f"{device}.csv").write_text("\n".join(lines) + "\n")
            self.node_configs[device] = {
                "data-path": str(folder / f"{device}.csv"),
                "policy-path": str(self.policy),
                "ledger-path": str(self.ledger(device)),
                "label": LABEL,
            }

    def ledger(self, device: int) -> Path:
        return self.folder / f"{device}.ledger"

    def run_config(self, **changes: Any) -> dict[str, Any]:
        """The run config of a study of these devices."""
        config = {
            "simulated": False,
            "study": "sleep",
            "policy": str(self.policy),
            "features": ",".join(FEATURES),
            "label": LABEL,
            "min-available-nodes": len(self.node_configs),
            "wait-timeout": 0.2,
            "output": str(self.folder / "out"),
        }
        return config | {key.replace("_", "-"): value for key, value in changes.items()}

    def call(self, device: int, message: Message, run_config: dict[str, Any]) -> Message:
        """What a SuperNode does with a message: exceptions become error replies."""
        self.calls.append(device)
        context = Context(
            run_id=1,
            node_id=message.metadata.dst_node_id,
            node_config=self.node_configs[device],
            state=RecordDict(),
            run_config=run_config,
        )
        try:
            return client_app.app(message, context)
        except Exception as error:
            return error_reply(message, f"{type(error)}:<'{error}'>")

    def grid(
        self,
        run_config: dict[str, Any],
        ids: dict[int, int] | None = None,
        connected: Callable[[], Iterable[int]] | None = None,
    ) -> FakeGrid:
        """A grid of these devices; `ids` are their node ids, by default 100 + number."""
        devices = {node: device for device, node in (ids or self.default_ids).items()}
        return FakeGrid(
            lambda message: self.call(devices[message.metadata.dst_node_id], message, run_config),
            sorted(devices) if connected is None else lambda: list(connected()),
        )

    @property
    def default_ids(self) -> dict[int, int]:
        return {device: 100 + device for device in self.node_configs}

    def releases(self) -> dict[int, list[Release]]:
        """What each device has released and paid for, from its ledger."""
        return {device: read_releases(self.ledger(device)) for device in self.node_configs}


def read_releases(ledger: Path) -> list[Release]:
    """All releases in a ledger, oldest first; none where there is no ledger."""
    if not ledger.exists():
        return []
    with sqlite3.connect(ledger) as db:
        payloads = db.execute("SELECT payload FROM spend WHERE payload IS NOT NULL ORDER BY id").fetchall()
    db.close()
    return [Release.from_bytes(payload) for (payload,) in payloads]


def server_context(run_config: dict[str, Any], run_id: int = 7) -> Context:
    """What Flower hands to a ServerApp."""
    return Context(run_id=run_id, node_id=0, node_config={}, state=RecordDict(), run_config=run_config)
