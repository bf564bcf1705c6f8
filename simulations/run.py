"""One federated run: ``python -m simulations.run task=fair method=auto guarantee.epsilon=2``.

Appends one JSON record to ``records.jsonl`` in Hydra's output directory. Sweeps with ``-m``, and
``python -m simulations.report multirun`` gathers them. The launchers and the sweeper come with
``pip install -e '.[simulation,launchers]'``:

- one after another: ``-m guarantee.epsilon=0.5,1,2,4,8 method=auto,iterative``;
- on processes: add ``engine=inprocess hydra/launcher=joblib hydra.launcher.n_jobs=2``. With
  ``engine=ray`` every job starts a Ray of its own, so cap that too: ``engine.num_cpus=1``;
- on a Ray cluster: add ``engine=inprocess hydra/launcher=ray +hydra.launcher.ray.remote.num_cpus=0``.
  Without the last, jobs hold the processors that ``engine=ray`` waits for, for ever;
- searching: ``-m hydra/sweeper=optuna hydra.sweeper.direction=maximize hydra.sweeper.n_trials=20
  method=ridge 'method.penalty=tag(log,interval(0.05,5))'`` maximises the R² of the validation split.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from rich.console import Console
from rich.progress import Progress

from flwr_modulated import InvalidParameterError

from .experiment import run_experiment
from .grid import override_key
from .records import RECORDS
from .report import records_table
from .settings import CONF_DIR, exit_on_error, read_cell, read_engine, register

register()

_MANY_NODES = 1000
_FOR_COMPARE = ("tasks", "methods", "epsilons", "num_splits", "variants", "workers", "experiment")


@hydra.main(version_base="1.3", config_path=CONF_DIR, config_name="config")
def main(config: DictConfig) -> float:
    """Run the configured cell; a sweeper gets its R² on the validation split."""
    hydra_config = HydraConfig.get()
    directory = Path(hydra_config.runtime.output_dir)
    console = Console()
    quiet = not console.is_terminal
    with exit_on_error(), Progress(console=console, transient=True, disable=quiet) as progress:
        _refuse_grids(hydra_config.overrides.task)
        bar = progress.add_task("replies", visible=False)

        def on_reply(done: int, total: int) -> None:
            if total >= _MANY_NODES and (done % 100 == 0 or done == total):
                progress.update(bar, completed=done, total=total, visible=True)

        (record,) = run_experiment(
            [read_cell(config)], read_engine(config), directory, workers=1, on_reply=on_reply
        )
    console.print(records_table([record]))
    console.print(f"record: {directory / RECORDS}")
    return float(record["r2_validation"])


def _refuse_grids(overrides: Iterable[str]) -> None:
    """What describes a grid would be lost here."""
    for override in overrides:
        if override_key(override) in _FOR_COMPARE:
            raise InvalidParameterError(
                f"{override}: run runs one cell; use `python -m simulations.compare {override}`, "
                "or sweep with -m"
            )


if __name__ == "__main__":
    main()
