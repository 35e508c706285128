"""Limits of connections: their number, their memory (receive buffers, unsent replies), and the end of stalled ones."""

from __future__ import annotations

import logging
import resource
from collections import deque
from collections.abc import Callable, Mapping
from typing import Protocol

from journal.buffers import Pool
from journal.clock import Clock
from tfmq.limits import MIB
from tfmq.server.reactor import TURN_SECONDS, Turn

ARENA_BYTES = 8 << 20
"""Memory for the reads of one turn: 32 reads of READ_BYTES."""
READ_BYTES = 256 << 10
"""Maximum bytes of one read. Reads of 1 MiB were not faster (measured), and make other connections wait longer."""
PARTIAL_FRAME_BYTES_MIN = 4096
"""Minimum size of the buffer of an incomplete frame, so that a slowly arriving frame is not copied at each read."""
PARTIAL_FRAME_GROWTH = 4
"""The buffer of an incomplete frame has at most this many times the size of the received part, so that a size word that
announces a large frame allocates no memory for it. Exceptions: PARTIAL_FRAME_BYTES_MIN and _AT_ONCE."""
PARTIAL_FRAME_BYTES_AT_ONCE = 1 << 20
"""A frame up to this size gets a buffer for the whole frame at once, while RECEIVING_BYTES_PLENTIFUL permits it. So the
frame is received in one or two reads. A buffer that grows needs one read for each of its sizes."""
RECEIVING_BYTES_PLENTIFUL = 16 << 20
"""A frame gets its whole buffer at once only if all incomplete frames, itself included, then have at most this much."""


class ReceiveArena:
    """Receive memory that all connections share during a turn.

    The reads of a turn are stored one after the other, and complete frames are passed on as views of the arena. When
    the turn ends, all frames have been written to the logs or copied, so the next turn starts at the beginning of the
    arena again. A caller that needs a frame longer retains `buffer`; later reads are then stored after that frame, or
    in a new buffer.
    """

    def __init__(self, pool: Pool, *, arena_bytes: int = ARENA_BYTES, read_bytes: int = READ_BYTES) -> None:
        self._pool = pool
        self._arena_bytes = arena_bytes
        self._read_bytes = read_bytes
        self.buffer = pool.allocate(arena_bytes)
        self._view = self.buffer.view
        self._position = 0

    def read_buffer(self) -> memoryview:
        """Return memory for one read: a view of `buffer`. Call `mark_filled` after the read."""
        if self._position + self._read_bytes > self._arena_bytes:
            if self.buffer.holds > 1:
                self.buffer.release()
                self.buffer = self._pool.allocate(self._arena_bytes)
                self._view = self.buffer.view
            self._position = 0
        return self._view[self._position : self._position + self._read_bytes]

    def mark_filled(self, size_bytes: int) -> None:
        """Mark the first `size_bytes` of the memory that `read_buffer` returned last as filled."""
        self._position += size_bytes

    def end_turn(self) -> None:
        """Let the next read start at the beginning of the arena, unless the buffer is retained."""
        if self._position and self.buffer.holds == 1:
            self._position = 0

    def close(self) -> None:
        """Release the buffer. Nothing may be received afterwards."""
        self.buffer.release()


class PartialFrame:
    """The received part of an incomplete frame, size word included: `filled` bytes of `needed`.

    The buffer is replaced by larger ones as bytes arrive, so that a size word without these bytes uses little memory.
    """

    __slots__ = ("_pool", "buffer", "filled", "needed")

    def __init__(self, pool: Pool, part: memoryview, needed: int, *, at_once: bool = False) -> None:
        """Copy `part`, the received bytes. `at_once`: allocate the buffer for the whole frame now."""
        self._pool = pool
        self.needed = needed
        self.filled = len(part)
        self.buffer = pool.allocate(needed if at_once else partial_frame_size(self.filled, needed))
        self.buffer.view[: self.filled] = part

    def mark_filled(self, size_bytes: int) -> None:
        """Mark more bytes of `buffer` as filled. If it is full and the frame incomplete, replace it by a larger one."""
        self.filled += size_bytes
        if self.filled == self.buffer.size < self.needed:
            larger = self._pool.allocate(partial_frame_size(self.filled, self.needed))
            larger.view[: self.filled] = self.buffer.view
            self.buffer.release()
            self.buffer = larger


def allocates_at_once(receiving_bytes: int, needed: int) -> bool:
    """Return whether a frame of `needed` bytes gets its buffer at once. `receiving_bytes`: memory of other frames."""
    return needed <= PARTIAL_FRAME_BYTES_AT_ONCE and receiving_bytes + needed <= RECEIVING_BYTES_PLENTIFUL


def partial_frame_size(arrived: int, needed: int) -> int:
    """Return the buffer size for a frame of `needed` bytes of which `arrived` have arrived."""
    return min(needed, max(PARTIAL_FRAME_BYTES_MIN, PARTIAL_FRAME_GROWTH * arrived))


logger = logging.getLogger("tfmq.server")

