"""Test R² of the methods against ε: the tables and the figure of any set of records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .records import Record
from .series import (
    Series,
    by_task,
    distinguishing_name,
    epsilons_of,
    guarantee_caption,
    quartiles,
    series,
    task_title,
)
from .sheets import BEST, Sheet

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Colours that stay apart in print and for colour-blind readers (Okabe and Ito).
STYLES: dict[str, dict[str, Any]] = {
    "auto": {"color": "#0072B2", "marker": "o", "label": "auto (one release)"},
    "iterative": {"color": "#E69F00", "marker": "s", "label": "iterative (paper)"},
    "ridge": {"color": "#009E73", "marker": "^", "label": "one-shot ridge (paper)"},
    "local_dp_fedavg": {"color": "#CC79A7", "marker": "D", "label": "local DP FedAvg (paper's baseline)"},
    "local_dp_fedavg_tuned": {
        "color": "#D55E00",
        "marker": "v",
        "label": "local DP FedAvg, tuned for each ε",
    },
    "flower_local_dp": {"color": "#56B4E9", "marker": "P", "label": "Flower LocalDpMod"},
}
_SPARE = ("#000000", "#56B4E9", "#F0E442", "#999999", "#882255", "#44AA99")


def style(name: str, index: int = 0) -> dict[str, Any]:
    """Colour, marker and label of a series."""
    spare = {"color": _SPARE[index % len(_SPARE)], "marker": "x", "label": name}
    return {"markersize": 4, "linewidth": 1.4, **STYLES.get(name, spare)}


def comparison_sheets(records: Sequence[Record]) -> list[Sheet]:
    """One sheet a task: median test R² of each series by ε."""
    sheets = []
    name = distinguishing_name(records)
    for task, rows in by_task([record for record in records if record["epsilon"] is not None]).items():
        grouped, epsilons = series(rows, name), epsilons_of(rows)
        several = len({record["seed"] for record in rows}) > 1
        sheets.append(
            Sheet(
                title=task_title(task, rows),
                header=(
                    "median test R², ε =" if several else "test R², ε =",
                    *(f"{epsilon:g}" for epsilon in epsilons),
                ),
                rows=tuple(
                    (label, *(_cell(grouped, label, epsilon) for epsilon in epsilons)) for label in grouped
                ),
                caption=guarantee_caption(rows),
            )
        )
    return sheets


def _cell(grouped: Series, label: str, epsilon: float) -> str:
    medians = {key: float(np.median(values[epsilon])) for key, values in grouped.items() if epsilon in values}
    if label not in medians:
        return "–"
    best = BEST if medians[label] >= max(medians.values()) else ""
    return best + shown_r2(medians[label])


def shown_r2(value: float) -> str:
    """Three decimals; what is worse than −1 is hopeless, whatever its digits."""
    return f"{value:.3f}" if value >= -1 else "< −1"


def comparison_figure(records: Sequence[Record]) -> Figure:
    """Test R² against ε, a panel a task: median, quartile band, non-private OLS line."""
    from matplotlib.figure import Figure

    tasks = by_task([record for record in records if record["epsilon"] is not None])
    columns = min(len(tasks), 3)
    rows = -(-len(tasks) // columns)
    width = 6.4 if columns == 1 else 4.2 * columns
    figure = Figure(figsize=(width, 4.2 * rows if rows == 1 else 3.6 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    handles: dict[str, Any] = {}
    name = distinguishing_name(records)
    for axis, (task, task_records) in zip(axes.flat, tasks.items(), strict=False):
        handles |= draw_panel(axis, task_records, series(task_records, name))
        axis.set_title(task_title(task, task_records), fontsize=9)
        axis.set_xlabel("ε")
    for axis in axes[:, 0]:
        axis.set_ylabel("R² on the test split")
    for axis in list(axes.flat)[len(tasks) :]:
        axis.set_axis_off()
    if len(tasks) == 1:
        axes[0, 0].legend(handles.values(), handles, fontsize=9, loc="lower right")
    elif len(tasks) < rows * columns:
        list(axes.flat)[-1].legend(handles.values(), handles, loc="center", frameon=False)
    else:
        figure.legend(handles.values(), list(handles), loc="outside lower center", ncols=3)
    return figure


def draw_panel(axis: Any, records: Sequence[Record], grouped: Series) -> dict[str, Any]:
    """Draw each series with its quartile band, and the OLS line; return the legend's entries."""
    handles = {}
    for index, (label, values) in enumerate(grouped.items()):
        epsilons, (low, middle, high) = quartiles(values)
        look = style(label, index)
        (handles[look["label"]],) = axis.plot(epsilons, middle, **look)
        if any(len(found) > 1 for found in values.values()):
            axis.fill_between(epsilons, low, high, color=look["color"], alpha=0.15, linewidth=0)
    ols = float(np.median([record["r2_ols"] for record in records]))
    handles["OLS, not private"] = axis.axhline(ols, color="0.35", linestyle="--", linewidth=1)
    ticks = epsilons_of(records)
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.minorticks_off()
    axis.set_ylim(-0.1, min(1.0, ols * 1.06) + 0.02)  # what is worse than the mean is cut off
    axis.grid(alpha=0.25)
    return handles
