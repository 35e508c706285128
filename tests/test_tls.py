"""TLS over a pair of sockets: all bytes arrive, no plaintext is forgotten, and every failure is told."""

from __future__ import annotations

import random
import select
import socket
import ssl
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.certificates import Authority
from tests.scale import seeded
from tfmq.client.connection.addresses import BrokerAddress
from tfmq.client.connection.tls import ClientTlsSocket
from tfmq.config import load
from tfmq.errors import ConfigError
from tfmq.server.server import tls_context
from tfmq.tls import READ_BYTES, WRITE_BYTES, NotTls, TlsSocket, client_context, server_context

SECONDS = 10.0


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    for each in (one, other):
        each.setblocking(False)
        each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
    with one, other:
        yield one, other


class Connected:
    """A server and a client after their handshake, over a pair of sockets with small buffers."""

    def __init__(self, authority: Authority, sockets: tuple[socket.socket, socket.socket]) -> None:
        pair = authority.issue("localhost")
        self.server = TlsSocket(sockets[0], server_context(*pair))
        self.client = TlsSocket(sockets[1], client_context(authority.ca), server_hostname="localhost")
        self.client.start()
        while not (self.server.is_established and self.client.is_established):
            for end in (self.server, self.client):
                with pytest.raises(BlockingIOError):
                    end.recv_into(memoryview(bytearray(10)))


@pytest.fixture
def connected(authority: Authority, sockets: tuple[socket.socket, socket.socket]) -> Connected:
    return Connected(authority, sockets)


def move(sender: TlsSocket, buffers: Sequence[bytes], receiver: TlsSocket, read: Callable[[TlsSocket], bytes]) -> bytes:
    """Send the buffers as a connection does, and receive only when the system or `is_buffered` says that it may."""
    queue = deque(map(memoryview, buffers))
    left, received = sum(map(len, buffers)), bytearray()
    while left:
        if queue:
            try:
                sent = sender.sendmsg(list(queue))
            except BlockingIOError:
                sent = 0
            while sent:
                first = queue.popleft()
                if sent < len(first):
                    queue.appendleft(first[sent:])
                sent -= min(sent, len(first))
        while receiver.is_buffered or select.select([receiver.raw], [], [], 0 if queue else SECONDS)[0]:
            try:
                data = read(receiver)
            except BlockingIOError:
                break
            received += data
            left -= len(data)
            if not left:
                break
    return bytes(received)


def read_into(size: int) -> Callable[[TlsSocket], bytes]:
    def read(end: TlsSocket) -> bytes:
        room = bytearray(size)
        return bytes(room[: end.recv_into(memoryview(room))])

    return read


def read_into_two(end: TlsSocket) -> bytes:
    first, second = bytearray(7), bytearray(30_000)
    count = end.recvmsg_into([memoryview(first), memoryview(second)])[0]
    return bytes((first + second)[:count])


READERS = {
    "all": lambda end: end.recv(1),
    "much": read_into(4 * READ_BYTES),
    "little": read_into(1000),
    "two": read_into_two,
}


@pytest.mark.parametrize("reader", READERS)
def test_buffers_of_any_size_arrive_whole_through_a_slow_socket(connected: Connected, reader: str) -> None:
    chance: random.Random = seeded(f"tls-{reader}")
    sizes = [
        1,
        2,
        WRITE_BYTES - 1,
        WRITE_BYTES,
        WRITE_BYTES + 1,
        5 * WRITE_BYTES,
        *chance.choices(range(1, 9000), k=200),
    ]
    chance.shuffle(sizes)
    buffers = [chance.randbytes(size) for size in sizes]
    ends = (connected.server, connected.client)
    for sender, receiver in (ends, ends[::-1]):
        assert move(sender, buffers, receiver, READERS[reader]) == b"".join(buffers)


def test_what_is_sent_cannot_be_read_on_the_way(
    authority: Authority, sockets: tuple[socket.socket, socket.socket]
) -> None:
    connected = Connected(authority, sockets)
    connected.client.sendmsg([b"a secret " * 100])
    assert b"secret" not in sockets[0].recv(1 << 20)


def test_nothing_is_sent_before_the_handshake(
    authority: Authority, sockets: tuple[socket.socket, socket.socket]
) -> None:
    server = TlsSocket(sockets[0], server_context(*authority.issue("localhost")))
    with pytest.raises(BlockingIOError):
        server.sendmsg([b"early"])
    with pytest.raises(BlockingIOError):
        sockets[1].recv(1)


