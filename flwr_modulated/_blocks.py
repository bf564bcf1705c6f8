"""Blocks of rows that fit a core's cache: what makes long arrays cheap to privatise and to sum."""

from __future__ import annotations

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
