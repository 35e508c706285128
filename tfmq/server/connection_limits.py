"""Memory limits of connections: receive buffers, unsent replies, stalled clients."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Protocol

from journal.buffers import Pool
from journal.clock import Clock
from tfmq.limits import MIB
from tfmq.server.reactor import Turn

ARENA_BYTES = 8 << 20
"""Memory for the reads of one turn: 32 full reads."""
READ_BYTES = 256 << 10
"""Maximum of one read. As fast as 1 MiB (measured), and other connections are served sooner."""
TAIL_BYTES_MIN = 4096
"""Minimum size of a frame's buffer, so that a frame that arrives slowly is not copied at every read."""
TAIL_GROWTH = 4
"""A frame's buffer is at most this factor larger than what has arrived, whatever its size word announces."""
TAIL_BYTES_AT_ONCE = 1 << 20
"""A frame up to this size gets its whole buffer immediately while receive memory is plentiful.

A batch is then received in one or two reads, instead of one for each growth of the buffer.
"""
RECEIVING_BYTES_PLENTY = 16 << 20
"""Memory for incomplete frames of all connections, up to which it counts as plentiful."""


class ReceiveArena:
    """Receive memory shared by all connections during a turn.

    The reads of a turn are stored one after the other, and complete frames are passed on as views of the arena. When
    the turn ends, all of it has been written or copied, so the next turn starts at the beginning again: a thousand
    connections cost one arena, of which only the pages that a turn filled are in memory. A caller that needs a frame
    longer retains `buffer`; the arena then continues after it, or in a new buffer.
    """

    def __init__(self, pool: Pool, *, arena_bytes: int = ARENA_BYTES, read_bytes: int = READ_BYTES) -> None:
        self._pool = pool
        self._arena_bytes = arena_bytes
        self._read_bytes = read_bytes
        self.buffer = pool.allocate(arena_bytes)
        self._view = self.buffer.view
        self._position = 0

    def room(self) -> memoryview:
        """Return memory for one read; its content belongs to `buffer`."""
        if self._position + self._read_bytes > self._arena_bytes:
            self._begin_anew()
        return self._view[self._position : self._position + self._read_bytes]

    def used(self, size_bytes: int) -> None:
        """Mark the first `size_bytes` of the last room as filled."""
        self._position += size_bytes

    def turn_ended(self) -> None:
        """Start from the beginning again, unless the buffer is retained."""
        if self._position and self.buffer.holds == 1:
            self._position = 0

    def close(self) -> None:
        """Release the arena; nothing may be received any more."""
        self.buffer.release()

    def _begin_anew(self) -> None:
        if self.buffer.holds > 1:
            self.buffer.release()
            self.buffer = self._pool.allocate(self._arena_bytes)
            self._view = self.buffer.view
        self._position = 0


class Tail:
    """The received part of an incomplete frame, size word included: `filled` bytes of `needed`.

    The buffer grows with what has arrived, so that an announced size costs no memory, unless it is allocated `at_once`.
    """

    __slots__ = ("_pool", "buffer", "filled", "needed")

    def __init__(self, pool: Pool, part: memoryview, needed: int, *, at_once: bool = False) -> None:
        """Copy `part`. `at_once`: allocate the buffer for the whole frame."""
        self._pool = pool
        self.needed = needed
        self.filled = len(part)
        self.buffer = pool.allocate(needed if at_once else tail_size(self.filled, needed))
        self.buffer.view[: self.filled] = part

    @property
    def complete(self) -> bool:
        """Whether the whole frame has arrived."""
        return self.filled == self.needed

    @property
    def last_room(self) -> bool:
        """Whether the buffer has room for the rest of the frame."""
        return self.buffer.size == self.needed

    def room(self) -> memoryview:
        """Return the memory for the next bytes; never empty before the frame is complete."""
        return self.buffer.view[self.filled :]

    def used(self, size_bytes: int) -> None:
        """Mark `size_bytes` of the room as filled.

        A full buffer that is too small is replaced by a larger one.
        """
        self.filled += size_bytes
        if self.filled == self.buffer.size < self.needed:
            larger = self._pool.allocate(tail_size(self.filled, self.needed))
            larger.view[: self.filled] = self.buffer.view
            self.buffer.release()
            self.buffer = larger

    def release(self) -> None:
        """Release the memory."""
        self.buffer.release()


def affords(receiving_bytes: int, needed: int) -> bool:
    """Return whether a frame may have its whole buffer of `needed` bytes immediately.

    `receiving_bytes` are in use by other frames.
    """
    return needed <= TAIL_BYTES_AT_ONCE and receiving_bytes + needed <= RECEIVING_BYTES_PLENTY


