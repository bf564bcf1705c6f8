"""Where phases and noise come from: NumPy in a simulation, OpenDP and the operating system on a device."""

from __future__ import annotations

import secrets
from typing import Any, Protocol

import numpy as np

from ._typing import FloatArray
from ._validate import check_real
from .errors import InvalidParameterError

__all__ = ["DeviceNoise", "NoiseSource", "NumpyNoise"]

_SMALLEST_STD = 2.0**-100


class NoiseSource(Protocol):
    """What :meth:`Mechanism.release` draws from.

    The noise is *added by the source*, not returned to the caller: on a device the
    addition and its rounding are part of the sampler's own proof.
    """

    @property
    def real_arithmetic(self) -> bool:
        """Whether the guarantee holds for floating-point numbers, not only for ideal real ones."""

    @property
    def description(self) -> str:
        """The source and the kind of arithmetic its guarantee is for, in words."""

    def random(self, size: tuple[int, ...], /) -> FloatArray:
        """Uniform multiples of 2⁻⁵³ in [0, 1); a phase is 2π times one of them."""

    def add_gaussian(self, values: FloatArray, noise_std: float) -> FloatArray:
        """Return a new array: `values` plus independent N(0, noise_std²) in each coordinate."""


class NumpyNoise:
    """Pseudo-random noise of a NumPy generator, for simulations.

    Parameters
    ----------
    rng : numpy.random.Generator
        Whoever knows its state can subtract the noise.

    Notes
    -----
    The guarantee holds for ideal arithmetic on real numbers and an ideal generator.
    Floating-point Gaussians have gaps that depend on the noise-free value, and NumPy's
    generators are not cryptographic (Mironov 2012, *On significance of the least
    significant bits for differential privacy*). Use :class:`DeviceNoise` on a device.
    """

    __slots__ = ("_rng",)

    def __init__(self, rng: np.random.Generator) -> None:
        if not isinstance(rng, np.random.Generator):
            raise InvalidParameterError(
                f"rng must be a numpy.random.Generator, got {type(rng).__name__}; "
                "use numpy.random.default_rng(), or DeviceNoise() on a device"
            )
        self._rng = rng

    @property
    def real_arithmetic(self) -> bool:
        """False: ideal arithmetic only."""
        return False

    @property
    def description(self) -> str:
        """The source and its arithmetic, in words."""
        return (
            "NumPy's pseudo-random Gaussian, for simulation: "
            "the guarantee is for idealised arithmetic on real numbers"
        )

    def random(self, size: tuple[int, ...], /) -> FloatArray:
        """Uniform numbers in [0, 1)."""
        return self._rng.random(size)

    def add_gaussian(self, values: FloatArray, noise_std: float) -> FloatArray:
        """Add N(0, noise_std²) to each coordinate."""
        noise = self._rng.standard_normal(values.shape)
        noise *= noise_std
        noise += values
        return noise


class DeviceNoise:
    """Noise for a device: OpenDP's exact Gaussian, phases from the operating system.

    Needs the extra ``device`` (OpenDP). No seed exists: two releases never share noise,
    and nothing about the noise can be asked for or reproduced.

    Raises
    ------
    ImportError
        If OpenDP is not installed.

    Notes
    -----
    What holds, and on what it rests:

    1. ``make_gaussian`` treats each double as the integer multiple of 2⁻¹⁰⁷⁴ that it
       is, adds an exactly sampled discrete Gaussian on that lattice in integer
       arithmetic, and rounds once, at the end. Noise-free values of any two
       neighbours are on the lattice, so the release is ρ-zCDP with ρ = Δ²/2σ² for the
       numbers that leave the device (Canonne, Kamath and Steinke 2020,
       arXiv:2004.00010, Theorem 14); the last rounding is post-processing.
    2. Under ``accounting="exact"`` the claim is about the continuous Gaussian. Rounding
       N(x, σ²) to the lattice is post-processing of it, and differs from the discrete
       Gaussian by at most d·2⁻¹⁰⁷⁴/σ in total variation: below 2⁻⁹⁴⁰ for σ ≥ 2⁻¹⁰⁰
       and d ≤ 2³⁴. T releases change δ by at most T(1 + e^ε) times as much, which the
       slack of the calibration covers for δ > 1e-200, ε < 100, T < 2³².
    3. Δ is that of the map *as computed*: see :func:`~flwr_modulated._rounding.rounding_inflation`.
    4. Time is not hidden: the sampler rejects, and takes longer or shorter. A server
       that times a device to the microsecond is outside the guarantee.

    About 0.06 ms a coordinate.
    """

    __slots__ = ()

    def __init__(self) -> None:
        _opendp()

    @property
    def real_arithmetic(self) -> bool:
        """True: the guarantee is for the floating-point numbers that leave the device."""
        return True

    @property
    def description(self) -> str:
        """The source and its arithmetic, in words."""
        return (
            "OpenDP's exact discrete Gaussian and the operating system's entropy: the guarantee "
            "is for the floating-point numbers that really leave the device"
        )

    def random(self, size: tuple[int, ...], /) -> FloatArray:
        """Uniform multiples of 2⁻⁵³ in [0, 1)."""
        count = int(np.prod(size))
        words = np.frombuffer(secrets.token_bytes(8 * count), dtype=np.uint64)
        return np.ldexp((words >> np.uint64(11)).astype(np.float64), -53).reshape(size)

    def add_gaussian(self, values: FloatArray, noise_std: float) -> FloatArray:
        """Add an exactly sampled Gaussian to each coordinate.

        Parameters
        ----------
        values : ndarray
            Finite.
        noise_std : float
            Standard deviation, at least 2⁻¹⁰⁰.

        Raises
        ------
        InvalidParameterError
            If `noise_std` is smaller: note 2 would not be proven.
        """
        measurement = gaussian_measurement(check_real("noise_std", noise_std, low=_SMALLEST_STD))
        return np.array(measurement(values.ravel().tolist()), dtype=np.float64).reshape(values.shape)


def gaussian_measurement(noise_std: float) -> Any:
    """OpenDP's Gaussian measurement on vectors of doubles under L2 distance.

    Parameters
    ----------
    noise_std : float
        Standard deviation of each coordinate's noise.

    Returns
    -------
    opendp.mod.Measurement
        Its ``map(sensitivity)`` is the zCDP ρ that OpenDP proves, rounded up.
    """
    dp = _opendp()
    # The default granularity 2^-1074 makes every double a lattice point, so nothing is rounded before
    # the noise. A coarser one saves two thirds of the time, but its sensitivity depends on d.
    space = dp.vector_domain(dp.atom_domain(T=float, nan=False)), dp.l2_distance(T=float)
    return dp.m.make_gaussian(*space, scale=noise_std)


def as_noise_source(rng: np.random.Generator | NoiseSource) -> NoiseSource:
    """Wrap a NumPy generator; pass a noise source through."""
    if isinstance(rng, np.random.Generator):
        return NumpyNoise(rng)
    if not hasattr(rng, "add_gaussian"):
        raise InvalidParameterError(
            f"rng must be a numpy.random.Generator or a noise source, got {type(rng).__name__}; "
            "use DeviceNoise() on a device"
        )
    return rng


def _opendp() -> Any:
    try:
        import opendp.prelude as dp
    except ImportError:
        raise ImportError(
            "DeviceNoise needs OpenDP: pip install 'flwr-modulated[device]'. "
            "For a simulation, pass a numpy.random.Generator instead"
        ) from None
    dp.enable_features("contrib")
    return dp
