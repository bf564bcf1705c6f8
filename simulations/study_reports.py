"""Tables and figures of the experiments in ``conf/experiment``, each from its records only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from . import paper
from .comparison import comparison_figure, comparison_sheets
from .records import Record
from .series import by_task, distinguishing_name, epsilons_of, guarantee_caption, series
from .sheets import Sheet

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class Report:
    """Tables, and figures by what is added to the file name."""

    sheets: list[Sheet]
    figures: Mapping[str, Figure] = field(default_factory=dict)


Builder = Callable[[Sequence[Record], Sequence[Record]], Report]


def table1(runs: Sequence[Record], searches: Sequence[Record]) -> Report:
    """Rows, features and OLS R² beside the paper's."""
    rows = []
    for task, records in by_task(runs).items():
        values = [record["r2_ols"] for record in records]
        printed = paper.TABLE_1.get(task)
        rows.append(
            (
                task,
                f"{records[0]['num_rows']:,}",
                str(records[0]["num_features"]),
                f"{np.mean(values):.4f} ± {np.std(values, ddof=min(1, len(values) - 1)):.4f}",
                *((f"{printed[0]:,}", str(printed[1]), f"{printed[2]:.3f}") if printed else ("–",) * 3),
            )
        )
    return Report(
        [
            Sheet(
                "Table 1: rows, features, and R² of least squares without privacy",
                ("task", "rows", "features", "OLS R²", "paper: rows", "features", "OLS R²"),
                tuple(rows),
                f"Test R², mean ± standard deviation over {len({r['seed'] for r in runs})} random "
                "60/20/20 splits. The paper does not list the features of co2 and modechoice.",
            )
        ]
    )


def table2(runs: Sequence[Record], searches: Sequence[Record]) -> Report:
    """What validation selects, beside the paper's values."""
    rows = []
    for task, records in by_task(runs).items():
        found_search = [record for record in searches if record["task"] == task]
        clip, step = _searched(found_search)
        selected = (
            _best_setting(records, "iterative", "step"),
            _best_setting(records, "ridge", "penalty"),
            clip,
            step,
        )
        printed = paper.TABLE_2.get(task, (float("nan"),) * 4)
        rows.append(
            (task, *(f"{ours:g} ({theirs:g})" for ours, theirs in zip(selected, printed, strict=True)))
        )
    return Report(
        [
            Sheet(
                "Table 2: selected on the validation split, in parentheses the paper's",
                ("task", "iterative step c", "one-shot penalty γ", "local DP clip C", "local DP step"),
                tuple(rows),
                "Selected once per task: highest mean validation R² over the grid of ε and the splits, "
                "where less than 0 counts as 0. Local DP FedAvg with 10 rounds, fixed clip, last iterate. "
                + guarantee_caption(runs),
            )
        ]
    )


def _best_setting(records: Sequence[Record], method: str, setting: str) -> float:
    scores: dict[float, list[float]] = {}
    for record in records:
        if record["method"] == method:
            scores.setdefault(record[setting], []).append(max(record["r2_validation"], 0.0))
    return max(scores, key=lambda value: float(np.mean(scores[value]))) if scores else float("nan")


def _searched(searches: Sequence[Record]) -> tuple[float, float]:
    """Clip and step that do best as the paper runs its baseline."""
    if not searches:
        return float("nan"), float("nan")
    settings = [dict(zip(searches[0]["fields"], row, strict=True)) for row in searches[0]["settings"]]
    table = np.mean([np.maximum(record["r2_validation"], 0.0).mean(axis=1) for record in searches], axis=0)
    like_paper = [
        index
        for index, found in enumerate(settings)
        if found["num_rounds"] == 10 and found["clip_ratio"] == 1 and found["tail"] == 0
    ]
    best = settings[max(like_paper, key=lambda index: table[index])]
    return best["clip"], best["step"]


def figure1(runs: Sequence[Record], searches: Sequence[Record]) -> Report:
    """R² against ε, and the paper's qualitative claims held against it."""
    return Report(
        [claims(runs), *comparison_sheets(runs)],
        {"": comparison_figure(runs)},
    )


