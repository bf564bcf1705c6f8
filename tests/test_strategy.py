"""The server's side: whom it asks, what it makes of the replies, and when it gives up.

Most nodes here answer with exact rows (noise 0), so that the coefficients to expect are those of
least squares on the rows that were heard.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from fakes import Answer, FakeGrid, SpyGrid, error_reply, parts, reply_content, rows_content
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.client import Client
from flwr.clientapp import ClientApp

from flwr_modulated import (
    Auto,
    Distance,
    GradientDescent,
    Guarantee,
    InsufficientRepliesError,
    InvalidParameterError,
    ModulatedClient,
    ModulatedStrategy,
    Modulation,
    Policy,
    ProtocolError,
    ReplaceRecord,
    Ridge,
)
from simulations.engines import InProcessGrid

pytestmark = pytest.mark.usefixtures("task_identity")

Data = dict[int, tuple[np.ndarray, np.ndarray]]


@pytest.fixture
def data(rng: np.random.Generator) -> Data:
    """Four nodes with 6 rows of 3 features each."""
    nodes: Data = {}
    for node in (11, 12, 13, 14):
        x = rng.standard_normal((6, 3))
        nodes[node] = (x, x @ [1.0, -2.0, 0.5] + 0.3 * rng.standard_normal(6))
    return nodes


def zeros(d: int = 3) -> ArrayRecord:
    return ArrayRecord([np.zeros(d)])


def config_of(message: Message) -> dict[str, Any]:
    return dict(message.content.config_records["fitins.config"])


def directions_of(message: Message) -> np.ndarray:
    return message.content.array_records["fitins.parameters"].to_numpy_ndarrays()[0]


def exact(data: Data, **changes: Any) -> Answer:
    """Nodes that release (1 − α) x without noise or modulation."""

    def answer(message: Message) -> Message:
        config = config_of(message)
        x, y = data[message.metadata.dst_node_id]
        content = rows_content(
            (1 - config["alpha"]) * x, y, **{"server_round": config["server-round"], **changes}
        )
        return Message(content, reply_to=message)

    return answer


def least_squares(data: Data, nodes: Sequence[int]) -> np.ndarray:
    x = np.concatenate([data[node][0] for node in nodes])
    y = np.concatenate([data[node][1] for node in nodes])
    return np.linalg.lstsq(x, y, rcond=None)[0]


def strategy(**options: Any) -> ModulatedStrategy:
    options.setdefault("rng", np.random.default_rng(5))
    return ModulatedStrategy(options.pop("estimator", None), **options)


# One-shot


def test_one_shot_asks_those_not_heard_from_and_learns_from_all(data: Data) -> None:
    """12 is silent once, 13 fails twice, 14 joins late: every valid reply counts once."""
    answer = exact(data)

    def flaky(message: Message) -> Message | None:
        node, server_round = message.metadata.dst_node_id, config_of(message)["server-round"]
        if node == 12 and server_round == 1:
            return None
        if node == 13 and server_round <= 2:
            return error_reply(message, "no power")
        return answer(message)

    connected = itertools.chain([[11, 12, 13]], itertools.repeat([11, 12, 13, 14]))
    grid = FakeGrid(flaky, lambda: next(connected))
    study = strategy(evaluation_folds=0)
    result = study.start(grid, zeros(), num_rounds=4)

    assert grid.asked == [[11, 12, 13], [12, 13, 14], [13], []]
    heard = [[11], [11, 12, 14], [11, 12, 13, 14], [11, 12, 13, 14]]
    for beta, nodes in zip(study.iterates, heard, strict=True):
        np.testing.assert_allclose(beta, least_squares(data, nodes), rtol=1e-9)
    np.testing.assert_array_equal(result.arrays.to_numpy_ndarrays()[0], study.iterates[-1])
    metrics = [dict(record) for record in result.train_metrics_clientapp.values()]
    assert [m["num-asked"] for m in metrics] == [3, 3, 1, 0]
    assert [m["num-valid"] for m in metrics] == [1, 2, 1, 0]
    assert [m["num-refused"] for m in metrics] == [2, 1, 0, 0]
    assert [m["num-samples"] for m in metrics] == [6, 18, 24, 24]


def test_one_shot_keeps_one_frame_for_the_whole_study(data: Data) -> None:
    """Moments of several rounds add up only if all were modulated along the same directions."""
    answer = exact(data)
    study = strategy(modulation=Modulation(alpha=0.2, num_directions=2))
    grid = FakeGrid(
        lambda message: (
            None if len(grid.sent) == 1 and message.metadata.dst_node_id > 12 else answer(message)
        ),
        list(data),
    )
    study.start(grid, zeros(), num_rounds=3)
    assert grid.asked == [[11, 12, 13, 14], [13, 14], []]
    frames = [directions_of(message) for round_ in grid.sent[::2] for message in round_]
    assert frames[0].shape == (3, 2)
    for frame in frames:
        np.testing.assert_array_equal(frame, frames[0])
    np.testing.assert_allclose(study.iterates[-1], least_squares(data, list(data)), rtol=1e-9)


def test_a_second_run_starts_afresh(data: Data) -> None:
    """The same object, another study with other data and width: nothing is left of the first."""
    study = strategy()
    study.start(FakeGrid(exact(data), list(data)), zeros(), num_rounds=2)
    other = {node: (x[:, :2], y) for node, (x, y) in data.items() if node < 14}
    grid = FakeGrid(exact(other), list(other))
    study.start(grid, zeros(2), num_rounds=1)
    assert grid.asked == [[11, 12, 13]]
    assert len(study.iterates) == 1
    np.testing.assert_allclose(study.iterates[0], least_squares(other, list(other)), rtol=1e-9)


def test_estimator_modulation_and_study_travel_as_they_were_given(data: Data) -> None:
    """A ridge penalty of the paper's kind, by hand: (Σ̂ + γI)β = ẑ."""
    grid = FakeGrid(exact(data), list(data))
    study = strategy(estimator=Ridge(0.5), modulation=Modulation(alpha=0.2), study="north", payload="rows")
    study.start(grid, zeros(), num_rounds=1, train_config=ConfigRecord({"site": "a", "study": "forged"}))
    config = config_of(grid.sent[0][0])
    assert (config["study"], config["alpha"], config["site"], config["server-round"]) == (
        "north",
        0.2,
        "a",
        1,
    )
    x = np.concatenate([rows for rows, _ in data.values()])
    y = np.concatenate([labels for _, labels in data.values()])
    expected = np.linalg.solve(x.T @ x / 24 + 0.5 * np.eye(3), x.T @ y / 24)
    np.testing.assert_allclose(study.iterates[0], expected, rtol=1e-9)