@pytest.mark.parametrize("read", [READERS["all"], READERS["much"]], ids=["recv", "recv_into"])
def test_the_end_of_a_stream_is_told_once_all_of_it_is_read(
    connected: Connected, read: Callable[[TlsSocket], bytes]
) -> None:
    connected.server.sendmsg([b"last"])
    connected.server.shutdown(socket.SHUT_WR)
    assert [read(connected.client), read(connected.client)] == [b"last", b""]


@pytest.mark.parametrize("read", [READERS["all"], READERS["much"]], ids=["recv", "recv_into"])
def test_what_was_received_before_an_error_is_read_before_it(
    connected: Connected, sockets: tuple[socket.socket, socket.socket], read: Callable[[TlsSocket], bytes]
) -> None:
    connected.server.sendmsg([b"complete"])
    sockets[0].send(b"\x17\x03\x03\x00\x20" + b"x" * 32)
    assert read(connected.client) == b"complete"
    for _ in range(2):
        with pytest.raises(ssl.SSLError):
            read(connected.client)


def test_the_end_that_came_with_data_is_told_although_the_connection_stays_open(
    connected: Connected, sockets: tuple[socket.socket, socket.socket]
) -> None:
    connected.client.sendmsg([b"last"])
    with pytest.raises(ssl.SSLWantReadError):
        connected.client._ssl.unwrap()  # type: ignore[union-attr]
    connected.client._flush()
    read = read_into(100_000)
    assert read(connected.server) == b"last"
    assert connected.server.is_buffered
    assert read(connected.server) == b""


def test_records_with_little_in_them_do_not_keep_a_reader_busy(
    connected: Connected, sockets: tuple[socket.socket, socket.socket]
) -> None:
    for each in sockets:
        each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    for _ in range(2000):
        connected.client._encrypt(connected.client._ssl, [b"x"], 0)  # type: ignore[arg-type]
    connected.client._flush()
    taken = len(read_into(10_000)(connected.server))
    assert 0 < taken <= 14_096 / 22, "about as much ciphertext as there is room"


