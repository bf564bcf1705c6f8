"""The benchmark: every case at a small size, memory, failures, and the table."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from simulations.benchmark import Case, cases, machine, markdown, run_case, targets
from simulations.memory import peak_memory

SIZES = {"num_clients": 300, "num_features": 3, "num_rounds": 2}


def test_every_case_has_a_name_of_its_own() -> None:
    found = cases(10_000, 9, 3, [20, 40], 50)
    names = [(case.name, case.num_clients) for case in found if not case.name.startswith("a.")]
    assert len(names) == len(set(names))
    assert {name[0] for name, _ in names} == set("bcdef")


@pytest.mark.parametrize(
    "arguments",
    [
        {"case": "floor", "num_threads": 2},
        {"case": "kernel", "payload": "moments"},
        {"case": "hosted", "engine": "inprocess", "num_nodes": 2, "sampling": "moments"},
        {"case": "hosted", "engine": "inprocess", "num_nodes": "clients"},
        {"case": "empty", "engine": "inprocess"},
    ],
    ids=lambda arguments: "-".join(map(str, arguments.values())),
)
def test_cases_run_in_a_process_of_their_own(arguments: dict[str, Any]) -> None:
    record = run_case(Case("x", arguments | SIZES))
    assert "error" not in record, record
    assert record["num_clients"] == 300
    assert record["round"] == record["seconds"][1] > 0
    assert record["startup"] > 0
    assert record["clients_per_second"] == pytest.approx(300 / record["round"])
    if sys.platform == "linux":
        assert 20 * 2**20 < record["peak_memory"] < 2**30
    if arguments["case"] == "hosted":
        # Moments of two nodes: 9 + 3 + 3 + 4 numbers each. Rows: 3 features and a label.
        wanted = 2 * 8 * 19 / 300 if arguments["num_nodes"] == 2 else 8 * 4
        assert record["bytes_per_client"] == pytest.approx(wanted)


def test_a_case_that_fails_is_a_line_of_the_table() -> None:
    record = run_case(Case("b. broken", {"case": "kernel", "payload": "rows", **SIZES, "num_clients": -1}))
    assert "num_clients" not in record["error"]
    assert "Error" in record["error"]
    assert "| b. broken | -1 | failed: " in markdown([record], 10, "here")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_counts_children_and_forgets_nothing() -> None:
    """A child of the watched process holds 200 MB and lets go of them before the end."""
    child = (
        "b = bytearray(200 * 2**20); b[::4096] = b'x' * len(b[::4096]); import time; time.sleep(1.2); del b"
    )
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    with subprocess.Popen([sys.executable, "-c", parent]) as process:
        done, peak = threading.Event(), [0]
        watch = threading.Thread(target=lambda: peak.append(peak_memory(process.pid, done, interval=0.05)))
        watch.start()
        process.wait()
        done.set()
        watch.join()
    assert 200 * 2**20 < peak[-1] < 260 * 2**20


def test_memory_of_nothing_is_nothing() -> None:
    done = threading.Event()
    done.set()
    assert peak_memory(2**22 + 1, done) == 0


def line(name: str, num_clients: int, later: float, **more: Any) -> dict[str, Any]:
    base = {"name": name, "num_clients": num_clients, "round": later, "startup": 7.0}
    base["seconds"] = [9.0, later, later]
    return base | {"clients_per_second": 1.0, "bytes_per_client": None, "peak_memory": 2**30} | more


def test_targets_are_ratios_of_the_right_cases() -> None:
    records = [
        line("a. floor, 1 thread", 1000, 0.10),
        line("a. floor, 2 threads", 1000, 0.06),
        line("a. floor, 2 threads", 1000, 0.04),  # the median of both is 0.05
        line("b. release and sum", 1000, 0.12),
        line("d. Ray, empty round", 2, 0.2),
        line("d. Ray, moments", 1000, 0.15, startup=9.0, seconds=[2.0] + 19 * [0.15], peak_memory=3 * 2**29),
        line("d. Ray, exact law", 1000, 0.3),
        line("d. Ray, exact law", 10_000, 0.4),
        line("f. Ray, Flower's LocalDpMod", 2000, 20.0),
        line("c. in-process, hosted", 2000, 0.04),
        line("c. in-process, hosted", 50, 0.01),
        line("c. in-process, empty nodes", 50, 2.0),
        line("c. in-process, a node a client", 50, 3.0),
        line("g. pfl, local DP", 50, 4.0),
        {"name": "d. Ray, rows", "num_clients": 1000, "error": "RuntimeError: no"},
    ]
    found = {name: value for name, value, _ in targets(records, 1000)}
    assert found == {
        "Ray, moments: round / floor": pytest.approx(3.0),
        "Ray, rows: round / floor": None,
        "Ray, rows as float32: round / floor": None,
        "Ray, exact law, 1,000 clients: round / empty round": pytest.approx(1.5),
        "Ray, exact law, 10,000 clients: round / empty round": pytest.approx(2.0),
        "Ray, moments: ten rounds with start-up, seconds": pytest.approx(9.0 + 2.0 + 9 * 0.15),
        "Ray, moments: peak memory of all processes, GiB": 1.5,
        "Release and sum / floor, one thread each": pytest.approx(1.2),
        "in-process, hosted, 2,000 clients: clients/s over the stock layout with LocalDpMod": pytest.approx(
            500
        ),
        "Ray, hosted, 2,000 clients: clients/s over the stock layout with LocalDpMod": None,
        "in-process, 50 nodes of one client / as many empty nodes": pytest.approx(1.5),
        "in-process, hosted, 50 clients: clients/s over pfl with local DP": pytest.approx(400),
    }
    table = markdown(records, 1000, "here")
    assert "| d. Ray, moments | 1,000 | 0.15 | 3.00 |" in table
    assert "| Ray, rows: round / floor | – | ≤ 7 |" in table


def test_the_machine_is_described_without_its_name() -> None:
    assert Path("/proc/sys/kernel/hostname").read_text().strip() not in machine()
    assert "cores" in machine()


@pytest.mark.simulation
@pytest.mark.nightly
def test_cases_on_ray() -> None:
    small = SIZES | {"num_clients": 6, "engine": "ray"}
    for arguments in ({"case": "hosted", "num_nodes": "clients"}, {"case": "flower_dp"}, {"case": "empty"}):
        record = run_case(Case("x", small | arguments))
        assert record["num_clients"] == 6, record
        assert record["round"] > 0
