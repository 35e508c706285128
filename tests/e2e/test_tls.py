"""TLS with real processes: every kind of client, and everything that must not connect."""

from __future__ import annotations

import asyncio
import random
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tfmq
import tfmq.aio
import tfmq.twisted
from tests.certificates import Authority, Pair
from tests.e2e import commands
from tests.reactor import play
from tests.server.test_main import refused
from tests.server.wire import running
from tfmq.errors import NOT_DONE, ConnectionFailed, NotAllowed
from tools.rigs.proxy import proxied

SECONDS = 20.0
PAYLOADS = [b"one", b"two", b"three " * 10_000]


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory, authority: Authority) -> Iterator[int]:
    """The port of a server whose certificate is valid for localhost only."""
    pair = authority.issue("localhost")
    with running(tmp_path_factory.mktemp("tls") / "data", *pair.settings) as (process, (_, port)):
        yield port
        assert "Traceback" not in process.stop()[2]


def address(port: int, authority: Authority, host: str = "localhost", pair: Pair | None = None) -> str:
    own = "" if pair is None else f"&certificate={pair.certificate}&key={pair.key}"
    return f"tfmqs://{host}:{port}?ca={authority.ca}{own}"


def blocking(servers: str, topic: str) -> list[bytes]:
    with tfmq.Producer(servers) as producer:
        for payload in PAYLOADS:
            producer.send(topic, payload).result()
    received: list[bytes] = []
    with tfmq.Consumer(servers, topics=topic, start="earliest") as consumer:
        while len(received) < len(PAYLOADS):
            received += [message.payload for message in consumer.poll(timeout=SECONDS)]
    return received


async def send_and_read(producer: Any, consumer: Any, topic: str) -> list[bytes]:
    async with producer as made:
        for payload in PAYLOADS:
            await made.send(topic, payload)
    received: list[bytes] = []
    async with consumer as made:
        while len(received) < len(PAYLOADS):
            received += [message.payload for message in await made.poll(timeout=SECONDS)]
    return received


def asynchronous(servers: str, topic: str) -> list[bytes]:
    async def story() -> list[bytes]:
        consumer = tfmq.aio.Consumer(servers, topics=topic, start="earliest")
        return await send_and_read(tfmq.aio.Producer(servers), consumer, topic)

    return asyncio.run(story())


def in_a_reactor(servers: str, topic: str) -> list[bytes]:
    async def story(reactor: Any) -> list[bytes]:
        consumer = tfmq.twisted.Consumer(servers, topics=topic, start="earliest", reactor=reactor)
        return await send_and_read(tfmq.twisted.Producer(servers, reactor=reactor), consumer, topic)

    result: list[bytes] = play(story)
    return result


def on_the_command_line(servers: str, topic: str) -> list[bytes]:
    sent = commands.tfmq("send", topic, *(payload.decode() for payload in PAYLOADS), servers=servers)
    assert sent.code == 0, sent.err
    return commands.tfmq("read", topic, servers=servers).out.splitlines()


@pytest.mark.parametrize("client", [blocking, asynchronous, in_a_reactor, on_the_command_line])
def test_every_kind_of_client_sends_and_reads(
    port: int, authority: Authority, client: Callable[[str, str], list[bytes]]
) -> None:
    assert client(address(port, authority), client.__name__) == PAYLOADS


def test_large_messages_arrive_whole(port: int, authority: Authority) -> None:
    chance, servers = random.Random(1), address(port, authority)
    payloads = [chance.randbytes(size) for size in (7_000_000, 1, 3_000_001, 16_384, 5_000_000)]
    with tfmq.Producer(servers) as producer:
        producer.send_many("large", payloads).result(SECONDS)
    received: list[bytes] = []
    with tfmq.Consumer(servers, topics="large", start="earliest") as consumer:
        while len(received) < len(payloads):
            received += [bytes(message.payload) for message in consumer.poll(timeout=SECONDS)]
    assert received == payloads


def test_nothing_can_be_read_on_the_way(port: int, authority: Authority) -> None:
    passed = bytearray()

    def record(piece: bytes) -> bytes:
        passed.extend(piece)
        return piece

    with proxied(f"127.0.0.1:{port}") as proxy:
        proxy.up = proxy.down = record
        servers = address(int(proxy.address.rpartition(":")[2]), authority)
        with tfmq.Producer(servers) as producer:
            producer.send("confidential", b"a secret message").result(SECONDS)
        with tfmq.Consumer(servers, topics="confidential", start="earliest") as consumer:
            assert [message.text for message in consumer.poll(timeout=SECONDS)] == ["a secret message"]
    assert len(passed) > 1000
    for words in (b"confidential", b"secret", b"TFMQ", b"tfmq"):
        assert words not in passed


# What must not connect


def refusal(servers: str) -> str:
    """The sentence with which a client refuses to connect, at once."""
    begun = time.monotonic()
    with pytest.raises(ConnectionFailed) as caught, tfmq.Admin(servers) as admin:
        admin.topics()
    assert (caught.value.retriable, caught.value.outcome) == (False, NOT_DONE)
    assert time.monotonic() - begun < SECONDS / 2
    return caught.value.sentence


def test_a_server_of_an_unknown_authority_is_refused(port: int, tmp_path: Path) -> None:
    for servers in (f"tfmqs://localhost:{port}", address(port, Authority(tmp_path))):
        sentence = refusal(servers)
        assert f"The certificate of tfmqs://localhost:{port} is not accepted" in sentence
        assert "?ca=FILE" in sentence


