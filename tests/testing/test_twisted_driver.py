"""A broker in this process for clients in a reactor: waits let time go on once everybody waits."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from twisted.internet.defer import gatherResults
from twisted.internet.threads import deferToThreadPool

from tests.reactor import pause, play
from tfmq import twisted
from tfmq.errors import NotAllowed, TimedOut
from tfmq.testing.broker import SimulatedBroker


@pytest.fixture
def broker() -> Iterator[SimulatedBroker]:
    with SimulatedBroker() as made:
        yield made


def test_what_is_sent_is_there_and_is_read(broker: SimulatedBroker) -> None:
    async def story(reactor: Any) -> None:
        async with twisted.Producer(broker.servers, reactor=reactor) as producer:
            result = await producer.send("orders", b"one", key="42")
            assert (result.offset, result.durability) == (0, "synced")
        async with twisted.Consumer(broker.servers, topics="orders", reactor=reactor) as consumer:
            assert [message.payload for message in await consumer.poll()] == [b"one"]

    play(story)
    assert [message.key for message in broker.sent("orders")] == ["42"]


def test_what_another_thread_calls_is_refused_and_changes_nothing(broker: SimulatedBroker) -> None:
    async def story(reactor: Any) -> None:
        producer = twisted.Producer(broker.servers, reactor=reactor)
        consumer: twisted.Consumer[Any] = twisted.Consumer(
            broker.servers, topics="orders", group="billing", commits="manual", reactor=reactor
        )
        admin = twisted.Admin(broker.servers, reactor=reactor)
        await producer.send("orders", b"first")
        assert len(await consumer.poll()) == 1
        await admin.ping()
        tx = await producer.begin("order-1")
        await tx.send("orders", b"third")
        calls: list[Callable[[], Any]] = [
            lambda: producer.send("orders", b"x"),
            lambda: producer.send("orders", b"x", delay=60),
            lambda: producer.send_nowait("orders", b"x"),
            lambda: producer.send_many("orders", [b"x"]),
            lambda: producer.begin("order-2"),
            lambda: producer.transaction(),
            lambda: producer.transaction_check(lambda transaction: "commit"),
            lambda: producer.close(),
            lambda: tx.send("orders", b"x"),
            lambda: tx.commit_offsets(consumer),
            lambda: tx.rollback(),
            lambda: consumer.commit(),
            lambda: consumer.seek("orders", 0, offset=0),
            lambda: consumer.pause("orders", 0),
            lambda: consumer.run(print),
            lambda: consumer.close(),
            lambda: admin.create_topic("invoices"),
            lambda: admin.close(),
        ]

        def call(method: Callable[[], Any]) -> None:
            failed: list[Any] = []
            result = method()
            if hasattr(result, "addErrback"):
                result.addErrback(lambda failure: failed.append(failure.value))
                raise failed[0]

        for method in calls:
            with pytest.raises(NotAllowed, match="callFromThread"):
                await deferToThreadPool(reactor, reactor.getThreadPool(), call, method)
        assert await consumer.committed("orders", 0) is None
        assert [each.xid for each in await admin.transactions(["open", "prepared"])] == ["order-1"]
        assert [each.name for each in await admin.topics()] == ["orders"]
        assert await admin.delayed() == []
        await producer.send("orders", b"second")
        assert (await consumer.poll())[0].payload == b"second"
        await tx.commit()
        for client in (consumer, producer, admin):
            await client.close()

    play(story)
    assert [message.payload for message in broker.sent("orders")] == [b"first", b"second", b"third"]


@pytest.mark.long
def test_an_hour_passes_in_no_time(broker: SimulatedBroker) -> None:
    async def story(reactor: Any) -> None:
        began, before = time.monotonic(), broker.clock.now
        consumer = twisted.Consumer(broker.servers, topics="orders", reactor=reactor)
        assert await consumer.poll(timeout=3600) == []
        assert (broker.clock.now - before).total_seconds() == pytest.approx(3600)
        assert time.monotonic() - began < 15
        await consumer.close()

    play(story)


def test_a_poll_ends_when_another_caller_sends(broker: SimulatedBroker) -> None:
    async def story(reactor: Any) -> None:
        producer = twisted.Producer(broker.servers, reactor=reactor)
        consumer = twisted.Consumer(broker.servers, topics="orders", reactor=reactor)
        polled = consumer.poll(timeout=600)
        await pause(reactor, 0)
        found, _ = await gatherResults([polled, producer.send("orders", b"now")])
        assert [message.payload for message in found] == [b"now"]
        await gatherResults([producer.close(), consumer.close()])

    play(story)


def test_what_is_delayed_comes_in_time(broker: SimulatedBroker) -> None:
    async def story(reactor: Any) -> None:
        producer = twisted.Producer(broker.servers, reactor=reactor)
        consumer = twisted.Consumer(broker.servers, topics="orders", reactor=reactor)
        before = broker.clock.now
        await producer.send("orders", b"later", delay=1800)
        assert [message.payload for message in await consumer.poll(timeout=3600)] == [b"later"]
        assert 1800 <= (broker.clock.now - before).total_seconds() < 1810
        await gatherResults([producer.close(), consumer.close()])

    play(story)


def test_a_failure_that_was_asked_for_comes(broker: SimulatedBroker) -> None:
    async def story(reactor: Any) -> None:
        async with twisted.Admin(broker.servers, reactor=reactor) as admin:
            broker.fail_next("create_topic", TimedOut)
            with pytest.raises(TimedOut):
                await admin.create_topic("orders", partitions=3)
            assert len((await admin.create_topic("orders", partitions=3)).partitions) == 3

    play(story)


def test_a_crash_doubles_and_loses_nothing(broker: SimulatedBroker) -> None:
    async def story(reactor: Any) -> None:
        async with twisted.Producer(broker.servers, reactor=reactor) as producer:
            await producer.send("orders", b"a")
            broker.crash()
            await producer.send("orders", b"b")

    play(story)
    assert [message.payload for message in broker.sent("orders")] == [b"a", b"b"]
