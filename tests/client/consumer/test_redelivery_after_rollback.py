"""What a transaction that came to nothing had of a consumer is handed out again, in all faces and by all ways."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tfmq
import tfmq.aio
from tests import reactor as rig
from tests.client.consumer.test_core import filled, offset_of
from tests.client.consumer.test_transaction_offsets import consuming, standing
from tests.client.handling_rig import GROUP, TOPIC, Bench
from tests.client.scripted_broker import Broker
from tfmq import twisted
from tfmq.dead_letters.store import GroupDeadLetterStore
from tfmq.errors import Busy, DiskFull, NotAllowed
from tfmq.offsets.storage import PartitionName
from tfmq.protocol import commands as wire
from tfmq.testing.broker import SimulatedBroker

NAME = PartitionName("orders", 0)
ARGUMENTS: dict[str, Any] = {"topics": TOPIC, "group": GROUP, "commits": "manual"}


class Undone(Exception):
    """Ends a transaction."""


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with SimulatedBroker() as broker:
        made = Bench(broker, tmp_path)
        made.send("a", "b", "c")
        yield made


# The faces: who catches the error and goes on has passed over nothing


def test_a_loop_gets_the_messages_of_a_rolled_back_transaction_again(bench: Bench) -> None:
    seen = []
    with bench.broker.producer() as producer, bench.open(commits="manual") as consumer:
        for message in consumer:
            seen.append(message.text)
            try:
                with producer.transaction() as tx:
                    tx.send("bills", message.payload)
                    tx.commit_offsets(consumer)
                    if seen == ["a", "b"]:
                        raise Undone
            except Undone:
                continue
            if message.text == "c":
                break
    assert seen == ["a", "b", "b", "c"]
    assert [message.text for message in bench.broker.sent("bills")] == ["a", "b", "c"]
    assert bench.open(commits="manual").poll(timeout=1) == []


def test_what_was_polled_comes_again_after_rollback(bench: Bench) -> None:
    with bench.broker.producer() as producer, bench.open(commits="manual") as consumer:
        assert [message.text for message in consumer.poll(max_messages=2)] == ["a", "b"]
        tx = producer.begin()
        tx.commit_offsets(consumer)
        assert [message.text for message in consumer.poll(max_messages=1)] == ["c"]
        assert tx.rollback() == "rolled_back"
        assert [message.text for message in consumer.poll()] == ["a", "b", "c"]


def test_asyncio_a_task_that_is_cancelled_inside_gets_them_again(bench: Bench) -> None:
    async def program() -> list[str]:
        async with (
            tfmq.aio.Producer(bench.broker.servers) as producer,
            tfmq.aio.Consumer(bench.broker.servers, **ARGUMENTS) as consumer,
        ):
            (message,) = await consumer.poll(max_messages=1)

            async def handle() -> None:
                async with producer.transaction() as tx:
                    await tx.send("bills", message.payload)
                    tx.commit_offsets(consumer)
                    inside.set()
                    await asyncio.Event().wait()

            inside = asyncio.Event()
            task = asyncio.create_task(handle())
            await inside.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            tx = await producer.begin()
            again = [message.text for message in await consumer.poll()]
            tx.commit_offsets(consumer)
            await tx.rollback()
            return again + [message.text for message in await consumer.poll()]

    assert asyncio.run(program()) == ["a", "b", "c"] * 2


def test_twisted_gets_them_again(bench: Bench) -> None:
    seen: list[str] = []

    async def story(reactor: Any) -> None:
        producer = twisted.Producer(bench.broker.servers, reactor=reactor)
        consumer = twisted.Consumer(bench.broker.servers, **ARGUMENTS, reactor=reactor)
        seen.extend([message.text for message in await consumer.poll(max_messages=1)])
        with pytest.raises(Undone):
            async with producer.transaction() as tx:
                tx.commit_offsets(consumer)
                raise Undone
        seen.extend([message.text for message in await consumer.poll(max_messages=1)])
        tx = await producer.begin()
        tx.commit_offsets(consumer)
        await tx.rollback()
        seen.extend([message.text for message in await consumer.poll()])
        await consumer.close()
        await producer.close()

    rig.play(story)
    assert seen == ["a", "a", "a", "b", "c"]


def test_a_body_of_handling_that_rolls_back_is_called_with_all_of_its_transaction(bench: Bench) -> None:
    """A transaction over two messages: the loop goes back to the first, not only to the one that failed."""
    seen, failing = [], ["b"]
    with bench.broker.producer() as producer, bench.open(commits="manual") as consumer:
        tx = producer.begin()
        for message in consumer:
            seen.append(message.text)
            with message.handling():
                if message.text in failing:
                    failing.clear()
                    tx.commit_offsets(consumer)
                    tx.rollback()
                    raise Undone
            if message.text == "c":
                break
    assert seen == ["a", "b", "a", "b", "c"]
    assert {text: each.state for text, each in bench.letters().items() if each.state == "dead"} == {}


def test_a_handler_of_run_is_called_again_with_its_own_message_only(bench: Bench) -> None:
    seen: list[str] = []
    consumer = bench.open(commits="manual", retries=1, dead_letters=None)
    with bench.broker.producer() as producer:

        def handle(message: Any) -> None:
            seen.append(message.text)
            if len(seen) == 9:
                consumer.stop()
            with producer.transaction() as tx:
                tx.commit_offsets(consumer)
                if message.text == "b":
                    raise Undone

        with pytest.raises(Undone):
            consumer.run(handle)
    assert seen == ["a", "b", "b"], "its calls are counted: it does not come from the broker again"


# Where it goes on


@pytest.fixture
def broker() -> Broker:
    return Broker()


def test_it_goes_on_where_the_broker_says(broker: Broker) -> None:
    """Another transaction, of which the consumer heard nothing, was committed meanwhile."""
    log = filled(broker)
    script = consuming(broker)
    script.poll(count=2)
    taken = standing(script)
    row = taken.row.offsets[0]
    broker.offsets["g"] = {("orders", 0): wire.SavedOffset(*row[:3], offset_of(log, 1), *row[4:], 1)}
    taken.mark_rolled_back()
    assert script.poll(count=1) == [b"1"]
    script.commit()
    assert broker.saved("g") == offset_of(log, 2)


def test_nothing_is_handed_out_and_nothing_saved_before_the_broker_has_said(broker: Broker) -> None:
    filled(broker)
    script = consuming(broker)
    script.poll(count=1)
    script.commit()
    script.poll(count=2)
    broker.fail[wire.ReadOffsets] = [Busy("planted")] * 3
    standing(script).mark_rolled_back()
    script.commit()
    assert len(broker.sent(wire.CommitOffsets)) == 1
    assert script.poll(seconds=0) == []
    assert script.poll(seconds=60) == [b"1", b"2", b"3", b"4"]


def test_the_broker_is_asked_again_where_its_error_passes_and_the_next_call_raises_any_other(broker: Broker) -> None:
    filled(broker)
    script = consuming(broker)
    script.poll(count=2)
    broker.fail[wire.ReadOffsets] = [DiskFull("planted")]
    standing(script).mark_rolled_back()
    assert script.poll(seconds=60) == [b"0", b"1", b"2", b"3", b"4"]
    assert broker.fail[wire.ReadOffsets] == []
    broker.fail[wire.ReadOffsets] = [NotAllowed("planted")]
    standing(script).mark_rolled_back()
    with pytest.raises(NotAllowed, match="planted"):
        script.poll(seconds=60)


def test_a_seek_meanwhile_has_its_way(broker: Broker) -> None:
    log = filled(broker)
    script = consuming(broker)
    script.poll(count=1)
    script.commit()
    script.poll(count=1)
    taken = standing(script)
    row = taken.row.offsets[0]
    broker.offsets["g"] = {("orders", 0): wire.SavedOffset(*row[:3], offset_of(log, 2), *row[4:], 1)}
    broker.fail[wire.ReadOffsets] = [Busy("planted")] * 3
    taken.mark_rolled_back()
    script.run(script.core.seek(*NAME, offset=offset_of(log, 3)))
    assert script.poll() == [b"3", b"4"]
    script.pass_time(60)
    assert script.poll() == []


def test_one_that_was_granted_anew_meanwhile_is_left_where_it_is(broker: Broker) -> None:
    filled(broker)
    script = consuming(broker)
    script.poll(count=2)
    taken = standing(script)
    taken = taken._replace(generations={name: grant - 1 for name, grant in taken.generations.items()})
    taken.mark_rolled_back()
    assert script.poll() == [b"2", b"3", b"4"]


def test_a_forked_child_and_a_closed_consumer_go_nowhere(broker: Broker) -> None:
    filled(broker)
    script = consuming(broker)
    script.poll(count=2)
    taken = standing(script)
    broker.fail[wire.ReadOffsets] = [Busy("planted")] * 3
    taken.mark_rolled_back()
    script.core.reset_after_fork()
    assert script.core.suspended == set()
    taken.mark_rolled_back()
    script.close()
    taken.mark_rolled_back()


# commit() and transactions in handlers


def test_handlers_save_by_commit_or_in_transactions_and_not_by_both(bench: Bench) -> None:
    """One's commit() could take back the place that another's transaction has just saved."""
    refused: list[str] = []
    consumer = bench.open(commits="manual", dead_letters=None)
    with bench.broker.producer() as producer:

        def handle(message: Any) -> None:
            with producer.transaction() as tx:
                tx.commit_offsets(consumer)
            for wrong in (consumer.commit, lambda: consumer.commit(message)):
                with pytest.raises(NotAllowed, match=r"Use commit_offsets\(consumer\) everywhere"):
                    wrong()
                refused.append(message.text)
            consumer.stop()

        consumer.run(handle)
    assert refused == ["a", "a"] and bench.saved() == bench.place("b")


def test_a_transaction_beside_commit_is_refused_too(bench: Bench) -> None:
    consumer = bench.open(commits="manual", dead_letters=None, retries=0)
    with bench.broker.producer() as producer:

        def handle(message: Any) -> None:
            consumer.commit(message)
            with producer.transaction() as tx:
                tx.commit_offsets(consumer)

        with pytest.raises(NotAllowed, match="not by both"):
            consumer.run(handle)
    assert bench.saved() == bench.place("b")


def test_outside_of_handlers_both_may_be_used_in_turn(bench: Bench) -> None:
    with bench.broker.producer() as producer, bench.open(commits="manual") as consumer:
        consumer.poll(max_messages=1)
        consumer.commit()
        consumer.poll(max_messages=1)
        with producer.transaction() as tx:
            tx.commit_offsets(consumer)
    assert bench.saved() == bench.place("c")


def test_where_something_was_lost_the_others_of_the_batch_come_again(bench: Bench) -> None:
    """`Fenced` of commit_offsets itself: the transaction never had them, and who goes on has passed over nothing."""
    with bench.broker.admin() as admin:
        admin.grow_topic(TOPIC, 2)
    bench.send("x", "y", partition=1)
    consumer = bench.open(commits="manual", session=10)
    texts: list[str] = []
    while len(texts) < 5:
        texts += [message.text for message in consumer.poll(timeout=1)]
    core = consumer._core
    core.positions.remove_lost(PartitionName(TOPIC, 1))
    with bench.broker.producer() as producer:
        with pytest.raises(tfmq.Fenced), producer.transaction() as tx:
            tx.commit_offsets(consumer)
        assert [message.text for message in consumer.poll(timeout=1)] == ["a", "b", "c"]


# In run


def test_a_message_that_went_while_its_call_was_counted_is_not_called(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store takes its time; meanwhile the partition goes to another member, or is read from elsewhere."""
    bench.send("a", "b")
    counted: list[str] = []
    begin = GroupDeadLetterStore.count_call

    def goes(store: Any, message: Any) -> Any:
        state = yield from begin(store, message)
        counted.append(message.text)
        if len(counted) == 1:
            assert bench.consumer is not None
            core = bench.consumer._core
            (name,) = core.positions.names()
            core.set_position(name, core.positions.acked_position(name))
        return state

    monkeypatch.setattr(GroupDeadLetterStore, "count_call", goes)
    bench.run(until=2)
    assert counted == ["a", "a", "b"] and bench.handled == ["a", "b"]


@pytest.mark.parametrize("knows_consumer", [True, False])
def test_a_transaction_that_failed_at_a_send_returns_the_consumer_that_it_knew(knows_consumer: bool) -> None:
    with SimulatedBroker() as broker:
        producer = broker.producer()
        for number in range(4):
            producer.send("orders", str(number)).result()
        consumer = broker.consumer("orders", group="copies", commits="manual", dead_letters=None)
        failed = False
        while messages := consumer.poll(timeout=1, max_messages=2):
            try:
                with producer.transaction() as transaction:
                    if knows_consumer:
                        transaction.commit_offsets(consumer)
                    if not failed:
                        failed = True
                        raise DiskFull("of a send")
                    for message in messages:
                        transaction.send("copies", message.payload)
                    transaction.commit_offsets(consumer)
            except DiskFull:
                continue
        copies = [message.text for message in broker.sent("copies")]
        assert copies == (["0", "1", "2", "3"] if knows_consumer else ["2", "3"])
