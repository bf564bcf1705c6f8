"""Local DP FedAvg as a Flower federation whose nodes host many one-row clients.

Flower's own parts, one node a client, are in :mod:`simulations.flower_dp`; a test shows that
both have the same law.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord
from flwr.client import NumPyClient
from flwr.serverapp.strategy import FedAvg

from flwr_modulated import InsufficientRepliesError
from flwr_modulated._typing import FloatArray
from flwr_modulated.flower.records import FIT_ARRAYS, FIT_CONFIG

from .local_dp import LocalDp, clipped_gradients


class LocalDpClient(NumPyClient):
    """Hosts one-row clients that each send a clipped, noised gradient step.

    The node returns the mean of its clients' models and their number, so that
    FedAvg's weighted average over nodes is the plain average over clients, as if
    each had a node of its own.

    Parameters
    ----------
    features, labels : ndarray of shapes (n, d) and (n,)
        One row a client.
    settings : LocalDp
        What every client has agreed to.
    multiplier : float
        Noise multiplier z of a round: each client adds N(0, (2 C_t z)² I), since any
        replacement of its record moves its clipped gradient by at most 2 C_t.
    rng : callable
        Maps the server round to the node's random stream.
    """

    def __init__(
        self,
        features: FloatArray,
        labels: FloatArray,
        *,
        settings: LocalDp,
        multiplier: float,
        rng: Callable[[int], np.random.Generator],
    ) -> None:
        self._features, self._labels = features, labels
        self._settings, self._multiplier, self._rng = settings, multiplier, rng

    def fit(self, parameters: list[Any], config: dict[str, Any]) -> tuple[list[Any], int, dict[str, Any]]:
        """One local step of every hosted client, averaged."""
        server_round = int(config["server-round"])
        rng = self._rng(server_round)
        beta = np.asarray(parameters[0], dtype=np.float64)
        clip = self._settings.clip_at(server_round)
        gradients = clipped_gradients(beta, self._features, self._labels, clip)
        gradients += 2.0 * clip * self._multiplier * rng.standard_normal(gradients.shape)
        return [beta - self._settings.step * gradients.mean(axis=0)], len(self._labels), {}


class CompleteFedAvg(FedAvg):
    """Flower's FedAvg, which goes on without the nodes that failed: here every node counts."""

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Average the models of all nodes.

        Raises
        ------
        InsufficientRepliesError
            If a node has failed or not answered.
        """
        replies = list(replies)
        failed = [message.error.reason for message in replies if message.has_error()]
        if failed or len(replies) < self.min_train_nodes:
            raise InsufficientRepliesError(
                f"round {server_round}: {len(replies) - len(failed)} models of {self.min_train_nodes} nodes"
                + "".join(f"; {reason.strip().splitlines()[-1]}" for reason in failed[:1])
            )
        return super().aggregate_train(server_round, replies)


def fedavg_for_numpy_clients(num_nodes: int) -> FedAvg:
    """FedAvg over all nodes, told to use the records that a ``NumPyClient`` reads and writes."""
    strategy = CompleteFedAvg(
        min_train_nodes=num_nodes,
        min_available_nodes=num_nodes,
        weighted_by_key="num_examples",
        arrayrecord_key=FIT_ARRAYS,
        configrecord_key=FIT_CONFIG,
    )
    strategy.fraction_evaluate = 0.0  # set here: the constructor warns of it on every run
    return strategy
