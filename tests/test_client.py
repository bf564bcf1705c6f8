"""The device's side, reached through Flower as a deployment reaches it."""

from __future__ import annotations

import logging
import struct
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import call, over_the_wire, parts, varint, wire_bytes
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.client import Client
from flwr.clientapp import ClientApp

from flwr_modulated import (
    Columns,
    Distance,
    Guarantee,
    InvalidDataError,
    InvalidParameterError,
    Ledger,
    ModulatedClient,
    Modulation,
    Policy,
    ProtocolError,
    ReplaceRecord,
    RequestRefusedError,
)
from flwr_modulated.flower.records import Request, parse_reply
from simulations.engines import InProcessGrid

pytestmark = pytest.mark.usefixtures("task_identity")

POLICY = Policy(Guarantee(2.0, 1e-5, Distance(1.0)))
MODULATION = Modulation(alpha=0.25, amplitude=0.5, frequency=1.5, num_directions=1)
FEATURES = np.array([[0.5, -1.0, 2.0], [1.25, 0.0, -0.75]])
LABELS = np.array([3.0, -1.5])
# Numbers and a word that must never leave the device.
SENTINEL, WORD = 31337.271828, "alice"


def stream(server_round: int) -> np.random.Generator:
    return np.random.default_rng([17, server_round])


def load() -> tuple[np.ndarray, np.ndarray]:
    return FEATURES, LABELS


def request(server_round: int = 1, num_columns: int = 3, **changes: Any) -> Request:
    return Request(server_round, MODULATION, np.eye(num_columns)[:, :1], **changes)


def numpy_client_app(make: Callable[[], ModulatedClient]) -> ClientApp:
    def client_fn(context: Context) -> Client:
        return make().to_client()

    return ClientApp(client_fn)


def message_app(make: Callable[[], ModulatedClient]) -> ClientApp:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return make().train(message)

    return app


STYLES = {"client_fn": numpy_client_app, "app.train": message_app}
both_styles = pytest.mark.parametrize("style", STYLES.values(), ids=STYLES)
Style = Callable[[Callable[[], ModulatedClient]], ClientApp]


def answer(app: ClientApp, content: RecordDict) -> tuple[np.ndarray, np.ndarray, float]:
    """Released rows, labels and σ."""
    return parts(call(app, content).content)


# What is released


@both_styles
def test_a_reply_is_the_release_of_the_policys_own_mechanism(style: Style) -> None:
    """Same stream, same bytes, in both styles of app; the labels and σ beside it."""
    app = style(lambda: ModulatedClient(load, POLICY, rng=stream))
    content = over_the_wire(call(app, over_the_wire(request(3).to_recorddict())).content)
    reply = parse_reply(content, request=request(3))
    mechanism = POLICY.mechanism(MODULATION)
    expected = mechanism.release(FEATURES, np.eye(3)[:, :1], rng=stream(3))
    np.testing.assert_array_equal(reply.released, expected)
    np.testing.assert_array_equal(reply.labels, LABELS)
    assert reply.noise_std == mechanism.noise_std


