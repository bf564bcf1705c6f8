"""Where a simulated federation runs: in this process, or on Ray.

An engine is only a choice of Flower ``Grid``; the strategy and the ClientApp are the
same objects under both. The only file that touches Flower's simulation runtime and
its private task identity.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from logging import ERROR, getLogger

from flwr.app import Context, Error, Message, RecordDict, UserConfig
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from .settings import Engine

# The code Flower gives to an exception in a ClientApp.
_CLIENT_APP_RAISED = 2


class InProcessGrid(Grid):
    """Flower ``Grid`` whose nodes are called one after another in this process.

    Parameters
    ----------
    client_app : flwr.clientapp.ClientApp
        What each node runs.
    num_nodes : int
        Number of nodes; node ``i`` has ``partition-id`` i.
    """

    def __init__(self, client_app: ClientApp, num_nodes: int) -> None:
        self._client_app = client_app
        self._contexts = {
            node + 1: Context(
                run_id=1,
                node_id=node + 1,
                node_config={"partition-id": node, "num-partitions": num_nodes},
                state=RecordDict(),
                run_config=UserConfig(),
            )
            for node in range(num_nodes)
        }

    def set_run(self, run: object) -> None:
        """Accept nothing: there is no run to join."""
        raise NotImplementedError("an in-process grid belongs to no run")

    @property
    def run(self) -> object:
        """There is no run record."""
        raise NotImplementedError("an in-process grid belongs to no run")

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Create a message to a node."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """All nodes, which are always connected."""
        return list(self._contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Refuse: there is nowhere for messages to wait."""
        raise NotImplementedError("use send_and_receive on an in-process grid")

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Refuse: there is nowhere for messages to wait."""
        raise NotImplementedError("use send_and_receive on an in-process grid")

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Call the ClientApp of each message's node; its exceptions become error replies."""
        return [self._call(message) for message in messages]

    def _call(self, message: Message) -> Message:
        try:
            return self._client_app(message, self._contexts[message.metadata.dst_node_id])
        except Exception:
            reason = traceback.format_exc()
            return Message(Error(_CLIENT_APP_RAISED, reason), reply_to=message)


@contextmanager
def _task_identity() -> Iterator[None]:
    """Let messages be created outside a Flower run, and leave no trace of it."""
    from flwr.supercore.task_identity import TaskIdentity

    before = (TaskIdentity._run_id, TaskIdentity._task_id, TaskIdentity._node_id)
    TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 1, 0
    try:
        yield
    finally:
        TaskIdentity._run_id, TaskIdentity._task_id, TaskIdentity._node_id = before


def run_federation(server: Callable[[Grid], None], client_app: ClientApp, engine: Engine) -> None:
    """Run a server function against the nodes of an engine.

    Parameters
    ----------
    server : callable
        Takes the Flower ``Grid``; whatever it raises is raised here.
    client_app : flwr.clientapp.ClientApp
        What each node runs. On Ray it is pickled for every message: keep it small.
    engine : Engine
        Which engine, how many nodes, how many processors.
    """
    if engine.name == "inprocess":
        with _task_identity():
            server(InProcessGrid(client_app, engine.num_nodes))
    else:
        _run_on_ray(server, client_app, engine)


def _run_on_ray(server: Callable[[Grid], None], client_app: ClientApp, engine: Engine) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    from flwr.simulation import run_simulation

    server_app = ServerApp()

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        server(grid)

    cpus = engine.num_cpus or os.cpu_count() or 1
    getLogger("ray").setLevel(ERROR)
    with _quiet_deprecation():
        run_simulation(
            server_app=server_app,
            client_app=client_app,
            num_supernodes=engine.num_nodes,
            backend_config={
                "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
                "init_args": {"num_cpus": cpus, "include_dashboard": False, "log_to_driver": False},
            },
        )


@contextmanager
def _quiet_deprecation() -> Iterator[None]:
    """Drop Flower's notice that `run_simulation` goes away: users of this file cannot act on it."""
    logger = getLogger("flwr")

    def keep(record: object) -> bool:
        return "deprecated" not in str(getattr(record, "msg", ""))

    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)
