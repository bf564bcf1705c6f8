"""Values that must never be seen: in no message, metric, log, output, exception, ledger or checkpoint.

A device with a ledger and the operating system's noise holds a row, and a private label, whose numbers are
known to the test; so are the bytes its phases are made of. Everything that a run leaves behind is searched
for them, in binary and in digits, whatever goes right or wrong.
"""

from __future__ import annotations

import logging
import math
import os
import sqlite3
import struct
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import FakeGrid, call, error_reply, varint, wire_bytes
from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

import flwr_modulated
from flwr_modulated import (
    Columns,
    Guarantee,
    InsufficientRepliesError,
    Ledger,
    ModulatedClient,
    ModulatedStrategy,
    Modulation,
    Policy,
    Replace,
    ReplaceRecord,
    RequestRefusedError,
    noise,
)
from flwr_modulated.flower.records import Request
from flwr_modulated.mechanism import Mechanism

pytestmark = pytest.mark.usefixtures("task_identity")

PACKAGE = str(Path(flwr_modulated.__file__).parent)
MODULATION = Modulation(alpha=0.25, amplitude=0.5, frequency=1.5, num_directions=2)
COLUMNS = Columns(centre=(40.0, 7.0, 120.0), scale=(12.0, 1.5, 15.0), label_centre=50.0, label_scale=9.0)
FEATURES = np.array([[47.31337271, 6.27182845, 131.41592653]])
LABELS = np.array([58.57721566])
RECORD_SCALE = 1.37
DELTA = 1e-5
POLICIES = {
    "labels public": Policy(Guarantee(4.0, DELTA, Replace(3.0)), 2, columns=COLUMNS),
    "labels private": Policy(Guarantee(4.0, DELTA, ReplaceRecord(3.0, RECORD_SCALE)), 2, columns=COLUMNS),
}
WORD = "alice"


class Watch:
    """What a run leaves behind, and what must not be in it."""

    def __init__(self, hides_labels: bool) -> None:
        rows, labels = COLUMNS.standardise(FEATURES, LABELS)
        features = [*FEATURES.ravel(), *rows.ravel(), *(MODULATION.contraction * rows.ravel())]
        told = [*LABELS, *labels]
        inside = [*(labels / RECORD_SCALE), *(MODULATION.contraction * labels / RECORD_SCALE)]
        self.in_text = [*features, *told, *inside]
        self.in_bytes = [*features, *inside, *(told if hides_labels else [])]
        self.entropy: list[bytes] = []
        self.texts: list[str] = []
        self.data: list[bytes] = []

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Keep the bytes that phases are drawn from."""
        right = noise.secrets.token_bytes

        def token_bytes(count: int | None = None) -> bytes:
            self.entropy.append(right(count))
            return self.entropy[-1]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(noise.secrets, "token_bytes", token_bytes)
            yield

    def catch(self, error: BaseException) -> None:
        """Text, notes, causes and traceback; and the locals of the package's own frames."""
        self.texts.append("".join(traceback.format_exception(error)) + repr(error))
        seen = traceback.TracebackException.from_exception(error, capture_locals=True)
        while seen is not None:
            for frame in seen.stack:
                if frame.filename.startswith(PACKAGE):
                    self.texts.append(str(frame.locals))
            seen = seen.__cause__ or seen.__context__

    def reply(self, message: Message) -> None:
        self.data.append(wire_bytes(message))
        if message.has_error():
            self.texts.append(message.error.reason)
        else:
            self.texts.append(repr({k: dict(v) for k, v in message.content.config_records.items()}))
            self.texts.append(repr({k: dict(v) for k, v in message.content.metric_records.items()}))

    def files(self, folder: Path) -> None:
        self.data += [path.read_bytes() for path in folder.rglob("*") if path.is_file()]

    def found(self) -> list[str]:
        """What was seen that should not have been."""
        text, data = "\n".join(self.texts), b"\n".join(self.data)
        words = [np.frombuffer(part, dtype=np.uint64) for part in self.entropy]
        turns = [math.ldexp(int(word) >> 11, -53) for part in words for word in part]
        phases = [*turns, *(2 * math.pi * turn for turn in turns)]
        found = [f"{value} in text" for value in [*self.in_text, *phases] if _digits(value) in text]
        found += [
            f"{value} in bytes"
            for value in [*self.in_bytes, *phases]
            if any(struct.pack(kind, value) in data for kind in ("<d", ">d", "<f", ">f"))
            or _digits(value).encode() in data
        ]
        found += ["entropy in bytes" for part in self.entropy for word in _chunks(part) if word in data]
        found += [f"{WORD} was told"] * (WORD in text or WORD.encode() in data)
        return found