# Iterative


def modulated_moments(data: Data) -> Answer:
    """Nodes whose sums are the expectation of modulated, noisy releases: debiasing must undo both."""
    noise_std = 0.7

    def answer(message: Message) -> Message:
        config, v = config_of(message), directions_of(message)
        x, y = data[message.metadata.dst_node_id]
        n, shrink = len(y), 1 - config["alpha"]
        cosines = config["amplitude"] ** 2 / (2 * config["num-directions"]) * v @ v.T
        gram = shrink**2 * x.T @ x + n * (cosines + noise_std**2 * np.eye(x.shape[1]))
        sums = np.array([n, y.sum(), y @ y, n * noise_std**2])
        content = reply_content(
            [gram, shrink * x.T @ y, shrink * x.sum(axis=0), sums],
            payload="moments",
            server_round=config["server-round"],
        )
        return Message(content, reply_to=message)

    return answer


def moments_of(data: Data) -> tuple[np.ndarray, np.ndarray]:
    x = np.concatenate([rows for rows, _ in data.values()])
    y = np.concatenate([labels for _, labels in data.values()])
    return x.T @ x / len(y), x.T @ y / len(y)


MODULATION = Modulation(alpha=0.2, amplitude=0.9, frequency=0.5, num_directions=2)


def test_iterative_takes_one_gradient_step_a_round(data: Data) -> None:
    """β ← β − (c/λ_max(Σ)) (Σβ − z), by hand, from moments that only right debiasing recovers."""
    grid = FakeGrid(modulated_moments(data), list(data))
    study = strategy(
        estimator=GradientDescent(step=0.8, radius=10.0),
        modulation=MODULATION,
        mode="iterative",
        payload="moments",
    )
    study.start(grid, zeros(), num_rounds=4)
    Sigma, z = moments_of(data)
    beta = np.zeros(3)
    for iterate in study.iterates:
        beta = beta - 0.8 / np.linalg.eigvalsh(Sigma)[-1] * (Sigma @ beta - z)
        np.testing.assert_allclose(iterate, beta, rtol=1e-10)
    np.testing.assert_allclose(study.average_iterate, np.mean(study.iterates, axis=0), rtol=1e-14)
    assert grid.asked == [list(data)] * 4


