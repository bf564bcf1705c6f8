"""Many clients: blocks, layouts, samplings, synthetic tasks of any size, workers and machines that die."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray_kill
from fakes import FakeGrid, error_reply
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from hypothesis import given
from hypothesis import strategies as st
from test_exact_law import faults

from flwr_modulated import (
    Distance,
    Guarantee,
    InsufficientRepliesError,
    InvalidDataError,
    InvalidParameterError,
    Mechanism,
    ModulatedClient,
    ModulatedStrategy,
    Modulation,
    Moments,
    Policy,
    RequestRefusedError,
    draw_directions,
)
from flwr_modulated._blocks import blocks_of, row_blocks
from flwr_modulated.flower.records import Request
from simulations import data, study, synthetic
from simulations.engines import InProcessGrid, run_federation
from simulations.exact_client import _KEPT, ExactLawClient
from simulations.hosting import Engine, Layout
from simulations.persistent_grid import PersistentGrid
from simulations.settings import Cell
from simulations.synthetic import SyntheticRows

ROOT = Path(__file__).resolve().parent.parent
MECHANISM = Mechanism(Modulation(), Guarantee(2.0, 1e-5, Distance(1.0)))
MODULATION = Modulation(0.2, 0.5, 0.5, 2)
SMALL = Cell(
    task="synthetic",
    method=(("name", "auto"), ("num_rounds", 1)),
    epsilon=8.0,
    delta=1e-5,
    relation="distance",
    radius=1.0,
    label_scale=1.0,
    accounting="exact",
    seed=3,
    num_clients=60,
    num_features=2,
)


# Blocks


@given(st.integers(1, 300_000), st.integers(1, 100_000))
def test_blocks_cover_every_row_once_and_fit_a_cache(num_rows: int, num_columns: int) -> None:
    blocks = row_blocks(num_rows, num_columns)
    assert [b.start for b in blocks] == [0, *(b.stop for b in blocks[:-1])]
    assert blocks[-1].stop == num_rows
    assert all(b.stop - b.start == 1 or (b.stop - b.start) * num_columns <= 65536 for b in blocks)
    assert len(blocks) <= num_rows
    assert len(blocks) <= 1 + 2 * num_rows * num_columns / 65536


@given(st.lists(st.sampled_from([1, 2, 700, 30_000, 80_000]), min_size=1, max_size=12))
def test_rows_of_many_replies_keep_their_order_in_blocks(sizes: list[int]) -> None:
    parts = np.split(np.arange(2.0 * sum(sizes)).reshape(-1, 2), np.cumsum(sizes)[:-1])
    blocks = list(blocks_of(parts))
    np.testing.assert_array_equal(np.concatenate(blocks), np.concatenate(parts))
    assert max(block.size for block in blocks) <= 65536
    assert len(blocks) <= 2 + 3 * 2 * sum(sizes) / 65536  # no two small ones are left apart


@pytest.mark.parametrize("modulation", [Modulation(), MODULATION])
def test_release_is_the_blocks_put_together(modulation: Modulation) -> None:
    """20,000 × 9 numbers are three blocks. Same stream, same bytes, with and without phases."""
    mechanism = replace(MECHANISM, modulation=modulation)
    rows = np.random.default_rng(0).standard_normal((20_000, 9))
    directions = draw_directions(9, modulation.num_directions, rng=np.random.default_rng(1))
    whole = mechanism.release(rows, directions, rng=np.random.default_rng(2))
    blocks = list(mechanism.release_blocks(rows, directions, rng=np.random.default_rng(2)))
    assert len(blocks) == 3
    np.testing.assert_array_equal(np.concatenate(blocks), whole)


def test_every_block_has_noise_and_phases_of_its_own() -> None:
    """Three equal blocks of rows: correlations of what is released, SE 1/√65,520; three at 1e-6: 5.1 SE.

    A stream that starts anew with each block gives 1, phases shared by blocks 0.03 (8 SE).
    """
    size = row_blocks(10**6, 9)[0].stop
    mechanism = replace(MECHANISM, modulation=replace(MODULATION, amplitude=8.0, frequency=0.01))
    directions = draw_directions(9, 2, rng=np.random.default_rng(1))
    released = mechanism.release(np.zeros((3 * size, 9)), directions, rng=np.random.default_rng(2))
    correlations = np.corrcoef(released.reshape(3, -1))[np.triu_indices(3, 1)]
    assert np.abs(correlations).max() < 5.1 / math.sqrt(9 * size)


def test_bad_rows_in_a_late_block_are_refused() -> None:
    rows = np.zeros((20_000, 9))
    rows[-1, -1] = np.nan
    with pytest.raises(InvalidDataError, match="features must be finite"):
        MECHANISM.release(rows, rng=np.random.default_rng(0))
    with pytest.raises(InvalidDataError, match="released must be finite"):
        Moments.from_rows(rows, np.zeros(20_000), noise_std=1.0)
    with pytest.raises(InvalidParameterError, match="directions must be given"):
        replace(MECHANISM, modulation=MODULATION).release_blocks(rows, rng=np.random.default_rng(0))


class TestSumsOfBlocks:
    """`Moments.from_blocks` against plain sums."""

    @given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.booleans())
    def test_any_blocks_give_the_sums_of_the_rows(self, sizes: list[int], labelled: bool) -> None:
        rng = np.random.default_rng(sizes)
        rows, y = rng.standard_normal((sum(sizes), 3)), rng.standard_normal(sum(sizes))
        parts = np.split(rows, np.cumsum(sizes)[:-1])
        got = Moments.from_blocks(parts, y if labelled else None, noise_std=0.5)
        np.testing.assert_allclose(got.gram, rows.T @ rows, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(got.cross, y @ rows if labelled else np.zeros(3), rtol=1e-11, atol=1e-12)
        np.testing.assert_allclose(got.total, rows.sum(axis=0), rtol=1e-11, atol=1e-12)
        assert (got.num_samples, got.noise_variance_sum) == (len(rows), 0.25 * len(rows))

    @pytest.mark.parametrize("num_labels", [0, 4, 6])
    def test_labels_must_be_as_many_as_rows(self, num_labels: int) -> None:
        with pytest.raises(InvalidDataError, match="labels must have one entry a released row"):
            Moments.from_blocks([np.ones((2, 3)), np.ones((3, 3))], np.ones(num_labels), noise_std=1.0)

    def test_nothing_is_refused(self) -> None:
        with pytest.raises(InvalidDataError, match="at least one released row"):
            Moments.from_blocks([], None, noise_std=1.0)

    def test_memory_is_a_few_blocks(self) -> None:
        """A million rows are 72 MB; releasing and summing them takes no more than a dozen blocks at once."""
        rows, labels = np.zeros((1_000_000, 9)), np.zeros(1_000_000)
        tracemalloc.start()
        try:
            blocks = MECHANISM.release_blocks(rows, rng=np.random.default_rng(0))
            Moments.from_blocks(blocks, labels, noise_std=1.0)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 12 * 8 * 65536


# Layouts


@pytest.mark.parametrize(
    ("settings", "num_clients", "wanted"),
    [
        ({}, 1000, Layout(4, "rows", "rows")),
        ({}, 100_001, Layout(4, "moments", "rows")),
        ({"num_nodes": "clients"}, 777, Layout(777, "rows", "rows")),
        ({"num_nodes": "auto", "num_cpus": 8}, 500, Layout(1, "rows", "rows")),
        ({"num_nodes": "auto", "num_cpus": 8}, 30_000, Layout(3, "rows", "rows")),
        ({"num_nodes": "auto", "num_cpus": 8}, 1_000_000, Layout(8, "moments", "rows")),
        ({"num_nodes": "auto", "num_cpus": 8}, 10_000_001, Layout(11, "moments", "rows")),
        ({"num_nodes": "auto", "num_cpus": 2, "payload": "rows"}, 1_000_000, Layout(8, "rows", "rows")),
        ({"payload": "rows"}, 10**6, Layout(4, "rows", "rows")),
        ({"payload": "moments"}, 10, Layout(4, "moments", "rows")),
        ({"sampling": "moments"}, 10, Layout(4, "moments", "moments")),
    ],
)
def test_layout(settings: dict[str, Any], num_clients: int, wanted: Layout) -> None:
    assert Engine("inprocess", **settings).layout(num_clients) == wanted


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"name": "spark"}, "engine.name must be one of inprocess, ray"),
        ({"num_nodes": 0}, "engine.num_nodes"),
        ({"num_nodes": 2.5}, "engine.num_nodes"),
        ({"num_nodes": "many"}, "engine.num_nodes.*or give auto or clients"),
        ({"num_cpus": 0}, "engine.num_cpus"),
        ({"payload": "models"}, "engine.payload must be one of auto, rows, moments"),
        ({"precision": "float16"}, "engine.precision must be one of float64, float32"),
        ({"sampling": "none"}, "engine.sampling must be one of rows, moments"),
        ({"sampling": "moments", "payload": "rows"}, "engine.payload must be moments or auto"),
        ({"address": "auto"}, "engine.address needs engine.name=ray"),
        ({"name": "ray", "address": "auto", "num_cpus": 2}, "leave engine.num_cpus out"),
    ],
)
def test_contradictions_are_named(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidParameterError, match=words):
        Engine(**{"name": "inprocess", **settings})


@pytest.mark.global_rng
def test_records_say_what_was_done() -> None:
    for engine, wanted in [
        (Engine("inprocess", "clients"), (60, "rows", "rows")),
        (Engine("inprocess", "auto", payload="moments"), (1, "moments", "rows")),
        (Engine("inprocess", 3, sampling="moments"), (3, "moments", "moments")),
    ]:
        (record,) = study.run_study([SMALL], engine)
        assert (record["num_nodes"], record["payload"], record["sampling"]) == wanted
        assert (record["num_clients"], record["num_features"], record["noise_std"] > 0) == (60, 2, True)
    federated = replace(
        SMALL, method=(("name", "local_dp_fedavg"), ("num_rounds", 1), ("clip", 1.0), ("step", 0.1))
    )
    (record,) = study.run_study([federated], Engine("inprocess", 3, sampling="moments"))
    assert (record["payload"], record["sampling"]) == ("model", "rows")


def test_payload_changes_rounding_only() -> None:
    betas = [
        study.run_study([SMALL], Engine("inprocess", 4, payload=payload))[0]["beta"]
        for payload in ("rows", "moments")
    ]
    np.testing.assert_allclose(*betas, rtol=1e-10)


ROUNDS = 1000


def moments_of_rounds(engine: Engine) -> np.ndarray:
    """Debiased moments of many rounds, each a release of its own, through Flower: shape (ROUNDS, 7)."""
    cell = replace(SMALL, method=(("name", "auto"), ("num_rounds", ROUNDS)), epsilon=400.0)
    table, layout = study.CellTable.of([cell]), engine.layout(cell.num_clients)
    strategy = ModulatedStrategy(
        mode="iterative",
        payload=layout.payload,
        min_available_nodes=layout.num_nodes,
        min_replies=layout.num_nodes,
        evaluation_folds=0,
        study=table.name(cell, 0),
    )
    found = []

    def server(grid: Grid) -> None:
        initial = ArrayRecord([np.zeros(cell.num_features)])
        for server_round in range(1, ROUNDS + 1):
            messages = strategy.configure_train(server_round, initial, ConfigRecord(), grid)
            strategy.aggregate_train(server_round, grid.send_and_receive(messages))
            debiased = strategy.debiased
            assert debiased is not None
            second = debiased.second_moment[np.triu_indices(cell.num_features)]
            found.append(np.concatenate([second, debiased.cross_moment, debiased.feature_mean]))

    logger = logging.getLogger("flwr")
    level = logger.level
    logger.setLevel(logging.WARNING)  # its lines would be most of the time
    try:
        host = replace(engine, num_nodes=layout.num_nodes)
        run_federation(server, study.make_client_app(table, 0, engine.sampling), host)
    finally:
        logger.setLevel(level)
    return np.array(found)


@pytest.fixture(scope="module")
def one_node() -> np.ndarray:
    return moments_of_rounds(Engine("inprocess", 1))


LAYOUTS = {
    "four nodes": Engine("inprocess", 4),
    "three nodes, moments": Engine("inprocess", 3, payload="moments"),
    "two nodes, exact law": Engine("inprocess", 2, sampling="moments"),
}


@pytest.mark.statistical
@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_and_sampling_do_not_change_the_law(name: str, one_node: np.ndarray) -> None:
    """All that an estimator sees, 1,000 rounds, against one node that draws every row: see `faults` (1e-7).

    Catches nodes that share noise, below.
    """
    assert faults(one_node, moments_of_rounds(LAYOUTS[name])) == []


@pytest.mark.statistical
def test_nodes_that_share_noise_are_caught(one_node: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: a stream that does not depend on the node makes the noise of three nodes one noise."""
    stream = study.noise_stream
    monkeypatch.setattr(study, "noise_stream", lambda seed, node, server_round: stream(seed, 0, server_round))
    assert faults(one_node, moments_of_rounds(Engine("inprocess", 3))) != []


