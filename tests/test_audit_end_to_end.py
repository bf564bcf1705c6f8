"""A black-box audit through client and records: can the server tell the worst two neighbours apart too well?

A smoke alarm, not a proof: it would miss a tenth of the noise missing. The last percent is pinned by exact
analysis (test_privacy, test_noise). What it does see is everything between the row and the server: clipping,
the map, the noise source, the ledger, the message.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import call, over_the_wire
from flwr.app import Context
from flwr.clientapp import ClientApp
from scipy.optimize import brentq
from scipy.stats import beta, norm

from flwr_modulated import (
    Distance,
    Guarantee,
    Ledger,
    Mechanism,
    ModulatedClient,
    Modulation,
    Policy,
    Replace,
    ReplaceRecord,
    mechanism,
)
from flwr_modulated import policy as policy_module
from flwr_modulated.flower.records import Request, parse_reply
from flwr_modulated.noise import DeviceNoise, NumpyNoise

pytestmark = [pytest.mark.statistical, pytest.mark.usefixtures("task_identity")]

# Each of the two Clopper-Pearson bounds fails with at most half of it.
FALSE_ALARM = 1e-6
MODULATION = Modulation(alpha=0.25, amplitude=0.5, frequency=1.5, num_directions=1)
RELATIONS = {
    "distance": Distance(1.5),
    "replace": Replace(2.0),
    "replace_record": ReplaceRecord(2.0, label_scale=1.5),
}
# At these claims half the noise is still told from the claim; δ is no advice.
CLAIMS = {"exact": (1.0, 1e-5), "zcdp": (2.0, 1e-3), "classical": (1.0, 1e-3)}


@dataclass(frozen=True)
class Pair:
    """Two neighbours whose releases differ most, along the last column; and how far apart they are."""

    features: tuple[np.ndarray, np.ndarray]
    labels: tuple[float, float]
    apart: float
    middle: float = 0.0  # of the last column

    @classmethod
    def worst(cls, relation: Any) -> Pair:
        """One feature and the label, or two features: modulation acts along the first column.

        Rows that are clipped lie ten radii out, so that a device which forgets to clip is told apart.
        """
        r = relation.radius
        if isinstance(relation, Distance):
            return cls((np.array([[0.7, 3.0 + r / 2]]), np.array([[0.7, 3.0 - r / 2]])), (1.0, 1.0), r, 3.0)
        if isinstance(relation, Replace):
            row = np.array([[0.0, 10 * r]])
            return cls((row, -row), (1.0, 1.0), 2 * r)
        label = 10 * r * relation.label_scale
        return cls((np.zeros((1, 1)), np.zeros((1, 1))), (label, -label), 2 * r)


def needed_multiplier(epsilon: float, delta: float, accounting: str) -> float:
    """σ/Δ that the claim needs, by formulas of this file's own."""
    if accounting == "zcdp":  # ε = ρ + 2√(ρ ln(1/δ)), ρ = Δ²/2σ²
        log = math.log(1 / delta)
        return math.sqrt(0.5) / (math.sqrt(log + epsilon) - math.sqrt(log))
    if accounting == "classical":
        return math.sqrt(2 * math.log(1.25 / delta)) / epsilon

    def excess(s: float) -> float:  # Balle and Wang (2018), Theorem 8
        return norm.cdf(0.5 / s - epsilon * s) - math.exp(epsilon) * norm.cdf(-0.5 / s - epsilon * s) - delta

    return float(brentq(excess, 0.05, 100.0))


def lower_bound(hits: int, false_hits: int, n: int, delta: float) -> float:
    """ln((p − δ)/q), p bounded from below and q from above by Clopper and Pearson.

    An (ε, δ) guarantee has p ≤ e^ε q + δ for every event: above the true ε with probability at most 1e-6.
    """
    p = beta.ppf(FALSE_ALARM / 2, hits, n - hits + 1) if hits else 0.0
    q = beta.isf(FALSE_ALARM / 2, false_hits + 1, n - false_hits) if false_hits < n else 1.0
    return math.log((p - delta) / q) if p > delta else -math.inf


