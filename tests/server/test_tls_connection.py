"""TLS connections of the server: nothing is forgotten in buffers, nothing spins, and nothing leaves without TLS."""

from __future__ import annotations

import gc
import select
import socket
import ssl
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from tests.certificates import Authority
from tests.server.fakes import Net
from tests.server.test_transport import Sink, frame
from tfmq.errors import NotAllowed, TfmqError
from tfmq.server.tls_connection import TlsConnection
from tfmq.server.transport import LINGER_SECONDS
from tfmq.tls import TlsSocket, client_context, server_context


class TlsNet(Net):
    """Connections over pairs of sockets, which begin with a TLS handshake."""

    def __init__(self, authority: Authority) -> None:
        super().__init__()
        self.authority = authority
        self.context = server_context(*authority.issue("localhost"))
        self.sockets: list[socket.socket] = []

    def accept(self, protocol: Any) -> tuple[TlsConnection, socket.socket]:
        """A connection, and the socket of its client."""
        near, far = socket.socketpair()
        self.sockets += [near, far]
        for each in (near, far):
            each.setblocking(False)
        connection = TlsConnection(
            TlsSocket(near, self.context), protocol, ("127.0.0.1", 50_000), None, 1, self.reactor, self.traffic
        )
        protocol.makeConnection(connection)
        return connection, far

    def client(self, raw: socket.socket) -> TlsSocket:
        end = TlsSocket(raw, client_context(self.authority.ca), server_hostname="localhost")
        end.start()
        return end

    def shake_hands(self, connection: TlsConnection, client: TlsSocket) -> None:
        while not client.is_established:
            self.turn_of(connection)
            with pytest.raises(BlockingIOError):
                client.recv(1)
        self.turn_of(connection)

    def turn_of(self, connection: TlsConnection) -> int:
        """What the reactor does for a connection until nothing is ready; how often it was writable in vain."""
        in_vain = 0
        for _ in range(1000):
            if connection.disconnected:
                break
            raw = getattr(connection.socket, "raw", connection.socket)
            ready = False
            if connection in self.reactor.readers and select.select([raw], [], [], 0)[0]:
                self.poll(connection)
                ready = True
            elif connection in self.reactor.writers and select.select([], [raw], [], 0)[1]:
                before = connection.unsent_bytes
                self.write(connection)
                in_vain += connection.unsent_bytes == before
                ready = True
            self.reactor.advance(0)
            if not ready:
                break
        return in_vain


@pytest.fixture
def net(authority: Authority) -> Iterator[TlsNet]:
    made = TlsNet(authority)
    yield made
    for each in made.sockets:
        each.close()


def received(raw: socket.socket) -> bytes:
    data = bytearray()
    try:
        while piece := raw.recv(1 << 20):
            data += piece
    except BlockingIOError:
        pass
    return bytes(data)


