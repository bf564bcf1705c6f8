"""What a study assumes about its rows before it has any."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import ArrayLike

from ._typing import FloatArray
from ._validate import check_int, check_matrix, check_real, check_vector
from .errors import InvalidDataError
from .privacy import Relation, clip_rows

__all__ = ["Population"]

# Rows behind the moments of clipped rows: their own sampling error stays near 0.4 %.
_CLIP_ROWS = 2**16


@dataclass(frozen=True, slots=True, eq=False)
class Population:
    """Second moments of rows x and errors e = y − xᵀβ, with E xe = 0.

    Attributes
    ----------
    second_moment : ndarray of shape (d, d)
        Σ = E xxᵀ, positive definite, in squared feature units.
    beta : ndarray of shape (d,)
        Least-squares coefficients β.
    residual_variance : float
        E e² ≥ 0, in squared label units.
    score_moment : ndarray of shape (d, d)
        E e²xxᵀ, which is ``residual_variance * second_moment`` for e independent of x.

    Examples
    --------
    >>> population = Population.standardised(4, r2=0.5, correlation=0.3)
    >>> round(population.label_square, 6), round(population.r2, 6)
    (1.0, 0.5)
    """

    second_moment: FloatArray
    beta: FloatArray
    residual_variance: float
    score_moment: FloatArray

    @classmethod
    def standardised(cls, num_features: int, *, r2: float = 0.5, correlation: float = 0.0) -> Self:
        """Features and label of variance 1, all pairs of features equally correlated.

        Parameters
        ----------
        num_features : int
            d ≥ 1.
        r2 : float, default 0.5
            Share of the label's variance that the features explain, in (0, 1).
        correlation : float, default 0.0
            Correlation of every pair of features, in [0, 1).

        Raises
        ------
        InvalidParameterError
            If an argument is out of range.

        Notes
        -----
        Every principal component explains the same share of the label: neither the easy case
        (all signal in what the features have in common) nor the hard one (none of it).
        """
        d = check_int("num_features", num_features, low=1)
        r2 = check_real("r2", r2, low=0, high=1, low_open=True, high_open=True)
        rho = check_real("correlation", correlation, low=0, high=1, high_open=True)
        common = np.full(d, 1 / np.sqrt(d))
        contrast = np.where(np.arange(d) % 2 == 0, 1.0, -1.0)
        contrast -= contrast.mean()
        contrast /= max(float(np.linalg.norm(contrast)), 1.0)
        signal = common / np.sqrt(d) + np.sqrt(1 - 1 / d) * contrast
        along, across = np.sqrt(1 + (d - 1) * rho), np.sqrt(1 - rho)
        beta = np.sqrt(r2) * (signal / across + (1 / along - 1 / across) * (common @ signal) * common)
        sigma = (1 - rho) * np.eye(d) + rho
        return cls(sigma, beta, 1 - r2, (1 - r2) * sigma)

    @classmethod
    def from_rows(cls, features: ArrayLike, labels: ArrayLike) -> Self:
        """The moments of pilot or public rows, taken as the population.

        Parameters
        ----------
        features : array_like of shape (n, d)
            Rows of full column rank, in the units the study will release.
        labels : array_like of shape (n,)
            Their labels.

        Raises
        ------
        InvalidDataError
            If the arrays do not fit together or a column depends on the others.
        """
        x = check_matrix("features", features)
        y = check_vector("labels", labels, length=x.shape[0])
        n, d = x.shape
        sigma = x.T @ x / n
        if n < d or np.linalg.cond(sigma) > 1 / np.finfo(np.float64).eps:
            raise InvalidDataError("features must have linearly independent columns; drop the redundant ones")
        beta = np.linalg.solve(sigma, x.T @ y / n)
        e = y - x @ beta
        return cls(sigma, beta, float(e @ e) / n, (x * e[:, None] ** 2).T @ x / n)

    @property
    def num_features(self) -> int:
        """Number of features d."""
        return int(self.beta.shape[0])

    @property
    def label_square(self) -> float:
        """E y², in squared label units."""
        return float(self.beta @ self.second_moment @ self.beta) + self.residual_variance

    @property
    def r2(self) -> float:
        """1 − E e² / E y², what no linear rule exceeds on this population."""
        return 1 - self.residual_variance / self.label_square

    def r2_loss(self, beta: FloatArray) -> FloatArray:
        """How much R² coefficients lose against the population's own.

        Parameters
        ----------
        beta : ndarray of shape (..., d)
            Coefficients, one set a row.

        Returns
        -------
        ndarray of shape (...)
            (b − β)ᵀΣ(b − β) / E y² ≥ 0.
        """
        error = beta - self.beta
        return np.asarray(np.sum((error @ self.second_moment) * error, axis=-1) / self.label_square)

    def clipped(self, relation: Relation) -> Population:
        """The population of clipped rows, which is what a clipping relation releases.

        Gaussian rows and errors with these moments are clipped as a client would clip them,
        always the same ones; coefficients are those of the clipped rows.

        Parameters
        ----------
        relation : Distance, Replace or ReplaceRecord
            Gives the clip radius and whether the label is clipped along.

        Returns
        -------
        Population
            Unchanged where the relation does not clip.
        """
        if relation.clip_radius is None:
            return self
        d = self.num_features
        normals = np.random.default_rng(0).standard_normal((_CLIP_ROWS, d + 1))
        x = normals[:, :d] @ np.linalg.cholesky(self.second_moment).T
        y = x @ self.beta + np.sqrt(self.residual_variance) * normals[:, d]
        records = clip_rows(relation.join(x, y), relation.clip_radius)
        if relation.hides_labels:
            y = records[:, d] * getattr(relation, "label_scale", 1.0)
        return Population.from_rows(records[:, :d], y)
