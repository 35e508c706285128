"""The alarm rings at the time that was set, or before, and costs nothing to leave where it is."""

from __future__ import annotations

import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from threading import Event
from typing import Any

import pytest

import tfmq
from journal.clock import SystemClock
from journal.disk import RealDisk
from journal.log.checkpoint import LogCheckpointFile
from tests.reactor import pause, play
from tests.server.fakes import FakeReactor
from tests.server.wire import PATIENCE_SECONDS, Wire, batch, running
from tests.zookeeper.test_group_membership import until
from tfmq.config import load
from tfmq.errors import BadRequest, Busy
from tfmq.limits import MIB
from tfmq.protocol import commands, frames
from tfmq.server.reactor import TurnReactor
from tfmq.server.server import (
    QUIET_ALLOCATIONS,
    REJECTED_MAX,
    TRIM_SECONDS,
    IdleMonitor,
    InDoubtMonitor,
    MemoryTrimmer,
    NextDueTimer,
    RegistrationUpdater,
    Server,
    client_address,
    registration_updater,
    server_name,
)


def test_it_rings_when_it_is_due_and_once() -> None:
    reactor = FakeReactor()
    rung: list[float] = []
    alarm = NextDueTimer(reactor, reactor, lambda: rung.append(reactor.seconds()))
    alarm.set_due(5.0)
    reactor.pump([1] * 10)
    assert rung == [5.0]


def test_an_earlier_time_moves_it_and_a_later_one_does_not() -> None:
    reactor = FakeReactor()
    rung: list[float] = []
    alarm = NextDueTimer(reactor, reactor, lambda: rung.append(reactor.seconds()))
    alarm.set_due(5.0)
    (call,) = reactor.getDelayedCalls()
    alarm.set_due(8.0)
    alarm.set_due(None)
    assert reactor.getDelayedCalls() == [call]
    alarm.set_due(2.0)
    reactor.pump([1] * 10)
    assert rung == [2.0]


def test_what_is_overdue_rings_at_once() -> None:
    reactor = FakeReactor()
    reactor.advance(10)
    rung: list[int] = []
    NextDueTimer(reactor, reactor, lambda: rung.append(1)).set_due(3.0)
    reactor.advance(0)
    assert rung == [1]


def test_an_idle_server_returns_memory_once_after_a_load_and_after_each_job() -> None:
    reactor, counts, trims = FakeReactor(), {"buffers": 0, "jobs": 0}, []
    MemoryTrimmer(
        reactor.callLater, lambda: counts["buffers"], lambda: counts["jobs"], lambda: trims.append(reactor.seconds())
    ).start()

    def trims_after(*, buffers: int = 0, jobs: int = 0) -> int:
        counts["buffers"] += buffers
        counts["jobs"] += jobs
        trims.clear()
        reactor.advance(TRIM_SECONDS)
        return len(trims)

    assert trims_after(buffers=QUIET_ALLOCATIONS - 1) == 1
    assert trims_after() == 0
    assert trims_after(jobs=1) == 1
    assert trims_after() == 0
    assert trims_after(buffers=QUIET_ALLOCATIONS, jobs=1) == 0, "under load"
    assert trims_after(jobs=1) == 1
    assert trims_after() == 0


class Case:
    """When a server without clients ends."""

    def __init__(self, seconds: float) -> None:
        self.reactor, self.sessions, self.ended = FakeReactor(), 0, 0
        self.idleness = IdleMonitor(self.reactor.callLater, seconds, lambda: self.sessions, self.end)

    def end(self) -> None:
        self.ended += 1

    def count(self) -> int:
        return self.ended

    def sessions_are(self, count: int) -> None:
        self.sessions = count
        self.idleness.check()


def test_it_ends_once_when_no_client_connects() -> None:
    case = Case(5)
    case.idleness.start()
    case.reactor.advance(4.9)
    assert case.count() == 0
    case.reactor.advance(0.2)
    case.reactor.advance(60)
    assert case.count() == 1


