"""Figures of the documentation: ``python -m simulations.figures`` draws docs/figures/modulation.png."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from flwr_modulated import Distance, Guarantee, Mechanism, Modulation
from flwr_modulated.information import error_bound, mean_fisher_information, secret_phase_information
from flwr_modulated.planning import Study, Target, plan
from flwr_modulated.reconstruction import (
    invert,
    likelihood_known_phases,
    prior_least_squares,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from flwr_modulated._typing import FloatArray

FOLDER = Path(__file__).parent.parent / "docs" / "figures"
EPSILON, DELTA, FREQUENCY, NUM_FEATURES = 4.0, 1e-5, 1.0, 8
AMPLITUDES = np.linspace(0.0, 3.0, 13)
# Colours that stay apart in print and for colour-blind readers (Okabe and Ito).
SECRET, KNOWN = "#0072B2", "#D55E00"


def best_guess_known_phases(g: FloatArray, phases: FloatArray, amplitude: float, sigma: float) -> FloatArray:
    """Posterior mean of a standard normal feature along one direction, by quadrature; nothing beats it."""
    grid = np.linspace(-6, 6, 241)
    prior = np.exp(-0.5 * grid**2)
    guess = np.empty_like(g)
    for start in range(0, len(g), 5000):
        here = slice(start, start + 5000)
        gap = g[here] - grid - amplitude * np.cos(FREQUENCY * grid + phases[here])
        weight = prior * np.exp(-0.5 * (gap / sigma) ** 2)
        guess[here, 0] = weight @ grid / weight.sum(axis=1)
    return guess


def draw_errors(axes: Axes, rng: np.random.Generator) -> None:
    """Error along a modulated direction at a fixed noise: attacks as points, bounds as lines."""
    sigma = Mechanism(Modulation(), Guarantee(EPSILON, DELTA, Distance(1.0))).noise_std
    v, n = np.ones((1, 1)), 100_000
    names = ("secret", "known", "invert", "undo", "prior", "best")
    curves: dict[str, list[float]] = {name: [] for name in names}
    for amplitude in AMPLITUDES:
        mod = Modulation(0.0, float(amplitude), FREQUENCY, 1)
        x = rng.standard_normal((n, 1))
        phases = rng.uniform(0, 2 * np.pi, (n, 1))
        g = x + amplitude * np.cos(FREQUENCY * x + phases) + sigma * rng.standard_normal((n, 1))
        guesses = {
            "invert": invert(g, modulation=mod),
            "undo": likelihood_known_phases(g, v, phases, modulation=mod),
            "prior": prior_least_squares(
                g, v, modulation=mod, noise_std=sigma, prior_mean=[0.0], prior_covariance=[[1.0]]
            ),
            "best": best_guess_known_phases(g, phases, float(amplitude), sigma),
        }
        for name, guess in guesses.items():
            curves[name].append(float(np.sqrt(np.mean((guess - x) ** 2))))
        for name, information in (("secret", secret_phase_information), ("known", mean_fisher_information)):
            bound = error_bound(information(v, modulation=mod, noise_std=sigma))
            curves[name].append(float(np.sqrt(bound.trace)))
    hollow = {"markerfacecolor": "white", "linestyle": ""}
    axes.plot(AMPLITUDES, curves["undo"], "s", color=KNOWN, **hollow, label="maximum likelihood, known")
    axes.plot(AMPLITUDES, curves["invert"], "s", color=SECRET, **hollow, label="unbiased guess, secret")
    axes.plot(AMPLITUDES, curves["secret"], "-", color=SECRET, label="unbiased bound, secret")
    axes.plot(AMPLITUDES, curves["known"], "-", color=KNOWN, label="unbiased bound, known")
    axes.plot(AMPLITUDES, curves["prior"], "^", color=SECRET, label="guess with a prior, secret")
    axes.plot(AMPLITUDES, curves["best"], "^", color=KNOWN, label="guess with a prior, known")
    axes.set(xlabel="amplitude λ", ylabel="error along the direction (SD of a feature)", ylim=(0, None))
    axes.set_title(f"The same noise (σ = {sigma:.2f})", fontsize=10)
    axes.legend(frameon=False, fontsize=8, title="attack, phases", title_fontsize=8)
    for name in names:
        print(f"{name:7s}", " ".join(f"{value:.3f}" for value in curves[name]))


def draw_cost(axes: Axes) -> None:
    """Devices needed for the same accuracy at the same guarantee, relative to no modulation."""

    def devices(amplitude: float, sensitivity: str) -> int:
        study = Study(
            num_features=NUM_FEATURES,
            relation=Distance(1.0),
            delta=DELTA,
            epsilon=EPSILON,
            target=Target("standard_error", 0.05),
            modulation=Modulation(0.0, amplitude, FREQUENCY, 1),
            sensitivity=sensitivity,  # type: ignore[arg-type]
        )
        return plan(study).num_clients

    plain = devices(0.0, "conditional")
    for sensitivity, marker, colour, label in (
        ("conditional", "s", KNOWN, "guarantee holds if phases leak"),
        ("marginal", "o", SECRET, "guarantee relies on secret phases"),
    ):
        ratio = [devices(float(amplitude), sensitivity) / plain for amplitude in AMPLITUDES]
        print(f"{sensitivity:11s}", " ".join(f"{value:.2f}" for value in ratio))
        axes.plot(AMPLITUDES, ratio, marker=marker, markersize=4, color=colour, label=label)
    axes.set(xlabel="amplitude λ", ylabel="devices needed, relative to λ = 0", yscale="log")
    axes.set_yticks([1, 3, 10, 30, 100], ["1", "3", "10", "30", "100"])
    axes.set_title(f"The same guarantee (ε = {EPSILON:g}, δ = {DELTA:g}, distance(1))", fontsize=10)
    axes.legend(frameon=False, fontsize=8)


def main() -> None:
    """Draw the figure; print the numbers in it."""
    from matplotlib.figure import Figure

    FOLDER.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(9.6, 3.9), layout="constrained")
    left, right = figure.subplots(1, 2)
    draw_errors(left, np.random.default_rng(0))
    draw_cost(right)
    figure.savefig(FOLDER / "modulation.png", dpi=150)


if __name__ == "__main__":
    main()
