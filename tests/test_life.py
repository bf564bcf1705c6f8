"""Life goes wrong: devices that come late, vanish, answer twice, restart, raise; servers that die.

Devices are the reference app's, with files and ledgers on disk; only the network is a stand-in. Since a
repeated request gets the same bytes from a ledger, "the uninterrupted run" is a run of another server on the
same ledgers: it must give the same coefficients, bit by bit, and no ledger may hold a second release.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from devices import Fleet, server_context
from fakes import FakeGrid, error_reply, rows_content
from flwr.app import ArrayRecord, Message
from flwr.serverapp import Grid

from flwr_modulated import (
    Distance,
    Guarantee,
    InsufficientRepliesError,
    InvalidParameterError,
    Ledger,
    ModulatedClient,
    ModulatedStrategy,
    Modulation,
    Policy,
)
from flwr_modulated.flower import outputs, server_app

pytestmark = pytest.mark.usefixtures("task_identity")


class PowerCut(BaseException):
    """The server is gone: nothing that it would do on an exception happens either."""


@pytest.fixture(autouse=True)
def _no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outputs, "find_spec", lambda name: None)


@pytest.fixture
def fleet(tmp_path: Path, rng: np.random.Generator) -> Fleet:
    return Fleet(tmp_path, rng)


def study(**options: Any) -> ModulatedStrategy:
    options = {"study": "sleep", "min_available_nodes": 1, "wait_timeout": 0.2} | options
    return ModulatedStrategy(**options)


def start(strategy: ModulatedStrategy, grid: Grid, num_rounds: int = 1) -> np.ndarray:
    strategy.start(grid, ArrayRecord([np.zeros(2)]), num_rounds=num_rounds, timeout=1.0)
    return strategy.iterates[-1]


def uninterrupted(fleet: Fleet) -> np.ndarray:
    """Coefficients of a server to which nothing happened, from the same devices."""
    return start(study(), fleet.grid(fleet.run_config()))


def assert_each_released_once(fleet: Fleet) -> None:
    assert {device: len(kept) for device, kept in fleet.releases().items()} == dict.fromkeys(
        fleet.node_configs, 1
    )


def wrapped(grid: FakeGrid, around: Callable[[Message, Callable[[], Message]], Any]) -> FakeGrid:
    """A grid whose network does something to each message."""
    inner = grid._answer
    return FakeGrid(lambda message: around(message, lambda: inner(message)), grid.get_node_ids)  # type: ignore[arg-type, return-value]


def round_of(message: Message) -> int:
    return int(message.content.config_records["fitins.config"]["server-round"])


def test_late_vanishing_doubled_and_raising_devices_count_once_each(fleet: Fleet) -> None:
    """100 and 101 answer; 102's reply is lost; 103 answers twice; 104 raises at first; 105 comes late."""
    config = fleet.run_config()
    looks = iter([[100, 101, 102, 103, 104]])
    grid = fleet.grid(config, connected=lambda: next(looks, list(range(100, 106))))

    def trouble(message: Message, ask: Callable[[], Message]) -> Message | Iterable[Message] | None:
        node, first = message.metadata.dst_node_id, round_of(message) == 1
        if node == 102 and first:
            ask()
            return None
        if node == 104 and first:
            return error_reply(message, "out of memory")
        return [ask(), ask()] if node == 103 else ask()

    strategy = study()
    beta = start(strategy, wrapped(grid, trouble), num_rounds=3)
    assert strategy.num_nodes == 6
    assert strategy.refused == {
        "no reply before the deadline": 1,
        "second reply of a node": 1,
        "error on the device: out of memory": 1,
    }
    assert_each_released_once(fleet)
    np.testing.assert_array_equal(beta, uninterrupted(fleet))


