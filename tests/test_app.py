"""The reference app: its run config, its device, its server, its files and the status of its runs."""

from __future__ import annotations

import csv
import json
import logging
import re
import stat
import sys
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from devices import FEATURES, LABEL, Fleet, server_context
from flwr.app import Context, RecordDict
from flwr.serverapp import Grid

from flwr_modulated import (
    Distance,
    InsufficientRepliesError,
    InvalidParameterError,
    Replace,
    ReplaceRecord,
    RequestRefusedError,
)
from flwr_modulated.datasets import read_table
from flwr_modulated.flower import client_app, outputs, server_app
from flwr_modulated.flower.run_config import RunConfig
from flwr_modulated.inference import Results
from flwr_modulated.run_status import check_run
from simulations.engines import InProcessGrid

pytestmark = [
    pytest.mark.usefixtures("task_identity"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:google"),
]

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
COLUMNS = {"centre": [40.0, 7.0], "scale": [12.0, 1.5], "label_centre": 10.0, "label_scale": 5.0}


def run(grid: Grid, config: dict[str, Any], run_id: int = 7) -> dict[str, Any]:
    """Run the ServerApp and read the record it left."""
    server_app.app(grid, server_context(config, run_id))
    lines = (Path(config["output"]) / "records.jsonl").read_text(encoding="utf-8").splitlines()
    return json.loads(lines[-1])  # type: ignore[no-any-return]


@pytest.fixture
def fleet(tmp_path: Path, rng: np.random.Generator) -> Fleet:
    return Fleet(tmp_path, rng)


@pytest.fixture(autouse=True)
def _no_figures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes a second; one test does."""
    if "figure" not in request.node.name:
        monkeypatch.setattr(outputs, "find_spec", lambda name: None)


# Run config


def test_pyproject_and_code_have_the_same_defaults() -> None:
    """`flwr run` knows only the keys in pyproject.toml; a type there decides what `-c` may give."""
    declared = PYPROJECT["tool"]["flwr"]["app"]["config"]
    defaults = {item.name.replace("_", "-"): item.default for item in fields(RunConfig)}
    assert declared == defaults
    assert {key: type(value) for key, value in declared.items()} == {
        key: type(value) for key, value in defaults.items()
    }
    assert RunConfig.read(declared) == RunConfig()


def test_no_federations_in_pyproject() -> None:
    """`flwr run` would comment them out in the user's file and change their default connection."""
    assert set(PYPROJECT["tool"]["flwr"]) == {"app"}


def test_every_key_is_documented() -> None:
    text = (ROOT / "docs" / "app.md").read_text(encoding="utf-8")
    assert [key for key in PYPROJECT["tool"]["flwr"]["app"]["config"] if f"`{key}`" not in text] == []


def test_whole_numbers_are_numbers() -> None:
    """`-c epsilon=2` arrives as int."""
    assert RunConfig.read({"epsilon": 2}).epsilon == 2.0
    with pytest.raises(InvalidParameterError, match=r"seed must be of type int .*, got float"):
        RunConfig.read({"seed": 1.0})
    with pytest.raises(InvalidParameterError, match=r"epsilon must be of type float .*, got bool"):
        RunConfig.read({"epsilon": True})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"epsilom": 2.0}, "unknown key.s. epsilom; known: simulated, task"),
        ({"simulated": "no"}, "simulated must be of type bool"),
        ({"estimator": "lasso"}, "estimator must be one of 'auto', 'ridge', 'iterative'"),
        ({"relation": "swap"}, "relation must be one of"),
        ({"seed": -1}, "seed"),
        ({"num-server-rounds": 0}, "num-server-rounds"),
        ({"round-timeout": 0.0}, "round-timeout"),
        ({"simulated": False, "study": "../../etc"}, "study must be 1 to 64"),
        ({"simulated": False, "study": "x" * 65}, "study must be 1 to 64"),
        ({"output": ""}, "output must name a directory"),
        ({"simulated": False}, "must also set study, policy, features, label"),
        ({"study": "sleep", "policy": "p"}, "study, policy must be left out of a simulated run"),
        ({"simulated": False, "epsilon": 1}, "epsilon must be left out with simulated=false: each device's"),
        ({"simulated": False, "task": "co2", "seed": 1}, "task, seed must be left out"),
        ({"simulated": False, "study": "a", "policy": "p", "features": " ", "label": "y"}, "set features"),
    ],
)
def test_run_configs_that_cannot_be_used(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidParameterError, match=words):
        RunConfig.read(changes)