def test_who_is_connected_keeps_it_and_the_time_begins_when_the_last_one_left() -> None:
    case = Case(5)
    case.idleness.start()
    case.reactor.advance(4)
    case.sessions_are(1)
    case.sessions_are(2)
    case.reactor.advance(100)
    case.sessions_are(1)
    case.reactor.advance(100)
    case.sessions_are(0)
    case.reactor.advance(4.9)
    assert case.count() == 0
    case.reactor.advance(0.2)
    assert case.count() == 1


def test_a_server_of_its_own_stays() -> None:
    case = Case(0)
    case.idleness.start()
    case.sessions_are(0)
    case.reactor.advance(1e6)
    assert case.count() == 0


def test_a_stop_leaves_nothing_to_come() -> None:
    case = Case(5)
    case.idleness.start()
    case.idleness.stop()
    case.reactor.advance(10)
    assert case.count() == 0


# Prepared transactions that are not ended are reported in the log: once, again every hour, and when it is over.


class Watched:
    """A broker whose oldest prepared transaction is as old as the clock, from `since` on."""

    def __init__(self, alarm_seconds: float = 100.0) -> None:
        self.reactor = FakeReactor()
        self.since: float | None = None
        self.alarm_seconds = alarm_seconds
        self.looks = 0
        self.watch = InDoubtMonitor(self.reactor.callLater, self.status, alarm_seconds)

    def status(self) -> dict[str, Any]:
        self.looks += 1
        if self.since is None:
            return {"prepared": 0, "oldest_prepared_seconds": 0, "alarm": False}
        age = self.reactor.seconds() - self.since
        return {"prepared": 2, "oldest_prepared_seconds": age, "alarm": age > self.alarm_seconds}

    def start(self) -> None:
        self.watch.start()
        self.reactor.advance(0)

    def pass_seconds(self, seconds: int) -> None:
        self.reactor.pump([1.0] * seconds)


@pytest.fixture
def errors(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "tfmq.server")
    return caplog


def test_it_is_silent_as_long_as_no_transaction_waits_too_long(errors: pytest.LogCaptureFixture) -> None:
    watched = Watched()
    watched.start()
    watched.since = 10.0
    watched.pass_seconds(105)
    assert errors.messages == [] and watched.looks == 3, "at the start, and every 50 s"


def test_it_is_reported_once_and_again_after_an_hour(errors: pytest.LogCaptureFixture) -> None:
    watched = Watched()
    watched.since = 0.0
    watched.start()
    watched.pass_seconds(200)
    (reported,) = errors.records
    assert reported.levelno == logging.ERROR
    assert (
        "prepared transactions that wait for their owners: 2," in reported.message
        and "the oldest for 150 s" in reported.message
    )
    assert "transaction.alarm_seconds = 100" in reported.message and "tfmq tx list" in reported.message
    watched.pass_seconds(3500)
    assert len(errors.records) == 1
    watched.pass_seconds(100)
    assert len(errors.records) == 2


def test_the_end_of_it_is_reported_and_the_next_one_is_new(errors: pytest.LogCaptureFixture) -> None:
    watched = Watched()
    watched.since = 0.0
    watched.start()
    watched.pass_seconds(150)
    watched.since = None
    watched.pass_seconds(50)
    assert errors.messages[-1] == "no transaction is prepared for longer than 100 s any more"
    watched.since = 200.0
    watched.pass_seconds(151)
    assert [each.levelno for each in errors.records] == [logging.ERROR, logging.INFO, logging.ERROR]


def test_one_that_was_too_old_before_the_start_is_reported_at_once(errors: pytest.LogCaptureFixture) -> None:
    watched = Watched()
    watched.since = -1e6
    watched.start()
    assert len(errors.records) == 1


def test_it_looks_soon_where_the_alarm_is_early_and_no_more_after_the_stop() -> None:
    watched = Watched(alarm_seconds=0.2)
    watched.start()
    watched.reactor.pump([0.1] * 10)
    assert watched.looks >= 9
    watched.watch.stop()
    looks = watched.looks
    watched.reactor.pump([1.0] * 200)
    assert watched.looks == looks
    Watched().watch.stop()


