"""What runs promised, what noise they used, whether that keeps the promise, and what attackers learn."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ._validate import check_int, check_real
from .errors import InvalidDataError, ModulatedError
from .modulation import Modulation
from .privacy import gaussian_delta
from .reconstruction import average_of_releases, inversion_error, prior_error
from .studies import parse_relation
from .tradeoff import best_guess, exact_epsilon

__all__ = ["Finding", "audit_records", "read_records"]

# Room for the rounding of a number in a text file; far below anything that matters.
_ROUNDING = 1e-6
# What tells two mechanisms apart; the rest follows from it.
_MECHANISM = (
    "method",
    "relation",
    "unit",
    "accounting",
    "epsilon",
    "delta",
    "num_rounds",
    "noise_std",
    "sensitivity",
)


@dataclass(frozen=True, slots=True)
class Finding:
    """One mechanism, as its records describe it and as it really is.

    Attributes
    ----------
    method, relation, unit, accounting : str
        As recorded.
    epsilon, delta : float
        The promise.
    num_rounds : int
        Releases of each device.
    noise_std : float
        σ of each release, in units of what is released.
    sensitivity : float
        L2 sensitivity of one release under the relation, computed anew from the map.
    exact_epsilon : float
        Smallest ε at that δ of the noise that was used.
    kept : bool
        Whether the noise keeps the promise.
    best_guess : float
        Chance that the best attacker names the right one of two equally likely neighbours.
    unbiased_error, prior_error : float or None
        Root mean square error per feature of a guess of the row, in standard deviations of a
        feature: of the best unbiased attacker, and of one who takes features as independent
        standard normal. None where no row is released.
    tasks : tuple of str
        Where it ran.
    num_runs : int
        How many records describe it.
    """

    method: str
    relation: str
    unit: str
    accounting: str
    epsilon: float
    delta: float
    num_rounds: int
    noise_std: float
    sensitivity: float
    exact_epsilon: float
    kept: bool
    best_guess: float
    unbiased_error: float | None
    prior_error: float | None
    tasks: tuple[str, ...]
    num_runs: int


def read_records(path: Path) -> list[dict[str, Any]]:
    """Read a JSON-lines file of records, plain or ``.gz``.

    Parameters
    ----------
    path : Path
        One JSON object a line.

    Returns
    -------
    list of dict

    Raises
    ------
    InvalidDataError
        If there is no such file, a line is not a JSON object, or there is none.
    """
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")
    except OSError as error:
        raise InvalidDataError(f"records must be a readable file of JSON lines: {path}") from error
    except (UnicodeDecodeError, EOFError):
        raise InvalidDataError(f"{path}: not a text file, nor a whole compressed one") from None
    records = []
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            record = None
        if not isinstance(record, dict):
            raise InvalidDataError(f"{path}, line {number}: not a JSON object; remove the line to go on")
        records.append(record)
    if not records:
        raise InvalidDataError(f"{path}: no records")
    return records


def audit_records(records: list[dict[str, Any]]) -> list[Finding]:
    """Recompute the guarantee of every distinct mechanism in records of runs.

    Parameters
    ----------
    records : list of dict
        With method, task, epsilon, delta, relation, accounting, sensitivity, alpha, amplitude,
        frequency, num_directions, num_rounds, noise_std, num_clients and num_features; and clip,
        where gradients are released.

    Returns
    -------
    list of Finding
        In the order of first appearance.

    Raises
    ------
    InvalidDataError
        If a record lacks a field or a value cannot be right.

    Notes
    -----
    1. The sensitivity is computed from the map and the relation, never taken from a record.
    2. ε is that of the Gaussian mechanism itself (Balle and Wang 2018), whatever the accounting.
    3. What records do not hold is not checked: that devices drew fresh noise of this size.
    """
    found: dict[tuple[Any, ...], Finding] = {}
    for number, record in enumerate(records, start=1):
        try:
            finding = _finding(record)
        except ModulatedError as error:
            raise InvalidDataError(f"record {number}: {error}") from error
        except (KeyError, TypeError, ValueError) as error:
            name = f"{error}" if isinstance(error, KeyError) else "a number"
            raise InvalidDataError(
                f"record {number}: {name} is missing or of another type; only records of runs can be audited"
            ) from None
        # Tasks with fewer features differ in the errors only: keep what is best for the attacker.
        key = tuple(getattr(finding, name) for name in _MECHANISM)
        found[key] = _merge(found.get(key), finding)
    return list(found.values())


def _merge(before: Finding | None, new: Finding) -> Finding:
    if before is None:
        return new
    return replace(
        before,
        unbiased_error=_least(before.unbiased_error, new.unbiased_error),
        prior_error=_least(before.prior_error, new.prior_error),
        tasks=before.tasks if new.tasks[0] in before.tasks else before.tasks + new.tasks,
        num_runs=before.num_runs + 1,
    )


def _least(first: float | None, second: float | None) -> float | None:
    return None if first is None or second is None else min(first, second)


def _finding(record: Mapping[str, Any]) -> Finding:
    rounds = check_int("num_rounds", record["num_rounds"], low=1)
    noise_std = check_real("noise_std", record["noise_std"], low=0, low_open=True)
    epsilon, delta = float(record["epsilon"]), float(record["delta"])
    gradients = record.get("clip") is not None
    modulation = Modulation() if gradients else _modulation(record)
    sensitivity = _gradient_sensitivity(record) if gradients else _sensitivity(record, modulation)
    multiplier = noise_std / sensitivity / math.sqrt(rounds)
    unbiased, informed = (None, None) if gradients else _errors(record, modulation, noise_std, rounds)
    return Finding(
        method=str(record["method"]),
        relation=str(record["relation"]),
        unit=str(record.get("unit", "row")),
        accounting=str(record["accounting"]),
        epsilon=epsilon,
        delta=delta,
        num_rounds=rounds,
        noise_std=noise_std,
        sensitivity=sensitivity,
        exact_epsilon=exact_epsilon(multiplier, delta),
        kept=gaussian_delta(epsilon, multiplier) <= delta * (1 + _ROUNDING),
        best_guess=best_guess(multiplier),
        unbiased_error=unbiased,
        prior_error=informed,
        tasks=(str(record["task"]),),
        num_runs=1,
    )


def _modulation(record: Mapping[str, Any]) -> Modulation:
    return Modulation(record["alpha"], record["amplitude"], record["frequency"], record["num_directions"])


def _sensitivity(record: Mapping[str, Any], modulation: Modulation) -> float:
    kind = record["sensitivity"]
    # A number says nothing about secret phases: hold it to the stricter of the two.
    lipschitz = modulation.lipschitz(kind if isinstance(kind, str) else "conditional")  # type: ignore[arg-type]
    return lipschitz * parse_relation(record["relation"]).separation


def _gradient_sensitivity(record: Mapping[str, Any]) -> float:
    clip = check_real("clip", record["clip"], low=0, low_open=True)
    if record.get("threat_model") == "central":
        # A trusted server adds the noise to the mean; one record more or less.
        return clip / check_int("num_clients", record["num_clients"], low=1)
    return 2 * clip


def _errors(
    record: Mapping[str, Any], modulation: Modulation, noise_std: float, rounds: int
) -> tuple[float, float]:
    hides_label = parse_relation(record["relation"]).hides_labels
    d = check_int("num_features", record["num_features"], low=1) + hides_label
    averaged, sigma = average_of_releases(modulation, noise_std, rounds)
    directions = np.eye(d)[:, : modulation.num_directions]
    return (
        math.sqrt(inversion_error(num_features=d, modulation=averaged, noise_std=sigma)),
        math.sqrt(prior_error(directions, modulation=averaged, noise_std=sigma, prior_covariance=np.eye(d))),
    )
