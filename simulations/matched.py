"""The same guarantee for all, beside the paper's convention: the tables and figure of ``matched``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .comparison import draw_panel, shown_r2
from .records import Record
from .series import Series, by_task, epsilons_of, select_on_validation, series
from .sheets import BEST, Sheet
from .study_reports import Report

BASELINE = "local_dp_fedavg_tuned"
# Relation of auto -> what the row of panels shows.
ROWS = {
    "distance": "NOT matched (paper's convention): auto hides rows within distance 1",
    "replace": "matched, features private: any row in the ball for any other",
    "replace_record": "matched, features and label private: any record for any other",
}


def matched(runs: Sequence[Record], searches: Sequence[Record]) -> Report:
    """Tables and figure from runs at every radius; the radius is chosen on validation for each ε."""
    chosen = select_on_validation(runs, lambda record: (record["method"], family(record)))
    tasks = by_task(chosen)
    return Report(
        [*(_sheet(tasks, relation) for relation in ROWS), _margins(tasks), _radii(chosen)],
        {"": _figure(tasks)},
    )


def family(record: Record) -> str:
    """Relation without its numbers; the baseline's holds under every one."""
    return str(record["relation"]).split("(")[0]


def _lines(records: Sequence[Record], relation: str) -> Series:
    """Auto under one relation, and the baseline."""
    kept = [
        record
        for record in records
        if record["method"] == BASELINE or (record["method"] == "auto" and family(record) == relation)
    ]
    return series(kept, lambda record: record["method"])


def _sheet(tasks: dict[str, list[Record]], relation: str) -> Sheet:
    epsilons = epsilons_of([record for records in tasks.values() for record in records])
    rows = []
    for task, records in tasks.items():
        lines = _lines(records, relation)
        for method in lines:
            cells = []
            for epsilon in epsilons:
                medians = {name: np.median(v[epsilon]) for name, v in lines.items() if epsilon in v}
                best = BEST if medians.get(method, -np.inf) >= max(medians.values()) else ""
                cells.append(best + shown_r2(float(medians[method])) if method in medians else "–")
            rows.append((task, method, *cells))
    first = next(iter(tasks.values()))[0]
    return Sheet(
        ROWS[relation],
        ("task", "median test R², ε =", *(f"{epsilon:g}" for epsilon in epsilons)),
        tuple(rows),
        f"Median test R² over {len({r['seed'] for r in next(iter(tasks.values()))})} splits. "
        f"δ = {first['delta']:g}, exact accounting, unit row; auto under {relation}, {BASELINE} under "
        "replace_record(any). R, label scale and all settings of the baseline chosen on the validation "
        "split for each ε, which no guarantee covers.",
        num_labels=2,
    )


def _margins(tasks: dict[str, list[Record]]) -> Sheet:
    epsilons = epsilons_of([record for records in tasks.values() for record in records])
    rows = []
    for relation in ("replace", "replace_record"):
        for task, records in tasks.items():
            lines = _lines(records, relation)
            auto, baseline = lines.get("auto", {}), lines.get(BASELINE, {})
            cells = [
                f"{np.median(auto[epsilon]) - np.median(baseline[epsilon]):+.3f}"
                if epsilon in auto and epsilon in baseline
                else "–"
                for epsilon in epsilons
            ]
            rows.append((relation, task, *(BEST + cell if cell.startswith("+") else cell for cell in cells)))
    return Sheet(
        f"Who wins at the same guarantee: auto minus {BASELINE}, medians of test R²",
        ("relation", "task", *(f"ε={epsilon:g}" for epsilon in epsilons)),
        tuple(rows),
        "Bold: auto is ahead. Guarantees as in the tables above.",
        num_labels=2,
    )


def _radii(chosen: Sequence[Record]) -> Sheet:
    rows = []
    epsilons = epsilons_of(chosen)
    for relation in ("replace", "replace_record"):
        for task, records in by_task(chosen).items():
            cells = []
            for epsilon in epsilons:
                radii = [
                    float(record["relation"].split("(")[1].split(",")[0].rstrip(")"))
                    for record in records
                    if record["epsilon"] == epsilon
                    and record["method"] == "auto"
                    and family(record) == relation
                ]
                cells.append(f"{np.median(radii):g}" if radii else "–")
            rows.append((relation, task, *cells))
    return Sheet(
        "Radius R chosen on validation (median over the splits)",
        ("relation", "task", *(f"ε={epsilon:g}" for epsilon in epsilons)),
        tuple(rows),
        "In standardised units; where every record is longer than R, only its direction is used.",
        num_labels=2,
    )


def _figure(tasks: dict[str, list[Record]]) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.1 * len(tasks), 8.4), layout="constrained")
    axes = figure.subplots(len(ROWS), len(tasks), squeeze=False, sharex=True)
    handles: dict[str, Any] = {}
    for row, (relation, text) in enumerate(ROWS.items()):
        for column, (task, records) in enumerate(tasks.items()):
            axis = axes[row, column]
            handles |= draw_panel(axis, records, _lines(records, relation))
            if row == 0:
                clients = f"{records[0]['num_clients']:,} clients"
                axis.set_title(f"{task}, {clients}", fontsize=9)
            if row == len(ROWS) - 1:
                axis.set_xlabel("ε")
        label = text.replace(": ", ":\n").replace(" (paper", "\n(paper")
        axes[row, 0].set_ylabel(f"{label}\n\nR² on the test split", fontsize=8)
    first = next(iter(tasks.values()))[0]
    figure.suptitle(
        f"δ = {first['delta']:g}, {first['accounting']} accounting, unit row; local DP FedAvg hides any "
        "replacement of a record in every panel; median and quartiles",
        fontsize=9,
    )
    figure.legend(handles.values(), list(handles), loc="outside lower center", ncols=3)
    return figure
