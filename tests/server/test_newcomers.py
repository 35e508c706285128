"""Newcomers, the connections before HELLO and login, are served within a share of the time, and after all others."""

from __future__ import annotations

import functools
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from twisted.internet.protocol import Factory, Protocol

from journal.clock import SystemClock
from journal.disk import RealDisk
from tests.server.fakes import Net
from tests.server.test_session import Client
from tests.server.wire import Wire
from tfmq.config import load
from tfmq.protocol import commands
from tfmq.server.reactor import NEWCOMER_SHARE, NEWCOMER_SLICE_SECONDS, OTHERS_SECONDS, TURN_SECONDS, Turn, TurnReactor
from tfmq.server.server import Server
from tfmq.server.transport import ACCEPTS_MAX, Listener

SECONDS = 20.0


class Peer:
    """A descriptor that is readable, and whose reading takes some time by the reactor's clock."""

    def __init__(self, world: World, name: str, seconds: float = 0.0) -> None:
        self.world, self.name, self.seconds = world, name, seconds
        self.read_end, self.write_end = os.pipe()
        self.reactor: Any = None

    def fileno(self) -> int:
        return self.read_end

    def doRead(self) -> None:
        os.read(self.read_end, 100)
        self.world.done.append(self.name)
        self.world.now += self.seconds
        self.world.turn.request_end()

    def doWrite(self) -> None:
        self.world.done.append(f"{self.name} writes")

    def connectionLost(self, reason: Any) -> None:
        self.world.done.append(f"{self.name} is lost")

    def come(self) -> None:
        os.write(self.write_end, b"x")


