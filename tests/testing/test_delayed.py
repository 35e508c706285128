"""Delayed messages in a simulation: the promises of docs/delay.md, as a test of a user's program would see them."""

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import tfmq.aio
from tfmq.testing.broker import SimulatedBroker
from tfmq.testing.simulation import NothingComes


@pytest.fixture
def broker() -> Any:
    with SimulatedBroker() as made:
        yield made


def texts(broker: SimulatedBroker, topic: str = "orders") -> list[str]:
    return [message.text for message in broker.sent(topic)]


@pytest.mark.parametrize(
    "delay", [0.001, 0.01, 0.3, 1, 59.999, 65.536, 1800, timedelta(days=3), timedelta(days=3652)], ids=str
)
def test_a_message_is_there_at_its_time_and_not_a_millisecond_before(
    broker: SimulatedBroker, delay: float | timedelta
) -> None:
    seconds = delay.total_seconds() if isinstance(delay, timedelta) else delay
    sent_at = broker.clock.now
    broker.producer().send("orders", "x", delay=delay).result()
    broker.clock.advance(seconds - 0.001)
    assert texts(broker) == []
    broker.clock.advance(milliseconds=11)  # a millisecond, and at most one tick
    (message,) = broker.sent("orders")
    late = message.appended_at - sent_at - timedelta(seconds=seconds)
    assert timedelta(0) <= late <= timedelta(milliseconds=10)


def test_a_moment_may_be_named_instead(broker: SimulatedBroker) -> None:
    producer = broker.producer()
    producer.send("orders", "at ten", deliver_at=datetime(2026, 1, 5, 10, tzinfo=UTC)).result()
    producer.send("orders", "long past", deliver_at=datetime(2020, 1, 1, tzinfo=UTC)).result()
    broker.clock.advance(milliseconds=20)
    assert texts(broker) == ["long past"]
    broker.clock.advance_to(datetime(2026, 1, 5, 9, 59, 59, tzinfo=UTC))
    assert texts(broker) == ["long past"]
    broker.clock.advance(1.01)
    assert texts(broker) == ["long past", "at ten"]


def test_they_come_in_the_order_of_their_times_then_of_sending(broker: SimulatedBroker) -> None:
    producer = broker.producer()
    for name, delay in (("c", 30), ("a", 10), ("d", 30), ("b", 20), ("e", 30)):
        producer.send("orders", name, delay=delay).result()
    broker.clock.advance(minutes=1)
    assert texts(broker) == [*"abcde"]


@pytest.mark.parametrize("when", [{"delay": 0}, {"delay": timedelta()}, {"deliver_at": 1_000_000_000}])
def test_without_time_to_wait_it_comes_as_soon_as_it_can(broker: SimulatedBroker, when: Any) -> None:
    broker.producer().send("orders", "x", **when).result()
    broker.clock.advance(milliseconds=11)
    assert texts(broker) == ["x"]


def test_a_delay_below_0_is_refused_by_every_way_to_give_one(broker: SimulatedBroker) -> None:
    producer, admin = broker.producer(), broker.admin()
    waiting = producer.send("orders", "x", delay=60).result().delayed
    assert waiting is not None
    for give in (
        lambda: producer.send("orders", "x", delay=-5),
        lambda: producer.send("orders", tfmq.Message("x", delay=timedelta(days=-1))),
        lambda: producer.send_many("orders", ["x"], delay=-0.5),
        lambda: producer.reschedule(waiting, delay=-5),
        lambda: admin.reschedule(waiting, -5),
    ):
        with pytest.raises(tfmq.BadRequest, match="is before now"):
            give()
    broker.clock.advance(seconds=30)
    assert texts(broker) == []


def test_a_consumer_that_waits_long_enough_gets_it(broker: SimulatedBroker) -> None:
    broker.producer().send("orders", "x", delay=1800).result()
    consumer = broker.consumer("orders")
    before = broker.clock.now
    assert consumer.poll(timeout=1799) == []
    assert [message.text for message in consumer.poll(timeout=5)] == ["x"]
    assert timedelta(seconds=1800) <= broker.clock.now - before <= timedelta(seconds=1800.01)
    with pytest.raises(NothingComes):
        consumer.poll(timeout=None)


def test_a_handle_takes_it_back_once(broker: SimulatedBroker) -> None:
    producer = broker.producer()
    kept, taken = (producer.send("orders", name, delay=60).result().delayed for name in ("kept", "taken"))
    assert producer.cancel(taken) == "cancelled"
    broker.clock.advance(61)
    assert texts(broker) == ["kept"]
    assert [producer.cancel(kept), producer.cancel(taken)] == ["delivered", "cancelled"]


