"""An in-memory connection between a client's channel and a broker's session.

The client's end behaves like a non-blocking socket. The broker's end splits received bytes into frames in `deliver`,
with the same checks as the real transport.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from journal.buffers import Pool
from tfmq.errors import BadFrame
from tfmq.protocol.frames import check_size
from tfmq.server.session import Session

LENGTH_BYTES: Final = 4  # size of the field with the frame's length, at the beginning of a frame
INVALID_START_BYTES: Final = 16  # bytes of an invalid frame from which the session guesses the peer's protocol


class Wire:
    """The bytes in transit between one client and one session of the broker."""

    def __init__(self) -> None:
        self.to_broker = bytearray()
        self.to_client = bytearray()
        self.client_closed = False
        self.broker_ended = False
        self.broken = False
        """The connection is broken: both ends get an error, and bytes in transit are lost."""

    def break_connection(self) -> None:
        """Break the connection, like a network failure or a killed process."""
        self.broken = True
        self.to_broker.clear()
        self.to_client.clear()


class ClientEnd:
    """The client's end of a `Wire`, with the methods of a socket that `tfmq.client.drivers.socket` calls."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def fileno(self) -> int:
        return -1

    def sendmsg(self, buffers: Iterable[bytes | bytearray | memoryview]) -> int:
        wire = self._wire
        if wire.broken or wire.broker_ended:
            raise ConnectionResetError("the broker is gone")
        before = len(wire.to_broker)
        for buffer in buffers:
            wire.to_broker += buffer
        return len(wire.to_broker) - before

    def recv(self, size: int) -> bytes:
        """Return received bytes; b"" at the end. Raises BlockingIOError (none yet), ConnectionResetError (broken)."""
        wire = self._wire
        if wire.broken:
            raise ConnectionResetError("the broker is gone")
        if wire.to_client:
            data = bytes(wire.to_client[:size])
            del wire.to_client[:size]
            return data
        if wire.broker_ended:
            return b""
        raise BlockingIOError

    def close(self) -> None:
        """Close the client's end. The broker first receives the bytes that were sent, and then notices the close."""
        self._wire.client_closed = True


class BrokerEnd:
    """The broker's end of a `Wire`, with the methods of `tfmq.server.transport.Connection` that a session calls."""

    def __init__(self, wire: Wire, session: Session, pool: Pool, number: int) -> None:
        self.wire = wire
        self._session = session
        self._pool = pool
        self._pauses: set[str] = set()
        self._number = number
        self.sent_bytes = 0
        self.is_lost = False
        session.makeConnection(self)  # type: ignore[arg-type]

    @property
    def peer(self) -> str:
        return f"client-{self._number}"

    def setTcpNoDelay(self, enabled: bool) -> None:
        """Do nothing: there is no TCP connection."""

    def setTcpKeepAlive(self, enabled: bool) -> None:
        """Do nothing: there is no TCP connection."""

    def admit(self) -> None:
        """Do nothing: simulated connections are served in one order."""

    def pause(self, reason: str) -> None:
        self._pauses.add(reason)

    def resume(self, reason: str) -> None:
        self._pauses.discard(reason)

    def send(self, buffers: Iterable[Any]) -> None:
        wire = self.wire
        if not (wire.broken or wire.client_closed or wire.broker_ended):
            for buffer in buffers:
                wire.to_client += buffer
                self.sent_bytes += len(buffer)

    def end(self) -> None:
        """End the connection: the client still gets all bytes sent before, but bytes from the client are discarded."""
        self.wire.broker_ended = True

    def cut_off(self, why: str) -> None:
        self.wire.break_connection()

    def deliver(self) -> bool:
        """Pass complete frames, then the end of the connection, to the session. Return whether anything was passed."""
        if self.is_lost:
            return False
        wire, inbox = self.wire, self.wire.to_broker
        if wire.broker_ended:
            inbox.clear()
        taken = False
        while not self._pauses and len(inbox) >= LENGTH_BYTES and not wire.broker_ended:
            try:
                whole = LENGTH_BYTES + check_size(inbox, frame_bytes=self._session.frame_bytes)
            except BadFrame as error:
                self._session.frame_refused(error, bytes(inbox[:INVALID_START_BYTES]))
                inbox.clear()
                return True
            if len(inbox) < whole:
                break
            self._pass_frame(whole)
            taken = True
        if wire.broken or (wire.client_closed and not (self._pauses and inbox)) or wire.broker_ended:
            self.lose_connection("the connection was closed")
            taken = True
        return taken

    def lose_connection(self, reason: str) -> None:
        if not self.is_lost:
            self.is_lost = True
            self._session.connectionLost(reason)

    def _pass_frame(self, whole: int) -> None:
        inbox = self.wire.to_broker
        buffer = self._pool.allocate(whole)
        try:
            buffer.view[:] = inbox[:whole]
            del inbox[:whole]
            self._session.frame_received(buffer.view, buffer)
        finally:
            buffer.release()