# A node that draws from the exact law


def exact_client(load: Callable[[], Any], **changes: Any) -> ExactLawClient:
    policy = Policy(Guarantee(2.0, 1e-5, Distance(1.0)))
    return ExactLawClient(
        load, policy, **{"key": object(), "rng": lambda r: np.random.default_rng(r), **changes}
    )


def ask(client: ExactLawClient, modulation: Modulation, payload: str = "moments") -> list[np.ndarray]:
    directions = draw_directions(3, modulation.num_directions, rng=np.random.default_rng(0))
    content = Request(1, modulation, directions, payload=payload).to_recorddict()  # type: ignore[arg-type]
    config = dict(content.config_records["fitins.config"])
    arrays, count, _ = client.fit(content.array_records["fitins.parameters"].to_numpy_ndarrays(), config)
    assert count == 50
    return arrays


@pytest.mark.parametrize(("modulation", "loads"), [(Modulation(), 1), (MODULATION, 2)])
def test_rows_are_read_once_where_there_are_no_phases(modulation: Modulation, loads: int) -> None:
    calls = []

    def load() -> tuple[np.ndarray, np.ndarray]:
        calls.append(1)
        return np.random.default_rng(1).standard_normal((50, 3)), np.ones(50)

    client = exact_client(load)
    first, second = (ask(client, modulation) for _ in range(2))
    np.testing.assert_array_equal(first[0], second[0])
    assert len(calls) == loads


