"""What the replication of a server does with the reactor; what it does with others is in `tests/replication`."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from twisted.internet.defer import Deferred

from journal.clock import SystemClock
from journal.disk import RealDisk
from tests.reactor import play
from tests.server.fakes import FakeReactor
from tests.server.wire import Wire, running
from tfmq.config import load
from tfmq.errors import ConfigError, NotAllowed
from tfmq.replication.entries import Position
from tfmq.replication.entry_writer import EntryWriter
from tfmq.replication.local_state import LocalState, LocalStateFile
from tfmq.server.reactor import Turn, TurnReactor
from tfmq.server.replication import LostStore, Replication
from tfmq.server.server import Server

PATIENCE_SECONDS = 20


@pytest.fixture
def reactor() -> Any:
    made = TurnReactor()
    yield made
    made._poller.close()


def test_a_turn_ends_after_a_result_of_the_store(reactor: Any, tmp_path: Path) -> None:
    """In it the broker goes on with what has waited for the store."""
    (tmp_path / "store").mkdir()
    config = load(flags={"server.data": str(tmp_path / "data"), "replicate.url": f"file://{tmp_path}/store"})
    turn = Turn(reactor)
    server: Any = SimpleNamespace(close_connections=None)  # nothing of it is called
    replication = Replication(config, reactor, RealDisk(), SystemClock(), os.urandom, server, turn)
    replication.open("localhost:1")
    results: list[Any] = []
    seen: list[int] = []
    turn.at_end(lambda: seen.append(len(results)))
    replication.promote(results.append)
    until = time.monotonic() + PATIENCE_SECONDS
    while not results:
        assert time.monotonic() < until, "it took too long"
        reactor.doPoll(0.1)
    replication.close()
    assert seen[-1:] == [1]


def test_a_server_that_stops_before_its_recovery_is_stored_does_not_become_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "store").mkdir()
    flags = {
        "server.data": str(tmp_path / "data"),
        "server.listen": "127.0.0.1:0",
        "replicate.url": f"file://{tmp_path}/store",
    }

    async def story(reactor: Any) -> None:
        server = Server(load(flags=flags, sets=["http.listen="]), reactor, RealDisk(), SystemClock(), os.urandom)
        when_stored, recovered, stopped = EntryWriter.when_stored, Deferred[Any](), Deferred[None]()

        def hold(self: EntryWriter, number: int, callback: Any) -> None:
            if callback == server._serve_replicated:
                when_stored(self, number, lambda: recovered.callback(callback))
            else:
                when_stored(self, number, callback)

        monkeypatch.setattr(EntryWriter, "when_stored", hold)
        ready: list[str] = []
        server.on_ready = lambda: ready.append("ready")
        server.start()
        serve = await recovered
        server.stop(lambda: stopped.callback(None))
        serve()
        await stopped
        assert not ready

    play(story, kind=TurnReactor)


def opened(data: Path, url: str, reactor: Any) -> Replication:
    config = load(flags={"server.data": str(data), "replicate.url": url})
    server: Any = SimpleNamespace(close_connections=None)
    replication = Replication(config, reactor, RealDisk(), SystemClock(), os.urandom, server, Turn(reactor))
    replication.open("localhost:1")
    return replication


def test_a_store_that_was_used_and_is_away_is_not_taken_for_a_misspelled_one(reactor: Any, tmp_path: Path) -> None:
    """A supervisor starts a server again that ends with exit code 1, and none that ends with 2."""
    store = tmp_path / "store"
    data = tmp_path / "data"
    with pytest.raises(ConfigError, match="is no folder"):
        opened(data, f"file://{store}", reactor)
    LocalStateFile(RealDisk(), str(data)).write(LocalState("m", "standby", store=f"file://{store}"))
    with pytest.raises(NotAllowed, match=r"is no folder .*Start again later\.$"):
        opened(data, f"file://{store}", reactor)
    with pytest.raises(ConfigError, match="is no folder"):
        opened(data, f"file://{store}2", reactor)


@pytest.mark.parametrize(("data", "store"), [("one", "one"), ("one", "one/store"), ("store/one", "store")])
def test_store_and_data_folder_are_not_inside_of_each_other(
    reactor: Any, tmp_path: Path, data: str, store: str
) -> None:
    for each in (data, store):
        (tmp_path / each).mkdir(parents=True, exist_ok=True)
    with pytest.raises(ConfigError, match="have files of each other: name two folders"):
        opened(tmp_path / data, f"file://{tmp_path / store}", reactor)
    assert not list(tmp_path.rglob("probe")), "nothing was written"


def test_a_damaged_identity_of_a_store_is_named_with_what_to_do(reactor: Any, tmp_path: Path) -> None:
    (tmp_path / "replica").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"the object replica cannot be read: .* restore it from a back-up, or use"):
        opened(tmp_path.parent / f"{tmp_path.name}-data", f"file://{tmp_path}", reactor)


def test_without_its_store_a_primary_closes_its_connections_after_each_lease() -> None:
    """Clients with several addresses then find the server that has become primary."""
    reactor = FakeReactor()
    closed: list[float] = []
    lost = LostStore(reactor.callLater, 10.0, lambda: closed.append(reactor.seconds()))
    lost.begin()
    lost.begin()
    reactor.pump([1] * 25)
    assert closed == [10.0, 20.0]
    lost.end()
    reactor.pump([1] * 25)
    assert len(closed) == 2 and reactor.getDelayedCalls() == []


def test_a_stop_without_the_store_says_what_is_only_here(reactor: Any, tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    config = load(flags={"server.data": str(tmp_path / "data"), "replicate.url": f"file://{tmp_path}/store"})
    server: Any = SimpleNamespace(close_connections=None)
    replication = Replication(config, reactor, RealDisk(), SystemClock(), os.urandom, server, Turn(reactor))
    replication.open("localhost:1")
    assert "the next start compares the folder with the store" in replication.sentence_of_rest()
    writer = SimpleNamespace(position=Position(3, 7), trouble="the store is away")
    primary: Any = SimpleNamespace(writer=writer, unstored_bytes=4096, may_end_cleanly=True)
    replication._replica.primary = primary  # type: ignore[union-attr]
    sentence = replication.sentence_of_rest()
    assert "s (the store is away): 4,096 bytes of changes after entry 7 of term 3 are only in" in sentence
    primary.unstored_bytes = 0
    assert "all changes are in file://" in replication.sentence_of_rest()
    replication.close()


def test_a_client_of_a_server_without_its_store_is_disconnected(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    settings = (
        f"replicate.url=file://{tmp_path}/store",
        "replicate.lease_seconds=1",
        "replicate.heartbeat_seconds=0.2",
    )
    arguments = [word for setting in settings for word in ("--set", setting)]
    with running(tmp_path / "data", *arguments) as (_, address):
        wire = Wire(address)
        shutil.rmtree(tmp_path / "store")
        assert wire.socket.recv(1) == b""
