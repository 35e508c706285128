"""`run` of the asyncio consumer: tasks, plain functions in threads, cancellation, signals."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tfmq.aio
from tests.client.handling_rig import GROUP, TOPIC, Bench
from tfmq.client.consumer.message import CURRENT_MESSAGE
from tfmq.client.worker.asyncio_runner import HandlerThreads
from tfmq.testing.broker import SimulatedBroker


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with SimulatedBroker() as broker:
        made = Bench(broker, tmp_path)
        made.send("a", "b", "c")
        yield made


SECONDS = 30.0
"""Of what should happen at once."""


def consumer_of(bench: Bench, **options: Any) -> tfmq.aio.Consumer[Any]:
    return tfmq.aio.Consumer(bench.broker.servers, topics=TOPIC, **{"group": GROUP, "dead_letters": None, **options})


def test_coroutine_functions_are_awaited_in_turn_and_the_end_is_saved(bench: Bench) -> None:
    async def scenario() -> list[str]:
        consumer = consumer_of(bench)
        seen: list[str] = []

        @consumer.on(TOPIC)
        async def handle(message: Any) -> None:
            await asyncio.sleep(0)
            in_work: Any = CURRENT_MESSAGE.get()
            assert in_work is message
            seen.append(message.text)
            if len(seen) == 3:
                consumer.stop()

        await consumer.run()
        return seen

    assert asyncio.run(scenario()) == ["a", "b", "c"]
    assert (bench.saved() or 0) > bench.place("c")


def test_after_stop_in_a_handler_that_awaits_nothing_no_other_begins(bench: Bench) -> None:
    """The flag of stop() is raised in the next turn of the loop, and there is none in between."""
    seen: list[str] = []

    async def scenario() -> None:
        consumer = consumer_of(bench)

        async def handle(message: Any) -> None:
            seen.append(message.text)
            consumer.stop()

        await consumer.run(handle, signals=False)

    asyncio.run(scenario())
    assert seen == ["a"]
    assert bench.place("a") < (bench.saved() or 0) <= bench.place("b")


def test_plain_functions_are_called_in_a_thread_so_the_loop_goes_on(bench: Bench) -> None:
    threads = []

    async def scenario() -> int:
        consumer = consumer_of(bench)
        turns = 0

        async def turn() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0.001)

        def handle(message: Any) -> None:
            threads.append(threading.current_thread())
            before = turns
            until = time.monotonic() + 10
            while turns < before + 3 and time.monotonic() < until:
                time.sleep(0.001)
            if message.text == "c":
                consumer.stop()

        ticking = asyncio.create_task(turn())
        await consumer.run(handle, signals=False)
        ticking.cancel()
        return turns

    assert asyncio.run(scenario()) > 6
    assert len(threads) == 3 and threading.main_thread() not in threads


def test_many_workers_are_at_work_at_the_same_time(bench: Bench) -> None:
    async def scenario() -> int:
        consumer = consumer_of(bench, retries=0)
        at_work = most = 0
        all_there = asyncio.Event()

        async def handle(message: Any) -> None:
            nonlocal at_work, most
            at_work += 1
            most = max(most, at_work)
            if at_work == 3:
                all_there.set()
            try:
                await asyncio.wait_for(all_there.wait(), SECONDS)
            finally:
                at_work -= 1
            consumer.stop()

        await consumer.run(handle, workers=3, order="none", signals=False)
        return most

    assert asyncio.run(scenario()) == 3


def test_a_run_that_is_cancelled_saves_what_is_finished_and_says_cancelled(bench: Bench) -> None:
    async def scenario() -> None:
        consumer = consumer_of(bench)
        second = asyncio.Event()

        async def handle(message: Any) -> None:
            if message.text == "b":
                second.set()
                await asyncio.sleep(3600)

        running = asyncio.create_task(consumer.run(handle, signals=False))
        await second.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(scenario())
    assert bench.saved() == bench.place("b")


def test_what_a_listener_awaits_may_be_cancelled_and_that_is_a_failure_as_any_other(bench: Bench) -> None:
    async def scenario() -> list[str]:
        consumer = consumer_of(bench, dead_letters=bench.store, retries=1)
        seen: list[str] = []

        async def handle(message: Any) -> None:
            seen.append(message.text)
            if message.text == "b":
                task = asyncio.create_task(asyncio.sleep(3600))
                task.cancel()
                await task
            if message.text == "c":
                consumer.stop()

        await consumer.run(handle, signals=False)
        return seen

    assert asyncio.run(scenario()) == ["a", "b", "b", "c"]
    letter = bench.letters()["b"]
    assert letter.state == "dead" and "CancelledError" in letter.error
    assert "in handle" in letter.failures[-1].traceback


def test_a_plain_function_that_raises_stop_iteration_has_failed(bench: Bench) -> None:
    async def scenario() -> list[str]:
        consumer = consumer_of(bench, dead_letters=bench.store, retries=1)
        seen: list[str] = []

        def handle(message: Any) -> None:
            seen.append(message.text)
            if message.text == "b":
                next(iter(()))
            if message.text == "c":
                consumer.stop()

        await asyncio.wait_for(consumer.run(handle, signals=False), 60)
        return seen

    assert asyncio.run(scenario()) == ["a", "b", "b", "c"]
    assert "StopIteration" in bench.letters()["b"].failures[-1].traceback


def test_close_in_another_task_ends_a_run_that_waits(bench: Bench) -> None:
    async def scenario() -> list[str]:
        consumer = consumer_of(bench)
        seen: list[str] = []

        async def handle(message: Any) -> None:
            seen.append(message.text)

        running = asyncio.create_task(consumer.run(handle, workers=2, signals=False))
        while len(seen) < 3:
            await asyncio.sleep(0)
        await consumer.close()
        await running
        with pytest.raises(tfmq.Closed):
            await consumer.run(handle)
        return seen

    assert asyncio.run(scenario()) == ["a", "b", "c"]
    assert (bench.saved() or 0) > bench.place("c")


def test_sigterm_finishes_the_message_in_work(bench: Bench) -> None:
    async def scenario() -> list[str]:
        consumer = consumer_of(bench)
        done: list[str] = []

        async def handle(message: Any) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0.05)
            done.append(message.text)

        await consumer.run(handle)
        return done

    assert asyncio.run(scenario()) == ["a"]
    assert bench.saved() == bench.place("b")


def test_a_second_sigterm_ends_at_once(bench: Bench) -> None:
    async def handle(message: Any) -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0.05)
        await asyncio.sleep(SECONDS)

    async def scenario() -> None:
        await consumer_of(bench).run(handle)

    with pytest.raises(SystemExit) as ended:
        asyncio.run(scenario())
    assert ended.value.code == 128 + signal.SIGTERM
    assert bench.saved() in (None, bench.place("a"))


def test_threads_are_started_as_needed_and_hand_back_what_is_raised() -> None:
    async def scenario() -> None:
        threads = HandlerThreads()
        assert await threads.call(lambda: 1) == 1
        assert await threads.call(threading.current_thread) is await threads.call(threading.current_thread)
        with pytest.raises(ZeroDivisionError):
            await threads.call(lambda: 1 / 0)
        threads.stop()

    asyncio.run(scenario())
