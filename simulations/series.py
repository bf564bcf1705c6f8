"""Records grouped into series: what a table's row and a figure's line are made of."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np

from flwr_modulated._typing import FloatArray

from .records import Record
from .settings import METHODS

# name of a series -> ε -> test R² of its splits
Series = dict[str, dict[float, list[float]]]


def by_task(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Records of each task, in the order they come."""
    tasks: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        tasks[record["task"]].append(record)
    return dict(tasks)


def default_name(record: Record) -> str:
    """Method, and variant where there is one."""
    return " ".join(filter(None, [record["method"], record.get("variant", "")]))


def series(
    records: Sequence[Record],
    name: Callable[[Record], str] = default_name,
    value: str = "r2",
) -> Series:
    """Values of the private runs by series and ε; methods in their usual order."""
    ordered = sorted(records, key=lambda record: METHODS.index(record["method"]))
    grouped: Series = {}
    for record in ordered:
        if record["epsilon"] is not None:
            grouped.setdefault(name(record), defaultdict(list))[record["epsilon"]].append(record[value])
    return {key: dict(values) for key, values in grouped.items()}


def select_on_validation(records: Sequence[Record], group: Callable[[Record], object]) -> list[Record]:
    """Of the records that share a group, task, ε and split: the one that did best on validation."""
    best: dict[object, Record] = {}
    for record in records:
        key = (group(record), record["task"], record["epsilon"], record["seed"])
        if key not in best or record["r2_validation"] > best[key]["r2_validation"]:
            best[key] = record
    return list(best.values())


def quartiles(values: dict[float, list[float]]) -> tuple[FloatArray, FloatArray]:
    """Sorted ε of shape (n,), and lower quartile, median, upper quartile of shape (3, n)."""
    epsilons = np.array(sorted(values))
    return epsilons, np.array([np.quantile(values[epsilon], [0.25, 0.5, 0.75]) for epsilon in epsilons]).T


def epsilons_of(records: Sequence[Record]) -> list[float]:
    """Every ε that occurs."""
    return sorted({record["epsilon"] for record in records if record["epsilon"] is not None})


def task_title(task: str, records: Sequence[Record]) -> str:
    """Task, clients, splits and what least squares reaches without privacy."""
    splits = len({record["seed"] for record in records})
    ols = float(np.median([record["r2_ols"] for record in records]))
    clients = sorted({record["num_clients"] for record in records})
    shown = f"{clients[0]:,}" if len(clients) == 1 else f"{clients[0]:,} to {clients[-1]:,}"
    return f"{task}: {shown} clients, {splits} split{'s' * (splits > 1)}, OLS {ols:.3f}"


def guarantee_caption(records: Sequence[Record]) -> str:
    """State δ, accounting, threat model, and each method's relation."""
    private = [record for record in records if record["epsilon"] is not None]
    if not private:
        return "Not private."
    relations: dict[str, list[str]] = defaultdict(list)
    for record in private:
        stated = record["relation"]
        if record.get("threat_model") == "central":
            stated += " in the central model (the server is trusted)"
        if record["method"] not in relations[stated]:
            relations[stated].append(record["method"])
    stated = "; ".join(f"{relation}: {', '.join(methods)}" for relation, methods in relations.items())
    deltas = " or ".join(f"{delta:g}" for delta in sorted({record["delta"] for record in private}))
    accounting = " or ".join(sorted({record["accounting"] for record in private}))
    return f"δ = {deltas}, accounting {accounting}, unit row. Relation {stated}."
