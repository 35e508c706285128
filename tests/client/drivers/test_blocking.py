"""Threads over one connection: a waiting thread reads, no waiter is forgotten, nothing stands still."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import stat
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

import tfmq
from tests.client.fake_broker import CUT, HOLD, SWALLOW, FakeBroker, listening
from tests.client.rig import sleep
from tests.scale import scaled
from tfmq.busy_poll import FSYNC_SECONDS, BusyPoll
from tfmq.busy_poll import SECONDS as BUSY_SECONDS
from tfmq.client.connection.addresses import parse_servers
from tfmq.client.connection.connection import ClientConnection
from tfmq.client.connection.requests import request
from tfmq.client.drivers import blocking
from tfmq.client.drivers.blocking import BlockingDriver, WakePipe
from tfmq.client.operation import Event, Operation, Wait
from tfmq.errors import Abandoned, Closed, ConnectionFailed, NotAllowed, TimedOut
from tfmq.protocol.commands import Metadata, Ping

SECONDS = 20.0


class Client:
    def __init__(self, servers: str) -> None:
        self.link = ClientConnection(parse_servers(servers), time.monotonic)
        self.driver = BlockingDriver(self.link)

    def ping(self, seconds: float = SECONDS) -> int:
        return int(self.driver.run(request(self.link, Ping(), seconds=seconds)).time_ms)


@pytest.fixture
def broker() -> FakeBroker:
    return FakeBroker()


@pytest.fixture
def client(broker: FakeBroker) -> Iterator[Client]:
    with listening(broker) as servers:
        made = Client(servers)
        yield made
        made.driver.close()


def in_threads(count: int, work: object) -> None:
    """Run `work(number)` in threads; all of them end in time, and what one raises fails the test."""
    raised: list[BaseException] = []

    def run(number: int) -> None:
        try:
            work(number)  # type: ignore[operator]
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    until = time.monotonic() + SECONDS * 2
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    assert not [thread for thread in threads if thread.is_alive()], "threads stand still"
    assert raised == []


def test_a_lone_thread_reads_for_itself(client: Client) -> None:
    before = threading.active_count()
    assert client.ping() > 0
    assert threading.active_count() <= before + 1  # the broker's end has one


@pytest.mark.parametrize(
    ("make_client", "seconds"),
    [
        (tfmq.Producer, FSYNC_SECONDS),
        (partial(tfmq.Producer, acks="synced"), FSYNC_SECONDS),
        (partial(tfmq.Producer, acks="written"), BUSY_SECONDS),
        (tfmq.Admin, BUSY_SECONDS),
    ],
    ids=["default", "synced", "written", "admin"],
)
def test_only_a_producer_that_waits_for_fsyncs_busy_polls_for_as_long_as_one_takes(
    broker: FakeBroker, monkeypatch: pytest.MonkeyPatch, make_client: Any, seconds: float
) -> None:
    limits = set()
    real = BusyPoll.poll

    def poll(self: BusyPoll, poll: Any, timeout: float, *arguments: Any, seconds: float) -> Any:
        limits.add(seconds)
        return real(self, poll, timeout, *arguments, seconds=seconds)

    monkeypatch.setattr(BusyPoll, "poll", poll)
    with listening(broker) as servers, make_client(servers) as client:
        if isinstance(client, tfmq.Producer):
            client.send("orders", b"one").result(SECONDS)
        else:
            client.topics()
    assert limits == {seconds}


def test_waiting_inside_a_running_event_loop_is_logged_once(
    client: Client, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocking, "_warned_of_loop", False)

    async def program() -> None:
        await asyncio.to_thread(client.ping)
        assert "tfmq.aio" not in caplog.text, "a thread of its own stops no loop"
        monkeypatch.setitem(sys.modules, "ipykernel", blocking)
        client.ping()
        assert "tfmq.aio" not in caplog.text, "a cell of a notebook has nothing else to do"
        monkeypatch.delitem(sys.modules, "ipykernel")
        client.ping()
        client.ping()

    client.ping()
    assert "tfmq.aio" not in caplog.text
    asyncio.run(program())
    assert caplog.text.count("use tfmq.aio there") == 1


def test_many_threads_share_the_connection(client: Client, broker: FakeBroker) -> None:
    in_threads(16, lambda number: [client.ping() for _ in range(scaled(50))])
    assert len(broker.sessions) == 1


def test_the_polling_thread_passes_on_when_it_has_its_answer(client: Client, broker: FakeBroker) -> None:
    broker.plan(Ping, HOLD, HOLD, HOLD)
    client_done: list[int] = []

    def work(number: int) -> None:
        client.ping()
        client_done.append(number)

    releaser = threading.Timer(0.2, broker.release)
    releaser.start()
    in_threads(6, work)
    releaser.join()
    assert sorted(client_done) == list(range(6))


def test_a_polling_thread_that_is_out_of_time_passes_on_too(client: Client, broker: FakeBroker) -> None:
    client.ping()
    broker.plan(Ping, SWALLOW, HOLD)
    heard: list[str] = []

    def work(number: int) -> None:
        if number == 0:
            with pytest.raises(TimedOut):
                client.ping(0.3)
            heard.append("late")
        else:
            time.sleep(0.1)
            client.ping()
            heard.append("answered")

    releaser = threading.Timer(0.6, broker.release)
    releaser.start()
    in_threads(2, work)
    releaser.join()
    assert sorted(heard) == ["answered", "late"]


def test_an_interrupt_in_the_polling_thread_leaves_the_client_usable(client: Client, broker: FakeBroker) -> None:
    client.ping()
    broker.plan(Ping, HOLD)
    threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        client.ping()
    broker.release()
    assert client.ping() > 0


def test_a_flag_can_be_raised_from_another_thread_and_from_a_signal_handler(client: Client) -> None:
    for raiser in ("thread", "signal"):
        flag = Event()

        def waiting(flag: Event = flag) -> Operation[None]:
            yield Wait((flag,))

        if raiser == "thread":
            threading.Timer(0.1, client.driver.set_event, (flag,)).start()
        else:
            old = signal.signal(signal.SIGALRM, lambda *_, flag=flag: client.driver.set_event(flag))
            signal.setitimer(signal.ITIMER_REAL, 0.1)
        started = time.monotonic()
        client.driver.run(waiting())
        assert time.monotonic() - started < SECONDS / 2
    signal.signal(signal.SIGALRM, old)


def test_an_event_that_is_set_when_the_thread_begins_to_poll_ends_the_wait(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    event, poll_socket = Event(), client.driver._poll_socket

    def set_first(*arguments: object) -> int:
        setter = threading.Thread(target=client.driver.set_event, args=(event,))
        setter.start()
        setter.join()
        return poll_socket(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(client.driver, "_poll_socket", set_first)
    started = time.monotonic()
    assert client.driver.wait((event,), SECONDS)
    assert time.monotonic() - started < SECONDS / 2


def test_sleep_takes_its_time_and_reads_for_others(client: Client) -> None:
    def work(number: int) -> None:
        if number == 0:
            started = time.monotonic()
            client.driver.run(sleep(0.3))
            assert time.monotonic() - started >= 0.3
        else:
            time.sleep(0.05)
            client.ping()

    in_threads(3, work)


def test_timers_run_while_no_caller_waits(client: Client) -> None:
    rung = threading.Event()
    client.driver.call_later(0.05, rung.set)
    cancelled = client.driver.call_later(0.02, lambda: rung.wait(0) or pytest.fail("cancelled, and it rang"))
    cancelled.cancel()
    assert rung.wait(SECONDS)


def test_unattended_calls_are_answered_while_no_caller_waits(client: Client) -> None:
    done = threading.Event()
    with client.driver.lock:
        client.link.send_request(Ping(), in_background=True).add_done_callback(lambda _: done.set())
        client.driver.flush()
    client.driver.wake()
    assert done.wait(SECONDS)


def test_a_broken_connection_is_made_anew(client: Client, broker: FakeBroker) -> None:
    broker.plan(Ping, CUT, None, CUT)
    assert [client.ping() > 0 for _ in range(4)] == [True] * 4
    assert client.link.connection_count == 3


@pytest.mark.usefixtures("impatient_clients")
def test_nothing_there_is_reported_in_a_sentence() -> None:
    client = Client("127.0.0.1:1")
    started = time.monotonic()
    with pytest.raises(ConnectionFailed, match=r"Nothing listens at 127\.0\.0\.1:1: start tfmq-server"):
        client.ping()
    assert time.monotonic() - started < SECONDS
    client.driver.close()


def test_an_http_server_at_the_port_is_named() -> None:
    import socket

    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        peer, _ = listener.accept()
        with peer:
            peer.recv(1000)
            peer.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")

    threading.Thread(target=serve, daemon=True).start()
    client = Client(f"127.0.0.1:{listener.getsockname()[1]}")
    with pytest.raises(ConnectionFailed, match="an HTTP server") as caught:
        client.ping()
    assert caught.value.outcome in ("not done", "unknown")
    client.driver.close()
    listener.close()


def test_a_callback_must_not_wait(client: Client) -> None:
    raised: list[BaseException] = []

    def callback() -> None:
        try:
            client.ping()
        except NotAllowed as error:
            raised.append(error)

    client.driver.callbacks.append(callback)
    client.ping()
    assert len(raised) == 1 and "thread of your own" in str(raised[0])


def test_code_under_the_lock_must_not_wait(client: Client) -> None:
    with client.driver.lock, pytest.raises(NotAllowed):
        client.driver.wait((Event(),), 1.0)


def test_close_ends_every_wait(client: Client, broker: FakeBroker) -> None:
    broker.plan(Ping, *[SWALLOW] * 3)
    threading.Timer(0.2, client.driver.close).start()

    def work(number: int) -> None:
        with pytest.raises((Abandoned, Closed)):
            client.ping()

    in_threads(3, work)
    with pytest.raises(Closed):
        client.ping()


def test_large_requests_of_many_threads_in_both_directions_never_stand_still(client: Client) -> None:
    """Requests and replies of about 200 kB each, more than the sockets hold: only reading while writing goes on."""
    names = [f"topic-{number:0240d}" for number in range(800)]

    def work(number: int) -> None:
        for _ in range(scaled(3)):
            reply = client.driver.run(request(client.link, Metadata(names, True), seconds=SECONDS * 2))
            assert len(reply.topics) == len(names)

    in_threads(16, work)


# The pipe that wakes the polling thread.


def rings(pipe: WakePipe) -> bool:
    poll = select.poll()
    poll.register(pipe.descriptor, select.POLLIN)
    return bool(poll.poll(0))


def test_it_rings_until_it_is_drained() -> None:
    pipe = WakePipe()
    assert not rings(pipe)
    pipe.notify()
    pipe.notify()
    assert rings(pipe)
    pipe.drain()
    assert not rings(pipe)
    pipe.drain()
    pipe.close()


def test_a_full_pipe_wakes_as_well() -> None:
    pipe = WakePipe()
    assert not rings(pipe)
    for _ in range(100_000):
        pipe.notify()
    assert rings(pipe)
    pipe.drain()
    assert not rings(pipe)
    pipe.close()


def test_a_close_by_another_thread_waits_for_the_byte_that_is_being_written(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = WakePipe()
    assert not rings(pipe)
    write, written = os.write, []

    def write_after_the_close(descriptor: int, data: bytes) -> int:
        pipe.close()
        written.append(os.fstat(descriptor))  # EBADF if it is closed.
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", write_after_the_close)
    before = len(os.listdir("/proc/self/fd"))
    pipe.notify()
    assert stat.S_ISFIFO(written[0].st_mode)
    assert len(os.listdir("/proc/self/fd")) == before - 2


def test_without_a_poll_no_thread_is_woken() -> None:
    before = len(os.listdir("/proc/self/fd"))
    pipe = WakePipe()
    pipe.notify()
    pipe.close()
    pipe.close()
    assert len(os.listdir("/proc/self/fd")) == before
