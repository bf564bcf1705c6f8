"""Do intervals and tests hold their level? ``python -m simulations.coverage`` prints the tables.

Every federation is simulated from known coefficients, released, and handed to the package's own
:class:`Results`. Takes about seven minutes on one free core; ``--replications`` scales it.
"""

from __future__ import annotations

import argparse
import csv
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from flwr_modulated import Modulation, Moments, draw_directions
from flwr_modulated.inference import Results
from flwr_modulated.sample import Sample

FloatArray = NDArray[np.float64]
DesignName = Literal["gaussian", "t5", "discrete"]
UnitName = Literal["rows", "groups"]

BETA = np.array([1.0, -0.5, 0.25, 0.0, 0.3])
PLAIN = Modulation()
MODULATED = Modulation(alpha=0.2, amplitude=0.5, frequency=0.5, num_directions=2)
# Nodes of unequal size, 1 to 3, and the two noise levels of heteroscedastic federations, whose
# variances average to 1.
NODE_SIZES = np.tile([25, 75], 20)
NOISE_FACTORS = np.array([0.5, math.sqrt(1.75)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A simulated setting.

    Attributes
    ----------
    design : {"gaussian", "t5", "discrete"}
        Law of the features, all of unit variance.
    modulation : Modulation
        The public map.
    unit : {"rows", "groups"}
        Whether rows arrive, or the moments of 40 nodes.
    noise_std : float
        σ, in units of the features' standard deviation.
    num_rows : int
        K; with groups 2000.
    own_noise : bool
        Whether half the rows have σ/2 and half 1.32 σ.
    """

    design: DesignName
    modulation: Modulation = PLAIN
    unit: UnitName = "rows"
    noise_std: float
    num_rows: int = 2000
    own_noise: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A line of a table and of the CSV file.

    `ratio` is the median of the reported τ/λ_min(Σ̂), `value` what the table is about, with
    its standard error over replications; `worst` the coefficient furthest from the level,
    `warned` the share of federations with the warning.
    """

    table: str
    design: str
    modulation: str
    unit: str
    noise_std: float
    effect: float
    ratio: float
    replications: int
    value: float
    value_se: float
    worst: float
    warned: float


def draw_features(design: DesignName, num_rows: int, *, rng: np.random.Generator) -> FloatArray:
    """Features with mean 0 and variance 1: correlated normal, heavy-tailed, or discrete and skewed."""
    n, d = num_rows, len(BETA)
    if design == "gaussian":
        return math.sqrt(0.7) * rng.standard_normal((n, d)) + math.sqrt(0.3) * rng.standard_normal((n, 1))
    if design == "t5":
        return rng.standard_t(5, (n, d)) / math.sqrt(5 / 3)
    columns = [
        (rng.random(n) < 0.2) / 0.4 - 0.5,
        rng.poisson(1.0, n) - 1.0,
        rng.exponential(1.0, n) - 1.0,
        2.0 * (rng.random(n) < 0.5) - 1.0,
        (rng.random(n) < 0.1) / 0.3 - 1 / 3,
    ]
    return np.column_stack(columns)


def simulate(cell: Cell, *, beta: FloatArray = BETA, rng: np.random.Generator) -> Sample:
    """One federation: features, labels with unit noise, release."""
    n = cell.num_rows
    x = draw_features(cell.design, n, rng=rng)
    y = x @ beta + rng.standard_normal(n)
    directions = draw_directions(len(beta), cell.modulation.num_directions, rng=rng)
    std = np.full(n, cell.noise_std)
    if cell.own_noise:
        std *= rng.permutation(np.resize(NOISE_FACTORS, n))
    released = cell.modulation.apply(x, directions, rng=rng) + std[:, None] * rng.standard_normal(x.shape)
    if cell.unit == "rows":
        return Sample.from_rows(released, y, noise_std=std, modulation=cell.modulation, directions=directions)
    edges = np.cumsum(NODE_SIZES)[:-1]
    nodes = zip(np.split(released, edges), np.split(y, edges), np.split(std, edges), strict=True)
    moments = [Moments.from_rows(rows, labels, noise_std=noise) for rows, labels, noise in nodes]
    return Sample.from_moments(moments, modulation=cell.modulation, directions=directions)


def noise_for_ratio(
    design: DesignName, modulation: Modulation, ratio: float, *, num_pilots: int = 100, seed: int = 0
) -> float:
    """The σ at which the median *reported* τ/λ_min(Σ̂) of 2000 rows is `ratio`, by bisection.

    Noise makes the smallest eigenvalue of Σ̂ smaller on average, so this σ is below the one at
    which τ over the population's λ_min has the ratio.
    """

    def median_ratio(noise_std: float) -> float:
        rng = np.random.default_rng(seed)  # the same pilots at every σ
        cell = Cell(design=design, modulation=modulation, noise_std=noise_std)
        return float(
            np.median(
                [Results.from_sample(simulate(cell, rng=rng)).identification_ratio for _ in range(num_pilots)]
            )
        )

    low, high = 0.0, 10.0
    for _ in range(12):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if median_ratio(middle) < ratio else (low, middle)
    return 0.5 * (low + high)


def coverage(cell: Cell, *, table: str, replications: int, rng: np.random.Generator) -> Row:
    """Share of 95 % intervals that hold the true coefficient."""
    hits = np.empty((replications, len(BETA)))
    ratios, warned = np.empty(replications), np.empty(replications)
    for r in range(replications):
        results = Results.from_sample(simulate(cell, rng=rng))
        low, high = results.conf_int().T
        # No interval counts as one that says nothing, which holds every value.
        hits[r] = ~((low > BETA) | (high < BETA))
        ratios[r], warned[r] = results.identification_ratio, bool(results.caveats)
    shares = hits.mean(axis=0)
    # Coefficients of one federation depend on each other: the spread is that of federations.
    return _row(cell, table, hits.mean(axis=1), worst=_furthest(shares, 0.95), ratios=ratios, warned=warned)


def rejections(
    cell: Cell,
    *,
    table: str,
    replications: int,
    effect: float = 0.0,
    free: bool = False,
    rng: np.random.Generator,
) -> Row:
    """Share of federations whose 5 % score test rejects the true coefficients plus an effect.

    The hypothesis adds `effect` to the first coefficient; with `free` it fixes only that one.
    """
    hypothesis = BETA + effect * np.eye(len(BETA))[0]
    if free:
        hypothesis[1:] = np.nan
    rejected = np.empty(replications)
    ratios = np.empty(replications)
    for r in range(replications):
        results = Results.from_sample(simulate(cell, rng=rng))
        rejected[r] = results.score_test(hypothesis).pvalue < 0.05
        ratios[r] = results.identification_ratio
    return _row(cell, table, rejected, effect=effect, ratios=ratios)


def _row(
    cell: Cell,
    table: str,
    values: FloatArray,
    *,
    ratios: FloatArray,
    effect: float = 0.0,
    worst: float = math.nan,
    warned: FloatArray | None = None,
) -> Row:
    return Row(
        table=table,
        design=cell.design,
        modulation="plain" if cell.modulation.is_plain else "modulated",
        unit=cell.unit,
        noise_std=cell.noise_std,
        effect=effect,
        ratio=float(np.median(ratios)),
        replications=len(values),
        value=float(values.mean()),
        value_se=float(values.std(ddof=1) / math.sqrt(len(values))),
        worst=worst,
        warned=math.nan if warned is None else float(warned.mean()),
    )


def _furthest(values: FloatArray, level: float) -> float:
    return float(values[np.argmax(np.abs(values - level))])


def grid(replications: int, *, rng: np.random.Generator) -> Iterator[Row]:
    """Every cell: coverage, coverage with own noise, size and power of the score test."""
    units: tuple[UnitName, ...] = get_args(UnitName)
    designs: tuple[DesignName, ...] = get_args(DesignName)
    for design in designs:
        for modulation in (PLAIN, MODULATED):
            for ratio in (0.02, 0.1, 0.2, 0.4):
                std = noise_for_ratio(design, modulation, ratio)
                for unit in units:
                    cell = Cell(design=design, modulation=modulation, unit=unit, noise_std=std)
                    yield coverage(cell, table="coverage", replications=replications, rng=rng)
    for design in designs:
        std = noise_for_ratio(design, PLAIN, 0.1)
        for unit in units:
            cell = Cell(design=design, unit=unit, noise_std=std, own_noise=True)
            yield coverage(cell, table="coverage, own noise", replications=replications, rng=rng)
    for design in designs:
        for modulation in (PLAIN, MODULATED):
            for std in (0.0, 1.0, 3.0, 10.0):
                cell = Cell(design=design, modulation=modulation, noise_std=std)
                yield rejections(cell, table="score size", replications=replications, rng=rng)
    for std in (0.0, 1.0, 3.0, 10.0):
        cell = Cell(design="gaussian", unit="groups", noise_std=std)
        yield rejections(cell, table="score size", replications=replications, rng=rng)
    for std in (0.0, 1.0, 3.0, 10.0):
        cell = Cell(design="gaussian", noise_std=std)
        few = max(replications // 4, 2)
        yield rejections(cell, table="score size, one coefficient", replications=few, free=True, rng=rng)
    for std in (0.0, 1.0, 3.0, 10.0):
        for effect in (0.05, 0.1, 0.2, 0.5, 1.0, 2.0):
            cell = Cell(design="gaussian", noise_std=std)
            yield rejections(
                cell, table="score power", replications=max(replications // 4, 2), effect=effect, rng=rng
            )


def main() -> None:
    """Print the tables and write them to a CSV file."""
    parser = argparse.ArgumentParser(prog="python -m simulations.coverage", description=__doc__)
    parser.add_argument("--replications", type=int, default=2000, help="federations a cell")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("coverage.csv"))
    options = parser.parse_args()
    start = time.perf_counter()
    table = ""
    with options.output.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)])
        writer.writeheader()
        for row in grid(options.replications, rng=np.random.default_rng(options.seed)):
            writer.writerow(asdict(row))
            if row.table != table:
                table = row.table
                print(
                    f"\n{table}\n{'design':<10}{'map':<11}{'unit':<8}{'σ':>7}{'effect':>8}{'τ/λ_min':>9}",
                    end="",
                )
                print(f"{'value':>8}{'± SE':>8}{'worst':>8}{'warned':>8}")
            print(
                f"{row.design:<10}{row.modulation:<11}{row.unit:<8}{row.noise_std:>7.2f}{row.effect:>8.2f}"
                f"{row.ratio:>9.3f}{row.value:>8.4f}{row.value_se:>8.4f}{row.worst:>8.3f}{row.warned:>8.3f}",
                flush=True,
            )
    print(
        f"\n{options.replications} federations a cell, {time.perf_counter() - start:.0f} s, {options.output}"
    )


if __name__ == "__main__":
    main()
