"""TCP connections of the server. A turn is the handling of all that one poll of the reactor received."""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import socket
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, Protocol, TypeAlias

from twisted.internet import main, tcp
from twisted.python.failure import Failure

from journal.buffers import Buffer
from tfmq.errors import BadFrame, TfmqError
from tfmq.protocol import commands
from tfmq.protocol.commands import BY_REQUEST
from tfmq.protocol.frames import SIZE, UNSIGNED, check_size
from tfmq.server import connection_limits
from tfmq.server.connection_limits import CROWDED_FACTOR, ConnectionLimits, PartialFrame, allocates_at_once
from tfmq.server.log_lines import BY_PEER
from tfmq.server.reactor import TURN_SECONDS, NewcomerReactor

logger = logging.getLogger("tfmq.server")

Bytes: TypeAlias = bytes | bytearray | memoryview

VECTOR_MAX = 1024
"""Maximum number of buffers in one call of sendmsg: the system's limit (IOV_MAX)."""
BACKLOG = 1024
"""Connections that the system may queue before they are accepted: a thousand clients may connect at once."""
UNSENT_BYTES_PAUSE = 8 << 20
"""While more bytes than this are unsent on a connection, its requests are not read, so that replies do not pile up."""
ACCEPTS_MAX = 2
"""Connections accepted at a time, each in a tenth of a millisecond. Twisted would accept more at a time under load."""
NOT_SENT_BYTES = 128 << 10
"""The system accepts no more while it has this many bytes that it cannot send, because the client does not read. Else
it would accept megabytes of each reply: in milliseconds, in its own memory, and counted as received by the client."""
LINGER_SECONDS = 2.0
"""Time that a closed connection waits for its client to close too, so that a reset does not discard the last reply."""
CROWDED_READ_BYTES = 4096
"""Maximum bytes of one read while memory is short (CROWDED_FACTOR), so that new incomplete frames do not exhaust it."""
CHARGE_FACTOR = 20.0
"""A connection whose requests take more than 1/CHARGE_FACTOR of the time is served after the other connections whenever
a turn was too short for all."""
CREDIT_SECONDS = 1.0
"""Maximum time by which `Connection.served_until`, a connection's account of used time, may lie in the past. So a
connection that was idle for long is served before other connections only for a limited time."""
DEBT_SECONDS = 2.0
"""Maximum time by which `Connection.served_until` may lie in the future. So a connection that was busy is served after
idle connections for at most DEBT_SECONDS + CREDIT_SECONDS."""
EXPENSIVE_HEADER_BYTES = 4096
"""A request with a longer header may name objects whose handling takes a tenth of a second."""
EXPENSIVE_SECONDS = 0.05
"""Expected time of a request for which `is_expensive` returns True."""
LISTS = frozenset(
    BY_REQUEST[request].code
    for request in (
        commands.DescribeTopic,
        commands.JoinGroup,
        commands.ListGroups,
        commands.DescribeGroup,
        commands.ListTransactions,
        commands.DescribeTransaction,
        commands.ListDelayed,
        commands.DelayedHistogram,
        commands.ListSchedules,
        commands.ListCommitGroups,
    )
)
"""Commands that may be expensive even with a short header, because their replies list many objects of the broker."""
METADATA = BY_REQUEST[commands.Metadata].code
TO_CHECK = LISTS | UNSIGNED.keys() | {0, METADATA}
"""Values of a header's second byte for which `is_expensive` is called. The byte is normally the code of the command, so
LISTS and METADATA are included. A client may encode the code, or the array length before it, in more bytes than needed.
Then the byte is one of `UNSIGNED.keys()`, or 0."""
EMPTY_LIST = 0x90
PAUSED_FOR_TURN = "slice"
"""Pause reason of connections that exceeded their time in a turn."""
PAUSED_FOR_UNSENT = "unsent"
"""Pause reason of connections above UNSENT_BYTES_PAUSE."""
WOULD_BLOCK = frozenset({errno.EAGAIN, errno.EWOULDBLOCK, errno.ENOBUFS, errno.EINTR})


