"""Local DP FedAvg and Flower's own differential privacy: same noise, same law, traps avoided."""

from __future__ import annotations

import logging
import math
from dataclasses import replace

import numpy as np
import pytest

from flwr_modulated import InsufficientRepliesError, InvalidDataError, InvalidParameterError
from flwr_modulated.datasets import partition
from simulations.data import cell_split
from simulations.flower_dp import (
    ADD_OR_REMOVE,
    EqualWeights,
    central_multiplier,
    classical_epsilon,
    run_flower_dp,
    safe_update,
)
from simulations.local_dp import LocalDp, clipped_gradients, noise_multiplier, simulate
from simulations.settings import FLOWER_CENTRAL, FLOWER_DP, Cell, Engine
from simulations.study import local_dp_multiplier, noise_stream, run_study

EPSILON, DELTA, CLIP, STEP = 4.0, 1e-5, 1.5, 0.4


# No test below is marked global_rng but one: Flower's noise must leave the global states as they were.


@pytest.fixture(autouse=True)
def _quiet_flower():
    logger = logging.getLogger("flwr")
    level = logger.level
    logger.setLevel(logging.WARNING)
    yield
    logger.setLevel(level)


def cell(method: str = "local_dp_fedavg", **settings: object) -> Cell:
    values = {"name": method, "num_rounds": 4, "clip": CLIP, "step": STEP, **settings}
    return Cell("modechoice", tuple(sorted(values.items())), EPSILON, DELTA, "distance", 1.0, 1.0, "exact", 0)


def run_tiny(method: str, features, labels, *, num_rounds: int = 1, seed: int = 0):
    return run_flower_dp(
        method,
        features,
        labels,
        num_rounds=num_rounds,
        clip=CLIP,
        step=STEP,
        epsilon=EPSILON,
        delta=DELTA,
        accounting="exact",
        seed=seed,
    )


