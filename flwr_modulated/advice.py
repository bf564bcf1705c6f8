"""What a plan means for its owner, in sentences."""

from __future__ import annotations

import math

from .assumptions import Population
from .privacy import Distance
from .studies import Plan

__all__ = ["TRUSTED_NOISE_RATIO", "advise"]

# Standard errors computed from the data can be trusted up to here.
TRUSTED_NOISE_RATIO = 0.3


def advise(plan: Plan, clipped: Population) -> tuple[str, ...]:
    """Advice that follows from a plan.

    Parameters
    ----------
    plan : Plan
        The answer so far.
    clipped : Population
        The rows as devices clip them.

    Returns
    -------
    tuple of str
        The most consequential first.
    """
    sentences = [
        _usefulness(plan),
        _baseline(plan),
        _modulation(plan),
        _releases(plan),
        _inference(plan),
        _clipping(plan, clipped),
        _relation(plan),
    ]
    return tuple(sentence for sentence in sentences if sentence)


def _usefulness(plan: Plan) -> str:
    best = plan.forecasts[0]
    if best.r2 > 0.5 * plan.study.r2:
        return ""
    return (
        f"Most of the signal is lost: the expected R² is {best.r2:.2f} of a possible {plan.study.r2:.2f}. "
        "Ask more devices, use fewer features, or accept a larger ε."
    )


def _baseline(plan: Plan) -> str:
    own = plan.forecasts[0]
    local = next(row for row in plan.forecasts if row.method.startswith("local DP FedAvg"))
    if local.r2 <= own.r2:
        return ""
    return (
        f"Local DP FedAvg is expected to do better here (R² {local.r2:.2f} against {own.r2:.2f}), with its "
        "clip norm and step tuned with hindsight. It gives coefficients, but no standard errors or tests."
    )


def _modulation(plan: Plan) -> str:
    modulation, mechanism = plan.study.modulation, plan.study.mechanism(plan.guarantee.epsilon)
    if modulation.is_plain:
        if modulation.alpha > 0:
            return "The contraction α changes nothing: noise and signal shrink together. Leave it out."
        return (
            "Modulation is off, which is best for accuracy at any given guarantee. It would add an "
            "uncalibrated uncertainty along its directions, against attackers who do not know the phases."
        )
    factor = mechanism.modulation.lipschitz(plan.study.sensitivity) / modulation.contraction
    extra = modulation.amplitude / math.sqrt(2 * modulation.num_directions) / modulation.contraction
    cost = (
        f"needs {factor:.2f} times the noise of the plain release and"
        if factor > 1
        else "leaves the calibrated noise as it is, relies on secret phases, and"
    )
    return (
        f"The modulation {cost} adds an uncertainty of {extra:.2g} along {modulation.num_directions} of "
        f"{plan.study.num_features} directions for attackers without the phases. It does not lower ε; for "
        "accuracy it is not worth it."
    )


def _releases(plan: Plan) -> str:
    count = plan.study.num_releases
    if count == 1:
        return ""
    return (
        f"One release with the whole budget is better than {count} that share it: they hold the same "
        f"information, but squaring them costs √{count} times the noise in the second moments."
    )


def _inference(plan: Plan) -> str:
    enough = math.ceil(plan.num_clients * (plan.noise_ratio / TRUSTED_NOISE_RATIO) ** 2)
    if plan.noise_ratio > 1.02 * TRUSTED_NOISE_RATIO:
        return (
            f"Standard errors computed from the data will be unreliable (noise ratio {plan.noise_ratio:.2f}, "
            f"should be below {TRUSTED_NOISE_RATIO}): that takes about {enough:,} devices. The score test "
            "holds at any number."
        )
    target = plan.study.target
    if target is None or target.standard_error is None or plan.noise_ratio < 0.98 * TRUSTED_NOISE_RATIO:
        return ""
    return "What is needed is set by the point from which standard errors can be trusted, not by their size."


def _clipping(plan: Plan, clipped: Population) -> str:
    radius = plan.study.relation.clip_radius
    if radius is None:
        return ""
    pop = plan.study.population
    kept = float(pop.beta @ pop.second_moment @ clipped.beta) / float(pop.beta @ pop.second_moment @ pop.beta)
    return (
        f"Clipping to radius {radius:g} turns coefficients into {kept:.0%} of themselves on average and "
        f"costs {float(pop.r2_loss(clipped.beta)):.3f} of R² at any number of devices. Standard errors and "
        "tests are about the coefficients of clipped rows."
    )


def _relation(plan: Plan) -> str:
    relation, d = plan.study.relation, plan.study.num_features
    if not isinstance(relation, Distance):
        return ""
    apart = math.sqrt(2 * d)
    if apart <= relation.radius:
        return ""
    return (
        f"{relation} hides a row among rows within {relation.radius:g}; two typical rows are {apart:.1f} "
        f"apart, which costs {(apart / relation.radius) ** 2:.0f} times the zCDP budget. DP FedAvg hides any "
        "record: to compare like with like, plan with replace:RADIUS or replace_record:RADIUS."
    )
