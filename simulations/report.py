"""Tables and figures from records only: ``python -m simulations.report DIRECTORY...``.

Gathers any mix of records (``*.jsonl``, ``*.jsonl.gz``), groups them by experiment, and writes
each experiment's tables (Markdown, CSV) and figures (PNG, SVG) beside the first directory or to
``--output``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from flwr_modulated import InvalidParameterError

from .ablation import ablation
from .comparison import comparison_figure, comparison_sheets
from .matched import matched
from .records import Record, archive_records, find_records
from .scaling import scaling
from .series import guarantee_caption
from .settings import exit_on_error
from .study_reports import Builder, Report, figure1, flower, table1, table2

__all__ = ["build_report", "main", "records_table", "write_report"]


# Experiments with tables or figures of their own.
BUILDERS: dict[str, Builder] = {
    "table1": table1,
    "table2": table2,
    "figure1": figure1,
    "matched": matched,
    "ablation": ablation,
    "scaling": scaling,
    "flower": flower,
}


def records_table(records: Sequence[Record]) -> Table:
    """One row a record, the guarantee below."""
    table = Table(box=SIMPLE_HEAD, caption=guarantee_caption(records), caption_justify="left")
    for name in ("task", "method"):
        table.add_column(name)
    for name in ("ε", "clients", "test R²", "OLS R²", "seconds"):
        table.add_column(name, justify="right")
    for record in records:
        table.add_row(
            record["task"],
            record["method"],
            "–" if record["epsilon"] is None else f"{record['epsilon']:g}",
            f"{record['num_clients']:,}",
            f"{record['r2']:.3f}",
            f"{record['r2_ols']:.3f}",
            f"{record['seconds']:.2f}",
        )
    return table


def build_report(experiment: str, records: Sequence[Record]) -> Report:
    """Tables and figures of one experiment's records.

    Parameters
    ----------
    experiment : str
        Its name; records without one, and experiments without tables of their own, get
        the comparison over ε.
    records : sequence of dict
        Runs and searches, in any order.
    """
    ordered = sorted(records, key=lambda record: (record["task"], record["seed"], record["id"]))
    runs = [record for record in ordered if record["kind"] == "run"]
    searches = [record for record in ordered if record["kind"] == "search"]
    builder = BUILDERS.get(experiment)
    if builder is not None:
        return builder(runs, searches)
    private = [record for record in runs if record["epsilon"] is not None]
    return Report(comparison_sheets(runs), {"": comparison_figure(runs)} if private else {})


def write_report(report: Report, name: str, output: Path) -> list[Path]:
    """Write ``NAME.md``, ``NAME[-i].csv``, and ``NAME[-figure].png`` and ``.svg``.

    Returns
    -------
    list of pathlib.Path
        What was written.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidParameterError(
            f"the output directory {output} cannot be made ({type(error).__name__}); choose another"
        ) from None
    written = [output / f"{name}.md"]
    written[0].write_text("\n".join(sheet.markdown() for sheet in report.sheets), encoding="utf-8")
    for index, sheet in enumerate(report.sheets, start=1):
        suffix = "" if len(report.sheets) == 1 else f"-{index}"
        written.append(output / f"{name}{suffix}.csv")
        written[-1].write_text(sheet.csv(), encoding="utf-8")
    if not report.figures:
        return written
    from matplotlib import rc_context

    for title, figure in report.figures.items():
        stem = "-".join(filter(None, [name, title]))
        for kind in ("png", "svg"):
            written.append(output / f"{stem}.{kind}")
            # No date and no random names, so that the same records give the same file.
            metadata = {"Date": None} if kind == "svg" else {"Software": None}
            with rc_context({"svg.fonttype": "none", "svg.hashsalt": stem}):
                figure.savefig(written[-1], dpi=150, metadata=metadata)
    return written


def report_directory(
    places: Sequence[Path], output: Path, console: Console, *, archive: bool = False
) -> None:
    """Report every experiment found in `places`; with `archive` also its records, compressed."""
    experiments: dict[str, list[Record]] = {}
    for record in find_records(places):
        experiments.setdefault(record["experiment"], []).append(record)
    for experiment, records in sorted(experiments.items()):
        report = build_report(experiment, records)
        for sheet in report.sheets:
            console.print(sheet.rich())
        for path in write_report(report, experiment or "comparison", output):
            console.print(f"written: {path}", soft_wrap=True)
        if archive:
            target = output / f"{experiment or 'comparison'}.jsonl.gz"
            archive_records(records, target)
            console.print(f"written: {target}", soft_wrap=True)


def main(
    places: Annotated[list[Path], typer.Argument(help="Directories or files that hold records.")],
    output: Annotated[Path | None, typer.Option(help="Where to; by default the first place.")] = None,
    archive: Annotated[bool, typer.Option("--archive", help="Also write the records, compressed.")] = False,
) -> None:
    """Gather records into tables and figures."""
    first = places[0] if places[0].is_dir() else places[0].parent
    with exit_on_error():
        report_directory(places, output or first, Console(), archive=archive)


if __name__ == "__main__":
    typer.run(main)