def rows(n: int, d: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(5)
    features = rng.standard_normal((n, d))
    return features, features @ np.arange(1.0, d + 1) + rng.standard_normal(n)


# -- The vectorised twin


def test_twin_is_the_naive_loop(rng):
    features, labels = rows(40, 3)
    clips = np.array([[0.3, 5.0], [0.2, 5.0], [0.1, 5.0]])
    steps = np.array([0.5, 0.1])
    noise = 0.1 * rng.standard_normal((3, 3, 2))
    iterates = simulate(features, labels, clips=clips, steps=steps, noise=noise)
    for setting in range(2):
        beta = np.zeros(3)
        for t in range(3):
            gradients = clipped_gradients(beta, features, labels, clips[t, setting])
            beta = beta - steps[setting] * (gradients.mean(axis=0) + noise[t, :, setting])
            np.testing.assert_allclose(iterates[t, :, setting], beta, rtol=0, atol=1e-13)


def test_twin_takes_rows_of_zeros_and_many_blocks(rng):
    features, labels = rows(3000, 2)
    features[::7] = 0.0
    clips, steps = np.full((2, 1), 0.5), np.array([0.3])
    found = simulate(features, labels, clips=clips, steps=steps, noise=np.zeros((2, 2, 1)))
    beta = -0.3 * clipped_gradients(np.zeros(2), features, labels, 0.5).mean(axis=0)
    np.testing.assert_allclose(found[0, :, 0], beta, rtol=0, atol=1e-13)


@pytest.mark.global_rng  # FedAvg samples its nodes with `random`
@pytest.mark.parametrize(("clip_ratio", "tail"), [(1.0, 0.0), (0.2, 0.5)])
def test_twin_is_the_federation_of_the_same_noise(clip_ratio, tail):
    """The clients' noise, replayed and averaged, makes the twin give the federation's model."""
    asked, nodes = cell(clip_ratio=clip_ratio, tail=tail), 3
    (record,) = run_study([asked], Engine("inprocess", nodes))
    split, settings = cell_split(asked), LocalDp(4, CLIP, STEP, clip_ratio, tail)
    n, d = split.train_features.shape
    clips = np.array([[settings.clip_at(t)] for t in range(1, 5)])
    noise = np.zeros((4, d, 1))
    for t in range(4):
        for node in range(nodes):
            share = partition(n, nodes, node)
            stream = noise_stream(asked.seed, node, t + 1)
            noise[t, :, 0] += stream.standard_normal((share.stop - share.start, d)).sum(axis=0) / n
    noise *= 2.0 * clips[:, None] * local_dp_multiplier(asked)
    iterates = simulate(
        split.train_features, split.train_labels, clips=clips, steps=np.array([STEP]), noise=noise
    )
    expected = iterates[-settings.tail_length :, :, 0].mean(axis=0)
    np.testing.assert_allclose(record["beta"], expected, rtol=0, atol=1e-10)


def test_clip_decays_geometrically_to_its_ratio():
    settings = LocalDp(num_rounds=3, clip=2.0, step=0.1, clip_ratio=0.25)
    assert [settings.clip_at(t) for t in (1, 2, 3)] == pytest.approx([2.0, 1.0, 0.5])
    assert LocalDp(num_rounds=1, clip=2.0, step=0.1, clip_ratio=0.25).clip_at(1) == 2.0


@pytest.mark.parametrize(
    "change", [{"clip": 0.0}, {"step": -1.0}, {"clip_ratio": 0.0}, {"tail": 1.5}, {"num_rounds": 0}]
)
def test_settings_out_of_range_are_refused(change):
    with pytest.raises(InvalidParameterError, match=next(iter(change))):
        replace(LocalDp(num_rounds=3, clip=2.0, step=0.1), **change)


# -- LocalDpMod


def test_local_dp_mod_is_given_the_epsilon_that_yields_our_noise():
    multiplier = noise_multiplier(EPSILON, DELTA, 7, "exact")
    # The mod's own formula, with sensitivity 2C.
    std = 2 * CLIP * math.sqrt(2 * math.log(1.25 / DELTA)) / classical_epsilon(multiplier, DELTA)
    assert std == pytest.approx(2 * CLIP * multiplier, rel=1e-12)


@pytest.mark.statistical
def test_local_dp_mod_federation_has_the_law_of_the_twin():
    """Flower's LocalDpMod, one node a client, and the twin end in the same distribution of β.

    Statistics: mean of β (d = 20 coordinates) and mean squared Mahalanobis distance to the twin's
    mean, R = 50 federations of two rounds against N = 50,000 runs of the twin. SE of a mean: the
    twin's standard deviation times √(1/R + 1/N). Tolerance 5.6 SE, 21 comparisons: false alarm 5e-7.
    Caught: half the sensitivity (squared distance 20 × 0.75 lower, 17 SE), one round's ε for all
    rounds (half the variance, 11 SE), clipping the update at C in place of step × C.
    """
    d, runs, draws = 20, 50, 50_000
    features, labels = rows(5, d)
    flower = np.array(
        [run_tiny("flower_local_dp", features, labels, num_rounds=2, seed=s)[0] for s in range(runs)]
    )
    std = 2 * CLIP * noise_multiplier(EPSILON, DELTA, 2, "exact") / math.sqrt(5)
    noise = std * np.random.default_rng(1).standard_normal((2, d, draws))
    twin = simulate(
        features, labels, clips=np.full((2, draws), CLIP), steps=np.full(draws, STEP), noise=noise
    )[-1].T
    centre, whiten = twin.mean(axis=0), np.linalg.inv(np.linalg.cholesky(np.cov(twin.T)))

    def statistics(sample: np.ndarray) -> np.ndarray:
        white = (sample - centre) @ whiten.T
        return np.column_stack([white, np.sum(white**2, axis=1)])

    expected, found = statistics(twin), statistics(flower)
    error = expected.std(axis=0) * math.sqrt(1 / runs + 1 / draws)
    assert (np.abs(found.mean(axis=0) - expected.mean(axis=0)) < 5.6 * error).all()


# -- The central model


@pytest.mark.parametrize("num_rounds", [1, 10])
def test_central_noise_is_what_the_accountant_asks_for_and_no_more(num_rounds):
    """Checked with dp_accounting itself, at the multiplier and a thousandth below it."""
    from dp_accounting import GaussianDpEvent, NeighboringRelation
    from dp_accounting.rdp import RdpAccountant

    multiplier = central_multiplier(EPSILON, DELTA, num_rounds, num_clients=50)

    def epsilon(z: float) -> float:
        accountant = RdpAccountant(neighboring_relation=NeighboringRelation.ADD_OR_REMOVE_ONE)
        return accountant.compose(GaussianDpEvent(z), num_rounds).get_epsilon(DELTA)

    assert epsilon(multiplier) <= EPSILON < epsilon(0.999 * multiplier)


@pytest.mark.parametrize("method", ["flower_central_server", "flower_central_client"])
def test_central_noise_on_updates_of_length_zero(method):
    """Labels of zero give updates of zero: what is left is the server's noise, N(0, (z·step·C/n)²).

    Statistic: mean square of 2,000 coordinates, over its expectation; SE √(2/2000) = 0.032;
    tolerance 5 SE, false alarm 6e-7. Caught: noise of the sum (factor n² = 16), noise of a
    replacement (factor 4). Without the guard Flower divides by zero here.
    """
    features = rows(4, 2000)[0]
    beta = run_tiny(method, features, np.zeros(4))[0]
    std = central_multiplier(EPSILON, DELTA, 1, 4) * STEP * CLIP / 4
    assert abs(np.mean((beta / std) ** 2) - 1) < 5 * math.sqrt(2 / beta.size)


@pytest.mark.parametrize("method", FLOWER_DP)
def test_every_method_says_whom_it_trusts(method):
    features, labels = rows(60, 3)
    beta, details = run_tiny(method, features, labels, num_rounds=2)
    assert np.isfinite(beta).all()
    if method in FLOWER_CENTRAL:
        assert details["threat_model"] == "central"
        assert details["relation"] == ADD_OR_REMOVE
        assert details["epsilon_spent"] <= EPSILON
    else:
        assert details["relation"] == "replace_record(any)"


@pytest.mark.parametrize("method", FLOWER_DP)
def test_a_client_without_a_number_stops_the_run_and_its_data_stay(method, caplog):
    features, labels = rows(6, 3)
    features[2] = [7.654321, np.nan, 1.0]
    with caplog.at_level(logging.DEBUG, logger="flwr"), pytest.raises(InsufficientRepliesError) as error:
        run_tiny(method, features, labels)
    assert "7.654321" not in str(error.value) + caplog.text


def test_same_seed_same_run_other_seed_another():
    data = rows(4, 2)
    first, again, other = (run_tiny("flower_local_dp", *data, seed=s)[0] for s in (3, 3, 4))
    assert first.tolist() == again.tolist()
    assert first.tolist() != other.tolist()


def test_update_of_length_zero_becomes_a_tiny_one():
    assert safe_update(np.zeros(3)).tolist() == [1e-12, 0.0, 0.0]
    assert safe_update(np.array([1e-3, 0.0])).tolist() == [1e-3, 0.0]
    with pytest.raises(InvalidDataError, match="finite"):
        safe_update(np.array([np.inf, 0.0]))


def test_unequal_weights_are_refused():
    """FedAvg would weight by what a client claims, and the noise would not cover it."""
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict

    from simulations.engines import _task_identity

    with _task_identity():
        replies = []
        for claim in (1, 1000):
            request = Message(RecordDict(), dst_node_id=1, message_type="train")
            content = RecordDict(
                {"arrays": ArrayRecord([np.zeros(2)]), "metrics": MetricRecord({"num-examples": claim})}
            )
            replies.append(Message(content, reply_to=request))
        with pytest.raises(InvalidDataError, match="equal for all clients"):
            EqualWeights().aggregate_train(1, replies)
