"""The law of what a server receives, without any rows.

For Gaussian rows the moments of a release have an exact law: Σxxᵀ is Wishart, and given it the noise
enters through one Gaussian and one Wishart matrix, as in :mod:`flwr_modulated.exact_law`; here many
studies are drawn at once and their rows are random too. Cosines count as Gaussian noise of the same
covariance.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaincinv, ndtr

from ._typing import FloatArray
from ._validate import check_int, check_real
from .assumptions import Population
from .estimators import second_moment_noise
from .modulation import Modulation
from .moments import DebiasedMoments
from .standard_errors import coefficient_covariance

__all__ = ["ReleaseLaw"]

_Drawn: TypeAlias = tuple[FloatArray, FloatArray, FloatArray]


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
        pop, kappa = self.population, self.modulation.contraction
        expected = DebiasedMoments(
            num_samples=self.num_samples * self.num_releases,
            second_moment=pop.second_moment,
            cross_moment=pop.second_moment @ pop.beta,
            feature_mean=np.zeros(pop.num_features),
            label_mean=0.0,
            label_square=pop.label_square,
            noise_scale=self.noise_std / kappa,
            modulation_scale=self.modulation.effective_amplitude / kappa,
        )
        return second_moment_noise(expected) / float(np.linalg.eigvalsh(pop.second_moment)[0])

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

    def draw_release(self, rows: FloatArray, axes: FloatArray | None, *, rng: np.random.Generator) -> _Drawn:
        """Debiased moments of one release of each set of rows, in p columns.

        Parameters
        ----------
        rows : ndarray of shape (n, d + 1, d + 1)
            From :meth:`draw_rows`.
        axes : ndarray of shape (n, p) or None
            What each study's directions are orthogonal to.
        rng : numpy.random.Generator
            Source of the directions and the noise.

        Returns
        -------
        second, cross, label_square : ndarray of shape (n, p, p), (n, p) and (n,)
        """
        n, q = rows.shape[:2]
        p, k, kappa = self.num_columns, self.num_samples, self.modulation.contraction
        s = self.noise_std / kappa
        root = np.broadcast_to(s * np.eye(p), (n, p, p))
        variance = s**2 * np.eye(p)
        if not self.modulation.is_plain:
            m = self.modulation.num_directions
            c = self.modulation.amplitude**2 / (2 * m * kappa**2)
            projections = _random_projections(n, p, m, axes, rng)
            root = root + (np.sqrt(s**2 + c) - s) * projections
            variance = variance + c * projections
        # With rows a of rank q: Σ aηᵀ = RᵀN and Σ ηηᵀ = NᵀN + an independent Wishart(K − q).
        noise = rng.standard_normal((n, q, p)) @ root
        rest = _wishart_root(np.eye(p), k - q, n, rng) @ root
        mixed = rows.transpose(0, 2, 1) @ noise
        gram = rows.transpose(0, 2, 1) @ rows
        second = gram[:, :p, :p] + mixed[:, :p] + mixed[:, :p].transpose(0, 2, 1)
        second += noise.transpose(0, 2, 1) @ noise + rest.transpose(0, 2, 1) @ rest
        cross = (gram[:, -1, :p] + mixed[:, -1]) / k
        return second / k - variance, cross, gram[:, -1, -1] / k

    def draw_one_shot(self, num_draws: int, *, rng: np.random.Generator) -> _Drawn:
        """Moments averaged over the T releases of n studies, in p columns, as :meth:`draw_release`."""
        rows = self.draw_rows(num_draws, rng=rng)
        rounds = [self.draw_release(rows, None, rng=rng) for _ in range(self.num_releases)]
        second, cross, squares = (sum(parts) / self.num_releases for parts in zip(*rounds, strict=True))
        return second, cross, squares

    def feature_block(self, second: FloatArray, cross: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Σ̂ and ẑ of the d features, shapes (n, d, d) and (n, d), of draws in p columns."""
        if self.label_scale is None:
            return second, cross
        return second[:, :-1, :-1], self.label_scale * second[:, :-1, -1]

    def debiased(self, drawn: _Drawn, *, num_releases: int = 1) -> list[DebiasedMoments]:
        """What estimators take, of draws that average that many releases."""
        p, kappa = self.num_columns, self.modulation.contraction
        listed = [
            DebiasedMoments(
                num_samples=self.num_samples * num_releases,
                second_moment=second,
                cross_moment=cross,
                feature_mean=np.zeros(p),
                label_mean=0.0,
                label_square=float(label_square),
                noise_scale=self.noise_std / kappa,
                modulation_scale=self.modulation.effective_amplitude / kappa,
            )
            for second, cross, label_square in zip(*drawn, strict=True)
        ]
        if self.label_scale is None:
            return listed
        return [DebiasedMoments.from_joint(joint, label_scale=self.label_scale) for joint in listed]


def _wishart_root(scale: FloatArray, degrees: int, num_draws: int, rng: np.random.Generator) -> FloatArray:
    # Upper R, shape (n, p, p), with RᵀR ~ Wishart(degrees, scale), by Bartlett's decomposition.
    p = scale.shape[0]
    lower = np.tril(rng.standard_normal((num_draws, p, p)), -1)
    lower[:, np.arange(p), np.arange(p)] = np.sqrt(_chi_square(degrees - np.arange(p), num_draws, rng))
    return np.asarray((np.linalg.cholesky(scale) @ lower).transpose(0, 2, 1))


def _chi_square(degrees: NDArray[np.int_], num_draws: int, rng: np.random.Generator) -> FloatArray:
    # Monotone in the stream, so that equal streams are coupled over different degrees.
    normal = rng.standard_normal((num_draws, len(degrees)))
    if degrees[-1] > 100:
        # Wilson and Hilferty (1931): relative error below 1e-4 here, and fifty times as fast.
        third = 2 / (9 * degrees)
        return np.asarray(degrees * (1 - third + normal * np.sqrt(third)) ** 3)
    return np.asarray(2 * gammaincinv(degrees / 2, ndtr(normal)))


def _random_projections(
    num_draws: int, p: int, m: int, axes: FloatArray | None, rng: np.random.Generator
) -> FloatArray:
    # VVᵀ of uniformly random frames, each orthogonal to its axis unless that is zero; (n, p, p).
    gaussian = rng.standard_normal((num_draws, p, m))
    if axes is not None:
        lengths = np.linalg.norm(axes, axis=1, keepdims=True)
        unit = (axes / np.where(lengths > 0, lengths, 1.0))[:, :, None]
        gaussian = gaussian - unit @ (unit.transpose(0, 2, 1) @ gaussian)
    frames = np.linalg.qr(gaussian)[0]
    return np.asarray(frames @ frames.transpose(0, 2, 1))