class FrameProtocol(Protocol):
    """The methods that a connection calls on its protocol object, which handles the frames."""

    frame_bytes: int
    """Maximum value of a frame's size word; it is smaller before HELLO."""

    def makeConnection(self, transport: Any) -> None: ...
    def connectionLost(self, reason: Failure) -> None: ...

    def frame_received(self, frame: memoryview, buffer: Buffer) -> None:
        """Handle a whole frame, with its size word. It is a view of `buffer`; retain that to use it after this call."""

    def frame_refused(self, error: TfmqError, start: bytes) -> None:
        """Send `error` and close the connection, because the received bytes, of which `start` has the first, are no
        frame, or were sent without TLS where it is needed."""


class Connection(tcp.Server):  # type: ignore[misc]
    """One accepted connection. Its reading may be paused for several reasons at the same time.

    A read goes directly into the arena, the receive memory that all connections share, and whole frames are passed to
    the protocol as views of it. An incomplete frame at the end of a read is copied to a buffer of its own, where the
    next read continues, so that a large body is not copied again. Replies are queued without a copy and sent with
    `sendmsg` at the end of the turn.
    """

    protocol: FrameProtocol

    def __init__(
        self,
        sock: socket.socket,
        protocol: FrameProtocol,
        client: tuple[Any, ...],
        server: tcp.Port,
        number: int,
        reactor: Any,
        limits: ConnectionLimits,
    ) -> None:
        self._limits = limits
        self._queue: deque[Bytes] = deque()
        self._partial: PartialFrame | None = None
        self._leftover = b""
        self._flushing = False
        self.is_waiting = False
        self._ending = False
        self._progress_at = 0.0
        self._pauses: set[str] = set()
        self._deferred_rest = b""
        self._lingering: Any = None
        self.sent_bytes = self.unsent_bytes = 0
        self.served_until = limits.clock.monotonic()
        """Account of the time that the requests of this connection took, as a monotonic time. A request of t seconds
        advances it by CHARGE_FACTOR * t. It stays near the present (CREDIT_SECONDS, DEBT_SECONDS). When a turn was too
        short for all connections, the connections with the earliest accounts are served first."""
        super().__init__(sock, protocol, client, server, number, reactor)

    def doRead(self) -> Any:
        """Read once, and handle every frame that is complete after the read.

        If memory is exhausted, the connection is closed. Some of its requests may have been executed; for the client,
        the outcome of all requests without a reply is then unknown.
        """
        try:
            return self._do_read()
        except MemoryError as error:
            self._cut_off_without_memory(error)
            return None

    def _cut_off_without_memory(self, error: MemoryError) -> None:
        self.cut_off(f"out of memory ({str(error) or 'no more is given'})")

    def _do_read(self) -> Any:
        if self._ending:
            return self._discard()
        if self._partial is not None:
            return self._read_partial(self._partial)
        arena = self._limits.arena
        room = arena.read_buffer()
        if self._limits.receiving_bytes > CROWDED_FACTOR * connection_limits.RECEIVING_BYTES_ALL:
            room = room[:CROWDED_READ_BYTES]
        start = len(self._leftover)
        if start:
            room[:start] = self._leftover
        try:
            count = self.socket.recv_into(room[start:] if start else room)
        except OSError as error:
            return self._read_failed(error)
        if not count:
            return main.CONNECTION_DONE
        self._leftover = b""
        self._limits.received_bytes += count
        arena.mark_filled(start + count)
        self._handle_frames(room[: start + count], arena.buffer)
        return None

    def _read_partial(self, tail: PartialFrame) -> Any:
        limits = self._limits
        if not limits.may_receive(self):
            return None
        arena = limits.arena
        room = tail.buffer.view[tail.filled :]
        overflow = arena.read_buffer() if tail.buffer.size == tail.needed else None
        try:
            count = self.socket.recvmsg_into([room, overflow] if overflow is not None else [room])[0]
        except OSError as error:
            return self._read_failed(error)
        if not count:
            return main.CONNECTION_DONE
        limits.received_bytes += count
        self._progress_at = limits.clock.monotonic()
        fitted = min(count, len(room))
        size = tail.buffer.size
        tail.mark_filled(fitted)
        limits.receiving_bytes += tail.buffer.size - size
        rest = overflow[: count - fitted] if overflow is not None and count > fitted else None
        if tail.filled == tail.needed:
            if is_expensive(tail.buffer.view, 0, tail.needed):
                self._defer(b"" if rest is None else bytes(rest), EXPENSIVE_SECONDS)
                return None
            self._handle_partial(tail)
        if rest is not None:
            arena.mark_filled(len(rest))
            self._handle_frames(rest, arena.buffer)
        return None

    def _handle_partial(self, tail: PartialFrame) -> None:
        began = self._limits.clock.monotonic()
        self._limits.request_count += 1
        try:
            self.protocol.frame_received(tail.buffer.view, tail.buffer)
        finally:
            self._drop_partial()
            self._charge(began, self._limits.clock.monotonic())

    def _discard(self) -> Any:
        try:
            return None if self.socket.recv_into(self._limits.arena.read_buffer()) else main.CONNECTION_DONE
        except OSError as error:
            return self._read_failed(error)

    def _read_failed(self, error: OSError) -> Any:
        return None if error.errno in WOULD_BLOCK else main.CONNECTION_LOST

    def _handle_frames(self, view: memoryview, buffer: Buffer, *, expensive: bool = False) -> None:
        """Handle the frames that were read into `view`, a part of `buffer`, during this connection's share of a turn.

        The remaining frames are deferred to a later turn. Unless `expensive` is set, the first expensive request is
        deferred as well, with all frames after it.
        """
        position, end = 0, len(view)
        protocol, now = self.protocol, self._limits.clock.monotonic
        began = ended = now()
        deadline = began + TURN_SECONDS / (1 + len(self._limits.deferred))
        while end - position >= 4:
            if self._ending or self.disconnecting or self._aborting or self.disconnected:
                return
            whole = 4 + SIZE.unpack_from(view, position)[0]
            if not 8 <= whole <= 4 + protocol.frame_bytes:
                try:
                    check_size(view, position, frame_bytes=protocol.frame_bytes)
                except BadFrame as error:
                    protocol.frame_refused(error, bytes(view[position : position + 16]))
                    return
            if position + whole > end:
                self._start_partial(view[position:], whole)
                break
            if (
                not expensive
                and whole > 9
                and (whole > EXPENSIVE_HEADER_BYTES or view[position + 9] in TO_CHECK)
                and is_expensive(view, position, whole)
            ):
                self._defer(bytes(view[position:]), EXPENSIVE_SECONDS)
                break
            self._limits.request_count += 1
            protocol.frame_received(view[position : position + whole], buffer)
            position += whole
            ended = now()
            if ended > deadline and position < end:
                self._defer(bytes(view[position:]))
                break
        else:
            self._leftover = bytes(view[position:])
        # The same as `_charge(began, ended)`, inlined because it runs for each read.
        account, least = self.served_until, began - CREDIT_SECONDS
        account = (account if account > least else least) + (ended - began) * CHARGE_FACTOR
        self.served_until = account if account < ended + DEBT_SECONDS else ended + DEBT_SECONDS
        self._limits.turn.handling_seconds += ended - began

    def _charge(self, began: float, ended: float) -> None:
        account = max(self.served_until, began - CREDIT_SECONDS) + (ended - began) * CHARGE_FACTOR
        self.served_until = min(account, ended + DEBT_SECONDS)
        self._limits.turn.handling_seconds += ended - began

    def _defer(self, rest: bytes, cost_seconds: float = 0.0) -> None:
        """Defer the remaining frames of a read until other connections were served.

        If this read has completed the frame in `_partial`, that frame is deferred too, before the frames in `rest`.
        `cost_seconds`, the expected time of the first deferred request, is charged to the connection now. So an idle
        connection with an expensive request is not served before a busy one with cheap requests.
        """
        now = self._limits.clock.monotonic()
        self.served_until = max(self.served_until, now - CREDIT_SECONDS) + cost_seconds * CHARGE_FACTOR
        self.pause(PAUSED_FOR_TURN)
        self._deferred_rest = rest
        self._limits.defer(self)

    def continue_deferred(self) -> None:
        """Handle deferred frames: at least one, and others while this connection's share of a turn lasts."""
        rest, self._deferred_rest = self._deferred_rest, b""
        self.resume(PAUSED_FOR_TURN)
        if self._ending or self.disconnecting or self._aborting or self.disconnected:
            return
        tail = self._partial
        try:
            if tail is not None:
                self._handle_partial(tail)
            if rest:
                buffer = self._limits.pool.allocate(len(rest))
                buffer.view[:] = rest
                try:
                    self._handle_frames(buffer.view, buffer, expensive=tail is None)
                finally:
                    buffer.release()
        except MemoryError as error:
            self._cut_off_without_memory(error)

    def _start_partial(self, received: memoryview, whole: int) -> None:
        limits = self._limits
        at_once = allocates_at_once(limits.receiving_bytes, whole)
        self._partial = PartialFrame(limits.pool, received, whole, at_once=at_once)
        limits.receiving_bytes += self._partial.buffer.size
        self._progress_at = limits.clock.monotonic()
        limits.monitor(self)

    def admit(self) -> None:
        """Serve this connection like all others from now on: its HELLO and login are complete."""
        if isinstance(self.reactor, NewcomerReactor):
            self.reactor.admit(self)

    def pause(self, reason: str) -> None:
        """Stop reading until `resume` was called for this and every other pause reason."""
        if not self._pauses:
            self.stopReading()
        self._pauses.add(reason)

    def resume(self, reason: str) -> None:
        """Remove a pause reason, and read again if it was the last one. Do nothing if the reason is not set."""
        if reason in self._pauses:
            self._pauses.remove(reason)
            if not self._pauses and self.connected and not self.disconnecting:
                self.startReading()
                if self._partial is not None:
                    self._progress_at = self._limits.clock.monotonic()
                    self._limits.monitor(self)

    def send(self, buffers: Sequence[Bytes]) -> None:
        """Queue a reply to be sent at the end of this turn. No buffer may be empty, or be modified afterwards."""
        if self.disconnected or self._aborting:
            return
        size = sum(map(len, buffers))
        self._queue.extend(buffers)
        self.unsent_bytes += size
        self._limits.unsent_bytes += size
        if self.unsent_bytes > self._limits.unsent_bytes_max:
            self.cut_off(f"{self.unsent_bytes} bytes wait for it to read")
            return
        if not self._flushing and not self.is_waiting:
            self._flushing = True
            self._limits.flush_later(self)
        if self._limits.unsent_bytes > connection_limits.UNSENT_BYTES_ALL:
            self._limits.close_worst()

    def write(self, data: bytes) -> None:
        """Send data; a method that Twisted requires of a transport."""
        if data:
            self.send((data,))

    def writeSequence(self, iovec: Sequence[bytes]) -> None:
        self.send([data for data in iovec if data])

    def flush(self) -> None:
        """Send as many queued buffers as the system accepts now. The reactor sends the others as soon as possible."""
        self._flushing = False
        if self.disconnected or self._aborting or self.is_waiting:
            return
        failed = self.doWrite()
        if failed is not None:
            self.connectionLost(Failure(failed))

    def doWrite(self) -> Any:
        """Send queued buffers until none is left or the system accepts no more. Return why to disconnect, or None."""
        queue = self._queue
        while queue:
            try:
                sent = self.socket.sendmsg(queue if len(queue) <= VECTOR_MAX else list(islice(queue, VECTOR_MAX)))
            except OSError as error:
                if error.errno not in WOULD_BLOCK:
                    return main.CONNECTION_LOST
                sent = 0
            if not self._drop_sent(sent):
                self._wait_writable(sent)
                return None
        if self.is_waiting or self.disconnecting:
            self.is_waiting = False
            self.stopWriting()
            self.resume(PAUSED_FOR_UNSENT)
        if self._ending and not self.disconnecting:
            with contextlib.suppress(OSError):
                self.socket.shutdown(socket.SHUT_WR)
        return main.CONNECTION_DONE if self.disconnecting else None

    def _drop_sent(self, size: int) -> bool:
        """Remove `size` sent bytes from the queue. Return whether the last `sendmsg` has sent all of its buffers."""
        queue = self._queue
        self.sent_bytes += size
        self.unsent_bytes -= size
        self._limits.unsent_bytes -= size
        self._limits.sent_bytes += size
        if not self.unsent_bytes:
            queue.clear()
            return True
        tried = min(len(queue), VECTOR_MAX)
        while tried and size >= len(queue[0]):
            size -= len(queue.popleft())
            tried -= 1
        if size:
            queue[0] = memoryview(queue[0])[size:]
        return not tried

    def _wait_writable(self, sent: int) -> None:
        if sent or not self.is_waiting:
            self._progress_at = self._limits.clock.monotonic()
        if not self.is_waiting:
            self.is_waiting = True
            self.startWriting()
            self._limits.monitor(self)
        if self.unsent_bytes > UNSENT_BYTES_PAUSE and not self._ending:
            self.pause(PAUSED_FOR_UNSENT)

    def end(self) -> None:
        """Send the queued replies, then close; the client has LINGER_SECONDS to read. Later requests are discarded."""
        if self._ending or self.disconnected or self._aborting:
            return
        self._ending = True
        self._pauses.clear()
        self.startReading()
        if not self._flushing and not self.is_waiting:
            self._flushing = True
            self._limits.flush_later(self)
        self._lingering = self.reactor.callLater(LINGER_SECONDS, self.loseConnection)

    def stalled_since(self) -> float | None:
        halfway = self._partial is not None and not self._pauses
        return self._progress_at if self.is_waiting or halfway else None

    def cut_off(self, why: str) -> None:
        """Close the connection immediately and log the reason."""
        if not self._aborting and not self.disconnected:
            logger.warning("connection of %s cut off: %s", self.peer, why, extra=BY_PEER)
            self._discard_queue()
            self.abortConnection()

    @property
    def peer(self) -> str:
        """HOST:PORT of the client."""
        return address_text(self.client[0], self.client[1])

    def connectionLost(self, reason: Failure) -> None:
        """Release all memory of the closed connection, then notify the protocol."""
        if self._lingering is not None and self._lingering.active():
            self._lingering.cancel()
        self._drop_partial()
        self._discard_queue()
        self._limits.remove(self)
        super().connectionLost(reason)

    def _drop_partial(self) -> None:
        tail, self._partial = self._partial, None
        if tail is not None:
            self._limits.frame_done(self, tail.buffer.size)
            tail.buffer.release()

    def _discard_queue(self) -> None:
        self._limits.unsent_bytes -= self.unsent_bytes
        self.unsent_bytes = 0
        self._queue.clear()
        self.is_waiting = False


