"""The HTTP server: its table of routes, what it refuses, and its limits."""

from __future__ import annotations

import base64
import ipaddress
import logging
import socket
import ssl
from collections.abc import Callable
from http import HTTPStatus
from io import BytesIO
from typing import Any, Final, NamedTuple, TypeAlias

from twisted.internet import main, tcp
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IAddress
from twisted.internet.protocol import Factory
from twisted.python.failure import Failure
from twisted.web import http

from tfmq import limits
from tfmq.access.rights import MONITOR, Need
from tfmq.config import is_loopback, split_address
from tfmq.errors import (
    BadRequest,
    Busy,
    Closed,
    ConnectionFailed,
    DiskFull,
    Fenced,
    Forbidden,
    LoginFailed,
    LogTruncated,
    MessageTooLarge,
    NotAllowed,
    NotSupported,
    OffsetOutOfRange,
    StorageStopped,
    StoreFailed,
    TfmqError,
    TimedOut,
    TopicExists,
    TransactionError,
    TransactionTooLarge,
    UnknownSchedule,
    UnknownTopic,
    UnknownTransaction,
)
from tfmq.server.health import live, ready
from tfmq.server.http_message import LOGIN, PUBLIC, HttpAnswer, HttpContext, HttpRequest, json_answer, text_answer
from tfmq.server.http_page import PAGE_ROUTES
from tfmq.server.log_lines import BY_PEER
from tfmq.server.metrics import metrics
from tfmq.server.transport import PacedPort, address_text
from tfmq.settings_table import Http
from tfmq.tls import READ_BYTES, NotTls, TlsSocket

logger = logging.getLogger("tfmq.server")

Handler: TypeAlias = Callable[[HttpRequest], "HttpAnswer | Deferred[HttpAnswer]"]


class Route(NamedTuple):
    """One row of the table of routes.

    `path`: a part in braces stands for any text without a slash, which `HttpRequest.parameters` has. `methods`: HEAD
    belongs to GET. `right`: the right that a user needs where the server has users; PUBLIC: not even a login; LOGIN: a
    login, because the commands that the handler executes need their own. `handler` returns the answer, or a Deferred.
    """

    path: str
    methods: tuple[str, ...]
    right: str
    handler: Handler


WATCHED_ROUTES: Final = (
    Route("/live", ("GET",), PUBLIC, live),
    Route("/ready", ("GET",), PUBLIC, ready),
    Route("/metrics", ("GET",), MONITOR, metrics),
)
"""The paths that a standby has, too."""

ROUTES: Final[tuple[Route, ...]] = (*WATCHED_ROUTES, *(Route(*each) for each in PAGE_ROUTES))
"""Every path of the HTTP server. The first route that matches is used."""

STATUS_OF_ERRORS: Final[tuple[tuple[type[TfmqError], int], ...]] = (
    (BadRequest, 400),
    (LoginFailed, 401),
    (NotAllowed, 403),
    (Forbidden, 403),
    (UnknownTopic, 404),
    (UnknownTransaction, 404),
    (UnknownSchedule, 404),
    (OffsetOutOfRange, 404),
    (MessageTooLarge, 413),
    (TransactionTooLarge, 413),
    # The request contradicts what the broker has now.
    (TransactionError, 409),
    (TopicExists, 409),
    (Fenced, 409),
    (LogTruncated, 409),
    (NotSupported, 501),
    # The same request may succeed later.
    (Busy, 503),
    (DiskFull, 503),
    (StorageStopped, 503),
    (StoreFailed, 503),
    (Closed, 503),
    (ConnectionFailed, 503),
    (TimedOut, 504),
)
"""Status of an answer to a request whose handler raised such an error: the first row that fits; 500 for any other."""


def log_in(request: HttpRequest, right: str) -> HttpRequest:
    """Return the request with its user, who has the right of its route (`Route.right`).

    Credentials are those of HTTP Basic (RFC 7617). Raises LoginFailed without valid ones, and Busy if too many
    passwords are tried, unless the route is PUBLIC; Forbidden without the right.
    """
    access = request.context.access
    given = request.headers.get("authorization")
    if access is None or (right == PUBLIC and given is None):
        return request
    name = ""
    try:
        name, password = _credentials(given)
        account = access.check_password(name, password)
    except (LoginFailed, Busy) as error:
        if given is not None and isinstance(error, LoginFailed):
            access.log_failed_login(name, request.peer)
        if right == PUBLIC:  # An old password of a monitoring program must not look like a broker that is not live.
            return request
        raise
    need = Need((right,))
    if right not in (PUBLIC, LOGIN) and not account.allow(need):
        raise access.forbid(request.path, account, f"{account.name} at {request.peer}", need)
    return request._replace(account=account)