def test_what_is_kept_belongs_to_one_share() -> None:
    def client(key: str, scale: float) -> ExactLawClient:
        return exact_client(lambda: (scale * np.eye(50, 3), np.ones(50)), key=key)

    ones, twos = (ask(client(key, scale), Modulation()) for key, scale in (("a", 1.0), ("b", 2.0)))
    assert not np.allclose(ones[0], twos[0])
    assert len(_KEPT) <= 4096


def test_exact_law_has_no_rows_to_send() -> None:
    with pytest.raises(InvalidParameterError, match="payload must be moments"):
        ask(exact_client(lambda: (np.eye(50, 3), np.ones(50))), Modulation(), payload="rows")


# float32 on the wire


def answer(precision: str, payload: str = "rows") -> list[np.ndarray]:
    rows = np.random.default_rng(1).standard_normal((50, 3))
    policy = Policy(Guarantee(2.0, 1e-5, Distance(1.0)))
    client = ModulatedClient(lambda: (rows, rows[:, 0]), policy, rng=lambda r: np.random.default_rng(r))
    request = Request(1, Modulation(), np.zeros((3, 0)), payload=payload, precision=precision)  # type: ignore[arg-type]
    content = request.to_recorddict()
    config = dict(content.config_records["fitins.config"])
    arrays, _, _ = client.fit(content.array_records["fitins.parameters"].to_numpy_ndarrays(), config)
    return arrays