def tail_size(arrived: int, needed: int) -> int:
    """Return the buffer size for a frame of `needed` bytes of which `arrived` have arrived."""
    return min(needed, max(TAIL_BYTES_MIN, TAIL_GROWTH * arrived))


logger = logging.getLogger("tfmq.server")

UNSENT_BYTES_ALL = 256 * MIB
"""Limit of unsent replies of all connections: four that have reached their own limit."""
HALF_FRAME_SECONDS = 60.0
"""Timeout for the next bytes of an incomplete frame; longer than any network interruption that TCP survives well."""
RECEIVING_BYTES_ALL = 256 * MIB
"""Memory for incomplete frames. Above it only one connection at a time continues with its frame."""
CROWDED_TIMES = 4
"""Above this multiple, which only the first bytes of many frames can reach, each read is limited to little."""
MEMORY = "memory"
"""Pause reason of connections that wait for receive memory."""
LOOK_SECONDS = 1.0
"""Interval of the check for connections without progress, while there are any that wait."""


class Standing(Protocol):
    """The part of a connection that `ConnectionLimits` uses."""

    unsent_bytes: int

    def flush(self) -> None: ...
    def cut_off(self, why: str) -> None: ...
    def pause(self, reason: str) -> None: ...
    def resume(self, reason: str) -> None: ...
    def stands_since(self) -> float | None:
        """Return since when it waits for its client to read, or to continue a frame.

        Return None if it does not.
        """
        ...

    def waits_for_reader(self) -> bool: ...


class Traffic:
    """Shared limits of all connections of one server; used in the reactor's thread only.

    A connection whose client does not read is closed by three rules: too much unsent for it, no progress for too
    long, or too much unsent for all, in which case the one with the most is closed. A client that stops within a
    frame is disconnected too, so that incomplete frames do not accumulate.
    """

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
        """Connections with requests deferred to the next turn; they share the time of a turn."""
        self.set_limits(limits)
        self._call_later = call_later
        self.receiving_bytes = 0
        self._in_line: dict[Standing, None] = {}
        self._dirty: list[Standing] = []
        self._standing: set[Standing] = set()
        self._looking = False
        turn.at_end(self.turn_ended)

    def set_limits(self, limits: Mapping[str, int]) -> None:
        """Replace the limits on unsent replies."""
        self.unsent_bytes_max = limits["unsent_bytes"]
        self._unsent_seconds = limits["unsent_seconds"]

    def flush_later(self, connection: Standing) -> None:
        """Flush the connection at the end of this turn, after the hooks that create replies."""
        self._dirty.append(connection)
        if not self.turn.ending:
            self.turn.want()

    def turn_ended(self) -> None:
        """Send the replies of this turn, and reuse the arena from its start."""
        while self._dirty:
            dirty, self._dirty = self._dirty, []
            for connection in dirty:
                connection.flush()
        self.arena.turn_ended()

    def watch(self, connection: Standing) -> None:
        """Monitor a connection that waits for its client, until it does not wait any more."""
        self._standing.add(connection)
        if not self._looking:
            self._looking = True
            self._call_later(LOOK_SECONDS, self._look)

    def admit(self, connection: Standing) -> bool:
        """Return whether the connection may receive more of its frame now.

        If not, it is paused until it may.

        The first waiting connection always may, so that at least one frame completes, whatever the others do.
        """
        if self.receiving_bytes <= RECEIVING_BYTES_ALL and not self._in_line:
            return True
        self._in_line[connection] = None
        if next(iter(self._in_line)) is connection:
            return True
        connection.pause(MEMORY)
        return False

    def received(self, connection: Standing, size_bytes: int) -> None:
        """Release the buffer of `size_bytes` of a frame that is complete or discarded."""
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
        """Stop monitoring a closed connection."""
        self._standing.discard(connection)

    def close(self) -> None:
        """Release the memory, after all connections are closed."""
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
        """Whether incomplete frames fill the receive memory, so that reads must be small."""
        return self.receiving_bytes > CROWDED_TIMES * RECEIVING_BYTES_ALL

    def relieve(self) -> None:
        """Close the connection with the most unsent bytes if the total is above its limit.

        Called at every send.
        """
        if self.unsent_bytes <= UNSENT_BYTES_ALL:
            return
        worst = max(self._dirty + list(self._standing), key=lambda connection: connection.unsent_bytes)
        worst.cut_off(f"{self.unsent_bytes} bytes wait for all peers, the most for this one")