@both_styles
def test_noise_is_fresh_in_every_round_and_repeats_with_the_stream_only(style: Style) -> None:
    app = style(lambda: ModulatedClient(load, POLICY, rng=stream))
    first, again, second = (answer(app, request(r).to_recorddict())[0] for r in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert (first != second).all()


@both_styles
def test_what_a_server_says_about_noise_is_ignored(style: Style) -> None:
    forged = {
        "noise-std": 0.0,
        "noise_std": 0.0,
        "sigma": 0.0,
        "epsilon": 1e9,
        "delta": 0.5,
        "sensitivity": "none",
        "num-releases": 1,
        "radius": 1e-9,
        "seed": 0,
    }
    app = style(lambda: ModulatedClient(load, POLICY, rng=stream))
    honest = answer(app, request().to_recorddict())
    answered = answer(app, request().to_recorddict(forged))
    for mine, theirs in zip(honest, answered, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert honest[2] == POLICY.mechanism(MODULATION).noise_std > 1.0


def test_the_policys_number_of_releases_sets_the_noise() -> None:
    """√T: a device that allows ten releases adds √10 times the noise to each."""
    ten = Policy(Guarantee(2.0, 1e-5, Distance(1.0)), num_releases=10)
    std = [
        answer(
            numpy_client_app(lambda policy=policy: ModulatedClient(load, policy, rng=stream)),
            request().to_recorddict(),
        )[2]
        for policy in (POLICY, ten)
    ]
    assert std[1] == pytest.approx(np.sqrt(10) * std[0], rel=1e-8)


@both_styles
def test_sums_in_place_of_rows(style: Style) -> None:
    """The same release, summed: no row is in the message."""
    app = style(lambda: ModulatedClient(load, POLICY, rng=stream))
    rows = answer(app, request().to_recorddict())
    reply = call(app, request(payload="moments").to_recorddict())
    sums = reply.content.array_records["fitres.parameters"].to_numpy_ndarrays()
    np.testing.assert_allclose(sums[0], rows[0].T @ rows[0], rtol=1e-14)
    np.testing.assert_allclose(sums[1], LABELS @ rows[0], rtol=1e-13)
    np.testing.assert_allclose(sums[2], rows[0].sum(axis=0), rtol=1e-13)
    np.testing.assert_allclose(sums[3], [2, 1.5, 11.25, 2 * rows[2] ** 2], rtol=1e-13)
    assert len(sums) == 4
    data = wire_bytes(call(app, request(payload="moments").to_recorddict()))
    assert rows[0][0].tobytes() not in data


@both_styles
def test_neither_rows_nor_seed_are_in_the_message(style: Style) -> None:
    seed = 918273645
    features = np.full((2, 3), SENTINEL)
    app = style(
        lambda: ModulatedClient(
            lambda: (features, LABELS), POLICY, rng=lambda r: np.random.default_rng([seed, r])
        )
    )
    data = wire_bytes(call(app, request().to_recorddict()))
    assert LABELS[0].tobytes() in data, "the search works: labels are public under distance"
    assert features[0, 0].tobytes() not in data
    for encoded in (str(seed).encode(), struct.pack("<i", seed), struct.pack(">i", seed), varint(seed)):
        assert encoded not in data


@pytest.mark.parametrize("payload", ["rows", "moments"])
@both_styles
def test_hidden_labels_leave_only_inside_the_released_record(style: Style, payload: str) -> None:
    labels = np.array([SENTINEL, -SENTINEL])
    policy = Policy(Guarantee(2.0, 1e-5, ReplaceRecord(2.0, label_scale=SENTINEL)))
    app = style(lambda: ModulatedClient(lambda: (FEATURES, labels), policy, rng=stream))
    joint = request(num_columns=4, payload=payload)
    reply = call(app, joint.to_recorddict())
    arrays = reply.content.array_records["fitres.parameters"].to_numpy_ndarrays()
    if payload == "rows":
        expected = policy.mechanism(MODULATION).release(
            np.column_stack([FEATURES, [1.0, -1.0]]), np.eye(4)[:, :1], rng=stream(1)
        )
        np.testing.assert_array_equal(arrays[0], expected)
        assert len(arrays) == 1
    else:
        assert not arrays[1].any()
        assert not arrays[3][1:3].any()
    for number in (SENTINEL, -SENTINEL, SENTINEL**2, 2 * SENTINEL**2):
        assert struct.pack("<d", number) not in wire_bytes(reply)
    parse_reply(reply.content, request=joint, joint=True)


def test_one_row_and_lists_will_do() -> None:
    """What a device's own reader gives need not be an array of floats."""
    app = numpy_client_app(lambda: ModulatedClient(lambda: ([[1, 2, 3]], [1]), POLICY, rng=stream))
    rows, labels, std = answer(app, request().to_recorddict())
    assert (rows.shape, labels.tolist()) == ((1, 3), [1.0])
    assert type(std) is float


# What is refused


class CountedLoad:
    """Counts how often the device's data was read."""

    def __init__(self, result: Any = (FEATURES, LABELS)) -> None:
        self.calls = 0
        self.result = result

    def __call__(self) -> Any:
        self.calls += 1
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result


@both_styles
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c.config_records["fitins.config"].update({"protocol-version": 3}), "protocol-version"),
        (lambda c: c.config_records["fitins.config"].update({"alpha": 1.0}), "alpha"),
        (
            lambda c: c.array_records.update({"fitins.parameters": ArrayRecord([2 * np.eye(3)[:, :1]])}),
            "orthonormal",
        ),
        (lambda c: c.array_records.update({"fitins.parameters": ArrayRecord([])}), "carry 1 array"),
    ],
    ids=["version", "alpha", "long direction", "no directions"],
)
def test_a_bad_request_is_refused_before_the_data_is_read(
    style: Style, change: Callable[[RecordDict], None], words: str
) -> None:
    counted = CountedLoad()
    content = request().to_recorddict()
    change(content)
    with pytest.raises(RequestRefusedError, match=words):
        call(style(lambda: ModulatedClient(counted, POLICY, rng=stream)), content)
    assert counted.calls == 0