UNSENT_BYTES_ALL = 256 * MIB
"""Limit on the unsent bytes of all connections together: four times the default limit of one connection."""
PARTIAL_FRAME_SECONDS = 60.0
"""Timeout for the next bytes of an incomplete frame; longer than any network interruption that TCP survives well."""
RECEIVING_BYTES_ALL = 256 * MIB
"""Memory for incomplete frames. While more is in use, only one connection at a time continues to receive its frame."""
CROWDED_FACTOR = 4
"""If incomplete frames use more than RECEIVING_BYTES_ALL times this factor, each read is limited to CROWDED_READ_BYTES.
So much memory is in use only if very many connections have each sent the first bytes of a frame."""
PAUSED_FOR_MEMORY = "memory"
"""Pause reason of connections that wait for receive memory."""
CHECK_SECONDS = 1.0
"""Interval of the check for connections without progress, while any connection waits for its client."""


class LimitedConnection(Protocol):
    """The part of a connection that `ConnectionLimits` uses."""

    unsent_bytes: int
    served_until: float
    is_waiting: bool
    """Whether the connection waits for its client to read."""

    def continue_deferred(self) -> None: ...
    def flush(self) -> None: ...
    def cut_off(self, why: str) -> None: ...
    def pause(self, reason: str) -> None: ...
    def resume(self, reason: str) -> None: ...
    def stalled_since(self) -> float | None:
        """Return since when the connection waits for its client to read replies, or to send the rest of a frame.
        None: it waits for neither."""


class ConnectionLimits:
    """Shared limits of all connections of one server; used in the reactor's thread only.

    A connection whose client does not read its replies is closed in three cases: too many bytes are unsent on it; the
    client has read nothing for too long; or too many bytes are unsent on all connections together, and this connection
    has the most. A connection is also closed if its client stops in the middle of a frame, so that incomplete frames do
    not accumulate.
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
        self.received_bytes = self.sent_bytes = self.request_count = self.failed_handshakes = 0
        """Counters since the start, of all connections: bytes without those of TLS, requests, TLS handshakes."""
        self.deferred: dict[LimitedConnection, None] = {}
        """Connections whose requests are deferred to a later turn. The time of a turn is divided among them."""
        self._deferred_scheduled = False
        self.set_limits(limits)
        self._call_later = call_later
        self.receiving_bytes = 0
        self._waiting_for_memory: dict[LimitedConnection, None] = {}
        self._to_flush: list[LimitedConnection] = []
        self._monitored: set[LimitedConnection] = set()
        self._check_scheduled = False
        turn.at_end(self.end_turn)

    def set_limits(self, limits: Mapping[str, int]) -> None:
        self.unsent_bytes_max = limits["unsent_bytes"]
        self._unsent_seconds = limits["unsent_seconds"]

    def flush_later(self, connection: LimitedConnection) -> None:
        """Flush the connection at the end of this turn, after the hooks that create replies."""
        self._to_flush.append(connection)
        if not self.turn.is_ending:
            self.turn.request_end()

    def defer(self, connection: LimitedConnection) -> None:
        """Call the connection's `continue_deferred` in a later turn."""
        self.deferred[connection] = None
        self._schedule_deferred()

    def _schedule_deferred(self) -> None:
        if not self._deferred_scheduled:
            self._deferred_scheduled = True
            self._call_later(0, self._run_deferred)

    def _run_deferred(self) -> None:
        """Continue the deferred connection of the lowest `served_until`, then others until TURN_SECONDS are used."""
        self._deferred_scheduled = False
        deadline = self.clock.monotonic() + TURN_SECONDS
        waiting = sorted(self.deferred, key=lambda connection: connection.served_until)
        for number, connection in enumerate(waiting):
            if number and self.clock.monotonic() > deadline:
                break
            if connection in self.deferred:
                del self.deferred[connection]
                try:
                    connection.continue_deferred()
                except Exception:
                    logger.exception("a deferred request failed")
                    connection.cut_off("a request failed")
        if self.deferred:
            self._schedule_deferred()

    def end_turn(self) -> None:
        """Send the replies of this turn, and reuse the arena from its start."""
        while self._to_flush:
            dirty, self._to_flush = self._to_flush, []
            for connection in dirty:
                connection.flush()
        self.arena.end_turn()

    def monitor(self, connection: LimitedConnection) -> None:
        """Check every CHECK_SECONDS whether the connection is stalled, until it no longer waits for its client."""
        self._monitored.add(connection)
        if not self._check_scheduled:
            self._check_scheduled = True
            self._call_later(CHECK_SECONDS, self._check_stalled)

    def may_receive(self, connection: LimitedConnection) -> bool:
        """Return whether the connection may receive more of its frame now. If not, pause it until it may.

        The connection that has waited longest may always receive, so that at least one frame can be completed.
        """
        if self.receiving_bytes <= RECEIVING_BYTES_ALL and not self._waiting_for_memory:
            return True
        self._waiting_for_memory[connection] = None
        if next(iter(self._waiting_for_memory)) is connection:
            return True
        connection.pause(PAUSED_FOR_MEMORY)
        return False

    def frame_done(self, connection: LimitedConnection, size_bytes: int) -> None:
        """Stop counting the buffer of a complete or discarded frame, and resume connections that wait for memory.

        If the memory is still above its limit, only the connection that has waited longest is resumed.
        """
        self.receiving_bytes -= size_bytes
        self._waiting_for_memory.pop(connection, None)
        waiting = list(self._waiting_for_memory)
        if self.receiving_bytes <= RECEIVING_BYTES_ALL:
            self._waiting_for_memory.clear()
        else:
            del waiting[1:]
        for each in waiting:
            each.resume(PAUSED_FOR_MEMORY)

    def remove(self, connection: LimitedConnection) -> None:
        """Stop monitoring a closed connection, and do not continue its deferred requests."""
        self._monitored.discard(connection)
        self.deferred.pop(connection, None)

    def close(self) -> None:
        """Release the receive arena. All connections must be closed."""
        self.arena.close()

    def _check_stalled(self) -> None:
        self._check_scheduled = False
        now = self.clock.monotonic()
        for connection in list(self._monitored):
            since = connection.stalled_since()
            if since is None:
                self._monitored.discard(connection)
            elif connection.is_waiting:
                if now - since >= self._unsent_seconds:
                    connection.cut_off(
                        f"it has not read anything for {now - since:.0f} s, {connection.unsent_bytes} bytes wait for it"
                    )
            elif now - since >= PARTIAL_FRAME_SECONDS:
                connection.cut_off(f"it stopped in the middle of a frame {now - since:.0f} s ago")
        if self._monitored:
            self._check_scheduled = True
            self._call_later(CHECK_SECONDS, self._check_stalled)

    def close_worst(self) -> None:
        """Close the connection with the most unsent bytes, because the total is above UNSENT_BYTES_ALL."""
        worst = max(self._to_flush + list(self._monitored), key=lambda connection: connection.unsent_bytes)
        worst.cut_off(f"{self.unsent_bytes} bytes wait for all peers, the most for this one")


