"""A non-blocking socket and its connection object, and address resolution, for all drivers."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING, Any

from tfmq.client.connection.addresses import BrokerAddress, LocalBrokerAddress
from tfmq.client.connection.connection import ClientConnection
from tfmq.errors import NOT_DONE, ConfigError, ConnectionFailed, TfmqError

if TYPE_CHECKING:
    import ssl

    from tfmq.client.connection.tls import ClientTlsSocket

RECEIVE_BYTES_MIN = 16 << 10
RECEIVE_BYTES_MAX = 1 << 20
"""If reads fill the read buffer, it grows up to this size. So small replies need only small buffers."""
SOCKET_BUFFER_BYTES = 1 << 20
"""Size of the send buffer that the operating system is asked for, so that a batch is sent in one write."""

OUTPUT_BUFFERS = 64
"""Maximum number of buffers for one write, far below IOV_MAX. More buffers do not increase the throughput."""

_AGAIN = (BlockingIOError, InterruptedError)

SocketAddress = tuple[int, Any, "ssl.SSLContext | None"]
"""An address family, an address in the form that `connect` takes, and the context of a connection with TLS."""


class SocketChannel:
    """The socket of one connection. Errors are not raised, but passed to `link.disconnected`."""

    def __init__(self, link: ClientConnection) -> None:
        self.link = link
        self.socket: socket.socket | ClientTlsSocket | None = None
        self.connecting = False
        self.handshaking = False
        """Whether the TLS handshake is in progress. Until it is complete, nothing can be written."""
        self._tls_context: ssl.SSLContext | None = None
        self._tls: ClientTlsSocket | None = None
        self.before_close: Callable[[], None] | None = None
        """Called before the socket is closed. An event loop driver stops watching the descriptor here."""
        self._receive_bytes = RECEIVE_BYTES_MIN

    def fileno(self) -> int:
        return self.socket.fileno() if self.socket else -1

    @property
    def wants_write(self) -> bool:
        return self.connecting or (bool(self.link.output) and not self.handshaking)

    def start_connecting(self, address: SocketAddress) -> None:
        """Start to connect. When the socket becomes writable, `on_writable` completes the attempt."""
        family, socket_address, self._tls_context = address
        try:
            made = self.socket = socket.socket(family, socket.SOCK_STREAM)
            made.setblocking(False)
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
            self.connecting = True
            self.link.connecting()
            code = made.connect_ex(socket_address)
        except OSError as error:
            self.connection_failed(error)
            return
        if code not in (0, errno.EINPROGRESS, errno.EWOULDBLOCK):
            self.connection_failed(OSError(code, errno.errorcode.get(code, "")) if code else None)

    def receive(self) -> bytes | OSError | None:
        """Return received bytes (b"" at the end of the stream), None if there are none, or the error. Never blocks.

        Only one thread at a time may call this. The thread need not hold the driver's lock.
        """
        if self.socket is None or self.connecting:
            return None
        try:
            data = self.socket.recv(self._receive_bytes)
        except _AGAIN:
            return None
        except OSError as error:
            return error
        if len(data) == self._receive_bytes:
            self._receive_bytes = min(RECEIVE_BYTES_MAX, self._receive_bytes * 4)
        elif len(data) * 16 < self._receive_bytes > RECEIVE_BYTES_MIN:
            self._receive_bytes //= 2
        return data

    def process_received(self, data: bytes | OSError | None) -> None:
        if self.handshaking and self._tls is not None and self._tls.is_established:
            self.handshaking = False
            self.flush()
        if data is None:
            return
        if isinstance(data, OSError):
            self.connection_failed(data)
        elif not data:
            self.connection_failed(ConnectionResetError("the other end closed it"))
        else:
            try:
                self.link.received(data)
            except Exception as error:
                self.connection_failed(error)
            except BaseException:
                self.connection_failed(ConnectionResetError("reading was interrupted"))
                raise

    def on_writable(self) -> None:
        """Complete the attempt to connect if one is in progress, and write. Call this when the socket is writable."""
        if self.socket is None:
            return
        if self.connecting:
            code = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                self.connection_failed(OSError(code, errno.errorcode.get(code, str(code))))
                return
            self.connecting = False
            if self._tls_context is not None:
                assert isinstance(self.socket, socket.socket)
                if not self._start_tls(self.socket, self._tls_context):
                    return
            self.link.connected()
        self.flush()

    def _start_tls(self, raw: socket.socket, context: ssl.SSLContext) -> bool:
        """Begin the TLS handshake. Return whether that was possible."""
        from tfmq.client.connection.tls import ClientTlsSocket  # Clients without TLS do not load `ssl`.

        server = self.link.server
        assert isinstance(server, BrokerAddress)
        try:
            self.socket = self._tls = tls = ClientTlsSocket(raw, context, server)
            self.handshaking = True
            tls.start()
        except (OSError, ValueError) as error:  # ValueError: the host cannot be a name in a certificate.
            self.connection_failed(error)
            return False
        return True

    def flush(self) -> None:
        """Write as much as the socket accepts without blocking."""
        link = self.link
        if self.socket is None or self.connecting or self.handshaking:
            return
        try:
            while link.output:
                buffers = list(islice(link.output, OUTPUT_BUFFERS))
                size = self.socket.sendmsg(buffers)
                link.output_written(size)
                if size < sum(map(len, buffers)):
                    return
        except _AGAIN:
            return
        except OSError as error:
            self.connection_failed(error)

    def tick(self) -> None:
        try:
            self.link.tick()
        except Exception as error:
            self.connection_failed(error)

    def connection_failed(self, error: BaseException | None) -> None:
        self.close()
        self.link.disconnected(error)

    def close(self) -> None:
        self.connecting = self.handshaking = False
        self._tls = None
        if self.socket is not None:
            if self.before_close is not None:
                self.before_close()
            self.socket.close()
            self.socket = None


def resolve_address(server: BrokerAddress | LocalBrokerAddress) -> SocketAddress | OSError | TfmqError:
    """Return the broker's resolved address, or the error. May block, and may start a broker on a data folder."""
    try:
        broker = server.resolve() if isinstance(server, LocalBrokerAddress) else server
    except TfmqError as error:
        return error
    if broker.credentials is not None:
        import tfmq.access.scram  # noqa: F401 - Loaded here, where a driver may block: it takes about 50 ms.
    context = None
    if broker.tls is not None:
        from tfmq.tls import client_context

        try:
            context = client_context(*broker.tls)
        except ConfigError as error:
            return ConnectionFailed(f"{broker}: {error.sentence}", outcome=NOT_DONE, retriable=False)
    try:
        found = socket.getaddrinfo(broker.host, broker.port, type=socket.SOCK_STREAM)
    except OSError as error:
        return OSError(f"the name {broker.host} cannot be looked up ({error.strerror})")
    # IPv4 comes first: a broker listens on 127.0.0.1 by default.
    family, _, _, _, address = min(found, key=lambda each: each[0] != socket.AF_INET)
    return family, address, context
