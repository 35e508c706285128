"""The memory that connections receive into: one arena for all of a turn, and right-sized buffers for tails.

What a turn brings lies in the arena one read behind the other, and complete frames are handed on where they
lie. Nothing of it is needed when the turn has ended (it was written, or copied as somebody's tail), so the
next turn begins at the start again: a thousand connections cost one arena, and of that only the pages that a
turn filled. Whoever needs a frame longer retains the arena's buffer; then the arena goes on behind it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Protocol

from journal.buffers import Pool
from journal.clock import Clock
from tfmq.limits import MIB
from tfmq.server.reactor import Turn

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


# What all connections share: memory to receive into, the end of the turn, what is not sent yet, who stands
# still.
#
# A peer that does not read is cut off, by three rules: too much unsent for it, no progress for too long, or too
# much unsent for all, and then the connection with the most goes. A peer that stops in the middle of a frame is
# cut off as well, so that half frames do not add up.

logger = logging.getLogger("tfmq.server")

UNSENT_BYTES_ALL = 256 * MIB
"""Replies waiting in memory for all peers together: four that have reached their own limit."""
HALF_FRAME_SECONDS = 60.0
"""A frame that has begun must go on within this: longer than any hiccup of a network that TCP survives
well.
"""
RECEIVING_BYTES_ALL = 256 * MIB
"""Memory for frames that are not whole: above it one connection after the other goes on, the rest waits."""
CROWDED_TIMES = 4
"""With so many times that, which only the beginnings of frames can bring about, each read takes little."""
MEMORY = "memory"
"""The reason of that pause."""
LOOK_SECONDS = 1.0
"""How often those who stand still are looked for, while there are any."""


class Standing(Protocol):
    """What this module knows of a connection."""

    unsent_bytes: int

    def flush(self) -> None: ...
    def cut_off(self, why: str) -> None: ...
    def pause(self, reason: str) -> None: ...
    def resume(self, reason: str) -> None: ...
    def stands_since(self) -> float | None:
        """Since when it waits for its peer to read, or to go on with a frame; None if it does not."""
        ...

    def waits_for_reader(self) -> bool: ...


class Traffic:
    """Shared by the connections of one server; used in the reactor's thread only."""

    def __init__(
        self,
        pool: Pool,
        turn: Turn,
        clock: Clock,
        call_later: Callable[[float, Callable[[], None]], object],
        limits: Mapping[str, int],
    ) -> None:
        self.pool = pool
        self.turn = turn
        self.clock = clock
        self.arena = ReceiveArena(pool)
        self.unsent_bytes = 0
        self.put_off = 0
        """Connections with requests that wait for the next turn: what they take of it is shared among them."""
        self.set_limits(limits)
        self._call_later = call_later
        self.receiving_bytes = 0
        self._in_line: dict[Standing, None] = {}
        self._dirty: list[Standing] = []
        self._standing: set[Standing] = set()
        self._looking = False
        turn.at_end(self.turn_ended)

    def set_limits(self, limits: Mapping[str, int]) -> None:
        """What a peer that does not read may leave unsent from now on."""
        self.unsent_bytes_max = limits["unsent_bytes"]
        self._unsent_seconds = limits["unsent_seconds"]

    def flush_later(self, connection: Standing) -> None:
        """The connection has something to send at the end of this turn; this module's hook comes behind those
        that make replies.
        """
        self._dirty.append(connection)
        if not self.turn.ending:
            self.turn.want()

    def turn_ended(self) -> None:
        """Send what the turn has brought, and use the arena from its start again."""
        while self._dirty:
            dirty, self._dirty = self._dirty, []
            for connection in dirty:
                connection.flush()
        self.arena.turn_ended()

    def watch(self, connection: Standing) -> None:
        """The connection waits for its peer; look after it until it does not."""
        self._standing.add(connection)
        if not self._looking:
            self._looking = True
            self._call_later(LOOK_SECONDS, self._look)

    def admit(self, connection: Standing) -> bool:
        """Whether the connection may receive more of its frame now; if not, it is paused until it may.

        Whoever is first in line always may, so that some frame becomes whole whatever the others do.
        """
        if self.receiving_bytes <= RECEIVING_BYTES_ALL and not self._in_line:
            return True
        self._in_line[connection] = None
        if next(iter(self._in_line)) is connection:
            return True
        connection.pause(MEMORY)
        return False

    def received(self, connection: Standing, size_bytes: int) -> None:
        """A frame that was not whole is whole, or given up: its buffer of `size_bytes` is not needed."""
        self.receiving_bytes -= size_bytes
        self._in_line.pop(connection, None)
        waiting = list(self._in_line)
        if self.receiving_bytes <= RECEIVING_BYTES_ALL:
            self._in_line.clear()
        else:
            del waiting[1:]
        for each in waiting:
            each.resume(MEMORY)

    def forget(self, connection: Standing) -> None:
        """The connection is gone."""
        self._standing.discard(connection)

    def close(self) -> None:
        """Give the memory back; every connection is gone."""
        self.arena.close()

    def _look(self) -> None:
        self._looking = False
        now = self.clock.monotonic()
        for connection in list(self._standing):
            since = connection.stands_since()
            if since is None:
                self._standing.discard(connection)
            elif connection.waits_for_reader():
                if now - since >= self._unsent_seconds:
                    connection.cut_off(
                        f"it has not read anything for {now - since:.0f} s, "
                        f"{connection.unsent_bytes} bytes wait for it"
                    )
            elif now - since >= HALF_FRAME_SECONDS:
                connection.cut_off(f"it stopped in the middle of a frame {now - since:.0f} s ago")
        if self._standing:
            self._looking = True
            self._call_later(LOOK_SECONDS, self._look)

    @property
    def crowded(self) -> bool:
        """Frames that are not whole fill the memory for them: the next ones begin with little."""
        return self.receiving_bytes > CROWDED_TIMES * RECEIVING_BYTES_ALL

    def relieve(self) -> None:
        """Whoever has most unsent is cut off, if all together have too much; at every send."""
        if self.unsent_bytes <= UNSENT_BYTES_ALL:
            return
        worst = max(self._dirty + list(self._standing), key=lambda connection: connection.unsent_bytes)
        worst.cut_off(f"{self.unsent_bytes} bytes wait for all peers, the most for this one")
