"""The ClientApp of the reference app: a device with its own data, or an openly simulated one."""

from __future__ import annotations

from collections.abc import Mapping
from logging import INFO, getLogger
from typing import Any

import numpy as np
from flwr.app import Context
from flwr.client import Client
from flwr.clientapp import ClientApp

from .._typing import FloatArray
from ..datasets import partition, read_table
from ..errors import InvalidDataError, InvalidParameterError, ModulatedError, RequestRefusedError
from ..ledger import Ledger
from ..policy import Policy
from .client import ModulatedClient
from .run_config import RunConfig, split_names
from .simulated import simulated_split

__all__ = ["app", "client_fn"]

_logger = getLogger("flwr")

_NEEDED = ("data-path", "policy-path", "ledger-path", "label")
_SIMULATION = {"partition-id", "num-partitions"}


def client_fn(context: Context) -> Client:
    """Build the client of a node, from its own node config.

    Parameters
    ----------
    context : flwr.app.Context
        A device's ``node_config`` has ``data-path``, ``policy-path``, ``ledger-path``,
        ``label``, and ``features`` unless the file has no other columns. One that has
        only what Flower's simulation gives is simulated, if the run says so too.

    Returns
    -------
    flwr.client.Client

    Raises
    ------
    RequestRefusedError
        If the node is not set up, or it and the run do not agree on whether this is a
        simulation. The text holds no data: it travels to the server.
    """
    refusal: str
    try:
        return _build(context).to_client()
    except (ModulatedError, ImportError) as error:  # texts that hold no data
        refusal = str(error)
    except Exception as error:
        _logger.error("This device cannot be set up: %s", error)
        refusal = f"the device cannot be set up ({type(error).__name__}); the reason is in its own log"
    raise RequestRefusedError(refusal)


def _build(context: Context) -> ModulatedClient:
    node = context.node_config
    config = RunConfig.read(context.run_config)
    if any(name in node for name in (*_NEEDED, "features")):
        return _device(node, config)
    # Nothing but exactly what the simulation gives may simulate: a mistyped key must not.
    if set(node) == _SIMULATION and config.simulated:
        return _simulated(node, config)
    if config.simulated:
        raise InvalidParameterError(f"this node has no data of its own: {_advice(_NEEDED)}")
    raise InvalidParameterError(
        f"the run asks devices for data of their own, and this node has none: {_advice(_NEEDED)}"
    )


def _device(node: Mapping[str, Any], config: RunConfig) -> ModulatedClient:
    missing = [name for name in _NEEDED if name not in node]
    if missing:
        raise InvalidParameterError(f"the device is not set up: {_advice(missing)}")
    if config.simulated:
        raise RequestRefusedError(
            "this device holds data of its own and takes no part in a run with simulated=true"
        )
    label, wanted = str(node["label"]), split_names(str(node.get("features", "")))
    if label != config.label:
        raise RequestRefusedError(f"the study's label is {config.label}, the device's node config differs")
    try:
        policy = Policy.from_toml(str(node["policy-path"]))
    except OSError as error:
        _logger.error("The policy cannot be read: %s", error)
        raise InvalidParameterError(
            "policy-path in the device's node config names no readable file"
        ) from None

    def load() -> tuple[FloatArray, FloatArray]:
        try:
            features, labels, names = read_table(str(node["data-path"]), label=label, features=wanted or None)
        except (ModulatedError, ImportError) as error:  # its texts name columns, which stay here
            _logger.error("The device's data cannot be used: %s", error)
            raise InvalidDataError(
                "the device's data file cannot be used; the reason is in the device's own log"
            ) from None
        if names != config.feature_names:
            _logger.error(
                'The study\'s features are %s; this device would release %s. Set features="..." in its '
                "node config, in the study's order",
                ", ".join(config.feature_names),
                ", ".join(names),
            )
            raise RequestRefusedError(
                "the device's columns are not the study's features in the study's order; its owner must "
                "set features in its node config"
            )
        return features, labels

    return ModulatedClient(load, policy, ledger=Ledger(str(node["ledger-path"])))


def _simulated(node: Mapping[str, Any], config: RunConfig) -> ModulatedClient:
    _logger.log(INFO, "Simulated node: rows of the task %s, NumPy's noise, no ledger", config.task)
    split = simulated_split(config)
    share = partition(
        len(split.train_labels), int(node["num-partitions"]), partition_id=int(node["partition-id"])
    )
    rows = split.train_features[share], split.train_labels[share]
    return ModulatedClient(lambda: rows, config.read_policy(), rng=lambda _: np.random.default_rng())


def _advice(names: tuple[str, ...] | list[str]) -> str:
    return f"its owner must add {', '.join(names)} to the SuperNode's --node-config"


app = ClientApp(client_fn)
