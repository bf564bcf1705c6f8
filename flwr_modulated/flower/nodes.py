"""Waiting for the nodes that a study expects."""

from __future__ import annotations

import time
from collections.abc import Callable
from logging import INFO, getLogger

from flwr.serverapp import Grid

from ..errors import InsufficientRepliesError

__all__ = ["wait_for_newcomers", "wait_for_nodes"]


def wait_for_nodes(
    grid: Grid, minimum: int, *, timeout: float, heard: frozenset[int] = frozenset()
) -> list[int]:
    """Wait until enough nodes are connected.

    Parameters
    ----------
    grid : flwr.serverapp.Grid
        Where the nodes are.
    minimum : int
        How many the study expects. A ServerApp starts before its nodes have
        registered, so a strategy that samples at once sees few of them.
    timeout : float
        Seconds to wait.
    heard : frozenset of int
        Nodes whose release is here already, from before a restart: they count,
        connected or not.

    Returns
    -------
    list of int
        All connected nodes, sorted.

    Raises
    ------
    InsufficientRepliesError
        If fewer connect in time.
    """
    nodes = _poll(grid, lambda found: len(heard.union(found)), minimum, timeout)
    count = len(heard.union(nodes))
    if count < minimum:
        before = f" (with {len(heard)} heard before)" if heard else ""
        raise InsufficientRepliesError(
            f"{count} of min_available_nodes={minimum} nodes connected{before} within "
            f"wait_timeout={timeout:g} s; start more nodes or lower min_available_nodes"
        )
    return nodes


def wait_for_newcomers(grid: Grid, heard: frozenset[int], *, timeout: float) -> list[int]:
    """Wait until a node is connected that has not been heard from, at most `timeout` seconds.

    Returns
    -------
    list of int
        All connected nodes, sorted; maybe none of them new.
    """
    return _poll(grid, lambda found: len(set(found) - heard), 1, timeout)


def _poll(grid: Grid, count: Callable[[list[int]], int], minimum: int, timeout: float) -> list[int]:
    """Look at the connected nodes until `count` of them reaches `minimum` or time is up."""
    deadline = time.monotonic() + timeout
    pause = 0.05
    while count(nodes := sorted(grid.get_node_ids())) < minimum and time.monotonic() < deadline:
        if pause >= 1.0:
            getLogger("flwr").log(
                INFO,
                "Waiting for nodes to connect: %d connected (minimum required: %d).",
                count(nodes),
                minimum,
            )
        time.sleep(pause)
        pause = min(2.0 * pause, 1.0)
    return nodes
