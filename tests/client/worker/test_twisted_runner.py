"""`run` of the Twisted consumer: listeners in the reactor, Deferreds waited for, the reactor's end, signals."""

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from twisted.internet.defer import CancelledError, Deferred, inlineCallbacks

from tests import reactor as rig
from tests.client.handling_rig import GROUP, TOPIC, Bench
from tests.reactor import pause
from tfmq import twisted
from tfmq.client.consumer.message import CURRENT_MESSAGE
from tfmq.client.worker.listeners import Reject
from tfmq.errors import BadRequest, NotAllowed
from tfmq.testing.broker import SimulatedBroker


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with SimulatedBroker() as broker:
        made = Bench(broker, tmp_path)
        made.send("a", "b", "c")
        yield made


def consumer_of(bench: Bench, reactor: Any, **options: Any) -> twisted.Consumer[Any]:
    reported = {"group": GROUP, "dead_letters": None, **options}
    return twisted.Consumer(bench.broker.servers, topics=TOPIC, reactor=reactor, **reported)


@pytest.mark.parametrize("kind", ["plain", "coroutine", "deferred", "inline callbacks"])
def test_every_kind_of_listener_is_waited_for_in_turn(bench: Bench, kind: str) -> None:
    seen: list[str] = []

    async def story(reactor: Any) -> None:
        consumer = consumer_of(bench, reactor)

        def finished(message: Any) -> None:
            if kind != "deferred":  # its callbacks belong to the code that fires it
                assert CURRENT_MESSAGE.get() is message
            assert threading.current_thread() is threading.main_thread()
            seen.append(message.text)
            if len(seen) == 3:
                consumer.stop()

        async def coroutine(message: Any) -> None:
            await pause(reactor, 0.01)
            finished(message)

        def deferred(message: Any) -> Deferred[None]:
            return pause(reactor, 0.01).addCallback(lambda _: finished(message))

        @inlineCallbacks  # type: ignore[untyped-decorator]
        def inline(message: Any) -> Any:
            yield pause(reactor, 0.01)
            finished(message)

        listeners = {"plain": finished, "coroutine": coroutine, "deferred": deferred}
        await consumer.run(listeners.get(kind, inline), signals=False)

    rig.play(story)
    assert seen == ["a", "b", "c"]
    assert (bench.saved() or 0) > bench.place("c")


def test_many_workers_are_at_work_at_the_same_time(bench: Bench) -> None:
    async def story(reactor: Any) -> int:
        consumer = consumer_of(bench, reactor)
        at_work: list[str] = []
        all_there: list[Deferred[None]] = []

        async def handle(message: Any) -> None:
            at_work.append(message.text)
            if len(at_work) < 3:
                waiting: Deferred[None] = Deferred()
                all_there.append(waiting)
                await waiting
            for waiting in all_there:
                if not waiting.called:
                    waiting.callback(None)
            consumer.stop()

        await consumer.run(handle, workers=3, order="none", signals=False)
        return len(at_work)

    assert rig.play(story) == 3
    assert (bench.saved() or 0) > bench.place("c")


