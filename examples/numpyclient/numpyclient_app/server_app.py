"""The server's side. What changed from FedAvg is marked."""

from __future__ import annotations

from logging import INFO, getLogger

import numpy as np
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from flwr_modulated import ModulatedStrategy  # new

from .client_app import POLICY
from .data import FEATURES

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Fit the regression from one release a node."""
    # Before: strategy = FedAvg()
    strategy = ModulatedStrategy(study="numpyclient-example")
    strategy.start(
        grid,
        initial_arrays=ArrayRecord([np.zeros(len(FEATURES))]),
        num_rounds=int(context.run_config["num-server-rounds"]),
    )
    # New: standard errors and intervals, at no further privacy cost.
    results = strategy.results(feature_names=FEATURES, label_name="stress", guarantee=POLICY.guarantee)
    for line in str(results.summary()).splitlines():
        getLogger("flwr").log(INFO, "%s", line)
