"""Where a simulated federation runs: in this process, or on Ray.

An engine is only a choice of Flower ``Grid``; the strategy and the ClientApp are the
same objects under both. The only file that touches Flower's simulation runtime and
its private task identity.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from logging import DEBUG, ERROR, LogRecord, getLogger
from typing import Any

from flwr.app import Context, Error, Message, RecordDict, UserConfig
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from flwr_modulated import InvalidParameterError

from .hosting import Engine
from .persistent_grid import PersistentGrid

# The code Flower gives to an exception in a ClientApp.
_CLIENT_APP_RAISED = 2

# Flower looks for replies ten times a second. That is seldom where a round takes a tenth of one, and
# often where each look goes through thousands of messages.
_PULL_INTERVAL = 0.002
_FEW_NODES = 100

# Without these glibc gives the memory of a large message back after each, and takes it anew page by page:
# to write a reply then costs as much as to draw its noise.
_KEEP_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(2**25),
    "MALLOC_TRIM_THRESHOLD_": str(2**30),
    "MALLOC_TOP_PAD_": str(2**26),
}

OnReply = Callable[[int, int], None]


class InProcessGrid(Grid):
    """Flower ``Grid`` whose nodes are called in this process.

    Parameters
    ----------
    client_app : flwr.clientapp.ClientApp
        What each node runs.
    num_nodes : int
        Number of nodes; node ``i`` has ``partition-id`` i.
    num_threads : int, default 1
        How many nodes are called at once. Worth it where a node hosts many rows: NumPy
        draws and multiplies without Python's lock. Replies are the same, in the same order.
    on_reply : callable, optional
        Called with the number of replies in this round and the number of messages.
    """

    def __init__(
        self,
        client_app: ClientApp,
        num_nodes: int,
        *,
        num_threads: int = 1,
        on_reply: OnReply | None = None,
    ) -> None:
        self._client_app = client_app
        self._num_threads = num_threads
        self._on_reply = on_reply
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
        messages = list(messages)
        if self._num_threads == 1:
            return self._counted(map(self._call, messages), len(messages))
        with _collection_held_off(), ThreadPoolExecutor(self._num_threads) as pool:
            return self._counted(pool.map(self._call, messages), len(messages))

    def _counted(self, replies: Iterable[Message], total: int) -> list[Message]:
        done = []
        for reply in replies:
            done.append(reply)
            if self._on_reply is not None:
                self._on_reply(len(done), total)
        return done

    def _call(self, message: Message) -> Message:
        try:
            return self._client_app(message, self._contexts[message.metadata.dst_node_id])
        except Exception:
            reason = traceback.format_exc()
            return Message(Error(_CLIENT_APP_RAISED, reason), reply_to=message)


@contextmanager
def _collection_held_off() -> Iterator[None]:
    """No garbage collection while threads parse array headers, which it breaks before Python 3.11.8.

    ``ast.literal_eval`` counts its depth for all threads together, and a finalizer lets another
    thread in (CPython issue 106905): one message in many thousands would fail.
    """
    if sys.version_info >= (3, 11, 8) or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


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


def run_federation(
    server: Callable[[Grid], None],
    client_app: ClientApp,
    engine: Engine,
    on_reply: OnReply | None = None,
) -> None:
    """Run a server function against the nodes of an engine.

    Parameters
    ----------
    server : callable
        Takes the Flower ``Grid``; whatever it raises is raised here.
    client_app : flwr.clientapp.ClientApp
        What each node runs. On Ray it is pickled for every message: keep it small.
    engine : Engine
        Which engine, how many nodes (a number), how many processors.
    on_reply : callable, optional
        Progress within a round, in this process only: see :class:`InProcessGrid`.

    Raises
    ------
    InvalidParameterError
        If no Ray cluster answers at the engine's address.
    """
    assert isinstance(engine.num_nodes, int)
    if engine.name == "inprocess":
        threads = engine.num_cpus or 1
        with _task_identity():
            server(InProcessGrid(client_app, engine.num_nodes, num_threads=threads, on_reply=on_reply))
    else:
        _run_on_ray(server, client_app, engine, engine.num_nodes)


def _run_on_ray(
    server: Callable[[Grid], None], client_app: ClientApp, engine: Engine, num_nodes: int
) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    from flwr.simulation import run_simulation

    server_app = ServerApp()
    interrupted = threading.Event()

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        if num_nodes <= _FEW_NODES and hasattr(grid, "pull_interval"):
            grid.pull_interval = _PULL_INTERVAL
        pull = grid.pull_messages

        def pull_unless_interrupted(message_ids: Iterable[str]) -> Iterable[Message]:
            if interrupted.is_set():
                raise RuntimeError("interrupted")
            return pull(message_ids)

        grid.pull_messages = pull_unless_interrupted  # type: ignore[method-assign]
        server(PersistentGrid(grid))

    getLogger("ray").setLevel(ERROR)
    _start_ray(engine, num_nodes)
    with _quiet_runtime(), _interrupts_as(interrupted):
        run_simulation(
            server_app=server_app,
            client_app=client_app,
            num_supernodes=num_nodes,
            # A dead worker stays in Flower's pool, and would fail every message handed to it.
            backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0, "max_restarts": 3}},
        )


@contextmanager
def _interrupts_as(interrupted: threading.Event) -> Iterator[None]:
    """On Ctrl-C let the server stop between two looks for replies, and Flower's runtime after it.

    Flower's own threads would wait for one another for ever. A second Ctrl-C stops at once.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def note(number: int, frame: object) -> None:
        interrupted.set()
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield
    except Exception:
        if not interrupted.is_set():
            raise
    finally:
        signal.signal(signal.SIGINT, before)
    if interrupted.is_set():
        raise KeyboardInterrupt


