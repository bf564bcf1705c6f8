"""A device's ledger: spend before release, one release a spend, whatever stops or races it."""

from __future__ import annotations

import json
import math
import os
import sqlite3
import struct
import subprocess
import sys
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from flwr_modulated import (
    Columns,
    Distance,
    Guarantee,
    InvalidDataError,
    InvalidParameterError,
    Ledger,
    LedgerError,
    Modulation,
    Policy,
    Release,
    Replace,
    ReplaceRecord,
    RequestRefusedError,
    draw_directions,
)
from flwr_modulated.cli import app
from flwr_modulated.ledger import request_key
from flwr_modulated.privacy import gaussian_delta

CHILD = Path(__file__).with_name("ledger_child.py")
SENTINEL = 73519.2468
PLAIN = Modulation()
EMPTY = np.zeros((3, 0))
POLICY = Policy(Guarantee(2.0, 1e-5, Replace(3.0)))


def three(**changes) -> Policy:
    return replace(POLICY, num_releases=3, **changes)


class Device:
    """A device with one row, whose releases are counted."""

    def __init__(self, path: Path, policy: Policy) -> None:
        self.ledger, self.policy, self.num_computed = Ledger(path), policy, 0

    def ask(
        self, index=0, *, modulation=PLAIN, directions=EMPTY, study="study", during=lambda: None
    ) -> Release:
        mechanism = self.policy.mechanism(modulation)

        def compute() -> Release:
            self.num_computed += 1
            during()
            row = np.full((1, 3), SENTINEL)
            released = mechanism.release(row, directions, rng=np.random.default_rng(self.num_computed))
            return Release(released, [float(self.num_computed)], mechanism.noise_std)

        return self.ledger.release(
            compute,
            policy=self.policy,
            modulation=modulation,
            directions=directions,
            study=study,
            index=index,
        )


def same(first: Release, second: Release) -> bool:
    return (
        first.released.tobytes() == second.released.tobytes()
        and first.noise_std == second.noise_std
        and (first.labels is None) == (second.labels is None)
        and (first.labels is None or first.labels.tobytes() == second.labels.tobytes())
    )


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "ledger.db"


# ---------------------------------------------------------------- spend and repeat


def test_repeats_are_free_and_the_same_bytes(path):
    device = Device(path, three())
    first, second = device.ask(0), device.ask(1)
    assert not same(first, second)
    for _ in range(5):
        again = Device(path, three())  # a restart
        assert same(again.ask(0), first)
        assert same(again.ask(1), second)
        assert again.num_computed == 0
    assert len(device.ledger.summary().spends) == 2
    assert device.ledger.summary().num_left == 1


def test_budget_ends_after_num_releases(path):
    device = Device(path, three())
    for index in range(3):
        device.ask(index)
    with pytest.raises(RequestRefusedError, match="budget"):
        device.ask(3)
    assert device.num_computed == 3
    assert device.ledger.summary().num_left == 0
    assert device.ledger.summary().epsilon_spent == pytest.approx(2.0, rel=1e-6)


def test_shares_never_fall_short_by_rounding(path):
    """All T equal shares are allowed and no more, also where T·(budget/T) rounds above the budget."""
    policies = (
        Policy(Guarantee(float(epsilon), 1e-5, Replace(3.0)), num_releases)
        for epsilon in range(1, 9)
        for num_releases in range(2, 60)
    )
    policy = next(
        policy for policy in policies if math.fsum([policy.cost] * policy.num_releases) > policy.budget
    )
    device = Device(path, policy)
    for index in range(policy.num_releases):
        device.ask(index)
        assert device.ledger.summary().num_left == policy.num_releases - 1 - index
    with pytest.raises(RequestRefusedError):
        device.ask(policy.num_releases)


def test_exhausted_device_may_repeat_its_last_release_of_the_same_map(path):
    device = Device(path, three(on_exhausted="repeat"))
    device.ask(0)
    last = device.ask(1)
    other = device.ask(0, modulation=Modulation(alpha=0.2))
    assert same(device.ask(7), last)
    assert same(device.ask(0, study="another"), last)
    assert same(device.ask(5, modulation=Modulation(alpha=0.2)), other)
    with pytest.raises(RequestRefusedError, match="budget"):  # it would be debiased wrongly
        device.ask(0, modulation=Modulation(alpha=0.3))
    assert device.num_computed == 3


