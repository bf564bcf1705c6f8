"""How one-row clients are laid out over Flower nodes, and what the nodes answer with.

A layout changes who draws a row's noise, never its law: every row has noise of its own,
independent of all other rows, whichever node hosts it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import get_args

from flwr_modulated import InvalidParameterError
from flwr_modulated._validate import check_int
from flwr_modulated.flower.records import Payload, Precision

ENGINES = ("inprocess", "ray")
PAYLOADS = ("auto", "rows", "moments")
SAMPLINGS = ("rows", "moments")

# A node with fewer rows costs more in messages than its processor saves.
_FEWEST_ROWS = 10_000
# A node with more keeps a processor for seconds. One that sends rows sends them in a single message: some ten
# megabytes each are handled faster, and while other nodes still draw.
_MOST_ROWS = {"moments": 1_000_000, "rows": 125_000}
# Beyond so many rows a server that keeps them all is slower than the noise is to draw.
_MOST_ROWS_SENT = 100_000


@dataclass(frozen=True, slots=True)
class Layout:
    """What an engine does with a number of clients."""

    num_nodes: int
    payload: Payload
    sampling: str
    precision: Precision = "float64"


@dataclass(frozen=True, slots=True)
class Engine:
    """Where clients run, how many nodes host them, and what the nodes answer with.

    Parameters
    ----------
    name : {"inprocess", "ray"}
        The engine.
    num_nodes : int or {"auto", "clients"}, default 4
        A fixed number by default, so that a seed gives the same coefficients everywhere.
        ``"auto"`` chooses by the numbers of clients and of processors: records state
        what it chose, and that number reproduces them elsewhere. ``"clients"`` gives
        each client a node of its own.
    num_cpus : int, optional
        Nodes that work at once. By default one in this process, where a grid of cells
        has a process for each processor already; on Ray all processors, or all of
        the cluster at `address`.
    payload : {"auto", "rows", "moments"}, default "auto"
        What nodes answer with; ``"auto"`` takes rows up to 100,000 clients.
    sampling : {"rows", "moments"}, default "rows"
        ``"rows"`` draws the noise of every row. ``"moments"`` draws a node's moments
        from their exact law: the same law of the result, for less than a row's share of
        the work; nothing is released that a device would have released.
    precision : {"float64", "float32"}, default "float64"
        Of rows that nodes answer with. Rounding is post-processing of a release.
    address : str, optional
        An existing Ray cluster, such as ``"auto"`` or ``"10.0.0.1:6379"``.

    Raises
    ------
    InvalidParameterError
        If a setting is unknown or out of range, or two contradict each other.
    """

    name: str
    num_nodes: int | str = 4
    num_cpus: int | None = None
    payload: str = "auto"
    sampling: str = "rows"
    precision: Precision = "float64"
    address: str | None = None

    def __post_init__(self) -> None:
        for key, value, choices in (
            ("name", self.name, ENGINES),
            ("payload", self.payload, PAYLOADS),
            ("sampling", self.sampling, SAMPLINGS),
            ("precision", self.precision, get_args(Precision)),
        ):
            if value not in choices:
                raise InvalidParameterError(
                    f"engine.{key} must be one of {', '.join(choices)}, got {value!r}"
                )
        if self.num_nodes not in ("auto", "clients"):
            check_int("engine.num_nodes", self.num_nodes, low=1, hint="or give auto or clients")
        if self.num_cpus is not None:
            check_int("engine.num_cpus", self.num_cpus, low=1)
        if self.sampling == "moments" and self.payload == "rows":
            raise InvalidParameterError(
                "engine.payload must be moments or auto with engine.sampling=moments, which draws no rows"
            )
        if self.address is not None and (self.name != "ray" or self.num_cpus is not None):
            raise InvalidParameterError(
                "engine.address needs engine.name=ray, and takes the processors of the cluster: "
                "leave engine.num_cpus out"
            )

    def layout(self, num_clients: int) -> Layout:
        """Number of nodes, payload and sampling for a number of clients."""
        if self.sampling == "moments":
            payload: Payload = "moments"
        elif self.payload == "auto":
            payload = "rows" if num_clients <= _MOST_ROWS_SENT else "moments"
        else:
            payload = "rows" if self.payload == "rows" else "moments"
        return Layout(self._nodes(num_clients, payload), payload, self.sampling, self.precision)

    def _nodes(self, num_clients: int, payload: Payload) -> int:
        if isinstance(self.num_nodes, int):
            if self.num_nodes > num_clients:
                raise InvalidParameterError(
                    f"engine.num_nodes must be at most the number of clients {num_clients}, "
                    f"got {self.num_nodes}; give engine.num_nodes=clients for a node each"
                )
            return self.num_nodes
        if self.num_nodes == "clients":
            return num_clients
        processors = self.num_cpus or os.cpu_count() or 1
        return max(min(processors, num_clients // _FEWEST_ROWS), -(-num_clients // _MOST_ROWS[payload]), 1)
