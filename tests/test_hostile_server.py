"""A server that asks for everything it should not get, and an auditor who reads what left the device.

The device is the real one: client, policy, ledger on disk, OpenDP's noise, reached through both styles of
ClientApp, with every message read back from its bytes. The auditor shares no code with it: it takes the
arrays from the reply's bytes, Δ from what was asked, and δ(ε) from the normal distribution function.
"""

from __future__ import annotations

import io
import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import error_reply, over_the_wire, wire_bytes
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict, UserConfig
from flwr.clientapp import ClientApp
from scipy.stats import chi2, norm

from flwr_modulated import (
    Distance,
    Guarantee,
    Ledger,
    ModulatedClient,
    Policy,
    Replace,
    ReplaceRecord,
    modulation,
    policy,
)
from simulations import device_cost

pytestmark = pytest.mark.usefixtures("task_identity")

D = 40
NUM_RELEASES = 3
REPLACE = Policy(Guarantee(2.0, 1e-5, Replace(3.0)), num_releases=NUM_RELEASES)
# About 150 devices are audited, each with noise of the operating system.
FALSE_ALARM = 1e-8


# The auditor


@dataclass
class Auditor:
    """Reads every reply of one device; knows the device's row, but nothing that the device computed."""

    policy: Policy
    row: np.ndarray  # (n, d): what the relation protects, joint records under ReplaceRecord
    labels: np.ndarray
    releases: dict[bytes, tuple[float, float, int]] = field(default_factory=dict)  # μ², residual, freedom
    refusals: list[str] = field(default_factory=list)
    silent: int = 0  # replies that say "not implemented"

    @property
    def hides_labels(self) -> bool:
        return isinstance(self.policy.guarantee.relation, ReplaceRecord)

    def read(self, asked: RecordDict, reply: Message) -> None:
        data = wire_bytes(reply)
        secrets = [*self.row.ravel().tolist(), *(self.labels.tolist() if self.hides_labels else [])]
        for value in secrets:
            assert struct.pack("<d", value) not in data, "a private value is in the message"
        if reply.has_error():
            text = reply.error.reason
            assert not any(repr(value)[:7] in text for value in [*secrets, *self.labels.tolist()])
            self.refusals.append(text)
            return
        content = reply.content
        if "fitres.parameters" not in content:
            (status,) = (record for name, record in content.config_records.items() if "status" in name)
            assert status["code"] != 0
            assert all(array.data == b"" for r in content.array_records.values() for array in r.values())
            assert all(value == 0 for r in content.metric_records.values() for value in r.values())
            assert all("status" in name or not r for name, r in content.config_records.items())
            self.silent += 1
            return
        self._read_release(asked, content)

    def _read_release(self, asked: RecordDict, content: RecordDict) -> None:
        assert set(content) == {
            "fitres.parameters", "fitres.num_examples", "fitres.metrics", "fitres.status"
        }  # fmt: skip
        config = asked.config_records["fitins.config"]
        metrics = dict(content.config_records["fitres.metrics"])
        noise_std = metrics.pop("noise-std") if config["payload"] == "rows" else None
        assert metrics == {
            "protocol-version": 2,
            "server-round": config["server-round"],
            "payload": config["payload"],
        }
        assert dict(content.config_records["fitres.status"]) == {"code": 0, "message": "Success"}
        n = len(self.row)
        assert dict(content.metric_records["fitres.num_examples"]) == {"num_examples": n}
        arrays = [_load(array) for array in content.array_records["fitres.parameters"].values()]
        if config["payload"] == "moments":
            gram, cross, total, scalars = arrays
            assert scalars[0] == n
            match = [key for key in self.releases if _sums(np.frombuffer(key).reshape(n, -1), gram, total)]
            assert match, "sums of rows that were never released as such; the attacks ask for rows first"
            label_sums = [self.labels.sum(), self.labels @ self.labels]
            np.testing.assert_allclose(scalars[1:3], [0, 0] if self.hides_labels else label_sums)
            assert not (self.hides_labels and cross.any())
            return
        (rows,) = arrays
        released, beside = rows[:, : self.row.shape[1]], rows[:, self.row.shape[1] :].T
        np.testing.assert_array_equal(beside, np.zeros((0, n)) if self.hides_labels else [self.labels])
        assert released.shape == self.row.shape
        alpha, lam, omega = config["alpha"], config["amplitude"], config["frequency"]
        V = _load(next(iter(asked.array_records["fitins.parameters"].values())))
        m = V.shape[1]
        guarantee = self.policy.guarantee
        relation, rows = guarantee.relation, guarantee.rows_per_client
        # Eq. (2), with the frame's own norm in place of 1: a longer one would cost more.
        steepness = abs(1 - alpha)
        if m and lam and self.policy.sensitivity == "conditional":
            steepness += lam * omega / math.sqrt(m) * np.linalg.norm(V, 2) ** 2
        clipped, apart = self.row, relation.radius
        if not isinstance(relation, Distance):
            apart = 2 * relation.radius
            lengths = np.linalg.norm(self.row, axis=1, keepdims=True)
            clipped = self.row * np.minimum(1.0, relation.radius / lengths)
        cost = rows * (steepness * apart / noise_std) ** 2
        # Off the directions a release is (1 − α)x + ξ.
        noise = (released - (1 - alpha) * clipped) / noise_std
        if m:
            noise = noise - noise @ V @ V.T
        self.releases[released.tobytes()] = (cost, float(np.sum(noise**2)), n * (V.shape[0] - m))

    @property
    def spent(self) -> float:
        """μ² of everything that left: (Δ/σ)² add up over releases."""
        return math.fsum(cost for cost, _, _ in self.releases.values())

    def delta(self) -> float:
        """Balle and Wang (2018), Theorem 8, at the promised ε."""
        if not self.releases:
            return 0.0
        epsilon, mu = self.policy.guarantee.epsilon, math.sqrt(self.spent)
        tail = math.exp(epsilon + norm.logcdf(-mu / 2 - epsilon / mu))
        return float(norm.cdf(mu / 2 - epsilon / mu) - tail)

    def verdict(self) -> None:
        """Fail if what left breaks the promise.

        Statistic: Σ‖ξ/σ‖² over all releases, χ² with 39 or more degrees of freedom each; two-sided at
        1e-8 a device, 2e-6 for all devices of this file. Half the noise, a quarter of the variance, is seen
        with probability 0.99999 in three releases; σ stated too small or spent too often always, by δ.
        """
        guarantee = self.policy.guarantee
        # Frames may be longer by 1e-9; OpenDP's noise allows for it, the stated σ does not.
        assert self.delta() <= guarantee.delta * (1 + 1e-6), "what left is not within the guarantee"
        freedom = sum(d for _, _, d in self.releases.values())
        if freedom:
            total = sum(r for _, r, _ in self.releases.values())
            assert chi2.sf(total, freedom) > FALSE_ALARM / 2, "more noise than stated"
            assert chi2.cdf(total, freedom) > FALSE_ALARM / 2, "less noise than stated"