def test_hostile_server_gets_no_more_than_the_budget(path, rng):
    """A thousand requests that change study, index, α, λ, ω and directions; then the audit of what left.

    The sum of (Δ/σ)² over distinct releases, from the σ that was really used, stays a (2, 1e-5) guarantee.
    """
    device = Device(path, replace(POLICY, num_releases=4))
    left, refused = {}, 0
    for number in range(1000):
        modulation = Modulation(*rng.uniform(0, 0.9, 3), num_directions=int(rng.integers(3)))
        frame = draw_directions(3, modulation.num_directions, rng=rng)
        try:
            got = device.ask(number % 7, modulation=modulation, directions=frame, study=str(number % 11))
            left[got.released.tobytes()] = (modulation.lipschitz() * 6.0 / got.noise_std) ** 2
        except RequestRefusedError:
            refused += 1
    assert (len(left), refused) == (4, 996)
    assert gaussian_delta(2.0, 1 / math.sqrt(sum(left.values()))) <= 1e-5


def test_spend_is_on_the_disk_before_the_release_is_computed(path):
    device = Device(path, POLICY)
    seen = []

    def look() -> None:
        with closing(sqlite3.connect(path)) as db:
            seen.extend(db.execute("SELECT cost, payload FROM spend").fetchall())

    device.ask(during=look)
    assert seen == [(POLICY.cost, None)]


def test_writes_are_flushed(path, monkeypatch):
    """synchronous=EXTRA (3) and a journal on disk, in every transaction that begins."""
    seen = []

    class Connection(sqlite3.Connection):
        def execute(self, statement, *args):
            if statement.startswith("BEGIN"):
                seen.extend(
                    super(Connection, self).execute(f"PRAGMA {name}").fetchone()[0]
                    for name in ("synchronous", "journal_mode")
                )
            return super().execute(statement, *args)

    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *a, **k: connect(*a, **k, factory=Connection))
    Device(path, POLICY).ask()
    assert seen == [3, "delete", 3, "delete"]


def test_failed_computation_keeps_its_spend_and_can_be_completed(path):
    device = Device(path, POLICY)
    with pytest.raises(ZeroDivisionError):
        device.ask(during=lambda: 1 / 0)
    summary = device.ledger.summary()
    assert summary.num_left == 0
    assert summary.spends[0].num_bytes is None
    assert "not released" in str(summary)
    first = device.ask()
    assert same(device.ask(), first)
    assert len(device.ledger.summary().spends) == 1


def test_two_answers_to_one_request_are_one_release(path):
    """A second process answers while the first still computes: both must return what was kept first."""
    outer, inner, kept = Device(path, POLICY), Device(path, POLICY), []
    inner.num_computed = 100  # other noise
    got = outer.ask(during=lambda: kept.append(inner.ask()))
    assert outer.num_computed == 1
    assert inner.num_computed == 101
    assert same(got, kept[0])


def test_another_request_cannot_slip_in_between(path):
    outer, inner = Device(path, POLICY), Device(path, POLICY)

    def intrude() -> None:
        with pytest.raises(RequestRefusedError, match="budget"):
            inner.ask(1)

    outer.ask(during=intrude)
    assert inner.num_computed == 0


# ---------------------------------------------------------------- killed, and two at a time


def run_child(*arguments: object) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, str(CHILD), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def result_of(child: subprocess.Popen) -> dict:
    out, err = child.communicate(timeout=120)
    assert child.returncode == 0, err
    return json.loads(out)


