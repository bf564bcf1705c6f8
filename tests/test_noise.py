"""Noise sources: the law of the draws, what OpenDP proves of them, and the bound on rounding."""

from __future__ import annotations

import sys
from dataclasses import replace

import mpmath as mp
import numpy as np
import pytest
from scipy import stats
from scipy.special import ndtr

from flwr_modulated import (
    DeviceNoise,
    Distance,
    Guarantee,
    InvalidParameterError,
    Mechanism,
    Modulation,
    NumpyNoise,
    Replace,
    ReplaceRecord,
    draw_directions,
)
from flwr_modulated._rounding import DISTANCE_CLIP, map_error_bound, rounding_inflation
from flwr_modulated.modulation import check_directions
from flwr_modulated.noise import gaussian_measurement
from flwr_modulated.privacy import clip_rows, gaussian_delta, zcdp_rho

U = 2.0**-53
WAVY = Modulation(alpha=0.2, amplitude=0.7, frequency=1.5, num_directions=2)


class SpySource:
    """A source for real arithmetic with chosen phases that adds nothing and notes the noise asked for."""

    real_arithmetic = True
    description = "spy"

    def __init__(self, uniforms: np.ndarray) -> None:
        self.uniforms, self.noise_std = uniforms, float("nan")

    def random(self, size: tuple[int, ...]) -> np.ndarray:
        return self.uniforms.reshape(size).copy()

    def add_gaussian(self, values: np.ndarray, noise_std: float) -> np.ndarray:
        self.noise_std = noise_std
        return values


def _sampler_faults(draws: np.ndarray, noise_std: float) -> list[str]:
    """Kolmogorov–Smirnov at 1e-6, and a two-sided 5 SE band on mean and variance (6e-7 each).

    SE of the mean is σ/√n, of the variance σ²√(2/n).
    """
    n = draws.size
    faults = []
    if stats.kstest(draws / noise_std, "norm").pvalue < 1e-6:
        faults.append("ks")
    if abs(draws.mean()) > 5 * noise_std / np.sqrt(n):
        faults.append("mean")
    if abs(np.mean(draws**2) / noise_std**2 - 1) > 5 * np.sqrt(2 / n):
        faults.append("variance")
    return faults


@pytest.mark.statistical
def test_device_noise_is_gaussian_with_the_std_asked_for():
    """Statistics and errors as in `_sampler_faults`, n = 60,000, alpha 2e-6 in all; neighbouring
    coordinates uncorrelated within 5/√n (6e-7). Catches a standard deviation 3 % off (the variance is then
    6 % off, 10 SE), shown below by scaling the draws, and noise shared between coordinates.
    """
    draws = DeviceNoise().add_gaussian(np.zeros((20_000, 3)), 2.3)
    assert _sampler_faults(draws.ravel(), 2.3) == []
    for first, second in ((0, 1), (1, 2), (0, 2)):
        assert abs(np.corrcoef(draws[:, first], draws[:, second])[0, 1]) < 5 / np.sqrt(20_000)
    for wrong in (0.97, 1.03):
        assert "variance" in _sampler_faults(wrong * draws.ravel(), 2.3)
    assert "ks" in _sampler_faults(0.9 * draws.ravel(), 2.3)


def test_device_noise_is_added_to_the_values():
    """One draw of std 1e-6 beside 3: within 8 std, missed with probability 1e-15."""
    values = np.array([[3.0, -4.0]])
    assert np.abs(DeviceNoise().add_gaussian(values, 1e-6) - [[3.0, -4.0]]).max() < 8e-6


