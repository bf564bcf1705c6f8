"""The nodes' side. What changed from FedAvg is marked."""

from __future__ import annotations

import tempfile
from pathlib import Path

from flwr.app import Context
from flwr.client import Client
from flwr.clientapp import ClientApp

from flwr_modulated import Guarantee, Ledger, ModulatedClient, Policy, Replace  # new

from .data import load_rows

# New: what the node has decided, whatever a server asks.
POLICY = Policy(Guarantee(epsilon=8.0, delta=1e-5, relation=Replace(3.0)))


def client_fn(context: Context) -> Client:
    """Build the client of a node."""
    partition_id = int(context.node_config["partition-id"])
    # New: a device names a file of its own here, say context.node_config["ledger-path"].
    ledgers = Path(tempfile.gettempdir(), "modulated-numpyclient")
    ledgers.mkdir(exist_ok=True)
    # Before: return FlowerClient(*load_rows(partition_id)).to_client()
    return ModulatedClient(
        lambda: load_rows(partition_id), POLICY, ledger=Ledger(ledgers / f"{partition_id}.db")
    ).to_client()


app = ClientApp(client_fn)