def test_iterative_draws_fresh_directions_orthogonal_to_the_coefficients(data: Data) -> None:
    grid = FakeGrid(modulated_moments(data), list(data))
    study = strategy(
        estimator=GradientDescent(step=0.8), modulation=MODULATION, mode="iterative", payload="moments"
    )
    study.start(grid, zeros(), num_rounds=4)
    frames = [directions_of(round_[0]) for round_ in grid.sent[::2]]
    for frame in frames:
        np.testing.assert_allclose(frame.T @ frame, np.eye(2), atol=1e-12)
    for before, frame in zip(study.iterates[:-1], frames[1:], strict=True):
        np.testing.assert_allclose(before @ frame, 0, atol=1e-12)
    for one, other in itertools.combinations(frames, 2):
        assert np.abs(one - other).max() > 1e-3
    for round_ in grid.sent[::2]:
        for message in round_:
            np.testing.assert_array_equal(directions_of(message), directions_of(round_[0]))


def test_joint_directions_are_orthogonal_to_what_acts_on_the_joint_record(data: Data) -> None:
    """The residual is (x, y/s)·(β, −s): a direction off it would bring its λ² noise into the gradient."""
    scale = 3.0
    joint = {node: (np.column_stack([x, y / scale]), np.zeros(6)) for node, (x, y) in data.items()}
    grid = FakeGrid(modulated_moments(joint), list(data))
    study = strategy(
        estimator=GradientDescent(step=0.8),
        modulation=MODULATION,
        mode="iterative",
        payload="moments",
        label_scale=scale,
    )
    study.start(grid, zeros(), num_rounds=3)
    Sigma, z = moments_of(data)
    beta = np.zeros(3)
    for iterate in study.iterates:
        beta = beta - 0.8 / np.linalg.eigvalsh(Sigma)[-1] * (Sigma @ beta - z)
        np.testing.assert_allclose(iterate, beta, rtol=1e-9)
    for before, round_ in zip(study.iterates[:-1], grid.sent[2::2], strict=True):
        frame = directions_of(round_[0])
        assert frame.shape == (4, 2)
        np.testing.assert_allclose(np.append(before, -scale) @ frame, 0, atol=1e-12)


@pytest.mark.parametrize("pool", [False, True])
def test_iterative_with_a_one_shot_estimator(data: Data, pool: bool) -> None:
    """Each round other nodes answer: the last round alone decides, or with pool all rounds together."""
    answer = exact(data)
    turns = [[11, 12], [13], [12, 14]]

    def by_turns(message: Message) -> Message | None:
        turn = turns[config_of(message)["server-round"] - 1]
        return answer(message) if message.metadata.dst_node_id in turn else None

    study = strategy(mode="iterative", pool=pool, evaluation_folds=0)
    result = study.start(FakeGrid(by_turns, list(data)), zeros(), num_rounds=3)
    for number, beta in enumerate(study.iterates):
        heard = list(itertools.chain(*turns[: number + 1])) if pool else turns[number]
        np.testing.assert_allclose(beta, least_squares(data, heard), rtol=1e-9)
    samples = [record["num-samples"] for record in result.train_metrics_clientapp.values()]
    assert samples == ([12, 18, 30] if pool else [12, 6, 12])


# Joint records and payloads, with real clients


def clients_app(policy: Policy, data: Data) -> ClientApp:
    def client_fn(context: Context) -> Client:
        node = int(context.node_config["partition-id"])
        load = lambda: data[11 + node]  # noqa: E731
        return ModulatedClient(load, policy, rng=lambda r: np.random.default_rng([node, r])).to_client()

    return ClientApp(client_fn)


