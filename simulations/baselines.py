"""DP FedAvg, as Flower does it: the methods that modulated learning is compared with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from flwr.client import NumPyClient
from flwr.serverapp.strategy import FedAvg

from flwr_modulated._typing import FloatArray
from flwr_modulated.flower.records import FIT_ARRAYS, FIT_CONFIG
from flwr_modulated.privacy import calibrate_noise_multiplier, clip_rows

from .settings import Cell

# Replacing a record may turn its clipped gradient into any other of norm at most C.
REPLACE_ANY_RECORD = "replace_record(any)"


def local_dp_noise_std(cell: Cell) -> float:
    """Standard deviation of the noise on each clipped gradient, in gradient units.

    Any replacement of a client's record moves its clipped gradient by at most 2C in
    each of T rounds, with the accountant of the methods it is compared with.
    """
    multiplier = calibrate_noise_multiplier(
        cell.epsilon,
        cell.delta,
        num_compositions=cell.num_rounds,
        accounting=cell.accounting,  # type: ignore[arg-type]
    )
    return 2.0 * float(cell.setting("clip")) * multiplier


def clipped_gradients(beta: FloatArray, features: FloatArray, labels: FloatArray, clip: float) -> FloatArray:
    """Gradients of each row's squared loss ½(xᵀβ − y)², of shape (n, d), clipped to norm `clip`."""
    residuals = features @ beta - labels
    return clip_rows(residuals[:, None] * features, clip)


class LocalDpClient(NumPyClient):
    """Hosts one-row clients that each send a clipped, noised gradient step.

    The node returns the mean of its clients' models and their number, so that
    FedAvg's weighted average over nodes is the plain average over clients, as if
    each had a node of its own.
    """

    def __init__(
        self,
        features: FloatArray,
        labels: FloatArray,
        *,
        clip: float,
        step: float,
        noise_std: float,
        rng: Callable[[int], np.random.Generator],
    ) -> None:
        self._features, self._labels = features, labels
        self._clip, self._step, self._noise_std = clip, step, noise_std
        self._rng = rng

    def fit(self, parameters: list[Any], config: dict[str, Any]) -> tuple[list[Any], int, dict[str, Any]]:
        """One local step of every hosted client, averaged."""
        rng = self._rng(int(config["server-round"]))
        beta = np.asarray(parameters[0], dtype=np.float64)
        gradients = clipped_gradients(beta, self._features, self._labels, self._clip)
        gradients += self._noise_std * rng.standard_normal(gradients.shape)
        return [beta - self._step * gradients.mean(axis=0)], len(self._labels), {}


def fedavg_for_numpy_clients(num_nodes: int) -> FedAvg:
    """Flower's FedAvg, told to use the records that a ``NumPyClient`` reads and writes."""
    strategy = FedAvg(
        min_train_nodes=num_nodes,
        min_available_nodes=num_nodes,
        weighted_by_key="num_examples",
        arrayrecord_key=FIT_ARRAYS,
        configrecord_key=FIT_CONFIG,
    )
    strategy.fraction_evaluate = 0.0  # set here: the constructor warns of it on every run
    return strategy
