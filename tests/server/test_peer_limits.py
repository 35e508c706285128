"""What many peers, or one with many requests, make the server hold is bounded for all of them together."""

import socket
from contextlib import closing

import pytest
from twisted.internet.protocol import Factory

from tests.broker.helpers import Broker, Session
from tests.server.fakes import Net
from tests.server.test_session import Client
from tests.server.test_transport import connected, frame
from tfmq.protocol.commands import EPOCH_UNKNOWN, Fetch
from tfmq.server.transport import Listener


def test_who_waits_to_send_and_is_given_more_is_counted_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tfmq.server.connection_limits.UNSENT_BYTES_ALL", 10_000)
    net = Net()
    many = [connected(net) for _ in range(8)]
    for connection, fake, _ in many:
        fake.room = 10
        connection.send([bytes(1000)])
        net.reactor.advance(0)
        assert connection.is_waiting
    for connection, _, _ in many:
        connection.send([bytes(9000)])
    assert net.traffic.unsent_bytes <= 10_000 + 9000


def test_what_a_client_has_received_is_only_what_the_system_has_accepted() -> None:
    client = Client()
    before = client.session.sent_bytes
    client.socket.room = 10
    client.session.send([bytes(1000)])
    client.net.reactor.advance(0)
    assert client.session.sent_bytes == before + 10


def test_the_system_accepts_little_of_what_a_client_does_not_read() -> None:
    net = Net()
    with socket.socket() as bound, socket.socket() as client:
        bound.bind(("127.0.0.1", 0))
        Listener(bound, Factory(), net.reactor, net.traffic).startListening()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        client.connect(bound.getsockname())
        accepted, _ = bound.accept()
        with closing(accepted):
            accepted.setblocking(False)
            assert 0 < accepted.send(bytes(16 << 20)) < 1 << 20


def test_beginnings_of_frames_do_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tfmq.server.connection_limits.RECEIVING_BYTES_ALL", 100_000)
    monkeypatch.setattr("tfmq.server.connection_limits.RECEIVING_BYTES_PLENTIFUL", 0)
    net = Net()
    many = [connected(net) for _ in range(200)]
    for connection, _, _ in many:
        net.bring(connection, frame(bytes(200_000))[:100_000])
    assert net.traffic.receiving_bytes <= 4 * 100_000 + 400_000 + 200 * 16_384


def test_fetches_of_one_correlation_number_do_not_outlive_their_session() -> None:
    broker = Broker()
    broker.create()
    session = Session()
    request = Fetch("orders", broker.incarnation(), 0, 0, EPOCH_UNKNOWN, 1000, 60_000)
    answers = []
    for _ in range(5):
        broker.correlation = 7
        answers.append(broker.ask(request, session=session))
    assert [answer.code for answer in answers] == ["waiting"] + ["bad_request"] * 4
    session.close()
    assert broker.engine.broker.fetches.parked_count == 0


def test_a_flood_of_new_producers_is_bounded_before_the_next_round() -> None:
    broker = Broker(limits__producers_per_partition=10)
    broker.create()
    first = broker.lease(100)
    for producer in range(first, first + 100):
        assert broker.produce(producer, 0).code == "ok"
    producers = broker.engine.broker.topics.topic("orders").partitions[0].producers  # type: ignore[union-attr]
    assert len(producers) <= 20
    assert broker.produce(first, 0).code == "unknown_producer", "forgotten, so never taken for a new one"
    assert broker.produce(first + 99, 0).repeated
