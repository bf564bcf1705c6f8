"""Tables and figures, made from records only."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table

from .records import Record
from .settings import METHODS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Colours that stay apart in print and for colour-blind readers (Okabe and Ito).
COLOURS = {"auto": "#0072B2", "iterative": "#E69F00", "ridge": "#009E73", "local_dp_fedavg": "#CC79A7"}
MARKERS = {"auto": "o", "iterative": "s", "ridge": "^", "local_dp_fedavg": "D"}
LABELS = {
    "auto": "auto (one release)",
    "iterative": "iterative (paper)",
    "ridge": "one-shot ridge (paper)",
    "local_dp_fedavg": "local DP FedAvg",
}

Grid = dict[str, dict[float, list[float]]]


def records_table(records: Sequence[Record]) -> Table:
    """One row a record, the guarantee below."""
    table = Table(box=SIMPLE_HEAD, caption=guarantee_caption(records), caption_justify="left")
    for name in ("task", "method"):
        table.add_column(name)
    for name in ("ε", "clients", "test R²", "OLS R²", "seconds"):
        table.add_column(name, justify="right")
    for record in records:
        table.add_row(
            record["task"],
            record["method"],
            f"{record['epsilon']:g}",
            f"{record['num_clients']:,}",
            f"{record['r2']:.3f}",
            f"{record['r2_ols']:.3f}",
            f"{record['seconds']:.2f}",
        )
    return table


def comparison_tables(records: Sequence[Record]) -> list[Table]:
    """One table a task: median test R² of each method by ε; the highest is bold."""
    tables = []
    for task, rows in _by_task(records).items():
        grid, epsilons = _grid(rows), _epsilons(rows)
        table = Table(
            title=_title(task, rows),
            title_justify="left",
            caption=guarantee_caption(rows),
            caption_justify="left",
            box=SIMPLE_HEAD,
            padding=(0, 0, 0, 1),
        )
        table.add_column("median test R²" if _num_splits(rows) > 1 else "test R²", no_wrap=True)
        for epsilon in epsilons:
            table.add_column(f"ε={epsilon:g}", justify="right", no_wrap=True)
        for method, values in grid.items():
            table.add_row(
                method,
                *(
                    f"[bold]{cell}[/bold]" if _is_best(grid, method, epsilon) else cell
                    for epsilon in epsilons
                    for cell in [_median(values.get(epsilon, []))]
                ),
            )
        tables.append(table)
    return tables


def comparison_markdown(records: Sequence[Record]) -> str:
    """The same as Markdown, with quartiles where there are several splits."""
    blocks = []
    for task, rows in _by_task(records).items():
        grid, epsilons = _grid(rows), _epsilons(rows)
        lines = [f"**{_title(task, rows)}**", ""]
        lines.append("| test R² | " + " | ".join(f"ε = {epsilon:g}" for epsilon in epsilons) + " |")
        lines.append("|---|" + "---:|" * len(epsilons))
        for method, values in grid.items():
            shown = []
            for epsilon in epsilons:
                cell = _median(values.get(epsilon, []))
                cell = f"**{cell}**" if _is_best(grid, method, epsilon) else cell
                shown.append(cell + _quartiles(values.get(epsilon, [])))
            lines.append(f"| `{method}` | " + " | ".join(shown) + " |")
        lines += ["", guarantee_caption(rows), ""]
        blocks.append("\n".join(lines))
    return "\n".join(blocks)


def plot_comparison(records: Sequence[Record]) -> Figure:
    """Test R² against ε, a panel a task: median, quartile band, non-private OLS line."""
    from matplotlib.figure import Figure

    tasks = _by_task(records)
    columns = min(len(tasks), 3)
    rows = -(-len(tasks) // columns)
    width = 6.4 if columns == 1 else 4.2 * columns
    figure = Figure(figsize=(width, 4.2 * rows if rows == 1 else 3.6 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis, (task, task_records) in zip(axes.flat, tasks.items(), strict=False):
        for method, values in _grid(task_records).items():
            epsilons = np.array(sorted(values))
            low, middle, high = np.array(
                [np.quantile(values[epsilon], [0.25, 0.5, 0.75]) for epsilon in epsilons]
            ).T
            axis.plot(
                epsilons,
                middle,
                color=COLOURS[method],
                marker=MARKERS[method],
                markersize=5,
                label=LABELS[method],
            )
            if any(len(values[epsilon]) > 1 for epsilon in epsilons):
                axis.fill_between(epsilons, low, high, color=COLOURS[method], alpha=0.15, linewidth=0)
        ols = float(np.median([record["r2_ols"] for record in task_records]))
        axis.axhline(ols, color="0.35", linestyle="--", linewidth=1, label="OLS, not private")
        axis.set_xscale("log", base=2)
        axis.set_xticks(epsilons, [f"{epsilon:g}" for epsilon in epsilons])
        axis.set_ylim(-0.1, min(1.0, ols * 1.06) + 0.02)  # what is worse than the mean is cut off
        axis.set_title(_title(task, task_records), fontsize=10)
        axis.set_xlabel("ε")
        axis.grid(alpha=0.25)
    axes[0, 0].set_ylabel("R² on the test split")
    for axis in list(axes.flat)[len(tasks) :]:
        axis.set_axis_off()
    handles, labels = axes[0, 0].get_legend_handles_labels()
    if len(tasks) == 1:
        axes[0, 0].legend(handles, labels, fontsize=9, loc="lower right")
    elif len(tasks) < rows * columns:
        list(axes.flat)[-1].legend(handles, labels, loc="center", frameon=False)
    else:
        figure.legend(handles, labels, loc="outside lower center", ncols=3)
    return figure


def guarantee_caption(records: Sequence[Record]) -> str:
    """State δ, accounting, and each method's relation."""
    relations: dict[str, list[str]] = defaultdict(list)
    for record in records:
        if record["method"] not in relations[record["relation"]]:
            relations[record["relation"]].append(record["method"])
    stated = "; ".join(f"{relation}: {', '.join(methods)}" for relation, methods in relations.items())
    deltas = " or ".join(f"{delta:g}" for delta in sorted({record["delta"] for record in records}))
    accounting = " or ".join(sorted({record["accounting"] for record in records}))
    return f"δ = {deltas}, accounting {accounting}, unit row. Relation {stated}."


