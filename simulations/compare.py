"""The main job: the methods against each other over ε, ``python -m simulations.compare``.

Writes ``records.jsonl``, tables (``comparison.md``, ``.csv``) and a figure (``comparison.png``,
``.svg``) to Hydra's output directory and prints the tables. ``engine=inprocess num_splits=20``
gives medians with a spread; ``+experiment=NAME`` runs an experiment of ``conf/experiment``, which
goes on where it stopped: finished runs are read from ``results/NAME``.
"""

from __future__ import annotations

from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from .experiment import SEARCHES, run_experiment
from .grid import read_grid
from .records import RECORDS, recover_records
from .report import build_report, write_report
from .settings import CONF_DIR, exit_on_error, read_engine, register

register()


@hydra.main(version_base="1.3", config_path=CONF_DIR, config_name="config")
def main(config: DictConfig) -> None:
    """Run the grid and report it."""
    output = HydraConfig.get().runtime.output_dir
    with exit_on_error(
        f"interrupted; the same command with hydra.run.dir={output} goes on from what is finished"
    ):
        _compare(config)


def _compare(config: DictConfig) -> None:
    hydra_config = HydraConfig.get()
    output = Path(hydra_config.runtime.output_dir)
    cells = read_grid(config, list(hydra_config.overrides.task))
    engine = read_engine(config)
    console = Console()
    console.print(f"{len(cells)} runs on engine {engine.name}, {engine.num_nodes} nodes")
    console.print(f"records: {output / RECORDS}")
    columns = (
        TextColumn("{task.description:<40.40}"),
        BarColumn(bar_width=12),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("starting the nodes" if engine.name == "ray" else "", total=len(cells))

        def show(done: int, total: int, label: str) -> None:
            progress.update(task, completed=done, total=total, description=label)

        records = run_experiment(cells, engine, output, workers=config.workers, on_progress=show)
    searches = recover_records(output / SEARCHES)
    report = build_report(config.experiment, [*records, *searches])
    for sheet in report.sheets:
        console.print(sheet.rich())
    for path in write_report(report, config.experiment or "comparison", output):
        console.print(f"written: {path}", soft_wrap=True)


if __name__ == "__main__":
    main()