def _digits(value: float) -> str:
    """Seven significant digits, as any format that shows so many would print them."""
    return f"{abs(value):.8f}"[: 8 if abs(value) >= 1 else 9]


def _chunks(part: bytes) -> Iterator[bytes]:
    for start in range(0, len(part), 8):
        yield part[start : start + 8]
        yield part[start : start + 8][::-1]


def load() -> Any:
    return FEATURES, LABELS


class Devices:
    """Three devices, of which the first is watched; the others hold other rows and no ledger."""

    def __init__(
        self, folder: Path, policy: Policy, watch: Watch, style: str, loader: Callable[[], Any] = load
    ) -> None:
        self.folder, self.watch, self.policy = folder, watch, policy
        self.ledger = folder / "device" / "ledger.db"
        self.ledger.parent.mkdir()
        self.loader = loader

        def client(context: Context) -> ModulatedClient:
            number = int(context.node_config["partition-id"])
            if number == 0:
                return ModulatedClient(lambda: self.loader(), policy, ledger=Ledger(self.ledger))
            data = FEATURES + 3.0 * number, LABELS - number
            return ModulatedClient(lambda: data, policy, rng=lambda r: np.random.default_rng([number, r]))

        if style == "client_fn":
            self.app = ClientApp(lambda context: client(context).to_client())
        else:
            self.app = ClientApp()
            self.app.train()(lambda message, context: client(context).train(message))

    def answer(self, message: Message) -> Message:
        """As a SuperNode: an exception becomes an error reply with its whole traceback."""
        node = message.metadata.dst_node_id
        config = {"partition-id": node, "num-partitions": 3}
        context = Context(1, node, config, RecordDict(), {})
        try:
            reply = self.app(message, context)
        except Exception as error:
            if node == 0:
                self.watch.catch(error)
            reply = error_reply(message, traceback.format_exc())
        if node == 0:
            self.watch.reply(reply)
        return reply

    def study(self, name: str = "sentinel", **options: Any) -> ModulatedStrategy:
        """A run of the whole study; everything the server has of it is kept."""
        relation = self.policy.guarantee.relation
        scale = relation.label_scale if isinstance(relation, ReplaceRecord) else None
        strategy = ModulatedStrategy(
            modulation=MODULATION,
            label_scale=scale,
            study=name,
            checkpoint=self.folder / f"{name}.npz",
            **options,
        )
        try:
            result = strategy.start(
                FakeGrid(self.answer, [0, 1, 2]), ArrayRecord([np.zeros(3)]), num_rounds=1
            )
            self.watch.texts += [repr(result), repr(strategy.iterates), str(strategy.results().summary())]
        except InsufficientRepliesError as error:
            self.watch.texts.append(str(error))
        self.watch.texts.append(repr(strategy.refused))
        return strategy