def test_float32_is_the_same_release_rounded() -> None:
    """A function of the released row and of nothing else: what post-processing means.

    Rounding the row *before* the noise would be no such function, and is caught.
    """
    (rows,), (short,) = answer("float64"), answer("float32")
    assert (rows.dtype, short.dtype) == (np.float64, np.float32)
    np.testing.assert_array_equal(short, rows.astype(np.float32))
    assert np.abs(short - rows).max() <= 2**-24 * np.abs(rows).max()


def test_sums_are_never_rounded() -> None:
    for one, other in zip(answer("float64", "moments"), answer("float32", "moments"), strict=True):
        assert other.dtype == np.float64
        np.testing.assert_array_equal(one, other)


def test_a_study_of_float32_rows_costs_half_and_agrees() -> None:
    long, short = (
        study.run_study([SMALL], Engine("inprocess", 4, precision=precision))[0]
        for precision in ("float64", "float32")
    )
    assert (long["precision"], short["precision"]) == ("float64", "float32")
    assert (long["bytes_received"], short["bytes_received"]) == (60 * 3 * 8, 60 * 3 * 4)
    np.testing.assert_allclose(short["beta"], long["beta"], rtol=1e-5)
    assert short["beta"] != long["beta"]


@pytest.mark.parametrize(("columns", "precision"), [(1, "float64"), (2, "float32")])
def test_a_single_column_is_not_rounded(columns: int, precision: str, task_identity: None) -> None:
    """Among thousands of devices two would round to the same four bytes, and count as one."""
    asked = []

    def answer(message: Message) -> Message:
        asked.append(message.content.config_records["fitins.config"]["precision"])
        return error_reply(message, "enough")

    strategy = ModulatedStrategy(precision="float32", min_available_nodes=2)
    with pytest.raises(InsufficientRepliesError):
        strategy.start(FakeGrid(answer), ArrayRecord([np.zeros(columns)]), num_rounds=1)
    assert asked == [precision, precision]


