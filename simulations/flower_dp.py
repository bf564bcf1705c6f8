"""Flower's own differential privacy on one-row clients: FedAvg, its mods and its wrappers.

One node a client, through the engine in this process. Two threat models, never to be compared
without saying so: *local* clients trust nobody and noise their own update; *central* clients
trust the server, which sees every clipped update and noises their average.

What Flower 1.42 needs to be kept from, each guarded against here:

1. An update of length zero divides by zero in every clipping, and empties the whole round
   where a mod clips. The client sends one of length 1e-12 in its place.
2. Not-a-number passes every clipping. The client refuses to send it.
3. Whole-number arrays cannot take noise. Arrays are float64 throughout.
4. Noise on an average assumes equal weights, but FedAvg weights by the clients' own claim of
   ``num-examples``. Every client claims 1; the server checks it.
5. One failed client silently discards a round. A missing round is an error here.
6. ``LocalDpMod`` uses the classical formula at any ε and one ε for each round. It is given
   the ε at which that formula yields the noise that the accountant asks for.
7. Noise comes from NumPy's global state, the order of clients from Python's. Both are seeded for a
   run and put back after.
8. The accountant covers the fixed-clipping wrappers and add-or-remove-one neighbours. The
   adaptive wrappers are charged by the same accountant at the noise multiplier they are
   given, which they split between the update and the clipped count (Andrew et al.,
   arXiv:1905.03871).
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, fixedclipping_mod
from flwr.serverapp import (
    GaussianPrivacyEvent,
    Grid,
    NeighboringRelation,
    PrivacyConfig,
    RdpAccountant,
    SamplingMethod,
)
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAvg,
    Result,
    Strategy,
)
from scipy.optimize import brentq

from flwr_modulated import InsufficientRepliesError, InvalidDataError
from flwr_modulated._typing import FloatArray

from .engines import run_federation
from .local_dp import REPLACE_ANY_RECORD, noise_multiplier
from .records import Record
from .settings import Engine

ADD_OR_REMOVE = "add_or_remove_record"
# Length of the update that stands in for one of length zero: far below any clip, far above
# the rounding of coefficients.
_SMALLEST_UPDATE = 1e-12


def run_flower_dp(
    method: str,
    features: FloatArray,
    labels: FloatArray,
    *,
    num_rounds: int,
    clip: float,
    step: float,
    epsilon: float,
    delta: float,
    accounting: str,
    seed: int,
) -> tuple[FloatArray, Record]:
    """Run one of Flower's private federations.

    Parameters
    ----------
    method : str
        ``"flower_local_dp"``, ``"flower_central_server"``, ``"flower_central_client"``,
        ``"flower_adaptive_server"`` or ``"flower_adaptive_client"``.
    features, labels : ndarray of shapes (n, d) and (n,)
        One row a client.
    num_rounds : int
        T; every client answers in every round.
    clip : float
        Bound on a gradient's norm; on a model update it is `step` times this. The adaptive
        wrappers start from it.
    step : float
        The clients' step.
    epsilon, delta : float
        Of all rounds together, under the relation in the record.
    accounting : str
        Of the local method; the central ones are charged by Flower's accountant.
    seed : int
        Of the noise.

    Returns
    -------
    beta : ndarray of shape (d,)
        Coefficients.
    details : dict
        Noise, relation, threat model and accounting, for the record.

    Raises
    ------
    InsufficientRepliesError
        If a round gave no model.
    """
    num_clients = len(labels)
    bound = step * clip
    mods: list[Any] = []
    # The accountant of the fixed wrappers checks the weights itself, and insists on FedAvg as it is.
    fixed = method in ("flower_central_server", "flower_central_client")
    plain = _fedavg(FedAvg if fixed else EqualWeights, num_clients)
    strategy: Strategy = plain
    details: Record = {"clip": clip, "step": step}
    if method == "flower_local_dp":
        multiplier = noise_multiplier(epsilon, delta, num_rounds, accounting)
        mods.append(LocalDpMod(bound, 2.0 * bound, classical_epsilon(multiplier, delta), delta))
        details |= {"noise_std": 2.0 * clip * multiplier, "relation": REPLACE_ANY_RECORD}
    else:
        multiplier = central_multiplier(epsilon, delta, num_rounds, num_clients)
        accountant = _accountant(delta, num_clients)
        if method == "flower_central_server":
            strategy = DifferentialPrivacyServerSideFixedClipping(
                plain, multiplier, bound, num_clients, accountant=accountant
            )
        elif method == "flower_central_client":
            mods.append(fixedclipping_mod)
            strategy = DifferentialPrivacyClientSideFixedClipping(
                plain, multiplier, bound, num_clients, accountant=accountant
            )
        else:
            wrapper: Any = DifferentialPrivacyServerSideAdaptiveClipping
            if method == "flower_adaptive_client":
                mods.append(adaptiveclipping_mod)
                wrapper = DifferentialPrivacyClientSideAdaptiveClipping
            strategy = wrapper(
                plain,
                multiplier,
                num_clients,
                initial_clipping_norm=bound,
                # The wrapper refuses a count that is noised less than half the update.
                clipped_count_stddev=max(num_clients / 20, multiplier),
            )
            accountant.compose(_event(multiplier, num_clients), num_rounds)
        details |= {
            "noise_std": multiplier * clip / num_clients,
            "relation": ADD_OR_REMOVE,
            "threat_model": "central",
            "accounting": "flower rdp",
        }
    beta = _run(strategy, _client_app(features, labels, step, mods), features.shape, num_rounds, seed)
    if fixed:
        details["epsilon_spent"] = strategy.privacy_spent().epsilon  # type: ignore[attr-defined]
    elif method != "flower_local_dp":
        details["epsilon_spent"] = accountant.get_privacy_spent().epsilon
        details["final_clip"] = strategy.clipping_norm / step  # type: ignore[attr-defined]
    return beta, details


def classical_epsilon(multiplier: float, delta: float) -> float:
    """The ε at which √(2 ln(1.25/δ))/ε, which ``LocalDpMod`` uses, is `multiplier`.

    Not a guarantee: the number that makes the mod add the noise that a sound accountant
    asks for.
    """
    return math.sqrt(2.0 * math.log(1.25 / delta)) / multiplier


def central_multiplier(epsilon: float, delta: float, num_rounds: int, num_clients: int) -> float:
    """Smallest noise multiplier whose T rounds Flower's accountant puts at most at ε."""

    def excess(log_multiplier: float) -> float:
        accountant = _accountant(delta, num_clients)
        accountant.compose(_event(math.exp(log_multiplier), num_clients), num_rounds)
        return accountant.get_epsilon(delta) - epsilon

    root = brentq(excess, math.log(1e-2), math.log(1e6), xtol=1e-9)
    while excess(root) > 0:
        root += 1e-9
    return math.exp(root)