class World:
    """A reactor with a clock that the test advances, and what was done in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        # Not an attribute of the instance: NewcomerReactor takes the clock of the class over.
        monkeypatch.setattr(TurnReactor, "seconds", staticmethod(lambda: self.now))
        self.reactor = TurnReactor()
        self.turn = Turn(self.reactor)
        self.done: list[str] = []
        self.turn.at_end(lambda: self.done.append("replies"))

    def peer(self, name: str, seconds: float = 0.0) -> Peer:
        made = Peer(self, name, seconds)
        self.reactor.addReader(made)
        return made

    def newcomer(self, name: str, seconds: float = 0.0) -> Peer:
        made = Peer(self, name, seconds)
        made.reactor = self.reactor.newcomers
        self.reactor.newcomers.addReader(made)
        return made

    def busy(self, peer: Peer) -> None:
        """Read from a peer whose request uses up the time of the turn."""
        os.read(peer.read_end, 100)
        self.done.append(peer.name)
        self.turn.handling_seconds += 2 * TURN_SECONDS

    def poll(self) -> list[str]:
        """What one poll does."""
        self.done.clear()
        self.reactor.runUntilCurrent()
        self.reactor.doPoll(0)
        return list(self.done)

    def work(self) -> list[str]:
        return [name for name in self.poll() if name != "replies"]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    made = World(monkeypatch)
    yield made
    made.reactor._poller.close()
    made.reactor.newcomers._poller.close()


def test_newcomers_come_after_the_replies_to_all_others(world: World) -> None:
    newcomer, known = world.newcomer("new"), world.peer("known")
    newcomer.come()
    known.come()
    assert world.poll() == ["known", "replies", "new"]


def test_a_turn_has_a_slice_for_newcomers_and_the_rest_of_them_is_not_forgotten(world: World) -> None:
    for number in range(6):
        world.newcomer(f"new {number}", NEWCOMER_SLICE_SECONDS * 0.6).come()
    assert [len(world.work()) for _ in range(4)] == [2, 2, 2, 0]


def test_while_others_are_served_newcomers_have_a_share_of_the_time_and_alone_all_of_it(world: World) -> None:
    cost = 4 * NEWCOMER_SLICE_SECONDS
    for number in range(9):
        world.newcomer(f"new {number}", cost).come()
    assert [len(world.work()) for _ in range(2)] == [1, 1], "nobody else is there"
    known = world.peer("known")
    known.come()
    assert len(world.work()) == 2
    began = world.now - cost
    while "new" not in "".join(world.work()):
        world.now += cost / 100
    assert world.now - cost - began >= cost / NEWCOMER_SHARE, "the pause, before the next one"
    world.now += OTHERS_SECONDS
    assert [len(world.work()) for _ in range(3)] == [1, 1, 1], "the other has nothing to do any more"


def test_newcomers_are_served_although_every_turn_ends_before_all_others_are(world: World) -> None:
    """Otherwise nobody could connect to a broker at its limit, and a probe of /live would end it."""
    known, newcomer = [world.peer(f"known {number}") for number in range(3)], world.newcomer("new")
    for each in known:
        each.doRead = functools.partial(world.busy, each)  # type: ignore[method-assign]
        each.come()
    assert len(world.work()) == 1, "the turn has ended"
    newcomer.come()
    first, *others = world.work()
    assert first.startswith("known") and others == ["new"]


def test_what_newcomers_do_between_the_slices_counts_for_their_share(world: World) -> None:
    newcomer, known = world.newcomer("new"), world.peer("known")
    seconds = 10 * NEWCOMER_SLICE_SECONDS

    def take_long() -> None:
        world.now += seconds

    world.reactor.newcomers.callLater(0, take_long)
    known.come()
    newcomer.come()
    assert world.work() == ["known", "new"]
    newcomer.come()
    world.now += seconds
    assert world.work() == []
    world.now += seconds / NEWCOMER_SHARE
    assert world.work() == ["new"]


def test_an_admitted_connection_is_read_and_written_by_the_main_reactor(world: World) -> None:
    newcomer = world.newcomer("new")
    world.reactor.newcomers.addWriter(newcomer)
    world.reactor.newcomers.admit(newcomer)
    newcomer.come()
    assert newcomer.reactor is world.reactor
    assert newcomer in world.reactor.getReaders() and newcomer in world.reactor.getWriters()
    assert world.reactor.newcomers._selectables == {}
    paused = Peer(world, "paused")
    paused.reactor = world.reactor.newcomers
    world.reactor.newcomers.admit(paused)
    assert paused not in world.reactor.getReaders(), "it was not read before"


def test_newcomers_are_disconnected_when_the_reactor_ends(world: World) -> None:
    world.newcomer("new")
    world.reactor.disconnectAll()
    assert world.done == ["new is lost"]


def test_few_connections_are_accepted_at_a_time(world: World) -> None:
    accepted: list[Any] = []

    class Counted(Protocol):  # type: ignore[misc]
        def connectionMade(self) -> None:
            accepted.append(self)
            self.transport.abortConnection()

    net = Net()
    bound = socket.create_server(("127.0.0.1", 0))
    bound.setblocking(False)
    clients = [socket.create_connection(bound.getsockname()) for _ in range(3 * ACCEPTS_MAX)]
    listener = Listener(
        bound, Factory.forProtocol(Counted), world.reactor, net.traffic, lambda *a, limits: make_plain(*a)
    )
    listener.startListening()
    for times in range(1, 4):
        listener.doRead()
        assert len(accepted) == times * ACCEPTS_MAX
    for each in (*clients, bound):
        each.close()


def make_plain(*arguments: Any) -> Any:
    from twisted.internet.tcp import Server as PlainConnection

    return PlainConnection(*arguments)


def test_a_client_is_admitted_with_its_first_valid_request(monkeypatch: pytest.MonkeyPatch) -> None:
    admitted: list[str] = []
    monkeypatch.setattr("tfmq.server.transport.Connection.admit", lambda self: admitted.append("admitted"))
    client = Client()
    assert admitted == []
    client.bring([12, 2, b"no such fields"])
    assert admitted == []
    client.say(commands.Status(), 3)
    client.say(commands.Status(), 4)
    assert admitted == ["admitted"]


def test_a_server_has_its_listeners_and_new_connections_among_the_newcomers(tmp_path: Path) -> None:
    reactor = TurnReactor()
    config = load(flags={"server.data": str(tmp_path), "server.listen": "127.0.0.1:0", "http.listen": "127.0.0.1:0"})
    server = Server(config, reactor, RealDisk(), SystemClock(), os.urandom)
    server.start()
    host, _, port = server.address.rpartition(":")

    def until(condition: Callable[[], bool]) -> None:
        end = time.monotonic() + SECONDS
        while not condition():
            assert time.monotonic() < end
            reactor.runUntilCurrent()
            reactor.doPoll(0.01)

    newcomers = reactor.newcomers._selectables
    assert len(newcomers) == 2, "the listeners for clients and for HTTP"
    client = Wire((host, int(port)), hello=False)
    until(lambda: len(newcomers) == 3)
    client.send(commands.Hello("TFMQ", 1, 1, "test", {}))
    client.send(commands.Status())
    until(lambda: len(newcomers) == 2)
    (session,) = server._sessions
    until(lambda: session.transport in reactor.getReaders())
    client.close()
    until(lambda: not server._sessions)
    stopped: list[bool] = []
    server.stop(lambda: stopped.append(True))
    until(lambda: bool(stopped))
    assert newcomers == {}