def test_killed_before_every_step(tmp_path):
    """SIGKILL before each SQL statement, around the computation and around the sending of one release.

    What was sent is in the ledger with its spend; after the restart the request is answered with the
    same bytes, for one spend in all, and nothing else is.
    """
    killed = result_of(run_child("kill", tmp_path))["num_killed"]
    assert killed > 15
    states = set()
    for fatal in range(killed):
        sent = tmp_path / f"{fatal}.sent"
        ledger = tmp_path / f"{fatal}.db"
        try:
            before = Ledger(ledger).summary().spends
        except LedgerError:  # not yet created, or empty
            before = ()
        states.add((len(before), bool(before and before[0].num_bytes), sent.exists()))
        device = Device(ledger, POLICY)
        again = device.ask(study="child")
        if sent.exists():
            assert again.released.tobytes() == sent.read_bytes()
            assert device.num_computed == 0
        assert len(device.ledger.summary().spends) == 1
        with pytest.raises(RequestRefusedError):
            device.ask(1, study="child")
    # Every state was met, and none but these: no spend; a spend; its release; sent.
    assert states == {(0, False, False), (1, False, False), (1, True, False), (1, True, True)}


def test_concurrent_processes_do_not_double_spend(tmp_path):
    """Three processes want the same eight releases of a budget of five: five spends, one release each."""
    path, start = tmp_path / "ledger.db", tmp_path / "start"
    children = [run_child("race", path, start) for _ in range(3)]
    start.touch()
    results = [result_of(child) for child in children]
    for index in map(str, range(8)):
        answers = {result[index] for result in results} - {"refused"}
        assert len(answers) == (1 if int(index) < 5 else 0)
    assert len(Ledger(path).summary().spends) == 5


# ---------------------------------------------------------------- changed policies


def test_more_releases_of_a_spent_budget_are_refused(path):
    Device(path, POLICY).ask(0)
    with pytest.raises(RequestRefusedError, match="budget"):
        Device(path, replace(POLICY, num_releases=10)).ask(1)


def test_larger_budget_allows_what_is_left_of_it(path):
    """After (2, 1e-5) is spent, a policy of ε = 4 in 10 shares allows shares until Σμ² reaches its μ²."""
    spent = POLICY.cost
    Device(path, POLICY).ask(0)
    larger = Device(path, Policy(Guarantee(4.0, 1e-5, Replace(3.0)), 10))
    with suppress(RequestRefusedError):
        for index in range(1, 100):
            larger.ask(index)
            spent += larger.policy.cost
    assert 2 < larger.num_computed < 99
    assert gaussian_delta(4.0, 1 / math.sqrt(spent)) <= 1e-5
    assert gaussian_delta(4.0, 1 / math.sqrt(spent + larger.policy.cost)) > 1e-5


@pytest.mark.parametrize(
    "changed",
    [
        Policy(Guarantee(1.0, 1e-5, Replace(3.0)), 3),
        Policy(Guarantee(2.0, 1e-9, Replace(3.0)), 3),
        Policy(Guarantee(2.0, 1e-5, Replace(3.0)), 3, accounting="zcdp"),
    ],
)
def test_smaller_budget_stops_at_once_but_repeats(path, changed):
    before = Device(path, replace(POLICY, num_releases=10))
    kept = [before.ask(index) for index in range(10)]
    after = Device(path, changed)
    with pytest.raises(RequestRefusedError, match="budget"):
        after.ask(10)
    assert same(after.ask(4), kept[4])


def test_unfinished_spend_is_topped_up_to_a_costlier_policy(path):
    cheap = Device(path, replace(POLICY, num_releases=10))
    with pytest.raises(ZeroDivisionError):
        cheap.ask(0, during=lambda: 1 / 0)
    device = Device(path, three())
    device.ask(0)
    assert [spend.cost for spend in device.ledger.summary().spends] == [three().cost]


def test_unfinished_spend_beyond_a_smaller_budget_is_refused(path):
    """Another process may still complete it under the old policy, so it counts at its old cost."""
    device = Device(path, replace(POLICY, num_releases=2))
    with pytest.raises(ZeroDivisionError):
        device.ask(1, during=lambda: 1 / 0)
    smaller = Device(path, Policy(Guarantee(1.0, 1e-5, Replace(3.0)), 100))
    with pytest.raises(RequestRefusedError, match="budget"):
        smaller.ask(1)


