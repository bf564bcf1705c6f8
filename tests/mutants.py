"""Broken twins of the mathematics, and which check must catch each.

A mutant is a function that patches the package; its docstring says what is broken. The names in its
decorator are checks of the test modules; `test_mutants.py` runs them against it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest

from flwr_modulated import (
    DebiasedMoments,
    GradientDescent,
    InvalidDataError,
    Mechanism,
    Modulation,
    Moments,
    Replace,
    Ridge,
    mechanism,
    modulation,
    privacy,
)
from flwr_modulated import estimators as estimators_module
from flwr_modulated.noise import NumpyNoise

Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Mutant:
    """A defect and the checks that must see it, each as module:function."""

    apply: Callable[[Patch], None]
    caught_by: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.apply.__name__


MUTANTS: list[Mutant] = []


def caught_by(*checks: str) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    def register(apply: Callable[[Patch], None]) -> Callable[[Patch], None]:
        MUTANTS.append(Mutant(apply, checks))
        return apply

    return register


# How much noise ---------------------------------------------------------------------------------------

TIGHT = "test_privacy:check_exact_calibration_is_tight"


def scale_noise_std(patch: Patch, factor: float) -> None:
    stated = Mechanism.noise_std.fget
    patch.setattr(Mechanism, "noise_std", property(lambda self: factor * stated(self)))


def calibrate_with(patch: Patch, **changes: object) -> None:
    right = privacy.calibrate_noise_multiplier
    patch.setattr(mechanism, "calibrate_noise_multiplier", lambda *a, **k: right(*a, **(k | changes)))


@caught_by(TIGHT)
def half_the_noise(patch: Patch) -> None:
    scale_noise_std(patch, 0.5)


@caught_by(TIGHT)
def nine_tenths_of_the_noise(patch: Patch) -> None:
    scale_noise_std(patch, 0.9)


@caught_by(TIGHT)
def a_hair_less_noise(patch: Patch) -> None:
    scale_noise_std(patch, 1 - 1e-6)


@caught_by(TIGHT)
def a_little_too_much_noise(patch: Patch) -> None:
    scale_noise_std(patch, 1.0011)


@caught_by(TIGHT)
def releases_do_not_compose(patch: Patch) -> None:
    calibrate_with(patch, num_compositions=1)


@caught_by(TIGHT)
def exact_accounting_is_zcdp(patch: Patch) -> None:
    calibrate_with(patch, accounting="zcdp")


@caught_by(TIGHT, "test_mechanism:check_sensitivity")
def replaced_rows_are_one_radius_apart(patch: Patch) -> None:
    patch.setattr(Replace, "separation", property(lambda self: self.radius))


@caught_by("test_privacy:check_zcdp_conversion")
def zcdp_by_its_first_order(patch: Patch) -> None:
    """ρ = ε²/(4 ln 1/δ) forgets the ρ beside the square root."""
    patch.setattr(privacy, "zcdp_rho", lambda epsilon, delta: epsilon**2 / (4 * math.log(1 / delta)))


# Sensitivity ------------------------------------------------------------------------------------------

STEEPEST = "test_modulation:check_lipschitz_is_attained"
WORST_PAIR = "test_mechanism:check_sensitivity"


@caught_by(TIGHT, STEEPEST, WORST_PAIR)
def conditional_sensitivity_is_the_marginal_one(patch: Patch) -> None:
    patch.setattr(Modulation, "lipschitz", lambda self, sensitivity="conditional": self.contraction)


@caught_by(TIGHT, STEEPEST, WORST_PAIR)
def lipschitz_divides_by_m(patch: Patch) -> None:
    def lipschitz(self: Modulation, sensitivity: str = "conditional") -> float:
        bend = self.effective_amplitude * self.frequency / max(self.num_directions, 1)
        return self.contraction + (bend if sensitivity == "conditional" else 0.0)

    patch.setattr(Modulation, "lipschitz", lipschitz)


@caught_by(TIGHT, STEEPEST, WORST_PAIR)
def lipschitz_without_contraction(patch: Patch) -> None:
    right = Modulation.lipschitz
    patch.setattr(Modulation, "lipschitz", lambda self, *a: right(self, *a) + self.alpha)


@caught_by(WORST_PAIR, "test_mechanism:check_contract")
def rows_are_not_clipped(patch: Patch) -> None:
    patch.setattr(mechanism, "clip_rows", lambda rows, radius: rows)


@caught_by("test_modulation:check_bad_directions_are_refused")
def directions_are_checked_loosely(patch: Patch) -> None:
    patch.setattr(modulation, "ORTHONORMAL_TOLERANCE", 1e-3)


# What is drawn ----------------------------------------------------------------------------------------

LAW = "test_mechanism:check_noise_law"
INDEPENDENT = "test_mechanism:check_noise_is_independent"
FRESH = "test_mechanism:check_phases_are_fresh"
CONTRACT = "test_mechanism:check_contract"
VARIANCE = "test_gradient_variance:check_sampled_variance"
EXACT_VARIANCE = "test_gradient_variance:check_exact_variance"


def draw_noise(patch: Patch, draw: Callable[[np.random.Generator, tuple[int, int]], np.ndarray]) -> None:
    patch.setattr(
        NumpyNoise,
        "add_gaussian",
        lambda self, values, noise_std: values + noise_std * draw(self._rng, values.shape),
    )


def draw_turns(patch: Patch, draw: Callable[[np.random.Generator, tuple[int, int]], np.ndarray]) -> None:
    right = Modulation.apply

    class Source:
        def __init__(self, inner: np.random.Generator) -> None:
            self.inner = inner

        def random(self, size: tuple[int, int]) -> np.ndarray:
            return np.array(draw(self.inner, size))

    patch.setattr(
        Modulation,
        "apply",
        lambda self, features, directions, *, rng: right(self, features, directions, rng=Source(rng)),
    )


@caught_by(LAW)
def drawn_noise_is_smaller_than_stated(patch: Patch) -> None:
    draw_noise(patch, lambda rng, size: 0.98 * rng.standard_normal(size))


@caught_by(LAW)
def noise_of_another_shape(patch: Patch) -> None:
    draw_noise(patch, lambda rng, size: rng.laplace(0, math.sqrt(0.5), size))


@caught_by(VARIANCE, EXACT_VARIANCE, LAW)
def drawn_variance_is_ten_percent_off(patch: Patch) -> None:
    draw_noise(patch, lambda rng, size: math.sqrt(1.1) * rng.standard_normal(size))


@caught_by(INDEPENDENT)
def coordinates_share_noise(patch: Patch) -> None:
    draw_noise(patch, lambda rng, size: np.repeat(rng.standard_normal((size[0], 1)), size[1], axis=1))


@caught_by(INDEPENDENT)
def rows_share_noise(patch: Patch) -> None:
    draw_noise(patch, lambda rng, size: np.repeat(rng.standard_normal((1, size[1])), size[0], axis=0))


@caught_by(INDEPENDENT, CONTRACT)
def releases_share_noise(patch: Patch) -> None:
    draw_noise(patch, lambda rng, size: np.random.default_rng(0).standard_normal(size))


@caught_by(CONTRACT)
def noise_from_the_global_state(patch: Patch) -> None:
    draw_noise(patch, lambda rng, size: np.random.standard_normal(size))  # noqa: NPY002


@caught_by(CONTRACT)
def the_row_is_overwritten(patch: Patch) -> None:
    def add_gaussian(self: NumpyNoise, values: np.ndarray, noise_std: float) -> np.ndarray:
        values += noise_std * self._rng.standard_normal(values.shape)
        return values

    patch.setattr(NumpyNoise, "add_gaussian", add_gaussian)


@caught_by(FRESH)
def rows_share_phases(patch: Patch) -> None:
    draw_turns(patch, lambda rng, size: np.tile(rng.random((1, size[1])), (size[0], 1)))


@caught_by(FRESH)
def directions_share_phases(patch: Patch) -> None:
    draw_turns(patch, lambda rng, size: np.tile(rng.random((size[0], 1)), (1, size[1])))


@caught_by(FRESH)
def releases_share_phases(patch: Patch) -> None:
    draw_turns(patch, lambda rng, size: np.random.default_rng(0).random(size))


@caught_by("test_modulation:check_cosine_is_independent_of_the_row")
def phases_on_half_the_circle(patch: Patch) -> None:
    draw_turns(patch, lambda rng, size: rng.random(size) / 2)


@caught_by("test_modulation:check_directions_are_uniform")
def directions_keep_the_signs_of_the_factorisation(patch: Patch) -> None:
    right = np.linalg.qr

    def qr(a: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        frame, triangle = right(a)
        return frame, np.abs(triangle)

    patch.setattr(np.linalg, "qr", qr)


@caught_by(VARIANCE, EXACT_VARIANCE, "test_moments:check_debiasing")
def amplitude_over_m(patch: Patch) -> None:
    """λ/m in place of λ/√m, as in printed copies that lost their square roots."""
    right = Modulation.apply

    def apply(self: Modulation, *args: object, **more: object) -> object:
        lower = replace(self, amplitude=self.amplitude / math.sqrt(max(self.num_directions, 1)))
        return right(lower, *args, **more)

    patch.setattr(Modulation, "apply", apply)


# Moments ----------------------------------------------------------------------------------------------

DEBIASING = "test_moments:check_debiasing"
MEAN = "test_gradient_variance:check_sampled_mean"


def scale_modulation_term(patch: Patch, factor: float) -> None:
    right = Modulation.second_moment
    patch.setattr(Modulation, "second_moment", lambda self, directions: factor * right(self, directions))


def change_debiased(patch: Patch, change: Callable[[DebiasedMoments, Modulation], DebiasedMoments]) -> None:
    right = Moments.debias

    def debias(self: Moments, modulation: Modulation | None = None, directions: object = None) -> object:
        return change(right(self, modulation, directions), modulation or Modulation())

    patch.setattr(Moments, "debias", debias)


@caught_by(DEBIASING, MEAN)
def modulation_is_not_subtracted(patch: Patch) -> None:
    """The term λ²/(2m)·VVᵀ is missing."""
    scale_modulation_term(patch, 0.0)


@caught_by(DEBIASING, MEAN)
def modulation_is_subtracted_twice(patch: Patch) -> None:
    scale_modulation_term(patch, 2.0)


@caught_by(DEBIASING)
def modulation_is_subtracted_in_every_direction(patch: Patch) -> None:
    patch.setattr(
        Modulation,
        "second_moment",
        lambda self, v: self.effective_amplitude**2 / (2 * max(self.num_directions, 1)) * np.eye(len(v)),
    )


@caught_by(DEBIASING, MEAN)
def subtracted_variance_is_ten_percent_off(patch: Patch) -> None:
    right = Moments.debias
    patch.setattr(
        Moments,
        "debias",
        lambda self, *a: right(replace(self, noise_variance_sum=1.1 * self.noise_variance_sum), *a),
    )


@caught_by(DEBIASING)
def cross_moment_is_not_expanded(patch: Patch) -> None:
    change_debiased(patch, lambda d, m: replace(d, cross_moment=d.cross_moment * m.contraction))


@caught_by(DEBIASING)
def second_moment_is_expanded_once(patch: Patch) -> None:
    change_debiased(patch, lambda d, m: replace(d, second_moment=d.second_moment * m.contraction))


@caught_by(DEBIASING, "test_moments:check_monoid_example")
def sums_forget_the_others_noise(patch: Patch) -> None:
    right = Moments.__add__
    patch.setattr(
        Moments,
        "__add__",
        lambda self, other: replace(right(self, other), noise_variance_sum=2 * self.noise_variance_sum),
    )


@caught_by("test_moments:check_pool")
def rounds_weigh_the_same(patch: Patch) -> None:
    right = DebiasedMoments.pool
    patch.setattr(DebiasedMoments, "pool", lambda parts: right(replace(p, num_samples=1) for p in parts))


@caught_by("test_moments:check_joint_records")
def joint_labels_keep_their_scale(patch: Patch) -> None:
    right = DebiasedMoments.from_joint
    patch.setattr(DebiasedMoments, "from_joint", lambda joint, *, label_scale: right(joint, label_scale=1.0))


# Estimators and errors --------------------------------------------------------------------------------


@caught_by("test_estimators:check_auto")
def auto_ignores_the_noise(patch: Patch) -> None:
    patch.setattr(estimators_module, "second_moment_noise", lambda debiased: 0.0)


@caught_by("test_estimators:check_auto")
def auto_forgets_the_modulation(patch: Patch) -> None:
    right = estimators_module.second_moment_noise
    patch.setattr(
        estimators_module,
        "second_moment_noise",
        lambda debiased: right(replace(debiased, modulation_scale=0.0)),
    )


@caught_by("test_estimators:check_ridge")
def ridge_penalises_sums(patch: Patch) -> None:
    right = Ridge.estimate
    patch.setattr(
        Ridge,
        "estimate",
        lambda self, debiased: right(replace(self, penalty=self.penalty / debiased.num_samples), debiased),
    )


@caught_by("test_estimators:check_gradient_descent")
def descent_leaves_the_ball(patch: Patch) -> None:
    right = GradientDescent.update
    patch.setattr(GradientDescent, "update", lambda self, *a: right(replace(self, radius=1e9), *a))


@caught_by("test_bad_input:check_errors_keep_secrets")
def errors_show_the_row(patch: Patch) -> None:
    def require_finite(name: str, array: np.ndarray) -> None:
        if not np.isfinite(array).all():
            raise InvalidDataError(f"{name} must be finite, got {array}")

    patch.setattr(mechanism, "require_finite", require_finite)
