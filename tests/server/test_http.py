"""The HTTP server: its routes, whom it refuses, its limits, and that it answers while the broker recovers."""

from __future__ import annotations

import http.client
import json
import logging
import os
import socket
import ssl
from collections.abc import Iterable, Iterator
from pathlib import Path
from threading import Event
from typing import Any
from urllib.parse import urlsplit

import pytest
from twisted.internet.address import IPv4Address
from twisted.internet.defer import Deferred
from twisted.internet.threads import deferToThreadPool

from journal.clock import SystemClock
from journal.disk import RealDisk
from tests.certificates import Authority
from tests.e2e import commands as programs
from tests.reactor import a_reactor, play
from tests.server.fakes import FakeReactor
from tests.server.wire import PATIENCE_SECONDS, Wire, running
from tfmq import errors, limits
from tfmq.broker.request_handler import RequestHandler
from tfmq.config import Config, load, split_address
from tfmq.protocol import commands
from tfmq.server import health
from tfmq.server.http import ROUTES, STATUS_OF_ERRORS, HttpServer, _Channel, find_route, is_own_host
from tfmq.server.http_message import HEADERS, HttpAnswer, HttpContext, HttpRequest
from tfmq.server.reactor import TurnReactor
from tfmq.server.server import Server, listen_for_http
from tfmq.settings_table import Http
from tfmq.tls import server_context

HTTP = ("--set", "http.listen=127.0.0.1:0")


def url_of(address: tuple[str, int]) -> str:
    """The address of the HTTP server of the broker at `address`."""
    wire = Wire(address)
    try:
        url: str = wire.ask(commands.Status())[0]["http"]
    finally:
        wire.close()
    return url


