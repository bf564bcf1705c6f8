"""What colluding devices can do to the coefficients: ``python -m simulations.collusion`` prints the table.

Liars know everything that honest devices have released, agree on what to send, and keep within what the
server screens; of the lies tried, the one that moves the coefficients most counts. Takes about a minute.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from flwr_modulated import (
    Auto,
    DebiasedMoments,
    Guarantee,
    Mechanism,
    Modulation,
    Moments,
    ProtocolError,
    Replace,
)
from flwr_modulated._typing import FloatArray
from flwr_modulated.flower.records import Reply, Request, RowsReply
from flwr_modulated.flower.screening import Screen
from flwr_modulated.flower.state import Round, StudyState

BETA = np.array([1.0, -0.5, 0.25, 0.0, 0.3])
ERROR = 0.5
RADIUS, LARGEST_LABEL = 3.0, 4.0
DELTA = 1e-5
EPSILONS = (1.0, 4.0, 16.0)
FRACTIONS = (0.001, 0.01, 0.05, 0.2)
LIES = ("false data", "false reply", "false σ")
_PLAIN = Modulation()
_NUM_DIRECTIONS, _NUM_LENGTHS = 30, 13


@dataclass(frozen=True, slots=True)
class Damage:
    """How far the worst lie moves the fit.

    Attributes
    ----------
    moved : float
        ‖β̂ with liars − β̂ of the honest alone‖ / ‖β‖.
    r2 : float
        R² on the population, with liars.
    """

    moved: float
    r2: float


@dataclass(frozen=True, slots=True)
class Federation:
    """Released rows of honest devices, one each."""

    released: FloatArray
    labels: FloatArray
    noise_std: float

    @classmethod
    def draw(cls, num_devices: int, epsilon: float, *, rng: np.random.Generator) -> Federation:
        """Standard normal features, labels with R² about 0.85, both within public bounds."""
        x = rng.standard_normal((num_devices, len(BETA)))
        y = np.clip(x @ BETA + ERROR * rng.standard_normal(num_devices), -LARGEST_LABEL, LARGEST_LABEL)
        mechanism = Mechanism(_PLAIN, Guarantee(epsilon, DELTA, Replace(RADIUS)))
        return cls(mechanism.release(x, rng=rng), y, mechanism.noise_std)

    def fit(self, rows: FloatArray, labels: FloatArray, noise_std: float) -> FloatArray:
        """β̂ of the strategy from these rows beside the honest ones."""
        replies: dict[int, Reply] = {1: _reply(self.released, self.labels, self.noise_std)}
        if len(rows):
            replies[2] = _reply(rows, labels, noise_std)
        return Auto().estimate(StudyState([Round(_request(), replies)]).debias(None))


def screen(noise_std: float, lie: str) -> Screen:
    """What the server knows and checks; for ``"false σ"`` it has forgotten to bound the noise."""
    least, most = (0.0, math.inf) if lie == "false σ" else (noise_std, noise_std)
    return Screen(
        feature_radius=RADIUS,
        label_radius=LARGEST_LABEL,
        min_noise_std=least,
        max_noise_std=most,
        max_samples=1,
    )


def damage(federation: Federation, fraction: float, lie: str, *, rng: np.random.Generator) -> Damage:
    """The worst of the lies of a kind.

    Parameters
    ----------
    federation : Federation
        The honest devices.
    fraction : float
        Liars among all devices.
    lie : {"false data", "false reply", "false σ"}
        A made-up row and label, released honestly; a reply made up within the screen's
        bounds; or a made-up row that is said to carry hardly any noise.
    rng : numpy.random.Generator

    Returns
    -------
    Damage
    """
    d, std = len(BETA), federation.noise_std
    liars = max(1, round(fraction / (1 - fraction) * len(federation.labels)))
    stated = 1e-6 * RADIUS if lie == "false σ" else std
    nobody = np.zeros((0, d)), np.zeros(0), stated
    honest = federation.fit(*nobody)
    # Lies are compared by sums, which is quick; the worst is then sent as replies.
    sums = Moments.from_rows(federation.released, federation.labels, noise_std=std)
    worst = honest, 0.0, *nobody
    for rows, label in _candidates(federation, lie, liars, honest, rng):
        labels = np.full(liars, label)
        lies = Moments.from_rows(rows, labels, noise_std=stated)
        together = (
            DebiasedMoments.combine([sums.debias(), lies.debias()])
            if lie == "false σ"
            else (sums + lies).debias()
        )
        beta = Auto().estimate(together)
        moved = float(np.linalg.norm(beta - honest))
        if moved > worst[1]:
            worst = beta, moved, rows, labels, stated
    beta, moved, *sent = worst
    _check(federation, lie, *sent)
    np.testing.assert_allclose(federation.fit(*sent), beta, rtol=1e-6)
    unexplained = np.sum((beta - BETA) ** 2) + ERROR**2
    return Damage(moved / float(np.linalg.norm(BETA)), float(1 - unexplained / (BETA @ BETA + ERROR**2)))


def _candidates(
    federation: Federation, lie: str, liars: int, honest: FloatArray, rng: np.random.Generator
) -> Iterator[tuple[FloatArray, float]]:
    """Rows and the label of all liars: along the fit or any direction, of many lengths."""
    d, std = len(BETA), federation.noise_std
    directions = np.vstack([honest, rng.standard_normal((_NUM_DIRECTIONS, d))])
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    # Equal releases count once, so liars differ in the last digits.
    jitter = 1e-9 * rng.standard_normal((liars, d))
    longest = RADIUS
    if lie == "false reply":
        longest = _longest(std)
    for direction in directions:
        for length in np.linspace(0.0, longest * (1 - 1e-6), _NUM_LENGTHS):
            rows = length * direction + jitter
            if lie == "false data":
                rows = rows + std * rng.standard_normal((liars, d))
            for label in (-LARGEST_LABEL, LARGEST_LABEL):
                yield rows, label


def _longest(noise_std: float) -> float:
    """The longest row that the screen lets pass, by bisection on the screen itself."""
    bounds, request = screen(noise_std, "false reply"), _request()
    low, high = 0.0, RADIUS + 100.0 * noise_std
    for _ in range(60):
        middle = 0.5 * (low + high)
        row = np.zeros((1, len(BETA)))
        row[0, 0] = middle
        try:
            bounds.check(_reply(row, np.zeros(1), noise_std), request)
        except ProtocolError:
            high = middle
        else:
            low = middle
    return low


def _request() -> Request:
    return Request(1, _PLAIN, np.zeros((len(BETA), 0)))


def _reply(released: FloatArray, labels: FloatArray, noise_std: float) -> RowsReply:
    return RowsReply(1, np.column_stack([released, labels]), noise_std)


def _check(federation: Federation, lie: str, rows: FloatArray, labels: FloatArray, std: float) -> None:
    """Raise if the server would refuse one of the replies."""
    bounds, request = screen(federation.noise_std, lie), _request()
    for i in range(len(rows)):
        bounds.check(_reply(rows[i : i + 1], labels[i : i + 1], std), request)


def table(num_devices: int, replications: int, *, seed: int = 0) -> str:
    """Markdown: mean shift of β̂ in units of ‖β‖, and mean R² in brackets, by lie, ε and share of liars."""
    heads = ["lie", "ε", "R² of the honest", *(f"{fraction:.1%} lie" for fraction in FRACTIONS)]
    lines = [heads, ["---"] * len(heads)]
    for lie in LIES:
        for epsilon in EPSILONS:
            cells = []
            for fraction in (0.0, *FRACTIONS):
                found = []
                for replication in range(replications):
                    rng = np.random.default_rng([seed, replication])
                    honest = num_devices - round(fraction * num_devices)
                    federation = Federation.draw(honest, epsilon, rng=rng)
                    if fraction:
                        found.append(damage(federation, fraction, lie, rng=rng))
                    else:
                        beta = federation.fit(np.zeros((0, len(BETA))), np.zeros(0), np.zeros(0))
                        total = BETA @ BETA + ERROR**2
                        found.append(Damage(0.0, float(1 - (np.sum((beta - BETA) ** 2) + ERROR**2) / total)))
                moved, r2 = (float(np.mean([getattr(f, name) for f in found])) for name in ("moved", "r2"))
                told = f"{r2:.2f}" if r2 >= -1 else "below −1"
                cells.append(f"{moved:.2f} ({told})" if fraction else told)
            lines.append([lie, f"{epsilon:g}", *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m simulations.collusion", description=__doc__)
    parser.add_argument("--devices", type=int, default=10_000)
    parser.add_argument("--replications", type=int, default=5)
    options = parser.parse_args(arguments)
    print(
        f"{options.devices} devices with one row of {len(BETA)} features each; δ = {DELTA:g}, relation "
        f"{Replace(RADIUS)}, unit row, labels public and at most {LARGEST_LABEL:g}; mean of "
        f"{options.replications} federations.\n"
    )
    print(table(options.devices, options.replications))


if __name__ == "__main__":
    main()