def _load(array: FlowerArray) -> np.ndarray:
    return np.asarray(np.load(io.BytesIO(array.data), allow_pickle=False))


def _sums(released: np.ndarray, gram: np.ndarray, total: np.ndarray) -> bool:
    return np.allclose(released.T @ released, gram, rtol=1e-12) and np.allclose(
        released.sum(axis=0), total, rtol=1e-12
    )


# The device


class Device:
    """One device behind a ClientApp, and an auditor beside its wire."""

    def __init__(
        self,
        folder: Path,
        style: str,
        policy: Policy = REPLACE,
        *,
        rows: int = 1,
        rng: Callable[[int], np.random.Generator] | None = None,
    ) -> None:
        # Longer than the radius, so that a device that forgot to clip would be seen.
        generator = np.random.default_rng([23, rows])
        features = 1.7 * generator.standard_normal((rows, D))
        labels = 1.3 + generator.standard_normal(rows)
        relation = policy.guarantee.relation
        joint = isinstance(relation, ReplaceRecord)
        self.columns = D + joint
        row = np.column_stack([features, labels / relation.label_scale]) if joint else features
        self.auditor = Auditor(policy, row, labels)
        self.ledger = Ledger(folder / "ledger.db")
        self.state = RecordDict()

        def client() -> ModulatedClient:
            keep = {"ledger": self.ledger} if rng is None else {"rng": rng}
            return ModulatedClient(lambda: (features, labels), policy, **keep)

        if style == "client_fn":
            self.app = ClientApp(lambda context: client().to_client())
        else:
            self.app = ClientApp()
            self.app.train()(lambda message, context: client().train(message))

    def ask(self, content: RecordDict, message_type: str = "train") -> Message:
        """Send a message, as a SuperNode would; exceptions become error replies with their text."""
        content = over_the_wire(content)
        message = Message(content, 1, message_type)
        context = Context(1, 1, {}, self.state, UserConfig())
        try:
            reply = self.app(message, context)
        except Exception as error:
            reply = error_reply(message, f"{type(error).__name__}: {error}")
        reply = over_the_wire(reply)
        self.auditor.read(content, reply)
        assert not self.state, "a device keeps nothing where its operator might copy it from"
        return reply


