"""A Flower ``Grid`` that asks again where a worker process died in the middle of a round."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from logging import WARNING, getLogger

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

# The code Flower gives to whatever is not an exception in a ClientApp: here, a dead Ray worker.
_UNKNOWN_ERROR = 0
# Ray restarts a worker in one or two seconds.
_PAUSES = (1.0, 2.0, 4.0, 8.0)


class PersistentGrid(Grid):
    """Asks the nodes of a lost worker again, a few times; all else goes to the grid inside.

    A simulated node that is asked again in the same round draws from the same stream, so
    that what it answers is what was lost. What stays lost comes back as Flower's error
    reply, and the strategy counts it.

    Parameters
    ----------
    grid : flwr.serverapp.Grid
        The grid of Flower's simulation.
    pauses : sequence of float
        Seconds to wait before each further attempt.
    """

    def __init__(self, grid: Grid, pauses: Sequence[float] = _PAUSES) -> None:
        self._grid = grid
        self._pauses = pauses

    def set_run(self, run: object) -> None:
        """Pass on."""
        self._grid.set_run(run)

    @property
    def run(self) -> object:
        """Flower's record of the run."""
        return self._grid.run

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
        """All connected nodes."""
        return self._grid.get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Pass on."""
        return self._grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Pass on."""
        return self._grid.pull_messages(message_ids)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Send messages and collect the replies; ask the nodes of a dead worker again."""
        deadline = None if timeout is None else time.monotonic() + timeout
        asked = {message.metadata.dst_node_id: message for message in messages}
        replies: dict[int, Message] = {}
        for pause in (*self._pauses, None):
            left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            for reply in self._grid.send_and_receive(list(asked.values()), timeout=left):
                replies[reply.metadata.src_node_id] = reply
            asked = {node: _again(asked[node]) for node in asked if _is_lost(replies.get(node))}
            if not asked or pause is None or (deadline is not None and time.monotonic() + pause >= deadline):
                break
            getLogger("flwr").log(
                WARNING, "%d nodes lost their worker in mid-round; asking them again", len(asked)
            )
            time.sleep(pause)
        return list(replies.values())


def _is_lost(reply: Message | None) -> bool:
    return reply is not None and reply.has_error() and reply.error.code == _UNKNOWN_ERROR


def _again(message: Message) -> Message:
    """Copy a message: Flower keeps one that was sent as delivered."""
    meta = message.metadata
    return Message(message.content, meta.dst_node_id, meta.message_type, group_id=meta.group_id)