def test_other_precisions_are_refused() -> None:
    with pytest.raises(RequestRefusedError, match="precision must be one of float64, float32"):
        answer("float16")
    with pytest.raises(InvalidParameterError, match="precision must be one of 'float64', 'float32'"):
        ModulatedStrategy(precision="float16")  # type: ignore[arg-type]


# Synthetic tasks


@pytest.fixture
def on_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Every synthetic task goes into a file under `tmp_path`."""
    monkeypatch.setattr(synthetic, "_LARGEST_IN_MEMORY", 0)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def files(place: Path) -> list[Path]:
    return [path for path in place.rglob("*") if path.is_file() and path.name != "lock"]


def test_a_file_holds_what_memory_would(on_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = SyntheticRows(5, 30_000, 4, 0.5)
    mapped = rows.load()
    assert len(files(on_disk)) == 1
    again = rows.load()
    monkeypatch.setattr(synthetic, "_LARGEST_IN_MEMORY", 2**30)
    drawn = rows.load()
    for one, other, third in zip(mapped, again, drawn, strict=True):
        np.testing.assert_array_equal(one, third)
        np.testing.assert_array_equal(other, third)
        with pytest.raises(ValueError, match="read-only"):
            one[0] = 1.0
    rows.discard()
    assert files(on_disk) == []
    assert np.isfinite(mapped[0][-1]).all(), "whoever has mapped it keeps it"
    rows.discard()


def test_synthetic_rows_follow_their_model(rng: np.random.Generator) -> None:
    """R² of least squares on 50,000 rows: SE of a sample's R² = 0.5 is √(0.5/n)·... < 1/√n; 6 of them.

    Label variance: SE √(2/n). Labels of another β, or of noise of variance R² ≠ 1 − R², are caught.
    """
    n = 50_000
    rows = SyntheticRows(int(rng.integers(2**31)), n, 4, 0.3)
    features, labels = rows.load()
    beta, *_ = np.linalg.lstsq(features, labels)
    np.testing.assert_allclose(beta, rows.beta, atol=6 / math.sqrt(n))
    residual = labels - features @ beta
    assert abs(1 - residual.var() / labels.var() - 0.3) < 6 / math.sqrt(n)
    assert abs(labels.var() - 1) < 6 * math.sqrt(2 / n)
    other = replace(rows, part=1)
    np.testing.assert_array_equal(other.beta, rows.beta)
    assert abs(np.corrcoef(features[:, 0], other.load()[0][:, 0])[0, 1]) < 6 / math.sqrt(n)
    assert not np.allclose(replace(rows, seed=rows.seed + 1).beta, rows.beta)


LOAD = """
import tempfile
tempfile.tempdir = {place!r}
from simulations.synthetic import SyntheticRows
features, labels = SyntheticRows(6, 600_000, 4, 0.5).load()
print(features.sum(), labels.sum())
"""


def test_workers_share_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three processes that start at once: one draws, the others wait and map."""
    command = [sys.executable, "-c", LOAD.format(place=str(tmp_path))]
    workers = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = {worker.communicate(timeout=60)[0] for worker in workers}
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    features, labels = SyntheticRows(6, 600_000, 4, 0.5).load()
    assert said == {f"{features.sum()} {labels.sum()}\n"}
    assert len(files(tmp_path)) == 1