def test_device_uniforms_are_the_53_bit_grid():
    """Uniform on the multiples of 2⁻⁵³ in [0, 1): n = 100,000; KS at 1e-6; every one of the 53 bits is set
    half of the time within 5 SE = 5/(2√n) (53 × 6e-7). Catches a stuck bit, a 32-bit source, a shift by one.
    """
    n = 100_000
    draws = DeviceNoise().random((n // 2, 2)).ravel()
    assert stats.kstest(draws, "uniform").pvalue > 1e-6
    integers = np.ldexp(draws, 53)
    assert (integers == np.floor(integers)).all()
    assert draws.min() >= 0
    assert draws.max() < 1
    words = integers.astype(np.uint64)
    for bit in range(53):
        share = np.mean((words >> np.uint64(bit)) & np.uint64(1))
        assert abs(share - 0.5) < 5 / (2 * np.sqrt(n)), bit


def test_numpy_source_and_plain_generator_are_the_same_stream():
    mechanism = Mechanism(Modulation(), Guarantee(2.0, 1e-5, Distance(1.0)))
    rows = np.array([[0.1, -0.4], [1.0, 2.0]])
    expected = rows + mechanism.noise_std * np.random.default_rng(3).standard_normal((2, 2))
    for source in (np.random.default_rng(3), NumpyNoise(np.random.default_rng(3))):
        np.testing.assert_array_equal(mechanism.release(rows, rng=source), expected)


@pytest.mark.parametrize("relation", [Distance(1.0), Replace(3.0), ReplaceRecord(2.0, 1.5)])
@pytest.mark.parametrize("sensitivity", ["conditional", "marginal"])
@pytest.mark.parametrize("modulation", [Modulation(), WAVY])
@pytest.mark.parametrize("num_releases", [1, 7])
def test_opendp_proves_the_budget(relation, sensitivity, modulation, num_releases):
    """OpenDP's own privacy map, at the sensitivity of the map as computed, keeps T releases within ρ."""
    guarantee = Guarantee(2.0, 1e-5, relation)
    mechanism = Mechanism(modulation, guarantee, num_releases, sensitivity, "zcdp")
    directions = np.eye(4)[:, : modulation.num_directions]
    spy = SpySource(np.full((1, modulation.num_directions), 0.25))
    mechanism.release(np.ones((1, 4)), directions, rng=spy)
    radius = relation.clip_radius or DISTANCE_CLIP * relation.separation
    inflation = rounding_inflation(
        modulation, sensitivity, num_features=4, separation=relation.separation, clip_radius=radius
    )
    assert 0 < inflation < 1e-6
    computed_sensitivity = mechanism.l2_sensitivity * (1 + inflation)
    rho = gaussian_measurement(spy.noise_std).map(computed_sensitivity)
    assert num_releases * rho <= zcdp_rho(2.0, 1e-5)
    # The control: a thousandth less noise is too little.
    too_much = gaussian_measurement(0.999 * spy.noise_std).map(computed_sensitivity)
    assert num_releases * too_much > zcdp_rho(2.0, 1e-5)


def test_exact_accounting_covers_the_computed_map():
    mechanism = Mechanism(WAVY, Guarantee(1.0, 1e-6, Replace(3.0)), num_releases=5)
    spy = SpySource(np.full((1, 2), 0.1))
    mechanism.release(np.ones((1, 4)), np.eye(4)[:, :2], rng=spy)
    inflation = rounding_inflation(WAVY, "conditional", num_features=4, separation=6.0, clip_radius=3.0)
    multiplier = spy.noise_std / np.sqrt(5) / (mechanism.l2_sensitivity * (1 + inflation))
    assert gaussian_delta(1.0, multiplier) <= 1e-6
    assert gaussian_delta(1.0, 0.999 * multiplier) > 1e-6


@pytest.mark.parametrize("spacing", [1.0, 0.3, 0.1, 0.03])
def test_discrete_gaussian_is_close_to_a_rounded_one(spacing):
    """Total variation between the lattice Gaussian and the rounded continuous one is at most spacing/σ.

    This is what carries the exact accounting over to OpenDP's sampler; there, spacing is 2⁻¹⁰⁷⁴. Both
    distributions are computed exactly, on all lattice points within 12 σ.
    """
    points = spacing * np.arange(-int(12 / spacing), int(12 / spacing) + 1)
    weights = np.exp(-(points**2) / 2)
    discrete = weights / weights.sum()
    rounded = ndtr(points + spacing / 2) - ndtr(points - spacing / 2)
    distance = 0.5 * np.abs(discrete - rounded).sum()
    assert distance <= spacing
    assert distance > 1e-3 * spacing**2  # it is not zero: the comparison compares something


def _exact_map(modulation, row, directions, phases, radius):
    """Eq. (1) without noise at 300 bits, phases and directions taken as the doubles they are."""
    x = [mp.mpf(float(entry)) for entry in row]
    norm = mp.sqrt(mp.fsum(entry**2 for entry in x))
    if norm > radius:
        x = [entry * mp.mpf(radius) / norm for entry in x]
    result = [mp.mpf(modulation.contraction) * entry for entry in x]
    m = modulation.num_directions
    for j in range(m):
        v = [mp.mpf(float(entry)) for entry in directions[:, j]]
        inner = mp.fsum(a * b for a, b in zip(x, v, strict=True))
        wave = mp.cos(mp.mpf(modulation.frequency) * inner + mp.mpf(float(phases[j])))
        for i, entry in enumerate(v):
            result[i] += mp.mpf(modulation.amplitude) / mp.sqrt(m) * wave * entry
    return result


@pytest.mark.parametrize("radius", [3.0, DISTANCE_CLIP])
@pytest.mark.parametrize("modulation", [Modulation(alpha=0.3), WAVY, Modulation(0.0, 5.0, 9.0, 5)])
def test_map_error_stays_below_its_bound(modulation, radius, rng):
    """The computed map against 300-bit arithmetic on ordinary, huge, tiny and just-clipped rows.

    The bound must hold everywhere and be no more than 1,000 times the largest error seen.
    """
    d, m = 6, modulation.num_directions
    rows = rng.standard_normal((60, d))
    rows[:15] *= radius / np.linalg.norm(rows[:15], axis=1, keepdims=True)
    rows[15:30] *= 10.0 ** rng.uniform(2, 300, (15, 1))
    rows[30:35] *= 1e-310
    rows[35] = np.finfo(float).max
    rows[36] = 0.0
    rows[37:50] *= radius / 7
    directions = draw_directions(d, m, rng=rng)
    uniforms = rng.random((60, m))
    computed = modulation.apply(clip_rows(rows, radius), directions, rng=SpySource(uniforms))
    bound, largest = map_error_bound(modulation, d, radius), 0.0
    with mp.workprec(300):
        for row, got, uniform in zip(rows, computed, uniforms, strict=True):
            exact = _exact_map(modulation, row, directions, uniform * (2.0 * np.pi), radius)
            error = mp.sqrt(mp.fsum((mp.mpf(float(g)) - e) ** 2 for g, e in zip(got, exact, strict=True)))
            largest = max(largest, float(error))
    assert largest <= bound
    assert largest >= bound / 1000


def test_cosine_is_within_four_units_in_the_last_place(rng):
    """The one assumption of the bound, on arguments as large as a device can meet: 8u in absolute terms."""
    for size in (1.0, 1e3, 1e7):
        angles = rng.uniform(-size, size, 2000)
        with mp.workprec(200):
            worst = max(
                abs(mp.mpf(float(got)) - mp.cos(mp.mpf(float(angle))))
                for angle, got in zip(angles, np.cos(angles), strict=True)
            )
        assert float(worst) <= 8 * U


def test_frame_at_the_tolerance_is_covered():
    """A direction as long as the check lets through is steeper than L, and the inflation covers it."""
    modulation = Modulation(alpha=0.2, amplitude=2.0, frequency=3.0, num_directions=1)
    separation = 1e-5
    frame = np.array([[np.sqrt(1 + 0.99e-9)], [0.0]])
    check_directions(frame, num_features=2, num_directions=1)
    with mp.workprec(200):
        quarter = float(-mp.pi / 2)  # the steepest point of the cosine
        near, far = (
            _exact_map(modulation, (end, 0.0), frame, [quarter], 1.0)[0]
            for end in (separation / 2, -separation / 2)
        )
        steepness = float((near - far) / mp.mpf(separation))
    nominal = modulation.lipschitz()
    inflation = rounding_inflation(
        modulation, "conditional", num_features=2, separation=separation, clip_radius=separation
    )
    assert nominal * (1 + 1e-10) < steepness <= nominal * (1 + inflation)


def test_coupled_phase_grids_leave_what_the_bound_says(rng):
    """Marginal sensitivity with 53-bit phases: shifting the grid maps one neighbour's cosine onto the
    other's up to 30u, for 300 random pairs of rows and grid points. Unshifted they differ by order 1.
    """
    largest = unshifted = 0.0
    with mp.workprec(200):
        for _ in range(300):
            here, there = rng.uniform(-20, 20, 2)
            k = int(rng.integers(2**53))
            shift = int(mp.nint(mp.mpf(2**53) * (mp.mpf(here) - mp.mpf(there)) / (2 * mp.pi)))
            phase, shifted = (
                float(np.float64(number) * U * (2.0 * np.pi)) for number in (k, (k + shift) % 2**53)
            )
            wave = mp.cos(mp.mpf(here) + mp.mpf(phase))
            largest = max(largest, float(abs(wave - mp.cos(mp.mpf(there) + mp.mpf(shifted)))))
            unshifted = max(unshifted, float(abs(wave - mp.cos(mp.mpf(there) + mp.mpf(phase)))))
    assert largest <= 30 * U
    assert unshifted > 1


def test_out_of_proportion_rounding_is_refused():
    modulation = Modulation(amplitude=1e3, frequency=1e9, num_directions=1)
    mechanism = Mechanism(modulation, Guarantee(1.0, 1e-5, Distance(1.0)), sensitivity="marginal")
    with pytest.raises(InvalidParameterError, match="rounding errors"):
        mechanism.release([[123456.789, 0.0]], [[1.0], [0.0]], rng=DeviceNoise())
    mechanism.release([[0.1, 0.0]], [[1.0], [0.0]], rng=np.random.default_rng(0))  # a simulation goes on


def test_device_release_clips_even_under_distance():
    """At 2²⁰ radii; with σ about 2, a row of 1e300 must land there within 8 σ, and not overflow."""
    mechanism = Mechanism(Modulation(), Guarantee(2.0, 1e-5, Distance(1.0)))
    released = mechanism.release([[1e300, 0.0]], rng=DeviceNoise())
    assert abs(released[0, 0] - DISTANCE_CLIP) < 8 * mechanism.noise_std
    assert abs(released[0, 1]) < 8 * mechanism.noise_std


@pytest.mark.parametrize("modulation", [Modulation(), WAVY])
def test_device_release_contract(modulation):
    mechanism = Mechanism(modulation, Guarantee(2.0, 1e-5, Replace(3.0)))
    rows = np.array([[0.1, -0.4, 5.0], [1.0, 2.0, -3.0]])
    before = rows.copy()
    directions = np.eye(3)[:, : modulation.num_directions]
    first = mechanism.release(rows, directions, rng=DeviceNoise())
    second = mechanism.release(rows, directions, rng=DeviceNoise())
    assert first.shape == (2, 3)
    assert first.dtype == np.float64
    assert np.unique(np.concatenate([first, second])).size == 12  # no draw comes twice
    np.testing.assert_array_equal(rows, before)


def test_missing_opendp_is_a_clear_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "opendp.prelude", None)
    with pytest.raises(ImportError, match=r"flwr-modulated\[device\]"):
        DeviceNoise()


def test_wrong_sources_are_named():
    mechanism = Mechanism(Modulation(), Guarantee(2.0, 1e-5, Distance(1.0)))
    with pytest.raises(InvalidParameterError, match="got int"):
        mechanism.release([[0.0]], rng=7)
    with pytest.raises(InvalidParameterError, match="got int"):
        NumpyNoise(7)
    tiny = replace(mechanism, guarantee=Guarantee(2.0, 1e-5, Distance(1e-40)))
    with pytest.raises(InvalidParameterError, match="noise_std must be finite and in"):
        tiny.release([[0.0]], rng=DeviceNoise())


def test_sources_say_their_arithmetic():
    assert "idealised arithmetic" in NumpyNoise(np.random.default_rng(0)).description
    assert "OpenDP" in DeviceNoise().description
    assert "floating-point" in DeviceNoise().description
