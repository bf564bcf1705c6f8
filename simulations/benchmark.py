"""Time everything in one run, as ratios: ``python -m simulations.benchmark``.

Each case runs in a fresh process. Writes ``benchmark.jsonl`` and ``benchmark.md`` to the
output directory, and prints the table. ``--quick`` takes a hundredth of the clients;
``--pfl-python PATH`` names the interpreter of an environment that has Apple's pfl, which
wants a dp-accounting of its own.
"""

from __future__ import annotations

import datetime
import importlib.util
import json
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Console

from .memory import peak_memory
from .records import append_record

_TIMEOUT = 1800.0
Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Case:
    """One line of the table: its name and what to run."""

    name: str
    arguments: dict[str, Any]

    @property
    def num_clients(self) -> int:
        """Clients that answer in a round."""
        return int(self.arguments["num_clients"])


def cases(clients: int, features: int, rounds: int, stock: Sequence[int], single: int) -> list[Case]:
    """All cases but pfl's; letters as in the table."""

    def case(name: str, function: str, num_clients: int, num_rounds: int = rounds, **more: Any) -> Case:
        base = {"case": function, "num_clients": num_clients, "num_features": features}
        return Case(name, base | {"num_rounds": num_rounds} | more)

    def hosted(name: str, num_clients: int, engine: str, **more: Any) -> Case:
        return case(name, "hosted", num_clients, engine=engine, **more)

    cores = os.cpu_count() or 1
    exact = {"sampling": "moments"}
    found = [
        case("a. floor, 1 thread", "floor", clients, num_threads=1),
        case("a. floor, 2 threads", "floor", clients, num_threads=2),
        case("b. release and sum", "kernel", clients, payload="moments"),
        case("b. release all, then sum", "kernel", clients, payload="rows"),
        case("b. exact law", "kernel", clients, payload="exact"),
        hosted("c. in-process, moments", clients, "inprocess", payload="moments"),
        hosted("c. in-process, rows", clients, "inprocess", payload="rows"),
        hosted("c. in-process, exact law", clients, "inprocess", **exact),
        case("d. Ray, empty round", "empty", cores, engine="ray"),
        hosted("d. Ray, moments", clients, "ray", payload="moments"),
        hosted("d. Ray, rows", clients, "ray", payload="rows"),
        hosted("d. Ray, rows as float32", clients, "ray", payload="rows", precision="float32"),
        hosted("d. Ray, exact law", clients, "ray", **exact),
        hosted("d. Ray, exact law", 10 * clients, "ray", **exact),
    ]
    for size in stock:
        found += [
            case("e. Ray, a node a client", "hosted", size, 3, engine="ray", num_nodes="clients"),
            case("f. Ray, Flower's LocalDpMod", "flower_dp", size, 3, engine="ray"),
            hosted("d. Ray, hosted", size, "ray"),
            hosted("c. in-process, hosted", size, "inprocess"),
        ]
    return [
        *found,
        hosted("c. in-process, hosted", single, "inprocess"),
        case("c. in-process, empty nodes", "empty", single, 5, engine="inprocess"),
        case("c. in-process, a node a client", "hosted", single, 5, engine="inprocess", num_nodes="clients"),
        # Once more, in case the machine was not the same all along.
        case("a. floor, 1 thread", "floor", clients, num_threads=1),
        case("a. floor, 2 threads", "floor", clients, num_threads=2),
    ]


def run_case(case: Case) -> Record:
    """Run a case in a process of its own, and watch the memory of all its processes."""
    command = [sys.executable, "-c", "from simulations.benchmark_cases import main; main()"]
    return _run(case, [*command, json.dumps(case.arguments)])


def run_pfl(python: str, clients: int, features: int) -> Record:
    """Run Apple's pfl with local differential privacy, in its own environment."""
    case = Case("g. pfl, local DP", {"case": "pfl", "num_clients": clients, "num_features": features})
    script = Path(__file__).with_name("benchmark_pfl.py")
    return _run(case, [python, str(script), str(clients), str(features), "3"])