def plan(epsilon: float, delta: float, multiplier: float, n: int) -> tuple[float, float]:
    """The event {released > middle + c·Δ}, fixed before anything is drawn; and its margin.

    c is the best against an attacker's noise of `multiplier`·Δ; the margin is the lower bound on ε, less the
    claim, that is passed even if both counts are 4.9 SE on the wrong side: with probability 1 − 1e-6.
    """
    best = (-math.inf, 0.0)
    for c in np.linspace(-0.5, 4 * multiplier, 200):
        p, q = norm.sf((c - 0.5) / multiplier), norm.sf((c + 0.5) / multiplier)
        hits = n * p - 4.9 * math.sqrt(n * p * (1 - p))
        false_hits = n * q + 4.9 * math.sqrt(n * q * (1 - q))
        if hits >= 1 and false_hits <= n:
            margin = lower_bound(math.floor(hits), math.ceil(false_hits), n, delta) - epsilon
            best = max(best, (margin, float(c)))
    return best


@dataclass(frozen=True)
class Audit:
    """n one-row clients with each of two neighbours, hosted by one node each; T rounds."""

    policy: Policy
    n: int
    fraction: float  # of the noise, at which the event is best
    ledgers: Path | None = None  # with the device's noise

    def epsilon(self, rng: np.random.Generator) -> float:
        """Lower bound on ε from what the server reads."""
        guarantee, rounds = self.policy.guarantee, self.policy.num_releases
        needed = needed_multiplier(guarantee.epsilon, guarantee.delta, self.policy.accounting)
        margin, c = plan(guarantee.epsilon, guarantee.delta, self.fraction * needed, self.n)
        assert margin > 0, "without power this audit says nothing"
        pair = Pair.worst(guarantee.relation)
        contraction = MODULATION.contraction
        # The mean of T releases has the noise of one with the whole budget.
        threshold = contraction * (pair.middle + c * pair.apart)
        hits = [int((self.released(pair, which, rounds, rng) > threshold).sum()) for which in (0, 1)]
        return lower_bound(*hits, self.n, guarantee.delta)

    def released(self, pair: Pair, which: int, rounds: int, rng: np.random.Generator) -> np.ndarray:
        features = np.broadcast_to(pair.features[which], (self.n, pair.features[which].shape[1]))
        labels = np.full(self.n, pair.labels[which])
        joint = self.policy.guarantee.relation.hides_labels
        if self.ledgers is None:
            keep: dict[str, Any] = {"rng": lambda server_round: rng}
        else:
            keep = {"ledger": Ledger(self.ledgers / f"{which}.db")}

        def client_fn(context: Context) -> Any:
            return ModulatedClient(lambda: (features, labels), self.policy, **keep).to_client()

        app = ClientApp(client_fn)
        total = np.zeros(self.n)
        for index in range(rounds):
            columns = features.shape[1] + joint
            request = Request(index + 1, MODULATION, np.eye(columns)[:, :1], "audit", "rows", index)
            reply = call(app, over_the_wire(request.to_recorddict()))
            parsed = parse_reply(over_the_wire(reply.content), request=request, joint=joint)
            total += parsed.released[:, -1]
        return total / rounds


def half_the_noise(patch: pytest.MonkeyPatch, factor: float = 0.5) -> None:
    """Stated and drawn."""
    stated = Mechanism.noise_std.fget
    patch.setattr(Mechanism, "noise_std", property(lambda self: factor * stated(self)))


def draws_half(patch: pytest.MonkeyPatch) -> None:
    """Drawn only: what is stated stays right."""
    for source in (NumpyNoise, DeviceNoise):
        add = source.add_gaussian
        patch.setattr(source, "add_gaussian", lambda self, values, std, add=add: add(self, values, std / 2))