@both_styles
def test_the_data_is_read_once_for_an_answer(style: Style) -> None:
    counted = CountedLoad()
    app = style(lambda: ModulatedClient(counted, POLICY, rng=stream))
    assert counted.calls == 0
    call(app, request().to_recorddict())
    assert counted.calls == 1


@both_styles
@pytest.mark.parametrize(
    ("data", "words"),
    [
        ((FEATURES[:, :2], LABELS), r"the study releases 3 column\(s\), this device has 2"),
        ((FEATURES, LABELS[:1]), "labels must have shape"),
        ((FEATURES[:0], LABELS[:0]), "features must have at least 1 row"),
        ((FEATURES[0], LABELS), "features must have shape"),
        ((FEATURES * np.nan, LABELS), "features must be finite"),
        ((FEATURES, LABELS * np.inf), "labels must be finite"),
    ],
    ids=["width", "labels", "no rows", "one dimension", "nan", "inf"],
)
def test_data_that_cannot_be_used_is_refused_with_the_reason(style: Style, data: Any, words: str) -> None:
    with pytest.raises(RequestRefusedError, match=words):
        call(style(lambda: ModulatedClient(CountedLoad(data), POLICY, rng=stream)), request().to_recorddict())


def test_a_joint_study_and_a_device_with_public_labels_do_not_mix() -> None:
    with pytest.raises(RequestRefusedError, match=r"the study releases 4 column\(s\), this device has 3"):
        call(
            numpy_client_app(lambda: ModulatedClient(load, POLICY, rng=stream)),
            request(num_columns=4).to_recorddict(),
        )


def chained() -> Exception:
    """An error with a story: a cause and a context, each with a value."""
    error = OSError(f"{WORD}.csv: {SENTINEL}")
    error.__cause__ = KeyError(SENTINEL)
    error.__context__ = ValueError(WORD)
    error.add_note(f"{WORD} {SENTINEL}")
    return error


FAULTS: dict[str, Any] = {
    "error": ValueError(f"could not read {SENTINEL} of {WORD}"),
    "error with causes": chained(),
    "lookup": KeyError(SENTINEL),
    "not a pair": SENTINEL,
    "three parts": (np.full((2, 3), SENTINEL), LABELS, WORD),
    "text": ([[WORD, "2", "3"], ["1", "2", f"{SENTINEL}x"]], LABELS),
    "ragged": ([[SENTINEL, 2.0], [SENTINEL]], LABELS),
    "not finite": (np.array([[SENTINEL, np.nan, 1.0]]), [SENTINEL]),
    "width": (np.full((2, 2), SENTINEL), LABELS),
    "too large": (np.full((2, 3), 1e308) + SENTINEL, LABELS),
    "objects": (np.array([[WORD, None, 1.0]], dtype=object), [SENTINEL]),
    "labels": (FEATURES, [WORD, f"{SENTINEL}x"]),
}