def test_what_a_run_config_means(tmp_path: Path) -> None:
    assert RunConfig.read({"relation": "replace", "radius": 2}).read_policy().guarantee.relation == Replace(
        2.0
    )
    joint = RunConfig.read({"relation": "replace_record", "record-label-scale": 2.0}).read_policy()
    assert joint.guarantee.relation == ReplaceRecord(1.0, 2.0)
    policy = RunConfig.read({"estimator": "iterative", "num-server-rounds": 4}).read_policy()
    assert (policy.num_releases, policy.guarantee.relation) == (4, Distance(1.0))
    assert RunConfig.read({"num-server-rounds": 4}).read_policy().num_releases == 1
    absent = {"simulated": False, "study": "a", "policy": str(tmp_path / "no"), "features": "x", "label": "y"}
    with pytest.raises(InvalidParameterError, match="policy must be a readable file on the machine of the"):
        RunConfig.read(absent).read_policy()


# Device


def test_devices_release_from_their_files_and_the_server_needs_no_data(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    """Coefficients are those of the rows that the devices' ledgers hold, in the file's own units."""
    caplog.set_level(logging.INFO, logger="flwr")
    config = fleet.run_config()
    record = run(fleet.grid(config), config)
    releases = [release for (release,) in fleet.releases().values()]
    twin = Results.from_rows(
        np.concatenate([release.released for release in releases]),
        np.concatenate([release.labels for release in releases if release.labels is not None]),
        noise_std=releases[0].noise_std,
        feature_names=FEATURES,
        label_name=LABEL,
        fit_intercept=True,
        **COLUMNS,  # type: ignore[arg-type]
    )
    np.testing.assert_allclose(record["params"], twin.params, rtol=1e-9)
    np.testing.assert_allclose(record["predicting_params"], twin.shrunk_params, rtol=1e-9)
    assert record["names"] == ["age", "hours", "const"]
    assert (record["num_nodes"], record["num_rows"], record["refused"]) == (6, 6, {})
    assert record["noise_std"] == [releases[0].noise_std] * 2
    assert record["guarantee"].startswith("(ε=8, δ=1e-05)-DP, relation replace(3), unit row")
    assert "Results: " in caplog.text
    assert "SIMULATION" not in caplog.text
    assert (Path(config["output"]) / "sleep.checkpoint.npz").is_file()


def test_a_device_may_hold_a_parquet_file_with_more_columns(fleet: Fleet) -> None:
    import pandas as pd

    for device, node in fleet.node_configs.items():
        frame = pd.read_csv(node["data-path"]).assign(person="somebody", extra=1.0)[
            ["extra", "hours", "person", "stress", "age"]
        ]
        frame.to_parquet(fleet.folder / f"{device}.parquet")
        node |= {"data-path": str(fleet.folder / f"{device}.parquet"), "features": "age, hours"}
    config = fleet.run_config()
    assert run(fleet.grid(config), config)["num_rows"] == 6


SIMULATION_ONLY = {"partition-id": 0, "num-partitions": 6}


@pytest.mark.parametrize(
    ("node_config", "words"),
    [
        ({}, "asks devices for data of their own, and this node has none: its owner must add data-path"),
        (SIMULATION_ONLY, "the run asks devices for data of their own, and this node has none"),
        ({"data_path": "x.csv", **SIMULATION_ONLY}, "this node has none: its owner must add data-path"),
        ({"data-path": "x.csv", **SIMULATION_ONLY}, "must add policy-path, ledger-path, label to"),
        ({"label": "y"}, "must add data-path, policy-path, ledger-path to"),
        ({"features": "age"}, "must add data-path, policy-path, ledger-path, label to"),
    ],
)
def test_a_device_never_falls_back_to_simulation(
    node_config: dict[str, Any], words: str, fleet: Fleet
) -> None:
    fleet.node_configs = dict.fromkeys(fleet.node_configs, node_config)
    config = fleet.run_config()
    with pytest.raises(InsufficientRepliesError, match=words):
        server_app.app(fleet.grid(config), server_context(config))


@pytest.mark.parametrize(
    ("node_config", "words"),
    [
        ({}, "this node has no data of its own: its owner must add data-path"),
        ({"partition-id": 0}, "this node has no data of its own"),
        ({"data_path": "x.csv", **SIMULATION_ONLY}, "this node has no data of its own"),
        (
            {"data-path": "x.csv", **SIMULATION_ONLY},
            "the device is not set up: its owner must add policy-path",
        ),
    ],
)
def test_a_simulated_run_does_not_take_a_device_for_a_simulated_one(
    node_config: dict[str, Any], words: str
) -> None:
    with pytest.raises(RequestRefusedError, match=words):
        client_app.client_fn(device_context(node_config, {}))


def test_a_device_with_data_takes_no_part_in_a_simulation(fleet: Fleet) -> None:
    for node in (fleet.node_configs[0], fleet.node_configs[0] | SIMULATION_ONLY):
        with pytest.raises(RequestRefusedError, match="takes no part in a run with simulated=true"):
            client_app.client_fn(device_context(node, {}))
    assert not fleet.ledger(0).exists()


def device_context(node_config: dict[str, Any], run_config: dict[str, Any]) -> Context:
    return Context(run_id=1, node_id=1, node_config=node_config, state=RecordDict(), run_config=run_config)


SENTINEL = "271828.182"


@pytest.mark.parametrize(
    ("table", "node"),
    [
        (f"age,hours,stress\n{SENTINEL},abc{SENTINEL},1\n", {}),
        (f"age,hours,stress\n{SENTINEL},,1\n", {}),
        (f"age,hours,secretcolumn\n{SENTINEL},1,1\n", {}),
        (f"{SENTINEL},1,2\n", {}),
        (f"age,hours,stress,secretcolumn\n{SENTINEL},1,1,1\n", {}),
        (f"hours,age,stress\n{SENTINEL},1,1\n", {}),
        (f"age,hours,stress\n{SENTINEL},1,1\n", {"features": "age,secretcolumn"}),
        (f"age,hours,stress\n{SENTINEL},1,1,1\n", {}),
        ("age,hours,stress\n", {}),
        (None, {}),
        ("", {"policy-path": f"/nowhere/{SENTINEL}.toml"}),
        (
            f"age,hours,stress,secretcolumn\n{SENTINEL},1,1,1\n",
            {"label": "secretcolumn", "features": "age,hours"},
        ),
        (f"age,hours,stress\n{SENTINEL},1,1\n", {"ledger-path": f"/nowhere/{SENTINEL}/ledger.db"}),
    ],
    ids=["text", "gap", "no-label", "no-header", "more", "order", "feature", "ragged", "empty", "no-file",
         "no-policy", "label", "no-ledger"],
)  # fmt: skip
def test_errors_of_a_device_hold_no_data_no_path_and_no_column(
    table: str | None, node: dict[str, str], fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    """They travel to the server; the owner reads the rest in the device's own log."""
    caplog.set_level(logging.INFO, logger="flwr")
    path = Path(fleet.node_configs[0]["data-path"])
    if table is None:
        path.unlink()
    elif table:
        path.write_text(table)
    fleet.node_configs[0] |= node
    config = fleet.run_config(min_replies=6)
    with pytest.raises(InsufficientRepliesError) as caught:
        server_app.app(fleet.grid(config), server_context(config))
    text = str(caught.value)
    assert "5 valid replies of 6 asked" in text
    assert re.search(r"1 × error on the device: (the |policy-path in the device)", text)
    for secret in (SENTINEL, "secretcolumn", str(fleet.folder), "nowhere", ".csv"):
        assert secret not in text
    assert SENTINEL not in caplog.text.replace(f"/nowhere/{SENTINEL}", "")
    assert not fleet.ledger(0).exists()


def test_the_owner_finds_the_reason_in_the_devices_log(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    Path(fleet.node_configs[0]["data-path"]).write_text("age,hours,mood\n1,2,3\n")
    config = fleet.run_config()
    run(fleet.grid(config), config)
    assert (
        "label must be columns of the file, which has no stress; available: age, hours, mood" in caplog.text
    )
    Path(fleet.node_configs[0]["data-path"]).write_text("hours,age,stress\n1,2,3\n")
    run(fleet.grid(config), config)
    assert "The study's features are age, hours; this device would release hours, age" in caplog.text


# Server


@pytest.mark.parametrize("relation", ["distance", "replace_record"])
def test_a_simulated_run_and_its_figure(
    relation: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With ε so large that noise is negligible, the task's R² is that of least squares.

    Not within a statistical bound: noise of 1e-3 or less moves R² by less than 1e-3 here.
    """
    caplog.set_level(logging.INFO, logger="flwr")
    config = {
        "task": "synthetic", "epsilon": 1e7, "relation": relation, "output": str(tmp_path),
        "radius": 1.0 if relation == "distance" else 20.0,
    }  # fmt: skip
    record = run(InProcessGrid(_simulated_app(config), 3), config)
    assert record["num_nodes"] == 3
    assert (record["num_rows"], record["num_test_rows"]) == (6000, 2000)
    assert record["r2_test"] == pytest.approx(record["r2_test_without_privacy"], abs=2e-3)
    assert record["r2_test"] > 0.4
    assert record["simulated"] is True
    assert record["guarantee"].startswith("(ε=1e+07, δ=1e-05)-DP")
    assert "SIMULATION" in caplog.text
    assert "No real person is protected" in caplog.text
    folder = tmp_path / "run-7"
    assert {path.name for path in folder.iterdir()} == {
        "summary.txt", "coefficients.csv", "rounds.csv", "diagnostics.png",
    }  # fmt: skip
    assert "Guarantee:   (ε=1e+07" in (folder / "summary.txt").read_text(encoding="utf-8")
    with (folder / "coefficients.csv").open(encoding="utf-8") as file:
        table = {row["name"]: row for row in csv.DictReader(file)}
    assert list(table) == ["x1", "x2", "x3", "x4", "x5", "const"]
    assert float(table["x1"]["coefficient"]) == record["params"][0]
    assert float(table["x1"]["low"]) < record["params"][0] < float(table["x1"]["high"])
    with (folder / "rounds.csv").open(encoding="utf-8") as file:
        (only,) = csv.DictReader(file)
    assert (only["round"], only["num-valid"]) == ("1", "3")
    assert "estimated-r2" in only
    assert (folder / "diagnostics.png").read_bytes().startswith(b"\x89PNG")


def _simulated_app(config: dict[str, Any]) -> Any:
    from flwr.clientapp import ClientApp

    def client_fn(context: Context) -> Any:
        context.run_config = config
        return client_app.client_fn(context)

    return ClientApp(client_fn)


def test_two_simulated_runs_draw_different_noise(tmp_path: Path) -> None:
    """The seed is of the split: noise has none."""
    config = {"task": "synthetic", "output": str(tmp_path)}
    grid = InProcessGrid(_simulated_app(config), 2)
    one, other = run(grid, config), run(grid, config, run_id=8)
    assert one["params"] != other["params"]
    assert one["r2_test_without_privacy"] == other["r2_test_without_privacy"]


def test_a_task_that_does_not_exist(tmp_path: Path) -> None:
    config = {"task": "weather", "output": str(tmp_path)}
    with pytest.raises(
        InvalidParameterError, match=r"task must be one of co2, .*, synthetic, or a file that"
    ):
        server_app.app(InProcessGrid(_simulated_app(config), 2), server_context(config))


def test_a_simulated_run_on_a_file(tmp_path: Path, rng: np.random.Generator) -> None:
    x = rng.normal(50.0, 10.0, (400, 2))
    y = 3.0 + x @ [2.0, -1.0]
    table = np.column_stack([x, y])
    np.savetxt(tmp_path / "t.csv", table, delimiter=",", header="a,b,y", comments="")
    config = {"task": str(tmp_path / "t.csv"), "label": "y", "epsilon": 1e9, "output": str(tmp_path / "out")}
    record = run(InProcessGrid(_simulated_app(config), 2), config)
    assert record["names"] == ["a", "b", "const"]
    np.testing.assert_allclose(record["params"], [2.0, -1.0, 3.0], rtol=1e-2)


def test_iterative_rounds_with_fresh_releases(tmp_path: Path, rng: np.random.Generator) -> None:
    """Two releases a device; the last iterate is recomputed by hand from the ledgers' rows."""
    fleet = Fleet(tmp_path, rng, num_devices=4, rows=5, epsilon=1e4, num_releases=2)
    config = fleet.run_config(estimator="iterative", num_server_rounds=2, step=0.5)
    record = run(fleet.grid(config), config)
    beta = np.zeros(2)
    for index in range(2):
        releases = [kept[index] for kept in fleet.releases().values()]
        x = np.concatenate([release.released for release in releases])
        y = np.concatenate([release.labels for release in releases if release.labels is not None])
        Sigma = x.T @ x / 20 - releases[0].noise_std ** 2 * np.eye(2)
        beta = beta - 0.5 / np.linalg.eigvalsh(Sigma)[-1] * (Sigma @ beta - x.T @ y / 20)
    np.testing.assert_allclose(record["iterate_standardised"], beta, rtol=1e-9)
    assert [len(kept) for kept in fleet.releases().values()] == [2] * 4
    assert [line["round"] for line in record["rounds"]] == [1, 2]


def test_a_device_may_choose_more_noise_than_the_study_but_not_less(fleet: Fleet) -> None:
    """Less would break the guarantee that the report states; the device is told nothing it did not know."""
    weaker = fleet.folder / "weaker.toml"
    weaker.write_text(fleet.policy.read_text().replace("epsilon = 8.0", "epsilon = 8.1"))
    stronger = fleet.folder / "stronger.toml"
    stronger.write_text(fleet.policy.read_text().replace("epsilon = 8.0", "epsilon = 1.0"))
    fleet.node_configs[0]["policy-path"] = str(weaker)
    fleet.node_configs[1]["policy-path"] = str(stronger)
    config = fleet.run_config()
    record = run(fleet.grid(config), config)
    assert record["refused"] == {"noise_std outside what the study allows": 1}
    low, high = record["noise_std"]
    stds = {device: release.noise_std for device, (release,) in fleet.releases().items()}
    assert (low, high) == (stds[2], stds[1])
    assert stds[0] < low < high
    assert record["num_nodes"] == 5
    assert record["guarantee"].startswith("(ε=8, δ=1e-05)-DP, relation replace(3)")


def test_a_study_that_fails_says_so_and_leaves_no_record(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    config = fleet.run_config(min_replies=7)
    with pytest.raises(InsufficientRepliesError):
        server_app.app(fleet.grid(config), server_context(config))
    assert "the study has failed, no results were written: round 1: 6 valid replies of 6 asked" in caplog.text
    assert not (Path(config["output"]) / "records.jsonl").exists()


def test_an_output_that_cannot_be_written_fails_the_run(fleet: Fleet) -> None:
    (fleet.folder / "file").write_text("")
    config = fleet.run_config(output=str(fleet.folder / "file" / "out"))
    with pytest.raises((InvalidParameterError, OSError)):
        server_app.app(fleet.grid(config), server_context(config))


def test_columns_of_policy_and_study_must_agree(fleet: Fleet) -> None:
    config = fleet.run_config(features="age,hours,weight")
    with pytest.raises(InvalidParameterError, match=r"\[columns\] are for 2 features, .* names 3"):
        server_app.app(fleet.grid(config), server_context(config))


def test_a_row_beyond_the_studys_radius_is_refused(fleet: Fleet) -> None:
    """A device whose own policy clips to a far larger ball, with a row that is there."""
    wide = fleet.folder / "wide.toml"
    # σ ≈ 2·10⁶/√(2ε) = 4.5, more than the study's 3.6, on a row 250,000 of its radii long.
    wide.write_text(
        fleet.policy.read_text().replace("radius = 3.0", "radius = 1e6").replace("= 8.0", "= 1e11")
    )
    fleet.node_configs[0]["policy-path"] = str(wide)
    Path(fleet.node_configs[0]["data-path"]).write_text("age,hours,stress\n9000000,7,10\n")
    config = fleet.run_config()
    assert run(fleet.grid(config), config)["refused"] == {"a released row longer than any honest one": 1}


def test_tensorboard_only_where_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for TensorBoard's writer: every metric of every round arrives under its name."""
    import types

    written: list[tuple[str, float, int]] = []

    class Writer:
        def __init__(self, path: str) -> None:
            written.append((path, 0.0, -1))

        def add_scalar(self, tag: str, data: float, step: int) -> None:
            written.append((tag, data, step))

        def close(self) -> None:
            pass

    summary = types.ModuleType("tensorboard.summary")
    summary.Writer = Writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tensorboard", types.ModuleType("tensorboard"))
    monkeypatch.setitem(sys.modules, "tensorboard.summary", summary)
    monkeypatch.setattr(outputs, "find_spec", lambda name: None if name == "matplotlib" else object())
    config = {"task": "synthetic", "output": str(tmp_path)}
    record = run(InProcessGrid(_simulated_app(config), 2), config)
    assert written[0][0] == str(tmp_path / "run-7" / "tensorboard")
    assert {tag: (data, step) for tag, data, step in written[1:]} == {
        name: (value, 1) for name, value in record["rounds"][0].items() if name != "round"
    }
    assert not (tmp_path / "run-7" / "diagnostics.png").exists()


# The bundle


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what Flower builds with
def test_the_bundle_holds_the_package_and_nothing_else(
    tmp_path: Path,
) -> None:
    import io
    import zipfile

    from flwr.cli.build import build_fab_from_disk

    data = build_fab_from_disk(ROOT)
    names = zipfile.ZipFile(io.BytesIO(data)).namelist()
    outside = [name for name in names if not name.startswith("flwr_modulated/")]
    assert {"pyproject.toml"} <= set(outside) <= {"pyproject.toml", ".info/CONTENT", "README.md", "LICENSE"}
    assert "flwr_modulated/flower/server_app.py" in names
    assert len(data) < 1_000_000


# Status of a run


@pytest.fixture
def flower_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stand-in for the `flwr` command that tells what the test wants."""
    calls, python = tmp_path / "calls", sys.executable
    monkeypatch.setattr("flwr_modulated.run_status.sys.executable", str(tmp_path / "python"))

    def tell(*answers: Any) -> Path:
        script = tmp_path / "flwr"
        texts = [answer if isinstance(answer, str) else json.dumps(answer) for answer in answers]
        script.write_text(
            f"#!{python}\nimport sys, pathlib\ncalls = pathlib.Path({str(calls)!r})\n"
            "done = calls.read_text().splitlines() if calls.exists() else []\n"
            "calls.write_text('\\n'.join([*done, ' '.join(sys.argv[1:])]))\n"
            f"answers = {texts!r}\nprint(answers[min(len(done), len(answers) - 1)])\n"
        )
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        calls.unlink(missing_ok=True)
        return calls

    return tell


def listed(status: str, details: str = "N/A", run_id: str = "7") -> dict[str, Any]:
    return {"success": True, "runs": [{"run-id": run_id, "status": status, "status-details": details}]}


def write_record(folder: Path, **changes: Any) -> None:
    record = {"run_id": "7", "num_rows": 6, "num_nodes": 3} | changes
    with (folder / "records.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")


def test_a_completed_run_with_a_record_is_a_success(tmp_path: Path, flower_says: Any) -> None:
    calls = flower_says(listed("finished:completed"))
    write_record(tmp_path)
    write_record(tmp_path, run_id="8")
    with (tmp_path / "records.jsonl").open("a") as file:
        file.write('{"run_id": "7", "num_ro')
    status = check_run("local", "7", output=str(tmp_path))
    assert status.exit_code == 0
    assert "Results of 6 rows from 3 nodes" in str(status)
    assert calls.read_text() == "list local --run-id 7 --format json"


def test_a_completed_run_without_a_record_is_not(tmp_path: Path, flower_says: Any) -> None:
    flower_says(listed("finished:completed"))
    write_record(tmp_path, run_id="8")
    status = check_run(None, output=str(tmp_path))
    assert status.exit_code == 1
    assert "No record of it was found" in str(status)
    assert check_run(None, output=None).exit_code == 0
    assert check_run(None, output=str(tmp_path / "none")).exit_code == 1


@pytest.mark.parametrize("word", ["failed", "stopped"])
def test_a_failed_run_is_told_with_its_reason(word: str, tmp_path: Path, flower_says: Any) -> None:
    """Even if a record is there: it may be of the moment before."""
    flower_says(listed(f"finished:{word}", "2 of 5 nodes connected"))
    write_record(tmp_path)
    status = check_run("local", output=str(tmp_path))
    assert status.exit_code == 1
    assert f"finished:{word}" in str(status)
    assert "2 of 5 nodes connected" in str(status)


def test_waiting_for_a_run(tmp_path: Path, flower_says: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flwr_modulated.run_status._POLL_SECONDS", 0.0)
    calls = flower_says(listed("pending"), listed("running"), listed("finished:completed"))
    write_record(tmp_path)
    assert check_run("local", output=str(tmp_path), wait=60.0).exit_code == 0
    assert [line.split()[2:4] for line in calls.read_text().splitlines()] == [
        ["--limit", "1"], ["--run-id", "7"], ["--run-id", "7"],
    ]  # fmt: skip
    flower_says(listed("running"))
    assert check_run("local", "7", output=str(tmp_path)).exit_code == 3


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"success": False, "error-message": "\nRun ID\n not found"}, "status of the run: Run ID not found"),
        ({"success": True, "runs": []}, "there is no run yet"),
        ("Traceback", "try `list local"),
        ("[]", "try `list local"),
    ],
)
def test_a_status_that_flower_does_not_tell(answer: Any, words: str, flower_says: Any) -> None:
    flower_says(answer)
    with pytest.raises(InvalidParameterError, match=words):
        check_run("local", "7")


@pytest.mark.parametrize(
    ("status", "record", "more", "code"),
    [
        ("finished:completed", True, [], 0),
        ("finished:completed", False, [], 1),
        ("finished:completed", False, ["--no-record"], 0),
        ("finished:failed", True, [], 1),
        ("running", False, [], 3),
    ],
)
def test_the_command_tells_by_its_exit_code(
    status: str, record: bool, more: list[str], code: int, tmp_path: Path, flower_says: Any
) -> None:
    from typer.testing import CliRunner

    from flwr_modulated.cli import app

    flower_says(listed(status))
    if record:
        write_record(tmp_path)
    done = CliRunner().invoke(app, ["run-status", "local", "--output", str(tmp_path), *more])
    assert done.exit_code == code
    assert f"Run 7: {status}" in done.output


def test_reading_tables_needs_no_simulation_extra() -> None:
    """The extra `device` brings what a CSV needs."""
    extras = PYPROJECT["project"]["optional-dependencies"]["device"]
    assert any(item.startswith("pandas") for item in extras)
    assert any(item.startswith("opendp") for item in extras)
    assert callable(read_table)
