"""The socket under a link: what it reports of connecting, reading and breaking."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.client.fake_broker import CUT, FakeBroker, listening
from tfmq.client.connection.addresses import BrokerAddress, LocalBrokerAddress, parse_servers
from tfmq.client.connection.connection import ClientConnection
from tfmq.client.drivers.socket import RECEIVE_BYTES_MIN, SocketChannel, resolve_address
from tfmq.errors import ConnectionFailed
from tfmq.protocol.commands import Metadata, Ping

SECONDS = 10.0


def wired(servers: str) -> SocketChannel:
    return SocketChannel(ClientConnection(parse_servers(servers), time.monotonic))


def address(channel: SocketChannel) -> tuple[int, object]:
    found = resolve_address(channel.link.server)
    assert isinstance(found, tuple)
    return found


def turn(channel: SocketChannel) -> None:
    """One wait for the socket, and what it found."""
    if channel.socket is None:
        channel.start_connecting(address(channel))
    poll = select.poll()
    poll.register(channel, select.POLLIN | (select.POLLOUT if channel.wants_write else 0))
    for _, event in poll.poll(SECONDS * 1000):
        if event & select.POLLOUT or channel.connecting:
            channel.on_writable()
        if event & select.POLLIN:
            channel.process_received(channel.receive())


@pytest.fixture
def broker() -> FakeBroker:
    return FakeBroker()


@pytest.fixture
def channel(broker: FakeBroker) -> Iterator[SocketChannel]:
    with listening(broker) as servers:
        made = wired(servers)
        yield made
        made.close()


def test_it_connects_greets_and_carries(channel: SocketChannel) -> None:
    call = channel.link.send_request(Ping())
    while not call.done:
        turn(channel)
    assert call.error is None and not channel.wants_write


def test_large_answers_come_in_growing_reads(channel: SocketChannel) -> None:
    names = [f"t{number:0200d}" for number in range(1000)]
    call = channel.link.send_request(Metadata(names, True))
    while not call.done:
        turn(channel)
    assert len(call.result().topics) == 1000
    assert channel._receive_bytes >= RECEIVE_BYTES_MIN


def test_the_end_of_the_stream_is_reported_to_the_link(channel: SocketChannel, broker: FakeBroker) -> None:
    broker.plan(Ping, CUT)
    channel.link.send_request(Ping())
    while channel.link.last_error is None:
        turn(channel)
    assert channel.socket is None and channel.link.state == "down"


def test_a_refused_connection_is_reported_to_the_link() -> None:
    channel = wired("127.0.0.1:1")
    channel.link.send_request(Ping())
    while channel.link.last_error is None:
        turn(channel)
    assert "Nothing listens at 127.0.0.1:1" in channel.link.last_error.sentence
    assert channel.fileno() == -1


def test_nothing_is_read_where_nothing_is(channel: SocketChannel) -> None:
    assert channel.receive() is None
    channel.flush()
    channel.on_writable()
    channel.process_received(None)


def test_the_older_address_family_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    four = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 1))
    six = (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", 1, 0, 0))
    for found, chosen in (([six, four], four), ([six], six)):
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, found=found, **__: found)
        assert resolve_address(BrokerAddress("localhost", 1)) == (chosen[0], chosen[4], None)


# From the address that a user wrote to the one that a socket takes.


def test_an_address_of_numbers_is_what_it_is() -> None:
    found = resolve_address(BrokerAddress("127.0.0.1", 8367))
    assert found == (socket.AF_INET, ("127.0.0.1", 8367), None)


def test_a_name_that_is_none_is_reported_and_not_raised() -> None:
    found = resolve_address(BrokerAddress("nowhere.invalid", 1))
    assert isinstance(found, OSError)
    assert "nowhere.invalid cannot be looked up" in str(found)


def test_a_folder_that_cannot_be_had_is_reported_and_not_raised(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = resolve_address(LocalBrokerAddress(str(tmp_path / "file")))
    assert isinstance(found, ConnectionFailed)


def test_a_broker_that_is_not_ready_is_reported_and_not_raised(tmp_path: Path) -> None:
    found = resolve_address(LocalBrokerAddress(str(tmp_path), lambda path, descriptor: None))
    assert isinstance(found, ConnectionFailed)
    assert found.retriable
