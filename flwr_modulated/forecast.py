"""How well each method will do, before any data: the package's estimators on the law of its moments.

For Gaussian rows the moments of a release have an exact law that needs no rows: Σxxᵀ is Wishart, and
given it the noise enters through one Gaussian and one Wishart matrix. Its draws go through the
estimators that a study would run. Cosines count as Gaussian noise of the same covariance.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.special import gammaincinv

from ._typing import FloatArray
from ._validate import check_int, check_real
from .assumptions import Population
from .estimators import Estimator, GradientDescent, second_moment_noise
from .modulation import Modulation, draw_directions
from .moments import DebiasedMoments
from .standard_errors import coefficient_covariance

__all__ = [
    "ReleaseLaw",
    "coefficient_spread",
    "draw_estimates",
    "draw_iterates",
    "federated_averaging_loss",
]

# Interquartile range of a standard normal variable.
_NORMAL_IQR = 1.3489795003921634


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReleaseLaw:
    """The law of what a server receives from K rows of a population.

    Parameters
    ----------
    population : Population
        Of what is released: clipped, where clients clip.
    num_samples : int
        K ≥ 2d + 4.
    modulation : Modulation
        The client map, with uniformly random directions.
    noise_std : float
        σ ≥ 0 of each release, in units of the released rows.
    num_releases : int, default 1
        T releases of each row, whose moments are averaged.
    label_scale : float, optional
        s_y of joint records (``ReplaceRecord``).

    Raises
    ------
    InvalidParameterError
        If an argument is out of range.
    """

    population: Population
    num_samples: int
    modulation: Modulation
    noise_std: float
    num_releases: int = 1
    label_scale: float | None = None

    def __post_init__(self) -> None:
        least = 2 * self.population.num_features + 4
        check_int("num_samples", self.num_samples, low=least, hint="a forecast needs more rows than that")
        check_real("noise_std", self.noise_std, low=0)
        check_int("num_releases", self.num_releases, low=1)

    @property
    def num_columns(self) -> int:
        """Columns p of a released row: d, or d + 1 for joint records."""
        return self.population.num_features + (self.label_scale is not None)

    def covariance(self, *, equal_errors: bool = False) -> FloatArray:
        """Asymptotic covariance of Σ̂⁻¹ẑ, shape (d, d), in squared coefficient units.

        Parameters
        ----------
        equal_errors : bool, default False
            Take e as independent of x, whatever the population's score moment says.
        """
        return coefficient_covariance(
            self.population.second_moment,
            self.population.beta,
            self.population.residual_variance,
            num_samples=self.num_samples,
            modulation=self.modulation,
            noise_std=self.noise_std,
            num_releases=self.num_releases,
            score_moment=None if equal_errors else self.population.score_moment,
            label_scale=self.label_scale,
        )

    def standard_errors(self, *, equal_errors: bool = False) -> FloatArray:
        """Roots of the diagonal of :meth:`covariance`, shape (d,), in coefficient units."""
        return np.asarray(np.sqrt(np.diag(self.covariance(equal_errors=equal_errors))))

    def noise_ratio(self) -> float:
        """τ over the smallest eigenvalue of Σ (Eq. 4); standard errors hold below about 0.3."""
        expected = self._debiased(self.population.second_moment, self.population.beta, 0.0)
        smallest = float(np.linalg.eigvalsh(self.population.second_moment)[0])
        return second_moment_noise(expected) / smallest / float(np.sqrt(self.num_releases))

    def draw_rows(self, num_draws: int, *, rng: np.random.Generator) -> FloatArray:
        """Draw R with RᵀR = Σ aaᵀ over K rows a = (x, y / s_y); shape (n, d + 1, d + 1).

        Equal streams give roots that move smoothly and monotonically with K.
        """
        pop, scale = self.population, self.label_scale or 1.0
        cross = pop.second_moment @ pop.beta / scale
        joint = np.block(
            [[pop.second_moment, cross[:, None]], [cross[None, :], np.array([[pop.label_square / scale**2]])]]
        )
        return _wishart_root(joint, self.num_samples, num_draws, rng)

    def draw_release(
        self, rows: FloatArray, directions: FloatArray | None, *, rng: np.random.Generator
    ) -> list[DebiasedMoments]:
        """Debiased moments of one release of each set of rows.

        Parameters
        ----------
        rows : ndarray of shape (n, d + 1, d + 1)
            From :meth:`draw_rows`.
        directions : ndarray of shape (n, p, m) or None
            One frame for each; None where the modulation is plain.
        rng : numpy.random.Generator
            Source of the noise.
        """
        n, q = rows.shape[:2]
        p, k = self.num_columns, self.num_samples
        s = self.noise_std / self.modulation.contraction
        root = np.broadcast_to(s * np.eye(p), (n, p, p))
        variance = s**2 * np.eye(p)
        if directions is not None:
            c = self.modulation.effective_amplitude**2 / (
                2 * directions.shape[2] * self.modulation.contraction**2
            )
            frames = directions @ directions.transpose(0, 2, 1)
            root = root + (np.sqrt(s**2 + c) - s) * frames
            variance = variance + c * frames
        # With rows a of rank q: Σ aηᵀ = RᵀN and Σ ηηᵀ = NᵀN + an independent Wishart(K − q).
        noise = rng.standard_normal((n, q, p)) @ root
        rest = _wishart_root(np.eye(p), k - q, n, rng) @ root
        mixed = rows.transpose(0, 2, 1) @ noise
        gram = rows.transpose(0, 2, 1) @ rows
        second = gram[:, :p, :p] + mixed[:, :p] + mixed[:, :p].transpose(0, 2, 1)
        second += noise.transpose(0, 2, 1) @ noise + rest.transpose(0, 2, 1) @ rest
        second = second / k - variance
        cross = (gram[:, -1, :p] + mixed[:, -1]) / k
        squares = gram[:, -1, -1] / k
        return [self._debiased(*each) for each in zip(second, cross, squares, strict=True)]

    def _debiased(self, second: FloatArray, cross: FloatArray, label_square: float) -> DebiasedMoments:
        moments = DebiasedMoments(
            num_samples=self.num_samples,
            second_moment=second,
            cross_moment=cross,
            feature_mean=np.zeros(second.shape[0]),
            label_mean=0.0,
            label_square=float(label_square),
            noise_scale=self.noise_std / self.modulation.contraction,
            modulation_scale=self.modulation.effective_amplitude / self.modulation.contraction,
        )
        if self.label_scale is None or second.shape[0] == self.population.num_features:
            return moments
        return DebiasedMoments.from_joint(moments, label_scale=self.label_scale)


def _wishart_root(scale: FloatArray, degrees: int, num_draws: int, rng: np.random.Generator) -> FloatArray:
    # Upper R, shape (n, p, p), with RᵀR ~ Wishart(degrees, scale), by Bartlett's decomposition.
    # Chi-square by inversion, so that equal streams are coupled over different degrees.
    p = scale.shape[0]
    lower = np.tril(rng.standard_normal((num_draws, p, p)), -1)
    freedom = degrees - np.arange(p)
    diagonal = np.sqrt(2 * gammaincinv(freedom / 2, rng.random((num_draws, p))))
    lower[:, np.arange(p), np.arange(p)] = diagonal
    return np.asarray((np.linalg.cholesky(scale) @ lower).transpose(0, 2, 1))


def _frames(law: ReleaseLaw, axes: FloatArray, rng: np.random.Generator) -> FloatArray | None:
    # One uniformly random frame per row of `axes`, orthogonal to it unless it is zero.
    if law.modulation.is_plain:
        return None
    m = law.modulation.num_directions
    return np.array([draw_directions(law.num_columns, m, orthogonal_to=axis, rng=rng) for axis in axes])


def draw_estimates(
    law: ReleaseLaw, estimators: list[Estimator], *, num_draws: int, rng: np.random.Generator
) -> list[FloatArray]:
    """Coefficients that estimators give on the same draws of one-shot moments.

    Parameters
    ----------
    law : ReleaseLaw
        What the server receives.
    estimators : list of Estimator
        Each sees the same moments.
    num_draws : int
        Number n of independent studies.
    rng : numpy.random.Generator
        Source of the draws.

    Returns
    -------
    list of ndarray of shape (n, d)
        One array an estimator.
    """
    rows = law.draw_rows(num_draws, rng=rng)
    zeros = np.zeros((num_draws, law.num_columns))
    rounds = [law.draw_release(rows, _frames(law, zeros, rng), rng=rng) for _ in range(law.num_releases)]
    if len(rounds) == 1:
        (pooled,) = rounds
    else:
        pooled = [DebiasedMoments.pool(parts) for parts in zip(*rounds, strict=True)]
    return [np.array([estimator.estimate(moments) for moments in pooled]) for estimator in estimators]


def coefficient_spread(law: ReleaseLaw, estimates: FloatArray) -> FloatArray:
    """Standard errors that hold at any noise: interquartile ranges, in normal standard deviations.

    Parameters
    ----------
    law : ReleaseLaw
        Where the estimates come from.
    estimates : ndarray of shape (n, d)
        Draws of the unregularised estimator ``Ridge(0.0)`` from :func:`draw_estimates`.

    Returns
    -------
    ndarray of shape (d,)
        In coefficient units. They approach :meth:`ReleaseLaw.standard_errors` as the noise
        ratio vanishes; beyond a ratio of 0.3 the estimator has tails so heavy that its
        standard deviation says nothing.

    Notes
    -----
    The draws take e as independent of x; the asymptotic formula says what the population's
    score moment changes about that.
    """
    quartiles = np.quantile(estimates, [0.25, 0.75], axis=0)
    unequal = law.standard_errors() / law.standard_errors(equal_errors=True)
    return np.asarray((quartiles[1] - quartiles[0]) / _NORMAL_IQR * unequal)


def draw_iterates(
    law: ReleaseLaw, descent: GradientDescent, *, num_draws: int, rng: np.random.Generator
) -> FloatArray:
    """Last iterate of the iterative method, one fresh release of the same rows a step.

    Parameters
    ----------
    law : ReleaseLaw
        ``num_releases`` is the number of steps T; `noise_std` must account for all.
    descent : GradientDescent
        The step and the ball; its `num_steps` is not used.
    num_draws : int
        Number n of independent studies.
    rng : numpy.random.Generator
        Source of the draws.

    Returns
    -------
    ndarray of shape (n, d)
    """
    rows = law.draw_rows(num_draws, rng=rng)
    beta = np.zeros((num_draws, law.population.num_features))
    for _ in range(law.num_releases):
        axes = (
            beta if law.label_scale is None else np.column_stack([beta, np.full(num_draws, -law.label_scale)])
        )
        received = law.draw_release(rows, _frames(law, axes, rng), rng=rng)
        beta = np.array([descent.update(b, moments) for b, moments in zip(beta, received, strict=True)])
    return beta


def federated_averaging_loss(
    population: Population,
    *,
    num_samples: int,
    noise_multiplier: float,
    num_rounds: int,
    central: bool,
    clips: tuple[float, ...] = (0.5, 1.0, 2.0),
    steps: tuple[float, ...] = (0.1, 0.3, 1.0),
    num_draws: int = 16,
    rng: np.random.Generator,
) -> float:
    """R² loss of DP FedAvg on clipped one-row gradients, at its best clip norm and step.

    Parameters
    ----------
    population : Population
        Of unclipped rows.
    num_samples : int
        K clients, one row each, all in every round.
    noise_multiplier : float
        Noise standard deviation over the sensitivity 2C, in every round.
    num_rounds : int
        T.
    central : bool
        Whether a trusted server adds the noise once to the sum, or every client adds its own.
    clips : tuple of float
        Clip norms C tried, in units of label × feature.
    steps : tuple of float
        Step sizes tried, over the largest eigenvalue of Σ.
    num_draws : int, default 16
        Noise paths averaged over.
    rng : numpy.random.Generator
        Source of the noise.

    Returns
    -------
    float
        Mean loss of the last iterate. Clip and step are picked with hindsight, which flatters it.

    Notes
    -----
    Clipping is evaluated on 512 Gaussian rows whose second moments are exactly the population's;
    the sampling error of K rows enters as E e²·d/K.
    """
    d, sigma = population.num_features, population.second_moment
    z = np.random.default_rng(0).standard_normal((512, d + 1))
    z = np.linalg.qr(z)[0] * np.sqrt(len(z))
    x = z[:, :d] @ np.linalg.cholesky(sigma).T
    y = x @ population.beta + np.sqrt(population.residual_variance) * z[:, d]
    norms = np.linalg.norm(x, axis=1)[:, None]
    smoothness = float(np.linalg.eigvalsh(sigma)[-1])
    grid = np.array([(clip, step / smoothness) for clip in clips for step in steps]).repeat(num_draws, axis=0)
    clip, step = grid.T
    noise_std = 2 * clip * noise_multiplier / (num_samples if central else np.sqrt(num_samples))
    beta = np.zeros((d, len(grid)))
    for _ in range(num_rounds):
        residual = x @ beta - y[:, None]
        residual *= np.minimum(1.0, clip / np.maximum(np.abs(residual) * norms, np.finfo(np.float64).tiny))
        beta -= step * (x.T @ residual / len(x) + noise_std * rng.standard_normal(beta.shape))
    losses = population.r2_loss(beta.T).reshape(-1, num_draws).mean(axis=1)
    return float(losses.min()) + population.residual_variance * d / num_samples / population.label_square
