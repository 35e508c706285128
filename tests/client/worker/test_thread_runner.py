"""The event loop of a blocking consumer's coroutine functions."""

from __future__ import annotations

import asyncio
import contextvars
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tfmq
from tests import paths
from tfmq.client.worker.thread_runner import ListenerLoopThread
from tools.rigs.live_server import LiveServer

PLACE: contextvars.ContextVar[str] = contextvars.ContextVar("place", default="")


def test_all_share_one_loop_and_have_the_callers_context() -> None:
    loop = ListenerLoopThread()

    async def where() -> tuple[object, str]:
        await asyncio.sleep(0)
        return asyncio.get_running_loop(), PLACE.get()

    found = []

    def call(name: str) -> None:
        PLACE.set(name)
        found.append(loop.run(where()))

    threads = [threading.Thread(target=call, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {name for _, name in found} == {"a", "b"} and len({id(each) for each, _ in found}) == 1
    loop.stop()


def test_what_it_raises_is_raised_and_what_is_left_is_cancelled_at_the_end() -> None:
    loop = ListenerLoopThread()
    cancelled = threading.Event()

    async def left() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            cancelled.set()

    async def fails() -> None:
        asyncio.get_running_loop().create_task(left())
        await asyncio.sleep(0)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        loop.run(fails())
    loop.stop()
    assert cancelled.wait(10)
    loop.stop()


# `run` of the blocking consumer over a real broker: workers in threads, heartbeats beside handlers, real signals.

SECONDS = 60.0
PROGRAM = """
import sys, time, tfmq
consumer = tfmq.Consumer(sys.argv[1], topics=sys.argv[2], group="workers", dead_letters=None)
@consumer.on(sys.argv[2])
def handle(message):
    print("begin", message.text, flush=True)
    time.sleep(float(sys.argv[3]))
    print("end", message.text, flush=True)
consumer.run(workers=int(sys.argv[4]))
print("left", flush=True)
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    live = LiveServer(tmp_path_factory.mktemp("run") / "data")
    live.start()
    yield live
    live.stop()


@pytest.fixture
def topic(server: LiveServer, request: pytest.FixtureRequest) -> str:
    name = str(request.node.name)[:200].replace("[", "-").replace("]", "")
    with tfmq.Producer(server.address) as producer:
        producer.send_many(name, [str(number) for number in range(8)]).result()
    return name


PAGE = paths.ROOT / "docs" / "handling.md"


@pytest.mark.long
def test_the_program_of_the_page_runs_as_it_stands_there(server: LiveServer, tmp_path: Path) -> None:
    program = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[0]
    with tfmq.Producer(server.address) as producer:
        producer.send("orders", '{"total": 1}', key="42").result()
        producer.send("orders", '{"total": -1}', key="43").result()
        producer.send("refunds", "{}", key="44").result()
        producer.send("orders", '{"total": 1}', key="45").result()
    surroundings = {
        **os.environ,
        "TFMQ_SERVERS": server.address,
        "XDG_STATE_HOME": str(tmp_path),
        "PYTHONUNBUFFERED": "1",
    }
    process = subprocess.Popen([sys.executable, "-c", program], env=surroundings, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    billed = {process.stdout.readline() for _ in range(2)}
    until = time.monotonic() + SECONDS
    states: set[str] = set()
    while states != {"dead", "waiting"} and time.monotonic() < until:
        time.sleep(0.1)
        for store in tmp_path.glob("tfmq/*/billing.db"):  # the folder between is the broker's id
            with tfmq.dead_letters.Desk(store) as desk:
                states = {each.state for each in desk.letters()} - {"handled"}
    process.terminate()
    assert process.wait(SECONDS) == 0
    assert billed == {"billed 42\n", "billed 45\n"} and states == {"dead", "waiting"}


def saved(server: LiveServer, topic: str, group: str = "workers") -> int:
    """How many messages the group has processed."""
    with tfmq.Admin(server.address) as admin:
        return 8 - sum(int(each["lag"]) for each in admin.group(group).offsets if each["topic"] == topic)


def test_workers_are_at_work_at_the_same_time_and_all_is_handled_once(server: LiveServer, topic: str) -> None:
    together, seen = threading.Barrier(4, timeout=SECONDS), []
    consumer: tfmq.Consumer[Any] = tfmq.Consumer(server.address, topics=topic, group="workers", dead_letters=None)

    def handle(message: Any) -> None:
        together.wait()
        seen.append(message.text)
        if len(seen) == 8:
            consumer.stop()

    with consumer:
        consumer.run(handle, workers=4, order="none", signals=False)
    assert sorted(seen) == [str(number) for number in range(8)]
    assert saved(server, topic) == 8


def test_the_error_of_a_worker_is_raised_by_run_and_nothing_unfinished_is_saved(server: LiveServer, topic: str) -> None:
    def handle(message: Any) -> None:
        if message.text == "3":
            raise LookupError("three")

    consumer: tfmq.Consumer[Any] = tfmq.Consumer(
        server.address, topics=topic, group="workers", dead_letters=None, retries=0
    )
    with pytest.raises(LookupError, match="three"):
        consumer.run(handle, workers=3, order="none")
    assert saved(server, topic) == 3


@pytest.mark.parametrize("workers", [1, 2])
def test_a_listener_that_raises_closed_has_failed_and_ends_no_worker(
    server: LiveServer, topic: str, workers: int
) -> None:
    """A producer of its own may be closed; the error ends the run where there is no store, and is never swallowed."""
    consumer: tfmq.Consumer[Any] = tfmq.Consumer(
        server.address, topics=topic, group="workers", dead_letters=None, retries=1
    )
    calls = []

    def handle(message: Any) -> None:
        calls.append(message.text)
        if message.text == "2":
            raise tfmq.Closed("The producer was closed.")

    with pytest.raises(tfmq.Closed, match="producer"):
        consumer.run(handle, workers=workers)
    assert calls == ["0", "1", "2", "2"]
    assert saved(server, topic) == 2


@pytest.mark.long
def test_heartbeats_do_not_depend_on_the_handler(server: LiveServer, topic: str) -> None:
    """A handler three times as long as the session keeps its place."""
    consumer: tfmq.Consumer[Any] = tfmq.Consumer(
        server.address, topics=topic, group="slow", session=1.0, dead_letters=None
    )
    lives = []

    def handle(message: Any) -> None:
        with tfmq.Admin(server.address) as admin:
            for _ in range(6):
                time.sleep(0.5)
                lives.append(len([each for each in admin.group("slow").members if each["live"]]))
        consumer.stop()

    consumer.run(handle)
    assert lives == [1] * 6
    assert saved(server, topic, "slow") == 1


def test_stop_from_another_thread_ends_a_run_that_waits(server: LiveServer) -> None:
    consumer: tfmq.Consumer[Any] = tfmq.Consumer(server.address, topics="nothing-here", group="waits")
    timer = threading.Timer(0.3, consumer.stop)
    timer.start()
    consumer.run(print, workers=2)
    timer.join()


@pytest.mark.long
def test_stop_in_a_signal_handler_finishes_the_message_in_work(server: LiveServer, topic: str) -> None:
    program = PROGRAM.replace(
        "consumer.run(", "import signal\nsignal.signal(signal.SIGUSR1, lambda *_: consumer.stop())\nconsumer.run("
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, server.address, topic, "0.5", "1"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "begin 0\n"
    process.send_signal(signal.SIGUSR1)
    assert lines(process) == ["end 0", "left"]
    assert process.wait(SECONDS) == 0 and saved(server, topic) == 1


@pytest.mark.parametrize("workers", [1, 3])
def test_close_in_another_thread_ends_the_run_and_leaves_what_is_at_work(
    server: LiveServer, topic: str, workers: int
) -> None:
    consumer: tfmq.Consumer[Any] = tfmq.Consumer(server.address, topics=topic, group="workers", dead_letters=None)
    calls = []

    def handle(message: Any) -> None:
        calls.append(message.text)
        if message.text == "2":
            closing = threading.Thread(target=consumer.close)
            closing.start()
            closing.join(SECONDS)
            assert not closing.is_alive()

    consumer.run(handle, workers=workers)
    assert calls == ["0", "1", "2"] and saved(server, topic) == 2


@pytest.mark.parametrize("workers", [1, 3])
def test_close_in_another_thread_ends_a_run_that_waits_and_a_closed_one_runs_no_more(
    server: LiveServer, workers: int
) -> None:
    consumer: tfmq.Consumer[Any] = tfmq.Consumer(server.address, topics="nothing-here", group="waits")
    timer = threading.Timer(0.3, consumer.close)
    timer.start()
    consumer.run(print, workers=workers)
    timer.join()
    with pytest.raises(tfmq.Closed):
        consumer.run(print)


def worker(server: LiveServer, topic: str, seconds: float, workers: int = 1) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, server.address, topic, str(seconds), str(workers)],
        stdout=subprocess.PIPE,
        text=True,
    )


def lines(process: subprocess.Popen[str]) -> list[str]:
    assert process.stdout is not None
    return process.stdout.read().split("\n")[:-1]


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_finishes_the_current_message_saves_and_leaves(
    server: LiveServer, topic: str, number: signal.Signals
) -> None:
    process = worker(server, topic, 0.5)
    assert process.stdout is not None and process.stdout.readline() == "begin 0\n"
    process.send_signal(number)
    assert lines(process) == ["end 0", "left"]
    assert process.wait(SECONDS) == 0
    with tfmq.Admin(server.address) as admin:
        assert not [each for each in admin.group("workers").members if each["live"]]
    assert saved(server, topic) == 1


@pytest.mark.long
@pytest.mark.parametrize("workers", [1, 2])
def test_a_second_signal_ends_at_once_and_what_was_at_work_comes_again(
    server: LiveServer, topic: str, workers: int
) -> None:
    process = worker(server, topic, SECONDS, workers)
    assert process.stdout is not None and process.stdout.readline() == "begin 0\n"
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    sent = 1
    while process.poll() is None and time.monotonic() - began < SECONDS / 2:
        # On a busy machine two signals in a row may be handled as one.
        time.sleep(0.3)
        process.send_signal(signal.SIGTERM)
        sent += 1
    # A third one may reach the process after it has restored the default handlers.
    assert process.wait(SECONDS) in (128 + signal.SIGTERM, *([-signal.SIGTERM] if sent > 2 else []))
    assert time.monotonic() - began < SECONDS / 2
    assert lines(process) == [] and saved(server, topic) == 0


def test_a_coroutine_function_of_many_workers_runs_in_one_loop(server: LiveServer, topic: str, tmp_path: Path) -> None:
    import asyncio

    consumer: tfmq.Consumer[Any] = tfmq.Consumer(
        server.address, topics=topic, group="workers", dead_letters=tmp_path / "dead.db"
    )
    loops, seen = set(), []

    async def handle(message: Any) -> None:
        loops.add(id(asyncio.get_running_loop()))
        await asyncio.sleep(0.01)
        seen.append(message.text)
        if len(seen) == 8:
            consumer.stop()

    consumer.run(handle, workers=4, order="none")
    assert len(seen) == 8 and len(loops) == 1
    assert os.path.exists(tmp_path / "dead.db")
