"""Waiting for the nodes that a study expects."""

from __future__ import annotations

import time
from logging import INFO, getLogger

from flwr.serverapp import Grid

from ..errors import InsufficientRepliesError

__all__ = ["wait_for_nodes"]


def wait_for_nodes(grid: Grid, minimum: int, *, timeout: float) -> list[int]:
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

    Returns
    -------
    list of int
        All connected nodes, sorted.

    Raises
    ------
    InsufficientRepliesError
        If fewer connect in time.
    """
    deadline = time.monotonic() + timeout
    pause = 0.05
    while len(nodes := sorted(grid.get_node_ids())) < minimum:
        if time.monotonic() >= deadline:
            raise InsufficientRepliesError(
                f"{len(nodes)} of min_available_nodes={minimum} nodes connected within "
                f"wait_timeout={timeout:g} s; start more nodes or lower min_available_nodes"
            )
        if pause >= 1.0:
            getLogger("flwr").log(
                INFO,
                "Waiting for nodes to connect: %d connected (minimum required: %d).",
                len(nodes),
                minimum,
            )
        time.sleep(pause)
        pause = min(2.0 * pause, 1.0)
    return nodes