def _credentials(header: str | None) -> tuple[str, str]:
    """Return user and password of an Authorization header. Raises LoginFailed if it is missing or of another kind."""
    scheme, _, encoded = (header or "").partition(" ")
    try:
        name, colon, password = base64.b64decode(encoded, validate=True).decode().partition(":")
    except ValueError:
        colon = ""
    if scheme.lower() != "basic" or not colon:
        raise LoginFailed("This server has users: log in with HTTP Basic.")
    return name, password


def find_route(method: str, path: str, routes: tuple[Route, ...] = ROUTES) -> tuple[Route, dict[str, str]] | HttpAnswer:
    """Return the route of a request with the variable parts of its path, or the answer if there is none."""
    parts = path.split("/")
    allowed: list[str] = []
    for route in routes:
        parameters = _match(route.path.split("/"), parts)
        if parameters is None:
            continue
        if method in route.methods or (method == "HEAD" and "GET" in route.methods):
            return route, parameters
        allowed += route.methods
    if allowed:
        methods = ", ".join(dict.fromkeys(allowed))
        return text_answer(405, f"This address takes only {methods}.", ("Allow", methods))
    known = ", ".join(route.path for route in routes if "{" not in route.path)
    return text_answer(404, f"There is nothing at this address. Addresses are {known}.")


def _match(pattern: list[str], parts: list[str]) -> dict[str, str] | None:
    if len(pattern) != len(parts):
        return None
    parameters = {}
    for wanted, part in zip(pattern, parts, strict=True):
        if wanted.startswith("{"):
            parameters[wanted.strip("{}")] = part
        elif wanted != part:
            return None
    return parameters


# The Host header


def is_own_host(header: str, settings: Http) -> bool:
    """Return whether the value of a Host header names this server.

    A page of another site can let its own name resolve to this machine (DNS rebinding), and a browser then takes the
    answers for that site's. But the browser sends that name, so only names are accepted that no other site has: those
    of loopback, the host of http.listen, those of http.hosts, and, outside of loopback, any address in numbers and this
    machine's name.
    """
    before, colon, port = header.rpartition(":")
    host = (before if colon and port.isdecimal() else header).strip("[]").lower().rstrip(".")
    own = split_address(settings.listen)[0].lower()
    if not host:
        return False
    if is_loopback(host) or host == own or host in [name.strip() for name in settings.hosts.lower().split(",")]:
        return True
    return not is_loopback(own) and (_is_numeric(host) or host == socket.gethostname().lower())