def does_not_clip(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(mechanism, "clip_rows", lambda rows, radius: rows)


def releases_do_not_compose(patch: pytest.MonkeyPatch) -> None:
    # A cache of its own: broken mechanisms must not be kept.
    patch.setattr(policy_module, "_mechanism", lru_cache(policy_module._mechanism.__wrapped__))
    patch.setattr(Mechanism, "_num_compositions", property(lambda self: 1))


def simulated(relation: Any, accounting: str) -> Audit:
    """A million one-row clients a neighbour; marginal sensitivity, modulated beside the worst direction."""
    guarantee = Guarantee(*CLAIMS[accounting], relation)
    return Audit(Policy(guarantee, sensitivity="marginal", accounting=accounting), 1_000_000, 0.5)


everywhere = pytest.mark.parametrize("relation", RELATIONS.values(), ids=RELATIONS)


@everywhere
@pytest.mark.parametrize("accounting", CLAIMS)
def test_simulated_clients_keep_their_claim(relation: Any, accounting: str, rng: np.random.Generator) -> None:
    """Confidence 1 − 1e-6, n = 10⁶ of each neighbour."""
    audit = simulated(relation, accounting)
    assert audit.epsilon(rng) <= audit.policy.guarantee.epsilon


@everywhere
@pytest.mark.parametrize("accounting", CLAIMS)
def test_half_the_noise_is_rejected(
    relation: Any, accounting: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same audit, with power 1 − 1e-6: margins of 0.26, 0.53 and 0.15 in ε (see `plan`)."""
    half_the_noise(monkeypatch)
    audit = simulated(relation, accounting)
    assert audit.epsilon(rng) > audit.policy.guarantee.epsilon


@pytest.mark.parametrize("defect", [draws_half, does_not_clip])
def test_other_defects_are_rejected(
    defect: Any, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    defect(monkeypatch)
    audit = simulated(Replace(2.0), "exact")
    assert audit.epsilon(rng) > audit.policy.guarantee.epsilon


@pytest.mark.parametrize("broken", [False, True], ids=["composed", "not composed"])
def test_two_releases_together(
    broken: bool, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rounds share the claim (1, 0.01); calibrated one by one, 0.71 of the noise, they are rejected.

    n = 10⁶, confidence and power 1 − 1e-6, margin 0.42.
    """
    if broken:
        releases_do_not_compose(monkeypatch)
    policy = Policy(Guarantee(1.0, 0.01, Replace(2.0)), num_releases=2, sensitivity="marginal")
    found = Audit(policy, 1_000_000, math.sqrt(0.5)).epsilon(rng)
    assert (found > 1.0) == broken


# OpenDP's noise takes 0.06 ms a number, so there are fewer clients, and claims with a larger δ. Calibration
# does not depend on the source: zCDP and classical accounting, whose slack at such δ is close to a factor of
# two in noise, are held against a quarter of the noise.
DEVICES = [
    ("distance", "exact", (2.0, 0.05), 0.5),
    ("replace", "exact", (2.0, 0.05), 0.5),
    ("replace_record", "exact", (2.0, 0.05), 0.5),
    ("replace", "zcdp", (2.0, 0.05), 0.25),
    ("replace", "classical", (1.0, 0.05), 0.25),
]


@pytest.mark.parametrize("broken", [False, True], ids=["whole noise", "part of the noise"])
@pytest.mark.parametrize(
    ("relation", "accounting", "claim", "fraction"), DEVICES, ids=[f"{r}-{a}" for r, a, *_ in DEVICES]
)
def test_devices_with_a_ledger(
    broken: bool,
    relation: str,
    accounting: str,
    claim: tuple[float, float],
    fraction: float,
    rng: np.random.Generator,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """n = 4000 of each neighbour, confidence and power 1 − 1e-6, margins of 0.62, 1.30 and 0.45 in ε."""
    if broken:
        half_the_noise(monkeypatch, fraction)
    guarantee = Guarantee(*claim, RELATIONS[relation])
    policy = Policy(guarantee, sensitivity="marginal", accounting=accounting)
    found = Audit(policy, 4000, fraction, ledgers=tmp_path).epsilon(rng)
    assert (found > guarantee.epsilon) == broken