def test_a_look_that_fails_is_not_the_last(errors: pytest.LogCaptureFixture) -> None:
    watched = Watched()
    watched.watch = InDoubtMonitor(watched.reactor.callLater, lambda: 1 / 0, 100.0)  # type: ignore[arg-type,return-value]
    with pytest.raises(ZeroDivisionError):
        watched.start()
    assert len(watched.reactor.getDelayedCalls()) == 1


# Freed memory stays with a working server, and goes back on request.

PROGRAM = """
import resource
from tfmq.server import server as memory
if not memory.retain_freed_memory():
    print(0, 0, 0)
    raise SystemExit
def faults(): return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
bytearray(4 << 20)
before = faults()
for _ in range(100):
    bytearray(4 << 20)
churned = faults() - before
print(1, churned, int(memory.return_free_memory()))
"""


def test_freed_buffers_are_used_again_without_a_fault_until_they_are_given_back() -> None:
    command = [sys.executable, "-c", PROGRAM]
    kept, faults, gave = map(int, subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout.split())
    if kept:  # glibc
        assert faults < 1024, "100 buffers of 4 MiB have 102,400 pages"
        assert gave


# A server in ZooKeeper: its address and its topics, at what is so.


class Registered:
    """What was registered last."""

    def __init__(self) -> None:
        self.topics: Mapping[str, int] = {}
        self.closed = False

    def set_topics(self, topics: Mapping[str, int]) -> None:
        self.topics = topics

    def close(self) -> None:
        self.closed = True


def test_topics_are_followed_until_the_stop() -> None:
    reactor, registered, topics = FakeReactor(), Registered(), {"orders": 1}
    following = RegistrationUpdater(reactor.callLater, lambda: topics, registered)
    following.start()
    assert registered.topics == {"orders": 1}
    topics["orders"] = 4
    reactor.advance(1)
    assert registered.topics == {"orders": 4}
    following.stop()
    following.wait_unregistered()
    assert registered.closed
    topics["orders"] = 5
    reactor.advance(10)
    assert registered.topics == {"orders": 4}


def test_a_server_that_listens_everywhere_is_reached_by_its_name() -> None:
    for address in ("0.0.0.0:8367", "[::]:8367", ":8367"):
        assert client_address(address) == f"{socket.gethostname()}:8367"
    for address in ("127.0.0.1:1", "[::1]:1", "broker.example:8367"):
        assert client_address(address) == address


def test_without_the_setting_nothing_is_registered_and_a_wrong_one_is_refused() -> None:
    reactor = FakeReactor()
    assert registration_updater("", "127.0.0.1:1", reactor.callLater, dict) is None
    with pytest.raises(BadRequest, match="no address of a ZooKeeper"):
        registration_updater("a:0/meta", "127.0.0.1:1", reactor.callLater, dict)


@pytest.mark.long
def test_a_server_is_registered_while_it_runs(tmp_path: Path, zookeeper: Any, root: str, nodes: Any) -> None:
    setting = f"server.zookeeper={zookeeper.address}{root}"
    with running(tmp_path / "data", "--set", setting) as (process, address):
        until(lambda: nodes.exists(f"{root}/brokers/ids/0/master"))
        assert nodes.get(f"{root}/brokers/ids/0/master")[0].decode() == f"{address[0]}:{address[1]}"
        wire = Wire(address)
        wire.ask(commands.CreateTopic("orders", 4, {}))
        until(lambda: nodes.exists(f"{root}/brokers/topics/orders/0-m"))
        assert nodes.get(f"{root}/brokers/topics/orders/0-m")[0] == b"4"
        wire.ask(commands.DeleteTopic("orders"))
        until(lambda: not nodes.exists(f"{root}/brokers/topics/orders/0-m"))
        code, _, log = process.stop()
        assert code == 0 and "registered in ZooKeeper" in log and "Traceback" not in log
    assert nodes.exists(f"{root}/brokers/ids/0/master") is None


@pytest.mark.long
def test_a_server_serves_although_zookeeper_is_away(tmp_path: Path) -> None:
    with running(tmp_path / "data", "--set", "server.zookeeper=127.0.0.1:1/meta") as (process, address):
        assert Wire(address).topic("orders") > 0
        code, _, log = process.stop()
        assert code == 0 and "Traceback" not in log


