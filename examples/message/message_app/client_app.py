"""The nodes' side: one handler for the private regression, one for the app's own training."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from flwr_modulated import Guarantee, Ledger, ModulatedClient, Policy, Replace

from .data import load_rows

POLICY = Policy(Guarantee(epsilon=8.0, delta=1e-5, relation=Replace(3.0)))

app = ClientApp()


@app.train("regression")
def regression(message: Message, context: Context) -> Message:
    """Answer ``ModulatedStrategy(message_type="train.regression")``."""
    partition_id = int(context.node_config["partition-id"])
    # A device names a file of its own here, say context.node_config["ledger-path"].
    ledgers = Path(tempfile.gettempdir(), "modulated-message")
    ledgers.mkdir(exist_ok=True)
    client = ModulatedClient(
        lambda: load_rows(partition_id, private=True), POLICY, ledger=Ledger(ledgers / f"{partition_id}.db")
    )
    return client.train(message)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train on the node's open rows, as the app did before. The guarantee does not cover this."""
    features, labels = load_rows(int(context.node_config["partition-id"]), private=False)
    record = message.content["arrays"]
    (beta,) = record.to_numpy_ndarrays()  # type: ignore[union-attr]
    for _ in range(5):
        beta = beta - 0.1 * features.T @ (features @ beta - labels) / len(labels)
    loss = float(np.mean((features @ beta - labels) ** 2))
    content = RecordDict(
        {
            "arrays": ArrayRecord([beta]),
            "metrics": MetricRecord({"num-examples": len(labels), "train-loss": loss}),
        }
    )
    return Message(content, reply_to=message)
