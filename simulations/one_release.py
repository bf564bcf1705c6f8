"""Why one release is enough: ``python -m simulations.one_release`` draws docs/figures/one_release.png.

The same budget spent at once or over ten rounds, all on the same splits of one task, unmodulated.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from .settings import Cell, Engine
from .study import run_study

FIGURE = Path(__file__).parent.parent / "docs" / "figures" / "one_release.png"
TASK, NUM_SPLITS, ROUNDS = "fair", 20, 10
EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
SPENDINGS: dict[str, dict[str, Any]] = {
    "one release": {"name": "auto", "num_rounds": 1},
    "ten, their moments averaged": {"name": "auto", "num_rounds": ROUNDS, "pool": True},
    "ten, a gradient step each": {"name": "iterative", "num_rounds": ROUNDS, "step": 0.8, "radius": 10.0},
    "ten, the last one used": {"name": "auto", "num_rounds": ROUNDS},
}
# Colours that stay apart in print and for colour-blind readers (Okabe and Ito).
STYLES = (("#0072B2", "o"), ("#009E73", "^"), ("#E69F00", "s"), ("#999999", "v"))


def main() -> None:
    """Run the federations in this process, draw, and print the medians."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.subplots()
    ols = 0.0
    for (label, method), (colour, marker) in zip(SPENDINGS.items(), STYLES, strict=True):
        cells = [
            Cell(
                task=TASK,
                method=tuple(sorted(method.items())),
                epsilon=epsilon,
                delta=1e-5,
                relation="distance",
                radius=1.0,
                label_scale=1.0,
                accounting="exact",
                seed=seed,
            )
            for epsilon in EPSILONS
            for seed in range(NUM_SPLITS)
        ]
        records = run_study(cells, Engine("inprocess", 4))
        r2 = np.array([record["r2"] for record in records]).reshape(len(EPSILONS), NUM_SPLITS)
        ols = float(np.median([record["r2_ols"] for record in records]))
        low, middle, high = np.quantile(r2, [0.25, 0.5, 0.75], axis=1)
        print(f"{label:28s}", " ".join(f"{value:7.3f}" for value in middle))
        axes.plot(EPSILONS, middle, color=colour, marker=marker, markersize=5, label=label)
        axes.fill_between(EPSILONS, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.axhline(ols, color="0.35", linestyle="--", linewidth=1, label="OLS, not private")
    axes.set_xscale("log", base=2)
    axes.set_xticks(EPSILONS, [f"{epsilon:g}" for epsilon in EPSILONS])
    axes.set_ylim(-0.1, 0.95)
    axes.set(xlabel="ε of all releases together", ylabel="R² on the test split")
    axes.set_title(f"{TASK}, δ = 1e-5, distance(1), exact accounting, {NUM_SPLITS} splits", fontsize=10)
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8, loc="lower right")
    figure.savefig(FIGURE, dpi=150)


if __name__ == "__main__":
    main()