@pytest.mark.parametrize("relation", [Distance(0.3), ReplaceRecord(9.0, label_scale=2.0)], ids=str)
def test_rows_and_sums_give_the_same_coefficients(data: Data, relation: Any) -> None:
    """To rounding: the order of summation differs, nothing else."""
    policy = Policy(Guarantee(8.0, 1e-5, relation))
    betas = []
    for payload in ("rows", "moments"):
        study = strategy(
            modulation=MODULATION,
            payload=payload,
            label_scale=getattr(relation, "label_scale", None),
            rng=np.random.default_rng(1),
        )
        study.start(InProcessGrid(clients_app(policy, data), 4), zeros(), num_rounds=1)
        betas.append(study.iterates[0])
    np.testing.assert_allclose(betas[0], betas[1], rtol=1e-9)


def test_joint_records_give_the_regression_of_label_on_features(data: Data) -> None:
    """ε so large that the noise is below 1e-4: the label comes back from inside the record."""
    policy = Policy(Guarantee(1e13, 1e-5, ReplaceRecord(9.0, label_scale=2.5)))
    grid = SpyGrid(InProcessGrid(clients_app(policy, data), 4))
    study = strategy(label_scale=2.5)
    study.start(grid, zeros(), num_rounds=1)
    np.testing.assert_allclose(study.iterates[0], least_squares(data, list(data)), atol=2e-3)
    for reply in grid.received[0]:
        rows, _, std = parts(reply.content, joint=True)
        assert rows.shape == (6, 4)
        assert std < 1e-4


@pytest.mark.parametrize("given", [None, 2.0])
def test_a_study_and_devices_that_differ_on_labels_do_not_mix(data: Data, given: float | None) -> None:
    """Neither reads a label out of a feature, nor takes a label that should have been hidden."""
    relation = ReplaceRecord(9.0, 2.0) if given is None else Distance(1.0)
    grid = InProcessGrid(clients_app(Policy(Guarantee(8.0, 1e-5, relation)), data), 4)
    with pytest.raises(InsufficientRepliesError, match=r"the study releases \d column\(s\), this device has"):
        strategy(label_scale=given).start(grid, zeros(), num_rounds=1)


def test_a_handler_with_an_action_is_reached(data: Data) -> None:
    """`message_type="train.modulated"` beside an app's own training."""
    policy = Policy(Guarantee(8.0, 1e-5, Distance(1.0)))
    app = ClientApp()
    other: list[str] = []

    @app.train()
    def train(message: Message, context: Context) -> Message:
        other.append("called")
        return Message(RecordDict(), reply_to=message)

    @app.train("modulated")
    def modulated(message: Message, context: Context) -> Message:
        node = int(context.node_config["partition-id"])
        client = ModulatedClient(
            lambda: data[11 + node], policy, rng=lambda r: np.random.default_rng([node, r])
        )
        return client.train(message)

    study = strategy(message_type="train.modulated")
    study.start(InProcessGrid(app, 4), zeros(), num_rounds=1)
    twin = strategy()
    twin.start(InProcessGrid(clients_app(policy, data), 4), zeros(), num_rounds=1)
    np.testing.assert_array_equal(study.iterates[0], twin.iterates[0])
    assert other == []


# Order


def test_replies_in_any_order_from_any_ids_give_the_same_bytes(data: Data, rng: np.random.Generator) -> None:
    """Node ids and arrival differ from run to run; coefficients must not, in the last bit."""
    contents = list(data.values())
    betas = set()
    for order in itertools.permutations(range(4)):
        ids = rng.choice(2**62, size=4, replace=False).tolist()
        renamed = {ids[place]: contents[index] for place, index in enumerate(order)}
        grid = FakeGrid(exact(renamed), ids)
        study = strategy()
        study.start(grid, zeros(), num_rounds=1)
        betas.add(study.iterates[0].tobytes())
    assert len(betas) == 1


def test_rounding_does_depend_on_the_order_that_is_given_up(data: Data) -> None:
    """The control of the test above: summing in the order of arrival gives several answers."""
    grams = [x.T @ x for x, _ in data.values()]
    sums = {sum(order[1:], order[0]).tobytes() for order in itertools.permutations(grams)}
    assert len(sums) > 1


# Nodes


def test_waits_until_the_nodes_that_the_study_expects_are_there(data: Data) -> None:
    """A ServerApp starts before its nodes: the first look sees 2 of 4."""
    looks = iter([[11, 12], [11, 12], [11, 12, 13], list(data)])
    seen: list[list[int]] = []

    def node_ids() -> list[int]:
        seen.append(next(looks))
        return seen[-1]

    grid = FakeGrid(exact(data), node_ids)
    study = strategy(min_available_nodes=4, wait_timeout=30.0)
    study.start(grid, zeros(), num_rounds=1)
    assert grid.asked == [list(data)]
    assert len(seen) == 4