def test_what_fails_is_called_again_and_becomes_a_dead_letter(bench: Bench) -> None:
    calls: list[str] = []

    async def story(reactor: Any) -> None:
        consumer = consumer_of(bench, reactor, dead_letters=bench.store, retries=2)

        def handle(message: Any) -> Deferred[None] | None:
            calls.append(message.text)
            if message.text == "a":
                return pause(reactor, 0.0).addCallback(lambda _: 1 // 0)
            if message.text == "b":
                raise Reject("not wanted")
            consumer.stop()
            return None

        await consumer.run(handle, signals=False)

    rig.play(story)
    assert calls == ["a"] * 3 + ["b", "c"]
    assert {text for text, letter in bench.letters().items() if letter.state == "dead"} == {"a", "b"}


async def other_coroutine(message: Any) -> None:
    raise AssertionError("it is never awaited")


def one_generator(message: Any) -> Any:
    yield message


@pytest.mark.parametrize("kind", ["plain", "coroutine", "deferred"])
def test_a_listener_whose_body_did_not_run_has_failed(bench: Bench, kind: str) -> None:
    async def story(reactor: Any) -> None:
        async def coroutine(message: Any) -> Any:
            return other_coroutine(message)

        def deferred(message: Any) -> Any:
            return pause(reactor, 0.0).addCallback(lambda _: one_generator(message))

        listeners = {"plain": lambda message: one_generator(message), "coroutine": coroutine}
        with pytest.raises(BadRequest, match="whose body was not run"):
            await consumer_of(bench, reactor, retries=0).run(listeners.get(kind, deferred), signals=False)

    rig.play(story)
    assert bench.saved() in (None, 0)


def test_within_a_run_no_other_caller_is_handed_messages(bench: Bench) -> None:
    refused: list[str] = []

    async def story(reactor: Any) -> None:
        consumer = consumer_of(bench, reactor)

        async def handle(message: Any) -> None:
            for ask in (consumer.poll, consumer.__anext__, lambda: consumer.run(print)):
                with pytest.raises(NotAllowed, match="hands out the messages of this consumer"):
                    await ask()
                refused.append(message.text)
            consumer.stop()

        await consumer.run(handle, signals=False)

    rig.play(story)
    assert refused == ["a"] * 3


def test_without_a_store_the_error_is_raised(bench: Bench) -> None:
    async def story(reactor: Any) -> None:
        def refuse(message: Any) -> None:
            raise LookupError(message.text)

        with pytest.raises(LookupError, match="a"):
            await consumer_of(bench, reactor, retries=0).run(refuse, signals=False)

    rig.play(story)
    assert bench.saved() in (None, bench.place("a"))


def test_a_run_that_is_cancelled_saves_what_is_finished_and_says_cancelled(bench: Bench) -> None:
    async def story(reactor: Any) -> None:
        second: Deferred[None] = Deferred()

        async def handle(message: Any) -> None:
            if message.text == "b":
                second.callback(None)
                await Deferred()

        running = consumer_of(bench, reactor).run(handle, signals=False)
        await second
        running.cancel()
        with pytest.raises(CancelledError):
            await running

    rig.play(story)
    assert bench.saved() == bench.place("b")


def test_a_deferred_that_a_listener_cancels_is_a_failure_as_any_other(bench: Bench) -> None:
    async def story(reactor: Any) -> None:
        def handle(message: Any) -> Deferred[None]:
            given_up: Deferred[None] = Deferred()
            given_up.cancel()
            return given_up

        with pytest.raises(CancelledError):
            await consumer_of(bench, reactor, retries=1).run(handle, signals=False)

    rig.play(story)


def test_a_reactor_that_stops_waits_for_what_is_in_work(bench: Bench) -> None:
    done: list[str] = []

    async def story(reactor: Any) -> None:
        async def handle(message: Any) -> None:
            reactor.stop()
            await pause(reactor, 0.05)
            done.append(message.text)

        await consumer_of(bench, reactor).run(handle)

    before = signal.getsignal(signal.SIGTERM)
    rig.play(story, stops=False)
    assert done == ["a"]
    assert bench.saved() == bench.place("b")
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_run_that_ended_leaves_nothing_at_the_reactor(bench: Bench) -> None:
    async def story(reactor: Any) -> None:
        consumer = consumer_of(bench, reactor)
        await consumer.run(lambda message: consumer.stop())
        assert reactor._eventTriggers["shutdown"].before == before

    before: list[Any] = []

    async def noted(reactor: Any) -> None:
        before.extend(reactor._eventTriggers["shutdown"].before)
        await story(reactor)

    rig.play(noted)


PROGRAM = """
import os, signal, sys
import tfmq.twisted
from tfmq.testing import SimulatedBroker
from twisted.internet.defer import Deferred
from twisted.internet.task import deferLater, react

count = int(sys.argv[1])
broker = SimulatedBroker()
for text in "abc":
    broker.producer().send("orders", text).result()

async def main(reactor):
    consumer = tfmq.twisted.Consumer(broker.servers, topics="orders", group="billing", dead_letters=None)

    async def handle(message):
        for _ in range(count):
            os.kill(os.getpid(), signal.SIGTERM)
            await deferLater(reactor, 0.1)
        if count > 1:
            await Deferred()
        print("done", message.text)

    try:
        await consumer.run(handle)
    finally:
        with broker.admin() as admin:
            print("saved", [each["offset"] for each in admin.group("billing").offsets])

react(main)
"""


def ended(count: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM, str(count)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.long
def test_sigterm_stops_the_reactor_after_the_message_in_work() -> None:
    ending = ended(1)
    assert ending.stdout.splitlines()[0] == "done a", ending.stderr
    assert ending.stdout.count("done") == 1
    assert "saved [" in ending.stdout and "saved []" not in ending.stdout
    assert ending.returncode in (0, -signal.SIGTERM), ending.stderr


@pytest.mark.long
def test_a_second_sigterm_ends_at_once() -> None:
    ending = ended(2)
    assert "done" not in ending.stdout
    assert ending.returncode == 128 + signal.SIGTERM, ending.stderr