def test_a_study_leaves_no_file(on_disk: Path) -> None:
    data._synthetic.cache_clear()
    try:
        (record,) = study.run_study([replace(SMALL, num_clients=3000)], Engine("inprocess", 2))
        assert record["r2_ols"] > 0.4
        assert files(on_disk) == []
    finally:
        data._synthetic.cache_clear()


# Threads and progress in this process


def test_threads_change_nothing_and_replies_keep_their_order(task_identity: None) -> None:
    def received(num_threads: int) -> tuple[list[int], list[bytes], list[tuple[int, int]]]:
        progress: list[tuple[int, int]] = []
        app = study.make_client_app(study.CellTable.of([SMALL]), SMALL.seed)
        grid = InProcessGrid(
            app, 12, num_threads=num_threads, on_reply=lambda done, total: progress.append((done, total))
        )
        name = study.CellTable.of([SMALL]).name(SMALL, SMALL.seed)
        content = Request(1, Modulation(), np.zeros((2, 0)), study=name).to_recorddict()
        replies = list(grid.send_and_receive([Message(content, node, "train") for node in range(12, 0, -1)]))
        assert [reply.error.reason for reply in replies if reply.has_error()] == []
        arrays = [reply.content.array_records["fitres.parameters"] for reply in replies]
        released = [record.to_numpy_ndarrays()[0].tobytes() for record in arrays]
        return [reply.metadata.src_node_id for reply in replies], released, progress

    one, three = received(1), received(3)
    assert one == three
    assert one[0] == list(range(12, 0, -1))
    assert one[2] == [(done, 12) for done in range(1, 13)]


def test_no_collection_while_threads_read_headers(task_identity: None) -> None:
    """Before Python 3.11.8; and it goes on afterwards."""
    enabled = []
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        enabled.append(gc.isenabled())
        return Message(message.content, reply_to=message)

    for threads in (1, 3):
        grid = InProcessGrid(app, 2, num_threads=threads)
        grid.send_and_receive([Message(RecordDict(), node, "train") for node in (1, 2)])
    assert enabled == [True, True] + 2 * [sys.version_info >= (3, 11, 8)]
    assert gc.isenabled()


# Workers that die


class Flaky(Grid):
    """Loses the worker of node 2 a number of times; node 3 fails by itself."""

    def __init__(self, losses: int) -> None:
        self.losses, self.asked = losses, []  # type: ignore[var-annotated]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterator[Message]:
        messages = list(messages)
        self.asked.append(([message.metadata.dst_node_id for message in messages], timeout))
        for message in messages:
            node = message.metadata.dst_node_id
            assert message.metadata.message_id == "", "Flower takes no message twice"
            message.metadata.__dict__["_message_id"] = f"{node}/{len(self.asked)}"
            if node == 2 and len(self.asked) <= self.losses:
                yield Message(Error(0, "The actor is dead"), reply_to=message)
            elif node == 3:
                yield Message(Error(2, "ValueError"), reply_to=message)
            else:
                yield Message(RecordDict(), reply_to=message)

    def get_node_ids(self) -> list[int]:
        return [1, 2, 3]

    set_run = push_messages = pull_messages = create_message = run = None  # type: ignore[assignment]


@pytest.mark.parametrize(("losses", "attempts"), [(0, 1), (2, 3), (9, 4)])
def test_nodes_of_a_lost_worker_are_asked_again(losses: int, attempts: int, task_identity: None) -> None:
    flaky = Flaky(losses)
    grid = PersistentGrid(flaky, pauses=(0.0, 0.0, 0.0))
    messages = [Message(RecordDict(), node, "train") for node in grid.get_node_ids()]
    replies = {reply.metadata.src_node_id: reply for reply in grid.send_and_receive(messages)}
    assert [asked for asked, _ in flaky.asked] == [[1, 2, 3], *[[2]] * (attempts - 1)]
    assert sorted(replies) == [1, 2, 3]
    assert not replies[1].has_error()
    assert replies[2].has_error() == (losses == 9)
    assert replies[3].error.code == 2, "an exception of the app is an answer"


def test_asking_again_stops_at_the_deadline(task_identity: None) -> None:
    flaky = Flaky(9)
    begin = time.monotonic()
    messages = [Message(RecordDict(), 2, "train")]
    (reply,) = PersistentGrid(flaky, pauses=(0.05, 60.0)).send_and_receive(messages, timeout=5.0)
    assert reply.has_error()
    assert len(flaky.asked) == 2
    assert flaky.asked[1][1] < flaky.asked[0][1] <= 5.0
    assert time.monotonic() - begin < 5.0


