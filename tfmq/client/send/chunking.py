"""Reads the payloads of one `send_many` in chunks and divides them into batches."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, islice
from typing import Any, Final

from tfmq.client.send.delivery_time import IMMEDIATE, DeliveryTime
from tfmq.message import Message, text_bytes

CHUNK_COUNT: Final = 500
"""How many payloads the first chunk has. Their size decides how many to read next."""
CHUNK_COUNT_MAX: Final = 50_000
FILL_RATIO: Final = 0.95
"""Of a batch, that the next chunk fills, estimated from the average size of the last."""
PLAIN_TYPES: Final = frozenset((bytes, str))


class PayloadChunker:
    """Reads an iterable in chunks. It may block, and may itself send: use `CallUserCode(read)`."""

    def __init__(self, payloads: Iterable[Any]) -> None:
        if isinstance(payloads, str | bytes | bytearray | memoryview | Message | Mapping):
            raise TypeError(
                f"send_many takes an iterable of payloads, not one {type(payloads).__name__}: use send, or a list."
            )
        if not isinstance(payloads, Iterable) and not hasattr(payloads, "__getitem__"):
            raise TypeError(f"send_many takes an iterable of payloads, not {payloads!r}: use a list.")
        self._iterator = iter(payloads)
        self.count = CHUNK_COUNT
        self.chunk: list[Any] = []

    def read(self) -> None:
        """Read the next chunk. An empty one is the end."""
        self.chunk = list(islice(self._iterator, self.count))

    def as_bytes(self) -> list[bytes] | None:
        """Return the chunk as bytes; None if it has an item that is neither bytes nor text."""
        types = set(map(type, self.chunk))
        if not types <= PLAIN_TYPES:
            return None
        if str not in types:
            return self.chunk
        return [text_bytes(each) if type(each) is str else each for each in self.chunk]

    def adjust_count(self, size_bytes: int, batch_bytes: int) -> None:
        """Set the size of the next chunk; the records of the last one have `size_bytes`."""
        fitting = FILL_RATIO * batch_bytes * len(self.chunk) / size_bytes
        self.count = max(1, min(CHUNK_COUNT_MAX, int(fitting)))


def with_delivery_time(item: Any, when: DeliveryTime) -> Message:
    """Return the item as a message. Without a delivery time of its own it gets `when`."""
    message = item if isinstance(item, Message) else Message(item)
    own = message.delay is not None or message.deliver_at is not None
    if own or when == IMMEDIATE:
        return message
    return message._replace(delay=when.delay, deliver_at=when.deliver_at)


def batch_ends(sizes: Sequence[int], batch_bytes: int, overhead: int) -> list[int]:
    """Return the end index of each batch: after the last payload that fits, at least one."""
    ends = list(accumulate([size + overhead for size in sizes]))
    if ends[-1] <= batch_bytes:
        return [len(sizes)]
    cuts, first, start = [], 0, 0
    while first < len(sizes):
        first = max(bisect_right(ends, start + batch_bytes), first + 1)
        start = ends[first - 1]
        cuts.append(first)
    return cuts
