"""Additive moments of released rows, and what subtracting the known noise makes of them (3)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from numpy.typing import ArrayLike

from ._blocks import row_blocks
from ._typing import FloatArray
from ._validate import check_matrix, check_real, check_vector, require_finite
from .errors import InvalidDataError, InvalidParameterError
from .modulation import Modulation, check_directions

__all__ = ["DebiasedMoments", "Moments"]


@dataclass(frozen=True, slots=True, eq=False)
class Moments:
    """Sums over released rows: a commutative monoid under ``+``.

    Attributes
    ----------
    num_samples : int
        Number of rows K.
    gram : ndarray of shape (d, d)
        Σ g̃ g̃ᵀ.
    cross : ndarray of shape (d,)
        Σ y g̃.
    total : ndarray of shape (d,)
        Σ g̃.
    label_sum, label_square_sum : float
        Σ y and Σ y².
    noise_variance_sum : float
        Σ σ² over the rows, each with its own noise.

    Notes
    -----
    Sums agree in any order up to rounding. Joint records (``ReplaceRecord``) have no
    labels beside them; their label sums are zero and
    :meth:`DebiasedMoments.from_joint` reads the labels' moments off the last column.

    Examples
    --------
    >>> import numpy as np
    >>> a = Moments.from_rows(np.eye(2), np.ones(2), noise_std=0.5)
    >>> (a + a).num_samples, (a + a).noise_variance_sum
    (4, 1.0)
    """

    num_samples: int
    gram: FloatArray
    cross: FloatArray
    total: FloatArray
    label_sum: float
    label_square_sum: float
    noise_variance_sum: float

    @classmethod
    def from_rows(cls, released: ArrayLike, labels: ArrayLike | None, *, noise_std: ArrayLike) -> Self:
        """Sum over the rows of one or many clients.

        Parameters
        ----------
        released : array_like of shape (n, d)
            Released rows g̃.
        labels : array_like of shape (n,) or None
            Labels y; None for joint records.
        noise_std : float or array_like of shape (n,)
            Standard deviation σ of each row's noise, in units of the released rows.

        Raises
        ------
        InvalidDataError
            If a shape does not fit or a value is not finite.
        InvalidParameterError
            If a noise standard deviation is negative.
        """
        rows = check_matrix("released", released, finite=False)
        blocks = (rows[block] for block in row_blocks(*rows.shape))
        return cls.from_blocks(blocks, labels, noise_std=noise_std)

    @classmethod
    def from_blocks(
        cls, blocks: Iterable[ArrayLike], labels: ArrayLike | None, *, noise_std: ArrayLike
    ) -> Self:
        """Sum over rows that arrive in blocks, holding one block at a time.

        Parameters
        ----------
        blocks : iterable of array_like of shape (b, d)
            Consecutive blocks of released rows, such as those of
            :meth:`Mechanism.release_blocks`.
        labels, noise_std
            As for :meth:`from_rows`, of all n rows.

        Raises
        ------
        InvalidDataError, InvalidParameterError
            As :meth:`from_rows`.
        """
        y = None if labels is None else check_vector("labels", labels)
        with np.errstate(over="ignore"):
            label_square_sum = 0.0 if y is None else float(y @ y)
        if not np.isfinite(label_square_sum):
            raise InvalidDataError("labels must be small enough to square without overflow")
        n = end = 0
        gram, sums = np.zeros((0, 0)), np.zeros((0, 0))
        for part in blocks:
            rows = check_matrix("released", part, finite=False)
            if n == 0:
                gram, sums = np.zeros((rows.shape[1],) * 2), np.zeros((2, rows.shape[1]))
            end = n + rows.shape[0]
            if y is not None and end > y.size:
                break
            weights = np.ones((2, rows.shape[0]))  # Σ y g̃ and Σ g̃ in one product
            weights[0] = 0.0 if y is None else y[n:end]
            with np.errstate(over="ignore", invalid="ignore"):
                gram += rows.T @ rows
                sums += weights @ rows
            if not np.isfinite(gram).all():  # a finite Σ g̃ g̃ᵀ has finite rows only, and a finite Σ y g̃
                require_finite("released", rows)
                raise InvalidDataError("released must be small enough to square without overflow")
            n = end
        if y is not None and y.size != end:
            raise InvalidDataError(f"labels must have one entry a released row, got {y.size}")
        if n == 0:
            raise InvalidDataError("blocks must hold at least one released row, got none")
        std = check_noise_std(noise_std, n)
        variance = n * float(std.reshape(-1)[0]) ** 2 if std.size == 1 else float(std @ std)
        return cls(
            num_samples=n,
            gram=gram,
            cross=sums[0],
            total=sums[1],
            label_sum=0.0 if y is None else float(y.sum()),
            label_square_sum=label_square_sum,
            noise_variance_sum=variance,
        )

    @classmethod
    def sum(cls, parts: Iterable[Self]) -> Self:
        """Add up moments of at least one group of rows.

        Raises
        ------
        InvalidDataError
            If there is nothing to add, or the numbers of features differ.
        """
        iterator = iter(parts)
        first = next(iterator, None)
        if first is None:
            raise InvalidDataError("moments need at least one group of released rows, got none")
        result = first
        for part in iterator:
            result = result + part
        return result

    @property
    def num_features(self) -> int:
        """Number of columns d."""
        return int(self.total.shape[0])

    def __add__(self, other: Self) -> Self:
        if not isinstance(other, Moments):
            return NotImplemented
        if self.num_features != other.num_features:
            raise InvalidDataError(
                f"moments must have the same number of features, got {self.num_features} "
                f"and {other.num_features}"
            )
        return type(self)(
            num_samples=self.num_samples + other.num_samples,
            gram=self.gram + other.gram,
            cross=self.cross + other.cross,
            total=self.total + other.total,
            label_sum=self.label_sum + other.label_sum,
            label_square_sum=self.label_square_sum + other.label_square_sum,
            noise_variance_sum=self.noise_variance_sum + other.noise_variance_sum,
        )

    def debias(
        self, modulation: Modulation | None = None, directions: ArrayLike | None = None
    ) -> DebiasedMoments:
        """Subtract the known noise and modulation: unbiased moments of the private rows (Eq. 3).

        Parameters
        ----------
        modulation : Modulation, optional
            The public map that the clients used; default plain.
        directions : array_like of shape (d, m), optional
            The directions that the clients used.

        Returns
        -------
        DebiasedMoments

        Raises
        ------
        InvalidDataError
            If there are no rows.
        InvalidParameterError
            If the directions do not fit the modulation.
        """
        if self.num_samples < 1:
            raise InvalidDataError("moments need at least one released row, got none")
        modulation = Modulation() if modulation is None else modulation
        d, k = self.num_features, self.num_samples
        offset = modulation_offset(modulation, directions, num_features=d)
        shrink = modulation.contraction
        noise_variance = self.noise_variance_sum / k
        second = (self.gram / k - offset - noise_variance * np.eye(d)) / shrink**2
        return DebiasedMoments(
            num_samples=k,
            second_moment=0.5 * (second + second.T),
            cross_moment=self.cross / k / shrink,
            feature_mean=self.total / k / shrink,
            label_mean=self.label_sum / k,
            label_square=self.label_square_sum / k,
            noise_scale=float(np.sqrt(noise_variance)) / shrink,
            modulation_scale=modulation.effective_amplitude / shrink,
        )


@dataclass(frozen=True, slots=True, eq=False)
class DebiasedMoments:
    """Unbiased estimates of the private rows' moments.

    Attributes
    ----------
    num_samples : int
        Number of rows K (over all rounds, where rounds are pooled).
    second_moment : ndarray of shape (d, d)
        Σ̂, unbiased for (1/K) Σ x xᵀ; symmetric, possibly indefinite.
    cross_moment : ndarray of shape (d,)
        ẑ, unbiased for (1/K) Σ y x.
    feature_mean : ndarray of shape (d,)
        Unbiased for the mean row.
    label_mean, label_square : float
        Means of y and y².
    noise_scale : float
        s = σ̄/(1−α), in units of the features, σ̄² the mean of the rows' σ². For
        rows with weights ω_i that sum to 1, s² is K Σ ω_i² s_i².
    modulation_scale : float
        λ/(1−α), in units of the features; 0 without modulation.
    noise_fourth : float, optional
        The same mean of the rows' s_i⁴; None stands for s⁴, rows with equal noise.
    """

    num_samples: int
    second_moment: FloatArray
    cross_moment: FloatArray
    feature_mean: FloatArray
    label_mean: float
    label_square: float
    noise_scale: float
    modulation_scale: float = 0.0
    noise_fourth: float | None = None

    @property
    def num_features(self) -> int:
        """Number of features d."""
        return int(self.cross_moment.shape[0])

    def noise_variance(self, signal: float) -> float:
        """Variance of the noise that one row brings into Σ̂u, averaged over unit vectors u.

        Parameters
        ----------
        signal : float
            Trace of Σ, at least 0.

        Returns
        -------
        float
            ``s⁴(d+1) + 2 s² tr Σ + λ²s²/(1−α)²``, the numerator of τ² in Eq. (4).
        """
        s2 = self.noise_scale**2
        s4 = s2**2 if self.noise_fourth is None else self.noise_fourth
        return s4 * (self.num_features + 1) + 2.0 * s2 * signal + self.modulation_scale**2 * s2

    @classmethod
    def pool(cls, parts: Iterable[Self]) -> Self:
        """Average the moments of several rounds, weighted by their numbers of rows.

        Rounds may have used different directions, which each has already subtracted.

        Raises
        ------
        InvalidDataError
            If there is nothing to pool, or the numbers of features differ.
        """
        rounds = cls._alike(parts)
        return cls._weighted(rounds, np.array([part.num_samples for part in rounds], dtype=np.float64))

    @classmethod
    def combine(cls, parts: Iterable[Self]) -> Self:
        """Average groups of rows with different noise, weighted by their information.

        A row weighs the inverse of the variance that it brings into Σ̂: of its noise,
        as in Eq. (4), and of the sampling of a Gaussian row with the same trace. Groups
        with equal noise weigh as in :meth:`pool`.

        Parameters
        ----------
        parts : iterable of DebiasedMoments
            One for each noise level.

        Raises
        ------
        InvalidDataError
            If there is nothing to combine, or the numbers of features differ.
        """
        groups = cls._alike(parts)
        pooled = cls.pool(groups)
        d, signal = pooled.num_features, max(float(np.trace(pooled.second_moment)), 0.0)
        sampling = signal**2 * (d + 1) / d**2
        variances = np.array([group.noise_variance(signal) + sampling for group in groups])
        if not variances.all():  # neither noise nor signal: any weights will do
            return pooled
        return cls._weighted(groups, np.array([group.num_samples for group in groups]) / variances)

    @classmethod
    def _alike(cls, parts: Iterable[Self]) -> list[Self]:
        listed = list(parts)
        if not listed:
            raise InvalidDataError("pool needs the moments of at least one round, got none")
        if len({part.num_features for part in listed}) > 1:
            raise InvalidDataError("pool needs rounds with the same number of features")
        return listed

    @classmethod
    def _weighted(cls, parts: list[Self], weights: FloatArray) -> Self:
        """Average with weights of whole parts, in proportion."""
        shares = weights / weights.sum()
        counts = np.array([part.num_samples for part in parts], dtype=np.float64)
        # K Σ ω_i² over a part's rows: its share, times how much more than average its rows weigh.
        squares = counts.sum() * shares**2 / counts

        def mean(name: str) -> FloatArray:
            stacked = np.array([getattr(part, name) for part in parts], dtype=np.float64)
            return np.asarray(np.tensordot(shares, stacked, axes=1))

        scales = np.array([part.noise_scale for part in parts])
        fourths = np.array(
            [part.noise_scale**4 if part.noise_fourth is None else part.noise_fourth for part in parts]
        )
        modulations = np.array([part.modulation_scale for part in parts])
        return cls(
            num_samples=int(counts.sum()),
            second_moment=mean("second_moment"),
            cross_moment=mean("cross_moment"),
            feature_mean=mean("feature_mean"),
            label_mean=float(mean("label_mean")),
            label_square=float(mean("label_square")),
            noise_scale=float(np.sqrt(squares @ scales**2)),
            modulation_scale=float(np.sqrt(shares @ modulations**2)),
            noise_fourth=float(squares @ fourths),
        )

    def centred(self) -> DebiasedMoments:
        """Moments about the mean row and the mean label, for a fit with an intercept.

        The mean row comes from the same release, so this costs nothing. Its noise
        enters Σ̂ with the square of the mean's error, which is O(1/K).
        """
        mean = self.feature_mean
        return replace(
            self,
            second_moment=self.second_moment - np.outer(mean, mean),
            cross_moment=self.cross_moment - self.label_mean * mean,
            feature_mean=np.zeros_like(mean),
            label_mean=0.0,
            label_square=self.label_square - self.label_mean**2,
        )

    @classmethod
    def from_joint(cls, joint: DebiasedMoments, *, label_scale: float) -> Self:
        """Read features and label off the debiased moments of joint records.

        Parameters
        ----------
        joint : DebiasedMoments
            Of records (x, y / s_y) in d + 1 dimensions (``ReplaceRecord``).
        label_scale : float
            s_y, in label units.

        Returns
        -------
        DebiasedMoments
            In d dimensions, with the label's moments estimated too.

        Raises
        ------
        InvalidDataError
            If there is no feature beside the label.
        InvalidParameterError
            If `label_scale` is not positive.
        """
        check_real("label_scale", label_scale, low=0, low_open=True)
        d = joint.num_features - 1
        if d < 1:
            raise InvalidDataError("joint moments need at least one feature beside the label")
        return cls(
            num_samples=joint.num_samples,
            second_moment=joint.second_moment[:d, :d].copy(),
            cross_moment=label_scale * joint.second_moment[:d, d],
            feature_mean=joint.feature_mean[:d].copy(),
            label_mean=label_scale * float(joint.feature_mean[d]),
            label_square=label_scale**2 * float(joint.second_moment[d, d]),
            noise_scale=joint.noise_scale,
            modulation_scale=joint.modulation_scale,
            noise_fourth=joint.noise_fourth,
        )


def check_noise_std(noise_std: ArrayLike, num_rows: int) -> FloatArray:
    """Return `noise_std` as an array of one entry or of one a row, if it is finite and at least 0."""
    try:
        std = np.asarray(noise_std, dtype=np.float64)
    except (TypeError, ValueError):
        raise InvalidParameterError("noise_std must be numeric") from None
    if std.shape not in ((), (1,), (num_rows,)):
        raise InvalidDataError(f"noise_std must be a number or have shape ({num_rows},), got {std.shape}")
    if not np.isfinite(std).all() or (std < 0).any():
        raise InvalidParameterError("noise_std must be finite and at least 0")
    return std


def modulation_offset(
    modulation: Modulation, directions: ArrayLike | None, *, num_features: int
) -> FloatArray:
    """What the cosine term adds to the second moment of released rows, (λ²/2m) V Vᵀ.

    Parameters
    ----------
    modulation : Modulation
        The public map that the clients used.
    directions : array_like of shape (d, m) or None
        The directions that the clients used; may be None where the map is plain.
    num_features : int
        Number of columns d of the released rows.

    Returns
    -------
    ndarray of shape (d, d)

    Raises
    ------
    InvalidParameterError
        If the directions do not fit the modulation.
    """
    if directions is None:
        if not modulation.is_plain:
            raise InvalidParameterError("directions must be given to debias modulated rows")
        return np.zeros((num_features, num_features))
    frame = check_directions(directions, num_features=num_features, num_directions=modulation.num_directions)
    return modulation.second_moment(frame)
