"""Intervals and score tests hold their level: a reduced ``python -m simulations.coverage``."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from flwr_modulated import sample as sample_module
from simulations.coverage import MODULATED, Cell, coverage, rejections

pytestmark = pytest.mark.statistical

# σ at which the reported τ/λ_min is about 0.1, from simulations.coverage.noise_for_ratio.
CELLS = [
    Cell(design="t5", modulation=MODULATED, noise_std=0.76),
    Cell(design="discrete", unit="groups", noise_std=0.97),
    Cell(design="gaussian", noise_std=0.76, own_noise=True),
]


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: f"{cell.design}-{cell.unit}")
def test_intervals_cover(cell: Cell, rng: np.random.Generator) -> None:
    """Coverage of 95 % intervals at noise ratios up to 0.1, two-sided.

    Statistic: share of n = 2000 × 5 intervals that hold the truth; SE 0.0022 (simulated, over
    federations). Accepts [0.935, 0.965]; the full grid puts these cells in [0.948, 0.953], 5 SE
    inside: false alarm below 1e-6 each. Catches what the next test breaks.
    """
    row = coverage(cell, table="", replications=2000, rng=rng)
    assert 0.05 < row.ratio < 0.12  # weights make the most of rows with noise of their own
    assert 0.935 <= row.value <= 0.965
    assert row.warned == 0


@pytest.mark.parametrize("mutant", ["without the modulation's term", "noise variance off by 10 %"])
def test_mutants_are_caught(monkeypatch: pytest.MonkeyPatch, mutant: str, rng: np.random.Generator) -> None:
    """A missing λ² and a σ² 10 % too small bring coverage below the accepted band by 5 SE."""
    if mutant.startswith("without"):
        monkeypatch.setattr(
            sample_module,
            "modulation_offset",
            lambda modulation, directions, *, num_features: np.zeros((num_features,) * 2),
        )
    else:
        build = sample_module.Rows
        monkeypatch.setattr(
            sample_module,
            "Rows",
            lambda **parts: replace(build(**parts), variances=0.9 * parts["variances"]),
        )
    row = coverage(CELLS[0], table="", replications=1000, rng=rng)
    assert row.value < 0.935 - 5 * row.value_se


def test_above_the_trusted_ratio_there_is_a_warning(rng: np.random.Generator) -> None:
    """At noise ratio 0.4 more than nine federations in ten warn.

    Statistic: share of n = 300 federations with the warning, 0.98 in the full grid; SE 0.008.
    Below 0.9 is 10 SE away: false alarm far below 1e-6. Catches a warning tied to another ratio.
    """
    row = coverage(Cell(design="t5", noise_std=1.97), table="", replications=300, rng=rng)
    assert row.warned > 0.9


def test_score_test_holds_its_size(rng: np.random.Generator) -> None:
    """Rejections of the truth at nominal 5 %, with noise ten times the features.

    Statistic: share of n = 2000 federations that reject; SE √(0.05·0.95/n) = 0.0049. Accepts
    [0.035, 0.065] ± 4.9 SE: false alarm 1e-6. Catches scores debiased with a wrong σ, which at
    σ = 10 reject always.
    """
    cell = Cell(design="discrete", modulation=MODULATED, noise_std=10.0)
    row = rejections(cell, table="", replications=2000, rng=rng)
    slack = 4.9 * math.sqrt(0.05 * 0.95 / 2000)
    assert 0.035 - slack <= row.value <= 0.065 + slack


def test_score_test_has_power(rng: np.random.Generator) -> None:
    """It tells a coefficient 0.5 off at σ = 1, which the full grid rejects always.

    Statistic: share of n = 200 federations that reject; above 0.9 catches a test that has lost
    its power, such as one whose scores are centred before they are summed.
    """
    cell = Cell(design="gaussian", noise_std=1.0)
    assert rejections(cell, table="", replications=200, effect=0.5, rng=rng).value > 0.9


def test_score_test_of_one_coefficient(rng: np.random.Generator) -> None:
    """With the others free, where they are identified, it holds its size too.

    Statistic: share of n = 600 federations that reject; SE √(0.05·0.95/n) = 0.0089. Accepts
    0.05 ± 4.9 SE = [0.006, 0.094]: false alarm 1e-6. Catches χ² with as many degrees of freedom
    as there are coefficients, which would reject once in a thousand.
    """
    cell = Cell(design="gaussian", noise_std=0.6, num_rows=500)
    row = rejections(cell, table="", replications=600, free=True, rng=rng)
    assert row.value == pytest.approx(0.05, abs=4.9 * math.sqrt(0.05 * 0.95 / 600))
