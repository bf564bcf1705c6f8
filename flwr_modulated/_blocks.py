"""Blocks of rows that fit a core's cache: what makes long arrays cheap to privatise and to sum."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from ._typing import FloatArray

# 512 KiB of float64: a block and its noise stay in the second-level cache.
_BLOCK_ENTRIES = 2**16


def row_blocks(num_rows: int, num_columns: int) -> list[slice]:
    """Consecutive blocks of rows that are small enough to stay in a core's cache.

    Parameters
    ----------
    num_rows, num_columns : int
        Shape of the whole, at least 1 each.

    Returns
    -------
    list of slice

    Examples
    --------
    >>> row_blocks(100_000, 1)
    [slice(0, 65536, None), slice(65536, 100000, None)]
    """
    size = max(1, _BLOCK_ENTRIES // num_columns)
    return [slice(start, min(start + size, num_rows)) for start in range(0, num_rows, size)]


def blocks_of(parts: Iterable[FloatArray]) -> Iterator[FloatArray]:
    """Consecutive rows of several matrices in such blocks: small ones put together, large ones cut.

    Parameters
    ----------
    parts : iterable of ndarray of shape (n_i, d)
        Any number of matrices of the same width.

    Yields
    ------
    ndarray of shape (b, d)
    """
    waiting: list[FloatArray] = []
    entries = 0
    for part in parts:
        if waiting and entries + part.size > _BLOCK_ENTRIES:
            yield np.concatenate(waiting)
            waiting, entries = [], 0
        if part.size > _BLOCK_ENTRIES:
            yield from (part[block] for block in row_blocks(*part.shape))
        else:
            waiting.append(part)
            entries += part.size
    if waiting:
        yield np.concatenate(waiting)
