"""Rows of the synthetic task, drawn in blocks: in memory, or in a file that all workers of a machine map."""

from __future__ import annotations

import getpass
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flwr_modulated._blocks import row_blocks
from flwr_modulated._typing import FloatArray

# Anything larger goes into a file: one copy a machine, of which memory holds what is in use.
_LARGEST_IN_MEMORY = 2**24


@dataclass(frozen=True, slots=True)
class SyntheticRows:
    """Standard normal features and labels y = xᵀβ + N(0, 1 − R²).

    Parameters
    ----------
    seed : int
        Decides β and every row.
    num_rows, num_features : int
        Shape of the features.
    r2 : float
        Population R²; labels have variance 1.
    part : int, default 0
        Number of an independent set of rows with the same β.
    """

    seed: int
    num_rows: int
    num_features: int
    r2: float
    part: int = 0

    @property
    def beta(self) -> FloatArray:
        """True coefficients, of shape (d,): a random direction of squared length R²."""
        beta = self._stream(0).standard_normal(self.num_features)
        return np.asarray(beta * np.sqrt(self.r2 / (beta @ beta)))

    def load(self) -> tuple[FloatArray, FloatArray]:
        """Features (n, d) and labels (n,), read-only: drawn now, or mapped from the machine's file.

        A large file is removed by :meth:`discard`; processes that have mapped it keep it.
        """
        shapes = (self.num_rows, self.num_features), (self.num_rows,)
        if self._num_bytes <= _LARGEST_IN_MEMORY:
            features, labels = (np.empty(shape) for shape in shapes)
            self._draw(features, labels)
        else:
            with _locked(self._path):
                if not self._path.exists():
                    partial = self._path.with_suffix(".partial")
                    self._draw(*_map(partial, shapes, "w+"))
                    os.replace(partial, self._path)
                features, labels = _map(self._path, shapes, "r")
        features.flags.writeable = labels.flags.writeable = False
        return features, labels

    def discard(self) -> None:
        """Remove the file from this machine, if there is one."""
        if self._path.parent.exists():
            with _locked(self._path):
                self._path.unlink(missing_ok=True)

    @property
    def _num_bytes(self) -> int:
        return 8 * self.num_rows * (self.num_features + 1)

    @property
    def _path(self) -> Path:
        name = f"synthetic-{self.seed}-{self.part}-{self.num_rows}x{self.num_features}-{self.r2}.f64"
        return Path(tempfile.gettempdir()) / f"flwr-modulated-{getpass.getuser()}" / name

    def _stream(self, *key: int) -> np.random.Generator:
        return np.random.Generator(np.random.SFC64(np.random.SeedSequence([self.seed], spawn_key=(2, *key))))

    def _draw(self, features: FloatArray, labels: FloatArray) -> None:
        beta, rng = self.beta, self._stream(1, self.part)
        for block in row_blocks(*features.shape):
            rows = rng.standard_normal((block.stop - block.start, self.num_features))
            features[block] = rows
            labels[block] = rows @ beta
            labels[block] += np.sqrt(1.0 - self.r2) * rng.standard_normal(len(rows))


def _map(path: Path, shapes: tuple[tuple[int, ...], ...], mode: str) -> list[FloatArray]:
    """One file as consecutive arrays of float64."""
    total = sum(int(np.prod(shape)) for shape in shapes)
    whole = np.memmap(path, dtype=np.float64, mode=mode, shape=(total,))  # type: ignore[call-overload]
    arrays, start = [], 0
    for shape in shapes:
        stop = start + int(np.prod(shape))
        arrays.append(np.asarray(whole[start:stop]).reshape(shape))
        start = stop
    return arrays


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Keep the other workers of this machine away, which want the same file."""
    import fcntl  # not on Windows, which can run the tasks that fit in memory

    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (path.parent / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
