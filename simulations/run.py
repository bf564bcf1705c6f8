"""One federated run: ``python -m simulations.run task=fair method=auto guarantee.epsilon=2``.

Appends one JSON record to ``records.jsonl`` in Hydra's output directory. Sweeps with
``-m``, for instance ``-m guarantee.epsilon=0.5,1,2,4,8 method=auto,iterative``.
"""

from __future__ import annotations

from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from rich.console import Console

from .experiment import run_experiment
from .records import RECORDS
from .report import records_table
from .settings import CONF_DIR, exit_on_error, read_cell, read_engine, register

register()


@hydra.main(version_base="1.3", config_path=CONF_DIR, config_name="config")
def main(config: DictConfig) -> None:
    """Run the configured cell."""
    directory = Path(HydraConfig.get().runtime.output_dir)
    with exit_on_error():
        (record,) = run_experiment([read_cell(config)], read_engine(config), directory, workers=1)
    console = Console()
    console.print(records_table([record]))
    console.print(f"record: {directory / RECORDS}")


if __name__ == "__main__":
    main()
