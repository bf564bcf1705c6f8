"""Exact expectations without sampling: points that stand in for phases and noise.

The mechanism is a polynomial in the noise and in the sines and cosines of the phases. Such an
expectation is a finite average:

- ±σ in every coordinate matches the first three moments of N(0, σ²): exact for the second moments of
  a release and all that is linear in them;
- the three-point Gauss-Hermite rule matches its first five: exact for their variances;
- N equally spaced phases integrate every cos(kφ), |k| < N: three are enough for second moments, five
  for their variances.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from flwr_modulated import Mechanism

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class Design:
    """Points and weights per noise coordinate (in units of σ) and the number of phases."""

    points: tuple[float, ...]
    weights: tuple[float, ...]
    num_phases: int


SECOND_MOMENTS = Design((-1.0, 1.0), (0.5, 0.5), 3)
VARIANCES = Design((-np.sqrt(3.0), 0.0, np.sqrt(3.0)), (1 / 6, 2 / 3, 1 / 6), 5)


class Scripted(np.random.Generator):
    """A generator whose next phases (in turns) and noise (in units of σ) are given, row after row."""

    def __init__(self, turns: FloatArray, normals: FloatArray) -> None:
        super().__init__(np.random.PCG64(0))
        self._turns, self._normals = turns, normals

    def random(self, size):  # type: ignore[no-untyped-def,override]
        taken, self._turns = self._turns[: size[0]], self._turns[size[0] :]
        assert taken.shape == tuple(size)
        return taken.copy()

    def standard_normal(self, size):  # type: ignore[no-untyped-def,override]
        taken, self._normals = self._normals[: size[0]], self._normals[size[0] :]
        assert taken.shape == tuple(size)
        return taken.copy()


def all_releases(
    mechanism: Mechanism, row: FloatArray, directions: FloatArray, design: Design
) -> tuple[FloatArray, FloatArray]:
    """Every release of one row at the points of the design, and each one's weight."""
    d, m = directions.shape
    noise = np.array(list(product(design.points, repeat=d)))
    weights = np.prod(np.array(list(product(design.weights, repeat=d))), axis=1)
    # Off the symmetric positions, so that nothing vanishes by accident.
    turns = np.array(list(product(0.1234 + np.arange(design.num_phases) / design.num_phases, repeat=m)))
    turns %= 1.0
    pairs = [np.repeat(noise, len(turns), axis=0), np.tile(turns, (len(noise), 1))]
    rows = np.tile(row, (len(pairs[0]), 1))
    released = mechanism.release(rows, directions, rng=Scripted(pairs[1], pairs[0]))
    return released, np.repeat(weights, len(turns)) / len(turns)
