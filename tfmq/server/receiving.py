"""The memory that connections receive into: one arena for all of a turn, and right-sized buffers for tails.

What a turn brings lies in the arena one read behind the other, and complete frames are handed on where they
lie. Nothing of it is needed when the turn has ended (it was written, or copied as somebody's tail), so the
next turn begins at the start again: a thousand connections cost one arena, and of that only the pages that a
turn filled. Whoever needs a frame longer retains the arena's buffer; then the arena goes on behind it.
"""

from __future__ import annotations

from journal.buffers import Pool

ARENA_BYTES = 8 << 20
"""What is received between two rewinds: 32 full reads."""
READ_BYTES = 256 << 10
"""The most one read takes: as fast as 1 MiB (measured), and other connections get their turn."""
TAIL_BYTES_MIN = 4096
"""The least a tail's buffer has, so that a frame dripping in does not move at every read."""
TAIL_GROWTH = 4
"""A tail's buffer is at most this times what has really arrived, whatever its first word announces."""
TAIL_BYTES_AT_ONCE = 1 << 20
"""A frame up to this size gets its whole buffer at once while memory for receiving is plenty: a batch arrives
in one or two reads then, and not in one for each growth.
"""
RECEIVING_BYTES_PLENTY = 16 << 20
"""Memory for frames that are not whole, of all connections: up to this it counts as plenty."""


class ReceiveArena:
    """The shared arena. `room` gives memory to read into, `used` says how much of it was filled."""

    def __init__(self, pool: Pool, *, arena_bytes: int = ARENA_BYTES, read_bytes: int = READ_BYTES) -> None:
        self._pool = pool
        self._arena_bytes = arena_bytes
        self._read_bytes = read_bytes
        self.buffer = pool.allocate(arena_bytes)
        self._view = self.buffer.view
        self._position = 0

    def room(self) -> memoryview:
        """Memory for one read; what lies in it afterwards belongs to `buffer`."""
        if self._position + self._read_bytes > self._arena_bytes:
            self._begin_anew()
        return self._view[self._position : self._position + self._read_bytes]

    def used(self, size_bytes: int) -> None:
        """The first `size_bytes` of the last room hold something now."""
        self._position += size_bytes

    def turn_ended(self) -> None:
        """Go back to the start, unless somebody still holds what was received."""
        if self._position and self.buffer.holds == 1:
            self._position = 0

    def close(self) -> None:
        """Give the arena back; nothing may be received any more."""
        self.buffer.release()

    def _begin_anew(self) -> None:
        if self.buffer.holds > 1:
            self.buffer.release()
            self.buffer = self._pool.allocate(self._arena_bytes)
            self._view = self.buffer.view
        self._position = 0


class Tail:
    """The part of one frame, first word included, that has arrived: `filled` bytes of `needed`.

    Its buffer grows with what really arrived, so an announced size costs nothing by itself, unless its owner
    has memory enough to give it all `at_once`.
    """

    __slots__ = ("_pool", "buffer", "filled", "needed")

    def __init__(self, pool: Pool, part: memoryview, needed: int, *, at_once: bool = False) -> None:
        """`at_once`: the buffer has room for all that is announced."""
        self._pool = pool
        self.needed = needed
        self.filled = len(part)
        self.buffer = pool.allocate(needed if at_once else tail_size(self.filled, needed))
        self.buffer.view[: self.filled] = part

    @property
    def complete(self) -> bool:
        """The whole frame is there."""
        return self.filled == self.needed

    @property
    def last_room(self) -> bool:
        """The room that there is holds the rest of the frame."""
        return self.buffer.size == self.needed

    def room(self) -> memoryview:
        """Where the next bytes belong; never empty before the frame is complete."""
        return self.buffer.view[self.filled :]

    def used(self, size_bytes: int) -> None:
        """`size_bytes` of the room hold something now; a full buffer that is too small grows."""
        self.filled += size_bytes
        if self.filled == self.buffer.size < self.needed:
            larger = self._pool.allocate(tail_size(self.filled, self.needed))
            larger.view[: self.filled] = self.buffer.view
            self.buffer.release()
            self.buffer = larger

    def release(self) -> None:
        """Give its memory back."""
        self.buffer.release()


def affords(receiving_bytes: int, needed: int) -> bool:
    """Whether a frame of `needed` bytes may have its buffer at once where others take `receiving_bytes`."""
    return needed <= TAIL_BYTES_AT_ONCE and receiving_bytes + needed <= RECEIVING_BYTES_PLENTY


def tail_size(arrived: int, needed: int) -> int:
    """Bytes of the buffer for a frame of `needed` bytes of which `arrived` are there."""
    return min(needed, max(TAIL_BYTES_MIN, TAIL_GROWTH * arrived))
