"""The reference app on a real SuperLink and SuperNodes of this machine.

Coefficients are compared with those computed here from the rows that the devices' ledgers hold.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from deployment import ROOT, Deployment, deployment, free_port, wait_until
from devices import FEATURES, LABEL, Fleet

from flwr_modulated.inference import Results

pytestmark = pytest.mark.deployment


def node_config(fleet: Fleet, device: int) -> str:
    return " ".join(f'{key}="{value}"' for key, value in fleet.node_configs[device].items())


def run_config(fleet: Fleet, **changes: Any) -> str:
    config = fleet.run_config(**({"wait_timeout": 60.0, "round_timeout": 60.0} | changes))
    return " ".join(f"{key}={json.dumps(value)}" for key, value in config.items())


def records(fleet: Fleet) -> list[dict[str, Any]]:
    lines = (fleet.folder / "out" / "records.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def one_shot(fleet: Fleet, devices: list[int]) -> Results:
    releases = [fleet.releases()[device][0] for device in devices]
    return Results.from_rows(
        np.concatenate([release.released for release in releases]),
        np.concatenate([release.labels for release in releases if release.labels is not None]),
        noise_std=releases[0].noise_std,
        feature_names=FEATURES,
        label_name=LABEL,
        fit_intercept=True,
        centre=[40.0, 7.0],
        scale=[12.0, 1.5],
        label_centre=10.0,
        label_scale=5.0,
    )


def assert_one_shot_is_that_of(record: dict[str, Any], fleet: Fleet, devices: list[int]) -> None:
    twin = one_shot(fleet, devices)
    np.testing.assert_allclose(record["params"], twin.params, rtol=1e-9)
    np.testing.assert_allclose(record["standard_errors"], twin.bse, rtol=1e-9)
    np.testing.assert_allclose(record["predicting_params"], twin.shrunk_params, rtol=1e-9)
    assert (record["num_nodes"], record["num_rows"]) == (len(devices), twin.num_samples)


def finish(made: Deployment, run_id: str, seconds: float = 120.0) -> None:
    status, details = made.wait_for(run_id, seconds=seconds)
    assert status == "finished:completed", f"{details}\n{made.logs()}"


def test_one_shot_without_tls(tmp_path: Path, rng: np.random.Generator) -> None:
    """Three devices with 30 rows each, at an ε that leaves standard errors; the status command says so."""
    fleet = Fleet(tmp_path, rng, num_devices=3, rows=30, epsilon=50.0)
    with deployment(tmp_path / "link", tls=False) as made:
        made.start_superlink()
        for device in range(3):
            made.start_supernode(f"d{device}", node_config(fleet, device))
        run_id = made.submit(run_config(fleet))
        told = made.run(
            "flwr-modulated", "run-status", "test", "--run-id", run_id, "--wait", "120",
            "--output", str(tmp_path / "out"), timeout=150,
        )  # fmt: skip
        assert "Results of 90 rows from 3 nodes" in told, made.logs()
    (record,) = records(fleet)
    assert_one_shot_is_that_of(record, fleet, [0, 1, 2])
    assert np.isfinite(record["standard_errors"]).all()
    assert [len(kept) for kept in fleet.releases().values()] == [1, 1, 1]


@pytest.mark.nightly
def test_tls_authentication_and_a_supernode_that_is_killed(tmp_path: Path, rng: np.random.Generator) -> None:
    """One-shot, two rounds of iterative, a killed SuperNode, a server that dies; a stranger gets nothing."""
    fleet = Fleet(tmp_path, rng, num_devices=4, rows=30, epsilon=200.0, num_releases=6)
    with deployment(tmp_path / "link", tls=True) as made:
        link = made.start_superlink("--database", "superlink.db")
        for device in range(3):
            made.make_key(f"d{device}")
        made.make_key("stranger", register=False)
        nodes = [made.start_supernode(f"d{device}", node_config(fleet, device)) for device in range(3)]
        stranger = made.start_supernode("stranger", node_config(fleet, 3))
        keyless = made.start(
            "keyless", "flower-supernode", "--root-certificates", "ca.crt",
            "--superlink", f"127.0.0.1:{made.port}", "--port", str(free_port()),
            "--node-config", node_config(fleet, 3),
        )  # fmt: skip

        # One-shot, and what the unregistered got.
        finish(made, made.submit(run_config(fleet, min_available_nodes=3)))
        assert_one_shot_is_that_of(records(fleet)[-1], fleet, [0, 1, 2])
        wait_until(lambda: stranger.popen.poll() is not None, seconds=30, what="the stranger is refused")
        wait_until(lambda: keyless.popen.poll() is not None, seconds=30, what="one without a key is refused")
        assert "2004" in stranger.text()
        assert "2001" in keyless.text()
        assert not fleet.ledger(3).exists()

        # Iterative, two rounds: the last iterate by hand from the ledgers.
        config = run_config(
            fleet, study="steps", estimator="iterative", num_server_rounds=2, step=0.5,
            min_available_nodes=3, min_replies=3,
        )  # fmt: skip
        finish(made, made.submit(config))
        np.testing.assert_allclose(
            records(fleet)[-1]["iterate_standardised"], two_steps(fleet, [0, 1, 2]), rtol=1e-9
        )

        # A SuperNode is killed in the middle of a run.
        config = run_config(
            fleet, study="lost", estimator="iterative", num_server_rounds=2, min_available_nodes=3,
            min_replies=2, round_timeout=25.0,
        )  # fmt: skip
        run_id = made.submit(config)
        wait_until(lambda: len(fleet.releases()[2]) == 4, seconds=90, what="round 1 was answered")
        nodes[2].kill()
        finish(made, run_id)
        assert [len(kept) for kept in fleet.releases().values()] == [5, 5, 4, 0]
        assert [line["num-valid"] for line in records(fleet)[-1]["rounds"]] in ([3, 2], [2, 2])

        # The server's process dies after some have answered; SuperLink and study are started again.
        config = run_config(fleet, study="again", min_available_nodes=2, min_replies=2)
        made.submit(config)
        wait_until(
            lambda: any(len(fleet.releases()[device]) == 6 for device in (0, 1)),
            seconds=90,
            what="a device has answered",
        )
        link.kill()
        made.start_superlink("--database", "superlink.db")
        finish(made, made.submit(config))
        assert [len(kept) for kept in fleet.releases().values()] == [6, 6, 4, 0]
        last = [fleet.releases()[device][5] for device in (0, 1)]
        twin = Results.from_rows(
            np.concatenate([release.released for release in last]),
            np.concatenate([release.labels for release in last if release.labels is not None]),
            noise_std=last[0].noise_std,
        )
        np.testing.assert_allclose(records(fleet)[-1]["iterate_standardised"], twin.shrunk_params, rtol=1e-9)


@pytest.mark.nightly
@pytest.mark.simulation
def test_the_app_and_the_examples_in_flowers_simulation(tmp_path: Path) -> None:
    """What `flwr run . local` does, with a SuperLink whose process this test knows."""
    # Ray's sockets are in the temporary directory, and must have short names.
    with tempfile.TemporaryDirectory(prefix="fm-") as short, deployment(tmp_path / "l", tls=False) as made:
        made.env["TMPDIR"] = short
        made.start_superlink("--simulation")
        finish(made, made.submit(f'output="{tmp_path}/out" task="fair" epsilon=4'), seconds=180)
        (line,) = (tmp_path / "out" / "records.jsonl").read_text(encoding="utf-8").splitlines()
        record = json.loads(line)
        assert (record["num_nodes"], record["num_rows"], record["simulated"]) == (2, 3819, True)
        # Least squares has 0.86; no statistical claim, only that a fit came out of it.
        assert 0.7 < record["r2_test"] < 0.9
        for example in ("numpyclient", "message"):
            finish(made, made.submit("num-server-rounds=1", app=ROOT / "examples" / example), seconds=180)
        assert len(list(Path(short).glob("modulated-*/*.db"))) == 4
        # A run that fails says so, though `flwr run` has exited with 0.
        run_id = made.submit(f'output="{tmp_path}/out" min-available-nodes=3 wait-timeout=1.0')
        told = made.run(
            "flwr-modulated", "run-status", "test", "--run-id", run_id, "--wait", "120",
            "--output", str(tmp_path / "out"), timeout=150, check=False,
        )  # fmt: skip
        assert "finished:failed" in told
        assert "2 of min_available_nodes=3 nodes connected" in told


def two_steps(fleet: Fleet, devices: list[int]) -> np.ndarray:
    """β after the second and third release of each device, by two gradient steps from zero."""
    beta = np.zeros(2)
    for index in (1, 2):
        releases = [fleet.releases()[device][index] for device in devices]
        x = np.concatenate([release.released for release in releases])
        y = np.concatenate([release.labels for release in releases if release.labels is not None])
        Sigma = x.T @ x / len(x) - releases[0].noise_std ** 2 * np.eye(2)
        beta = beta - 0.5 / np.linalg.eigvalsh(Sigma)[-1] * (Sigma @ beta - x.T @ y / len(x))
    return beta
