"""The whole server as a process: many connections, slow ones, wrong ones, and what a stop leaves behind."""

import os
import signal
import socket
import struct
import time
from pathlib import Path

import pytest

import tfmq
from journal.disk import RealDisk
from journal.log.checkpoint import LogCheckpointFile
from tests.server.wire import PATIENCE_SECONDS, Wire, batch, running
from tfmq.errors import Busy
from tfmq.limits import MIB
from tfmq.protocol import commands, frames
from tfmq.server.server import REJECTED_MAX


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
        sent = [
            wire.send(*batch("orders", incarnation, producer, number, [b"x" * 500])) for number in range(20)
        ]
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
def test_a_stop_answers_a_parked_fetch_and_ends_the_connection(tmp_path: Path) -> None:
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
def test_ctrl_c_stops_as_cleanly_and_a_second_one_at_once(tmp_path: Path) -> None:
    with running(tmp_path / "data") as (process, _):
        process.process.send_signal(signal.SIGINT)
        code, _, log = process.finish()
        assert code == 0
        assert "stopping on SIGINT" in log


@pytest.mark.long
def test_a_browser_is_told_what_this_port_is(tmp_path: Path) -> None:
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
        with (
            pytest.raises(Busy, match=r"limits\.connections"),
            tfmq.Admin(f"{address[0]}:{address[1]}") as admin,
        ):
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
def test_the_status_tells_version_address_and_settings(tmp_path: Path) -> None:
    with running(Path(os.path.relpath(tmp_path / "data"))) as (_, address):
        status = Wire(address).ask(commands.Status())[0]
        assert status["data"] == str(tmp_path / "data"), "the reader may be in another folder"
        assert status["version"].startswith("tfmq ")
        assert status["listen"] == f"127.0.0.1:{address[1]}"
        assert status["settings"]["flush.messages"] == 1000
        assert status["memory_bytes"] > MIB


@pytest.mark.long
def test_who_waits_to_be_asked_about_transactions_gives_up_the_place_with_the_connection(
    tmp_path: Path,
) -> None:
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