def test_a_handle_moves_it(broker: SimulatedBroker) -> None:
    producer = broker.producer()
    handle = producer.send("orders", "x", delay=60).result().delayed
    moved = producer.reschedule(handle, delay=3600)
    assert moved.state == "rescheduled" and moved.handle
    broker.clock.advance(3599)
    assert texts(broker) == []
    broker.clock.advance(2)
    assert texts(broker) == ["x"]
    assert producer.cancel(moved.handle) == "delivered"


def test_inside_a_transaction_the_time_counts_from_the_commit(broker: SimulatedBroker) -> None:
    producer = broker.producer()
    tx = producer.begin("order-1", timeout=900)
    tx.send("orders", "is it paid?", delay=1800)
    broker.clock.advance(600)
    tx.commit()
    broker.clock.advance(1799)
    assert texts(broker) == []
    broker.clock.advance(2)
    assert texts(broker) == ["is it paid?"]


def test_nothing_of_a_transaction_that_was_rolled_back_ever_comes(broker: SimulatedBroker) -> None:
    producer = broker.producer()
    with pytest.raises(KeyError), producer.transaction() as tx:
        tx.send("orders", "never", delay=10)
        raise KeyError
    broker.clock.advance(days=1)
    assert texts(broker) == []


def test_plain_delayed_and_transactional_sends_of_one_producer_go_together(broker: SimulatedBroker) -> None:
    producer = broker.producer()
    for number in range(30):
        producer.send("orders", f"plain {number}")
        producer.send("orders", f"delayed {number}", delay=number)
        with producer.transaction() as tx:
            tx.send("orders", f"together {number}")
            tx.send("orders", f"later {number}", delay=100 + number)
        if number % 10 == 9:
            broker.disconnect()
    producer.flush()
    broker.clock.advance(200)
    assert sorted(texts(broker)) == sorted(
        f"{kind} {number}" for kind in ("plain", "delayed", "together", "later") for number in range(30)
    )
    assert producer.stats()["failed_messages"] == 0


@pytest.mark.parametrize("keep", ["nothing", "some", "everything"])
def test_a_power_cut_loses_doubles_and_hurries_nothing(broker: SimulatedBroker, keep: str) -> None:
    producer = broker.producer()
    for number in range(40):
        producer.send("orders", str(number), delay=number + 0.5).result()
    for _ in range(8):
        broker.clock.advance(4)
        broker.crash(keep)
    broker.clock.advance(20)
    assert texts(broker) == [str(number) for number in range(40)]
    start = broker.clock.now - timedelta(seconds=52)
    for number, message in enumerate(broker.sent("orders")):
        assert message.appended_at - start >= timedelta(seconds=number + 0.5)


def test_what_fell_due_while_it_was_down_comes_in_order(broker: SimulatedBroker) -> None:
    producer = broker.producer()
    for number in reversed(range(50)):
        producer.send("orders", str(number), delay=timedelta(days=number)).result()
    broker.restart(down=timedelta(days=30))
    broker.clock.advance(1)
    assert texts(broker) == [str(number) for number in range(31)]
    broker.clock.advance(days=20)
    assert texts(broker) == [str(number) for number in range(50)]


@pytest.mark.parametrize("step", [timedelta(hours=1), timedelta(days=3652)], ids=str)
def test_a_wall_clock_that_is_set_forward_hurries_nothing(broker: SimulatedBroker, step: timedelta) -> None:
    broker.producer().send("orders", "x", delay=1800).result()
    broker.clock.step(step)
    broker.clock.advance(1799)
    assert texts(broker) == []
    broker.clock.advance(1.01)
    assert texts(broker) == ["x"]


def test_a_wall_clock_that_is_set_back_delays_no_delay_and_no_moment_comes_early(broker: SimulatedBroker) -> None:
    producer = broker.producer()
    producer.send("orders", "in half an hour", delay=1800).result()
    producer.send("orders", "at ten", deliver_at=datetime(2026, 1, 5, 10, tzinfo=UTC)).result()
    broker.clock.step(timedelta(hours=-1))
    broker.clock.advance(1801)
    assert texts(broker) == ["in half an hour"]
    broker.clock.advance_to(datetime(2026, 1, 5, 9, 59, 59, tzinfo=UTC))
    assert texts(broker) == ["in half an hour"]
    broker.clock.advance(minutes=1)
    assert texts(broker) == ["in half an hour", "at ten"]


def test_they_wait_for_room_on_a_full_disk(broker: SimulatedBroker) -> None:
    broker.producer().send("orders", b"x" * 100_000, delay=60).result()
    broker.disk.space_bytes = broker.disk.used_bytes()
    broker.clock.advance(120)
    assert broker.sent("orders") == []
    broker.disk.space_bytes = None
    broker.clock.advance(60)
    assert len(broker.sent("orders")) == 1


