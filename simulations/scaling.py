"""Error and R² against the number of clients, with the predicted line: tables and figure of ``scaling``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from flwr_modulated import Modulation
from flwr_modulated.standard_errors import coefficient_covariance

from .comparison import style
from .data import SYNTHETIC_R2
from .records import Record
from .series import epsilons_of
from .sheets import Sheet
from .study_reports import Report

LABELS = {"auto": "auto", "ridge": "unregularised Σ̂⁻¹ẑ"}


def scaling(runs: Sequence[Record], searches: Sequence[Record]) -> Report:
    """Median error at each number of clients beside the prediction."""
    epsilons = epsilons_of(runs)
    sizes = sorted({record["num_clients"] for record in runs})
    rows = []
    for epsilon in epsilons:
        for size in sizes:
            here = [r for r in runs if r["epsilon"] == epsilon and r["num_clients"] == size]
            rows.append(
                (
                    f"{epsilon:g}",
                    f"{size:,}",
                    f"{predicted_error(here[0]):.2e}",
                    *(f"{_median(here, m, 'coefficient_error'):.2e}" for m in LABELS),
                    *(f"{_median(here, m, 'r2'):.4f}" for m in LABELS),
                )
            )
    first = runs[0]
    sheet = Sheet(
        "Error of the coefficients and R² against the number of clients",
        (
            "ε",
            "clients",
            "predicted ‖β̂−β‖²",
            *(f"{LABELS[m]}: ‖β̂−β‖²" for m in LABELS),
            *(f"{LABELS[m]}: R²" for m in LABELS),
        ),
        tuple(rows),
        f"Gaussian rows, {first['num_features']} features, population R² {SYNTHETIC_R2:g}; medians over "
        f"{len({r['seed'] for r in runs})} draws. Predicted: mean squared error of the unregularised "
        "estimator, from the gradient's variance (5) at the true coefficients plus the rows' own sampling. "
        f"δ = {first['delta']:g}, {first['accounting']} accounting, relation {first['relation']}, unit row.",
    )
    return Report([sheet], {"": _figure(runs, epsilons, sizes)})


def predicted_error(record: Record) -> float:
    """E‖β̂ − β‖² of Σ̂⁻¹ẑ to first order in 1/K, for Gaussian rows with Σ = I."""
    d = record["num_features"]
    beta = np.zeros(d)
    beta[0] = np.sqrt(SYNTHETIC_R2)  # only its length matters
    modulation = Modulation(
        record["alpha"], record["amplitude"], record["frequency"], record["num_directions"]
    )
    covariance = coefficient_covariance(
        np.eye(d),
        beta,
        1.0 - SYNTHETIC_R2,
        num_samples=record["num_clients"],
        modulation=Modulation() if modulation.is_plain else modulation,
        noise_std=record["noise_std"],
    )
    return float(np.trace(covariance))


def _median(records: Sequence[Record], method: str, value: str) -> float:
    return float(np.median([record[value] for record in records if record["method"] == method]))


def _figure(runs: Sequence[Record], epsilons: Sequence[float], sizes: Sequence[int]) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2 * len(epsilons), 7.6), layout="constrained")
    axes = figure.subplots(2, len(epsilons), squeeze=False, sharex=True, sharey="row")
    for column, epsilon in enumerate(epsilons):
        here = [record for record in runs if record["epsilon"] == epsilon]
        for row, value in enumerate(("coefficient_error", "r2")):
            axis = axes[row, column]
            for method, label in LABELS.items():
                found = [
                    [r[value] for r in here if r["method"] == method and r["num_clients"] == size]
                    for size in sizes
                ]
                low, middle, high = np.array([np.quantile(v, [0.25, 0.5, 0.75]) for v in found]).T
                look = {**style(method), "label": label}
                axis.plot(sizes, middle, **look)
                axis.fill_between(sizes, low, high, color=look["color"], alpha=0.15, linewidth=0)
            axis.set_xscale("log")
            axis.grid(alpha=0.25)
        example = {record["num_clients"]: record for record in here}
        axes[0, column].plot(
            sizes,
            [predicted_error(example[size]) for size in sizes],
            color="0.2",
            linestyle="--",
            linewidth=1,
            label="predicted from (5)",
        )
        axes[0, column].set_yscale("log")
        first = here[0]
        axes[0, column].set_title(
            f"ε = {epsilon:g}, δ = {first['delta']:g}, relation {first['relation']}, unit row", fontsize=9
        )
        axes[1, column].axhline(SYNTHETIC_R2, color="0.35", linestyle="--", linewidth=1)
        axes[1, column].set_ylim(-0.1, SYNTHETIC_R2 + 0.05)
        axes[1, column].set_xlabel("clients K")
    axes[0, 0].set_ylabel("‖β̂ − β‖²")
    axes[1, 0].set_ylabel("R² on 10,000 fresh rows")
    axes[0, 0].legend(fontsize=9)
    return figure