def test_gives_up_waiting_and_says_what_is_missing(data: Data) -> None:
    grid = FakeGrid(exact(data), [11, 12])
    with pytest.raises(
        InsufficientRepliesError,
        match=r"2 of min_available_nodes=4 nodes connected within wait_timeout=0\.2 s",
    ):
        strategy(min_available_nodes=4, wait_timeout=0.2).start(grid, zeros(), num_rounds=1)
    assert grid.sent == []


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"fraction_train": 0.5}, 10),
        ({"fraction_train": 0.5, "min_train_nodes": 15}, 15),
        ({"fraction_train": 0.001}, 1),
        ({"fraction_train": 0.001, "min_train_nodes": 99}, 20),
        ({}, 20),
    ],
)
def test_how_many_nodes_are_asked(options: dict[str, Any], expected: int, data: Data) -> None:
    nodes = dict.fromkeys(range(20), data[11])
    grid = FakeGrid(exact(nodes), list(nodes))
    strategy(mode="iterative", evaluation_folds=0, **options).start(grid, zeros(), num_rounds=3)
    for asked in grid.asked:
        assert len(asked) == len(set(asked)) == expected
        assert set(asked) <= set(nodes)
    if expected < 20:
        assert grid.asked[0] != grid.asked[1]
    again = FakeGrid(exact(nodes), list(nodes))
    strategy(mode="iterative", evaluation_folds=0, **options).start(again, zeros(), num_rounds=3)
    assert again.asked == grid.asked


def test_one_shot_in_parts_reaches_every_node_once(data: Data) -> None:
    nodes = dict.fromkeys(range(20), data[11])
    grid = FakeGrid(exact(nodes), list(nodes))
    strategy(fraction_train=0.3, evaluation_folds=0).start(grid, zeros(), num_rounds=5)
    assert [len(asked) for asked in grid.asked] == [6, 6, 6, 2, 0]
    assert sorted(itertools.chain(*grid.asked)) == list(nodes)


# Refusals


def hostile(message: Message) -> dict[str, RecordDict]:
    """Replies that must not count, whatever is in them."""
    round_ = config_of(message)["server-round"]
    x, y = np.full((1, 3), 1e3), np.full(1, 1e3)
    return {
        "wrong round": rows_content(x, y, server_round=round_ + 1),
        "protocol-version must be 2": rows_content(x, y, server_round=round_, protocol_version=3),
        "non-finite values": rows_content(x * np.nan, y, server_round=round_),
        "values too large": rows_content(x * 1e200, y, server_round=round_),
        "wrong shape of rows": rows_content(x[:, :2], y, server_round=round_),
        "negative noise-std": rows_content(x, y, -1.0, server_round=round_),
        "wrong payload": rows_content(x, y, server_round=round_, payload="moments"),
        "records missing": RecordDict(),
    }


