"""The broker of a simulation: start, stop, power cut, and one turn after the other."""

from typing import Any

import pytest

from journal.testing import SimulatedDisk
from tfmq.config import load
from tfmq.protocol import commands, frames
from tfmq.protocol.commands import BY_REQUEST
from tfmq.testing.clock import VirtualClock
from tfmq.testing.server import SimulatedServer
from tfmq.testing.wire import ClientEnd


class Talk:
    """A connection, by hand."""

    def __init__(self, server: SimulatedServer) -> None:
        self.server = server
        end = server.connect()
        assert end is not None
        self.end: ClientEnd = end
        self.decoder = frames.Decoder(1 << 20)

    def say(self, request: Any, correlation: int = 0) -> None:
        self.end.sendmsg(frames.encode([BY_REQUEST[type(request)].code, correlation, *request]))

    def hello(self) -> None:
        self.say(commands.Hello(commands.MAGIC, 1, 1, "by hand", {}))

    def heard(self) -> list[list[Any]]:
        while self.server.run_turn():
            pass
        try:
            return [frame.header for frame in self.decoder.feed(self.end.recv(1 << 20))]
        except BlockingIOError:
            return []


def server(**flags: Any) -> SimulatedServer:
    made = SimulatedServer(load(flags={"server.data": "/data", **flags}), VirtualClock(), address="here:1")
    made.start()
    return made


def test_hello_and_a_request_are_answered() -> None:
    talk = Talk(server())
    talk.hello()
    talk.say(commands.Ping(), 5)
    (hello, ping) = talk.heard()
    assert hello[3] == "tfmq in a test"
    assert ping[:2] == [0, 5]


def test_status_says_what_a_server_says() -> None:
    talk = Talk(server())
    talk.hello()
    talk.say(commands.Status(), 1)
    status = talk.heard()[1][2]
    assert (status["listen"], status["connections"]) == ("here:1", 1)
    assert status["settings"]["server.data"] == "/data"


def test_who_says_no_hello_in_time_is_cut_off() -> None:
    clock = VirtualClock()
    made = SimulatedServer(load(flags={"server.data": "/data"}), clock, address="here:1")
    made.start()
    talk = Talk(made)
    assert talk.heard() == []
    assert made.next_time() <= clock.monotonic() + made.config.limits["hello_seconds"]
    clock.move(clock.monotonic() + made.config.limits["hello_seconds"])
    while made.run_turn():
        pass
    with pytest.raises(ConnectionResetError):
        talk.end.recv(1)


def test_a_stopped_one_takes_no_connection_and_starts_again_on_its_disk() -> None:
    made = server()
    talk = Talk(made)
    talk.hello()
    talk.say(commands.CreateTopic("orders", 1, {}), 1)
    assert talk.heard()[1][0] == 0
    made.stop()
    assert not made.running and made.connect() is None
    assert talk.end.recv(10) == b""
    assert made.next_time() == float("inf")
    assert not made.run_turn()
    assert made.disk.closed_unforced == []
    made.start()
    assert made.engine is not None
    assert made.engine.broker.topics.topic("orders").name == "orders"
    made.start()
    made.stop()
    made.stop()


def test_a_power_cut_breaks_connections_and_leaves_what_was_fsynced() -> None:
    made = server()
    talk = Talk(made)
    talk.hello()
    talk.say(commands.CreateTopic("orders", 1, {}), 1)
    talk.heard()
    talk.say(commands.CreateTopic("never", 1, {}), 2)
    before = made.disk
    made.kill("nothing")
    assert made.disk is not before and not made.running
    with pytest.raises(ConnectionResetError):
        talk.end.recv(1)
    made.start()
    assert made.engine is not None
    assert [topic.name for topic in made.engine.broker.topics.values()] == ["orders"]


def test_connections_are_refused_where_that_is_configured() -> None:
    answers = [True, False]
    made = SimulatedServer(
        load(flags={"server.data": "/data"}), VirtualClock(), address="here:1", refuses=lambda: answers.pop(0)
    )
    made.start()
    assert made.connect() is None
    assert made.connect() is not None


def test_a_network_that_fails_ends_the_sessions_alone() -> None:
    made = server()
    talk = Talk(made)
    talk.hello()
    talk.heard()
    made.disconnect()
    with pytest.raises(ConnectionResetError):
        talk.end.recv(1)
    again = Talk(made)
    again.hello()
    assert again.heard()[0][0] == 0


def test_a_start_that_is_forbidden_is_raised_and_can_be_tried_again() -> None:
    made = server()
    made.stop()
    made.disk.faults.fail("list", path="/data")
    with pytest.raises(OSError):
        made.start()
    assert not made.running
    made.disk.faults.clear()
    made.start()
    assert isinstance(made.disk, SimulatedDisk) and made.running


def test_housekeeping_alone_is_no_reason_to_stop_at_every_second() -> None:
    made = server()
    while made.run_turn():
        pass
    assert made.next_time() == float("inf")
    assert made.engine is not None and made.engine.broker.timers.next_due() is not None