def _start_ray(engine: Engine, num_nodes: int) -> None:
    """Start or join Ray before Flower does: it would leave its server waiting if that failed."""
    import ray

    if ray.is_initialized():  # a job of Hydra's Ray launcher, or a caller's own Ray: Flower joins it
        return
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": ERROR}
    if engine.address is None:
        options["num_cpus"] = min(engine.num_cpus or os.cpu_count() or 1, num_nodes)
        options["include_dashboard"] = False
        options["address"] = "local"  # not whatever Ray somebody has started on this machine
    else:
        options["address"] = engine.address
    try:
        _check_reachable(engine.address)  # Ray itself tries for minutes
        with _worker_environment():
            ray.init(**options)
    except (OSError, ValueError, RuntimeError) as error:
        if engine.address is None:
            raise
        raise InvalidParameterError(
            f"engine.address must be a running Ray cluster, none answers at {engine.address}; start one with "
            f"`ray start --head` or leave engine.address out ({type(error).__name__})"
        ) from error
    if not any(node["Resources"].get("CPU", 0) >= 1 for node in ray.nodes() if node["Alive"]):
        ray.shutdown()
        raise InvalidParameterError(
            "engine.address must be a Ray cluster with at least one processor; "
            "start it with `ray start --num-cpus=N`"
        )


@contextmanager
def _worker_environment() -> Iterator[None]:
    """What the workers of a Ray that starts here inherit: this process's path, and how they keep memory.

    By environment: a runtime_env would make Ray start all workers anew, which takes seconds.
    Those of a cluster look in this directory and in their own environment.
    """
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    wanted = {"PYTHONPATH": path} | {
        name: value for name, value in _KEEP_MEMORY.items() if name not in os.environ
    }
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _check_reachable(address: str | None) -> None:
    host, colon, port = (address or "").rpartition(":")
    if colon and port.isdigit():
        socket.create_connection((host, int(port)), timeout=5.0).close()


@contextmanager
def _quiet_runtime() -> Iterator[None]:
    """Drop what Flower's runtime says of itself.

    That `run_simulation` goes away; and, unless DEBUG is asked for, the traceback of each
    message that failed: the strategy counts them, with the reason of each.
    """
    logger = getLogger("flwr")

    def keep(record: LogRecord) -> bool:
        if record.module in ("vce_api", "raybackend"):
            return logger.isEnabledFor(DEBUG)
        return "deprecated" not in str(record.msg)

    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)