# The whole server as a process: many connections, slow ones, wrong ones, and what a stop leaves.


@pytest.mark.long
def test_what_was_sent_is_read_back_also_by_the_next_server(tmp_path: Path) -> None:
    payloads = [b"one", b"two", b"three"]
    with running(tmp_path / "data") as (process, address):
        wire = Wire(address)
        incarnation = wire.topic("orders")
        positions, durability, repeated, _, first = wire.produce("orders", incarnation, payloads)
        assert (positions, durability, repeated, first) == ([[0, 0]], 2, False, 0)
        assert process.stop()[0] == 0
    with running(tmp_path / "data") as (process, address):
        wire = Wire(address)
        wire.send(commands.Fetch("orders", incarnation, 0, 0))
        reply = wire.receive()
        assert reply.header[0] == 0
        assert all(payload in bytes(reply.body) for payload in payloads)
        code, _, log = process.stop()
        assert code == 0
        assert "Traceback" not in log


@pytest.mark.long
@pytest.mark.parametrize("clean", [True, False])
def test_only_a_clean_stop_marks_the_logs_as_clean(tmp_path: Path, clean: bool) -> None:
    with running(tmp_path / "data") as (process, address):
        wire = Wire(address)
        incarnation = wire.topic("orders")
        wire.produce("orders", incarnation, [b"one"])
        if clean:
            assert process.stop()[0] == 0
        else:
            process.process.kill()
            process.finish()
    marks = LogCheckpointFile(RealDisk(), str(tmp_path / "data" / "orders-0"), incarnation << 24).read()
    assert marks is not None
    assert marks.clean == clean
    with running(tmp_path / "data") as (_, address):
        positions = Wire(address).produce("orders", incarnation, [b"two"])[0]
        assert positions[0][1] > 0, "the first message is still there"


def test_pipelined_requests_are_all_answered_in_the_order_they_were_applied(tmp_path: Path) -> None:
    with running(tmp_path / "data") as (_, address):
        wire = Wire(address)
        incarnation = wire.topic("orders")
        producer = wire.ask(commands.LeaseProducerIds(1))[0]
        sent = [wire.send(*batch("orders", incarnation, producer, number, [b"x" * 500])) for number in range(20)]
        replies = {(reply := wire.receive().header)[1]: reply for _ in sent}
        assert [replies[number][0] for number in sent] == [0] * len(sent)
        assert [replies[number][6] for number in sent] == list(range(len(sent)))


@pytest.mark.long
def test_a_large_batch_in_small_pieces_arrives_whole(tmp_path: Path) -> None:
    with running(tmp_path / "data") as (_, address):
        wire = Wire(address)
        incarnation = wire.topic("orders")
        producer = wire.ask(commands.LeaseProducerIds(1))[0]
        request, body = batch("orders", incarnation, producer, 0, [bytes([7]) * (3 * MIB)])
        data = b"".join(frames.encode((21, 99, *request), body))
        for start in range(0, len(data), 100_001):
            wire.socket.sendall(data[start : start + 100_001])
        assert wire.receive().header[:2] == [0, 99]


@pytest.mark.long
def test_a_stop_answers_a_waiting_fetch_and_ends_the_connection(tmp_path: Path) -> None:
    with running(tmp_path / "data") as (process, address):
        wire = Wire(address)
        incarnation = wire.topic("orders")
        wire.send(commands.Fetch("orders", incarnation, 0, 0, wait_ms=30_000))
        status = Wire(address)
        while status.ask(commands.Status())[0]["parked_fetches"] == 0:
            time.sleep(0.01)
        started = time.monotonic()
        process.process.send_signal(signal.SIGTERM)
        wire.receive()
        with pytest.raises(ConnectionError):
            wire.receive()
        wire.close()
        status.close()
        assert process.finish()[0] == 0
        assert time.monotonic() - started < PATIENCE_SECONDS / 2