@pytest.mark.parametrize("restarts", [0, 1, 2])
def test_what_a_failed_fsync_took_comes_once_its_partition_is_repaired(broker: SimulatedBroker, restarts: int) -> None:
    """It was written, and that is all: after a power cut it is not there, and a client that forgot it has lost it."""
    broker.admin().create_topic("orders")
    handle = broker.producer().send("orders", "x", delay=1).result().delayed or ""
    for kind in ("force", "sync_file"):
        broker.disk.faults.fail(kind, path="/orders-0/")
    broker.clock.advance(5)
    for _ in range(restarts):
        broker.restart()
        broker.producer().send("others", "y", delay=100).result()
        broker.clock.advance(300)
    broker.crash()
    broker.disk.faults.clear()
    assert broker.admin().topic("orders").partitions[0].state == "stopped"
    assert broker.admin().resume("orders", 0) == "open"
    broker.clock.advance(minutes=1)
    assert texts(broker) == ["x"]
    assert broker.producer().cancel(handle) == "delivered"


def test_what_waits_for_a_topic_that_is_deleted_does_not_come_to_one_of_its_name(broker: SimulatedBroker) -> None:
    producer, admin = broker.producer(), broker.admin()
    producer.send("orders", "old", delay=60).result()
    admin.delete_topic("orders")
    admin.create_topic("orders")
    broker.producer().send("orders", "new", delay=90).result()
    broker.clock.advance(120)
    assert texts(broker) == ["new"]
    assert admin.delayed() == []


def test_the_longest_delay_waits_with_the_others(broker: SimulatedBroker) -> None:
    producer = broker.producer()
    handle = producer.send("orders", "never", delay=36_525 * 86_400).result().delayed or ""
    producer.send("orders", "soon", delay=1).result()
    broker.restart()
    broker.clock.advance(days=365 * 50)
    assert texts(broker) == ["soon"]
    assert producer.cancel(handle) == "cancelled"


def test_a_message_of_the_largest_size_waits_as_any_other(broker: SimulatedBroker) -> None:
    payload = bytes(range(256)) * (broker.admin().status()["settings"]["limits.message_bytes"] // 256)
    broker.producer().send("orders", payload, delay=3600).result()
    broker.crash()
    broker.clock.advance(3601)
    assert [message.payload == payload for message in broker.sent("orders")] == [True]


def test_the_operators_list_and_counts(broker: SimulatedBroker) -> None:
    producer, admin = broker.producer(), broker.admin()
    now = broker.clock.now
    for number in range(5):
        producer.send("orders", "x", key=str(number), delay=number * 60 + 30).result()
    assert [row.key for row in admin.delayed("orders")] == [*"01234"]
    assert [row.key for row in admin.delayed("orders", key="3")] == ["3"]
    counts = admin.delayed_histogram([now, now + timedelta(minutes=1), now + timedelta(minutes=5)])
    assert (list(counts.counts), counts.pending) == ([1, 4], 5)
    broker.clock.advance(minutes=10)
    assert admin.delayed("orders") == []


def test_a_list_fits_its_answers_however_long_the_keys_are(broker: SimulatedBroker) -> None:
    keys = [f"{number}:".ljust(65_536, "k") for number in range(100)]
    wishes = [tfmq.Message(b"x", key=key, delay=3600) for key in keys]
    broker.producer().send_many("orders", wishes).result()
    admin = broker.admin()
    assert [row.key for row in admin.delayed()] == keys
    assert [row.key for row in admin.delayed(limit=70)] == keys[:70]


@pytest.mark.long
def test_with_asyncio_too(broker: SimulatedBroker) -> None:
    async def program() -> list[str]:
        async with (
            tfmq.aio.Producer(broker.servers) as producer,
            tfmq.aio.Consumer(broker.servers, topics="orders") as consumer,
        ):
            late = await producer.send("orders", "late", delay=3600)
            await producer.send("orders", "soon", delay=60)
            first = await consumer.poll(timeout=120)
            assert await producer.cancel(late.delayed) == "cancelled"
            return [message.text for message in first + await consumer.poll(timeout=7200)]

    assert asyncio.run(program()) == ["soon"]


def test_an_hour_in_which_something_is_pending_passes_quickly(broker: SimulatedBroker) -> None:
    """Time stops where something is due, not at every tick of the wheel."""
    broker.producer().send("orders", "x", delay=timedelta(days=400)).result()
    before = broker._simulation.change_count
    broker.clock.advance(days=399)
    assert broker._simulation.change_count - before < 10_000
    assert texts(broker) == []
