"""The Twisted consumer, on a broker in this process and over real sockets."""

from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from twisted.internet.defer import CancelledError, Deferred, gatherResults, inlineCallbacks

from tests import reactor as rig
from tests.client.handling_rig import Bench
from tests.reactor import pause
from tfmq import twisted
from tfmq.errors import BadRequest
from tfmq.offsets.storage import PartitionName
from tfmq.testing.broker import SimulatedBroker

Story = Callable[[Any], Coroutine[Any, Any, Any]]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with SimulatedBroker() as broker:
        yield Bench(broker, tmp_path)


def consumer(bench: Bench, reactor: Any, **options: Any) -> twisted.Consumer[Any]:
    reported = {"topics": "orders", "group": "billing", "dead_letters": bench.store, **options}
    return twisted.Consumer(bench.broker.servers, reactor=reactor, **reported)


def test_it_reads_in_async_for_until_it_is_stopped(bench: Bench) -> None:
    bench.send("a", "b", "c")

    async def story(reactor: Any) -> list[str]:
        texts = []
        async with consumer(bench, reactor) as made:
            async for message in made:
                texts.append(message.text)
                if message.text == "c":
                    made.stop()
        return texts

    assert rig.play(story) == ["a", "b", "c"]
    assert (bench.saved() or 0) > bench.place("c")


def test_the_next_message_is_asked_for_one_by_one(bench: Bench) -> None:
    bench.send("a", "b")

    async def story(reactor: Any) -> list[str]:
        async with consumer(bench, reactor) as made:
            return [(await anext(made)).text, (await anext(made)).text]

    assert rig.play(story) == ["a", "b"]


def test_what_is_in_work_at_an_error_is_not_acked(bench: Bench) -> None:
    bench.send("a", "b")

    async def story(reactor: Any) -> None:
        with pytest.raises(ValueError, match="not b"):
            async with consumer(bench, reactor) as made:
                async for message in made:
                    if message.text == "b":
                        raise ValueError("not b")

    rig.play(story)
    assert bench.saved() == bench.place("b")


def test_polling_in_inline_callbacks(bench: Bench) -> None:
    bench.send("a", "b", "c")

    async def story(reactor: Any) -> Any:
        made = consumer(bench, reactor, commits="manual")

        @inlineCallbacks  # type: ignore[untyped-decorator]
        def two() -> Any:
            messages = yield made.poll(max_messages=2)
            yield made.commit(messages[0])
            yield made.close()
            return [message.text for message in messages]

        return await two()

    assert rig.play(story) == ["a", "b"]
    assert bench.saved() == bench.place("b")


def test_places_are_asked_for_and_changed(bench: Bench) -> None:
    bench.send("a", "b", "c")

    async def story(reactor: Any) -> None:
        made = consumer(bench, reactor)
        assert int(await made.lag()) == 3
        assert [message.text for message in await made.poll()] == ["a", "b", "c"]
        assert await made.position("orders", 0) > bench.place("c")
        await made.seek("orders", 0, offset=bench.place("b"))
        assert [message.text for message in await made.poll()] == ["b", "c"]
        await made.commit()
        assert await made.committed("orders", 0) == await made.position("orders", 0)
        await made.pause("orders", 0)
        await made.seek("orders", 0, to="earliest")
        assert await made.poll(timeout=1) == []
        await made.resume("orders", 0)
        assert [message.text for message in await made.poll()] == ["a", "b", "c"]
        await made.close()

    rig.play(story)


def test_a_cancelled_poll_leaves_it_usable(bench: Bench) -> None:
    async def story(reactor: Any) -> None:
        made = consumer(bench, reactor)
        polled = made.poll(timeout=3000)
        polled.cancel()
        with pytest.raises(CancelledError):
            await polled
        bench.send("a")
        assert [message.text for message in await made.poll(timeout=60)] == ["a"]
        await made.close()

    rig.play(story)


