"""The search behind ``local_dp_fedavg_tuned``: every setting of a grid, scored on the validation split.

Selection looks at private data and is charged to nobody, as in the paper: it flatters the
baseline. The whole search is a record.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from itertools import product

import numpy as np

from flwr_modulated._typing import FloatArray

from .data import cell_split
from .local_dp import noise_multiplier, simulate, tail_length
from .records import Record
from .settings import Cell
from .study import versions

TUNED = "local_dp_fedavg_tuned"
FIELDS = ("num_rounds", "clip", "step", "clip_ratio", "tail")
# Settings simulated at once: more would not fit the processor's cache.
_BLOCK = 64


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """The grid; each setting is scored on the mean of several noise draws.

    Small tasks get more of them (about `rows` simulated rows for each setting, 2 to 16
    draws): what is picked for one lucky draw does badly on the next.
    """

    num_rounds: tuple[int, ...] = (5, 10, 20, 40)
    clip: tuple[float, ...] = (0.05, 0.2, 0.7, 2.5)
    step: tuple[float, ...] = (0.025, 0.1, 0.2, 0.4, 0.8, 1.6)
    clip_ratio: tuple[float, ...] = (1.0, 0.3, 0.1)
    tail: tuple[float, ...] = (0.0, 0.5)
    rows: int = 24_000

    def repeats(self, num_clients: int) -> int:
        """Noise draws for each setting."""
        return max(2, min(16, self.rows // num_clients))


SPACE = SearchSpace()


def needs_search(cell: Cell) -> bool:
    """Whether the cell's settings come from a search that has not been done yet."""
    return cell.method_name == TUNED and cell.setting("clip") is None


def search_identity(cell: Cell, space: SearchSpace = SPACE) -> str:
    """Digest of what a search depends on; cells that share it share the search."""
    values = [
        cell.task,
        cell.num_clients,
        *([cell.num_features] if cell.num_features else []),  # of the synthetic task only
        cell.seed,
        cell.delta,
        cell.accounting,
        cell.setting("epsilons"),
        asdict(space),
    ]
    return sha256(json.dumps(values).encode()).hexdigest()[:16]


def search(cell: Cell, space: SearchSpace = SPACE) -> Record:
    """Score all settings on the validation split at each ε of the grid.

    Parameters
    ----------
    cell : Cell
        Names the split, δ, the accountant and, as its setting ``epsilons``, the grid.
    space : SearchSpace
        What to try.

    Returns
    -------
    dict
        A record of kind "search": ``settings``, their ``r2_validation`` (one row a
        setting, one column an ε), and the indices ``selected`` (highest mean over the grid,
        where worse than the mean label counts as the mean label: or one hopeless ε would
        decide) and ``selected_by_epsilon``.
    """
    begin = time.perf_counter()
    split = cell_split(cell)
    epsilons = [float(epsilon) for epsilon in cell.setting("epsilons")]
    rng = np.random.default_rng(np.random.SeedSequence([cell.seed], spawn_key=(3,)))
    repeats = space.repeats(len(split.train_labels))
    score = _Scorer(split.validation_features, split.validation_labels)
    settings: list[list[float]] = []
    scores: list[FloatArray] = []
    for num_rounds in space.num_rounds:
        combinations = list(product(space.clip, space.step, space.clip_ratio))
        multipliers = np.array(
            [noise_multiplier(epsilon, cell.delta, num_rounds, cell.accounting) for epsilon in epsilons]
        )
        by_tail = _scores(
            split.train_features,
            split.train_labels,
            combinations,
            multipliers,
            # The same draws for all settings: their differences are less noisy.
            rng.standard_normal((repeats, num_rounds, split.num_features)),
            [tail_length(tail, num_rounds) for tail in space.tail],
            score,
        )
        for tail, table in zip(space.tail, by_tail, strict=True):
            settings += [[num_rounds, *combination, tail] for combination in combinations]
            scores.append(table)
    table = np.concatenate(scores)
    return {
        "kind": "search",
        "id": search_identity(cell, space),
        "experiment": cell.experiment,
        "task": cell.task,
        "method": TUNED,
        "seed": cell.seed,
        "delta": cell.delta,
        "accounting": cell.accounting,
        "epsilons": epsilons,
        "repeats": repeats,
        "fields": list(FIELDS),
        "settings": settings,
        "r2_validation": np.maximum(table, -1.0).round(3).tolist(),  # below: hopeless
        "selected": int(np.maximum(table, 0.0).mean(axis=1).argmax()),
        "selected_by_epsilon": table.argmax(axis=0).tolist(),
        "seconds": round(time.perf_counter() - begin, 3),
        "versions": versions(),
    }


def resolve(cell: Cell, record: Record) -> Cell:
    """Give a cell the settings that its search selected."""
    if cell.setting("tuning") == "epsilon":
        index = record["selected_by_epsilon"][record["epsilons"].index(cell.epsilon)]
    else:
        index = record["selected"]
    found = dict(zip(record["fields"], record["settings"][index], strict=True))
    found["num_rounds"] = int(found["num_rounds"])
    return replace(cell, method=tuple(sorted({**dict(cell.method), **found}.items())))


class _Scorer:
    """Validation R² of many coefficients at once, from second moments."""

    def __init__(self, features: FloatArray, labels: FloatArray) -> None:
        self._gram, self._cross = features.T @ features, features.T @ labels
        self._square = float(labels @ labels)
        self._total = float(np.sum((labels - labels.mean()) ** 2))

    def __call__(self, beta: FloatArray) -> FloatArray:
        """R² of each column of `beta`, of shape (d, B)."""
        residual = self._square - 2.0 * self._cross @ beta + np.sum(beta * (self._gram @ beta), axis=0)
        return np.asarray(1.0 - residual / self._total)


def _scores(
    features: FloatArray,
    labels: FloatArray,
    combinations: Sequence[tuple[float, float, float]],
    multipliers: FloatArray,
    normals: FloatArray,
    tails: Sequence[int],
    score: _Scorer,
) -> list[FloatArray]:
    """Mean validation R² of each combination (rows) at each ε (columns), for each tail."""
    repeats, num_rounds, _ = normals.shape
    shape = (len(combinations), len(multipliers), repeats)
    results = [np.empty(int(np.prod(shape))) for _ in tails]
    clip, step, ratio = np.array(combinations).T
    progress = np.arange(num_rounds) / max(num_rounds - 1, 1)
    clips = clip * ratio ** progress[:, None]
    index = np.indices(shape).reshape(3, -1)
    for start in range(0, index.shape[1], _BLOCK):
        block = slice(start, start + _BLOCK)
        which, epsilon, repeat = index[:, block]
        scale = 2.0 * clips[:, which] * multipliers[epsilon] / np.sqrt(len(labels))
        noise = scale[:, None, :] * normals[repeat].transpose(1, 2, 0)
        iterates = simulate(features, labels, clips=clips[:, which], steps=step[which], noise=noise)
        for result, tail in zip(results, tails, strict=True):
            result[block] = score(iterates[-tail:].mean(axis=0))
    return [result.reshape(shape).mean(axis=2) for result in results]