@pytest.mark.parametrize(
    "changed",
    [
        Policy(Guarantee(2.0, 1e-5, Replace(2.0))),
        Policy(Guarantee(2.0, 1e-5, Distance(3.0))),
        Policy(Guarantee(2.0, 1e-5, ReplaceRecord(3.0))),
        Policy(Guarantee(2.0, 1e-5, Replace(3.0), "client")),
        Policy(Guarantee(2.0, 1e-5, Replace(3.0)), sensitivity="marginal"),
        Policy(Guarantee(2.0, 1e-5, Replace(3.0)), columns=Columns(centre=[0.0] * 3, scale=[1.0] * 3)),
    ],
)
def test_policy_in_which_spends_cannot_be_counted_is_refused(path, changed):
    Device(path, three()).ask(0)
    with pytest.raises(RequestRefusedError, match="another relation"):
        Device(path, changed).ask(0)


def test_whole_numbers_are_the_same_policy(path):
    columns = {"centre": [0, 1, 2], "scale": [1, 1, 2]}
    first = Device(path, Policy(Guarantee(2, 1e-5, Replace(3)), columns=Columns(**columns))).ask()
    columns = {name: list(map(float, numbers)) for name, numbers in columns.items()}
    again = Device(path, Policy(Guarantee(2.0, 1e-5, Replace(3.0)), columns=Columns(**columns))).ask()
    assert same(first, again)


# ---------------------------------------------------------------- keys


def test_key_tells_requests_apart():
    frame, wavy = np.eye(3)[:, :1], Modulation(0.1, 0.2, 0.3, 1)
    asked = [
        request_key(wavy, frame),
        request_key(wavy, frame, study="a"),
        request_key(wavy, frame, study="b"),
        request_key(wavy, frame, index=1),
        request_key(wavy, frame[::-1]),
        request_key(replace(wavy, alpha=0.11), frame),
        request_key(replace(wavy, amplitude=0.21), frame),
        request_key(replace(wavy, frequency=0.31), frame),
        request_key(Modulation(0.1, 0.2, 0.3, 2), np.eye(3)[:, :2]),
        request_key(Modulation(0.1), np.zeros((3, 0))),
        request_key(Modulation(0.1), np.zeros((4, 0))),
    ]
    assert len({key for key, _ in asked}) == len(asked)
    assert (
        len({same_map for _, same_map in asked}) == len(asked) - 3
    )  # study and index are no part of the map


def test_key_ignores_what_changes_nothing():
    frame = np.eye(3)[:, :1]
    plain = request_key(Modulation(0.1), np.zeros((3, 0)))
    assert request_key(Modulation(0.1, 0.0, 0.7, 1), frame) == plain
    assert request_key(Modulation(0.1, 0.5, 0.7, 0), np.zeros((3, 0))) == plain
    wavy = Modulation(0.1, 0.2, 0.3, 1)
    assert request_key(wavy, np.where(frame == 0, -0.0, frame)) == request_key(wavy, frame)
    assert request_key(wavy, np.asfortranarray(frame).tolist()) == request_key(wavy, frame)


def test_bad_requests_are_named(path):
    with pytest.raises(InvalidParameterError, match="index"):
        request_key(PLAIN, EMPTY, index=-1)
    with pytest.raises(InvalidParameterError, match="shape"):
        request_key(PLAIN, [1.0])
    with pytest.raises(RequestRefusedError, match="study"):
        Device(path, POLICY).ask(study="x" * 201)
    assert not path.exists()


# ---------------------------------------------------------------- the file


def test_file_is_private_and_holds_no_raw_row(path):
    """The row is far outside the ball, so what leaves is clipped and noisy; its label left as it is."""
    device = Device(path, three())
    device.ask(0)
    with pytest.raises(ZeroDivisionError):
        device.ask(1, during=lambda: 1 / 0)
    assert path.stat().st_mode & 0o777 == 0o600
    content = b"".join(file.read_bytes() for file in path.parent.iterdir())
    assert struct.pack("<d", SENTINEL) not in content
    assert b"73519" not in content


def test_loose_permissions_are_refused(path):
    Device(path, three()).ask()
    path.chmod(0o644)
    with pytest.raises(LedgerError, match="chmod 600"):
        Device(path, three()).ask()


def _garbage(path: Path) -> None:
    path.write_bytes(b"not a database, but long enough to be read as one" * 100)


