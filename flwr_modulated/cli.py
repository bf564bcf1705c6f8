"""The command line `flwr-modulated`: each command is one function that imports what it needs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from .errors import ModulatedError

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


def main() -> None:
    """Run the command line; errors this package raises on purpose end in one line and exit code 2."""
    try:
        app()
    except ModulatedError as error:
        typer.echo(f"Error: {error}", err=True)
        sys.exit(2)
