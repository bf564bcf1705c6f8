"""The same strategy and clients in this process and on Ray, and what an engine does with errors."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray_side
from fakes import SpyGrid, parts, varint
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from flwr_modulated import InsufficientRepliesError
from flwr_modulated.datasets import load_task, partition, split_task
from simulations import study
from simulations.engines import InProcessGrid, run_federation
from simulations.settings import Engine

ROOT = Path(__file__).resolve().parent.parent


def echo_app() -> ClientApp:
    """Answers with its node's configuration and how often it has been called."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        calls = int(context.state.config_records.get("calls", ConfigRecord({"n": 0}))["n"]) + 1
        context.state.config_records["calls"] = ConfigRecord({"n": calls})
        if "fail" in message.content:
            raise ValueError("this node fails")
        config = ConfigRecord({**context.node_config, "calls": calls})
        return Message(RecordDict({"config": config}), reply_to=message)

    return app


# In this process


def test_nodes_are_known_by_partition_and_keep_their_state(task_identity: None) -> None:
    grid = InProcessGrid(echo_app(), 3)
    assert list(grid.get_node_ids()) == [1, 2, 3]
    for calls in (1, 2):
        messages = [Message(RecordDict(), node, "train") for node in (3, 1, 2)]
        replies = list(grid.send_and_receive(messages, timeout=1.0))
        assert [reply.metadata.src_node_id for reply in replies] == [3, 1, 2]
        for reply in replies:
            assert dict(reply.content.config_records["config"]) == {
                "partition-id": reply.metadata.src_node_id - 1,
                "num-partitions": 3,
                "calls": calls,
            }


def test_a_node_that_raises_answers_with_an_error_and_stops_nobody(task_identity: None) -> None:
    grid = InProcessGrid(echo_app(), 2)
    bad = Message(RecordDict({"fail": ConfigRecord({})}), 1, "train")
    first, second = grid.send_and_receive([bad, Message(RecordDict(), 2, "train")])
    assert first.has_error()
    assert first.error.code == 2
    assert "ValueError: this node fails" in first.error.reason
    assert not second.has_error()


def test_a_message_type_that_the_app_does_not_know_is_an_error_reply(task_identity: None) -> None:
    (reply,) = InProcessGrid(echo_app(), 1).send_and_receive([Message(RecordDict(), 1, "query")])
    assert "No query function registered" in reply.error.reason


def test_messages_cannot_be_left_waiting(task_identity: None) -> None:
    grid = InProcessGrid(echo_app(), 1)
    message = grid.create_message(RecordDict(), "train", 1, "group")
    assert (message.metadata.dst_node_id, message.metadata.group_id) == (1, "group")
    for refuse in (
        lambda: grid.push_messages([message]),
        lambda: grid.pull_messages(["id"]),
        lambda: grid.set_run(None),
        lambda: grid.run,
    ):
        with pytest.raises(NotImplementedError):
            refuse()


def identity() -> tuple[int | None, ...]:
    return TaskIdentity._run_id, TaskIdentity._task_id, TaskIdentity._node_id