def send_one_record(client: TlsSocket, monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Send many frames in one record, and return their contents. Each read has room for a quarter of it, and the system
    has nothing more after the first one."""
    monkeypatch.setattr("tfmq.server.transport.CROWDED_FACTOR", -1)
    contents = [bytes([97 + number % 26]) * 100 for number in range(150)]
    client.sendmsg([b"".join(map(frame, contents))])
    return contents


def test_frames_behind_a_full_buffer_are_handled_without_more_bytes(
    net: TlsNet, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = Sink()
    connection, raw = net.accept(sink)
    client = net.client(raw)
    net.shake_hands(connection, client)
    contents = send_one_record(client, monkeypatch)
    net.turn_of(connection)
    assert sink.frames == contents
    connection.abortConnection()
    net.reactor.advance(0)
    assert net.all_given_back()


def test_a_paused_connection_goes_on_with_what_it_has_decrypted(net: TlsNet, monkeypatch: pytest.MonkeyPatch) -> None:
    class Pausing(Sink):
        def frame_received(self, view: memoryview, hold: Any) -> None:
            super().frame_received(view, hold)
            self.transport.pause("test")

    sink = Pausing()
    connection, raw = net.accept(sink)
    client = net.client(raw)
    net.shake_hands(connection, client)
    contents = send_one_record(client, monkeypatch)
    for _ in range(10):
        net.turn_of(connection)
        connection.resume("test")
        net.reactor.advance(0)
    assert sink.frames == contents


def test_what_is_sent_before_the_handshake_waits_for_it_without_spinning(net: TlsNet) -> None:
    class Greeting(Sink):
        def makeConnection(self, transport: Any) -> None:
            super().makeConnection(transport)
            transport.send([b"goodbye"])
            transport.end()

    connection, raw = net.accept(Greeting())
    net.reactor.advance(0)
    assert connection not in net.reactor.writers
    assert received(raw) == b""
    client = net.client(raw)
    while not client.is_established:
        assert net.turn_of(connection) == 0
        try:
            assert client.recv(1) == b"goodbye"
        except BlockingIOError:
            continue
        return
    net.turn_of(connection)
    assert client.recv(1) == b"goodbye"


def test_a_connection_without_a_handshake_costs_no_tls_and_is_closed(net: TlsNet) -> None:
    sink = Sink()
    connection, _ = net.accept(sink)
    assert connection.socket._ssl is None
    connection.end()
    net.reactor.advance(LINGER_SECONDS + 1)
    assert sink.lost == 1


def test_a_client_without_tls_gets_its_error_without_tls(net: TlsNet) -> None:
    errors: list[TfmqError] = []

    class Refusing(Sink):
        def frame_refused(self, error: TfmqError, start: bytes) -> None:
            errors.append(error)
            self.transport.send([b"no TLS"])
            super().frame_refused(error, start)  # type: ignore[arg-type]

    sink = Refusing()
    connection, raw = net.accept(sink)
    raw.send(frame(b"a request"))
    net.turn_of(connection)
    assert received(raw) == b"no TLS"
    assert isinstance(errors[0], NotAllowed)
    assert (sink.frames, sink.refused) == ([], [frame(b"a request")])


def test_after_a_failed_handshake_nothing_but_the_alert_is_sent(net: TlsNet) -> None:
    class Greeting(Sink):
        def makeConnection(self, transport: Any) -> None:
            super().makeConnection(transport)
            transport.send([b"a secret"])

    sink = Greeting()
    connection, raw = net.accept(sink)
    net.turn_of(connection)
    raw.send(b"\x16\x03\x01\x00\x05hello")
    net.turn_of(connection)
    connection.send([b"another secret"])
    net.turn_of(connection)
    net.reactor.advance(LINGER_SECONDS + 1)
    sent = received(raw)
    assert sent[:1] == b"\x15"
    assert b"secret" not in sent
    assert (sink.frames, sink.lost) == ([], 1)


def test_a_record_that_was_changed_closes_the_connection_and_sends_nothing_more(net: TlsNet) -> None:
    sink = Sink()
    connection, raw = net.accept(sink)
    client = net.client(raw)
    net.shake_hands(connection, client)
    received(raw)
    connection.send([b"a secret"])
    raw.send(b"\x17\x03\x03\x00\x20" + b"x" * 32)
    net.poll(connection)
    assert sink.lost == 1
    assert b"secret" not in received_or_closed(raw)


def received_or_closed(raw: socket.socket) -> bytes:
    try:
        return received(raw)
    except ConnectionResetError:
        return b""


def test_replies_to_a_slow_reader_wait_for_it_encrypted_once(net: TlsNet) -> None:
    sink = Sink()
    connection, raw = net.accept(sink)
    client = net.client(raw)
    net.shake_hands(connection, client)
    replies = [bytes([number]) * 100_000 for number in range(40)]
    for reply in replies:
        connection.send([reply[:10], reply[10:]])
    net.reactor.advance(0)
    assert connection.is_waiting
    data = bytearray()
    while len(data) < 4_000_000:
        net.turn_of(connection)
        try:
            data += client.recv(1)
        except BlockingIOError:
            continue
    assert bytes(data) == b"".join(replies)
    assert (connection.unsent_bytes, connection.is_waiting) == (0, False)


def test_a_chain_that_the_system_does_not_accept_at_once_is_sent_without_more_bytes_of_the_client(net: TlsNet) -> None:
    net.context = server_context(*net.authority.issue("localhost", *(f"name-{n}.example" for n in range(3_000))))
    sink = Sink()
    connection, raw = net.accept(sink)
    connection.socket.raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    client = net.client(raw)
    net.poll(connection)
    assert connection in net.reactor.writers
    net.shake_hands(connection, client)
    assert connection not in net.reactor.writers
    client.sendmsg([frame(b"a request")])
    net.turn_of(connection)
    connection.send([b"a reply"])
    net.turn_of(connection)
    assert (sink.frames, client.recv(1)) == ([b"a request"], b"a reply")


@pytest.mark.parametrize("is_reset", [False, True])
def test_a_lost_connection_keeps_nothing_of_openssl(net: TlsNet, is_reset: bool) -> None:
    connection, raw = net.accept(Sink())
    net.shake_hands(connection, net.client(raw))
    tls = weakref.ref(connection.socket)
    gc.disable()
    try:
        raw.close()
        if is_reset:
            connection.socket.raw = Reset(connection.socket.raw)
        net.turn_of(connection)
        assert connection.disconnected
        assert tls() is None
    finally:
        gc.enable()


class Reset:
    """A socket whose peer has reset the connection."""

    def __init__(self, raw: socket.socket) -> None:
        self.raw = raw

    def recv_into(self, buffer: memoryview) -> int:
        raise ConnectionResetError(104, "reset")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)


@pytest.mark.parametrize("method", ["recv_into", "sendmsg"])
def test_the_time_of_encryption_is_charged(net: TlsNet, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    connection, raw = net.accept(Sink())
    client = net.client(raw)
    net.shake_hands(connection, client)
    work = getattr(TlsSocket, method)

    def take_long(*arguments: Any) -> Any:
        net.reactor.rightNow += 0.03
        return work(*arguments)

    monkeypatch.setattr(TlsSocket, method, take_long)
    net.turn.handling_seconds, before = 0.0, connection.served_until
    client.sendmsg([frame(b"a request")])
    connection.send([b"a reply"])
    net.turn_of(connection)
    assert net.turn.handling_seconds >= 0.03
    assert connection.served_until > before + 0.3


def test_only_tls_1_2_and_later_is_offered(net: TlsNet) -> None:
    assert net.context.minimum_version == ssl.TLSVersion.TLSv1_2
