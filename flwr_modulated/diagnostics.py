"""One figure that shows what a private fit says and how far to trust it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .evaluation import Evaluation, cross_validate
from .inference import TRUSTED_RATIO, Results

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["plot_diagnostics"]

_BLUE, _ORANGE, _GREY = "#1f5a94", "#d1670b", "#8c8c8c"


def plot_diagnostics(results: Results, evaluation: Evaluation | None = None) -> Figure:
    """Draw coefficients with intervals, the spectrum of Σ̂ against its noise, and estimated R².

    Parameters
    ----------
    results : Results
        The fit.
    evaluation : Evaluation, optional
        Of the same sample; by default made here with the estimator of `results`.

    Returns
    -------
    matplotlib.figure.Figure
        With three axes; save it with ``figure.savefig(path)``. No global state of
        matplotlib is touched and no display is needed.

    Raises
    ------
    ImportError
        If matplotlib is not installed.

    Notes
    -----
    1. Left: the moment estimator with its 95 % intervals, and the shrunk coefficients
       for prediction, all per standardised feature so that they compare. Intervals that
       are not to be trusted are grey.
    2. Middle: eigenvalues of Σ̂. Those below τ are noise; intervals are trusted where the
       smallest is above τ/0.3.
    3. Right: R² of the predicting coefficients: nominal, on the rows that they were fitted
       to, and the cross-fitted estimate with two standard errors each way.
    """
    from matplotlib.figure import Figure

    if evaluation is None:
        evaluation = cross_validate(results.sample, results.estimator, fit_intercept=results.fit_intercept)
    figure = Figure(figsize=(11.0, 4.2), layout="constrained")
    left, middle, right = figure.subplots(1, 3, width_ratios=(5, 4, 2.6))
    _coefficients(left, results)
    _spectrum(middle, results)
    _prediction(right, evaluation)
    guarantee = "guarantee not stated" if results.guarantee is None else str(results.guarantee)
    figure.suptitle(
        f"{results.label_name}: {results.num_samples} released rows, {guarantee}", fontsize="medium"
    )
    return figure


def _coefficients(axes: Axes, results: Results) -> None:
    d = results.sample.num_features
    params, errors, shrunk = results.standardised()
    position = np.arange(d)[::-1]
    half = results.critical_value() * errors[:d]
    if not np.isfinite(half).all():
        half, color, label = np.zeros(d), _GREY, "moment estimator, without intervals"
    elif results.caveats:
        color, label = _GREY, "moment estimator, 95 % not to be trusted"
    else:
        color, label = _BLUE, "moment estimator, 95 %"
    axes.axvline(0.0, color="black", linewidth=0.8)
    axes.errorbar(params[:d], position, xerr=half, fmt="o", color=color, capsize=3, label=label)
    axes.plot(
        shrunk[:d], position, "D", color=_ORANGE, markerfacecolor="none", zorder=3, label="for prediction"
    )
    axes.set_yticks(position, results.names[:d])
    axes.set_xlabel("coefficient per standardised feature")
    axes.set_title("Coefficients")
    _legend_below(axes)


def _spectrum(axes: Axes, results: Results) -> None:
    tau = results.noise_level
    values = results.spectrum[::-1]
    position = np.arange(1, len(values) + 1)
    axes.axhspan(-tau, tau, color=_GREY, alpha=0.25, linewidth=0, label="noise τ")
    axes.axhline(
        tau / TRUSTED_RATIO,
        color=_GREY,
        linestyle="--",
        linewidth=1.0,
        label=f"trusted above τ/{TRUSTED_RATIO:g}",
    )
    axes.axhline(0.0, color="black", linewidth=0.8)
    axes.plot(position, values, "o", color=_BLUE, label="eigenvalues")
    axes.set_xticks(position)
    axes.set_xlabel("rank")
    ratio = results.identification_ratio
    axes.set_title(
        f"Spectrum, τ/λ_min = {ratio:.2g}" if ratio < np.inf else "Spectrum, not positive definite"
    )
    _legend_below(axes)


def _prediction(axes: Axes, evaluation: Evaluation) -> None:
    axes.plot([0], [evaluation.nominal_r2], "s", color=_GREY)
    axes.errorbar([1], [evaluation.r2], yerr=[2.0 * evaluation.r2_se], fmt="o", color=_BLUE, capsize=4)
    for x, value in ((0, evaluation.nominal_r2), (1, evaluation.r2)):
        axes.annotate(f"{value:.3f}", (x, value), xytext=(8, 4), textcoords="offset points", fontsize="small")
    axes.set_xlim(-0.6, 1.8)
    axes.set_xticks([0, 1], ["nominal", "estimated\n± 2 SE"])
    if axes.get_ylim()[1] > 1:
        axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_title("R² for prediction")


def _legend_below(axes: Axes) -> None:
    axes.legend(
        loc="upper center",
        bbox_to_anchor=(0.5, -0.15),
        fontsize="small",
        frameon=False,
        ncols=3,
        columnspacing=1.0,
        handletextpad=0.3,
    )
