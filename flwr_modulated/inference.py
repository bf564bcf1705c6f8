"""What a private fit can conclude: standard errors, tests and intervals from what was released.

All of it is post-processing of released rows or moments: it costs no privacy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self, TypedDict, Unpack

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

from ._columns import Units, coefficient_names
from ._least_squares import fit_least_squares, is_definite
from ._summary import Summary, render_summary
from ._typing import FloatArray
from ._validate import check_matrix, check_real, check_vector
from .errors import InvalidDataError, InvalidParameterError
from .estimators import Auto, Estimator, with_intercept
from .modulation import Modulation
from .moments import Moments
from .privacy import Guarantee, ReplaceRecord
from .sample import Group, Sample
from .score import HypothesisTest, ScoreStatistic

__all__ = ["HypothesisTest", "Results"]

# Above this τ/λ_min(Σ̂), Wald intervals drift from their level (see simulations/coverage.py).
TRUSTED_RATIO = 0.3


class ReportOptions(TypedDict, total=False):
    """Keywords of :meth:`Results.from_sample`."""

    guarantee: Guarantee | None
    feature_names: Sequence[str] | None
    label_name: str
    fit_intercept: bool
    centre: ArrayLike
    scale: ArrayLike
    label_centre: float
    label_scale: float
    estimator: Estimator | None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Results:
    """A private least-squares fit in the vocabulary of statsmodels, in the user's units.

    Build it with :meth:`from_rows`, :meth:`from_moments` or :meth:`from_sample`.

    Attributes
    ----------
    names : tuple of str
        One a coefficient; the intercept, where fitted, comes last as ``"const"``.
    params : ndarray of shape (p,)
        The unregularised moment estimator Σ̂⁻¹ẑ: consistent, and what standard errors,
        tests and intervals are about.
    shrunk_params : ndarray of shape (p,)
        Coefficients of `estimator`, default :class:`Auto`: better for prediction.
    label_name : str
        Name of the label.
    guarantee : Guarantee or None
        What the release guarantees, if it was given.
    sample : Sample
        What was released, weighted where its noise differs.
    estimator : Estimator
        What made `shrunk_params`.
    fit_intercept : bool
        Whether an intercept was fitted.
    noise_scale : float
        s = σ/(1−α), in units of the standardised features.
    noise_level : float
        τ, the noise scale of Σ̂ (Eq. 4), in squared units of the standardised features.
    spectrum : ndarray of shape (d,)
        Eigenvalues of Σ̂ in ascending order, about the mean row where an intercept is
        fitted; same units as τ.

    Notes
    -----
    With ψ_g the sum over a unit's rows of the estimating function

    .. math:: ψ_i(β) = (1-α)^{-2}[g̃g̃ᵀ - (λ²/2m)VVᵀ - σ_i²I]β - (1-α)^{-1} y g̃

    the covariance of the coefficients is Σ̂⁻¹ (Σ_g ψ_gψ_gᵀ) Σ̂⁻¹ / K², the sandwich over
    released rows, or over nodes where only moments arrive. Rows are compared with the
    normal and χ² distributions; without noise they give exactly ordinary least squares
    with HC0 errors. Over G nodes the sum of squares is multiplied by G/(G−1) and
    intervals use t with G−1 degrees of freedom (F for several restrictions), G being
    the effective number of nodes, (Σ n_g)²/Σ n_g². Rows of different noise are weighted
    by :meth:`Sample.weighted`, as everything that is linear in ψ allows.

    These Wald intervals hold their level while τ/λ_min(Σ̂) is below 0.3. Above, and
    wherever Σ̂ is not positive definite, use :meth:`score_test` and
    :meth:`score_interval`, which hold at every noise level.
    """

    names: tuple[str, ...]
    params: FloatArray
    shrunk_params: FloatArray
    label_name: str
    guarantee: Guarantee | None
    sample: Sample
    estimator: Estimator
    fit_intercept: bool
    noise_scale: float
    noise_level: float
    spectrum: FloatArray
    _covariance: FloatArray = field(repr=False)
    _solution: FloatArray = field(repr=False)  # in the units of the released rows
    _units: Units = field(repr=False)

    @classmethod
    def from_sample(
        cls,
        sample: Sample,
        *,
        guarantee: Guarantee | None = None,
        feature_names: Sequence[str] | None = None,
        label_name: str = "y",
        fit_intercept: bool = False,
        centre: ArrayLike = 0.0,
        scale: ArrayLike = 1.0,
        label_centre: float = 0.0,
        label_scale: float = 1.0,
        estimator: Estimator | None = None,
    ) -> Self:
        """Fit and prepare inference.

        Parameters
        ----------
        sample : Sample
            What was released.
        guarantee : Guarantee, optional
            Printed by the summary.
        feature_names : sequence of str of length d, optional
            Default x1 … xd.
        label_name : str, default "y"
            Name of the label.
        fit_intercept : bool, default False
            Whether to fit an intercept, from the means of the same release.
        centre, scale : float or array_like of shape (d,), default 0 and 1
            The public constants by which devices standardised: x = (original − centre)
            / scale. Coefficients are reported for the original.
        label_centre, label_scale : float, default 0 and 1
            The same of the label.
        estimator : Estimator, optional
            What makes `shrunk_params`; default :class:`Auto`.

        Returns
        -------
        Results

        Raises
        ------
        InvalidDataError
            If names, centre or scale do not have d entries.
        InvalidParameterError
            If a scale is not positive.
        """
        sample = sample.weighted()
        d = sample.num_features
        units = Units.build(d, fit_intercept, centre, scale, label_centre, label_scale)
        names = coefficient_names(feature_names, d, fit_intercept)
        chosen: Estimator = Auto() if estimator is None else estimator
        fit = fit_least_squares(sample, fit_intercept)
        if fit_intercept:
            slopes, intercept = with_intercept(chosen, fit.moments)
            shrunk = np.append(slopes, intercept)
        else:
            shrunk = chosen.estimate(fit.moments)
        return cls(
            names=names,
            params=units.to_original(fit.solution),
            shrunk_params=units.to_original(shrunk),
            label_name=label_name,
            guarantee=guarantee,
            sample=sample,
            estimator=chosen,
            fit_intercept=fit_intercept,
            noise_scale=fit.moments.noise_scale,
            noise_level=fit.noise_level,
            spectrum=fit.spectrum,
            _covariance=units.matrix @ fit.covariance @ units.matrix.T,
            _solution=fit.solution,
            _units=units,
        )

    @classmethod
    def from_rows(
        cls,
        released: ArrayLike,
        labels: ArrayLike | None,
        *,
        noise_std: ArrayLike,
        modulation: Modulation | None = None,
        directions: ArrayLike | None = None,
        units: Sequence[str | int] | None = None,
        joint_label_scale: float | None = None,
        **report: Unpack[ReportOptions],
    ) -> Self:
        """Fit to released rows; see :meth:`Sample.from_rows` and :meth:`from_sample`.

        A guarantee with ``ReplaceRecord`` says by itself that rows are joint records.

        Examples
        --------
        >>> import numpy as np
        >>> from flwr_modulated import Distance, Guarantee, Mechanism, Modulation
        >>> rng = np.random.default_rng(1)
        >>> x = rng.standard_normal((5000, 2))
        >>> y = x @ [1.0, 0.0] + rng.standard_normal(5000)
        >>> mechanism = Mechanism(Modulation(), Guarantee(4.0, 1e-5, Distance(1.0)))
        >>> released = mechanism.release(x, rng=rng)
        >>> results = Results.from_rows(released, y, noise_std=mechanism.noise_std)
        >>> low, high = results.conf_int().T
        >>> bool(((low < [1.0, 0.0]) & (high > [1.0, 0.0])).all())
        True
        """
        sample = Sample.from_rows(
            released,
            labels,
            noise_std=noise_std,
            modulation=modulation,
            directions=directions,
            joint_label_scale=_joint_scale(joint_label_scale, report.get("guarantee")),
            units=units,
        )
        return cls.from_sample(sample, **report)

    @classmethod
    def from_moments(
        cls,
        groups: Iterable[Moments | Group],
        *,
        modulation: Modulation | None = None,
        directions: ArrayLike | None = None,
        joint_label_scale: float | None = None,
        **report: Unpack[ReportOptions],
    ) -> Self:
        """Fit to the moments of nodes; see :meth:`Sample.from_moments` and :meth:`from_sample`.

        A guarantee with ``ReplaceRecord`` says by itself that rows are joint records.
        """
        sample = Sample.from_moments(
            groups,
            modulation=modulation,
            directions=directions,
            joint_label_scale=_joint_scale(joint_label_scale, report.get("guarantee")),
        )
        return cls.from_sample(sample, **report)

    @property
    def num_samples(self) -> int:
        """Number of released rows K."""
        return self.sample.num_samples

    @property
    def df_units(self) -> float:
        """Degrees of freedom of t: effective nodes minus one, or infinity for rows."""
        return self.sample.effective_units - 1.0 if self.sample.grouped else np.inf

    @property
    def identification_ratio(self) -> float:
        """τ/λ_min(Σ̂); infinity where Σ̂ is not positive definite."""
        return self.noise_level / float(self.spectrum[0]) if is_definite(self.spectrum) else np.inf

    @property
    def caveats(self) -> tuple[str, ...]:
        """Why standard errors and intervals are not to be trusted; empty if they are."""
        instead = "use score_test and score_interval, which hold at every noise level"
        found = []
        if self.identification_ratio == np.inf:
            found.append(
                "the debiased second moment is not positive definite: the coefficients are not "
                f"identified and there are no standard errors; {instead}, or release more rows"
            )
        elif self.identification_ratio > TRUSTED_RATIO:
            found.append(
                f"the identification ratio {self.identification_ratio:.2f} is above {TRUSTED_RATIO}: "
                f"standard errors and intervals are not to be trusted; {instead}"
            )
        if self.sample.grouped and self.df_units <= len(self.names):
            found.append(
                f"{self.sample.num_units} units are too few for {len(self.names)} coefficients: "
                "standard errors are rough and joint tests are not available; use more nodes"
            )
        return tuple(found)

    @property
    def bse(self) -> FloatArray:
        """Standard errors of `params`, shape (p,); NaN where Σ̂ is not positive definite."""
        return np.sqrt(np.diag(self._covariance))

    @property
    def tvalues(self) -> FloatArray:
        """`params` over `bse`, shape (p,)."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return self.params / self.bse

    @property
    def pvalues(self) -> FloatArray:
        """Two-sided p-values of each coefficient being zero, shape (p,)."""
        return np.asarray(2.0 * stats.t.sf(np.abs(self.tvalues), self.df_units))

    def cov_params(self) -> FloatArray:
        """Covariance matrix of `params`, shape (p, p)."""
        return self._covariance.copy()

    def critical_value(self, alpha: float = 0.05) -> float:
        """How many standard errors an interval of level 1 − `alpha` reaches each way."""
        check_real("alpha", alpha, low=0, high=1, low_open=True, high_open=True)
        return float(stats.t.isf(alpha / 2.0, self.df_units))

    def standardised(self) -> tuple[FloatArray, FloatArray, FloatArray]:
        """`params`, `bse` and `shrunk_params` per standardised feature, each of shape (p,)."""
        inverse = np.linalg.inv(self._units.matrix)
        errors = np.sqrt(np.diag(inverse @ self._covariance @ inverse.T))
        return self._solution.copy(), errors, self._units.to_standardised(self.shrunk_params)

    def conf_int(self, alpha: float = 0.05) -> FloatArray:
        """Intervals of level 1 − `alpha`, shape (p, 2): lower and upper ends."""
        half = self.critical_value(alpha) * self.bse
        return np.column_stack([self.params - half, self.params + half])

    def wald_test(self, R: ArrayLike, q: ArrayLike = 0.0) -> HypothesisTest:
        """Test the linear hypothesis R·params = q.

        Parameters
        ----------
        R : array_like of shape (r, p) or (p,)
            Linearly independent restrictions.
        q : float or array_like of shape (r,), default 0
            Their values.

        Returns
        -------
        HypothesisTest
            χ²_r for rows; F with r and G − r degrees of freedom for nodes.

        Raises
        ------
        InvalidDataError
            If shapes do not fit or restrictions depend on each other.
        InvalidParameterError
            If there are no standard errors, or too few nodes for r restrictions.
        """
        matrix = check_matrix("R", np.atleast_2d(np.asarray(R, float)), num_columns=len(self.names))
        r = matrix.shape[0]
        if np.linalg.matrix_rank(matrix) < r:
            raise InvalidDataError("R must have linearly independent rows; drop restrictions that repeat")
        values = check_vector("q", np.broadcast_to(np.asarray(q, float), (r,)))
        if np.isnan(self._covariance).any():
            raise InvalidParameterError("wald_test needs standard errors, but: " + "; ".join(self.caveats))
        gap = matrix @ self.params - values
        statistic = float(gap @ np.linalg.solve(matrix @ self._covariance @ matrix.T, gap))
        if not self.sample.grouped:
            return HypothesisTest(statistic, float(stats.chi2.sf(statistic, r)), f"chi2({r})")
        spare = self._spare_units(r)
        statistic *= spare / (r * self.df_units)  # Hotelling's T² as an F
        return HypothesisTest(statistic, float(stats.f.sf(statistic, r, spare)), f"F({r}, {spare:g})")

    def score_test(self, beta0: ArrayLike | Mapping[str, float]) -> HypothesisTest:
        """Test coefficients at every noise level, with no inverse of Σ̂.

        Parameters
        ----------
        beta0 : array_like of shape (p,), or mapping from name to value
            Hypothetical coefficients. Those left out of a mapping, and NaN entries of
            an array, are free: the statistic is minimised over them.

        Returns
        -------
        HypothesisTest
            χ² with as many degrees of freedom as coefficients are fixed. For nodes
            the statistic is turned into an F.

        Raises
        ------
        InvalidDataError
            If shapes or names do not fit, or all coefficients are free.
        InvalidParameterError
            If there are no more nodes than coefficients.

        Notes
        -----
        The statistic is Q = sᵀ(Σ_g ψ_gψ_gᵀ)⁻¹s with s = Σ_g ψ_g(β₀). With every
        coefficient fixed the level is right at every noise level. Where some are free
        it is right if these are identified, and conservative if noise dominates.
        """
        values = self._hypothesis(beta0)
        fixed = np.flatnonzero(~np.isnan(values))
        score = self._score()
        if len(fixed) == len(values):
            statistic = score.value(np.append(self._units.to_standardised(values), -1.0))
        else:
            constraints = self._units.constraints(fixed.tolist(), values[fixed].tolist())
            statistic = score.minimum(constraints, np.append(self._solution, -1.0))
        return score.test(statistic, len(fixed))

    def in_confidence_region(self, beta: ArrayLike | Mapping[str, float], alpha: float = 0.05) -> bool:
        """Whether `beta` lies in the region of level 1 − `alpha` to which the score test inverts."""
        check_real("alpha", alpha, low=0, high=1, low_open=True, high_open=True)
        return self.score_test(beta).pvalue >= alpha

    def score_interval(self, coefficient: str | int, alpha: float = 0.05) -> tuple[float, float]:
        """Interval of one coefficient that holds its level at every noise level.

        Parameters
        ----------
        coefficient : str or int
            Name or position.
        alpha : float, default 0.05
            One minus the level.

        Returns
        -------
        low, high : float
            The smallest interval holding every value that :meth:`score_test` does not
            reject with the other coefficients free. Both ends are infinite where
            the release says too little about the coefficient.
        """
        check_real("alpha", alpha, low=0, high=1, low_open=True, high_open=True)
        j = self._position(coefficient)
        score = self._score()
        return score.interval(
            lambda value: self._units.constraints([j], [value]),
            alpha=alpha,
            start=np.append(self._solution, -1.0),
            centre=float(self.params[j]),
            width=float(self.bse[j]),
        )

    def predict(self, features: ArrayLike) -> FloatArray:
        """Labels that `shrunk_params` predict for rows in original units.

        Parameters
        ----------
        features : array_like of shape (n, d)
            Rows in original units, without a constant.

        Returns
        -------
        ndarray of shape (n,)
            In original units of the label.
        """
        d = self.sample.num_features
        rows = check_matrix("features", features, num_columns=d)
        if self.fit_intercept:
            return np.asarray(rows @ self.shrunk_params[:d] + self.shrunk_params[d])
        return np.asarray(self._units.label_centre + (rows - self._units.centre) @ self.shrunk_params)

    def summary(self, alpha: float = 0.05) -> Summary:
        """Table of coefficients with intervals of level 1 − `alpha`, guarantee and caveats."""
        return render_summary(self, alpha)

    def _spare_units(self, used: int) -> float:
        spare = self.sample.effective_units - used
        if spare <= 0:
            raise InvalidParameterError(
                f"testing {used} restriction(s) at once needs more than {used} nodes of equal size, got "
                f"{self.sample.effective_units:.3g}; test fewer or use more nodes"
            )
        return spare

    def _score(self) -> ScoreStatistic:
        if self.sample.grouped:
            self._spare_units(len(self.names))
        return ScoreStatistic(self.sample, len(self.names))

    def _hypothesis(self, beta0: ArrayLike | Mapping[str, float]) -> FloatArray:
        p = len(self.names)
        if isinstance(beta0, Mapping):
            values = np.full(p, np.nan)
            for name, value in beta0.items():
                values[self._position(name)] = check_real(f"beta0[{name!r}]", value)
        else:
            values = np.asarray(beta0, dtype=np.float64)
            if values.shape != (p,) or np.isinf(values).any():
                raise InvalidDataError(f"beta0 must have shape ({p},) without infinities, got {values.shape}")
        if np.isnan(values).all():
            raise InvalidDataError("beta0 must fix at least one coefficient")
        return values

    def _position(self, coefficient: str | int) -> int:
        if isinstance(coefficient, str):
            if coefficient in self.names:
                return self.names.index(coefficient)
        elif 0 <= coefficient < len(self.names):
            return int(coefficient)
        raise InvalidDataError(
            f"coefficient must be one of {', '.join(self.names)} or its position, got {coefficient!r}"
        )


def _joint_scale(given: float | None, guarantee: Guarantee | None) -> float | None:
    if guarantee is None or not isinstance(guarantee.relation, ReplaceRecord):
        return given
    stated = guarantee.relation.label_scale
    if given is not None and given != stated:
        raise InvalidParameterError(
            f"joint_label_scale must equal the label_scale {stated:g} of the guarantee, got {given:g}"
        )
    return stated