def _run(case: Case, command: list[str]) -> Record:
    # One thread of BLAS a process: more would only take a processor from another.
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    began = time.time()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | threads
    ) as process:
        peak, done = [0], threading.Event()
        watch = threading.Thread(target=lambda: peak.append(peak_memory(process.pid, done)))
        watch.start()
        try:
            output, errors = process.communicate(timeout=_TIMEOUT)
        except subprocess.TimeoutExpired:
            process.terminate()
            output, errors = process.communicate()
        finally:
            done.set()
            watch.join()
    record: Record = {"name": case.name, **case.arguments}
    if process.returncode != 0:
        last = (errors.strip().splitlines() or ["no output"])[-1]
        return record | {"error": last[:300]}
    result = json.loads(output.strip().splitlines()[-1])
    seconds = result["seconds"]
    later = median(_later(seconds))
    return record | {
        "startup": result["ready"] - began,
        "seconds": seconds,
        "round": later,
        "clients_per_second": case.num_clients / later,
        "bytes_per_client": result.get("bytes_per_client"),
        "peak_memory": peak[-1] or None,
    }


def _later(seconds: list[float]) -> list[float]:
    """Seconds of the rounds after the first, if there are any."""
    return seconds[1:] or seconds


def _floor(records: Sequence[Record], kind: str = "") -> float | None:
    """The faster of one and two threads, over all times it was run."""
    seconds: dict[str, list[float]] = {}
    for record in records:
        if record["name"].startswith("a. floor") and kind in record["name"] and "error" not in record:
            seconds.setdefault(record["name"], []).extend(_later(record["seconds"]))
    return min(map(median, seconds.values()), default=None)


def targets(records: Sequence[Record], clients: int) -> list[tuple[str, float | None, str]]:
    """What the project asks of itself: a name, the figure of this run, and the bound.

    Parameters
    ----------
    records : sequence of dict
        From :func:`run_case`.
    clients : int
        Number of clients of the large cases.
    """
    found = {(r["name"], r["num_clients"]): r for r in records if "error" not in r}

    def of(name: str, num_clients: int, value: str = "round") -> float | None:
        record = found.get((name, num_clients))
        return None if record is None else record[value]

    def ratio(a: float | None, b: float | None) -> float | None:
        return None if a is None or b is None else a / b

    floor, single = _floor(records), _floor(records, "1 thread")
    empty = min((r["round"] for (name, _), r in found.items() if name == "d. Ray, empty round"), default=None)
    tenth = found.get(("d. Ray, moments", clients))
    rows = [
        ("Ray, moments: round / floor", ratio(of("d. Ray, moments", clients), floor), "≤ 2.5"),
        ("Ray, rows: round / floor", ratio(of("d. Ray, rows", clients), floor), "≤ 7"),
        ("Ray, rows as float32: round / floor", ratio(of("d. Ray, rows as float32", clients), floor), "≤ 7"),
    ]
    for size in (clients, 10 * clients):
        name = f"Ray, exact law, {size:,} clients: round / empty round"
        rows.append((name, ratio(of("d. Ray, exact law", size), empty), "≤ 1.5"))
    rows += [
        (
            "Ray, moments: ten rounds with start-up, seconds",
            None if tenth is None else tenth["startup"] + sum(tenth["seconds"][:10]),
            "< 20",
        ),
        (
            "Ray, moments: peak memory of all processes, GiB",
            ratio(of("d. Ray, moments", clients, "peak_memory"), 2.0**30),
            "< 1.5",
        ),
        (
            "Release and sum / floor, one thread each",
            ratio(of("b. release and sum", clients), single),
            "≤ 1.25",
        ),
    ]
    sizes = [r["num_clients"] for r in records if r["name"].startswith("f.") and "error" not in r]
    for size in sorted(sizes):
        theirs = of("f. Ray, Flower's LocalDpMod", size)
        bound = "≥ 200" if size == 2000 else ""
        for name in ("c. in-process, hosted", "d. Ray, hosted"):
            title = f"{name[3:]}, {size:,} clients: clients/s over the stock layout with LocalDpMod"
            rows.append((title, ratio(theirs, of(name, size)), bound if name[0] == "c" else ""))
    for (name, size), record in found.items():
        if name.startswith("g."):
            title = f"in-process, hosted, {size:,} clients: clients/s over pfl with local DP"
            rows.append((title, ratio(record["round"], of("c. in-process, hosted", size)), "≥ 100"))
        if name == "c. in-process, a node a client":
            title = f"in-process, {size:,} nodes of one client / as many empty nodes"
            rows.append((title, ratio(record["round"], of("c. in-process, empty nodes", size)), "≤ 2"))
    return rows


