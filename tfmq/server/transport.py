"""The server's TCP connections: frames in without a copy, replies out in one vectored write a turn.

A read goes straight into the shared arena and whole frames are handed to the protocol as views of it. The
part of a frame at the end of a read moves into a buffer of its own, and the next read continues there, so a
large body is received where it stays. A protocol that needs a frame beyond the call retains the buffer that
comes with it.

Replies are queued as they are and go out with `sendmsg` at the end of the turn.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import socket
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Any, Protocol, TypeAlias

from twisted.internet import main, tcp
from twisted.python.failure import Failure

from journal.buffers import Buffer
from tfmq.errors import BadFrame
from tfmq.protocol.frames import check_size
from tfmq.server.connection_limits import Tail, Traffic, affords

logger = logging.getLogger("tfmq.server")

Bytes: TypeAlias = bytes | bytearray | memoryview

VECTOR_MAX = 1024
"""Buffers in one sendmsg: the system's own limit (IOV_MAX)."""
BACKLOG = 1024
"""Connections that the system may accept ahead of us: a thousand clients may come in one moment."""
UNSENT_BYTES_PAUSE = 8 << 20
"""With this much unsent a peer's requests are not read any more: it asks faster than it takes."""
LINGER_SECONDS = 2.0
"""How long an ended connection waits for its peer to end too, so that the last words are not lost by a
reset.
"""
CROWDED_BYTES = 4096
"""One read takes no more while memory for half frames is short: so their beginnings do not add up either."""
SLICE_SECONDS = 0.05
"""The requests of connections with more than one turn takes have so much of a turn together, and one request each: a
read may hold thousands whose answers cost a tenth of a second each, and a hundred connections may have such reads.
"""
SLICE = "slice"
"""The reason of that pause."""
UNSENT = "unsent"
"""The reason of a pause for the rule above."""
WOULD_BLOCK = frozenset({errno.EAGAIN, errno.EWOULDBLOCK, errno.ENOBUFS, errno.EINTR})


class FrameProtocol(Protocol):
    """What sits on a connection."""

    frame_bytes: int
    """The largest size word that is taken at the moment."""

    def makeConnection(self, transport: Any) -> None: ...
    def connectionLost(self, reason: Failure) -> None: ...

    def frame_received(self, frame: memoryview, hold: Buffer) -> None:
        """A whole frame, its size word included, lies in `hold`; it is valid until this returns, or as long
        as `hold` is retained.
        """
        ...

    def frame_refused(self, error: BadFrame, start: bytes) -> None:
        """What arrived begins with `start` and is no frame; nothing more is read."""
        ...