@pytest.mark.parametrize("reason", [
    "wrong round", "protocol-version must be 2", "non-finite values", "values too large",
    "wrong shape of rows", "negative noise-std", "wrong payload", "records missing",
])  # fmt: skip
def test_a_refused_reply_changes_nothing_and_is_counted_by_its_reason(
    reason: str, data: Data, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="flwr")
    answer = exact(data)

    def answers(message: Message) -> Message:
        if message.metadata.dst_node_id in (13, 14):
            return Message(hostile(message)[reason], reply_to=message)
        return answer(message)

    study = strategy()
    result = study.start(FakeGrid(answers, list(data)), zeros(), num_rounds=1)
    np.testing.assert_allclose(study.iterates[0], least_squares(data, [11, 12]), rtol=1e-9)
    metrics = result.train_metrics_clientapp[1]
    assert (metrics["num-valid"], metrics["num-refused"]) == (2, 2)
    (logged,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "Without 2 replies" in logged
    assert reason in logged
    assert sum(study.refused.values()) == 2


def test_replies_of_strangers_and_second_replies_are_refused(
    data: Data, caplog: pytest.LogCaptureFixture
) -> None:
    """13 answers for itself, again with other rows, and for 99, who was never asked."""
    caplog.set_level(logging.WARNING, logger="flwr")
    answer = exact(data)
    wild = rows_content(np.full((1, 3), 50.0), np.full(1, -50.0))

    def answers(message: Message) -> list[Message]:
        if message.metadata.dst_node_id != 13:
            return [answer(message)]  # type: ignore[list-item]
        stranger = Message(message.content, dst_node_id=99, message_type="train")
        return [answer(message), Message(wild, reply_to=message), Message(wild, reply_to=stranger)]  # type: ignore[list-item]

    study = strategy()
    result = study.start(FakeGrid(answers, list(data)), zeros(), num_rounds=1)
    np.testing.assert_allclose(study.iterates[0], least_squares(data, list(data)), rtol=1e-9)
    assert result.train_metrics_clientapp[1]["num-refused"] == 2
    assert "second reply of a node" in caplog.text
    assert "from a node that was not asked" in caplog.text


def test_a_late_answer_of_a_node_that_was_heard_is_refused(data: Data) -> None:
    """One-shot: 11 answers round 1, and comes back unasked in round 2 with other rows."""
    answer = exact(data)
    wild = rows_content(np.full((1, 3), 50.0), np.full(1, -50.0), server_round=2)

    def answers(message: Message) -> list[Message]:
        if config_of(message)["server-round"] == 1:
            return [] if message.metadata.dst_node_id == 14 else [answer(message)]  # type: ignore[list-item]
        uninvited = Message(message.content, dst_node_id=11, message_type="train")
        return [Message(wild, reply_to=uninvited), answer(message)]  # type: ignore[list-item]

    study = strategy()
    study.start(FakeGrid(answers, list(data)), zeros(), num_rounds=2)
    np.testing.assert_allclose(study.iterates[1], least_squares(data, list(data)), rtol=1e-9)


def test_too_few_replies_stop_the_study_with_the_reasons_given(data: Data) -> None:
    answer = exact(data)

    def answers(message: Message) -> Message | None:
        node = message.metadata.dst_node_id
        if node == 11:
            return answer(message)  # type: ignore[return-value]
        if node == 12:
            return error_reply(
                message, "Traceback …\n  File …\nflwr_modulated.errors.RequestRefusedError: spent"
            )
        return None if node == 13 else Message(hostile(message)["wrong round"], reply_to=message)

    study = strategy(min_replies=2)
    with pytest.raises(InsufficientRepliesError) as caught:
        study.start(FakeGrid(answers, list(data)), zeros(), num_rounds=1)
    text = str(caught.value)
    assert "round 1: 1 valid replies of 4 asked, min_replies=2" in text
    for reason in (
        "1 × error on the device: spent",
        "1 × no reply before the deadline",
        "1 × wrong round",
    ):
        assert reason in text
    assert study.iterates == []


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        ("", "no reason given"),
        ("  \n ", "no reason given"),
        ("one line", "one line"),
        ("Traceback (most recent call last):\n  File\nValueError: last", "ValueError: last"),
        ("<class 'X'>:<'trace\n\nException ClientAppException occurred. Message: why'>", "why"),
        ("a\nflwr_modulated.errors.RequestRefusedError: budget spent", "budget spent"),
        ("<class 'flwr_modulated.errors.RequestRefusedError'>:<'budget spent'>", "budget spent"),
        ("x" * 5000, "x" * 300),
    ],
    ids=["empty", "blank", "line", "traceback", "simulation", "refusal", "deployment", "long"],
)
def test_the_reason_is_what_the_device_said(reason: str, told: str, data: Data) -> None:
    """Flower wraps it differently in process, on Ray and in a deployment."""
    grid = FakeGrid(lambda message: error_reply(message, reason), list(data))
    with pytest.raises(InsufficientRepliesError) as caught:
        strategy().start(grid, zeros(), num_rounds=1)
    assert str(caught.value).endswith(f"reasons: 4 × error on the device: {told}")


def test_many_reasons_are_cut_short(data: Data) -> None:
    """Each of 500 devices may say something else; the error must stay readable."""
    nodes = dict.fromkeys(range(500), data[11])
    grid = FakeGrid(lambda m: error_reply(m, f"reason {m.metadata.dst_node_id}"), list(nodes))
    with pytest.raises(InsufficientRepliesError) as caught:
        strategy().start(grid, zeros(), num_rounds=1)
    assert len(str(caught.value)) < 1500
    assert "490 × other reasons" in str(caught.value)


