"""The score statistic of least squares on released rows, and its minimum under linear constraints.

It needs no inverse of the debiased second moment, so it is valid however strong the noise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy import linalg, optimize, stats

from ._typing import FloatArray
from .sample import Sample

__all__ = ["HypothesisTest", "ScoreStatistic"]


@dataclass(frozen=True, slots=True)
class HypothesisTest:
    """Outcome of a test.

    Attributes
    ----------
    statistic : float
        Value of the test statistic.
    pvalue : float
        Chance of a larger one under the hypothesis.
    distribution : str
        What the statistic is compared with, such as ``"chi2(3)"`` or ``"F(3, 37)"``.
    """

    statistic: float
    pvalue: float
    distribution: str

    def __str__(self) -> str:
        return f"{self.distribution} = {self.statistic:.4g}, p = {self.pvalue:.4g}"


@dataclass(frozen=True, slots=True, eq=False)
class ScoreStatistic:
    """Q(v) = sᵀ(Σ_g ψ_g ψ_gᵀ)⁻¹s, s = Σ_g ψ_g, with ψ_g = (W_g v) on the estimating equations.

    Parameters
    ----------
    sample : Sample
        What was released.
    num_equations : int
        p: the d features, and the constant too where an intercept is fitted.

    Notes
    -----
    A vector v = (θ, −1) over p coefficients and the label stands for the coefficients
    θ. Q depends on v only up to a factor, so that v with last entry 0 is "infinitely
    large coefficients" and minimisation has no trouble at infinity.

    The sum of squares is not centred at the mean score: the hypothesis says that the
    mean is zero. Centring would give Q/(1 − Q/G), a monotone function of Q that ranks
    samples alike but rejects more often than stated: simulated sizes at nominal 5 %,
    500 rows, 5 features, noise 10 times the features: 0.0645–0.072
    centred, 0.0615–0.0655 not.
    """

    sample: Sample
    num_equations: int

    def scores(self, vector: FloatArray) -> FloatArray:
        """ψ_g of every unit at v, shape (num_units, p)."""
        return self._products(vector)[:, :-1]

    def value(self, vector: FloatArray) -> float:
        """Q at v."""
        return self.value_and_gradient(vector)[0]

    def value_and_gradient(self, vector: FloatArray) -> tuple[float, FloatArray]:
        """Q at v and its gradient of shape (p + 1,)."""
        psi = self.scores(vector)
        total = psi.sum(axis=0)
        # A pseudo-inverse: scores of fewer units than equations are linearly dependent.
        weights = linalg.lstsq(psi.T @ psi, total)[0]
        # dQ = 2 wᵀds − wᵀ(dS)w with both terms from W_g w, as every W_g is symmetric.
        pulled = self._products(np.append(weights, 0.0))
        return float(total @ weights), 2.0 * ((1.0 - psi @ weights) @ pulled)

    def minimum(self, constraints: FloatArray, start: FloatArray) -> float:
        """Smallest Q(v) over all v with ``constraints @ v = 0``.

        Parameters
        ----------
        constraints : ndarray of shape (r, p + 1)
            Linearly independent rows.
        start : ndarray of shape (p + 1,)
            A good guess of v; it need not satisfy the constraints.

        Returns
        -------
        float
            The smallest value that local searches from several starting points find.
        """
        scale = self._scale()
        basis = scale[:, None] * linalg.null_space(constraints * scale)
        if basis.shape[1] == 1:
            return self.value(basis[:, 0])

        def objective(free: FloatArray) -> tuple[float, FloatArray]:
            value, slope = self.value_and_gradient(basis @ free)
            return value, basis.T @ slope

        guesses = [self._linear_guess(basis, at) for at in (start, np.eye(len(scale))[-1])]
        return min(_descend(objective, guess) for guess in guesses)

    def test(self, statistic: float, num_restrictions: int) -> HypothesisTest:
        """Compare Q with χ²_r, or for grouped samples its F equivalent with F."""
        r = num_restrictions
        if not self.sample.grouped:
            return HypothesisTest(statistic, float(stats.chi2.sf(statistic, r)), f"chi2({r})")
        g, spare = self._degrees_of_freedom()
        # Q/G of G Gaussian totals is Beta(p/2, (G−p)/2): Hotelling's T² in another form.
        f = spare / r * statistic / max(g - statistic, np.finfo(np.float64).tiny)
        return HypothesisTest(f, float(stats.f.sf(f, r, spare)), f"F({r}, {spare:.4g})")

    def interval(
        self,
        constraints: Callable[[float], FloatArray],
        *,
        alpha: float,
        start: FloatArray,
        centre: float,
        width: float,
    ) -> tuple[float, float]:
        """Smallest interval around the values b whose minimum of Q is below its critical value.

        Parameters
        ----------
        constraints : callable
            From b to the constraints that fix one coefficient to it.
        alpha : float
            One minus the level.
        start : ndarray of shape (p + 1,)
            The v at which Q is zero.
        centre, width : float
            Where b is at `start`, and the scale on which to look for the ends.

        Returns
        -------
        low, high : float
        """
        critical = self.critical_value(alpha, 1)
        # As b grows, its constraint becomes "the last entry of v is zero".
        if self.minimum(np.eye(len(start))[-1:], start) <= critical:
            return -np.inf, np.inf
        if not np.isfinite(width) or width == 0:
            width = 1e-3 * max(abs(centre), 1.0)

        def excess(value: float) -> float:
            return self.minimum(constraints(value), start) - critical

        return _crossing(excess, centre, -width), _crossing(excess, centre, width)

    def critical_value(self, alpha: float, num_restrictions: int) -> float:
        """The Q whose p-value is `alpha`."""
        if not self.sample.grouped:
            return float(stats.chi2.isf(alpha, num_restrictions))
        g, spare = self._degrees_of_freedom()
        ratio = stats.f.isf(alpha, num_restrictions, spare) * num_restrictions / spare
        return float(g * ratio / (1.0 + ratio))

    def _degrees_of_freedom(self) -> tuple[float, float]:
        g = self.sample.effective_units
        return g, g - self.num_equations

    def _products(self, vector: FloatArray) -> FloatArray:
        products = self.sample.products(self._embed(vector))
        columns = np.append(np.arange(self.num_equations), products.shape[1] - 1)
        return products[:, columns]

    def _embed(self, vector: FloatArray) -> FloatArray:
        full = np.zeros(self.sample.num_features + 2)
        full[: self.num_equations] = vector[:-1]
        full[-1] = vector[-1]
        return full

    def _scale(self) -> FloatArray:
        """Typical size of each entry of v, so that searches move in comparable units."""
        unit = np.eye(self.num_equations + 1)
        sizes = np.array([np.sqrt(np.mean(self.scores(axis) ** 2)) for axis in unit])
        return np.asarray(1.0 / np.where(sizes > 0, sizes, 1.0))

    def _linear_guess(self, basis: FloatArray, at: FloatArray) -> FloatArray:
        """Minimiser with the scores' sum of squares held at v = `at`: an eigenvector."""
        psi = self.scores(at)
        totals = np.column_stack([self.scores(column).sum(axis=0) for column in basis.T])
        weighted = totals.T @ linalg.lstsq(psi.T @ psi, totals)[0]
        return np.asarray(linalg.eigh(0.5 * (weighted + weighted.T))[1][:, 0])


def _descend(objective: Callable[[FloatArray], tuple[float, FloatArray]], start: FloatArray) -> float:
    found = optimize.minimize(objective, start, jac=True, method="BFGS", options={"gtol": 1e-7})
    return float(found.fun)


def _crossing(excess: Callable[[float], float], inside: float, step: float) -> float:
    """First sign change of `excess` met when walking from `inside` with doubling steps."""
    for _ in range(100):
        outside = inside + step
        if excess(outside) > 0:
            return float(optimize.brentq(excess, inside, outside, xtol=1e-6 * abs(step), rtol=1e-10))
        inside, step = outside, 2.0 * step
    return float(np.copysign(np.inf, step))
