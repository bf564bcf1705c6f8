"""The command line `flwr-modulated`: each command is one function that imports what it needs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .errors import InvalidParameterError, ModulatedError

if TYPE_CHECKING:
    from .studies import Target

__all__ = ["app", "main"]

app = typer.Typer(
    name="flwr-modulated",
    help="Private regression from devices that hold one row each.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


ledger_app = typer.Typer(help="A device's record of what it has spent.", no_args_is_help=True)
app.add_typer(ledger_app, name="ledger")


@app.callback()
def _root() -> None:
    """Keep sub-commands even while there is only one."""


@ledger_app.command("show")
def show_ledger(path: Annotated[Path, typer.Argument(help="The device's ledger file.")]) -> None:
    """Say what a device has spent, on what, and what is left."""
    from .ledger import Ledger

    typer.echo(str(Ledger(path).summary()))


@app.command("plan")
def show_plan(
    num_features: Annotated[int, typer.Option("--features", help="Number of features.")],
    relation: Annotated[
        str, typer.Option(help="distance:RADIUS, replace:RADIUS or replace_record:RADIUS[,LABEL_SCALE].")
    ],
    delta: Annotated[float, typer.Option(help="δ, well below 1 / devices.")],
    epsilon: Annotated[float | None, typer.Option(help="ε; left out, the smallest is found.")] = None,
    num_clients: Annotated[
        int | None, typer.Option(help="Devices asked; left out, the number needed is found.")
    ] = None,
    target_se: Annotated[float | None, typer.Option(help="Wanted standard error of a coefficient.")] = None,
    target_r2_loss: Annotated[
        float | None, typer.Option(help="R² that may be lost against the best linear rule.")
    ] = None,
    power: Annotated[float | None, typer.Option(help="Wanted chance to find an --effect.")] = None,
    effect: Annotated[float | None, typer.Option(help="Standardised coefficient to be found.")] = None,
    r2: Annotated[float, typer.Option(help="Share of the label that the features explain.")] = 0.5,
    correlation: Annotated[float, typer.Option(help="Correlation of every pair of features.")] = 0.0,
    dropout: Annotated[float, typer.Option(help="Share of devices that never answer.")] = 0.0,
    releases: Annotated[int, typer.Option(help="Releases of each device, sharing ε.")] = 1,
    alpha: Annotated[float, typer.Option(help="Contraction of the map.")] = 0.0,
    amplitude: Annotated[float, typer.Option(help="Amplitude of the modulation.")] = 0.0,
    frequency: Annotated[float, typer.Option(help="Frequency of the modulation.")] = 0.0,
    directions: Annotated[int, typer.Option(help="Directions of the modulation.")] = 0,
    sensitivity: Annotated[str, typer.Option(help="conditional or marginal.")] = "conditional",
    accounting: Annotated[str, typer.Option(help="exact, zcdp or classical.")] = "exact",
    figure: Annotated[Path | None, typer.Option(help="Draw the curves to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """How many devices, how small an ε, or what error: give two, get the third.

    The two are of --epsilon, --num-clients and one target (--target-se, --target-r2-loss, or
    --power with --effect); with --epsilon alone, a table of devices for common targets.
    Features and label count as standardised.
    """
    import json

    from . import planning
    from ._report import console, needs_document, plan_document, print_needs, print_plan
    from .modulation import Modulation

    wanted = planning.choose_target(
        standard_error=target_se, r2_loss=target_r2_loss, power=power, effect=effect
    )
    # With ε alone, the devices that several common targets take.
    common = epsilon is not None and num_clients is None and wanted is None
    study = planning.Study(
        num_features=num_features,
        relation=planning.parse_relation(relation),
        delta=delta,
        epsilon=epsilon,
        num_clients=num_clients,
        target=_common_targets()[0] if common else wanted,
        r2=r2,
        correlation=correlation,
        dropout=dropout,
        modulation=Modulation(alpha, amplitude, frequency, directions),
        num_releases=releases,
        sensitivity=sensitivity,  # type: ignore[arg-type]
        accounting=accounting,  # type: ignore[arg-type]
    )
    if common:
        if figure is not None:
            raise InvalidParameterError("figure needs a target or num_clients beside epsilon")
        targets = _common_targets()
        needed = planning.needed_clients(study, targets)
        if as_json:
            typer.echo(json.dumps(needs_document(study, targets, needed), indent=2, ensure_ascii=False))
        else:
            print_needs(study, targets, needed, console())
        return
    answer = planning.plan(study)
    if figure is not None:
        from ._plan_figure import draw_plan

        draw_plan(answer, figure)
    if as_json:
        typer.echo(json.dumps(plan_document(answer), indent=2, ensure_ascii=False, allow_nan=False))
    else:
        print_plan(answer, console())


def _common_targets() -> list[Target]:
    from .studies import Target

    return [
        *(Target("standard_error", value) for value in (0.1, 0.05, 0.02)),
        *(Target("r2_loss", value) for value in (0.05, 0.02)),
        *(Target("power", 0.8, effect) for effect in (0.2, 0.1)),
    ]


@app.command("audit")
def audit(records: Annotated[Path, typer.Argument(help="A JSON-lines file of runs.")]) -> None:
    """Check what runs promised against the noise they used; exit code 1 if a promise is broken."""
    from ._report import console, print_audit
    from .audit import audit_records, read_records

    findings = audit_records(read_records(records))
    print_audit(findings, console())
    if not all(finding.kept for finding in findings):
        raise typer.Exit(1)


@app.command("run-status")
def show_run_status(
    superlink: Annotated[
        str | None,
        typer.Argument(help="SuperLink connection, as for `flwr run`; left out, Flower's default."),
    ] = None,
    run_id: Annotated[str | None, typer.Option(help="The run; left out, the latest.")] = None,
    wait: Annotated[float, typer.Option(help="Seconds to wait for the run to finish.")] = 0.0,
    output: Annotated[
        str, typer.Option(help="Directory of the results, as in the run config.")
    ] = "~/flwr-modulated-results",
    no_record: Annotated[
        bool, typer.Option("--no-record", help="Another app, or a SuperLink elsewhere: look for no results.")
    ] = False,
) -> None:
    """Whether a Flower run has finished with results, which `flwr run` does not tell.

    Exit code 0: it has; 1: it failed, was stopped or left no results; 3: not finished yet.
    """
    from .run_status import check_run

    status = check_run(superlink, run_id, output=None if no_record else output, wait=wait)
    typer.echo(str(status))
    raise typer.Exit(status.exit_code)


def main() -> None:
    """Run the command line; errors this package raises on purpose end in one line and exit code 2."""
    try:
        app()
    except ModulatedError as error:
        typer.echo(f"Error: {error}", err=True)
        sys.exit(2)