def test_no_reply_at_all(data: Data) -> None:
    with pytest.raises(InsufficientRepliesError, match="4 × no reply before the deadline"):
        strategy().start(FakeGrid(lambda message: None, list(data)), zeros(), num_rounds=1)


def test_no_node_at_all() -> None:
    """min_available_nodes=2 is Flower's own default: nobody is asked, and the wait ends."""
    with pytest.raises(InsufficientRepliesError, match="0 of min_available_nodes=2"):
        strategy(wait_timeout=0.0).start(FakeGrid(lambda message: None, []), zeros(), num_rounds=1)


def test_aggregation_needs_its_configuration() -> None:
    with pytest.raises(ProtocolError, match="needs configure_train"):
        strategy().aggregate_train(1, [])


# Options and shapes


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mode": "once"}, "mode must be one of 'one-shot', 'iterative'"),
        ({"payload": "raw"}, "payload must be one of 'rows', 'moments'"),
        ({"pool": True}, "pool must be False in mode='one-shot'"),
        ({"pool": True, "mode": "iterative", "estimator": GradientDescent(0.5)}, "pool must be False with"),
        ({"label_scale": 0.0}, "label_scale"),
        ({"label_scale": -1.0}, "label_scale"),
        ({"estimator": 0.5}, "estimator must be an object with a method estimate"),
        ({"estimator": Auto}, "estimator must be an object .* got Auto$"),
        ({"modulation": 0.2}, "modulation must be a Modulation"),
        ({"fraction_train": 0.0}, "fraction_train"),
        ({"fraction_train": 1.5}, "fraction_train"),
        ({"min_train_nodes": 0}, "min_train_nodes"),
        ({"min_available_nodes": 0}, "min_available_nodes"),
        ({"min_replies": 0}, "min_replies"),
        ({"min_replies": 1.0}, "min_replies must be a whole number"),
        ({"wait_timeout": -1.0}, "wait_timeout"),
        ({"wait_timeout": float("nan")}, "wait_timeout"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidParameterError, match=words):
        strategy(**options)


@pytest.mark.parametrize(
    "arrays",
    [[], [np.zeros(3), np.zeros(3)], [np.zeros((3, 1))], [np.zeros(0)], [np.array([0.0, np.nan])]],
    ids=["none", "two", "matrix", "empty", "nan"],
)
def test_initial_arrays_must_be_one_vector(arrays: list[np.ndarray], data: Data) -> None:
    with pytest.raises(InvalidParameterError, match=r"initial_arrays must hold one finite vector.*np\.zeros"):
        strategy().start(FakeGrid(exact(data), list(data)), ArrayRecord(arrays), num_rounds=1)


@pytest.mark.parametrize(
    ("d", "m", "start", "fails"),
    [(3, 3, 0.0, False), (3, 3, 1.0, True), (3, 2, 1.0, False), (3, 4, 0.0, True), (1, 1, 0.0, False),
     (1, 1, 1.0, True), (1, 0, 1.0, False)],
)  # fmt: skip
def test_directions_must_fit_beside_the_coefficients(
    d: int, m: int, start: float, fails: bool, rng: np.random.Generator
) -> None:
    """m ≤ d − 1 where β ≠ 0, else m ≤ d: otherwise an error that says which number is too large."""
    data = {node: (rng.standard_normal((6, d)), rng.standard_normal(6)) for node in (1, 2)}
    study = strategy(modulation=Modulation(num_directions=m))
    run = lambda: study.start(  # noqa: E731
        FakeGrid(exact(data), list(data)), ArrayRecord([np.full(d, start)]), num_rounds=1
    )
    if fails:
        with pytest.raises(InvalidParameterError, match="num_directions must be at most"):
            run()
    else:
        run()
        np.testing.assert_allclose(study.iterates[0], least_squares(data, [1, 2]), rtol=1e-9)


