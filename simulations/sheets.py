"""A table as data, and its three renderings: terminal, Markdown, CSV."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.table import Table

BEST = "*"


@dataclass(frozen=True, slots=True)
class Sheet:
    """Cells are text; one that starts with ``*`` is the best of its column.

    Parameters
    ----------
    title : str
        What is shown, without an ε that lacks its δ and relation: those are in the caption.
    header : tuple of str
        One name a column.
    rows : tuple of tuples of str
        The cells.
    caption : str
        Guarantee and whatever must be known to read the numbers.
    num_labels : int, default 1
        Leading columns that hold labels; the others are aligned as numbers.
    """

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str = ""
    num_labels: int = 1

    def rich(self) -> Table:
        """For the terminal."""
        table = Table(
            title=self.title,
            title_justify="left",
            caption=self.caption or None,
            caption_justify="left",
            box=SIMPLE_HEAD,
            padding=(0, 0, 0, 1),
            min_width=60,  # room for title and caption above and below few columns
        )
        for index, name in enumerate(self.header):
            if index < self.num_labels:
                table.add_column(name, overflow="fold")
            else:
                table.add_column(name, justify="right", no_wrap=True)
        for row in self.rows:
            table.add_row(*(f"[bold]{cell[1:]}[/bold]" if cell.startswith(BEST) else cell for cell in row))
        return table

    def markdown(self) -> str:
        """Markdown, ending with an empty line."""
        lines = [f"**{self.title}**", "", "| " + " | ".join(self.header) + " |"]
        labels = min(self.num_labels, len(self.header))
        lines.append("|" + "---|" * labels + "---:|" * (len(self.header) - labels))
        for row in self.rows:
            cells = (f"**{cell[1:]}**" if cell.startswith(BEST) else cell for cell in row)
            lines.append("| " + " | ".join(cells) + " |")
        return "\n".join([*lines, "", *([self.caption, ""] if self.caption else [])])

    def csv(self) -> str:
        """Comma-separated values, without caption."""
        stream = io.StringIO()
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(self.header)
        writer.writerows([cell.removeprefix(BEST) for cell in row] for row in self.rows)
        return stream.getvalue()
