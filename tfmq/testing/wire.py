"""A connection in memory: bytes both ways, what a socket is to the client's channel and a transport to a session.

Nothing moves by itself. The client's end takes and gives what a non-blocking socket would; the broker's end cuts
frames out of what has arrived when it is told to `deliver`, with the checks of the real one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from journal.buffers import Pool
from tfmq.errors import BadFrame
from tfmq.protocol.frames import check_size
from tfmq.server.session import Session

WORD: Final = 4
"""Bytes of a frame's first word, which says its size."""
START_SHOWN: Final = 16
"""So much of something that is no frame is looked at, to say what it may be."""


class Wire:
    """The bytes under way between one client and one session."""

    def __init__(self) -> None:
        self.to_broker = bytearray()
        self.to_client = bytearray()
        self.client_closed = False
        self.broker_ended = False
        self.broken = False
        """Both ends find it reset; what was under way is lost."""

    def cut(self) -> None:
        """As a network that goes away, or a process that dies."""
        self.broken = True
        self.to_broker.clear()
        self.to_client.clear()


class ClientEnd:
    """What `tfmq.client.drivers.socket` needs of a socket."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def fileno(self) -> int:
        """There is no descriptor."""
        return -1

    def sendmsg(self, buffers: Iterable[bytes | bytearray | memoryview]) -> int:
        """Takes all of it. Raises ConnectionResetError."""
        wire = self._wire
        if wire.broken or wire.broker_ended:
            raise ConnectionResetError("the broker is gone")
        before = len(wire.to_broker)
        for buffer in buffers:
            wire.to_broker += buffer
        return len(wire.to_broker) - before

    def recv(self, size: int) -> bytes:
        """What is there; b"" at the end. Raises BlockingIOError where there is nothing, ConnectionResetError."""
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
        """The broker sees the end behind what was sent."""
        self._wire.client_closed = True


class BrokerEnd:
    """What a session needs of its transport (`tfmq.server.transport.Connection`)."""

    def __init__(self, wire: Wire, session: Session, pool: Pool, number: int) -> None:
        self.wire = wire
        self._session = session
        self._pool = pool
        self._pauses: set[str] = set()
        self._number = number
        self.gone = False
        session.makeConnection(self)  # type: ignore[arg-type]

    @property
    def peer(self) -> str:
        """The other end's name, for people."""
        return f"client-{self._number}"

    def setTcpNoDelay(self, enabled: bool) -> None:
        """There is nothing to delay."""

    def setTcpKeepAlive(self, enabled: bool) -> None:
        """There is nothing to keep alive."""

    def pause(self, reason: str) -> None:
        """Deliver nothing until `resume` was called for every reason."""
        self._pauses.add(reason)

    def resume(self, reason: str) -> None:
        """One reason less."""
        self._pauses.discard(reason)

    def send(self, buffers: Iterable[Any]) -> None:
        """Bytes for the client."""
        wire = self.wire
        if not (wire.broken or wire.client_closed or wire.broker_ended):
            for buffer in buffers:
                wire.to_client += buffer

    def end(self) -> None:
        """The client finds the end behind what was sent; what it still sends is dropped."""
        self.wire.broker_ended = True

    def cut_off(self, why: str) -> None:
        """End the connection at once."""
        self.wire.cut()

    def deliver(self) -> bool:
        """Hand the session every whole frame that has arrived, then the end if it has come; whether there was any."""
        if self.gone:
            return False
        wire, inbox = self.wire, self.wire.to_broker
        if wire.broker_ended:
            inbox.clear()
        taken = False
        while not self._pauses and len(inbox) >= WORD and not wire.broker_ended:
            try:
                whole = WORD + check_size(inbox, frame_bytes=self._session.frame_bytes)
            except BadFrame as error:
                self._session.frame_refused(error, bytes(inbox[:START_SHOWN]))
                inbox.clear()
                return True
            if len(inbox) < whole:
                break
            self._hand_over(whole)
            taken = True
        if wire.broken or (wire.client_closed and not (self._pauses and inbox)) or wire.broker_ended:
            self.lose("the connection was closed")
            taken = True
        return taken

    def lose(self, reason: str) -> None:
        """The connection is gone, and the session is told."""
        if not self.gone:
            self.gone = True
            self._session.connectionLost(reason)

    def _hand_over(self, whole: int) -> None:
        inbox = self.wire.to_broker
        buffer = self._pool.allocate(whole)
        try:
            buffer.view[:] = inbox[:whole]
            del inbox[:whole]
            self._session.frame_received(buffer.view, buffer)
        finally:
            buffer.release()