def test_a_device_that_comes_back_under_another_id_counts_once(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    """A SuperNode without a key of its own gets a new id with each start; its ledger does not forget."""
    caplog.set_level(logging.INFO, logger="flwr")
    config = fleet.run_config()
    devices = {100 + device: device for device in range(6)} | {200: 0, 201: 1}
    looks = iter([list(range(100, 106)), [*range(102, 106), 200, 201]])
    grid = FakeGrid(
        lambda message: fleet.call(devices[message.metadata.dst_node_id], message, config),
        lambda: next(looks),
    )
    strategy = study()
    beta = start(strategy, grid, num_rounds=2)
    assert grid.asked == [list(range(100, 106)), [200, 201]]
    assert strategy.num_nodes == 6
    assert strategy.sample().num_units == 6
    assert "2 releases are here already" in caplog.text
    assert_each_released_once(fleet)
    np.testing.assert_array_equal(beta, uninterrupted(fleet))


def test_equal_rows_of_different_devices_both_count_where_there_is_no_noise() -> None:
    """The control of the test above: without noise, equal replies may come from two devices."""
    for noise_std, expected in ((0.0, 2), (0.5, 1)):
        content = lambda: rows_content(np.ones((1, 2)), np.ones(1), noise_std)  # noqa: E731, B023
        grid = FakeGrid(lambda message: Message(content(), reply_to=message), [1, 2])  # noqa: B023
        strategy = study(evaluation_folds=0)
        start(strategy, grid)
        assert strategy.num_nodes == expected


def test_a_server_that_dies_after_half_the_devices_answered(fleet: Fleet) -> None:
    """Nothing was saved yet: all are asked again, and the three that had released repeat it at no cost."""
    config = fleet.run_config()
    answered: list[int] = []

    def cut(message: Message, ask: Callable[[], Message]) -> Message:
        if len(answered) == 3:
            raise PowerCut
        answered.append(message.metadata.dst_node_id)
        return ask()

    with pytest.raises(PowerCut):
        server_app.app(wrapped(fleet.grid(config), cut), server_context(config))
    before = fleet.releases()
    assert [len(kept) for kept in before.values()] == [1, 1, 1, 0, 0, 0]

    # The SuperLink was restarted too, so that every node has another id.
    ids = {device: 900 - device for device in range(6)}
    server_app.app(fleet.grid(config, ids), server_context(config, run_id=8))
    assert_each_released_once(fleet)
    for device in range(3):
        np.testing.assert_array_equal(before[device][0].released, fleet.releases()[device][0].released)
    np.testing.assert_array_equal(record_of(config)["iterate_standardised"], uninterrupted(fleet))


def test_a_server_that_dies_between_rounds_asks_nobody_again(fleet: Fleet) -> None:
    """Round 1 heard three and was saved; the restarted server asks the other three only."""
    config = fleet.run_config(num_server_rounds=2, min_available_nodes=3)
    looks: list[list[int]] = [[100, 101, 102]]
    grid = fleet.grid(config, connected=lambda: looks[-1])

    def cut(message: Message, ask: Callable[[], Message]) -> Message:
        if round_of(message) == 2:
            raise PowerCut
        looks.append(list(range(100, 106)))
        return ask()

    with pytest.raises(PowerCut):
        server_app.app(wrapped(grid, cut), server_context(config))
    fleet.calls.clear()
    server_app.app(fleet.grid(config), server_context(config, run_id=8))
    assert sorted(fleet.calls) == [3, 4, 5]
    assert_each_released_once(fleet)
    np.testing.assert_array_equal(record_of(config)["iterate_standardised"], uninterrupted(fleet))


def test_a_finished_study_started_again_asks_nobody(fleet: Fleet) -> None:
    """Nobody need be connected either."""
    config = fleet.run_config()
    server_app.app(fleet.grid(config), server_context(config))
    first = record_of(config)
    fleet.calls.clear()
    server_app.app(fleet.grid(config, connected=list), server_context(config, run_id=8))
    assert fleet.calls == []
    assert record_of(config)["iterate_standardised"] == first["iterate_standardised"]


def test_a_study_that_failed_for_too_few_asks_only_the_others_when_it_is_run_again(fleet: Fleet) -> None:
    config = fleet.run_config(min_replies=6)

    def deaf(message: Message, ask: Callable[[], Message]) -> Message | None:
        return None if message.metadata.dst_node_id == 105 else ask()

    with pytest.raises(InsufficientRepliesError, match="5 valid replies of 6 asked"):
        server_app.app(wrapped(fleet.grid(config), deaf), server_context(config))
    fleet.calls.clear()
    server_app.app(fleet.grid(config), server_context(config, run_id=8))
    assert fleet.calls == [5]
    np.testing.assert_array_equal(record_of(config)["iterate_standardised"], uninterrupted(fleet))


def test_an_iterative_server_that_dies_goes_on_with_the_next_round(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    fleet = Fleet(tmp_path, rng, num_devices=3, rows=4, epsilon=1e4, num_releases=3)
    config = fleet.run_config(estimator="iterative", num_server_rounds=3)

    def cut(message: Message, ask: Callable[[], Message]) -> Message:
        if round_of(message) == 3 and message.metadata.dst_node_id == 102:
            raise PowerCut
        return ask()

    with pytest.raises(PowerCut):
        server_app.app(wrapped(fleet.grid(config), cut), server_context(config))
    fleet.calls.clear()
    server_app.app(fleet.grid(config), server_context(config, run_id=8))
    assert sorted(fleet.calls) == [0, 1, 2]
    assert [len(kept) for kept in fleet.releases().values()] == [3, 3, 3]
    beta = record_of(config)["iterate_standardised"]
    for saved in tmp_path.joinpath("out").glob("*.npz"):
        saved.unlink()
    server_app.app(fleet.grid(config), server_context(config, run_id=9))
    assert [len(kept) for kept in fleet.releases().values()] == [3, 3, 3]
    assert record_of(config)["iterate_standardised"] == beta


def test_another_study_does_not_get_a_second_release(fleet: Fleet) -> None:
    config = fleet.run_config()
    server_app.app(fleet.grid(config), server_context(config))
    other = fleet.run_config(study="other")
    with pytest.raises(
        InsufficientRepliesError, match="6 × error on the device: this device's privacy budget"
    ):
        server_app.app(fleet.grid(other), server_context(other))
    assert_each_released_once(fleet)


# How the strategy bears with it


def test_too_few_at_first_is_forgiven_until_the_last_round(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody answers in round 1, two in round 2, the others in round 3."""
    config = fleet.run_config(num_server_rounds=3, min_replies=6)

    def slow(message: Message, ask: Callable[[], Message]) -> Message | None:
        node, server_round = message.metadata.dst_node_id, round_of(message)
        return ask() if server_round == 3 or (server_round == 2 and node < 102) else None

    server_app.app(wrapped(fleet.grid(config), slow), server_context(config))
    assert record_of(config)["num_nodes"] == 6
    assert "Too few so far: round 1: 0 valid replies" in caplog.text
    assert "Too few so far: round 2: 2 valid replies" in caplog.text


def test_too_few_in_the_last_round_is_not(fleet: Fleet) -> None:
    config = fleet.run_config(num_server_rounds=2, min_replies=6)

    def deaf(message: Message, ask: Callable[[], Message]) -> Message | None:
        return None if message.metadata.dst_node_id == 105 else ask()

    with pytest.raises(InsufficientRepliesError, match="round 2: 5 valid replies of 1 asked, min_replies=6"):
        server_app.app(wrapped(fleet.grid(config), deaf), server_context(config))


def test_no_grace_in_iterative_mode() -> None:
    with pytest.raises(InvalidParameterError, match="grace_rounds must be 0 in mode='iterative'"):
        ModulatedStrategy(mode="iterative", grace_rounds=1)


def test_later_rounds_wait_for_those_not_heard_from(fleet: Fleet) -> None:
    """103 connects 0.3 s after the others; a wait of 5 s ends when it is there, not later."""
    begin = time.monotonic()
    everybody = [100, 101, 102, 103]
    connected = lambda: everybody if time.monotonic() > begin + 0.3 else everybody[:3]  # noqa: E731
    grid = fleet.grid(fleet.run_config(), connected=connected)
    strategy = study(min_available_nodes=3, late_timeout=5.0)
    start(strategy, grid, num_rounds=2)
    assert grid.asked == [[100, 101, 102], [103]]
    assert time.monotonic() - begin < 4.0
    start(strategy := study(late_timeout=0.0), grid, num_rounds=2)
    assert grid.asked[-2:] == [everybody, []]


def test_a_lost_node_does_not_stop_later_rounds(tmp_path: Path, rng: np.random.Generator) -> None:
    """Round 1 needs all three; 102 is gone in round 2, which min_replies=2 allows."""
    fleet = Fleet(tmp_path, rng, num_devices=3, rows=4, num_releases=2)
    config = fleet.run_config(estimator="iterative", num_server_rounds=2, min_available_nodes=3)
    looks = iter([[100, 101, 102]])
    grid = fleet.grid(config, connected=lambda: next(looks, [100, 101]))
    server_app.app(grid, server_context(config))
    assert [len(kept) for kept in fleet.releases().values()] == [2, 2, 1]


def record_of(config: dict[str, Any]) -> dict[str, Any]:
    import json

    lines = (Path(config["output"]) / "records.jsonl").read_text(encoding="utf-8").splitlines()
    return json.loads(lines[-1])  # type: ignore[no-any-return]


@pytest.mark.parametrize("pool", [False, True])
def test_an_iterative_study_that_stopped_for_too_few_asks_for_the_same_releases(
    pool: bool, tmp_path: Path, rng: np.random.Generator
) -> None:
    """Modulated, and the budget is for three releases: another frame in round 2 would be one too many.

    A release that counted twice would be in the sums of the pooled study.
    """
    policy = Policy(Guarantee(8.0, 1e-5, Distance(1.0)), num_releases=3)
    clients = {}
    for node in range(4):
        data = rng.standard_normal((1, 2)), rng.standard_normal(1)
        ledger = Ledger(tmp_path / f"{node}.db")
        clients[node] = ModulatedClient(lambda data=data: data, policy, ledger=ledger)
    away: set[tuple[int, int]] = {(3, 2)}

    def answer(message: Message) -> Message | None:
        node = message.metadata.dst_node_id
        round_ = message.content.config_records["fitins.config"]["server-round"]
        return None if (node, round_) in away else clients[node].train(message)

    def run(**options: Any) -> ModulatedStrategy:
        strategy = study(
            mode="iterative",
            pool=pool,
            modulation=Modulation(0.2, 0.2, 0.5, 1),
            min_replies=4,
            evaluation_folds=0,
            **options,
        )
        start(strategy, FakeGrid(answer, list(clients)), num_rounds=3)
        return strategy

    with pytest.raises(InsufficientRepliesError, match="round 2: 3 valid replies of 4"):
        run(checkpoint=tmp_path / "study.npz")
    away.clear()
    resumed, undisturbed = run(checkpoint=tmp_path / "study.npz"), run()
    assert resumed.debiased is not None
    assert resumed.debiased.num_samples == (12 if pool else 4)
    np.testing.assert_array_equal(resumed.iterates, undisturbed.iterates)