def test_one_feature_leaves_no_room_for_a_direction_after_the_first_step(rng: np.random.Generator) -> None:
    data = {node: (rng.standard_normal((6, 1)), rng.standard_normal(6)) for node in (1, 2)}
    study = strategy(
        estimator=GradientDescent(0.5), modulation=Modulation(num_directions=1), mode="iterative"
    )
    with pytest.raises(
        InvalidParameterError, match=r"at most 0 for num_features=1 orthogonal to the non-zero"
    ):
        study.start(FakeGrid(exact(data), list(data)), zeros(1), num_rounds=2)
    assert len(study.iterates) == 1


@pytest.mark.parametrize("folds", [0, 5])
@pytest.mark.parametrize("num_rows", [1, 2])
def test_fewer_rows_than_features_give_the_shortest_fit(
    num_rows: int, folds: int, rng: np.random.Generator
) -> None:
    """K < d, without noise: Auto's documented minimum-norm solution, and no failure on the way."""
    data = {node: (rng.standard_normal((1, 4)), rng.standard_normal(1)) for node in range(num_rows)}
    study = strategy(min_available_nodes=1, evaluation_folds=folds)
    study.start(FakeGrid(exact(data), list(data)), zeros(4), num_rounds=1)
    np.testing.assert_allclose(study.iterates[0], least_squares(data, list(data)), rtol=1e-6)


def test_labels_that_are_all_equal_do_not_stop_the_study(rng: np.random.Generator) -> None:
    """R² is undefined then; the coefficients are not."""
    data = {node: (rng.standard_normal((6, 2)), np.ones(6)) for node in (1, 2)}
    study = strategy()
    study.start(FakeGrid(exact(data), [1, 2]), zeros(2), num_rounds=1)
    np.testing.assert_allclose(study.iterates[0], least_squares(data, [1, 2]), rtol=1e-9)


# What comes back to the user


def test_nobody_is_asked_to_evaluate(data: Data) -> None:
    """A device's raw loss would leak its row."""
    grid = FakeGrid(exact(data), list(data))
    strategy().start(grid, zeros(), num_rounds=2)
    assert grid.sent[1::2] == [[], []]
    for round_ in grid.sent:
        for message in round_:
            assert message.metadata.message_type == "train"


def test_metrics_and_result(data: Data) -> None:
    """Noise scale σ/(1 − α) and bytes, by hand: 4 × 6 × (3 + 1) doubles."""

    def noisy(message: Message) -> Message:
        x, y = data[message.metadata.dst_node_id]
        return Message(rows_content(x, y, 0.4), reply_to=message)

    study = strategy(modulation=Modulation(alpha=0.2))
    result = study.start(FakeGrid(noisy, list(data)), zeros(), num_rounds=1)
    metrics = dict(result.train_metrics_clientapp[1])
    assert metrics.pop("noise-scale") == pytest.approx(0.5, rel=1e-12)
    assert metrics == {
        "num-asked": 4,
        "num-valid": 4,
        "num-refused": 0,
        "num-samples": 24,
        "bytes-received": 4 * 24 * 8,
    }
    assert study.debiased is not None
    assert study.debiased.num_samples == 24


def test_server_evaluation_sees_the_coefficients(data: Data) -> None:
    """Flower's own `evaluate_fn` works on what the strategy returns."""
    seen: list[np.ndarray] = []

    def evaluate(server_round: int, arrays: ArrayRecord) -> None:
        seen.append(arrays.to_numpy_ndarrays()[0])

    study = strategy()
    study.start(FakeGrid(exact(data), list(data)), zeros(), num_rounds=1, evaluate_fn=evaluate)
    assert not seen[0].any()
    np.testing.assert_array_equal(seen[1], study.iterates[0])


def test_the_summary_says_what_will_happen(data: Data, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="flwr")
    strategy(estimator=Ridge(0.5), modulation=Modulation(alpha=0.2)).summary()
    assert "one-shot" in caplog.text
    assert "Ridge(penalty=0.5)" in caplog.text
    assert "alpha=0.2" in caplog.text


def test_no_private_value_is_logged(data: Data, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever Flower and the strategy log of a study, no label or released number is in it."""
    caplog.set_level(logging.DEBUG)
    value = 31337.271828
    held = {node: (np.full((2, 3), value) + np.eye(3)[:2], np.full(2, value)) for node in (1, 2)}
    strategy(evaluation_folds=0).start(FakeGrid(exact(held), [1, 2]), zeros(), num_rounds=2)
    assert "configure_train: Asking 2 nodes" in caplog.text
    assert "31337" not in caplog.text
