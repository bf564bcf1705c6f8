"""The mechanism of a client: clip, modulate, add Gaussian noise, release."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import ArrayLike

from ._blocks import row_blocks
from ._rounding import DISTANCE_CLIP, rounding_inflation
from ._typing import Accounting, FloatArray, Sensitivity
from ._validate import check_choice, check_int, check_matrix, require_finite
from .errors import InvalidDataError, InvalidParameterError
from .modulation import Modulation, check_directions
from .noise import NoiseSource, as_noise_source
from .privacy import Guarantee, calibrate_noise_multiplier, clip_rows, gaussian_epsilon

__all__ = ["Mechanism"]


@dataclass(frozen=True, slots=True)
class Mechanism:
    """Everything that turns a private row into a released one (Eq. 1).

    Parameters
    ----------
    modulation : Modulation
        The public map. Use ``Modulation()`` for the plain Gaussian release.
    guarantee : Guarantee
        What holds for all `num_releases` releases of a unit together.
    num_releases : int, default 1
        T ≥ 1, how often the same unit is released in all.
    sensitivity : {"conditional", "marginal"}, default "conditional"
        Whether the guarantee holds even with known phases, or uses their secrecy;
        see :meth:`Modulation.lipschitz`.
    accounting : {"exact", "zcdp", "classical"}, default "exact"
        See :func:`~flwr_modulated.privacy.calibrate_noise_multiplier`.
    allow_invalid_classical : bool, default False
        Override for classical accounting with ε > 1, which does not give the
        guarantee.

    Raises
    ------
    InvalidParameterError
        If a parameter is out of range, or classical accounting is asked for ε > 1.

    Notes
    -----
    1. Each of T releases adds N(0, σ² I) with σ = √T · L · (r or 2R) · multiplier,
       computed from this object and from nothing a server says.
    2. Under ``Replace`` and ``ReplaceRecord`` rows are clipped before the map.
    3. Directions are checked at every release.
    4. With ``ReplaceRecord`` the rows are joint records (x, y / label_scale).

    With a NumPy generator as the source, the guarantee is for idealised arithmetic on
    real numbers: floating-point Gaussians have artefacts that an attacker may use. It
    is meant for simulation. With :class:`~flwr_modulated.noise.DeviceNoise` it is for the
    numbers that really leave the device: the noise is then larger by a public relative
    amount of at most 1e-6 (typically 1e-8) that covers every rounding error of the map,
    and under ``Distance`` rows are clipped at 2²⁰ radii, which moves no two rows apart.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_modulated import Distance, Guarantee, Mechanism, Modulation
    >>> mechanism = Mechanism(Modulation(), Guarantee(2.0, 1e-5, Distance(1.0)))
    >>> round(mechanism.noise_std, 4)
    1.9938
    >>> mechanism.release([[0.1, -0.4]], rng=np.random.default_rng(0)).shape
    (1, 2)
    """

    modulation: Modulation
    guarantee: Guarantee
    num_releases: int = 1
    sensitivity: Sensitivity = "conditional"
    accounting: Accounting = "exact"
    allow_invalid_classical: bool = field(default=False, kw_only=True)
    _noise_std: float = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, kind in (("modulation", Modulation), ("guarantee", Guarantee)):
            if not isinstance(getattr(self, name), kind):
                raise InvalidParameterError(
                    f"{name} must be a {kind.__name__}, got {type(getattr(self, name)).__name__}"
                )
        check_int("num_releases", self.num_releases, low=1)
        check_choice("sensitivity", self.sensitivity, Sensitivity)
        # Raises here, before anything is spent, whatever calibration refuses.
        noise_std = self.l2_sensitivity * calibrate_noise_multiplier(
            float(self.guarantee.epsilon),
            float(self.guarantee.delta),
            num_compositions=self._num_compositions,
            accounting=self.accounting,
            allow_invalid_classical=self.allow_invalid_classical,
        )
        object.__setattr__(self, "_noise_std", noise_std)
        if not math.isfinite(noise_std):
            raise InvalidParameterError(
                "noise_std must be finite; lower amplitude, frequency or the relation's radius"
            )

    @property
    def l2_sensitivity(self) -> float:
        """L2 sensitivity Δ of one release before noise, in units of the released row."""
        return self.modulation.lipschitz(self.sensitivity) * self.guarantee.relation.separation

    @property
    def noise_std(self) -> float:
        """Standard deviation σ of each noise coordinate, in units of the released row."""
        return self._noise_std

    @property
    def _num_compositions(self) -> int:
        return self.num_releases * self.guarantee.rows_per_client

    def release(
        self,
        features: ArrayLike,
        directions: ArrayLike | None = None,
        *,
        rng: np.random.Generator | NoiseSource,
    ) -> FloatArray:
        """Privatise rows, each with its own phases and noise.

        Parameters
        ----------
        features : array_like of shape (n, d)
            Private rows (joint records under ``ReplaceRecord``).
        directions : array_like of shape (d, m), optional
            The round's public orthonormal directions; may be left out for m = 0.
        rng : numpy.random.Generator or NoiseSource
            Source of phases and noise: a generator in a simulation,
            ``DeviceNoise()`` on a device. A generator's state must not be known to
            anybody who sees the release: whoever knows it can subtract the noise.

        Returns
        -------
        ndarray of shape (n, d)
            The released rows g̃. The input is not modified.

        Raises
        ------
        InvalidDataError
            If the features are not a finite matrix.
        InvalidParameterError
            If the directions are not orthonormal within 1e-9, or more than d, or
            rounding errors are out of proportion (with ``DeviceNoise`` only).
        """
        rows = check_matrix("features", features, finite=False)
        released = np.empty(rows.shape)
        blocks = self.release_blocks(rows, directions, rng=rng)
        for block, part in zip(row_blocks(*rows.shape), blocks, strict=True):
            released[block] = part
        return released

    def release_blocks(
        self,
        features: ArrayLike,
        directions: ArrayLike | None = None,
        *,
        rng: np.random.Generator | NoiseSource,
    ) -> Iterator[FloatArray]:
        """Privatise rows block by block: the same bytes as :meth:`release`, in little memory.

        Parameters
        ----------
        features, directions, rng
            As for :meth:`release`. Features may be memory-mapped: only one block of
            them is read at a time.

        Returns
        -------
        iterator of ndarray of shape (b, d)
            The released rows of each of :func:`~flwr_modulated._blocks.row_blocks`, in order. Noise is drawn
            as it is asked for.

        Raises
        ------
        InvalidDataError, InvalidParameterError
            As :meth:`release`; what concerns the values of a block when it is asked for.
        """
        source = as_noise_source(rng)
        mapped, noise_std = self._map_blocks(features, directions, source)
        return (source.add_gaussian(block, noise_std) for block in mapped)

    def _map_blocks(
        self, features: ArrayLike, directions: ArrayLike | None, source: NoiseSource
    ) -> tuple[Iterator[FloatArray], float]:
        """Clipped and modulated rows, block by block: not private yet; and the std of the noise to add."""
        rows = check_matrix("features", features, finite=False)
        d, m = rows.shape[1], self.modulation.num_directions
        if m > d:
            raise InvalidParameterError(f"num_directions must be at most the number of features {d}, got {m}")
        if directions is None and m > 0:
            raise InvalidParameterError(
                f"directions must be given when num_directions={m}; draw them with draw_directions"
            )
        frame = check_directions(
            np.zeros((d, 0)) if directions is None else directions, num_features=d, num_directions=m
        )
        radius, noise_std = self.guarantee.relation.clip_radius, self.noise_std
        if source.real_arithmetic:
            separation = self.guarantee.relation.separation
            radius = DISTANCE_CLIP * separation if radius is None else radius
            noise_std *= 1.0 + rounding_inflation(
                self.modulation,
                self.sensitivity,
                num_features=d,
                separation=separation,
                clip_radius=radius,
            )

        def mapped(block: FloatArray) -> FloatArray:
            require_finite("features", block)
            clipped = clip_rows(block, radius)
            if self.modulation.is_plain:  # shrinks at most
                return self.modulation.apply(clipped, frame, rng=source)
            with np.errstate(over="ignore", invalid="ignore"):  # the check below says it better
                values = self.modulation.apply(clipped, frame, rng=source)
            if not np.isfinite(values).all():
                raise InvalidDataError(
                    "features must be small enough to modulate without overflow; rescale them"
                )
            return values

        return (mapped(rows[block]) for block in row_blocks(*rows.shape)), noise_std

    def describe(self, noise_source: NoiseSource | None = None) -> str:
        """What this mechanism hides and what it does not, in words for a non-expert.

        Parameters
        ----------
        noise_source : NoiseSource, optional
            Adds which noise is used and for which arithmetic the guarantee holds.

        Notes
        -----
        Under classical accounting with ε > 1 it states the larger ε that really holds.
        """
        guarantee, accounting = self.guarantee, self.accounting
        if accounting == "classical" and guarantee.epsilon > 1:
            multiplier = self.noise_std / self.l2_sensitivity / math.sqrt(self._num_compositions)
            guarantee = replace(guarantee, epsilon=gaussian_epsilon(guarantee.delta, multiplier))
            accounting = "exact"
        text = guarantee.describe(
            num_releases=self.num_releases, accounting=accounting, noise_source=noise_source
        )
        if self.sensitivity == "marginal" and not self.modulation.is_plain:
            text += " It relies on the modulation's phases staying secret."
        return text