def run_script(*arguments: str, timeout: float) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path, "FLWR_TELEMETRY_ENABLED": "0"},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def killed(tmp_path: Path, *how: str) -> dict[str, Any]:
    output = tmp_path / "found.json"
    # Whatever happens the run ends: the timeout is a test too.
    done = run_script(ray_kill.__file__, str(output), str(tmp_path / "mark"), *how, timeout=180)
    assert output.exists(), done.stderr[-2000:]
    found: dict[str, Any] = json.loads(output.read_text())
    return found


@pytest.mark.simulation
def test_a_killed_worker_is_replaced(tmp_path: Path) -> None:
    """One kill in mid-round: the same coefficients as undisturbed, in that cell and the next."""
    found = killed(tmp_path)
    assert (tmp_path / "mark").exists()
    undisturbed = [record["beta"] for record in study.run_study(ray_kill.CELLS[:2], Engine("inprocess", 4))]
    np.testing.assert_allclose(found["betas"], undisturbed, rtol=1e-9)


@pytest.mark.simulation
@pytest.mark.nightly
def test_a_worker_that_always_dies_is_accounted_for(tmp_path: Path) -> None:
    found = killed(tmp_path, "always")
    assert found["betas"] == []
    assert found["error"].startswith("InsufficientRepliesError: round 1: 3 valid replies of 4 asked")
    assert "worker process has died" in found["error"]
    assert "modechoice auto ε=1 seed=11" in found["error"]


# Past one machine


@pytest.mark.simulation
def test_an_address_where_no_cluster_is_says_so() -> None:
    """In a process of its own: the error is the end of the run, with nothing left waiting."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    code = "\n".join(
        [
            "import ray_kill",
            "from simulations.hosting import Engine",
            "from simulations.study import run_study",
            f"run_study(ray_kill.CELLS[:1], Engine('ray', 2, address='127.0.0.1:{port}'))",
        ]
    )
    done = run_script("-c", code, timeout=120)
    assert done.returncode == 1
    assert "InvalidParameterError: engine.address must be a running Ray cluster" in done.stderr


class Machine:
    """One Ray node, in a process group of its own."""

    def __init__(self, *arguments: str) -> None:
        ray = str(Path(sys.executable).with_name("ray"))
        self.process = subprocess.Popen(
            [ray, "start", *arguments, "--block", "--num-cpus=1", "--disable-usage-stats"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(timeout=30)


@pytest.fixture
def cluster() -> Iterator[tuple[str, Machine]]:
    """A head and a second node on this machine: the head's address, and the second."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # Ray's sockets need a short path.
    place = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))
    machines = [Machine("--head", f"--port={port}", f"--temp-dir={place}", "--include-dashboard=false")]
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.5)
        machines.append(Machine(f"--address=127.0.0.1:{port}"))
        yield f"127.0.0.1:{port}", machines[1]
    finally:
        for machine in reversed(machines):
            machine.stop()
        shutil.rmtree(place, ignore_errors=True)


@pytest.mark.simulation
@pytest.mark.nightly
def test_a_cluster_is_joined_left_running_and_may_lose_a_machine(
    cluster: tuple[str, Machine], tmp_path: Path
) -> None:
    """Two runs on both machines, coefficients as in this process; then one that loses a machine in mid-round.

    That run ends, with coefficients or with an account: a message that waited for a machine that is gone
    would wait for ever, and the timeout is the test.
    """
    address, second = cluster
    output, places = tmp_path / "found.json", tmp_path / "places"
    places.mkdir()
    script = str(Path(__file__).with_name("ray_cluster.py"))
    done = run_script(script, str(output), address, str(second.process.pid), str(places), timeout=240)
    assert output.exists(), done.stderr[-2000:]
    found = json.loads(output.read_text())
    undisturbed = [record["beta"] for record in study.run_study(ray_kill.CELLS[:2], Engine("inprocess", 4))]
    np.testing.assert_allclose(found["betas"], undisturbed, rtol=1e-9)
    assert found["places"] == 2
    assert "error" not in found or "valid replies of 4 asked" in found["error"]