@pytest.fixture(params=POLICIES.values(), ids=POLICIES)
def policy(request: pytest.FixtureRequest) -> Policy:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(params=["client_fn", "app.train"])
def style(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def watch(
    policy: Policy, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> Iterator[Watch]:
    """Everything from DEBUG on is listened to; at the end of the test nothing must have been seen."""
    watch = Watch(policy.guarantee.relation.hides_labels)
    caplog.set_level(logging.DEBUG)
    for name in ("flwr", "flwr_modulated"):
        caplog.set_level(logging.DEBUG, logger=name)
    with watch.listening():
        yield watch
    written = capfd.readouterr()
    watch.texts += [caplog.text, written.out, written.err]
    watch.texts += [repr(record.__dict__) for record in caplog.records]
    watch.files(tmp_path)
    assert watch.found() == []


# What goes right


def test_a_study_a_repeat_and_a_refusal(policy: Policy, style: str, watch: Watch, tmp_path: Path) -> None:
    """Two releases, one of them repeated from the ledger; then the budget is used up."""
    devices = Devices(tmp_path, policy, watch, style)
    for name in ("first", "second"):
        assert devices.study(name).num_nodes == 3
    (tmp_path / "first.npz").unlink()
    assert devices.study("first").num_nodes == 3
    third = devices.study("third")
    assert third.num_nodes == 2
    assert "privacy budget" in str(third.refused)
    assert len(watch.entropy) == 2, "phases of two releases"
    watch.texts.append(str(Ledger(devices.ledger).summary()))


def test_sums(policy: Policy, style: str, watch: Watch, tmp_path: Path) -> None:
    assert Devices(tmp_path, policy, watch, style).study(payload="moments").num_nodes == 3


# What goes wrong


def chained() -> Exception:
    error = OSError(f"{WORD}.csv, line 2: {FEATURES[0, 0]}")
    error.__cause__ = KeyError(FEATURES[0, 1])
    error.__context__ = ValueError(f"{LABELS[0]}")
    error.add_note(f"{WORD} {LABELS[0]}")
    return error


FAULTS: dict[str, Any] = {
    "an error": ValueError(f"could not read {FEATURES[0, 0]} of {WORD}"),
    "an error with causes": chained(),
    "not a pair": FEATURES[0, 0],
    "text": ([[WORD, "2", "3"]], LABELS),
    "a text as label": (FEATURES, [f"{LABELS[0]}x"]),
    "ragged": ([[FEATURES[0, 0], 2.0], [1.0]], LABELS),
    "not finite": (FEATURES * [[1, np.nan, 1]], LABELS),
    "an infinite label": (FEATURES, LABELS * np.inf),
    "too large": (FEATURES * 1e305, LABELS),
    "a column less": (FEATURES[:, :2], LABELS),
    "two labels": (FEATURES, np.repeat(LABELS, 2)),
    "objects": (np.array([[WORD, None, FEATURES[0, 0]]], dtype=object), LABELS),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_data_that_cannot_be_read(
    fault: Any, policy: Policy, style: str, watch: Watch, tmp_path: Path
) -> None:
    def loader() -> Any:
        if isinstance(fault, BaseException):
            raise fault
        return fault

    strategy = Devices(tmp_path, policy, watch, style, loader).study()
    if fault is FAULTS["too large"] and strategy.num_nodes == 3:
        return  # clipped and released
    assert strategy.num_nodes == 2
    assert strategy.refused.total() == 1


@pytest.mark.parametrize(
    "change",
    [
        {"modulation": Modulation(0.95, 0.5, 1.5, 2)},
        {"modulation": Modulation(0.25, 50.0, 1.5, 2)},
        {"num_columns": 9},
        {"study": "s" * 300},
    ],
    ids=["alpha", "amplitude", "columns", "name"],
)
def test_refused_requests(
    change: dict[str, Any], policy: Policy, style: str, watch: Watch, tmp_path: Path
) -> None:
    devices = Devices(tmp_path, policy, watch, style)
    options = {"modulation": MODULATION, "num_columns": 3 + policy.guarantee.relation.hides_labels} | change
    directions = np.eye(options.pop("num_columns"))[:, :2]
    request = Request(1, directions=directions, **options)
    assert devices.answer(Message(request.to_recorddict(), 0, "train")).has_error()
    assert not devices.ledger.exists() or "study" in change


def _garbage(path: Path) -> None:
    path.write_bytes(os.urandom(4096))


def _open_to_all(path: Path) -> None:
    path.touch(mode=0o644)


def _another_policy(path: Path) -> None:
    policy = Policy(Guarantee(4.0, DELTA, Replace(5.0)))
    client = ModulatedClient(lambda: ([[0.1, 0.2]], [0.3]), policy, ledger=Ledger(path))
    client.fit(
        [np.zeros((2, 0))], Request(1, Modulation(), np.zeros((2, 0))).to_recorddict()["fitins.config"]
    )


def _damaged_release(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.execute("UPDATE spend SET payload = ?", (b"PK\x03\x04" + bytes(50),))
    db.close()


@pytest.mark.parametrize("spoil", [_garbage, _open_to_all, _another_policy, None, _damaged_release])
def test_ledger_errors(
    spoil: Callable[[Path], None] | None, policy: Policy, style: str, watch: Watch, tmp_path: Path
) -> None:
    devices = Devices(tmp_path, policy, watch, style)
    if spoil is None:
        devices.ledger.parent.rmdir()  # no folder for it
    elif spoil is _damaged_release:
        devices.study("first")
        (tmp_path / "first.npz").unlink()
        spoil(devices.ledger)
    else:
        spoil(devices.ledger)
    strategy = devices.study("first")
    assert strategy.num_nodes == 2
    assert "ledger" in str(strategy.refused)


def test_a_stop_in_the_middle_of_a_release(
    policy: Policy, style: str, watch: Watch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The noise source fails with the mapped row in its hands, after the spend."""

    def broken(self: Any, values: np.ndarray, noise_std: float) -> np.ndarray:
        raise RuntimeError(f"{WORD}: {values.tolist()} {FEATURES.tolist()}")

    devices = Devices(tmp_path, policy, watch, style)
    with monkeypatch.context() as patch:
        patch.setattr(noise.DeviceNoise, "add_gaussian", broken)
        assert devices.study("first").num_nodes == 2
    (tmp_path / "first.npz").unlink()
    assert devices.study("first").num_nodes == 3


def test_the_seed_of_a_simulation(policy: Policy, watch: Watch) -> None:
    """Whoever knows it can subtract the noise: it is in no reply and no error."""
    seed = 918273645

    def make(loader: Callable[[], Any]) -> ClientApp:
        client = ModulatedClient(loader, policy, rng=lambda r: np.random.default_rng([seed, r]))
        return ClientApp(lambda context: client.to_client())

    columns = 3 + policy.guarantee.relation.hides_labels
    request = Request(1, MODULATION, np.eye(columns)[:, :2]).to_recorddict()
    reply = call(make(load), request)
    watch.reply(reply)

    def failing() -> Any:
        raise ValueError(seed)

    with pytest.raises(RequestRefusedError) as caught:
        call(make(failing), request)
    watch.catch(caught.value)
    for encoded in (str(seed).encode(), struct.pack("<i", seed), struct.pack(">i", seed), varint(seed)):
        assert encoded not in wire_bytes(reply)
    assert str(seed) not in "".join(watch.texts)


# The search's own controls


def leak_rows(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(noise.DeviceNoise, "add_gaussian", lambda self, values, std: values.copy())
    patch.setattr(Mechanism, "release_blocks", lambda self, rows, directions, rng: iter([np.asarray(rows)]))


def leak_to_the_log(patch: pytest.MonkeyPatch) -> None:
    right = ModulatedClient._standardised

    def logged(self: ModulatedClient) -> Any:
        result = right(self)
        logging.getLogger("flwr").debug("standardised: %s", result[0].tolist())
        return result

    patch.setattr(ModulatedClient, "_standardised", logged)


def leak_the_cause(patch: pytest.MonkeyPatch) -> None:
    def answer(self: ModulatedClient, arrays: Any, config: Any) -> Any:
        try:
            return self._release(Request.parse(arrays, config))
        except Exception:
            raise RequestRefusedError("no answer")  # noqa: B904 (the context is the leak)

    patch.setattr(ModulatedClient, "_answer", answer)


def leak_phases(patch: pytest.MonkeyPatch) -> None:
    right = noise.DeviceNoise.random

    def told(self: Any, size: tuple[int, ...]) -> np.ndarray:
        turns = right(self, size)
        logging.getLogger("flwr_modulated").debug("phases %r", (2 * np.pi * turns).tolist())
        return turns

    patch.setattr(noise.DeviceNoise, "random", told)


@pytest.mark.parametrize("leak", [leak_rows, leak_to_the_log, leak_the_cause, leak_phases])
def test_a_leak_is_found(
    leak: Callable[[pytest.MonkeyPatch], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    for name in ("flwr", "flwr_modulated"):
        caplog.set_level(logging.DEBUG, logger=name)
    leak(monkeypatch)
    watch = Watch(True)

    def failing() -> Any:
        raise ValueError(f"{FEATURES[0, 0]}")

    loader = failing if leak is leak_the_cause else load
    devices = Devices(tmp_path, POLICIES["labels private"], watch, "client_fn", loader)
    with watch.listening():
        devices.study()
    watch.texts.append(caplog.text)
    assert watch.found()
