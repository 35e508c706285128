"""The asyncio faces: the blocking ones' names and promises, awaited."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import tfmq
from tests.client.fake_broker import HOLD, LOSE, FakeBroker, listening
from tests.client.fake_delays import NOW_MS, Waiting
from tests.client.in_doubt_broker import InDoubtBroker, row
from tfmq import admin, aio, consumer, producer
from tfmq.errors import Busy, Closed, ConnectionFailed, DeliveryFailed, DiskFull, NotAllowed, TimedOut
from tfmq.message import Message
from tfmq.protocol.commands import Produce

SECONDS = 20.0
# What only one face has: waiting without waiting, and what each needs to be a context manager.
ONLY_ASYNC = {"send_nowait"}


def play(story: Callable[[aio.Producer, FakeBroker], Awaitable[Any]], **arguments: Any) -> FakeBroker:
    broker = FakeBroker(arguments.pop("partitions", 1))
    with listening(broker) as servers:

        async def bounded() -> None:
            async with aio.Producer(servers, **arguments) as made:
                await asyncio.wait_for(story(made, broker), SECONDS)

        asyncio.run(bounded())
    return broker


def public(face: type) -> dict[str, Any]:
    return {name: member for name, member in vars(face).items() if not name.startswith("_") and callable(member)}


@pytest.mark.parametrize(
    ("blocking", "asynchronous"),
    [(producer.Producer, aio.Producer), (admin.Admin, aio.Admin), (consumer.Consumer, aio.Consumer)],
)
def test_both_api_variants_have_the_same_names_parameters_and_docs(blocking: type, asynchronous: type) -> None:
    ours, theirs = public(blocking), public(asynchronous)
    assert set(theirs) - set(ours) <= ONLY_ASYNC
    assert set(ours) <= set(theirs)
    for name, member in ours.items():
        mine, other = inspect.signature(member), inspect.signature(theirs[name])
        assert list(mine.parameters.values()) == list(other.parameters.values()), name
        assert member.__doc__, name
        assert theirs[name].__doc__, name
    made, others = inspect.signature(blocking), inspect.signature(asynchronous)
    assert list(made.parameters.values()) == list(others.parameters.values())


def test_the_docs_of_one_api_variant_are_those_of_the_other() -> None:
    for name in ("send", "send_many", "flush", "close", "stats"):
        assert (getattr(aio.Producer, name).__doc__ or "").startswith(getattr(producer.Producer, name).__doc__)
    assert aio.Admin.create_topic.__doc__ == admin.Admin.create_topic.__doc__


def test_a_send_is_acknowledged() -> None:
    async def story(made: aio.Producer, broker: FakeBroker) -> None:
        result = await made.send("orders", b"hello", key="42")
        assert (result.offset, result.durability) == (0, "synced")

    assert play(story).payloads("orders") == [b"hello"]


def test_sends_of_many_tasks_share_batches() -> None:
    async def story(made: aio.Producer, broker: FakeBroker) -> None:
        await made.send("orders", b"first")
        results = await asyncio.gather(*[made.send("orders", b"%d" % n) for n in range(1000)])
        assert len({each.offset for each in results}) == 1000
        assert len(broker.logs["orders", 0]) < 20

    broker = play(story, linger_ms=60_000)
    assert broker.payloads("orders")[1:] == [b"%d" % n for n in range(1000)]


def test_send_nowait_gives_an_awaitable_handle() -> None:
    async def story(made: aio.Producer, broker: FakeBroker) -> None:
        delivery = made.send_nowait("orders", b"a", key="k")
        with pytest.raises(NotAllowed, match="await"):
            delivery.result()
        assert (await delivery).offset == 0
        assert delivery.result() == await delivery
        heard = asyncio.get_running_loop().create_future()
        made.send_nowait("orders", Message(b"b")).add_callback(heard.set_result)
        assert (await heard).done()

    assert play(story, partitions=1).payloads("orders") == [b"a", b"b"]


def test_a_full_buffer_is_busy_at_once_or_waited_for() -> None:
    async def story(made: aio.Producer, broker: FakeBroker) -> None:
        await made.send("orders", b"x")
        broker.plan(Produce, *[HOLD] * 20)
        with pytest.raises(Busy, match="await something first"):
            for _ in range(1000):
                made.send_nowait("orders", b"x" * 900)
                await asyncio.sleep(0)
        waiting = asyncio.create_task(made.send("orders", b"last"))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        broker.plans.clear()
        broker.release()
        await waiting

    assert play(story, buffer_bytes=50_000, batch_bytes=10_000).payloads("orders")[-1] == b"last"


def test_many_at_once() -> None:
    async def story(made: aio.Producer, broker: FakeBroker) -> None:
        results = await made.send_many("orders", (b"%d" % n for n in range(10_000)))
        assert sum(each.count for each in results) == 10_000

    assert play(story).payloads("orders") == [b"%d" % n for n in range(10_000)]


def test_a_cancelled_send_leaves_the_producer_usable_and_is_stored_once() -> None:
    async def story(made: aio.Producer, broker: FakeBroker) -> None:
        await made.send("orders", b"a")
        broker.plan(Produce, HOLD)
        task = asyncio.create_task(made.send("orders", b"b"))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        broker.release()
        await made.send("orders", b"c")

    assert play(story).payloads("orders") == [b"a", b"b", b"c"]


def test_a_lost_answer_doubles_nothing() -> None:
    async def story(made: aio.Producer, broker: FakeBroker) -> None:
        broker.plan(Produce, LOSE, None, LOSE)
        for number in range(5):
            await made.send("orders", b"%d" % number)

    assert play(story).payloads("orders") == [b"%d" % n for n in range(5)]


def test_flush_and_close_raise_unread_failures() -> None:
    async def story(made: aio.Producer, broker: FakeBroker) -> None:
        await made.send("orders", b"a")
        broker.plan(Produce, DiskFull(), DiskFull())
        unseen = made.send_nowait("orders", b"b")
        with pytest.raises(DeliveryFailed) as caught:
            await made.flush()
        assert caught.value.deliveries == [unseen]
        made.send_nowait("orders", b"c")
        with pytest.raises(DeliveryFailed):
            await made.close()
        with pytest.raises(Closed):
            await made.send("orders", b"d")

    play(story)


def test_a_close_that_is_cancelled_says_so_to_what_was_pending() -> None:
    async def story(made: aio.Producer, broker: FakeBroker) -> None:
        await made.send("orders", b"a")
        broker.plan(Produce, HOLD)
        pending = made.send_nowait("orders", b"b")
        closing = asyncio.create_task(made.close())
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(TimedOut, match=r"closed before it was delivered: the waiting in close\(\) was cancelled"):
            await pending

    play(story)


def test_what_is_delayed_is_cancelled_and_rescheduled() -> None:
    async def story(made: aio.Producer, broker: FakeBroker) -> None:
        result = await made.send("orders", b"x", delay=60)
        nowait = await made.send_nowait("orders", b"y", deliver_at=2_000_000_000)
        assert broker.delayed_payloads() == [b"x", b"y"] and result.offset is nowait.offset is None
        moved = await made.reschedule(result.delayed, 5)
        assert (moved.state, await made.cancel(moved.handle or "")) == ("rescheduled", "cancelled")
        (entry,) = await made.send_many("orders", [b"1", b"2"], delay=1)
        assert [await made.cancel(each) for each in entry.delayed] == ["cancelled"] * 2
        with pytest.raises(TypeError):
            await made.send("orders", b"x", delay=1, deliver_at=1)
        assert broker.delayed_payloads() == [b"y"]

    play(story)


def test_no_broker_is_reported() -> None:
    async def story() -> None:
        made = tfmq.aio.Producer("127.0.0.1:1")
        with pytest.raises(ConnectionFailed, match="start tfmq-server"):
            await made.send("orders", b"x")
        await made.close()

    asyncio.run(asyncio.wait_for(story(), SECONDS))


def test_making_one_needs_no_loop() -> None:
    assert aio.Producer().stats()["connected"] is False
    assert aio.Admin() is not None


def test_admin_asks() -> None:
    async def story(servers: str) -> None:
        async with aio.Admin(servers) as made:
            assert await made.ping() > 0
            assert await made.topics() == []

    with listening(FakeBroker()) as servers:
        asyncio.run(asyncio.wait_for(story(servers), SECONDS))


WAITING = [Waiting(NOW_MS + 1000 * n, n, "orders", 0, b"r" * 20) for n in range(5)]
HANDLES = [each.handle for each in WAITING]
CALLS: tuple[tuple[str, tuple[Any, ...], dict[str, Any]], ...] = (
    ("ping", (), {}),
    ("topics", (), {}),
    ("transactions", (), {"limit": 5}),
    ("transactions", (["open"],), {"group": "shop", "after": 1}),
    ("transaction", ("order",), {}),
    ("commit_transaction", ("order",), {}),
    ("rollback_transaction", ("other", 4), {"heuristic": False}),
    ("forget_transaction", ("order",), {}),
    ("commit_groups", (), {}),
    ("commit_group", ("q", 1, "run", [("a", 1), ("b", 2)], 10), {"other_total": True}),
    ("abort_commit_group", ("q", 1, "run"), {}),
    ("forget_commit_group", ("query-1",), {}),
    ("delayed", (), {}),
    ("delayed", ("orders",), {"partition": 0, "first": 0, "end": 1 << 40, "after": HANDLES[0], "limit": 1}),
    ("delayed_histogram", ([0, NOW_MS / 1000, 1 << 40],), {}),
    ("delayed_histogram", ([0, 1 << 40], "orders"), {}),
    ("describe_delayed", (HANDLES[2],), {}),
    ("reschedule", (HANDLES[1], 0), {}),
    ("reschedule", (HANDLES[2],), {"deliver_at": 2_000_000_000}),
    ("cancel", (HANDLES[0],), {}),
    ("schedule", ("@daily", "orders", "go"), {"name": "a", "key": "k", "misfire": "all", "timezone": "Asia/Tokyo"}),
    ("schedule", ("@daily", "orders", None), {"tag": "t", "properties": {"n": "1"}, "partition": 0}),
    ("schedules", (), {}),
    ("describe_schedule", ("a",), {}),
    ("pause_schedule", ("a",), {}),
    ("resume_schedule", ("a",), {}),
    ("remove_schedule", ("a",), {}),
)


def broker() -> InDoubtBroker:
    made = InDoubtBroker(row("order", 3), row("other", 4), row("busy", 5, "open"))
    made.waiting, made.numbers = list(WAITING), len(WAITING)
    return made


def test_each_method_asks_the_same_and_gives_the_same_as_the_blocking_one() -> None:
    one, other = broker(), broker()
    with listening(one) as servers, tfmq.Admin(servers) as admin:
        expected = [getattr(admin, name)(*given, **named) for name, given, named in CALLS]

    async def ask(servers: str) -> list[Any]:
        async with aio.Admin(servers) as admin:
            return [await getattr(admin, name)(*given, **named) for name, given, named in CALLS]

    with listening(other) as servers:
        found = asyncio.run(asyncio.wait_for(ask(servers), SECONDS))
    assert found == expected
    assert other.requests[1:] == one.requests[1:], "behind hello"
    assert [each.state for each in expected[2]] == ["prepared", "prepared"]
