"""TLS connections of the server: a `Connection` whose socket is a `TlsSocket`."""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable
from typing import Any

from twisted.internet import tcp
from twisted.python.failure import Failure

from tfmq.errors import NotAllowed
from tfmq.server.connection_limits import ConnectionLimits
from tfmq.server.log_lines import BY_PEER
from tfmq.server.transport import Connection, FrameProtocol
from tfmq.tls import NotTls, TlsSocket

logger = logging.getLogger("tfmq.server")


class TlsConnection(Connection):
    """One accepted connection with TLS. The client's first bytes begin the handshake, before any frame.

    A client that does not use TLS gets an error without TLS, and is disconnected; so is one whose handshake fails,
    after the alert that says why.
    """

    def __init__(
        self,
        sock: TlsSocket,
        protocol: FrameProtocol,
        client: tuple[Any, ...],
        server: tcp.Port,
        number: int,
        reactor: Any,
        limits: ConnectionLimits,
    ) -> None:
        self._tls: TlsSocket | None = sock
        self._reads_again = False
        self._writes_after_handshake = False
        self._flushes_handshake = False
        """Whether the system has not accepted all of this end's part of the handshake, such as a long chain."""
        super().__init__(sock, protocol, client, server, number, reactor, limits)  # type: ignore[arg-type]

    def doRead(self) -> Any:
        why = self._charged(super().doRead)
        tls = self._tls
        if why is None and tls is not None:
            if tls.has_output and not self.is_waiting and not self._flushes_handshake and self.connected:
                self._flushes_handshake = True
                super().startWriting()
            if self._writes_after_handshake and tls.is_established and self.connected:
                self._writes_after_handshake = False
                self.startWriting()
            if tls.is_buffered:
                self._read_again()
        return why

    def doWrite(self) -> Any:
        return self._charged(self._do_write)

    def _do_write(self) -> Any:
        tls = self._tls
        if self._flushes_handshake and tls is not None:
            try:
                if not tls.flush():
                    return None
            except OSError as error:
                return self._read_failed(error)
            self._flushes_handshake = False
            if not (self.is_waiting and tls.is_established):
                self.stopWriting()
                self._writes_after_handshake = self.is_waiting
                return None
        return super().doWrite()

    def _charged(self, work: Callable[[], Any]) -> Any:
        """Do the work, and charge this connection for its time: encryption, too, besides the requests themselves."""
        limits = self._limits
        began, charged = limits.clock.monotonic(), limits.turn.handling_seconds
        try:
            return work()
        finally:
            ended = limits.clock.monotonic()
            self._charge(began + max(0.0, limits.turn.handling_seconds - charged), ended)

    def connectionLost(self, reason: Failure) -> None:
        super().connectionLost(reason)
        # The connection is part of a reference cycle; without this, what OpenSSL has would be freed with it only by a
        # garbage collection, which counts objects, not their memory.
        self._tls = None

    def startReading(self) -> None:
        super().startReading()
        if self._tls is not None and self._tls.is_buffered:
            self._read_again()

    def startWriting(self) -> None:
        # Before the end of the handshake the socket is writable, but nothing can be sent: the reactor would spin.
        if self._tls is None or self._tls.is_established:
            super().startWriting()
        else:
            self._writes_after_handshake = True

    def loseConnection(self, *arguments: Any) -> None:
        if self._tls is None or self._tls.is_established:
            super().loseConnection(*arguments)
        else:
            self.abortConnection()

    def _read_again(self) -> None:
        """Read once more in the next turn, because decrypted data are left of which the system does not know."""
        if not self._reads_again:
            self._reads_again = True
            self.reactor.callLater(0, self._read_buffered)

    def _read_buffered(self) -> None:
        self._reads_again = False
        if self._pauses or self.disconnecting or self._aborting or self.disconnected:
            return  # If it is paused, `startReading` lets it read again.
        try:
            why = self.doRead()
        except Exception:
            # As after a poll: the frames of this read are lost, so no later ones may be handled.
            logger.exception("a request failed")
            self.cut_off("a request failed")
            return
        if why is not None:
            self.connectionLost(Failure(why))

    def _read_failed(self, error: OSError) -> Any:
        tls = self._tls
        if tls is None or tls.is_established:
            return super()._read_failed(error)
        if isinstance(error, NotTls | ssl.SSLError):
            self._limits.failed_handshakes += 1
        if isinstance(error, NotTls):
            # Nothing was received on this connection, so no reply exists that must not be sent without TLS.
            self.socket, self._tls = tls.raw, None
            if self._writes_after_handshake:
                self.startWriting()
            self.protocol.frame_refused(
                NotAllowed("This broker takes only connections with TLS: write tfmqs:// before its address."),
                error.start,
            )
            return None
        if isinstance(error, ssl.SSLError):
            logger.info("TLS handshake with %s failed: %s", self.peer, error.reason or error, extra=BY_PEER)
            self._discard_queue()
            self.end()
            return None
        return super()._read_failed(error)
