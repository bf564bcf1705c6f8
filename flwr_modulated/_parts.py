"""How a sample stores its rows and nodes: one symmetric matrix W each, of u = (x, 1, y)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ._typing import FloatArray
from .moments import DebiasedMoments

Ids: TypeAlias = NDArray[Any]

# Columns of the tallies of a part.
ROWS, WEIGHT, NOISE, NOISE_FOURTH, MODULATION = range(5)


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """W_i = w_i·(u_i u_iᵀ − offset − v_i·diag(noise)), stored in O(n q)."""

    vectors: FloatArray  # (n, q)
    offset: FloatArray  # (q, q)
    noise: FloatArray  # (q,): how noise of unit variance enters the diagonal
    variances: FloatArray  # (n,): σ_i²/(1−α)²
    weights: FloatArray  # (n,): w_i
    tallies: FloatArray  # (n, 5): see tally_up
    ids: Ids | None

    def products(self, vector: FloatArray) -> FloatArray:
        """W_i v of every row, shape (n, q)."""
        result = self.vectors * (self.vectors @ vector)[:, None]
        result -= self.offset @ vector
        result -= self.variances[:, None] * (self.noise * vector)
        result *= self.weights[:, None]
        return result

    def total(self, keep: NDArray[np.bool_]) -> FloatArray:
        """Sum of W over the rows to keep."""
        w, chosen = self.weights[keep], self.vectors[keep]
        gram = (chosen * w[:, None]).T @ chosen - w.sum() * self.offset
        return np.asarray(gram - np.diag((w @ self.variances[keep]) * self.noise))

    def reweighted(self, factors: FloatArray) -> Rows:
        """Multiply weights by factors of shape (n,)."""
        return replace(self, weights=self.weights * factors, tallies=_reweighted(self.tallies, factors))


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """W_g of whole nodes."""

    matrices: FloatArray  # (G, q, q)
    tallies: FloatArray  # (G, 5): see tally_up
    ids: Ids | None

    def products(self, vector: FloatArray) -> FloatArray:
        """W_g v of every node, shape (G, q)."""
        return np.asarray(self.matrices @ vector)

    def total(self, keep: NDArray[np.bool_]) -> FloatArray:
        """Sum of W over the nodes to keep."""
        return np.asarray(self.matrices[keep].sum(axis=0))

    def reweighted(self, factors: FloatArray) -> Groups:
        """Multiply weights by factors of shape (G,)."""
        return replace(
            self,
            matrices=factors[:, None, None] * self.matrices,
            tallies=_reweighted(self.tallies, factors),
        )


def as_matrix(part: DebiasedMoments) -> FloatArray:
    """Mean of W over a node's rows, from its debiased moments."""
    d = part.num_features
    matrix = np.empty((d + 2, d + 2))
    matrix[:d, :d] = part.second_moment
    matrix[:d, d] = matrix[d, :d] = part.feature_mean
    matrix[:d, d + 1] = matrix[d + 1, :d] = part.cross_moment
    matrix[d, d] = 1.0
    matrix[d, d + 1] = matrix[d + 1, d] = part.label_mean
    matrix[d + 1, d + 1] = part.label_square
    return matrix


def tally_up(
    rows: FloatArray, noise: FloatArray, noise_fourth: FloatArray, modulation: FloatArray | float
) -> FloatArray:
    """Of each entry, summed over its rows: 1, w, w²s², w²s⁴ and wλ²/(1−α)², at weight w = 1."""
    columns = [rows, rows, rows * noise, rows * noise_fourth, rows * modulation]
    return np.column_stack(columns)


def _reweighted(tallies: FloatArray, factors: FloatArray) -> FloatArray:
    powers = np.array([0, 1, 2, 2, 1])
    return np.asarray(tallies * factors[:, None] ** powers)
