"""RandHIE with and without privacy: ``python -m simulations.example_inference``.

Every person is a client with one row and releases it once. Features are centred and scaled by
constants that a study would publish beforehand; here, for want of such, by the sample's own.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from flwr_modulated import Distance, Guarantee, Mechanism, Modulation
from flwr_modulated.datasets import load_task
from flwr_modulated.diagnostics import plot_diagnostics
from flwr_modulated.evaluation import cross_validate
from flwr_modulated.inference import Results

DELTA = 1e-5


def fit(epsilon: float | None, *, seed: int = 0) -> Results:
    """Log coinsurance rate on the other nine columns, released at ε or, with None, in the clear."""
    task = load_task("randhie_lncoins")
    centre, scale = task.features.mean(axis=0), task.features.std(axis=0)
    standardised = (task.features - centre) / scale
    guarantee = None if epsilon is None else Guarantee(epsilon, DELTA, Distance(1.0))
    noise_std, released = 0.0, standardised
    if guarantee is not None:
        mechanism = Mechanism(Modulation(), guarantee)
        noise_std = mechanism.noise_std
        released = mechanism.release(standardised, rng=np.random.default_rng(seed))
    return Results.from_rows(
        released,
        task.labels,
        noise_std=noise_std,
        guarantee=guarantee,
        feature_names=task.feature_names,
        label_name=task.label_name,
        fit_intercept=True,
        centre=centre,
        scale=scale,
    )


def side_by_side(results: dict[str, Results]) -> str:
    """Markdown table of coefficients with their standard errors in brackets."""
    names = next(iter(results.values())).names
    lines = ["| | " + " | ".join(results) + " |", "|---" * (len(results) + 1) + "|"]
    for j, name in enumerate(names):
        cells = [f"{r.params[j]:.4f} ({r.bse[j]:.4f})" for r in results.values()]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines.append(
        "| τ/λ_min | " + " | ".join(f"{r.identification_ratio:.2f}" for r in results.values()) + " |"
    )
    scores = [cross_validate(r.sample, fit_intercept=True) for r in results.values()]
    lines.append("| estimated R² | " + " | ".join(f"{s.r2:.3f} ± {s.r2_se:.3f}" for s in scores) + " |")
    return "\n".join(lines)


def main() -> None:
    """Print the summaries and the table; with ``--figures`` save the diagnostics too."""
    parser = argparse.ArgumentParser(prog="python -m simulations.example_inference", description=__doc__)
    parser.add_argument("--epsilons", type=float, nargs="+", default=[8.0, 2.0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--figures", type=Path, help="directory for the diagnostics figures")
    options = parser.parse_args()
    results = {"not private": fit(None)}
    for epsilon in options.epsilons:
        private = results[f"ε = {epsilon:g}"] = fit(epsilon, seed=options.seed)
        print(private.summary(), end="\n\n")
        if options.figures is not None:
            options.figures.mkdir(parents=True, exist_ok=True)
            plot_diagnostics(private).savefig(options.figures / f"randhie_{epsilon:g}.png", dpi=150)
    print(f"Private columns: δ = {DELTA:g}, relation {Distance(1.0)}, unit row, labels public.")
    print("Standard errors in brackets.\n")
    print(side_by_side(results))


if __name__ == "__main__":
    main()