@pytest.fixture(params=["client_fn", "app.train"])
def style(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def device(tmp_path: Path, style: str) -> Device:
    return Device(tmp_path, style)


# What the server sends


def ask_for(columns: int = D, directions: Any = None, **changes: Any) -> RecordDict:
    """A request written down by hand: honest unless changed. None takes an entry out."""
    frame = np.eye(columns)[:, :1] if directions is None else directions
    arrays = frame if isinstance(frame, ArrayRecord) else ArrayRecord([np.asarray(frame)])
    config = {
        "protocol-version": 2,
        "server-round": 1,
        "study": "study",
        "payload": "rows",
        "release-index": 0,
        "num-columns": columns,
        "alpha": 0.2,
        "amplitude": 0.5,
        "frequency": 1.5,
        "num-directions": 1,
    }
    config.update({key.replace("_", "-"): value for key, value in changes.items()})
    kept = {key: value for key, value in config.items() if value is not None}
    return RecordDict({"fitins.parameters": arrays, "fitins.config": ConfigRecord(kept)})


def raw(data: bytes, stype: str = "numpy.ndarray") -> ArrayRecord:
    """An array that is only bytes."""
    return ArrayRecord({"0": FlowerArray("float64", (1,), stype, data)})


def header(shape: str, descr: str = "'<f8'") -> bytes:
    """The head of a NumPy file that promises an array of this shape."""
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode()


E1 = np.eye(D)[:, :1]
ROTATION, _ = np.linalg.qr(np.random.default_rng(3).standard_normal((D, D)))

REFUSED: dict[str, Callable[[int], RecordDict]] = {
    "V a thousand times too long": lambda d: ask_for(d, 1000.0 * np.eye(d)[:, :1]),
    "V a millionth too long": lambda d: ask_for(d, (1 + 1e-6) * np.eye(d)[:, :1]),
    "V with a repeated column": lambda d: ask_for(d, np.eye(d)[:, [0, 0]], num_directions=2),
    "V with nearly the same column": lambda d: ask_for(
        d, np.column_stack([np.eye(d)[0], np.eye(d)[0] + 1e-3 * np.eye(d)[1]]), num_directions=2
    ),
    "V not a number": lambda d: ask_for(d, np.full((d, 1), np.nan)),
    "V infinite": lambda d: ask_for(d, np.full((d, 1), np.inf)),
    "V zero": lambda d: ask_for(d, np.zeros((d, 1))),
    "V with more columns than said": lambda d: ask_for(d, np.eye(d)[:, :2]),
    "V with fewer columns than said": lambda d: ask_for(d, num_directions=2),
    "V with more directions than features": lambda d: ask_for(d, np.eye(d + 1)[:d], num_directions=d + 1),
    "V of text": lambda d: ask_for(d, np.full((d, 1), "1")),
    "V complex": lambda d: ask_for(d, 1j * np.eye(d)[:, :1]),
    "V of other bytes": lambda d: ask_for(d, raw(b"\x00\xff" * 40)),
    "V pickled": lambda d: ask_for(d, raw(header(f"({d}, 1)", "'|O'") + b"\x80\x04N.")),
    "V that promises terabytes": lambda d: ask_for(d, raw(header(f"({d}, 10000000000)"))),
    "no V": lambda d: ask_for(d, ArrayRecord([])),
    "two V": lambda d: ask_for(d, ArrayRecord([np.eye(d)[:, :1]] * 2)),
    "α = −5": lambda d: ask_for(d, alpha=-5.0),
    "α = 1": lambda d: ask_for(d, alpha=1.0),
    "α = 6": lambda d: ask_for(d, alpha=6.0),
    "α beyond the limit": lambda d: ask_for(d, alpha=0.999999),
    "α not a number": lambda d: ask_for(d, alpha=math.nan),
    "α as text": lambda d: ask_for(d, alpha="0"),
    "α as truth": lambda d: ask_for(d, alpha=False),
    "λ = 1e9": lambda d: ask_for(d, amplitude=1e9),
    "λ < 0": lambda d: ask_for(d, amplitude=-0.5),
    "λ = 1e9, ω = 0": lambda d: ask_for(d, amplitude=1e9, frequency=0.0),
    "ω = 1e9": lambda d: ask_for(d, frequency=1e9),
    "ω < 0": lambda d: ask_for(d, frequency=-1.5),
    "ω infinite": lambda d: ask_for(d, frequency=math.inf),
    "too many directions": lambda d: ask_for(d, ROTATION[:d, :33], num_directions=33),
    "m < 0": lambda d: ask_for(d, num_directions=-1),
    "m as truth": lambda d: ask_for(d, num_directions=True),
    "m as a float": lambda d: ask_for(d, num_directions=1.0),
    "stale protocol": lambda d: ask_for(d, protocol_version=1),
    "future protocol": lambda d: ask_for(d, protocol_version=3),
    "protocol as truth": lambda d: ask_for(d, protocol_version=True),
    "protocol as text": lambda d: ask_for(d, protocol_version="2"),
    "no protocol": lambda d: ask_for(d, protocol_version=None),
    "round 0": lambda d: ask_for(d, server_round=0),
    "round −1": lambda d: ask_for(d, server_round=-1),
    "round as truth": lambda d: ask_for(d, server_round=True),
    "round as text": lambda d: ask_for(d, server_round="1"),
    "round as a float": lambda d: ask_for(d, server_round=1.0),
    "round as a list": lambda d: ask_for(d, server_round=[1]),
    "no round": lambda d: ask_for(d, server_round=None),
    "release −1": lambda d: ask_for(d, release_index=-1),
    "release as truth": lambda d: ask_for(d, release_index=False),
    "fewer columns": lambda d: ask_for(d - 1),
    "more columns": lambda d: ask_for(d + 1),
    "no columns": lambda d: ask_for(d, num_columns=0),
    "a trillion columns": lambda d: ask_for(
        d, raw(header("(1000000000000, 0)")), num_columns=10**12, num_directions=0
    ),
    "a study's name of 1 MB": lambda d: ask_for(d, study="s" * 1_000_000),
    "study as bytes": lambda d: ask_for(d, study=b"study"),
    "no study": lambda d: ask_for(d, study=None),
    "payload raw": lambda d: ask_for(d, payload="raw"),
    "payload as truth": lambda d: ask_for(d, payload=True),
    "no records": lambda d: RecordDict(),
    "no configuration": lambda d: RecordDict({"fitins.parameters": ArrayRecord([E1])}),
}  # fmt: skip

# One release each, within the budget: noise follows what is asked.
ANSWERED: dict[str, Callable[[int], RecordDict]] = {
    "a forged σ and ε": lambda d: ask_for(
        d,
        noise_std=0.0, sigma=0.0, epsilon=1e9, delta=0.5, sensitivity=0.0, num_releases=1, radius=1e-9,
        accounting="none", lipschitz=0.0, rows_per_client=1, policy="none", seed=0,
    ),
    "everything at its limit": lambda d: ask_for(
        d, ROTATION[:D, :1] if d == D else None, alpha=0.9, amplitude=10.0, frequency=10.0
    ),
    "a frame at its tolerance": lambda d: ask_for(d, (1 + 4e-10) * np.eye(d)[:, :1]),
    "no directions": lambda d: ask_for(d, np.zeros((d, 0)), num_directions=0),
    "a name that moves the cursor": lambda d: ask_for(d, study="\x1b[2J\r\n'; DROP TABLE spend; --\u202e"),
    "a round far away": lambda d: ask_for(d, server_round=2**62, release_index=2**62),
    "whole numbers": lambda d: ask_for(d, alpha=0, amplitude=1, frequency=0),
}  # fmt: skip


def use_up(device: Device, *, first: int = 100) -> None:
    """Ask honestly until the device refuses: what the attack did not spend is spent now."""
    for index in range(first, first + NUM_RELEASES + 1):
        reply = device.ask(ask_for(device.columns, release_index=index))
    assert reply.has_error() or device.auditor.policy.on_exhausted == "repeat"


# Attacks one by one


@pytest.mark.parametrize("attack", REFUSED.values(), ids=REFUSED)
def test_refused_and_nothing_is_spent(device: Device, attack: Callable[[int], RecordDict]) -> None:
    """No reply, no spend, and the device goes on to answer an honest request."""
    for _ in range(2):
        assert device.ask(attack(D)).has_error()
    assert device.auditor.releases == {}
    assert not device.ledger._path.exists(), "refused before the ledger"
    assert not device.ask(ask_for()).has_error()
    device.auditor.verdict()


@pytest.mark.parametrize("attack", ANSWERED.values(), ids=ANSWERED)
def test_answered_at_the_usual_price(device: Device, attack: Callable[[int], RecordDict]) -> None:
    """σ follows the request: a release costs its share, whatever was asked, and a repeat nothing."""
    for _ in range(3):
        assert not device.ask(attack(D)).has_error()
    assert len(device.auditor.releases) == 1
    use_up(device)
    assert len(device.auditor.releases) == NUM_RELEASES
    # Calibrated to the promise, not far below it.
    assert device.auditor.delta() > 0.999 * REPLACE.guarantee.delta
    device.auditor.verdict()
    assert device.ledger.summary().spent == pytest.approx(device.auditor.spent, rel=1e-7)


@pytest.mark.parametrize("kind", ["evaluate", "get_parameters", "get_properties", "query", "reconnect"])
def test_nothing_else_is_answered(device: Device, kind: str) -> None:
    """Whatever layout the request has: not implemented, or an error without data."""
    for prefix in ("fitins", "evaluateins", "getparametersins", "getpropertiesins"):
        content = RecordDict(
            {
                f"{prefix}.parameters": ArrayRecord([np.eye(D)[:, :1]]),
                f"{prefix}.config": ask_for().config_records["fitins.config"],
                "config": ConfigRecord({"seconds": 0}),
            }
        )
        device.ask(content, kind)
    assert device.auditor.releases == {}
    assert device.auditor.silent + len(device.auditor.refusals) == 4
    assert not device.ledger._path.exists()


def test_what_cannot_be_released_is_not_paid_for(style: str, tmp_path: Path) -> None:
    """Within every limit, yet rounding errors would need too much noise: refused before the spend."""
    marginal = Policy(Guarantee(4.0, 1e-6, Distance(1.0)), NUM_RELEASES, sensitivity="marginal")
    device = Device(tmp_path, style, marginal)
    steep = ask_for(D, ROTATION[:, :1], alpha=0.9, amplitude=10.0, frequency=10.0)
    assert "rounding errors" in device.ask(steep).error.reason
    assert not device.ledger._path.exists()
    use_up(device)
    assert len(device.auditor.releases) == NUM_RELEASES


def test_sums_and_rows_of_one_release_cost_once(device: Device) -> None:
    for payload in ("rows", "moments", "rows", "moments"):
        assert not device.ask(ask_for(payload=payload)).has_error()
    assert len(device.auditor.releases) == 1
    use_up(device)
    device.auditor.verdict()


# Attacks that take their time


def test_a_thousand_rounds(tmp_path: Path) -> None:
    """One more release a round, under one study's name."""
    device = Device(tmp_path, "client_fn")
    for index in range(1000):
        device.ask(ask_for(server_round=index + 1, release_index=index))
    assert len(device.auditor.releases) == NUM_RELEASES
    assert len(device.auditor.refusals) == 1000 - NUM_RELEASES
    assert set(device.auditor.refusals) == {
        "RequestRefusedError: this device's privacy budget does not allow another release"
    }
    device.auditor.verdict()


def changing_requests(columns: int, rng: np.random.Generator) -> Iterator[RecordDict]:
    """Another study, map and frame in every request, all within the limits."""
    while True:
        m = int(rng.integers(4))
        frame, _ = np.linalg.qr(rng.standard_normal((columns, m)))
        yield ask_for(
            columns,
            frame,
            study=f"study {rng.integers(50)}",
            server_round=int(rng.integers(1, 1000)),
            release_index=int(rng.integers(3)),
            alpha=float(rng.choice([0.0, -0.0, 0.3, 0.9])),
            amplitude=float(rng.choice([0.0, 1e-300, 0.5, 10.0])),
            frequency=float(rng.choice([0.0, 1.0, 10.0])),
            num_directions=m,
        )


POLICIES = {
    "replace": REPLACE,
    "distance, zcdp, marginal": Policy(
        Guarantee(4.0, 1e-6, Distance(1.0)), NUM_RELEASES, sensitivity="marginal", accounting="zcdp"
    ),
    "private labels, classical, clients of two rows": Policy(
        Guarantee(0.9, 1e-5, ReplaceRecord(2.0, 1.5), unit="client", rows_per_client=2),
        NUM_RELEASES,
        accounting="classical",
        on_exhausted="repeat",
    ),
}


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_everything_at_once(style: str, policy: Policy, tmp_path: Path, rng: np.random.Generator) -> None:
    """All of the above in random order, between requests that change every parameter."""
    rows = policy.guarantee.rows_per_client
    device = Device(tmp_path, style, policy, rows=rows)
    contents = [
        attack(device.columns)
        for name, attack in (REFUSED | ANSWERED).items()
        if "MB" not in name and "no configuration" not in name
    ]
    changing = changing_requests(device.columns, rng)
    contents += [next(changing) for _ in range(60)]
    for place in rng.permutation(len(contents)):
        device.ask(contents[place])
        device.ask(contents[place], str(rng.choice(["evaluate", "get_parameters", "query"])))
    use_up(device)
    assert len(device.auditor.releases) == NUM_RELEASES
    device.auditor.verdict()


def test_what_a_release_costs() -> None:
    """The measurement behind the table: bytes are those of the arrays and their layout."""
    small, large = (device_cost.measure(columns, num_directions=1, releases=3) for columns in (10, 100))
    assert large.request - small.request == pytest.approx(8 * 90, abs=10)
    assert large.reply - small.reply == pytest.approx(8 * 90, abs=10)
    assert min(small.ledger, large.ledger) >= 0
    assert 0 < small.noise < small.first
    assert device_cost.peak_memory("x = bytearray(50_000_000)") > 50e6


# The auditor's own controls


def test_a_device_without_a_ledger_is_over_its_budget(tmp_path: Path) -> None:
    """What the thousand rounds would find; nine releases will do."""
    device = Device(tmp_path, "client_fn", rng=np.random.default_rng)
    for index in range(9):
        device.ask(ask_for(server_round=index + 1, release_index=index))
    assert len(device.auditor.releases) == 9
    with pytest.raises(AssertionError, match="not within the guarantee"):
        device.auditor.verdict()


@pytest.mark.parametrize("attack", ["V a thousand times too long", "V with a repeated column"])
def test_a_device_that_trusts_directions_is_over_its_budget(
    attack: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flwr_modulated import mechanism
    from flwr_modulated.flower import records

    for module in (policy, mechanism, records, modulation):
        monkeypatch.setattr(module, "check_directions", lambda directions, **_: np.asarray(directions))
    device = Device(tmp_path, "client_fn")
    device.ask(REFUSED[attack](D))
    use_up(device)
    with pytest.raises(AssertionError, match="not within the guarantee"):
        device.auditor.verdict()


def test_a_device_that_states_more_noise_than_it_adds_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flwr_modulated.noise import DeviceNoise

    right = DeviceNoise.add_gaussian
    monkeypatch.setattr(DeviceNoise, "add_gaussian", lambda self, values, std: right(self, values, std / 2))
    device = Device(tmp_path, "client_fn")
    use_up(device)
    with pytest.raises(AssertionError, match="less noise than stated"):
        device.auditor.verdict()


def test_a_device_that_does_not_clip_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The row is more than three radii long, which is 42 σ more than it should be."""
    from flwr_modulated import mechanism

    monkeypatch.setattr(mechanism, "clip_rows", lambda rows, radius: rows)
    device = Device(tmp_path, "client_fn", Policy(Guarantee(5000.0, 1e-5, Replace(3.0)), NUM_RELEASES))
    use_up(device)
    with pytest.raises(AssertionError, match="more noise than stated"):
        device.auditor.verdict()
