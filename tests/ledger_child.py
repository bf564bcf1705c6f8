"""Processes that use a ledger and die, or race; started by test_ledger.py.

``kill FOLDER``: for each step of one release, a forked process that kills itself just before it.
``race PATH START``: asks for eight releases as soon as the file START exists; prints what it got.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sqlite3
import sys
import time
from pathlib import Path

import numpy as np

from flwr_modulated import Guarantee, Ledger, Modulation, Policy, Release, Replace, RequestRefusedError

ROW = 41.5 * np.ones((1, 3))


def policy(num_releases: int) -> Policy:
    return Policy(Guarantee(2.0, 1e-5, Replace(3.0)), num_releases)


def ask(ledger: Ledger, index: int, num_releases: int, *, before=lambda: None) -> Release:
    mechanism = policy(num_releases).mechanism(Modulation())

    def compute() -> Release:
        before()
        released = mechanism.release(ROW, rng=np.random.default_rng())
        before()
        return Release(released, np.array([1.0]), mechanism.noise_std)

    return ledger.release(
        compute,
        policy=policy(num_releases),
        modulation=Modulation(),
        directions=np.zeros((3, 0)),
        study="child",
        index=index,
    )


class Fuse:
    """Counts steps and kills the process just before step `fatal`."""

    def __init__(self, fatal: int) -> None:
        self.fatal, self.steps = fatal, 0

    def step(self) -> None:
        if self.steps == self.fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        self.steps += 1


def kill(folder: Path) -> None:
    fatal, survived = 0, False
    while not survived:
        child = os.fork()
        if child == 0:
            _die_at(folder, fatal)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        survived = os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0
        if not survived and not os.WIFSIGNALED(status):
            sys.exit("a child failed instead of dying")
        fatal += 1
    print(json.dumps({"num_killed": fatal - 1}))


def _die_at(folder: Path, fatal: int) -> None:
    fuse = Fuse(fatal)

    class Connection(sqlite3.Connection):
        def execute(self, *args):
            fuse.step()
            return super().execute(*args)

        def close(self):
            fuse.step()
            super().close()

    sqlite3.connect = functools.partial(sqlite3.connect, factory=Connection)
    release = ask(Ledger(folder / f"{fatal}.db"), 0, 1, before=fuse.step)
    fuse.step()
    (folder / f"{fatal}.sent").write_bytes(release.released.tobytes())  # it has left the device
    fuse.step()


class SlowConnection(sqlite3.Connection):
    """Dawdles before every statement, so that processes meet between any two."""

    def execute(self, *args):
        time.sleep(0.002)
        return super().execute(*args)


def race(path: Path, start: Path) -> None:
    ledger, got = Ledger(path), {}
    sqlite3.connect = functools.partial(sqlite3.connect, factory=SlowConnection)
    while not start.exists():
        time.sleep(0.001)
    for index in range(8):
        try:
            release = ask(ledger, index, 5, before=lambda: time.sleep(0.02))
            got[index] = release.released.tobytes().hex()
        except RequestRefusedError:
            got[index] = "refused"
    print(json.dumps(got))


if __name__ == "__main__":
    {"kill": kill, "race": race}[sys.argv[1]](*map(Path, sys.argv[2:]))