def _foreign(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE holiday (photo)")
        db.commit()


def _newer(path: Path) -> None:
    Device(path, POLICY).ask()
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA user_version = 2")


def _cut(path: Path) -> None:
    Device(path, POLICY).ask()
    path.write_bytes(path.read_bytes()[:5000])


def _damaged(path: Path) -> None:
    Device(path, POLICY).ask()
    content = bytearray(path.read_bytes())
    place = content.index(b"\x93NUMPY") + 140  # inside the released numbers
    content[place] ^= 1
    path.write_bytes(content)


def _folder(path: Path) -> None:
    path.mkdir(mode=0o700)


@pytest.mark.parametrize("spoil", [_garbage, _foreign, _newer, _cut, _damaged, _folder])
def test_spoilt_ledger_is_refused_without_a_path(path, spoil):
    spoil(path)
    if path.is_file():
        path.chmod(0o600)
    before = path.read_bytes() if path.is_file() else None
    device = Device(path, POLICY)
    with pytest.raises(LedgerError) as caught:
        device.ask()
    assert device.num_computed == 0
    assert str(path.parent) not in str(caught.value)
    assert caught.value.__context__ is None
    if before is not None:
        assert path.read_bytes() == before


def test_missing_folder_is_refused_without_a_path(path):
    with pytest.raises(LedgerError, match="cannot be opened") as caught:
        Device(path / "none" / "ledger.db", POLICY).ask()
    assert str(path) not in str(caught.value)


def test_locked_ledger_is_refused(path, monkeypatch):
    monkeypatch.setattr("flwr_modulated.ledger._BUSY_SECONDS", 0.05)
    Device(path, three()).ask(0)
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("BEGIN IMMEDIATE")
        with pytest.raises(LedgerError, match="in use by another process"):
            Device(path, three()).ask(1)


def test_ledger_needs_a_file(path):
    for nothing in (":memory:", ""):
        with pytest.raises(InvalidParameterError, match="path"):
            Ledger(nothing)
    with pytest.raises(LedgerError, match="no ledger"):
        Ledger(path).summary()
    assert not path.exists()
    path.touch(0o600)
    with pytest.raises(LedgerError, match="empty"):
        Ledger(path).summary()


@pytest.mark.parametrize("labels", [None, np.array([1.5, -2.0])])
def test_release_round_trips(labels, rng):
    release = Release(rng.standard_normal((2, 3)), labels, 0.1)
    assert same(Release.from_bytes(release.to_bytes()), release)


@pytest.mark.parametrize(
    "bad", [([[np.nan]], None, 1.0), ([[1.0]], [1.0, 2.0], 1.0), ([[1.0]], None, 0.0), ([1.0], None, 1.0)]
)
def test_bad_releases_are_refused(bad):
    with pytest.raises((InvalidDataError, InvalidParameterError)):
        Release(*bad)


# ---------------------------------------------------------------- in words


def test_show_says_what_was_spent_and_what_is_left(path):
    device = Device(path, three())
    device.ask(0)
    device.ask(1, modulation=Modulation(0.2, 0.3, 0.4, 1), directions=np.eye(3)[:, :1])
    shown = CliRunner().invoke(app, ["ledger", "show", str(path)])
    assert shown.exit_code == 0
    spent = device.ledger.summary().epsilon_spent
    assert 0 < spent < 2
    for part in (
        "paid for 2 releases",
        "66.7% of its budget",
        f"(ε={spent:.4g}, δ=1e-05)",
        "Left: 1 release under",
        "relation replace(3)",
        'study "study", release 0, 3 columns, alpha=0, no modulation',
        "alpha=0.2, amplitude=0.3, frequency=0.4, 1 direction(s)",
        "kept, ",
    ):
        assert part in shown.output
    assert gaussian_delta(spent, 1 / math.sqrt(2 * three().cost)) <= 1e-5


def test_show_cannot_be_fooled_by_a_study_name(path):
    device = Device(path, POLICY)
    device.ask(study="\x1b[2Jnothing spent\n  2. forged")
    text = str(device.ledger.summary())
    assert "\x1b" not in text
    assert text.count("\n") == 4


def test_show_of_a_foreign_file_fails_in_one_line(path):
    _garbage(path)
    result = CliRunner().invoke(app, ["ledger", "show", str(path)])
    assert isinstance(result.exception, LedgerError)  # main() prints it as one line