def markdown(records: Sequence[Record], clients: int, machine: str, *, with_targets: bool = True) -> str:
    """The table and, since they are for sizes in full, perhaps the targets, as Markdown."""
    floor, failed = _floor(records), any("error" in record for record in records)
    lines = [
        machine,
        "",
        "| case | clients | s a round | ÷ floor | clients/s | start-up, s | peak MiB | bytes a client |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for record in records:
        name, size = record["name"], f"{record['num_clients']:,}"
        if "error" in record:
            lines.append(f"| {name} | {size} | failed: {record['error']} | | | | | |")
            continue
        against = f"{record['round'] / floor:.2f}" if floor and record["num_clients"] == clients else ""
        memory, sent = record["peak_memory"], record["bytes_per_client"]
        lines.append(
            f"| {name} | {size} | {record['round']:.3g} | {against} | {record['clients_per_second']:,.0f} "
            f"| {record['startup']:.1f} | {'' if memory is None else format(memory / 2**20, ',.0f')} "
            f"| {'' if sent is None else format(sent, '.3g')} |"
        )
    if not with_targets:
        return "\n".join(lines) + "\n"
    lines += ["", "| target | here | asked |", "|---|--:|--:|"]
    for name, value, bound in targets(records, clients):
        if value is not None or failed:  # the others belong to cases that were not asked for
            lines.append(f"| {name} | {'–' if value is None else format(value, ',.3g')} | {bound} |")
    return "\n".join(lines) + "\n"


def machine() -> str:
    """Date and kind of machine, without its name."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.split(":", 1)[1] for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        model = names[0].strip() if names else model
    date = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    return (
        f"{date}, {os.cpu_count()} cores ({model}), Python {platform.python_version()}, {platform.system()}."
    )


def _pfl_python(given: str | None) -> str | None:
    if given is not None:
        return given
    return sys.executable if importlib.util.find_spec("pfl") is not None else None


def main(
    output: Annotated[Path, typer.Option(help="Directory of benchmark.jsonl and benchmark.md.")] = Path(
        "outputs"
    ),
    clients: Annotated[int, typer.Option(help="Clients of the large cases.")] = 1_000_000,
    features: Annotated[int, typer.Option(help="Features of each.")] = 9,
    rounds: Annotated[int, typer.Option(help="Rounds of the fast cases.")] = 20,
    stock: Annotated[str, typer.Option(help="Clients of the stock layout.")] = "500,1000,2000",
    single: Annotated[int, typer.Option(help="Clients with a node each, in process.")] = 10_000,
    only: Annotated[str, typer.Option(help="Run the cases whose name contains this.")] = "",
    pfl_python: Annotated[str | None, typer.Option(help="Interpreter of an environment with pfl.")] = None,
    quick: Annotated[
        bool, typer.Option(help="A hundredth of the clients, one stock size, no targets.")
    ] = False,
) -> None:
    """Run the benchmark."""
    if quick:
        clients, single, stock = clients // 100, single // 100, stock.split(",")[0]
    sizes = [int(size) for size in stock.split(",") if size]
    console, records = Console(), []
    listed = [case for case in cases(clients, features, rounds, sizes, single) if only in case.name]

    def keep(record: Record) -> None:
        records.append(record)
        append_record(output / "benchmark.jsonl", {"machine": machine(), **record})
        said = record.get("error") or f"{record['round']:.4g} s a round"
        console.print(f"{record['name']}, {record['num_clients']:,} clients: {said}", highlight=False)

    for case in listed:
        keep(run_case(case))
    python = _pfl_python(pfl_python)
    if python is None:
        console.print("pfl is not installed: left out")
    elif only in "g. pfl, local DP":
        keep(run_pfl(python, single, features))
    text = markdown(records, clients, machine(), with_targets=not quick)
    (output / "benchmark.md").write_text(text, encoding="utf-8")
    console.print(text, markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    app()
