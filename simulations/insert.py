"""Put the tables of experiments into a document: ``python -m simulations.insert RESULTS.md DIRECTORY...``.

Whatever stands between ``<!-- begin NAME 2 -->`` and ``<!-- end -->`` becomes the second table of
experiment NAME, so that no number in the document is typed.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from flwr_modulated import InvalidDataError

from .records import Record, find_records
from .report import build_report
from .settings import exit_on_error

_MARKED = re.compile(r"(<!-- begin (?P<name>\w+) (?P<number>\d+) -->\n).*?(<!-- end -->)", re.DOTALL)


def insert_tables(text: str, records: list[Record]) -> str:
    """Replace every marked part whose experiment has records.

    Raises
    ------
    InvalidDataError
        If an experiment has fewer tables than a marker asks for.
    """
    experiments: dict[str, list[Record]] = {}
    for record in records:
        experiments.setdefault(record["experiment"], []).append(record)
    sheets = {name: build_report(name, found).sheets for name, found in experiments.items()}

    def table(match: re.Match[str]) -> str:
        name, number = match["name"], int(match["number"])
        if name not in sheets:
            return match[0]
        if not 1 <= number <= len(sheets[name]):
            raise InvalidDataError(f"begin {name} {number}: {name} has {len(sheets[name])} table(s)")
        return f"{match[1]}\n{sheets[name][number - 1].markdown()}\n{match[4]}"

    return _MARKED.sub(table, text)


def main(
    document: Annotated[Path, typer.Argument(help="A Markdown file with markers.")],
    places: Annotated[list[Path], typer.Argument(help="Directories or files that hold records.")],
) -> None:
    """Bring a document's tables up to date."""
    with exit_on_error():
        text = document.read_text(encoding="utf-8")
        document.write_text(insert_tables(text, find_records(places)), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