class Connection(tcp.Server):  # type: ignore[misc]
    """One accepted connection.

    Beyond Twisted's transport it has `send`, reasons to pause that add up, and `cut_off`.
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
        traffic: Traffic,
    ) -> None:
        self._traffic = traffic
        self._queue: deque[Bytes] = deque()
        self._tail: Tail | None = None
        self._start = b""
        self._flushing = False
        self._waiting = False
        self._ending = False
        self._progress = 0.0
        self._pauses: set[str] = set()
        self.unsent_bytes = 0
        super().__init__(sock, protocol, client, server, number, reactor)

    # Receiving

    def doRead(self) -> Any:
        """One read, and every frame that it completes. Without memory for that the connection ends: what it has asked
        for may have been done, and a broken connection tells the client so.
        """
        try:
            return self._do_read()
        except MemoryError as error:
            self.cut_off(f"out of memory ({str(error) or 'no more is given'})")
            return None

    def _do_read(self) -> Any:
        if self._ending:
            return self._discard()
        if self._tail is not None:
            return self._read_on(self._tail)
        arena = self._traffic.arena
        room = arena.room()[:CROWDED_BYTES] if self._traffic.crowded else arena.room()
        start = len(self._start)
        if start:
            room[:start] = self._start
        try:
            count = self.socket.recv_into(room[start:] if start else room)
        except OSError as error:
            return self._read_failed(error)
        if not count:
            return main.CONNECTION_DONE
        self._start = b""
        arena.used(start + count)
        self._take_frames(room[: start + count], arena.buffer)
        return None

    def _read_on(self, tail: Tail) -> Any:
        """Continue a frame where its beginning lies; what comes behind it goes into the arena."""
        traffic = self._traffic
        if not traffic.admit(self):
            return None
        arena = traffic.arena
        room = tail.room()
        behind = arena.room() if tail.last_room else None
        try:
            count = self.socket.recvmsg_into([room, behind] if behind is not None else [room])[0]
        except OSError as error:
            return self._read_failed(error)
        if not count:
            return main.CONNECTION_DONE
        self._progress = traffic.clock.monotonic()
        fitted = min(count, len(room))
        size = tail.buffer.size
        tail.used(fitted)
        traffic.receiving_bytes += tail.buffer.size - size
        if tail.complete:
            try:
                self.protocol.frame_received(tail.buffer.view, tail.buffer)
            finally:
                self._drop_tail()
        if behind is not None and count > fitted:
            arena.used(count - fitted)
            self._take_frames(behind[: count - fitted], arena.buffer)
        return None

    def _discard(self) -> Any:
        try:
            return None if self.socket.recv_into(self._traffic.arena.room()) else main.CONNECTION_DONE
        except OSError as error:
            return self._read_failed(error)

    def _read_failed(self, error: OSError) -> Any:
        return None if error.errno in WOULD_BLOCK else main.CONNECTION_LOST

    def _take_frames(self, view: memoryview, hold: Buffer) -> None:
        position, end = 0, len(view)
        protocol, now = self.protocol, self._traffic.clock.monotonic
        deadline = now() + SLICE_SECONDS / (1 + self._traffic.put_off)
        while end - position >= 4:
            if self._ending or self.disconnecting or self._aborting or self.disconnected:
                return
            try:
                whole = 4 + check_size(view, position, frame_bytes=protocol.frame_bytes)
            except BadFrame as error:
                protocol.frame_refused(error, bytes(view[position : position + 16]))
                return
            if position + whole > end:
                self._begin_tail(view[position:], whole)
                return
            protocol.frame_received(view[position : position + whole], hold)
            position += whole
            if now() > deadline:
                self._put_off(bytes(view[position:]))
                return
        self._start = bytes(view[position:])

    def _put_off(self, rest: bytes) -> None:
        """What is left of a read waits until the others had their turn."""
        self.pause(SLICE)
        self._traffic.put_off += 1
        self.reactor.callLater(0, self._go_on, rest)

    def _go_on(self, rest: bytes) -> None:
        self._traffic.put_off -= 1
        self.resume(SLICE)
        if rest and not self.disconnected:
            buffer = self._traffic.pool.allocate(len(rest))
            buffer.view[:] = rest
            try:
                self._take_frames(buffer.view, buffer)
            finally:
                buffer.release()

    def _begin_tail(self, part: memoryview, whole: int) -> None:
        traffic = self._traffic
        at_once = affords(traffic.receiving_bytes, whole)
        self._tail = Tail(traffic.pool, part, whole, at_once=at_once)
        traffic.receiving_bytes += self._tail.buffer.size
        self._progress = traffic.clock.monotonic()
        traffic.watch(self)

    # Pausing

    def pause(self, reason: str) -> None:
        """Read no more until `resume` was called for every reason."""
        if not self._pauses:
            self.stopReading()
        self._pauses.add(reason)

    def resume(self, reason: str) -> None:
        """One reason less not to read; harmless if it was none."""
        if reason in self._pauses:
            self._pauses.remove(reason)
            if not self._pauses and self.connected and not self.disconnecting:
                self.startReading()
                if self._tail is not None:
                    self._progress = self._traffic.clock.monotonic()
                    self._traffic.watch(self)

    # Sending

    def send(self, buffers: Sequence[Bytes]) -> None:
        """Queue a reply's buffers, none of them empty, for the end of this turn; they must not change."""
        if self.disconnected or self._aborting:
            return
        size = sum(map(len, buffers))
        self._queue.extend(buffers)
        self.unsent_bytes += size
        self._traffic.unsent_bytes += size
        if self.unsent_bytes > self._traffic.unsent_bytes_max:
            self.cut_off(f"{self.unsent_bytes} bytes wait for it to read")
            return
        if not self._flushing and not self._waiting:
            self._flushing = True
            self._traffic.flush_later(self)
        self._traffic.relieve()

    def write(self, data: bytes) -> None:
        """As Twisted's."""
        if data:
            self.send((data,))

    def writeSequence(self, iovec: Sequence[bytes]) -> None:
        """As Twisted's."""
        self.send([data for data in iovec if data])

    def flush(self) -> None:
        """Send what is queued as far as the system takes it; the rest when it takes more."""
        self._flushing = False
        if self.disconnected or self._aborting or self._waiting:
            return
        failed = self.doWrite()
        if failed is not None:
            self.connectionLost(Failure(failed))

    def doWrite(self) -> Any:
        """Send from the queue until it is empty or the system takes no more."""
        queue = self._queue
        while queue:
            try:
                sent = self.socket.sendmsg(
                    queue if len(queue) <= VECTOR_MAX else list(islice(queue, VECTOR_MAX))
                )
            except OSError as error:
                if error.errno not in WOULD_BLOCK:
                    return main.CONNECTION_LOST
                sent = 0
            if not self._sent(sent):
                self._wait_for_room(sent)
                return None
        if self._waiting or self.disconnecting:
            self._waiting = False
            self.stopWriting()
            self.resume(UNSENT)
        if self._ending and not self.disconnecting:
            self._say_end()
        return main.CONNECTION_DONE if self.disconnecting else None

    def _sent(self, size: int) -> bool:
        """Drop `size` bytes from the queue's front; whether everything that was tried went out."""
        self.unsent_bytes -= size
        self._traffic.unsent_bytes -= size
        queue = self._queue
        tried = min(len(queue), VECTOR_MAX)
        while tried and size >= len(queue[0]):
            size -= len(queue.popleft())
            tried -= 1
        if size:
            queue[0] = memoryview(queue[0])[size:]
        return not tried

    def _wait_for_room(self, sent: int) -> None:
        if sent or not self._waiting:
            self._progress = self._traffic.clock.monotonic()
        if not self._waiting:
            self._waiting = True
            self.startWriting()
            self._traffic.watch(self)
        if self.unsent_bytes > UNSENT_BYTES_PAUSE and not self._ending:
            self.pause(UNSENT)

    # Ending

    def end(self) -> None:
        """Send what is queued, then say the end; what still comes is dropped. The peer gets time to read
        it.
        """
        if self._ending or self.disconnected or self._aborting:
            return
        self._ending = True
        self._pauses.clear()
        self.startReading()
        if not self._flushing and not self._waiting:
            self._flushing = True
            self._traffic.flush_later(self)
        self.reactor.callLater(LINGER_SECONDS, self.loseConnection)

    def _say_end(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)

    def waits_for_reader(self) -> bool:
        """Something is sent only when the peer reads."""
        return self._waiting

    def stands_since(self) -> float | None:
        """When the peer last read, or sent something of a frame that is not whole; None if all is done."""
        halfway = self._tail is not None and not self._pauses
        return self._progress if self._waiting or halfway else None

    def cut_off(self, why: str) -> None:
        """End the connection at once, with a line in the log."""
        if not self._aborting and not self.disconnected:
            logger.warning("connection of %s cut off: %s", self.peer, why)
            self._forget_queue()
            self.abortConnection()

    @property
    def peer(self) -> str:
        """HOST:PORT of the other end."""
        return address_text(self.client[0], self.client[1])

    def connectionLost(self, reason: Failure) -> None:
        """The connection is gone: give back all that it held, then tell the protocol."""
        self._drop_tail()
        self._forget_queue()
        self._traffic.forget(self)
        super().connectionLost(reason)

    def _drop_tail(self) -> None:
        tail, self._tail = self._tail, None
        if tail is not None:
            self._traffic.received(self, tail.buffer.size)
            tail.release()

    def _forget_queue(self) -> None:
        self._traffic.unsent_bytes -= self.unsent_bytes
        self.unsent_bytes = 0
        self._queue.clear()
        self._waiting = False


class Listener(tcp.Port):  # type: ignore[misc]
    """A listening socket that was bound before, and the connections that come to it."""

    def __init__(self, bound: socket.socket, factory: Any, reactor: Any, traffic: Traffic) -> None:
        host, port = bound.getsockname()[:2]
        super().__init__(port, factory, BACKLOG, host, reactor)
        self._preexistingSocket = bound
        self.transport = functools.partial(Connection, traffic=traffic)

    def startListening(self) -> None:
        """Accept connections from now on."""
        assert self._preexistingSocket is not None
        self._preexistingSocket.listen(BACKLOG)
        super().startListening()


def address_text(host: str, port: int) -> str:
    """HOST:PORT, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
