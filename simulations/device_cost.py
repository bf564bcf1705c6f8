"""What a release costs on a device: ``python -m simulations.device_cost`` prints time, memory and bytes.

The device's whole path: request read from bytes, policy, ledger on disk, OpenDP's noise, reply to bytes.
A release commits twice, and each commit flushes journal, file and folder to the disk.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

COLUMNS = (1, 10, 100)
_IMPORTS = {
    "Python and NumPy": "import numpy",
    "with Flower": "import numpy, flwr.clientapp",
    "with this package and OpenDP": (
        "import flwr.clientapp; from flwr_modulated import DeviceNoise, ModulatedClient; DeviceNoise()"
    ),
}


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one release of one row.

    Attributes
    ----------
    first, repeat : float
        Median seconds to answer: a new request, and one whose release the ledger keeps.
    noise : float
        Median seconds that drawing the noise takes of the first.
    request, reply, ledger : int
        Bytes of the two messages' contents; and by which the ledger grows.
    """

    first: float
    repeat: float
    noise: float
    request: int
    reply: int
    ledger: int


def measure(num_columns: int, *, num_directions: int = 0, releases: int = 50) -> Cost:
    """Cost of a release on this machine.

    Parameters
    ----------
    num_columns : int
        d, features of the row.
    num_directions : int, default 0
        m of the modulation.
    releases : int, default 50
        How many to time.

    Returns
    -------
    Cost
    """
    from flwr_modulated import (
        DeviceNoise,
        Guarantee,
        Ledger,
        Mechanism,
        ModulatedClient,
        Modulation,
        Policy,
        Replace,
    )
    from flwr_modulated.flower.records import Request

    policy = Policy(Guarantee(8.0, 1e-5, Replace(3.0)), num_releases=2 * releases)
    modulation = Modulation(0.2, 0.5, 1.0, num_directions) if num_directions else Modulation()
    directions = np.eye(num_columns)[:, :num_directions]
    row, label = np.full((1, num_columns), 0.1), np.array([1.0])
    firsts, repeats, noises = [], [], []
    with tempfile.TemporaryDirectory() as folder, _messages():
        path = Path(folder) / "ledger.db"
        sizes = []
        for index in range(releases):
            content = Request(1, modulation, directions, "cost", "rows", index).to_recorddict()
            data = to_bytes(content)

            def answer(data: Any = data) -> Any:
                client = ModulatedClient(lambda: (row, label), policy, ledger=Ledger(path))
                return to_bytes(client.train(_message(from_bytes(data))).content)

            seconds, reply = _timed(answer)
            firsts.append(seconds)
            repeats.append(_timed(answer)[0])
            mechanism: Mechanism = policy.mechanism(modulation)
            source = DeviceNoise()
            noises.append(_timed(lambda m=mechanism, s=source: m.release(row, directions, rng=s))[0])
            sizes.append(path.stat().st_size)
        grown = (sizes[-1] - sizes[0]) // max(releases - 1, 1)
    middle = statistics.median
    return Cost(middle(firsts), middle(repeats), middle(noises), size(data), size(reply), grown)


def to_bytes(item: Any) -> Any:
    """A record as bytes, with those of the records in it."""
    return item.__class__, item.deflate(), {k: to_bytes(v) for k, v in (item.children or {}).items()}


def from_bytes(data: Any) -> Any:
    """The record that :func:`to_bytes` was given."""
    kind, body, children = data
    return kind.inflate(body, {k: from_bytes(v) for k, v in children.items()} or None)


def size(data: Any) -> int:
    """Bytes of a record."""
    return len(data[1]) + sum(size(part) for part in data[2].values())


def flush_time(repeats: int = 50) -> float:
    """Median seconds to flush one page of a file to the disk."""
    with tempfile.NamedTemporaryFile() as file:

        def flush() -> None:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())

        return statistics.median(_timed(flush)[0] for _ in range(repeats))


def peak_memory(code: str) -> int:
    """Peak resident memory, in bytes, of a new Python process that runs the code (Linux only)."""
    # Not getrusage: a new process starts from the peak of the one that it was forked from.
    report = "print([line.split()[1] for line in open('/proc/self/status') if 'VmHWM' in line][0])"
    command = [sys.executable, "-W", "ignore", "-c", f"{code}\n{report}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(done.stdout.split()[-1]) * 1024


def _timed(call: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def _message(content: Any) -> Any:
    from flwr.app import Message

    return Message(content, dst_node_id=1, message_type="train")


@contextmanager
def _messages() -> Iterator[None]:
    from .engines import _task_identity

    with _task_identity():
        yield


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(prog="python -m simulations.device_cost", description=__doc__)
    parser.add_argument("--releases", type=int, default=50)
    options = parser.parse_args(arguments)
    print("| columns d | directions m | a release | of which noise | a repeat | request | reply | ledger |")
    print("|" + "---|" * 8)
    for columns in COLUMNS:
        for directions in (0, 1):
            cost = measure(columns, num_directions=directions, releases=options.releases)
            milliseconds = [f"{1e3 * t:.1f} ms" for t in (cost.first, cost.noise, cost.repeat)]
            sizes = [f"{b} B" for b in (cost.request, cost.reply, cost.ledger)]
            print("| " + " | ".join([str(columns), str(directions), *milliseconds, *sizes]) + " |")
    print(f"\nFlushing one page to this disk takes {1e3 * flush_time():.1f} ms.\n")
    print("| a process | peak memory |")
    print("|---|---|")
    for name, code in _IMPORTS.items():
        print(f"| {name} | {peak_memory(code) / 1e6:.0f} MB |")
    release = (
        f"{_IMPORTS['with this package and OpenDP']}; from simulations.device_cost import measure; "
        f"measure(100, num_directions=1, releases={options.releases})"
    )
    print(f"| and {options.releases} releases of 100 columns | {peak_memory(release) / 1e6:.0f} MB |")


if __name__ == "__main__":
    main()
