"""How many devices for which error at which ε: answers before any data, from the theory alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Literal

import numpy as np
from scipy.special import chdtri, chndtr, ndtr

from ._roots import bracketed_root
from .advice import TRUSTED_NOISE_RATIO, advise
from .assumptions import Population
from .errors import InvalidParameterError
from .estimators import Auto, GradientDescent
from .forecast import (
    coefficient_spread,
    draw_iterates,
    draw_moment_estimates,
    expected_r2_loss,
    federated_averaging_loss,
)
from .information import label_information
from .modulation import Modulation
from .privacy import Guarantee, calibrate_noise_multiplier
from .reconstruction import average_of_releases, inversion_error, prior_error
from .release_law import ReleaseLaw
from .studies import CRITICAL_VALUE, Exposure, Forecast, Plan, Study, Target, choose_target, parse_relation
from .tradeoff import best_guess

__all__ = [
    "Exposure",
    "Forecast",
    "Plan",
    "Study",
    "Target",
    "choose_target",
    "expected_r2",
    "exposure",
    "needed_clients",
    "parse_relation",
    "plan",
]

# Either is known to about 2 % from so many draws.
_NUM_DRAWS = 300
_NUM_SPREAD_DRAWS = 2000
_MOST_CLIENTS = 10**9
# The paper's iterative method: ten rounds, step 0.8.
_ITERATIVE_ROUNDS = 10
_FEDERATED_ROUNDS = (1, 5, 20, 50)


def plan(study: Study) -> Plan:
    """Answer for the one of ε, number of devices and target that the study leaves open.

    Parameters
    ----------
    study : Study
        Assumptions and wishes.

    Returns
    -------
    Plan

    Raises
    ------
    InvalidParameterError
        If no number of devices up to a billion, or no ε from 0.001 to 1000, reaches the target.

    Notes
    -----
    Rows and errors are taken as Gaussian; see :mod:`flwr_modulated.forecast`. Draws use a fixed
    stream, so equal studies get equal plans.
    """
    clipped = study.population.clipped(study.relation)
    epsilon, replies = study.epsilon, study.num_clients
    if replies is not None:
        replies = math.floor(replies * (1 - study.dropout))
    if replies is None:
        replies = _needed_replies(study, clipped)
    if epsilon is None:
        epsilon = _needed_epsilon(study, clipped, replies)
    clients = study.num_clients or math.ceil(replies / (1 - study.dropout))
    law = _law(study, clipped, epsilon, replies)
    ratio, effect = law.noise_ratio(), None if study.target is None else study.target.effect
    error = _error(study, law, "standard_error") if ratio <= 1 else None
    testable = None if effect is None or error is None else effect * _attenuation(study, clipped) / error
    answer = Plan(
        study=study,
        guarantee=Guarantee(epsilon, study.delta, study.relation),
        num_clients=clients,
        num_replies=replies,
        noise_std=law.noise_std,
        standard_error=error,
        noise_ratio=ratio,
        power=None if testable is None else _power(testable),
        detection=_detection(law),
        forecasts=_forecasts(study, clipped, epsilon, replies),
        exposure=exposure(study, epsilon),
        advice=(),
    )
    return replace(answer, advice=advise(answer, clipped))


def needed_clients(study: Study, targets: Sequence[Target]) -> list[int | None]:
    """Devices to ask for each of several targets at the study's ε.

    Parameters
    ----------
    study : Study
        With ε and any target, which is replaced by each of `targets` in turn.
    targets : sequence of Target
        What might be wanted.

    Returns
    -------
    list of int or None
        None where a billion devices would not do.
    """
    clipped = study.population.clipped(study.relation)
    answers: list[int | None] = []
    for target in targets:
        try:
            replies = _needed_replies(replace(study, target=target), clipped)
        except InvalidParameterError:
            answers.append(None)
        else:
            answers.append(math.ceil(replies / (1 - study.dropout)))
    return answers


def _law(study: Study, clipped: Population, epsilon: float, replies: int) -> ReleaseLaw:
    return ReleaseLaw(
        population=clipped,
        num_samples=replies,
        modulation=study.modulation,
        noise_std=study.mechanism(epsilon).noise_std,
        num_releases=study.num_releases,
        label_scale=study.label_scale,
    )


def _stream() -> np.random.Generator:
    # The same numbers for every candidate make the error a smooth function of K and ε.
    return np.random.default_rng(20260507)


def _error(study: Study, law: ReleaseLaw, kind: Literal["standard_error", "r2_loss"]) -> float:
    if kind == "r2_loss":
        return expected_r2_loss(law, Auto(), study.population, num_draws=_NUM_DRAWS, rng=_stream())
    estimates = draw_moment_estimates(law, num_draws=_NUM_SPREAD_DRAWS, rng=_stream())
    return float(np.sqrt(np.mean(coefficient_spread(law, estimates) ** 2)))


def _excess(study: Study, clipped: Population, epsilon: float, replies: int, *, drawn: bool) -> float:
    """Log of how far the target is missed, negative where it is reached.

    From draws, or from the asymptotic formulas, which are quick and monotone but optimistic.
    """
    target, law = study.target, _law(study, clipped, epsilon, replies)
    if target is None:
        raise InvalidParameterError("target must be given where a plan solves for ε or the number of devices")
    if target.standard_error is None:
        pop = study.population
        if drawn:
            loss = _error(study, law, "r2_loss")
        else:
            spread = float(np.sum(pop.second_moment * law.covariance())) / pop.label_square
            loss = spread + float(pop.r2_loss(clipped.beta))
        return math.log(loss / target.value)
    goal = target.standard_error * (_attenuation(study, clipped) if target.kind == "power" else 1.0)
    # Pure noise has a small spread around zero: a standard error only counts where it can be trusted.
    ratio = law.noise_ratio() / TRUSTED_NOISE_RATIO
    if drawn and ratio < 2:
        return math.log(max(_error(study, law, "standard_error") / goal, ratio))
    asymptotic = float(np.sqrt(np.mean(law.standard_errors() ** 2)))
    return math.log(max(asymptotic / goal, ratio))


def _needed_replies(study: Study, clipped: Population) -> int:
    least, epsilon = 2 * study.num_features + 4, study.epsilon or 0.0

    def excess(log_k: float, *, drawn: bool) -> float:
        return _excess(study, clipped, epsilon, max(round(math.exp(log_k)), least), drawn=drawn)

    root = _last_crossing(excess, math.log(least), math.log(_MOST_CLIENTS))
    if root is None:
        raise InvalidParameterError(
            f"target must be reachable: at ε={epsilon:g} even {_MOST_CLIENTS:,} devices are not enough"
            f"{_floor_hint(study, clipped)}"
        )
    return max(math.ceil(math.exp(root)), least)


def _needed_epsilon(study: Study, clipped: Population, replies: int) -> float:
    most = 1000.0 if study.accounting != "classical" else 1.0

    def excess(log_epsilon: float, *, drawn: bool) -> float:
        return _excess(study, clipped, min(math.exp(log_epsilon), most), replies, drawn=drawn)

    root = _last_crossing(excess, math.log(1e-3), math.log(most))
    if root is None:
        raise InvalidParameterError(
            f"target must be reachable: with {replies:,} rows even ε={most:g} is not enough; ask more devices"
            f"{_floor_hint(study, clipped)}"
        )
    # Rounded up to three digits: the target still holds.
    epsilon = math.exp(root)
    digit = 10.0 ** (math.floor(math.log10(epsilon)) - 2)
    return min(round(math.ceil(epsilon / digit) * digit, 9), most)


def _last_crossing(excess: Callable[..., float], low: float, high: float) -> float | None:
    # Where a target is reached for good, on a log scale and within one percent; None if nowhere.
    # Reached for good: with a flat spectrum, the loss of the tuning-free rule is not monotone where τ is
    # near half an eigenvalue. So walk down from where the asymptotic formula says that all is well.
    if excess(high, drawn=False) > 0:
        return None
    guess = low
    if excess(low, drawn=False) > 0:
        guess = bracketed_root(lambda x: excess(x, drawn=False), low, high, tolerance=0.05)

    @cache  # the ends of the bracket are asked for twice
    def missed(x: float) -> float:
        return excess(x, drawn=True)

    right = min(guess + 0.3, high)
    while missed(right) > 0:
        if right >= high:
            return None
        right = min(right + 0.7, high)
    left = right
    while missed(left) <= 0:
        if left <= low:
            return low
        right, left = left, max(left - 0.7, low)
    return bracketed_root(missed, left, right, tolerance=1e-2)


def _floor_hint(study: Study, clipped: Population) -> str:
    target = study.target
    if target is None or target.kind != "r2_loss" or study.relation.clip_radius is None:
        return ""
    floor = float(study.population.r2_loss(clipped.beta))
    return f"; clipping to radius {study.relation.clip_radius:g} alone costs {floor:.3g}: raise the radius"


def _attenuation(study: Study, clipped: Population) -> float:
    # What clipping leaves of the coefficients, on average.
    pop = study.population
    return float(pop.beta @ pop.second_moment @ clipped.beta) / float(pop.beta @ pop.second_moment @ pop.beta)


def _power(ratio: float) -> float:
    # Of a two-sided test of a coefficient of `ratio` standard errors.
    return float(ndtr(ratio - CRITICAL_VALUE) + ndtr(-ratio - CRITICAL_VALUE))


def _detection(law: ReleaseLaw) -> float:
    # Score test of β = 0: K zᵀC⁻¹z is noncentral χ²_d, with C the covariance of y·u for Gaussian rows
    # and 2zzᵀ − zzᵀ = zzᵀ of it the label's own correlation with the rows.
    pop, k = law.population, law.num_samples
    d, scale = pop.num_features, law.modulation.contraction
    noise = (law.noise_std**2 + law.modulation.effective_amplitude**2 / (2 * law.num_columns)) / scale**2
    z = pop.second_moment @ pop.beta
    label = pop.label_square
    spread = label * pop.second_moment + np.outer(z, z)
    label_noise = 0.0 if law.label_scale is None else law.label_scale**2 * noise
    release = label * noise * np.eye(d) + label_noise * (pop.second_moment + noise * np.eye(d))
    covariance = spread + release / law.num_releases
    shift = k * float(z @ np.linalg.solve(covariance, z))
    # chndtr loses its way for huge shifts, where the answer is 1.
    return 1.0 if shift > 1000 else float(1 - chndtr(chdtri(d, 0.05), d, shift))


def _forecasts(study: Study, clipped: Population, epsilon: float, replies: int) -> tuple[Forecast, ...]:
    pop, hides = study.population, str(study.relation)
    law = _law(study, clipped, epsilon, replies)

    def forecast(method: str, loss: float, relation: str = hides) -> Forecast:
        return Forecast(method, relation, pop.r2 - loss, loss)

    released = "one release" if study.num_releases == 1 else f"{study.num_releases} releases"
    loss = _error(study, law, "r2_loss")
    rows = [forecast(f"{released}, tuning-free (default)", loss)]
    if study.num_releases > 1 or not study.modulation.is_plain or study.modulation.alpha > 0:
        simple = _law(replace(study, modulation=Modulation(), num_releases=1), clipped, epsilon, replies)
        rows.append(forecast("one plain release, tuning-free", _error(study, simple, "r2_loss")))
    moment = draw_moment_estimates(law, num_draws=_NUM_SPREAD_DRAWS, rng=_stream())
    rows.append(forecast(f"{released}, unregularised (median)", float(np.median(pop.r2_loss(moment)))))
    steps = replace(
        law,
        noise_std=study.mechanism(epsilon, num_releases=_ITERATIVE_ROUNDS).noise_std,
        num_releases=_ITERATIVE_ROUNDS,
    )
    if study.modulation.num_directions < law.num_columns:
        iterates = draw_iterates(steps, GradientDescent(step=0.8), num_draws=60, rng=_stream())
        rows.append(forecast(f"iterative, {_ITERATIVE_ROUNDS} rounds", float(pop.r2_loss(iterates).mean())))
    for label, central in (("local DP FedAvg, tuned", False), ("central DP FedAvg, trusted server", True)):
        loss = min(
            federated_averaging_loss(
                pop,
                num_samples=replies,
                noise_multiplier=calibrate_noise_multiplier(
                    epsilon, study.delta, num_compositions=rounds, accounting=study.accounting
                ),
                num_rounds=rounds,
                central=central,
                rng=_stream(),
            )
            for rounds in _FEDERATED_ROUNDS
        )
        rows.append(forecast(label, loss, "any record"))
    sampling = pop.residual_variance * study.num_features / (replies - study.num_features - 1)
    rows.append(forecast("no privacy: least squares", sampling / pop.label_square, "nothing"))
    return tuple(rows)


def expected_r2(study: Study) -> float:
    """Expected R² of the default estimator, for a study with both ε and devices.

    Parameters
    ----------
    study : Study
        With `epsilon` and `num_clients`; a target is not used.

    Returns
    -------
    float
    """
    replies = math.floor((study.num_clients or 0) * (1 - study.dropout))
    law = _law(study, study.population.clipped(study.relation), study.epsilon or 0.0, replies)
    return study.population.r2 - _error(study, law, "r2_loss")


def exposure(study: Study, epsilon: float) -> Exposure:
    """What the best attackers make of all that one device releases.

    Parameters
    ----------
    study : Study
        Relation, map and releases.
    epsilon : float
        ε > 0, at the study's δ and relation.

    Returns
    -------
    Exposure
    """
    mechanism, pop, d = study.mechanism(epsilon), study.population, study.num_features
    modulation, sigma = average_of_releases(study.modulation, mechanism.noise_std, study.num_releases)
    # One direction may lie in the label, which is not what is guessed here.
    modulation = replace(modulation, num_directions=min(modulation.num_directions, d))
    hidden = study.relation.hides_labels
    beta, residual_std = (None, None) if hidden else (pop.beta, math.sqrt(pop.residual_variance))
    informed = prior_error(
        np.eye(d)[:, : modulation.num_directions],
        modulation=modulation,
        noise_std=sigma,
        prior_covariance=pop.second_moment,
        beta=beta,
        residual_std=residual_std,
    )
    known = np.linalg.inv(pop.second_moment) + label_information(beta, residual_std, d)
    multiplier = mechanism.noise_std / mechanism.l2_sensitivity / math.sqrt(study.num_releases)
    return Exposure(
        unbiased_error=math.sqrt(inversion_error(num_features=d, modulation=modulation, noise_std=sigma)),
        prior_error=math.sqrt(informed),
        blind_error=math.sqrt(float(np.trace(np.linalg.inv(known))) / d),
        best_guess=best_guess(multiplier),
    )