def _epsilons(records: Sequence[Record]) -> list[float]:
    return sorted({record["epsilon"] for record in records})


def _num_splits(records: Sequence[Record]) -> int:
    return len({record["seed"] for record in records})


def _title(task: str, records: Sequence[Record]) -> str:
    splits = _num_splits(records)
    ols = float(np.median([record["r2_ols"] for record in records]))
    count = f"{splits} splits" if splits > 1 else "1 split"
    return f"{task}: {records[0]['num_clients']:,} clients, {count}, OLS {ols:.3f}"


def _by_task(records: Sequence[Record]) -> dict[str, list[Record]]:
    tasks: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        tasks[record["task"]].append(record)
    return dict(tasks)


def _grid(records: Sequence[Record]) -> Grid:
    grid: Grid = {}
    for method in METHODS:
        values: dict[float, list[float]] = defaultdict(list)
        for record in records:
            if record["method"] == method:
                values[record["epsilon"]].append(record["r2"])
        if values:
            grid[method] = dict(values)
    return grid


def _median(values: Sequence[float]) -> str:
    return f"{np.median(values):.3f}" if values else "–"


def _quartiles(values: Sequence[float]) -> str:
    if len(values) < 2:
        return ""
    low, high = np.quantile(values, [0.25, 0.75])
    return f" ({low:.2f} – {high:.2f})"


def _is_best(grid: Grid, method: str, epsilon: float) -> bool:
    medians = {name: float(np.median(values[epsilon])) for name, values in grid.items() if epsilon in values}
    return method in medians and medians[method] >= max(medians.values())
