"""The payloads of one `send_many`: taken from the caller's iterable in chunks that fill batches, and cut to them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, islice
from typing import Any, Final

from tfmq.client.operation import Waitable
from tfmq.client.send.delivery_time import AT_ONCE, When
from tfmq.message import Message, text_bytes

CHUNK_COUNT: Final = 500
"""How many payloads are taken first, to see how large they are."""
CHUNK_COUNT_MAX: Final = 50_000
FILLING: Final = 0.95
"""Then as many as fill a batch to so much, by the average of the last ones; what is too much is cut off."""
PLAIN_TYPES: Final = frozenset((bytes, str))


class Taking:
    """Takes the next payloads when a driver goes through what is waited for, so outside of its lock: it is code of
    the caller that runs then; it may take its time, and may even send.
    """

    def __init__(self, payloads: Iterable[Any]) -> None:
        if isinstance(payloads, str | bytes | bytearray | memoryview | Message | Mapping):
            raise TypeError(
                f"send_many takes an iterable of payloads, not one {type(payloads).__name__}: use send, or a list."
            )
        self._iterator = iter(payloads)
        self.count = CHUNK_COUNT
        self.chunk: list[Any] = []

    def __iter__(self) -> Iterator[Waitable]:
        self.chunk = list(islice(self._iterator, self.count))
        return iter(())

    def plain(self) -> list[bytes] | None:
        """The chunk as bytes; None if anything in it is neither bytes nor text."""
        types = set(map(type, self.chunk))
        if not types <= PLAIN_TYPES:
            return None
        if str not in types:
            return self.chunk
        return [text_bytes(each) if type(each) is str else each for each in self.chunk]

    def adjust(self, size_bytes: int, batch_bytes: int) -> None:
        """The last chunk's records have `size_bytes`: take as many next time as fill a batch."""
        fitting = FILLING * batch_bytes * len(self.chunk) / size_bytes
        self.count = max(1, min(CHUNK_COUNT_MAX, int(fitting)))


def in_time(item: Any, when: When) -> Message:
    """One of many as a message, with the time that all of them have, unless it has one of its own."""
    message = item if isinstance(item, Message) else Message(item)
    own = message.delay is not None or message.deliver_at is not None
    if own or when == AT_ONCE:
        return message
    return message._replace(delay=when.delay, deliver_at=when.deliver_at)


def cut(sizes: Sequence[int], batch_bytes: int, overhead: int) -> list[int]:
    """Where batches end: behind the last payload that fits, and each has one."""
    ends = list(accumulate([size + overhead for size in sizes]))
    if ends[-1] <= batch_bytes:
        return [len(sizes)]
    cuts, first, start = [], 0, 0
    while first < len(sizes):
        first = max(bisect_right(ends, start + batch_bytes), first + 1)
        start = ends[first - 1]
        cuts.append(first)
    return cuts
