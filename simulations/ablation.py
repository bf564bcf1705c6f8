"""What modulation buys, in utility and in reconstruction error: the table and figure of ``ablation``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .records import Record
from .series import by_task, epsilons_of
from .sheets import Sheet
from .study_reports import Report

_PLAIN = "plain"
_ERRORS = {
    "reconstruction_error": "unbiased attacker",
    "reconstruction_error_prior": "attacker who knows the population",
}
_FACTORS = {
    "amplitude": ("#E69F00", "s"),
    "num_directions": ("#009E73", "^"),
    "alpha": ("#CC79A7", "D"),
    "sensitivity": ("#56B4E9", "P"),
    "accounting": ("#D55E00", "v"),
    "releases": ("#999999", "X"),
    "base": ("#000000", "*"),
}


def ablation(runs: Sequence[Record], searches: Sequence[Record]) -> Report:
    """Utility and reconstruction error of each variant, averaged over the tasks."""
    epsilons = epsilons_of(runs)
    shown = [epsilon for epsilon in epsilons if epsilon in (1, 4)] or epsilons[:2]
    variants = list(dict.fromkeys(record["variant"] for record in _in_order(runs)))
    rows = []
    for variant in variants:
        cells = [f"{_mean(runs, variant, epsilon, 'r2'):.3f}" for epsilon in shown]
        for error in _ERRORS:
            cells += [f"{_mean(runs, variant, epsilon, error):.3f}" for epsilon in shown]
        rows.append((variant, *cells))
    first = runs[0]
    sheet = Sheet(
        "What modulation buys: one factor at a time from base",
        (
            "variant",
            *(f"R², ε={epsilon:g}" for epsilon in shown),
            *(f"error of {who}, ε={epsilon:g}" for who in _ERRORS.values() for epsilon in shown),
        ),
        tuple(rows),
        f"Mean over {len(by_task(runs))} tasks of the median test R² over {len({r['seed'] for r in runs})} "
        "splits; mean squared reconstruction error per standardised feature, larger is safer. "
        "base: α = 0.2, λ = 0.2, ω = 0.5, one direction, conditional sensitivity, exact accounting, one "
        f"release; plain: no modulation. δ = {first['delta']:g}, relation {first['relation']}, unit row; "
        "secret phases, public labels that the attackers do not use.",
    )
    return Report([sheet], {"": _figure(runs, variants, epsilons)})


def _in_order(runs: Sequence[Record]) -> list[Record]:
    factors = list(_FACTORS)
    first = {_PLAIN: -2, "base": -1}

    def key(record: Record) -> tuple[int, str]:
        factor = record["variant"].split("=")[0]
        return first.get(record["variant"], factors.index(factor) if factor in factors else 99), record[
            "variant"
        ]

    return sorted(runs, key=key)


def _mean(runs: Sequence[Record], variant: str, epsilon: float, value: str) -> float:
    """Mean over tasks of the median over splits."""
    found = [r for r in runs if r["variant"] == variant and r["epsilon"] == epsilon]
    return float(np.mean([np.median([r[value] for r in task]) for task in by_task(found).values()]))


def _figure(runs: Sequence[Record], variants: Sequence[str], epsilons: Sequence[float]) -> Any:
    """R² against reconstruction error; the line is what noise alone reaches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.8), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for axis, (error, who) in zip(axes, _ERRORS.items(), strict=True):
        for variant in variants:
            x = [_mean(runs, variant, epsilon, error) for epsilon in epsilons]
            y = [_mean(runs, variant, epsilon, "r2") for epsilon in epsilons]
            if variant == _PLAIN:
                axis.plot(x, y, color="#0072B2", marker="o", linewidth=2, label="plain", zorder=3)
                for epsilon, horizontal, vertical in zip(epsilons, x, y, strict=True):
                    axis.annotate(
                        f"ε={epsilon:g}",
                        (horizontal, vertical),
                        (6, 4),
                        textcoords="offset points",
                        fontsize=8,
                    )
            else:
                factor = variant.split("=")[0]
                colour, marker = _FACTORS.get(factor, ("#000000", "x"))
                seen = axis.get_legend_handles_labels()[1]
                label = "_" if factor in seen else factor
                axis.scatter(x, y, color=colour, marker=marker, s=26, alpha=0.8, label=label, zorder=2)
        axis.set_xscale("log")
        axis.set_xlabel(f"reconstruction error of the {who}\n(per standardised feature; larger is safer)")
        axis.grid(alpha=0.25)
    axes[0].set_ylabel("test R², mean over the tasks")
    axes[0].legend(fontsize=8, title="factor varied", loc="lower left")
    first = runs[0]
    figure.suptitle(
        "The line: noise alone, at each ε. Above it modulation would buy something. "
        f"δ = {first['delta']:g}, relation {first['relation']}, unit row",
        fontsize=9,
    )
    return figure