@pytest.mark.long
def test_a_second_stop_waits_for_the_work_of_the_first(tmp_path: Path) -> None:
    """As SIGTERM in the middle of a hand-over."""
    flags = {"server.listen": "127.0.0.1:0", "server.data": str(tmp_path / "data")}

    async def story(reactor: Any) -> None:
        server = Server(load(flags=flags, sets=["http.listen="]), reactor, RealDisk(), SystemClock(), os.urandom)
        server.start()
        last_job, ended = Event(), list[str]()
        server._broker.run(last_job.wait, lambda result, error: None)
        try:
            server.stop(lambda: ended.append("first"))
            server.stop(lambda: ended.append("second"))
            await pause(reactor, 0.3)
            assert ended == []
        finally:
            last_job.set()
        while not ended:
            await pause(reactor, 0.01)
        assert ended == ["second"], "what the last call wants comes after it"

    play(story, kind=TurnReactor)


def test_ctrl_c_stops_as_cleanly_and_a_second_one_at_once(tmp_path: Path) -> None:
    with running(tmp_path / "data") as (process, _):
        process.process.send_signal(signal.SIGINT)
        code, _, log = process.finish()
        assert code == 0
        assert "stopping on SIGINT" in log


@pytest.mark.long
def test_a_browser_gets_an_explanation_of_this_port(tmp_path: Path) -> None:
    with running(tmp_path / "data") as (_, address):
        with socket.create_connection(address, timeout=PATIENCE_SECONDS) as browser:
            browser.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nAccept: text/html\r\n\r\n")
            answer = b""
            while data := browser.recv(1000):
                answer += data
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert f"tfmq broker at 127.0.0.1:{address[1]}".encode() in answer


@pytest.mark.long
def test_a_liar_about_sizes_costs_nothing_and_the_others_go_on(tmp_path: Path) -> None:
    with running(tmp_path / "data") as (_, address):
        wire = Wire(address)
        before = wire.ask(commands.Status())[0]["memory_bytes"]
        liars = [Wire(address) for _ in range(50)]
        for liar in liars:
            liar.socket.sendall(struct.pack(">I", 16 * MIB) + b"x" * 1000)
        status = wire.ask(commands.Status())[0]
        assert status["connections"] == 51
        assert status["memory_bytes"] - before < 8 * MIB
        wrong = Wire(address)
        wrong.socket.sendall(struct.pack(">I", 16 * MIB + 1))
        assert wrong.receive().header[2] == "bad_frame"
        with pytest.raises(ConnectionError):
            wrong.receive()


@pytest.mark.long
def test_a_reader_that_does_not_read_is_cut_off_and_the_others_go_on(tmp_path: Path) -> None:
    with running(tmp_path / "data", "--set", "limits.unsent_seconds=1") as (process, address):
        wire = Wire(address)
        incarnation = wire.topic("orders")
        wire.produce("orders", incarnation, [bytes(4 * MIB)])
        slow = Wire(address)
        slow.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        for _ in range(8):
            slow.send(commands.Fetch("orders", incarnation, 0, 0, max_bytes=8 * MIB))
        end = time.monotonic() + PATIENCE_SECONDS
        while wire.ask(commands.Status())[0]["connections"] > 1:
            assert time.monotonic() < end
            time.sleep(0.05)
        assert "cut off: it has not read anything" in process.stop()[2]


@pytest.mark.long
def test_connections_above_the_limit_are_refused_and_the_others_go_on(tmp_path: Path) -> None:
    with running(tmp_path / "data", "--set", "limits.connections=3") as (_, address):
        wires = [Wire(address) for _ in range(3)]
        refused = Wire(address, hello=False)
        refused.send(commands.Hello("TFMQ", 1, 1, "test", {}))
        number, correlation, code, outcome, sentence, _ = refused.receive().header
        assert (number < 0, correlation, code, outcome) == (True, 0, "busy", "not done")
        assert sentence.startswith("The broker has 3 connections, and takes no more (limits.connections)")
        assert refused.socket.recv(1) == b"", "then it ends"
        with pytest.raises(Busy, match=r"limits\.connections"), tfmq.Admin(f"{address[0]}:{address[1]}") as admin:
            admin.ping()
        assert wires[0].ask(commands.Status())[0]["connections_refused"] > 1
        wires.pop().close()
        end = time.monotonic() + PATIENCE_SECONDS
        while wires[0].ask(commands.Status())[0]["connections"] > 2:
            assert time.monotonic() < end
        assert Wire(address).ask(commands.Ping())


