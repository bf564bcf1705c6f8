"""Run a grid of cells: resumable, in parallel, every finished cell on disk at once.

On the in-process engine cells spread over worker processes; on Ray they share one Flower run,
whose nodes are the workers.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from .engines import OnReply
from .records import RECORDS, Record, append_record, recover_records
from .settings import Cell, Engine
from .study import run_study
from .tuning import needs_search, resolve, search, search_identity

SEARCHES = "searches.jsonl"

Progress = Callable[[int, int, str], None]


def run_experiment(
    cells: Sequence[Cell],
    engine: Engine,
    directory: Path,
    *,
    workers: int | None = None,
    on_progress: Progress = lambda done, total, label: None,
    on_reply: OnReply | None = None,
) -> list[Record]:
    """Run what is not on disk yet, and return the records of all cells.

    Parameters
    ----------
    cells : sequence of Cell
        The grid.
    engine : Engine
        Where cells run.
    directory : pathlib.Path
        Holds ``records.jsonl`` and ``searches.jsonl``; what is found there is not run again.
    workers : int, optional
        Worker processes of the in-process engine; by default one a processor.
    on_progress : callable
        Called with the number done, the total, and what was done last.
    on_reply : callable, optional
        Progress within a round, where cells run in this process.

    Returns
    -------
    list of dict
        One record a cell, in the order of `cells`.
    """
    records = {record["id"]: record for record in recover_records(directory / RECORDS)}
    searches = {record["id"]: record for record in recover_records(directory / SEARCHES)}
    open_cells = list({cell.identity: cell for cell in cells if cell.identity not in records}.values())
    wanted = {search_identity(cell): cell for cell in open_cells if needs_search(cell)}
    open_searches = [cell for identity, cell in wanted.items() if identity not in searches]
    total = len(open_searches) + len(open_cells)
    on_progress(0, total, "")
    if not total:
        return [records[cell.identity] for cell in cells]

    done = 0

    def keep(record: Record) -> None:
        found, name = (searches, SEARCHES) if record["kind"] == "search" else (records, RECORDS)
        append_record(directory / name, record)
        found[record["id"]] = record
        nonlocal done
        done += 1
        on_progress(done, total, _label(record))

    count = min(workers or os.cpu_count() or 1, total)
    in_process = engine.name == "inprocess"
    if count > 1 and (in_process or open_searches):
        with _pool(count) as pool:
            _drain([pool.submit(search, cell) for cell in open_searches], keep)
            if in_process:
                resolved = [_resolved(cell, searches) for cell in open_cells]
                _drain([pool.submit(_run_one, cell, engine) for cell in resolved], keep)
    else:
        for cell in open_searches:
            keep(search(cell))
    remaining = [_resolved(cell, searches) for cell in open_cells if cell.identity not in records]
    if remaining:
        run_study(remaining, engine, keep, on_reply)
    return [records[cell.identity] for cell in cells]


def _resolved(cell: Cell, searches: dict[str, Record]) -> Cell:
    return resolve(cell, searches[search_identity(cell)]) if needs_search(cell) else cell


def _run_one(cell: Cell, engine: Engine) -> Record:
    return run_study([cell], engine)[0]


def _drain(futures: Iterable, keep: Callable[[Record], None]) -> None:  # type: ignore[type-arg]
    pending = list(futures)
    try:
        for future in as_completed(pending):
            keep(future.result())
    finally:
        for future in pending:
            future.cancel()


def _pool(count: int) -> ProcessPoolExecutor:
    # Matrices are small: a second thread in a worker would only take a processor from another.
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    return ProcessPoolExecutor(
        count, mp_context=multiprocessing.get_context("spawn"), initializer=_quiet_worker
    )


def _quiet_worker() -> None:
    logging.getLogger("flwr").setLevel(logging.WARNING)


def _label(record: Record) -> str:
    if record["kind"] == "search":
        return f"{record['task']} search of {record['method']} seed={record['seed']}"
    epsilon = "" if record["epsilon"] is None else f" ε={record['epsilon']:g}"
    return f"{record['task']} {record['method']}{epsilon} seed={record['seed']}"