EXPIRED_AT_ONCE = 8
"""Deadlines handled in one call, so that others are served between the ends of many connections."""
EXPIRED_PAUSE_SECONDS = 0.005


class Deadline:
    """A call that is due at some time. It has the methods of Twisted's DelayedCall that are needed."""

    __slots__ = ("_function", "due")

    def __init__(self, due: float, function: Callable[[], None]) -> None:
        self.due = due
        self._function: Callable[[], None] | None = function

    def active(self) -> bool:
        return self._function is not None

    def cancel(self) -> None:
        self._function = None

    def expire(self) -> None:
        function, self._function = self._function, None
        if function is not None:
            function()


class DeadlineQueue:
    """Deadlines that all have the same length, with one timer of the reactor.

    Most deadlines are cancelled. A timer of the reactor that is cancelled stays in its heap until it is due or half of
    the heap is cancelled, and removing these takes milliseconds when there are ten thousand. If a deadline is shorter
    than an earlier one, it is late by the difference at most.
    """

    def __init__(
        self, call_later: Callable[[float, Callable[[], None]], object], monotonic: Callable[[], float]
    ) -> None:
        self._call_later, self._monotonic = call_later, monotonic
        self._deadlines: deque[Deadline] = deque()
        self._is_scheduled = False

    def __len__(self) -> int:
        return len(self._deadlines)

    def call_later(self, seconds: float, function: Callable[[], None]) -> Deadline:
        """Call `function()` after `seconds`, unless the returned deadline is cancelled."""
        self._drop_cancelled()
        deadline = Deadline(self._monotonic() + seconds, function)
        self._deadlines.append(deadline)
        self._schedule(seconds)
        return deadline

    def _drop_cancelled(self) -> None:
        while self._deadlines and not self._deadlines[0].active():
            self._deadlines.popleft()

    def _schedule(self, seconds: float) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._call_later(seconds, self._expire)

    def _expire(self) -> None:
        self._is_scheduled = False
        now = self._monotonic()
        for _ in range(EXPIRED_AT_ONCE):
            self._drop_cancelled()
            if not self._deadlines or self._deadlines[0].due > now:
                break
            try:
                self._deadlines.popleft().expire()
            except Exception:
                logger.exception("the end of a connection after its deadline failed")
        self._drop_cancelled()
        if self._deadlines:
            self._schedule(max(EXPIRED_PAUSE_SECONDS, self._deadlines[0].due - now))


DESCRIPTORS_KEPT = 256
"""Number of file descriptors that connections leave free for logs opened after the start, folders and threads. If the
limit of open files is low, connections leave half of the descriptors that are free at the start."""


def connections_max(wanted: int, open_files: int) -> int:
    """Increase the soft limit of open files for `wanted` connections; return how many connections it then allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + open_files + DESCRIPTORS_KEPT
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY:
        return wanted
    free = soft - open_files
    return max(1, min(wanted, free - min(DESCRIPTORS_KEPT, free // 2)))