@pytest.mark.parametrize("kind", ["coroutine", "deferred"])
def test_the_callbacks_of_partitions_are_waited_for(bench: Bench, kind: str) -> None:
    bench.send("a")
    reported: list[str] = []

    async def story(reactor: Any) -> None:
        def deferred(names: list[PartitionName]) -> Deferred[None]:
            return pause(reactor, 0.02).addCallback(lambda _: reported.extend(str(each) for each in names))

        async def coroutine(names: list[PartitionName]) -> None:
            await deferred(names)

        made = consumer(bench, reactor, on_assigned={"coroutine": coroutine, "deferred": deferred}[kind])
        await made.poll()
        assert len(reported) == 1
        await made.close()

    rig.play(story)


def test_what_that_raises_is_raised_to_who_reads(bench: Bench) -> None:
    bench.send("a")

    async def refuse(names: list[PartitionName]) -> None:
        raise LookupError("no room for them")

    async def story(reactor: Any) -> None:
        made = consumer(bench, reactor, on_assigned=refuse)
        with pytest.raises(LookupError, match="no room"):
            await made.poll()
        await made.close()

    rig.play(story)


def test_a_failing_body_gets_its_message_again_and_a_dead_letter_in_the_end(bench: Bench) -> None:
    bench.send("a", "b")
    calls: list[str] = []

    async def story(reactor: Any) -> None:
        async with consumer(bench, reactor, retries=2) as made:
            async for message in made:
                async with message.handling():
                    calls.append(message.text)
                    if message.text == "a":
                        raise ValueError("not a")
                    made.stop()

    rig.play(story)
    assert calls == ["a"] * 3 + ["b"]
    assert bench.letters()["a"].state == "dead"
    assert (bench.saved() or 0) > bench.place("b")


def test_run_handles_all_until_it_is_stopped(bench: Bench) -> None:
    bench.send("a", "b", "c")

    async def story(reactor: Any) -> None:
        made = consumer(bench, reactor)

        @made.on("orders")
        def handle(message: Any) -> None:
            bench.handled.append(message.text)
            if message.text == "c":
                made.stop()

        await made.run(signals=False)

    rig.play(story)
    assert bench.handled == ["a", "b", "c"]
    assert (bench.saved() or 0) > bench.place("c")


@pytest.mark.parametrize("tracebacks", [True, False])
def test_a_failed_call_is_logged_with_its_traceback_or_without(
    bench: Bench, caplog: pytest.LogCaptureFixture, tracebacks: bool
) -> None:
    bench.send("a")

    async def story(reactor: Any) -> None:
        made = consumer(bench, reactor, retries=0)

        async def handle(message: Any) -> None:
            made.stop()
            raise ValueError("no price")

        await made.run(handle, signals=False, tracebacks=tracebacks)

    rig.play(story)
    (record,) = (each for each in caplog.records if "failed (ValueError)" in each.message)
    assert bool(record.exc_info) == tracebacks and ("no price" in caplog.text) == tracebacks


def test_run_refuses_what_makes_no_sense(bench: Bench) -> None:
    async def story(reactor: Any) -> None:
        with pytest.raises(BadRequest, match="workers=0"):
            await consumer(bench, reactor).run(print, workers=0)

    rig.play(story)


def test_consumers_of_one_group_share(bench: Bench) -> None:
    with bench.broker.admin() as admin:
        admin.grow_topic("orders", 4)
    for number in range(4):
        bench.send(f"{number}", partition=number)

    async def story(reactor: Any) -> None:
        both = [consumer(bench, reactor) for _ in range(2)]
        got: list[str] = []
        for _ in range(20):
            for messages in await gatherResults([each.poll(timeout=5) for each in both]):
                got += [message.text for message in messages]
            shares = [len(each.stats()["partitions"]) for each in both]
            if sorted(shares) == [2, 2] and len(got) >= 4:
                break
        assert sorted(got) == ["0", "1", "2", "3"]
        assert sorted(shares) == [2, 2]
        await gatherResults([each.close() for each in both])

    rig.play(story)
