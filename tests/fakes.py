"""Stand-ins for Flower's parts: hand-made replies, a scripted Grid, the trip over a wire."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    MetricRecord,
    RecordDict,
    UserConfig,
)
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

Answer = Callable[[Message], Message | Iterable[Message] | None]


def over_the_wire(item: Any) -> Any:
    """A message or record as the other side reads it from bytes."""
    children = item.children
    if children is None:
        return type(item).inflate(item.deflate())
    return type(item).inflate(item.deflate(), {key: over_the_wire(part) for key, part in children.items()})


def wire_bytes(item: Any) -> bytes:
    """All bytes of a message or record."""
    return item.deflate() + b"".join(wire_bytes(part) for part in (item.children or {}).values())


def varint(number: int) -> bytes:
    """A whole number in Protocol Buffers' encoding."""
    encoded = b""
    while number > 127:
        encoded += bytes([number % 128 + 128])
        number //= 128
    return encoded + bytes([number])


def reply_content(arrays: Sequence[np.ndarray], *, count: int = 1, **changes: Any) -> RecordDict:
    """A reply written down by hand, in the layout of Flower's compatibility records."""
    metrics = {"protocol-version": 2, "server-round": 1, "payload": "rows"}
    metrics.update({key.replace("_", "-"): value for key, value in changes.items()})
    return RecordDict(
        {
            "fitres.parameters": ArrayRecord(list(arrays)),
            "fitres.num_examples": MetricRecord({"num_examples": count}),
            "fitres.metrics": ConfigRecord(
                {key: value for key, value in metrics.items() if value is not None}
            ),
            "fitres.status": ConfigRecord({"code": 0, "message": "Success"}),
        }
    )


def rows_content(
    released: np.ndarray, labels: np.ndarray, noise_std: float = 0.0, **changes: Any
) -> RecordDict:
    """A reply that holds rows."""
    rows = np.column_stack([released, labels])
    return reply_content([rows], count=len(released), noise_std=noise_std, **changes)


def parts(content: RecordDict, *, joint: bool = False) -> tuple[np.ndarray, np.ndarray, float]:
    """Released rows, labels and σ of a reply; no labels where they are inside the rows."""
    (rows,) = content.array_records["fitres.parameters"].to_numpy_ndarrays()
    std = content.config_records["fitres.metrics"]["noise-std"]
    return (rows, np.zeros(0), std) if joint else (rows[:, :-1], rows[:, -1], std)


def error_reply(message: Message, reason: str, code: int = 2) -> Message:
    """What Flower sends in place of a reply when a ClientApp has raised."""
    return Message(Error(code, reason), reply_to=message)


class FakeGrid(Grid):
    """Sends each message to `answer`, and remembers what was sent.

    `answer` may give one reply, several, or None for none. `node_ids` is a list, or a function that
    is asked again each time.
    """

    def __init__(
        self, answer: Answer, node_ids: Sequence[int] | Callable[[], Sequence[int]] = (1, 2)
    ) -> None:
        self._answer = answer
        self._node_ids = node_ids
        self.sent: list[list[Message]] = []
        """Messages of each round that asked anybody or nobody; evaluation rounds too."""

    def get_node_ids(self) -> Iterable[int]:
        return list(self._node_ids() if callable(self._node_ids) else self._node_ids)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        self.sent.append(list(messages))
        replies: list[Message] = []
        for message in self.sent[-1]:
            answer = self._answer(message)
            replies += [] if answer is None else [answer] if isinstance(answer, Message) else list(answer)
        return replies

    @property
    def asked(self) -> list[list[int]]:
        """Nodes asked in each training round; Flower sends an evaluation round after each."""
        return [[message.metadata.dst_node_id for message in round_] for round_ in self.sent[::2]]

    def set_run(self, run: object) -> None:
        raise NotImplementedError

    @property
    def run(self) -> object:
        raise NotImplementedError

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        raise NotImplementedError

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        raise NotImplementedError


class SpyGrid(FakeGrid):
    """Passes messages on to another Grid, and remembers them and their replies."""

    def __init__(self, grid: Grid) -> None:
        super().__init__(lambda message: None, grid.get_node_ids)
        self._grid = grid
        self.received: list[list[Message]] = []

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        self.sent.append(list(messages))
        self.received.append(list(self._grid.send_and_receive(self.sent[-1], timeout=timeout)))
        return self.received[-1]


def context(partition_id: int = 0, num_partitions: int = 1) -> Context:
    """What Flower hands to a ClientApp."""
    return Context(
        run_id=1,
        node_id=partition_id + 1,
        node_config={"partition-id": partition_id, "num-partitions": num_partitions},
        state=RecordDict(),
        run_config=UserConfig(),
    )


def call(app: ClientApp, content: RecordDict, message_type: str = "train") -> Message:
    """Send one message to a ClientApp; what it raises is raised here."""
    return app(Message(content, 1, message_type), context())
