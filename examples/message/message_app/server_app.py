"""The server's side: a private regression, from whose coefficients FedAvg goes on."""

from __future__ import annotations

from logging import INFO, getLogger

import numpy as np
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from flwr_modulated import ModulatedStrategy

from .client_app import POLICY
from .data import FEATURES

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run both phases."""
    modulated = ModulatedStrategy(message_type="train.regression", study="message-example")
    first = modulated.start(grid, initial_arrays=ArrayRecord([np.zeros(len(FEATURES))]), num_rounds=1)
    results = modulated.results(feature_names=FEATURES, label_name="stress", guarantee=POLICY.guarantee)
    for line in str(results.summary()).splitlines():
        getLogger("flwr").log(INFO, "%s", line)

    FedAvg(fraction_evaluate=0.0).start(
        grid, initial_arrays=first.arrays, num_rounds=int(context.run_config["num-server-rounds"])
    )