def _accountant(delta: float, num_clients: int) -> RdpAccountant:
    return RdpAccountant(
        PrivacyConfig(
            target_delta=delta,
            population_size=num_clients,
            neighboring_relation=NeighboringRelation.ADD_OR_REMOVE_ONE,
            sampling_method=SamplingMethod.NO_AMPLIFICATION,
        )
    )


def _event(multiplier: float, num_clients: int) -> GaussianPrivacyEvent:
    return GaussianPrivacyEvent(
        noise_multiplier=multiplier, sample_size=num_clients, population_size=num_clients
    )


class EqualWeights(FedAvg):
    """FedAvg that refuses replies of unequal weight, and rounds with a failed client."""

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Average, with equal weights only."""
        messages = list(replies)
        if any(message.has_error() for message in messages):
            return None, None
        claims = {message.content["metrics"][self.weighted_by_key] for message in messages}
        if len(claims) > 1:
            raise InvalidDataError(
                f"num-examples must be equal for all clients, got {len(claims)} values: the noise assumes it"
            )
        return super().aggregate_train(server_round, messages)


def _fedavg(kind: type[FedAvg], num_clients: int) -> FedAvg:
    strategy = kind(
        min_train_nodes=num_clients, min_available_nodes=num_clients, min_evaluate_nodes=num_clients
    )
    strategy.fraction_evaluate = 0.0  # set here: the constructor warns of it on every run
    return strategy


def _client_app(features: FloatArray, labels: FloatArray, step: float, mods: list[Any]) -> ClientApp:
    app = ClientApp(mods=mods)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        row = int(context.node_config["partition-id"])
        arrays = message.content["arrays"]
        assert isinstance(arrays, ArrayRecord)
        beta = np.asarray(arrays.to_numpy_ndarrays()[0], dtype=np.float64)
        update = -step * (features[row] @ beta - labels[row]) * features[row]
        content = RecordDict(
            {
                "arrays": ArrayRecord([beta + safe_update(update)]),
                "metrics": MetricRecord({"num-examples": 1}),
            }
        )
        return Message(content, reply_to=message)

    return app


def safe_update(update: FloatArray) -> FloatArray:
    """A model update that Flower's clipping can take: finite, and not of length zero.

    Raises
    ------
    InvalidDataError
        If the update is not finite; the text holds none of it.
    """
    if not np.isfinite(update).all():
        raise InvalidDataError("the model update must be finite; check the features and the label")
    if np.linalg.norm(update) < _SMALLEST_UPDATE:
        return np.append(_SMALLEST_UPDATE, np.zeros(len(update) - 1))
    return update


def _run(
    strategy: Strategy, client_app: ClientApp, shape: tuple[int, ...], num_rounds: int, seed: int
) -> FloatArray:
    num_clients, num_features = shape
    results: list[Result] = []

    def server(grid: Grid) -> None:
        initial = ArrayRecord([np.zeros(num_features)])
        results.append(strategy.start(grid, initial_arrays=initial, num_rounds=num_rounds))

    with _seeded(seed):
        run_federation(server, client_app, Engine("inprocess", num_clients))
    (result,) = results
    finished = len(result.train_metrics_clientapp)
    if finished != num_rounds:
        raise InsufficientRepliesError(
            f"{finished} of {num_rounds} rounds gave a model; a client failed in the others"
        )
    return np.asarray(result.arrays.to_numpy_ndarrays()[0], dtype=np.float64)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed the global states that Flower draws noise and nodes from, and put them back after."""
    states = random.getstate(), np.random.get_state()  # noqa: NPY002
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
