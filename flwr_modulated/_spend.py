"""What a device keeps for a request: its key, the release, and how a ledger tells it in words."""

from __future__ import annotations

import hashlib
import io
import json
import math
import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from ._typing import FloatArray
from ._validate import check_int, check_matrix, check_real, check_vector
from .errors import InvalidParameterError, LedgerError
from .modulation import Modulation
from .privacy import gaussian_epsilon

__all__ = ["ROUNDING", "Release", "Spend", "Summary", "count", "purpose", "request_key"]

# Sums of equal shares of the budget may pass it by rounding; calibration has a slack of 2e-9.
ROUNDING = 1e-12


@dataclass(frozen=True, slots=True, eq=False)
class Release:
    """What leaves a device for one request.

    Parameters
    ----------
    released : array_like of shape (n, d)
        Released rows g̃.
    labels : array_like of shape (n,) or None
        Labels that leave as they are; None if the relation hides them.
    noise_std : float
        σ of the noise in `released`.

    Raises
    ------
    InvalidDataError, InvalidParameterError
        If something is not finite or the lengths differ.
    """

    released: FloatArray
    labels: FloatArray | None
    noise_std: float

    def __post_init__(self) -> None:
        rows = check_matrix("released", self.released)
        object.__setattr__(self, "released", rows)
        if self.labels is not None:
            object.__setattr__(self, "labels", check_vector("labels", self.labels, length=rows.shape[0]))
        object.__setattr__(self, "noise_std", check_real("noise_std", self.noise_std, low=0, low_open=True))

    def to_bytes(self) -> bytes:
        """The release as a NumPy archive."""
        arrays = {"released": self.released, "noise_std": np.array(self.noise_std)}
        if self.labels is not None:
            arrays["labels"] = self.labels
        buffer = io.BytesIO()
        np.savez(buffer, allow_pickle=False, **arrays)
        return buffer.getvalue()

    @classmethod
    def from_bytes(cls, payload: bytes) -> Release:
        """Read what :meth:`to_bytes` wrote.

        Raises
        ------
        LedgerError
            If the bytes are damaged.
        """
        try:
            with np.load(io.BytesIO(payload), allow_pickle=False) as arrays:
                return cls(arrays["released"], arrays.get("labels"), float(arrays["noise_std"]))
        except Exception:  # zip, header, checksum and shape errors have no common base
            pass
        raise LedgerError("a release kept in the ledger is damaged; the device must not answer from it")


@dataclass(frozen=True, slots=True)
class Spend:
    """One line of a ledger.

    Attributes
    ----------
    purpose : str
        The request, in words.
    cost : float
        μ² of Gaussian differential privacy.
    spent_at : str
        UTC time, ISO 8601.
    num_bytes : int or None
        Size of the release; None if the device stopped before it was made.
    """

    purpose: str
    cost: float
    spent_at: str
    num_bytes: int | None


@dataclass(frozen=True, slots=True)
class Summary:
    """What a device has spent, on what, and what is left; ``str()`` says it in words.

    Attributes
    ----------
    policy : str
        The policy used last, in words.
    delta : float
        Its δ.
    budget, spent, cost : float
        μ² allowed in all, spent so far, and of one more release.
    spends : tuple of Spend
        Oldest first.
    """

    policy: str
    delta: float
    budget: float
    spent: float
    cost: float
    spends: tuple[Spend, ...]

    @property
    def num_left(self) -> int:
        """How many more releases the policy used last allows."""
        return max(0, math.floor((self.budget * (1.0 + ROUNDING) - self.spent) / self.cost))

    @property
    def epsilon_spent(self) -> float:
        """ε spent so far at `delta`, by exact accounting."""
        return gaussian_epsilon(self.delta, 1.0 / math.sqrt(self.spent)) if self.spent else 0.0

    def __str__(self) -> str:
        if not self.spends:
            return "This device has released nothing yet, so it has spent nothing."
        lines = [
            f"This device has paid for {count(len(self.spends), 'release')}: "
            f"{self.spent / self.budget:.1%} of its budget. All of them together are "
            f"(ε={self.epsilon_spent:.4g}, δ={self.delta:g})-differentially private, by exact accounting.",
            f"Left: {count(self.num_left, 'release')} under the present policy. Repeated requests are free.",
            f"Policy: {self.policy}",
            "Spent on:",
        ]
        for number, spend in enumerate(self.spends, start=1):
            size = "not released, the device stopped first; a repeat of the request will complete it"
            if spend.num_bytes is not None:
                size = f"kept, {spend.num_bytes} bytes"
            share = f"{spend.cost / self.budget:.1%} of the budget"
            lines.append(f"  {number}. {spend.spent_at}  {share}  {spend.purpose}  ({size})")
        return "\n".join(lines)


def request_key(
    modulation: Modulation, directions: ArrayLike, *, study: str = "", index: int = 0
) -> tuple[str, str]:
    """What makes two requests the same.

    Parameters
    ----------
    modulation : Modulation
        The public map.
    directions : array_like of shape (d, m)
        Its directions.
    study : str, default ""
        The study's name.
    index : int, default 0
        Which of the study's releases.

    Returns
    -------
    key, same_map : str
        Digests: of the whole request, and of its map alone, under which a release means
        the same. Without modulation (λ = 0 or m = 0) only α and the width d count.

    Raises
    ------
    InvalidParameterError
        If `index` is negative or the directions are not a matrix.
    """
    check_int("index", index, low=0)
    frame = np.asarray(directions, dtype="<f8") + 0.0  # + 0.0: minus zero is zero
    if frame.ndim != 2:
        raise InvalidParameterError(f"directions must have shape (d, m), got {frame.ndim} dimension(s)")
    numbers = [modulation.alpha, 0.0, 0.0]
    if modulation.is_plain:
        frame = frame[:, :0]
    else:
        numbers[1:] = [modulation.amplitude, modulation.frequency]
    described = struct.pack("<3d2Q", *numbers, *frame.shape) + frame.tobytes()
    same_map = hashlib.sha256(b"flwr-modulated map 1\0" + described).hexdigest()
    request = json.dumps([same_map, study, index]).encode()
    return hashlib.sha256(b"flwr-modulated request 1\0" + request).hexdigest(), same_map


def purpose(modulation: Modulation, study: str, index: int, width: int) -> str:
    """A request in words."""
    # The name comes from the server: printing it must not move a cursor or a colour.
    name = json.dumps(study)
    if modulation.is_plain:
        return f"study {name}, release {index}, {width} columns, alpha={modulation.alpha:g}, no modulation"
    return (
        f"study {name}, release {index}, {width} columns, alpha={modulation.alpha:g}, "
        f"amplitude={modulation.amplitude:g}, frequency={modulation.frequency:g}, "
        f"{modulation.num_directions} direction(s)"
    )


def count(number: int, noun: str) -> str:
    """``"1 release"`` or ``"2 releases"``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