@pytest.mark.parametrize("before", [(None, None, None), (7, 8, 9)])
@pytest.mark.parametrize("fails", [False, True])
def test_a_run_in_this_process_leaves_no_trace(
    before: tuple[int | None, ...], fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flower's identity of a task is one a process: a run must hand it back as it was."""
    for name, value in zip(("_run_id", "_task_id", "_node_id"), before, strict=True):
        monkeypatch.setattr(TaskIdentity, name, value)
    seen: list[Any] = []

    def server(grid: Grid) -> None:
        seen.append(Message(RecordDict(), 1, "train").metadata.run_id)
        if fails:
            raise InsufficientRepliesError("on purpose")

    engine = Engine("inprocess", 2)
    if fails:
        with pytest.raises(InsufficientRepliesError, match="on purpose"):
            run_federation(server, echo_app(), engine)
    else:
        run_federation(server, echo_app(), engine)
    assert seen == [1]
    assert identity() == before


# On Ray


@pytest.fixture(scope="module")
def in_process() -> dict[str, Any]:
    return ray_side.run("inprocess")


@pytest.fixture(scope="module")
def on_ray(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One start of Ray for all tests below, in a process of its own."""
    directory = tmp_path_factory.mktemp("ray")
    output = directory / "found.pickle"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_HOME": str(directory),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, ray_side.__file__, str(output)],
        env=environment,
        cwd=directory,
        capture_output=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    found: dict[str, Any] = pickle.loads(output.read_bytes())
    found["written"] = (done.stdout + done.stderr).decode()
    return found


def by_content(replies: list[list[np.ndarray]]) -> list[list[np.ndarray]]:
    """Node ids and arrival differ from run to run."""
    return sorted(replies, key=lambda arrays: arrays[0].tobytes())


@pytest.mark.simulation
@pytest.mark.global_rng
@pytest.mark.parametrize("label", ray_side.CELLS)
def test_both_engines_release_the_same_bytes(
    label: str, in_process: dict[str, Any], on_ray: dict[str, Any]
) -> None:
    """Every array of every reply of the first round, bit for bit; the coefficients up to rounding.

    Later rounds of local DP FedAvg start from a model that Flower sums in the order of arrival, so
    they too agree up to rounding only.
    """
    mine, rays = in_process["cells"][label], on_ray["cells"][label]
    assert mine["asked"] == rays["asked"] == [4] * len(mine["asked"])
    for number, (ours, theirs) in enumerate(zip(mine["replies"], rays["replies"], strict=True)):
        for one, other in zip(by_content(ours), by_content(theirs), strict=True):
            for a, b in zip(one, other, strict=True):
                if label == "local DP FedAvg" and number > 0:
                    np.testing.assert_allclose(a, b, rtol=1e-9)
                else:
                    assert a.tobytes() == b.tobytes()
    np.testing.assert_allclose(mine["beta"], rays["beta"], rtol=1e-9)
    assert mine["r2"] == pytest.approx(rays["r2"], abs=1e-9)


def test_every_row_is_released_once_a_round_with_noise_of_its_own() -> None:
    """Plain releases minus the rows: the noise of 4 nodes in 2 rounds, 126 × 7 numbers each.

    Statistic: correlation of each pair of the eight, SE 1/√882 without a common stream; 28 pairs at a
    two-sided 1e-6 in all, 5.5 SE. A stream keyed on less than (seed, node, round) gives correlation 1.
    """
    cell = replace(ray_side.AUTO, method=(("name", "auto"), ("num_rounds", 2)), seed=0)
    table, engine, spies = study.CellTable.of([cell]), Engine("inprocess", 4), []

    def server(grid: Grid) -> None:
        spies.append(SpyGrid(grid))
        study._run_cell(cell, table.name(cell, 0), spies[0], engine)

    run_federation(server, study.make_client_app(table, 0), engine)
    split = split_task(load_task("modechoice"), 0)
    noise = []
    for round_ in spies[0].received[::2]:
        for reply in round_:
            share = partition(504, 4, reply.metadata.src_node_id - 1)
            released, labels, std = parts(reply.content)
            np.testing.assert_array_equal(labels, split.train_labels[share])
            noise.append(((released - split.train_features[share]) / std).ravel())
    assert len(noise) == 8
    off_diagonal = np.corrcoef(noise)[np.triu_indices(8, 1)]
    assert np.abs(off_diagonal).max() < 5.5 / np.sqrt(882)
    # χ² of 8 · 882 standard normals, two-sided 1e-6: σ off by 5 % is 8 SE away.
    assert abs(np.sum(np.square(noise)) - 7056) < 4.9 * np.sqrt(2 * 7056)


@pytest.mark.parametrize("engine", ["in_process", pytest.param("on_ray", marks=pytest.mark.simulation)])
@pytest.mark.global_rng
def test_errors_reach_the_user_and_hold_no_data(engine: str, request: pytest.FixtureRequest) -> None:
    """A node that fails: the reason it gave. A server that fails: its own error, as it was raised."""
    found = request.getfixturevalue(engine)
    assert found["asked of the broken"] == [4, 1], "the second round asks the one not heard from"
    assert found["too few"] == (
        "round 1: 3 valid replies of 4 asked, min_replies=4; reasons: 1 × error on the device: "
        "the device could not answer (KeyError); its owner can call load() there to see why"
    )
    assert found["raised"] == "InsufficientRepliesError: the server stops on purpose"
    assert b"the device could not answer" in found["bytes"]
    for word in ray_side.SENTINEL.split():
        assert word.encode() not in found["bytes"]
        assert word not in found.get("written", "")


@pytest.mark.parametrize("engine", ["in_process", pytest.param("on_ray", marks=pytest.mark.simulation)])
@pytest.mark.global_rng
def test_no_seed_travels(engine: str, request: pytest.FixtureRequest) -> None:
    """Whoever knows a seed can subtract the noise. All messages of all methods, both ways."""
    data, seed = request.getfixturevalue(engine)["bytes"], ray_side.SEED
    assert len(data) > 100_000
    for encoded in (
        str(seed).encode(),
        varint(seed),
        seed.to_bytes(4, "little"),
        seed.to_bytes(4, "big"),
        np.float64(seed).tobytes(),
    ):
        assert encoded not in data
