"""Local DP FedAvg in numbers: clipping, noise, and a vectorised twin of the federation.

Each client clips its one-row gradient to C_t and adds N(0, (2 C_t z)² I); the server averages.
The twin runs many settings at once, for the search of :mod:`simulations.tuning`. It draws
the *mean* of the clients' noise, N(0, (2 C_t z)²/n I): the same law, n times fewer numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flwr_modulated import InvalidParameterError
from flwr_modulated._typing import FloatArray
from flwr_modulated.privacy import calibrate_noise_multiplier, clip_rows

# Replacing a record may turn its clipped gradient into any other of norm at most C.
REPLACE_ANY_RECORD = "replace_record(any)"
_ROWS = 1024


@dataclass(frozen=True, slots=True)
class LocalDp:
    """Settings of one run.

    Parameters
    ----------
    num_rounds : int
        T; every client answers in every round.
    clip : float
        C of the first round, in gradient units (label × feature).
    step : float
        Step on the averaged gradient.
    clip_ratio : float, default 1.0
        C of the last round over C of the first, in between geometric. A smaller clip
        takes smaller noise along, so the guarantee is that of a fixed clip.
    tail : float, default 0.0
        Fraction of the last iterates that are averaged; 0 takes the last one.
    """

    num_rounds: int
    clip: float
    step: float
    clip_ratio: float = 1.0
    tail: float = 0.0

    def __post_init__(self) -> None:
        for name in ("clip", "step", "clip_ratio"):
            if not getattr(self, name) > 0:
                raise InvalidParameterError(f"{name} must be positive, got {getattr(self, name)}")
        if not 0 <= self.tail <= 1:
            raise InvalidParameterError(f"tail must be in [0, 1], got {self.tail}")
        if self.num_rounds < 1:
            raise InvalidParameterError(f"num_rounds must be at least 1, got {self.num_rounds}")

    def clip_at(self, server_round: int) -> float:
        """Clip C_t of a round, counted from 1."""
        return self.clip * float(self.clip_ratio ** ((server_round - 1) / max(self.num_rounds - 1, 1)))

    @property
    def tail_length(self) -> int:
        """Number of iterates that are averaged."""
        return tail_length(self.tail, self.num_rounds)


def tail_length(tail: float, num_rounds: int) -> int:
    """Number of last iterates that are averaged, at least one."""
    return max(1, round(tail * num_rounds))


def noise_multiplier(epsilon: float, delta: float, num_rounds: int, accounting: str) -> float:
    """Noise over sensitivity, z = σ/Δ, of each of T rounds that share (ε, δ)."""
    return calibrate_noise_multiplier(
        epsilon,
        delta,
        num_compositions=num_rounds,
        accounting=accounting,  # type: ignore[arg-type]
    )


def clipped_gradients(beta: FloatArray, features: FloatArray, labels: FloatArray, clip: float) -> FloatArray:
    """Gradients of each row's squared loss ½(xᵀβ − y)², of shape (n, d), clipped to norm `clip`."""
    residuals = features @ beta - labels
    return clip_rows(residuals[:, None] * features, clip)


def simulate(
    features: FloatArray, labels: FloatArray, *, clips: FloatArray, steps: FloatArray, noise: FloatArray
) -> FloatArray:
    """Run B settings at once from β = 0.

    Parameters
    ----------
    features, labels : ndarray of shapes (n, d) and (n,)
        One row a client.
    clips : ndarray of shape (T, B)
        Clip of each round.
    steps : ndarray of shape (B,)
        Step.
    noise : ndarray of shape (T, d, B)
        Mean over the clients of their noise, in gradient units.

    Returns
    -------
    ndarray of shape (T, d, B)
        Iterates β₁ … β_T.

    Notes
    -----
    The gradient of one row is r x with residual r, so clipping it is clipping r‖x‖ to ±C
    and multiplying by x/‖x‖: no (n, d, B) array is needed. Rows go in blocks that stay in
    the processor's cache.
    """
    num_rounds, d, num_settings = noise.shape
    n = features.shape[0]
    norms = np.maximum(np.linalg.norm(features, axis=1), np.finfo(np.float64).tiny)[:, None]
    units = features / norms
    scaled = norms * np.column_stack([features, labels])
    beta = np.zeros((d + 1, num_settings))
    beta[d] = -1.0
    iterates = np.empty((num_rounds, d, num_settings))
    for t in range(num_rounds):
        total = np.zeros((d, num_settings))
        for start in range(0, n, _ROWS):
            block = slice(start, start + _ROWS)
            residuals = scaled[block] @ beta
            np.clip(residuals, -clips[t], clips[t], out=residuals)
            total += units[block].T @ residuals
        beta[:d] -= steps * (total / n + noise[t])
        iterates[t] = beta[:d]
    return iterates
