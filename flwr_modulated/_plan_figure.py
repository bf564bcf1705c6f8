"""The curves of a plan: expected R² by number of devices, and attackers' errors, by ε."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np

from .errors import ModulatedError
from .planning import expected_r2, exposure
from .studies import Plan

__all__ = ["draw_plan"]

# Colours that stay apart in print and for colour-blind readers (Okabe and Ito).
_COLOURS = ("#56B4E9", "#009E73", "#0072B2", "#D55E00")


def draw_plan(plan: Plan, path: Path) -> None:
    """Draw a plan's curves to a file whose suffix says the format.

    Raises
    ------
    ModulatedError
        If matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ModulatedError(
            "--figure needs matplotlib; install flwr-modulated[simulation] or leave the option out"
        ) from None
    study = replace(plan.study, epsilon=plan.guarantee.epsilon, num_clients=plan.num_clients, target=None)
    epsilons = [plan.guarantee.epsilon * factor for factor in (0.5, 1, 2, 4)]
    least = math.ceil((2 * study.num_features + 4) / (1 - study.dropout))
    counts = np.unique(
        np.geomspace(max(plan.num_clients / 30, least), max(30 * plan.num_clients, 2 * least), 9).round()
    )
    figure = Figure(figsize=(9.0, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for epsilon, colour in zip(epsilons, _COLOURS, strict=True):
        curve = [expected_r2(replace(study, epsilon=epsilon, num_clients=int(count))) for count in counts]
        left.plot(counts, curve, color=colour, marker="o", markersize=3, label=f"ε = {epsilon:g}")
    left.axhline(study.r2, color="0.5", linestyle="--", linewidth=1)
    left.annotate(
        "best linear rule", (counts[0], study.r2), xytext=(0, 3), textcoords="offset points", color="0.4"
    )
    left.axvline(plan.num_clients, color="0.8", linewidth=1, zorder=0)
    left.set(
        xscale="log", xlabel="devices asked", ylabel="expected R² on new rows", ylim=(0, study.r2 * 1.15)
    )
    left.legend(frameon=False, title=f"{study.relation}, δ = {study.delta:g}")
    grid = np.geomspace(plan.guarantee.epsilon / 8, plan.guarantee.epsilon * 8, 33)
    exposures = [exposure(study, float(epsilon)) for epsilon in grid]
    right.plot(grid, [each.unbiased_error for each in exposures], color="#D55E00", label="unbiased guess")
    right.plot(
        grid,
        [each.prior_error for each in exposures],
        color="#0072B2",
        label="guess using the population",
    )
    right.axhline(
        exposures[0].blind_error, color="0.5", linestyle="--", linewidth=1, label="without the release"
    )
    right.axvline(plan.guarantee.epsilon, color="0.8", linewidth=1, zorder=0)
    right.set(
        xscale="log",
        yscale="log",
        xlabel=f"ε at δ = {study.delta:g}, {study.relation}",
        ylabel="attacker's error of a feature (SD)",
    )
    right.legend(frameon=False)
    figure.savefig(path, dpi=150)