class Page:
    """An answer: `status`, `headers` and `body`."""

    def __init__(self, url: str, path: str, method: str = "GET", body: bytes | None = None, **headers: str) -> None:
        where = urlsplit(url)
        connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=PATIENCE_SECONDS)
        try:
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            self.status, self.headers, self.body = response.status, dict(response.getheaders()), response.read()
        finally:
            connection.close()


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the HTTP server of a broker that is whole."""
    with running(tmp_path_factory.mktemp("http") / "data", *HTTP) as (process, address):
        yield url_of(address)
        _, _, log = process.stop()
        assert "Traceback" not in log
        assert "HTTP at http://127.0.0.1:" in log


# Answers


def test_live_and_ready_are_answered(url: str) -> None:
    assert Page(url, "/live").status == 200
    ready = Page(url, "/ready")
    assert (ready.status, json.loads(ready.body)) == (200, {"ready": True, "reasons": []})


@pytest.mark.parametrize("path", ["/ready", "/nothing"])
def test_every_answer_forbids_caching_guessing_and_framing(url: str, path: str) -> None:
    page = Page(url, path)
    assert dict(HEADERS).items() <= page.headers.items()
    assert "frame-ancestors 'none'" in page.headers["Content-Security-Policy"]


def test_a_head_request_has_no_body(url: str) -> None:
    page = Page(url, "/live", "HEAD")
    assert (page.status, page.body) == (200, b"")


def test_an_unknown_address_and_a_wrong_method_are_one_sentence_each(url: str) -> None:
    page = Page(url, "/nothing?x=1")
    assert page.status == 404 and page.body.decode().count("\n") == 1 and b"/ready" in page.body
    page = Page(url, "/live", "DELETE")
    assert page.status == 405 and page.headers["Allow"] == "GET" and page.body.decode().count("\n") == 1


def test_a_connection_answers_one_request_after_another(url: str) -> None:
    where = urlsplit(url)
    with socket.create_connection((where.hostname or "", where.port or 0), PATIENCE_SECONDS) as connection:
        request = f"GET /live HTTP/1.1\r\nHost: {where.netloc}\r\n\r\n".encode()
        connection.sendall(request * 3)
        received = b""
        while received.count(b"200 OK") < 3:
            received += connection.recv(65_536)


def test_parts_of_a_path_are_passed_on() -> None:
    routes = (*ROUTES, ROUTES[0]._replace(path="/topics/{topic}/{partition}", methods=("GET", "POST")))
    found = find_route("POST", "/topics/a%2Fb/0", routes)
    assert not isinstance(found, HttpAnswer)
    assert found[1] == {"topic": "a%2Fb", "partition": "0"}
    wrong = find_route("PUT", "/topics/a/0", routes)
    assert isinstance(wrong, HttpAnswer) and ("Allow", "GET, POST") in wrong.headers
    missing = find_route("GET", "/topics/a", routes)
    assert isinstance(missing, HttpAnswer) and missing.status == 404


# The Host header


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST.:1", "127.0.0.1:8368", "127.9.9.9", "[::1]:8368", "[::1]"])
def test_names_of_loopback_are_this_server(host: str) -> None:
    assert is_own_host(host, Http())


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8368", "127.0.0.1.evil.example", "localhost.evil.example", "10.0.0.5", "", ":"],
)
def test_other_names_are_not_this_server(host: str) -> None:
    assert not is_own_host(host, Http())


def test_outside_of_loopback_numbers_the_machine_and_configured_names_are_this_server() -> None:
    anywhere = Http("0.0.0.0:8368", "broker.example, tfmq")
    for host in ("10.0.0.5:8368", "[fd00::5]", socket.gethostname(), "broker.example:1", "TFMQ"):
        assert is_own_host(host, anywhere), host
    for host in ("evil.example", "example", "broker.example.evil.example", ""):
        assert not is_own_host(host, anywhere), host
    assert is_own_host("node7.example", Http("node7.example:8368"))


def test_a_request_for_another_host_or_for_none_is_refused(url: str) -> None:
    page = Page(url, "/ready", Host="evil.example")
    assert page.status == 421 and b"http.hosts" in page.body
    where = urlsplit(url)
    for hosts in ("", "Host: localhost\r\nHost: evil.example\r\n"):
        with socket.create_connection((where.hostname or "", where.port or 0), PATIENCE_SECONDS) as connection:
            connection.sendall(f"GET /ready HTTP/1.1\r\n{hosts}\r\n".encode())
            assert connection.recv(65_536).startswith(b"HTTP/1.1 421 ")


# Limits


def exchange(url: str, request: bytes) -> bytes:
    """Everything that the server sends until it closes the connection."""
    where = urlsplit(url)
    received = b""
    with socket.create_connection((where.hostname or "", where.port or 0), PATIENCE_SECONDS) as connection:
        try:
            connection.sendall(request)
            while data := connection.recv(65_536):
                received += data
        except ConnectionResetError:
            pass
    return received


HEAD = b"POST /live HTTP/1.1\r\nHost: localhost\r\n"


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (HEAD + b"Content-Length: %d\r\n\r\n" % (limits.HTTP_BODY_BYTES + 1), b"413"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"8000\r\n%b\r\n" % bytes(0x8000) * 3, b"413"),
        (HEAD + b"X: y\r\n" * (limits.HTTP_HEADERS + 1) + b"\r\n", b"400"),
        (HEAD + b"X: " + b"y" * limits.HTTP_HEADER_BYTES, b"431"),
        (b"GET /" + b"y" * limits.HTTP_HEADER_BYTES, b"431"),
        (HEAD + (b"X: " + b"y" * 8000 + b"\r\n") * 3, b"400"),
        (HEAD + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", b"400"),
        (b"\0" * 100 + b"\r\n\r\n", b"400"),
        (b"\x16\x03\x01\x02\x00\x01", b"400"),
    ],
    ids=["body", "chunks", "headers", "header", "path", "all headers", "two lengths", "no HTTP", "TLS"],
)
def test_a_request_that_is_too_large_or_malformed_is_refused(url: str, request_: bytes, status: bytes) -> None:
    assert exchange(url, request_).startswith(b"HTTP/1.1 " + status)
    assert Page(url, "/live").status == 200


def test_connections_above_the_limit_are_closed(url: str) -> None:
    where = urlsplit(url)
    address = (where.hostname or "", where.port or 0)
    held = [socket.create_connection(address, PATIENCE_SECONDS) for _ in range(limits.HTTP_CONNECTIONS)]
    try:
        with socket.create_connection(address, PATIENCE_SECONDS) as refused:
            assert refused.recv(1) == b""
    finally:
        for each in held:
            each.close()


NO_PAGE: Any = None
NO_BROKER = HttpContext(Config, dict, lambda *arguments: None, lambda: None, list, str, NO_PAGE, Deferred)


class FakeServer:
    """What a `_Channel` uses of its server."""

    def __init__(self) -> None:
        self.reactor = FakeReactor()
        self.channels: set[Any] = set()
        self.context = NO_BROKER


class FakeTransport:
    """A connection that its other end never closes.

    Twisted's own one loads twisted.trial, and pytest then reads Twisted's version from the disk at every test.
    """

    client = ("127.0.0.1", 1)
    disconnected = disconnecting = False

    def __init__(self) -> None:
        self.written = bytearray()
        self.send: Any = None

    def write(self, data: bytes) -> None:
        self.written += data

    def writeSequence(self, parts: Iterable[bytes]) -> None:
        self.written += b"".join(parts)

    def value(self) -> bytes:
        return bytes(self.written)

    def abortConnection(self) -> None:
        self.disconnected = True

    def getPeer(self) -> IPv4Address:
        return IPv4Address("TCP", *self.client)

    getHost = getPeer

    def registerProducer(self, producer: object, streaming: bool) -> None: ...
    def unregisterProducer(self) -> None: ...
    def loseConnection(self) -> None: ...
    def setTcpNoDelay(self, enabled: bool) -> None: ...


def connected() -> tuple[FakeServer, FakeTransport]:
    """A channel on a connection that is never closed by the other end; (its server, its transport)."""
    server, transport = FakeServer(), FakeTransport()
    channel = _Channel(server)  # type: ignore[arg-type]
    channel.makeConnection(transport)
    transport.send = channel.dataReceived
    return server, transport


def test_a_request_that_arrives_byte_by_byte_is_cut_off() -> None:
    server, transport = connected()
    for byte in b"GET /live HT":
        transport.send(bytes([byte]))
        server.reactor.advance(limits.HTTP_REQUEST_SECONDS / 11)
    assert transport.disconnected


def test_a_client_that_does_not_read_its_answer_is_cut_off() -> None:
    server, transport = connected()
    server.reactor.advance(limits.HTTP_REQUEST_SECONDS - 1)
    transport.send(b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert transport.value().startswith(b"HTTP/1.1 200 OK")
    server.reactor.advance(limits.HTTP_ANSWER_SECONDS - 1)
    assert not transport.disconnected
    server.reactor.advance(1)
    assert transport.disconnected


def test_an_error_of_a_handler_is_logged_and_not_shown(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(request: HttpRequest) -> HttpAnswer:
        raise RuntimeError("secret")

    monkeypatch.setattr("tfmq.server.http.find_route", lambda *asked: (ROUTES[0]._replace(handler=fail), {}))
    _, transport = connected()
    with caplog.at_level(logging.ERROR, "tfmq.server"):
        transport.send(b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert transport.value().startswith(b"HTTP/1.1 500 ") and b"secret" not in transport.value()
    assert "secret" in caplog.text


# The address


def test_a_taken_port_is_a_warning_for_the_default_and_an_error_for_an_address_that_was_set(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        assert listen_for_http(Config(http=Http(listen))) is None
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        ended = programs.tfmq_server("--set", f"http.listen={listen}")
        assert ended.code == 2 and f"The port {listen} of http.listen is taken" in ended.sentence
    assert listen_for_http(load(sets=["http.listen="])) is None


# The start


def test_a_broker_that_recovers_is_live_and_not_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "QUIET_SECONDS", 0.0)
    config = load(
        flags={"server.listen": "127.0.0.1:0", "server.data": str(tmp_path)}, sets=["http.listen=127.0.0.1:0"]
    )
    sockets: list[socket.socket] = []
    pages: dict[str, Page] = {}

    def listen(config: Config) -> socket.socket | None:
        listening = listen_for_http(config)
        sockets.extend([listening] if listening else [])
        return listening

    def recover(handler: RequestHandler) -> None:
        url = f"http://127.0.0.1:{sockets[0].getsockname()[1]}"
        slow = socket.create_connection(sockets[0].getsockname())  # does not keep others from being answered
        for path in ("/live", "/ready", "/metrics"):
            pages[path] = Page(url, path)
        slow.close()
        raise OSError("enough")

    monkeypatch.setattr("tfmq.server.server.listen_for_http", listen)
    monkeypatch.setattr(RequestHandler, "start", recover)
    with a_reactor() as reactor, pytest.raises(OSError, match="enough"):
        Server(config, reactor, RealDisk(), SystemClock(), os.urandom).start()
    assert pages["/live"].status == 200
    ready = pages["/ready"]
    assert (ready.status, json.loads(ready.body)["reasons"][0]["reason"]) == (503, "recovering")
    assert dict(HEADERS).items() <= ready.headers.items()
    assert pages["/metrics"].status == 503


def test_a_broker_with_a_full_disk_a_stopped_log_or_a_stop_is_live_and_not_ready(tmp_path: Path) -> None:
    """Each of these in a server of this process, where it can be brought about without a broken disk."""
    config = load(
        flags={"server.listen": "127.0.0.1:0", "server.data": str(tmp_path / "data")}, sets=["http.listen=127.0.0.1:0"]
    )

    async def story(reactor: Any) -> None:
        server = Server(config, reactor, RealDisk(), SystemClock(), os.urandom)
        server.start()
        broker = server._broker

        async def reasons() -> list[str]:
            async def page(path: str) -> Page:
                return await deferToThreadPool(reactor, reactor.getThreadPool(), Page, server.http_url, path)  # type: ignore[no-any-return]

            assert (await page("/live")).status == 200
            answer = await page("/ready")
            found = json.loads(answer.body)
            assert (answer.status == 200) == found["ready"] == (not found["reasons"])
            return [f"{each['reason']}: {each['detail']}" for each in found["reasons"]]

        def create_topic() -> None:
            wire = Wire(split_address(server.address))
            wire.ask(commands.CreateTopic("orders", 2, {}))
            wire.close()

        await deferToThreadPool(reactor, reactor.getThreadPool(), create_topic)
        assert await reasons() == []
        broker.full_disk.refused("orders-0", 100)
        assert await reasons() == ["disk_full: No space is left on the disk."]
        broker.full_disk.is_full = False
        for log in (broker.topics["orders"].partitions[1].log, broker.catalog.log, broker.delay_commands.partition.log):  # type: ignore[union-attr]
            log.stop("its disk failed")
        assert [each.partition(" takes")[0] for each in await reasons()] == [
            "log_stopped: The catalog",
            "log_stopped: The log of delayed messages",
            "log_stopped: orders-1",
        ]
        last_job, stopped = Event(), Deferred[None]()
        broker.run(last_job.wait, lambda result, error: None)
        server.stop(lambda: stopped.callback(None))
        try:
            assert await reasons() == ["stopping: The broker completes its work and stops."]
        finally:
            last_job.set()
        await stopped

    play(story, kind=TurnReactor)


# TLS


def test_https_uses_the_certificate_and_asks_for_that_of_the_client(tmp_path: Path, authority: Authority) -> None:
    server, client = authority.issue("localhost"), authority.issue("monitoring")
    settings = [*HTTP, *server.settings, "--set", f"server.tls_client_ca={authority.ca}"]
    with running(tmp_path / "data", *settings) as (process, _):
        assert process.process.stderr is not None
        port = int(next(line for line in process.process.stderr if "HTTP at https://" in line).rpartition(":")[2])

        def status(context: ssl.SSLContext) -> int:
            connection = http.client.HTTPSConnection("localhost", port, timeout=PATIENCE_SECONDS, context=context)
            try:
                for _ in range(2):  # on one connection
                    connection.request("GET", "/ready")
                    response = connection.getresponse()
                    response.read()
                return response.status
            finally:
                connection.close()

        context = ssl.create_default_context(cafile=authority.ca)
        with pytest.raises((ssl.SSLError, ConnectionError)):
            status(context)
        context.load_cert_chain(client.certificate, client.key)
        assert status(context) == 200
        plain = exchange(f"http://localhost:{port}", b"GET /ready HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert plain.startswith(b"HTTP/1.1 400 ") and b"https://" in plain


def test_a_large_answer_passes_tls_and_a_slow_reader(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    body = os.urandom(8 << 20)
    route = ROUTES[0]._replace(handler=lambda request: HttpAnswer(200, body))
    monkeypatch.setattr("tfmq.server.http.find_route", lambda *asked: (route, {}))
    pair = authority.issue("localhost")
    context = ssl.create_default_context(cafile=authority.ca)

    def read(port: int) -> bytes:
        with (
            socket.create_connection(("127.0.0.1", port), PATIENCE_SECONDS) as raw,
            context.wrap_socket(raw, server_hostname="localhost") as connection,
        ):
            connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            received = bytearray()
            while data := connection.recv(16_384):
                received += data
        return bytes(received).partition(b"\r\n\r\n")[2]

    async def story(reactor: Any) -> bytes:
        listening = socket.create_server(("127.0.0.1", 0))
        listening.setblocking(False)
        server_side = server_context(pair.certificate, pair.key)
        http_server = HttpServer(listening, reactor, NO_BROKER, lambda: server_side)
        try:
            received: bytes = await deferToThreadPool(
                reactor, reactor.getThreadPool(), read, listening.getsockname()[1]
            )
        finally:
            http_server.stop()
        return received

    assert play(story) == body


def test_only_errors_that_no_user_causes_are_answered_as_those_of_the_server() -> None:
    found: dict[int, set[str]] = {}
    for kind in errors.CLASSES:
        status = next((status for each, status in STATUS_OF_ERRORS if issubclass(kind, each)), 500)
        found.setdefault(status, set()).add(kind.code)
    transactions = {kind.code for kind in errors.CLASSES if issubclass(kind, errors.TransactionError)}
    other = {"unknown_transaction", "transaction_too_large"}
    assert found == {
        400: {"bad_request", "not_a_record"},
        401: {"login_failed"},
        403: {"not_allowed", "forbidden"},
        404: {"unknown_topic", "unknown_partition", "unknown_transaction", "unknown_schedule", "offset_out_of_range"},
        409: {*(transactions - other), "topic_exists", "fenced", "log_truncated"},
        413: {"message_too_large", "transaction_too_large"},
        501: {"not_supported", "unknown_command"},
        503: {
            *("busy", "disk_full", "storage_stopped", "store_failed", "closed", "abandoned", "connection_failed"),
            "not_primary",
        },
        504: {"timed_out"},
        # A producer or another end of the protocol does something wrong, and here that is the server itself.
        500: {
            *("error", "internal_error", "config_error", "damaged", "decode_failed", "delivery_failed"),
            *("unknown_producer", "sequence_gap", "stale_producer", "bad_frame", "version_mismatch"),
        },
    }