class PacedPort(tcp.Port):  # type: ignore[misc]
    """A listening socket that accepts at most ACCEPTS_MAX connections at a time."""

    def doRead(self) -> None:
        self.numberAccepts = ACCEPTS_MAX
        super().doRead()


class Listener(PacedPort):
    """Listens on a socket that is bound already.

    `accept`, with the arguments of `Connection`, creates the connection of each client.
    """

    def __init__(
        self,
        bound: socket.socket,
        factory: Any,
        reactor: Any,
        limits: ConnectionLimits,
        accept: Callable[..., Connection] = Connection,
    ) -> None:
        host, port = bound.getsockname()[:2]
        super().__init__(port, factory, BACKLOG, host, reactor)
        self._preexistingSocket = bound
        self.transport = functools.partial(accept, limits=limits)

    def startListening(self) -> None:
        assert self._preexistingSocket is not None
        self._preexistingSocket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, NOT_SENT_BYTES)
        self._preexistingSocket.listen(BACKLOG)
        super().startListening()


def is_expensive(view: memoryview, position: int, whole: int) -> bool:
    """Return whether the request at `position`, a frame of `whole` bytes, may take much longer than most requests.

    Only the first bytes of its header are read, because decoding a header of thousands of names already takes long.
    """
    if whole < 12:
        return whole > 9 and view[position + 9] in LISTS
    if SIZE.unpack_from(view, position + 4)[0] > EXPENSIVE_HEADER_BYTES:
        return True
    code = view[position + 9]
    if code == METADATA:  # expensive if it requests all topics
        names = position + 11 + UNSIGNED.get(view[position + 10], 0)
        return names >= position + whole or view[names] == EMPTY_LIST
    return code in TO_CHECK


def address_text(host: str, port: int) -> str:
    """Return HOST:PORT, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
