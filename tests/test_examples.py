"""The two examples, in this process: they run as they are, and do what their README says."""

from __future__ import annotations

import logging
import sys
import tempfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from devices import read_releases, server_context

from simulations.engines import InProcessGrid

pytestmark = [
    pytest.mark.usefixtures("task_identity"),
    pytest.mark.global_rng,  # FedAvg samples with it
]

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


@pytest.fixture(autouse=True)
def _on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for example in ("numpyclient", "message"):
        monkeypatch.syspath_prepend(str(EXAMPLES / example))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield
    for name in [name for name in sys.modules if name.startswith(("numpyclient_app", "message_app"))]:
        del sys.modules[name]


def run(package: str, num_rounds: int) -> None:
    client, server = import_module(f"{package}.client_app"), import_module(f"{package}.server_app")
    server.app(InProcessGrid(client.app, 3), server_context({"num-server-rounds": num_rounds}))


def test_numpyclient_example(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A node releases once; a second run gives the same table from what the ledgers keep."""
    caplog.set_level(logging.INFO, logger="flwr")
    run("numpyclient_app", 2)
    assert "Rows released, K:               15000" in caplog.text
    assert "(ε=8, δ=1e-05)-DP, relation replace(3), unit row, labels public" in caplog.text
    tables = [line for line in caplog.messages if line.startswith("hours")]
    caplog.clear()
    run("numpyclient_app", 1)
    assert [line for line in caplog.messages if line.startswith("hours")] == tables
    for device in range(3):
        assert len(read_releases(tmp_path / "modulated-numpyclient" / f"{device}.db")) == 1


def test_message_example(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """FedAvg starts where the regression ended: by hand, from the ledgers' rows and the open ones."""
    caplog.set_level(logging.INFO, logger="flwr")
    from flwr.serverapp.strategy import FedAvg

    import flwr_modulated

    started: list[np.ndarray] = []
    ended: list[np.ndarray] = []
    original = FedAvg.start

    def start(self: FedAvg, grid: object, initial_arrays: object, num_rounds: int) -> object:
        started.append(initial_arrays.to_numpy_ndarrays()[0])  # type: ignore[attr-defined]
        result = original(self, grid, initial_arrays, num_rounds)  # type: ignore[arg-type]
        ended.append(result.arrays.to_numpy_ndarrays()[0])
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FedAvg, "start", start)
        run("message_app", 3)
    releases = [read_releases(tmp_path / "modulated-message" / f"{device}.db") for device in range(3)]
    assert [len(kept) for kept in releases] == [1, 1, 1]
    moments = flwr_modulated.Moments.sum(
        flwr_modulated.Moments.from_rows(kept[0].released, kept[0].labels, noise_std=kept[0].noise_std)
        for kept in releases
    )
    np.testing.assert_allclose(started[0], flwr_modulated.Auto().estimate(moments.debias()), rtol=1e-9)
    load_rows = import_module("message_app.data").load_rows
    beta = started[0]
    for _ in range(3):
        local = []
        for node in range(3):
            x, y = load_rows(node, private=False)
            mine = beta
            for _ in range(5):
                mine = mine - 0.1 * x.T @ (x @ mine - y) / len(y)
            local.append(mine)
        beta = np.mean(local, axis=0)
    np.testing.assert_allclose(ended[0], beta, rtol=1e-9)