def test_after_ctrl_c_in_the_middle_of_a_send_nothing_more_is_sent(
    authority: Authority, sockets: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    connected = Connected(authority, sockets)
    client = ClientTlsSocket(sockets[1], client_context(authority.ca), BrokerAddress("localhost", 1))
    client.__dict__.update({**connected.client.__dict__, "_lock": client._lock, "_sending": False})

    def interrupt() -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(client, "_flush", interrupt)
    with pytest.raises(KeyboardInterrupt):
        client.sendmsg([b"interrupted"])
    monkeypatch.undo()
    with pytest.raises(ConnectionResetError):
        client.sendmsg([b"interrupted"])


def test_a_stream_that_was_cut_is_no_whole_record(
    connected: Connected, sockets: tuple[socket.socket, socket.socket]
) -> None:
    connected.server.sendmsg([b"x" * 5000])
    data = sockets[1].recv(100)
    sockets[0].close()
    one, other = socket.socketpair()
    with one, other:
        connected.client.raw = other
        one.sendall(data)
        one.close()
        with pytest.raises(BlockingIOError):
            connected.client.recv(1000)
        assert connected.client.recv(1000) == b""


@pytest.mark.parametrize("length", [None, 0xFFFF])
def test_a_handshake_has_an_object_of_openssl_as_soon_as_its_first_record_is_complete_or_too_long(
    authority: Authority, sockets: tuple[socket.socket, socket.socket], length: int | None
) -> None:
    server = TlsSocket(sockets[0], server_context(*authority.issue("localhost")))
    client = TlsSocket(sockets[1], client_context(authority.ca), server_hostname="localhost")
    client.start()
    hello = sockets[0].recv(READ_BYTES)
    if length is not None:
        hello = hello[:3] + length.to_bytes(2, "big")
    for number, byte in enumerate(hello):
        assert server._ssl is None, f"after {number} of {len(hello)} bytes"
        sockets[1].send(bytes([byte]))
        with pytest.raises(BlockingIOError if length is None else OSError):
            server.recv_into(memoryview(bytearray(10)))
    assert server._ssl is not None
    if length is None:
        with pytest.raises(BlockingIOError):
            client.recv(10)
        assert client.is_established


@pytest.mark.parametrize("start", [b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\x40rest of a frame"])
def test_bytes_that_are_no_tls_are_told_with_their_beginning(
    authority: Authority, sockets: tuple[socket.socket, socket.socket], start: bytes
) -> None:
    for end in (
        TlsSocket(sockets[0], server_context(*authority.issue("localhost"))),
        TlsSocket(sockets[0], client_context(authority.ca), server_hostname="localhost"),
    ):
        sockets[1].send(start)
        with pytest.raises(NotTls) as caught:
            end.recv_into(memoryview(bytearray(100)))
        assert caught.value.start == start


def test_a_changed_byte_ends_the_connection(connected: Connected, sockets: tuple[socket.socket, socket.socket]) -> None:
    connected.client.sendmsg([b"a message"])
    data = bytearray(sockets[0].recv(1000))
    data[-5] ^= 1
    one, other = socket.socketpair()
    with one, other:
        connected.server.raw = other
        one.sendall(data)
        with pytest.raises(ssl.SSLError):
            connected.server.recv_into(memoryview(bytearray(100)))


def test_a_version_before_1_2_is_refused(authority: Authority, sockets: tuple[socket.socket, socket.socket]) -> None:
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.load_verify_locations(authority.ca)
    with pytest.warns(DeprecationWarning):
        old.minimum_version, old.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
    old.set_ciphers("DEFAULT:@SECLEVEL=0")
    TlsSocket(sockets[1], old, server_hostname="localhost").start()
    with pytest.raises(ssl.SSLError, match="UNSUPPORTED_PROTOCOL"):
        TlsSocket(sockets[0], server_context(*authority.issue("localhost"))).recv_into(memoryview(bytearray(100)))


# Files that cannot be used


@pytest.fixture
def encrypted(authority: Authority, tmp_path: Path) -> str:
    from cryptography.hazmat.primitives import serialization

    key = serialization.load_pem_private_key(Path(authority.issue("localhost").key).read_bytes(), None)
    path = tmp_path / "encrypted.key"
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    return str(path)


def test_a_wrong_file_is_one_sentence_that_names_it(authority: Authority, encrypted: str, tmp_path: Path) -> None:
    good, other = authority.issue("localhost"), authority.issue("localhost")
    text, missing = tmp_path / "text.pem", str(tmp_path / "missing.pem")
    text.write_text("nothing of the kind")
    cut = tmp_path / "cut.pem"
    cut.write_text(Path(good.certificate).read_text()[:200])
    for files, words in (
        ((missing, good.key), ["server.tls_certificate", missing, "No such file"]),
        ((str(text), good.key), ["server.tls_certificate", str(text), "no certificate"]),
        ((str(cut), good.key), ["server.tls_certificate", str(cut), "cannot be used"]),
        ((good.certificate, missing), ["server.tls_key", missing, "No such file"]),
        ((good.certificate,), ["server.tls_key is not set", "no private key"]),
        ((good.certificate, other.key), ["server.tls_key", other.key, "does not belong"]),
        ((good.certificate, encrypted), ["server.tls_key", encrypted, "passphrase"]),
        ((*good, missing), ["server.tls_client_ca", missing, "No such file"]),
        ((*good, str(text)), ["server.tls_client_ca", str(text), "no certificate"]),
        ((*good, str(cut)), ["server.tls_client_ca", str(cut), "cannot be used"]),
    ):
        with pytest.raises(ConfigError) as caught:
            server_context(*files)
        sentence = caught.value.sentence
        assert all(word in sentence for word in words), (words, sentence)
        assert sentence.endswith((".", "..")) and "\n" not in sentence
    with pytest.raises(ConfigError, match=f"ca is {missing}"):
        client_context(missing)


@pytest.mark.parametrize("days", [30, -1])
def test_a_server_says_that_its_clients_will_refuse_its_certificate(
    authority: Authority, days: int, caplog: pytest.LogCaptureFixture
) -> None:
    pair = authority.issue("localhost", days=days)
    for client_ca in ("", authority.ca):
        settings = {
            "server.tls_certificate": pair.certificate, "server.tls_key": pair.key, "server.tls_client_ca": client_ca,
        }  # fmt: skip
        caplog.clear()
        assert tls_context(load(flags=settings)) is not None
        expected = "" if days > 0 else f"{pair.certificate}, which clients may refuse: certificate has expired. Replace"
        assert bool(caplog.messages) == bool(expected) and expected in caplog.text


def test_a_client_verifies_the_certificate_and_the_name(authority: Authority) -> None:
    for context in (client_context(), client_context(authority.ca)):
        assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, True)
        assert context.minimum_version == ssl.TLSVersion.TLSv1_2