def test_a_server_with_a_certificate_for_another_name_is_refused(port: int, authority: Authority) -> None:
    sentence = refusal(address(port, authority, "127.0.0.1"))
    assert "not valid for '127.0.0.1'" in sentence
    assert "by a name that is in the certificate" in sentence


def test_a_server_with_an_expired_certificate_is_refused(tmp_path: Path, authority: Authority) -> None:
    with running(tmp_path / "data", *authority.issue("localhost", days=-1).settings) as (_, (_, port)):
        sentence = refusal(address(port, authority))
    assert "expired" in sentence
    assert "Renew it" in sentence


def test_a_client_without_tls_is_told_to_use_it(port: int) -> None:
    with pytest.raises(NotAllowed, match="tfmqs://"), tfmq.Admin(f"localhost:{port}") as admin:
        admin.topics()
    ended = commands.tfmq("topic", "list", servers=f"localhost:{port}")
    assert ended.code != 0
    assert "tfmqs://" in ended.sentence


def test_a_browser_without_tls_is_answered_in_http(port: int) -> None:
    with socket.create_connection(("localhost", port), timeout=SECONDS) as browser:
        browser.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert browser.recv(4096).startswith(b"HTTP/1.1 ")


def test_a_client_with_tls_is_told_that_the_server_has_none(tmp_path: Path, authority: Authority) -> None:
    with running(tmp_path / "data") as (_, (_, port)):
        assert "does not use TLS: write tfmq://" in refusal(address(port, authority))


def test_a_client_without_an_accepted_certificate_can_do_nothing(tmp_path: Path, authority: Authority) -> None:
    (tmp_path / "other").mkdir()
    other = Authority(tmp_path / "other")
    settings = (*authority.issue("localhost").settings, "--set", f"server.tls_client_ca={authority.ca}")
    with running(tmp_path / "data", *settings) as (process, (_, port)):
        assert "asks for a certificate" in refusal(address(port, authority))
        for pair in (other.issue("client"), authority.issue("client", days=-1)):
            assert "does not accept the certificate" in refusal(address(port, authority, pair=pair))
        assert blocking(address(port, authority, pair=authority.issue("client")), "orders") == PAYLOADS
        log = process.stop()[2]
    assert log.count("TLS handshake with 127.0.0.1:") == 3, log
    assert "Traceback" not in log


def test_files_of_a_client_that_cannot_be_used_are_named(port: int, authority: Authority, tmp_path: Path) -> None:
    missing = tmp_path / "missing.pem"
    for servers in (f"tfmqs://localhost:{port}?ca={missing}", f"{address(port, authority)}&certificate={missing}"):
        sentence = refusal(servers)
        assert str(missing) in sentence
        assert "No such file" in sentence


# The server's configuration


def test_wrong_files_prevent_the_start_with_one_sentence(authority: Authority, tmp_path: Path) -> None:
    good, other = authority.issue("localhost"), authority.issue("localhost")
    data = ("--data", str(tmp_path / "data"), "--listen", "127.0.0.1:0")
    for settings, words in (
        (Pair(str(tmp_path / "missing.pem"), good.key).settings, "missing.pem"),
        (Pair(good.certificate, other.key).settings, "does not belong"),
        (("--set", f"server.tls_key={good.key}"), "server.tls_key needs server.tls_certificate"),
        (("--set", f"server.tls_client_ca={authority.ca}"), "server.tls_client_ca needs server.tls_certificate"),
    ):
        for command in (settings, (*settings, "--check-config")):
            code, line = refused(*data, *command)
            assert (code, words in line) == (2, True), line
    assert not (tmp_path / "data").exists()


def test_only_certificates_of_clients_allow_an_address_that_others_reach(authority: Authority, tmp_path: Path) -> None:
    settings = ("--listen", "0.0.0.0:0", *authority.issue("localhost").settings)
    code, line = refused("--data", str(tmp_path / "data"), *settings)
    assert code == 2
    assert "server.tls_client_ca" in line
    with running(tmp_path / "data", *settings, "--set", f"server.tls_client_ca={authority.ca}") as (_, (_, port)):
        assert "asks for a certificate" in refusal(address(port, authority))


def test_sighup_reads_the_certificates_again(authority: Authority, tmp_path: Path) -> None:
    current = Pair(str(tmp_path / "server.pem"), str(tmp_path / "server.key"))

    def install(pair: Pair) -> None:
        shutil.copy(pair.certificate, current.certificate)
        shutil.copy(pair.key, current.key)

    def accepts(host: str) -> bool:
        with tfmq.Admin(address(port, authority, host)) as admin:
            try:
                return admin.topics() is not None
            except ConnectionFailed:
                return False

    install(authority.issue("127.0.0.1"))
    with running(tmp_path / "data", *current.settings) as (process, (_, port)):
        with tfmq.Producer(address(port, authority, "127.0.0.1")) as producer:
            producer.send("orders", b"before").result(SECONDS)
            install(authority.issue("localhost"))
            assert accepts("127.0.0.1"), "not before the signal"
            process.process.send_signal(signal.SIGHUP)
            until = time.monotonic() + SECONDS
            while not accepts("localhost"):
                assert time.monotonic() < until
            assert not accepts("127.0.0.1")
            producer.send("orders", b"after").result(SECONDS)
            assert producer.stats()["connected"], "the open connection goes on"
        Path(current.certificate).write_text("no certificate")
        process.process.send_signal(signal.SIGHUP)
        time.sleep(0.5)
        assert accepts("localhost"), "a file that cannot be used changes nothing"
        log = process.stop()[2]
    assert "the certificates were read again" in log
    assert log.count("the configuration stays as it was") == 1