def claims(runs: Sequence[Record]) -> Sheet:
    """Each qualitative claim with the number that decides it; cells are tasks × epsilons."""
    cells: list[dict[str, float]] = []
    overtakes: list[str] = []
    for task, records in by_task(runs).items():
        grouped = series(records)
        medians = {
            name: {epsilon: float(np.median(found)) for epsilon, found in values.items()}
            for name, values in grouped.items()
        }
        ols = float(np.median([record["r2_ols"] for record in records]))
        for epsilon in epsilons_of(records):
            cells.append(
                {"ε": epsilon, "ols": ols, **{n: v[epsilon] for n, v in medians.items() if epsilon in v}}
            )
        overtakes.append(f"{task} {_overtaking(medians)}")
    methods = ("iterative", "ridge", "local_dp_fedavg")
    if any(name not in cell for cell in cells for name in ("auto", *methods)):
        return Sheet("Claims need the four methods at every ε", ("claim",), ())
    large = [cell for cell in cells if cell["ε"] == max(c["ε"] for c in cells)]
    rows = [
        _claim(
            "auto is at or above every method of the paper",
            [cell["auto"] - max(cell[name] for name in methods) for cell in cells],
        ),
        (
            "paper: at small ε one-shot leads iterative or ties (within 0.005)",
            "see number",
            "tasks in which ridge does, by ε: "
            + ", ".join(f"{epsilon:g}: {_count(cells, epsilon)}" for epsilon in epsilons_of(runs)),
        ),
        _claim(
            "paper: DP-SGD trails the better of its two methods",
            [max(cell["iterative"], cell["ridge"]) - cell["local_dp_fedavg"] for cell in cells],
        ),
        _claim(
            "paper: DP-SGD trails both",
            [min(cell["iterative"], cell["ridge"]) - cell["local_dp_fedavg"] for cell in cells],
        ),
        _claim(
            "paper: iterative is close to OLS (within 0.02) at the largest ε",
            [cell["iterative"] - cell["ols"] + 0.02 for cell in large],
        ),
        ("paper: iterative overtakes one-shot ridge as ε grows", "see number", "; ".join(overtakes)),
    ]
    tuned = [
        cell["local_dp_fedavg_tuned"] - cell["local_dp_fedavg"]
        for cell in cells
        if "local_dp_fedavg_tuned" in cell
    ]
    if tuned:
        rows.append(_claim("tuned local DP FedAvg is at or above the fixed one", tuned))
    return Sheet(
        "Claims, each in the medians over the splits",
        ("claim", "verdict", "number"),
        tuple(rows),
        "A cell is a task at an ε. " + guarantee_caption(runs),
        num_labels=3,
    )


def _count(cells: Sequence[dict[str, float]], epsilon: float) -> str:
    margins = [cell["ridge"] - cell["iterative"] + 0.005 for cell in cells if cell["ε"] == epsilon]
    return f"{sum(margin >= 0 for margin in margins)} of {len(margins)}"


def _claim(text: str, margins: Sequence[float]) -> tuple[str, str, str]:
    held = sum(margin >= 0 for margin in margins)
    verdict = (
        "reproduced" if held == len(margins) else "not reproduced" if 2 * held < len(margins) else "mostly"
    )
    return text, verdict, f"{held} of {len(margins)} cells; smallest margin {min(margins):+.3f}"


def _overtaking(medians: dict[str, dict[float, float]]) -> str:
    if not {"iterative", "ridge"} <= medians.keys():
        return "unknown"
    ahead = [
        epsilon
        for epsilon, value in sorted(medians["iterative"].items())
        if all(medians["iterative"][e] > medians["ridge"][e] for e in medians["ridge"] if e >= epsilon)
    ]
    return f"from ε = {ahead[0]:g}" if ahead else "never"


def flower(runs: Sequence[Record], searches: Sequence[Record]) -> Report:
    """Flower's own differential privacy, with whom each method trusts."""
    sheets = []
    for task, records in by_task(runs).items():
        name_of = distinguishing_name(records)
        rows = []
        for name, values in series(records, name_of).items():
            of_name = [record for record in records if name_of(record) == name]
            one, seconds = of_name[0], float(np.median([record["seconds"] for record in of_name]))
            rows.append(
                (
                    name,
                    one["threat_model"],
                    one["relation"],
                    one["accounting"],
                    *(f"{np.median(values[epsilon]):.3f}" for epsilon in epsilons_of(records)),
                    f"{seconds:.2f}",
                )
            )
        sheets.append(
            Sheet(
                f"{task}: Flower's own differential privacy, {records[0]['num_clients']:,} one-row clients",
                (
                    "method",
                    "threat model",
                    "relation",
                    "accounting",
                    *(f"R² ε={epsilon:g}" for epsilon in epsilons_of(records)),
                    "seconds",
                ),
                tuple(rows),
                "Median test R² and seconds a run. Local: clients trust nobody; central: they trust the "
                "server with their update. Methods of different threat models or relations are not "
                "comparable at the same ε. " + guarantee_caption(records),
                num_labels=4,
            )
        )
    return Report(sheets)
