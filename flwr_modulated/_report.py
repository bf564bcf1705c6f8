"""Plans and audits in words: what the command line prints. Tables fit 80 columns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .audit import Finding
from .privacy import Guarantee
from .studies import Plan, Study, Target

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = ["console", "needs_document", "plan_document", "print_audit", "print_needs", "print_plan"]

_WIDTH = 80


def console() -> Console:
    """Where tables go: at most 80 columns, numbers left as they are."""
    from rich.console import Console

    made = Console(highlight=False)
    made.width = min(made.width, _WIDTH)
    return made


def print_plan(plan: Plan, out: Console) -> None:
    """Print the answer first, then the tables behind it, then advice."""
    from rich.padding import Padding

    out.print()
    for line in _answer(plan):
        out.print(line)
    out.print(_error_table(plan))
    out.print(_method_table(plan))
    out.print(_exposure_table(plan))
    out.print("[bold]Advice[/bold]")
    for sentence in plan.advice:
        out.print(Padding(f"• {sentence}", (0, 0, 0, 1)))
    out.print()


def print_needs(study: Study, targets: Sequence[Target], needed: Sequence[int | None], out: Console) -> None:
    """Print how many devices each of several targets takes."""
    guarantee = Guarantee(study.epsilon or 0.0, study.delta, study.relation)
    out.print()
    out.print(f"Promise: {guarantee}.")
    for line in _assumed(study):
        out.print(line)
    table = _table("Devices to ask", "for", "devices")
    for target, number in zip(targets, needed, strict=True):
        table.add_row(_target(target), "none would do" if number is None else f"{number:,}")
    out.print(table)
    out.print(
        "Name one target (--target-se, --target-r2-loss, --power with --effect) or --num-clients for the "
        "whole plan: expected errors, methods compared, what attackers learn, advice."
    )
    out.print()


def needs_document(study: Study, targets: Sequence[Target], needed: Sequence[int | None]) -> dict[str, Any]:
    """The same as plain values for JSON."""
    return {
        "guarantee": {
            "epsilon": study.epsilon,
            "delta": study.delta,
            "relation": str(study.relation),
            "unit": "row",
        },
        "needed": [
            {"target": _values(target), "num_clients": number}
            for target, number in zip(targets, needed, strict=True)
        ],
    }


def _assumed(study: Study) -> list[str]:
    return [
        f"Assumed: {study.num_features} standardised features with pairwise correlation "
        f"{study.correlation:g}, which explain {study.r2:.0%} of the label."
    ]


def _answer(plan: Plan) -> list[str]:
    study = plan.study
    if study.num_clients is None:
        first = f"Ask [bold]{plan.num_clients:,}[/bold] devices{_arrivals(plan)}{_goal(plan)}."
    elif study.epsilon is None:
        first = (
            f"With {plan.num_clients:,} devices{_arrivals(plan)}, ε = "
            f"[bold]{plan.guarantee.epsilon:g}[/bold] is the smallest{_goal(plan)}."
        )
    else:
        first = f"What to expect of {plan.num_clients:,} devices{_arrivals(plan)}:"
    rows = "its row" if study.num_releases == 1 else f"its row {study.num_releases} times"
    return [
        first,
        f"Promise: {plan.guarantee}.",
        f"Each device releases {rows} with noise of {plan.noise_std:.3g} standard deviations of a feature.",
        *_assumed(study),
    ]


def _arrivals(plan: Plan) -> str:
    if plan.study.dropout == 0:
        return ""
    return f", of which {plan.num_replies:,} are expected to answer"


def _goal(plan: Plan) -> str:
    target = plan.study.target
    if target is None:
        return ""
    return f" for {_target(target)}" if target.kind == "standard_error" else f" to {_target(target)}"


def _target(target: Target) -> str:
    if target.kind == "r2_loss":
        return f"lose at most {target.value:g} of R²"
    if target.kind == "standard_error":
        return f"standard errors of {target.value:g}"
    return f"find a coefficient of {target.effect:g} with a chance of {target.value:.0%}"


def _error_table(plan: Plan) -> Table:
    table = _table("What to expect of the coefficients", "", "value")
    error = "too noisy" if plan.standard_error is None else f"{plan.standard_error:.3g}"
    table.add_row("standard error of a typical coefficient", error)
    table.add_row("noise in the second moments (standard errors hold below 0.3)", f"{plan.noise_ratio:.2f}")
    if plan.study.target is not None and plan.study.target.effect is not None:
        chance = "none" if plan.power is None else f"{plan.power:.0%}"
        table.add_row(f"chance to find a coefficient of {plan.study.target.effect:g} (5 % test)", chance)
    table.add_row("chance to find that the features matter at all (5 % test)", f"{plan.detection:.0%}")
    return table


def _method_table(plan: Plan) -> Table:
    promise = f"ε = {plan.guarantee.epsilon:g}, δ = {plan.guarantee.delta:g}"
    table = _table(
        f"Methods at {promise}, each under the relation it hides", "method", "hides", "R²", "R² lost"
    )
    for row in plan.forecasts:
        table.add_row(row.method, row.hides, _share(row.r2), _share(row.r2_loss))
    return table


def _share(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 100 else f"{value:.0e}"


def _exposure_table(plan: Plan) -> Table:
    exposure = plan.exposure
    table = _table("What the best attacker makes of all that a device releases", "", "value")
    known = "the population" if plan.study.relation.hides_labels else "population and label"
    table.add_row("error of a feature (SD), best unbiased guess", f"{exposure.unbiased_error:.3g}")
    table.add_row(f"the same, using {known} too", f"{exposure.prior_error:.3f}")
    table.add_row(f"the same, from {known} alone", f"{exposure.blind_error:.3f}")
    table.add_row("chance to tell two neighbouring rows apart (a coin: 50 %)", f"{exposure.best_guess:.1%}")
    return table


def print_audit(findings: list[Finding], out: Console) -> None:
    """Print one table for every method, relation, δ and accounting; then what the columns mean."""
    groups: dict[tuple[str, str, str, float, str], list[Finding]] = {}
    for finding in findings:
        key = (finding.method, finding.relation, finding.unit, finding.delta, finding.accounting)
        groups.setdefault(key, []).append(finding)
    out.print()
    for (method, relation, unit, delta, accounting), members in groups.items():
        title = f"{method}: relation {relation}, unit {unit}, δ = {delta:g}, accounting {accounting}"
        table = _table(title, "ε", "rounds", "noise", "exact ε", "kept", "guess", "error", "prior", "runs")
        for one in sorted(members, key=lambda member: (member.epsilon, member.noise_std)):
            table.add_row(
                f"{one.epsilon:g}",
                f"{one.num_rounds}",
                f"{one.noise_std:.3g}",
                f"{one.exact_epsilon:.4g}",
                "yes" if one.kept else "[bold red]NO[/bold red]",
                f"{one.best_guess:.1%}",
                "–" if one.unbiased_error is None else f"{one.unbiased_error:.3g}",
                "–" if one.prior_error is None else f"{one.prior_error:.3f}",
                f"{one.num_runs:,}",
            )
        out.print(table)
    out.print(
        "noise: standard deviation of each released number. exact ε: what that noise gives at this δ, by the "
        "Gaussian mechanism itself. guess: chance of the best attacker to tell two neighbours apart (a coin: "
        "50 %). error: of the best unbiased guess of a feature, in its standard deviations; prior: of one "
        "who knows that features are standard normal; – where gradients are released."
    )
    broken = sum(not finding.kept for finding in findings)
    verdict = (
        "Every promise is kept." if not broken else f"[bold red]{broken} promise(s) NOT kept.[/bold red]"
    )
    out.print(f"\n{verdict}\n")


def _table(title: str, *columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(columns):
        text = index == 0 or column in {"hides", "kept"}
        table.add_column(column, justify="left" if text else "right", no_wrap=column != columns[0])
    return table


def plan_document(plan: Plan) -> dict[str, Any]:
    """A plan as plain values for JSON; infinite and missing numbers become None."""
    study, guarantee = plan.study, plan.guarantee
    target = study.target
    return {
        "num_clients": plan.num_clients,
        "num_replies": plan.num_replies,
        "guarantee": {
            "epsilon": guarantee.epsilon,
            "delta": guarantee.delta,
            "relation": str(guarantee.relation),
            "unit": guarantee.unit,
        },
        "accounting": study.accounting,
        "sensitivity": study.sensitivity,
        "num_releases": study.num_releases,
        "modulation": _values(study.modulation),
        "assumed": {
            "num_features": study.num_features,
            "r2": study.r2,
            "correlation": study.correlation,
            "dropout": study.dropout,
        },
        "target": None if target is None else _values(target),
        "noise_std": plan.noise_std,
        "standard_error": plan.standard_error,
        "noise_ratio": plan.noise_ratio,
        "power": plan.power,
        "detection": plan.detection,
        "forecasts": [_values(row) for row in plan.forecasts],
        "exposure": _values(plan.exposure),
        "advice": list(plan.advice),
    }


def _values(item: Any) -> dict[str, Any]:
    values = {name: getattr(item, name) for name in item.__slots__}
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
    }