@both_styles
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_no_error_holds_data(
    style: Style,
    fault: Any,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Neither text, notes, causes, traceback, logs nor output: Flower sends the text, logs the rest."""
    caplog.set_level(logging.DEBUG)
    app = style(lambda: ModulatedClient(CountedLoad(fault), POLICY, rng=stream))
    if fault is FAULTS["too large"]:
        # Released as it is: (1 − α)·1e308 is finite. The server refuses it (test_records).
        assert "31337" not in wire_bytes(call(app, request().to_recorddict())).decode("latin1")
        return
    with pytest.raises(RequestRefusedError) as caught:
        call(app, request().to_recorddict())
    told = "".join(traceback.format_exception(caught.value))
    written = capfd.readouterr()
    everything = told + caplog.text + written.out + written.err + repr(caught.value)
    assert "31337" not in everything
    assert WORD not in everything
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None


@both_styles
def test_a_fault_of_the_stream_is_not_told_either(style: Style) -> None:
    def broken(server_round: int) -> np.random.Generator:
        raise RuntimeError(f"seed {SENTINEL}")

    with pytest.raises(RequestRefusedError, match=r"could not answer \(RuntimeError\)") as caught:
        call(style(lambda: ModulatedClient(load, POLICY, rng=broken)), request().to_recorddict())
    assert "31337" not in "".join(traceback.format_exception(caught.value))


@both_styles
def test_the_error_reply_holds_no_data_and_tells_the_kind(style: Style) -> None:
    """As the server gets it, from a node of a Grid: text and whole traceback."""
    app = style(lambda: ModulatedClient(CountedLoad(FAULTS["error"]), POLICY, rng=stream))
    (reply,) = InProcessGrid(app, 1).send_and_receive([Message(request().to_recorddict(), 1, "train")])
    assert reply.has_error()
    assert "the device could not answer (ValueError); its owner can call load()" in reply.error.reason
    data = wire_bytes(reply)
    assert b"31337" not in data
    assert WORD.encode() not in data


def test_records_of_another_layout_are_refused_with_what_is_needed() -> None:
    app = message_app(lambda: ModulatedClient(load, POLICY, rng=stream))
    for content in (
        RecordDict({"arrays": ArrayRecord([np.zeros(3)]), "config": ConfigRecord({})}),
        RecordDict({"fitins.config": ConfigRecord({})}),
    ):
        with pytest.raises(RequestRefusedError, match=r"fitins\.parameters and fitins\.config"):
            call(app, content)


def test_the_text_of_a_refusal_survives_direct_use() -> None:
    """`fit` is what Flower calls; it is public, so it keeps the same promise."""
    client = ModulatedClient(load, POLICY, rng=stream)
    with pytest.raises(RequestRefusedError, match="protocol-version"):
        client.fit([np.eye(3)[:, :1]], {})
    for kind in (ProtocolError, InvalidDataError):
        assert not issubclass(RequestRefusedError, kind)


# What is not offered


@pytest.mark.parametrize(
    ("message_type", "prefix", "code"),
    [
        ("evaluate", "evaluate", 4),
        ("get_parameters", "getparameters", 2),
        ("get_properties", "getproperties", 1),
    ],
)
def test_flower_answers_that_it_is_not_implemented(message_type: str, prefix: str, code: int) -> None:
    """A raw loss would leak the row. Flower's codes: 1, 2 and 4; the data is not even read."""
    counted = CountedLoad()
    content = RecordDict(
        {
            f"{prefix}ins.parameters": ArrayRecord([np.zeros(3)]),
            f"{prefix}ins.config": ConfigRecord({}),
        }
    )
    reply = call(
        numpy_client_app(lambda: ModulatedClient(counted, POLICY, rng=stream)), content, message_type
    ).content
    assert reply.config_records[f"{prefix}res.status"]["code"] == code
    assert counted.calls == 0
    if prefix == "evaluate":
        assert reply.metric_records["evaluateres.loss"]["loss"] == 0.0
        assert not reply.config_records["evaluateres.metrics"]


def test_a_device_needs_a_ledger_or_says_that_it_simulates() -> None:
    with pytest.raises(InvalidParameterError, match="ledger must be given on a device"):
        ModulatedClient(load, POLICY)


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (
            Policy(
                Guarantee(2.0, 1e-5, Distance(1.0)),
                columns=Columns(centre=(0.0,), scale=(1e-300,)),
            ),
            "standardised features must be finite",
        ),
        (Policy(Guarantee(2.0, 1e-5, ReplaceRecord(2.0, label_scale=1e-300))), "features must be finite"),
    ],
    ids=["standardised", "joined"],
)
def test_what_overflows_is_refused_before_it_is_paid_for(policy: Policy, words: str, tmp_path: Path) -> None:
    """The values are finite; what would be released of them is not."""
    ledger = Ledger(tmp_path / "ledger.db")
    client = ModulatedClient(lambda: ([[1e10]], [1e10]), policy, ledger=ledger)
    columns = 1 + policy.guarantee.relation.hides_labels
    content = Request(1, Modulation(), np.zeros((columns, 0))).to_recorddict()
    with pytest.raises(RequestRefusedError, match=words):
        client.fit([np.zeros((columns, 0))], dict(content.config_records["fitins.config"]))
    assert not (tmp_path / "ledger.db").exists()