@pytest.mark.long
def test_refused_connections_that_stay_take_few_descriptors_and_not_for_long(tmp_path: Path) -> None:
    with running(tmp_path / "data", "--set", "limits.connections=1") as (process, address):
        wire = Wire(address)
        before = len(os.listdir(f"/proc/{process.process.pid}/fd"))
        flood = [socket.create_connection(address, timeout=PATIENCE_SECONDS) for _ in range(200)]
        end = time.monotonic() + PATIENCE_SECONDS
        while wire.ask(commands.Status())[0]["connections_refused"] < len(flood):
            assert time.monotonic() < end
        assert len(os.listdir(f"/proc/{process.process.pid}/fd")) <= before + REJECTED_MAX
        while len(os.listdir(f"/proc/{process.process.pid}/fd")) > before:
            assert time.monotonic() < end
            time.sleep(0.05)
        for each in flood:
            each.close()
        refused = Wire(address, hello=False)
        assert refused.receive().header[2] == "busy", "there is room again to tell it"


@pytest.mark.long
def test_a_flood_of_connections_leaves_files_for_the_logs(tmp_path: Path) -> None:
    with running(tmp_path / "data", open_files=400) as (process, address):
        first = Wire(address)
        flood = [socket.create_connection(address, timeout=PATIENCE_SECONDS) for _ in range(300)]
        end = time.monotonic() + PATIENCE_SECONDS
        status = {"connections": 0, "connections_refused": 0}
        while status["connections"] + status["connections_refused"] < len(flood) + 1:
            assert time.monotonic() < end
            status = first.ask(commands.Status())[0]
        assert status["connections_refused"] > 100
        incarnation = first.topic("orders")
        assert first.produce("orders", incarnation, [b"still served"])[1] == 2
        for each in flood:
            each.close()
        assert "the limit of open files leaves room for no more" in process.stop()[2]


@pytest.mark.long
def test_the_status_shows_version_address_and_settings(tmp_path: Path) -> None:
    with running(Path(os.path.relpath(tmp_path / "data"))) as (_, address):
        status = Wire(address).ask(commands.Status())[0]
        assert status["data"] == str(tmp_path / "data"), "the reader may be in another folder"
        assert status["version"].startswith("tfmq ")
        assert status["listen"] == f"127.0.0.1:{address[1]}"
        assert status["settings"]["flush.messages"] == 1000
        assert status["memory_bytes"] > MIB


@pytest.mark.long
def test_who_waits_to_be_asked_about_transactions_gives_up_the_place_with_the_connection(tmp_path: Path) -> None:
    one_place = ("--set", "limits.checks_parked=1")
    with running(tmp_path / "data", *one_place) as (_, address):
        first, second = Wire(address), Wire(address)
        first.send(commands.AwaitChecks("shop", 30_000))
        first.send(commands.Ping())
        first.receive()
        second.send(commands.AwaitChecks("shop", 30_000))
        assert second.receive().header[2] == "busy"
        first.close()
        parked = wait_for_place(second)
        cancelled = second.send(commands.Cancel(parked))
        replies = {each.header[1]: each.header[2:] for each in (second.receive(), second.receive())}
        assert replies == {parked: [[]], cancelled: [True]}
        parked = second.send(commands.AwaitChecks("shop", 0))
        assert second.receive().header == [0, parked, []]


def wait_for_place(wire: Wire) -> int:
    """Asks to wait until it is not refused any more; the correlation of the request that waits."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        parked = wire.send(commands.AwaitChecks("shop", 30_000))
        asked = wire.send(commands.Ping())
        answers = {wire.receive().header[1]}
        if answers == {asked}:
            return parked
        wire.receive()
        assert time.monotonic() < deadline, "the place of the lost connection stays taken"


# The name that HELLO, STATUS and a neighbour's question get.


def test_the_server_says_its_name_and_version() -> None:
    name, version = server_name().split()
    assert name == "tfmq"
    assert version[0].isdigit()