def _is_numeric(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


# Requests and connections


class _Request(http.Request):  # type: ignore[misc]
    """One request while it is received and answered. Twisted calls its methods."""

    channel: _Channel
    _peer = ""

    def gotLength(self, length: int | None) -> None:
        """Prepare for the body, which stays in memory; the base class would write a large one to a file."""
        self.content = BytesIO()
        self._size = 0
        if length is not None and length > limits.HTTP_BODY_BYTES:
            self.channel.refuse(_TOO_LARGE)

    def handleContentChunk(self, data: bytes) -> None:
        self._size += len(data)
        if self._size > limits.HTTP_BODY_BYTES:
            self.channel.refuse(_TOO_LARGE)
        else:
            self.content.write(data)

    def requestReceived(self, command: bytes, path: bytes, version: bytes) -> None:
        """Answer the complete request. The base class would parse forms first, which no handler needs."""
        self.method, self.uri, self.clientproto = command, path, version
        self.path = path
        self.channel.request_received()
        try:
            answer = self._answer(self.channel.server)
        except Exception as error:
            self._fail(Failure(error))
            return
        if isinstance(answer, Deferred):
            answer.addCallbacks(self._send, self._fail)
        else:
            self._send(answer)

    def _answer(self, server: HttpServer) -> HttpAnswer | Deferred[HttpAnswer]:
        hosts = self.requestHeaders.getRawHeaders("Host", [])
        if len(hosts) != 1 or not is_own_host(hosts[0], server.context.config().http):
            return text_answer(
                421, "The Host header does not name this server. Names that it accepts can be added to http.hosts."
            )
        path, _, query = self.uri.decode("latin-1").partition("?")
        method = self.method.decode("latin-1")
        absence = server.context.absence()
        headers = {
            name.decode("latin-1").lower(): values[-1].decode("latin-1")
            for name, values in self.requestHeaders.getAllRawHeaders()
        }
        body = self.content.getvalue()
        peer = address_text(*self.channel.transport.client[:2])
        request = HttpRequest(method, path, query, {}, headers, body, peer, server.context)
        if absence and not any(path == each.path for each in WATCHED_ROUTES):
            log_in(request, LOGIN)  # the answer names another server
            return text_answer(503, absence)
        found = find_route(method, path)
        if isinstance(found, HttpAnswer):
            return found
        route, parameters = found
        return route.handler(log_in(request._replace(parameters=parameters), route.right))

    def _send(self, answer: HttpAnswer) -> None:
        if self._disconnected:
            return
        self.setResponseCode(answer.status, HTTPStatus(answer.status).phrase.encode())
        for name, value in answer.all_headers():
            self.responseHeaders.addRawHeader(name, value)
        self.write(answer.body)
        self.finish()

    def _fail(self, failure: Failure) -> None:
        error = failure.value
        if isinstance(error, TfmqError):
            status = next((status for kind, status in STATUS_OF_ERRORS if isinstance(error, kind)), 500)
            answer = json_answer({"error": error.code, "message": error.sentence}, status)
            if isinstance(error, LoginFailed):
                answer = answer._replace(headers=(("WWW-Authenticate", 'Basic realm="tfmq", charset="UTF-8"'),))
            self._send(answer)
            return
        logger.error("a request over HTTP failed", exc_info=(failure.type, error, failure.getTracebackObject()))
        self._send(text_answer(500, "The request failed; the server's log says why."))


_TOO_LARGE = text_answer(413, f"A request may have at most {int(limits.HTTP_BODY_BYTES)} bytes of body.")


TLS_HANDSHAKE: Final = b"\x16\x03"
"""The first bytes of a TLS connection: the type of the record, and its version."""


class _Channel(http.HTTPChannel):  # type: ignore[misc]
    """One connection. A request must be complete within HTTP_REQUEST_SECONDS of the start of the connection; from then
    on each answer must be received, and the next request complete, within HTTP_ANSWER_SECONDS of the request before.

    So neither a client that sends slowly nor one that reads slowly stays connected. Twisted bounds what it buffers: it
    handles one request at a time, and reads no more of a connection while much of an answer is unsent.
    """

    requestFactory = _Request
    timeOut = None  # the base class would let a client send a byte now and then for ever
    maxHeaders = int(limits.HTTP_HEADERS)
    totalHeadersSize = int(limits.HTTP_HEADER_BYTES)
    MAX_LENGTH = int(limits.HTTP_HEADER_BYTES)

    def __init__(self, server: HttpServer) -> None:
        super().__init__()
        self.server = server
        self._deadline: Any = None
        self._has_received = self._is_refused = False

    def connectionMade(self) -> None:
        super().connectionMade()
        self.server.channels.add(self)
        self._deadline = self.server.reactor.callLater(int(limits.HTTP_REQUEST_SECONDS), self._expired)

    def dataReceived(self, data: bytes) -> None:
        if self._is_refused:
            return
        if data.startswith(TLS_HANDSHAKE) and not self._has_received:
            # No line of HTTP ends in what follows, so both ends would wait until the deadline.
            self.refuse(text_answer(400, "This port speaks HTTP without TLS: use http://."))
            return
        self._has_received = True
        super().dataReceived(data)

    def request_received(self) -> None:
        """Let the time of the answer begin."""
        self._deadline.reset(int(limits.HTTP_ANSWER_SECONDS))

    def refuse(self, answer: HttpAnswer) -> None:
        """Answer before the request is complete, and close the connection."""
        head = f"HTTP/1.1 {answer.status} {HTTPStatus(answer.status).phrase}\r\nConnection: close\r\n"
        fields = "".join(f"{name}: {value}\r\n" for name, value in answer.all_headers())
        self.transport.write(f"{head}{fields}\r\n".encode() + answer.body)
        self._is_refused = True
        self.loseConnection()

    def lineLengthExceeded(self, line: bytes) -> None:
        self.refuse(text_answer(431, f"A line of a request has at most {int(limits.HTTP_HEADER_BYTES)} bytes."))

    def connectionLost(self, reason: Failure) -> None:
        self.server.channels.discard(self)
        if self._deadline.active():
            self._deadline.cancel()
        super().connectionLost(reason)

    def _expired(self) -> None:
        self.transport.abortConnection()


class HttpServer:
    """The HTTP server on a socket that listens already."""

    def __init__(
        self,
        listening: socket.socket,
        reactor: Any,
        context: HttpContext,
        tls_context: Callable[[], ssl.SSLContext | None],
    ) -> None:
        """`tls_context` returns the TLS context for a new connection; None without TLS."""
        self.reactor = reactor
        self.context = context
        self.channels: set[_Channel] = set()
        self.refused_count = 0
        """Connections above HTTP_CONNECTIONS, which were closed at once."""
        factory = Factory()
        factory.noisy = False
        factory.buildProtocol = self._build_channel
        self._port = HttpPort(listening, factory, reactor, tls_context)
        self._port.startListening()

    def stop(self) -> None:
        """Accept no more connections, and close the open ones."""
        self._port.stopListening()
        for channel in list(self.channels):
            channel.transport.abortConnection()

    @property
    def failed_handshakes(self) -> int:
        """Number of connections whose TLS handshake failed."""
        return self._port.failed_handshakes

    def _build_channel(self, address: IAddress) -> _Channel | None:
        if len(self.channels) >= limits.HTTP_CONNECTIONS:
            self.refused_count += 1
            return None
        return _Channel(self)


class HttpPort(PacedPort):
    """Accepts connections on a socket that listens already, with the TLS context of that moment."""

    def __init__(
        self, listening: socket.socket, factory: Factory, reactor: Any, tls_context: Callable[[], ssl.SSLContext | None]
    ) -> None:
        host, port = listening.getsockname()[:2]
        super().__init__(port, factory, interface=host, reactor=reactor)
        self._preexistingSocket = listening
        self._tls_context = tls_context
        self._tls_scratch = bytearray(READ_BYTES)
        self.failed_handshakes = 0

    def transport(
        self, sock: socket.socket, protocol: _Channel, client: tuple[Any, ...], server: Any, number: int, reactor: Any
    ) -> tcp.Server:
        """Return the transport of an accepted connection."""
        context = self._tls_context()
        if context is None:
            return tcp.Server(sock, protocol, client, server, number, reactor)
        return HttpsConnection(
            TlsSocket(sock, context, scratch=self._tls_scratch), protocol, client, server, number, reactor
        )


class HttpsConnection(tcp.Server):  # type: ignore[misc]
    """A connection with TLS: Twisted's own over a `TlsSocket`, so that no second TLS library is needed.

    `TlsSocket.recv` returns all that one read has decrypted, so no plaintext is left of which the reactor does not
    know. Until the handshake is complete, nothing is written.
    """

    def doRead(self) -> Any:
        try:
            data = self.socket.recv(self.bufferSize)
        except BlockingIOError:
            return None
        except NotTls:
            self.server.failed_handshakes += 1
            self.socket.raw.send(_PLAIN_ANSWER)
            return main.CONNECTION_DONE
        except OSError as error:
            if isinstance(error, ssl.SSLError) and not self.socket.is_established:
                self.server.failed_handshakes += 1
                logger.info("TLS handshake of an HTTP client failed: %s", error.reason or error, extra=BY_PEER)
            return main.CONNECTION_LOST
        return self._dataReceived(data)

    def writeSomeData(self, data: bytes) -> Any:
        # What was not sent comes first in the next call, as `TlsSocket.sendmsg` needs it.
        try:
            return self.socket.sendmsg([data])
        except BlockingIOError:
            return 0
        except OSError:
            return main.CONNECTION_LOST


_PLAIN: Final = b"This server takes only HTTPS: write https:// before its address.\n"
_PLAIN_ANSWER: Final = (
    b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b"
    % (len(_PLAIN), _PLAIN)
)


def http_url(listen: str, listening: socket.socket, is_tls: bool) -> str:
    """Return the address of the HTTP server for people and programs."""
    host = split_address(listen)[0] or listening.getsockname()[0]
    return f"{'https' if is_tls else 'http'}://{address_text(host, listening.getsockname()[1])}"
