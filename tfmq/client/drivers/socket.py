"""The bytes between a link and a socket that never blocks: what the blocking and the asyncio driver share."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable
from typing import Any

from tfmq.client.connection.addresses import Folder, Server
from tfmq.client.connection.connection import Link
from tfmq.errors import TfmqError

RECEIVE_BYTES_MIN = 16 << 10
RECEIVE_BYTES_MAX = 1 << 20
"""One read takes so much; it grows where reads come back full, so that small answers cost small buffers."""
SOCKET_BUFFER_BYTES = 1 << 20
"""Asked for in both directions, so that a batch leaves in one write."""

_AGAIN = (BlockingIOError, InterruptedError)


class Channel:
    """The socket of one link, while there is one. Raises nothing: a broken connection is told to the link."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.socket: socket.socket | None = None
        self.connecting = False
        self.before_close: Callable[[], None] | None = None
        """Called while the socket is still open: whoever watches its descriptor has to let go of it first."""
        self._receive_bytes = RECEIVE_BYTES_MIN

    def fileno(self) -> int:
        return self.socket.fileno() if self.socket else -1

    @property
    def wants_write(self) -> bool:
        return self.connecting or self.link.has_output

    def open(self, address: tuple[int, Any]) -> None:
        """Begin to connect to `address` (family, address); `writable` sees how it ends."""
        family, place = address
        try:
            made = self.socket = socket.socket(family, socket.SOCK_STREAM)
            made.setblocking(False)
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
            self.connecting = True
            code = made.connect_ex(place)
        except OSError as error:
            self.broke(error)
            return
        if code not in (0, errno.EINPROGRESS, errno.EWOULDBLOCK):
            self.broke(OSError(code, errno.errorcode.get(code, "")) if code else None)

    def receive(self) -> bytes | OSError | None:
        """What is there: bytes (b"" at the end of the stream), None if nothing, or how the connection broke.
        Needs no lock: one reader at a time.
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

    def take(self, data: bytes | OSError | None) -> None:
        """Give the link what `receive` gave."""
        if data is None:
            return
        if isinstance(data, OSError):
            self.broke(data)
        elif not data:
            self.broke(ConnectionResetError("the other end closed it"))
        else:
            try:
                self.link.received(data)
            except Exception as error:
                self.broke(error)
            except BaseException:
                self.broke(ConnectionResetError("reading was interrupted"))
                raise

    def writable(self) -> None:
        """The socket takes bytes, or the attempt to connect ended."""
        if self.socket is None:
            return
        if self.connecting:
            code = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                self.broke(OSError(code, _text(code)))
                return
            self.connecting = False
            self.link.connected()
        self.flush()

    def flush(self) -> None:
        """Write as much as the socket takes without waiting."""
        link = self.link
        if self.socket is None or self.connecting:
            return
        try:
            while link.has_output:
                buffers = link.pending()
                size = self.socket.sendmsg(buffers)
                link.wrote(size)
                if size < sum(map(len, buffers)):
                    return
        except _AGAIN:
            return
        except OSError as error:
            self.broke(error)

    def tick(self) -> None:
        """What is due in the link by now."""
        try:
            self.link.tick()
        except Exception as error:
            self.broke(error)

    def broke(self, error: BaseException | None) -> None:
        """Drop the socket and tell the link."""
        self.close()
        self.link.disconnected(error)

    def close(self) -> None:
        self.connecting = False
        if self.socket is not None:
            if self.before_close is not None:
                self.before_close()
            self.socket.close()
            self.socket = None


def _text(code: int) -> str:
    return errno.errorcode.get(code, str(code))


def choose(found: list[tuple[Any, ...]]) -> tuple[int, Any]:
    """The address to use of what `getaddrinfo` found, IPv4 before IPv6: a broker listens on 127.0.0.1 by default."""
    best = sorted(found, key=lambda each: each[0] != socket.AF_INET)[0]
    return best[0], best[4]


# From an address as a link has it to one as a socket takes it: names are looked up, and brokers on folders found.

Found = list[tuple[Any, ...]]
"""What `getaddrinfo` gives."""


def look_up(server: Server | Folder) -> Found | OSError | TfmqError:
    """The addresses, or why there are none. May wait, for a name server or a disk."""
    try:
        place = server.find() if isinstance(server, Folder) else server
    except TfmqError as error:
        return error
    try:
        return list(socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM))
    except OSError as error:
        return OSError(f"the name {place.host} cannot be looked up ({error.strerror})")
