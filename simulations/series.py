"""Records grouped into series: what a table's row and a figure's line are made of."""

from __future__ import annotations

import json
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


# What may tell two runs of a method on the same split at the same ε apart.
_SETTINGS = (
    "delta", "relation", "accounting", "sensitivity", "alpha", "amplitude", "frequency", "num_directions",
    "num_rounds", "pool", "step", "penalty", "radius", "clip", "clip_ratio", "tail", "num_clients", "engine",
)  # fmt: skip


def distinguishing_name(records: Sequence[Record]) -> Callable[[Record], str]:
    """Name of a record's series: its method, variant, and whatever setting sets it apart.

    Runs of different settings must not share a median: where a method ran more than once on a
    split at an ε, the settings that differ there become part of the name.
    """
    groups: dict[object, list[Record]] = defaultdict(list)
    for record in records:
        key = (record["task"], record["method"], record.get("variant"), record["epsilon"], record["seed"])
        groups[key].append(record)
    differing: dict[str, set[str]] = defaultdict(set)
    for group in groups.values():
        for setting in _SETTINGS:
            if len({json.dumps(record.get(setting)) for record in group}) > 1:
                differing[group[0]["method"]].add(setting)

    def name(record: Record) -> str:
        method = record["method"]
        found = [setting for setting in _SETTINGS if setting in differing[method]]
        shown = [f"{setting}={_short(record.get(setting))}" for setting in found]
        return " ".join(filter(None, [method, record.get("variant", ""), *shown]))

    return name


def _short(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _in_usual_order(records: Sequence[Record]) -> list[Record]:
    """By method; parallel runs finish in any order."""
    return sorted(records, key=lambda record: METHODS.index(record["method"]))


def series(
    records: Sequence[Record],
    name: Callable[[Record], str] | None = None,
    value: str = "r2",
) -> Series:
    """Values of the private runs by series and ε; methods in their usual order."""
    name = name or distinguishing_name(records)
    grouped: Series = {}
    for record in _in_usual_order(records):
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
    private = _in_usual_order(private)
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
