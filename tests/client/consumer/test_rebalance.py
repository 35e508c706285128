"""How partitions are assigned and revoked: finished, saved, reported, released; never during a handler."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

import tfmq
import tfmq.aio
from tfmq.client.consumer.rebalance import call_user_function
from tfmq.errors import NotAllowed
from tfmq.offsets.storage import PartitionName
from tfmq.testing.broker import SimulatedBroker

LONG = 3600.0


@pytest.fixture
def broker() -> Iterator[SimulatedBroker]:
    with SimulatedBroker({"topics.partitions": 2}) as made:
        made.admin().create_topic("orders", partitions=2)
        producer = made.producer()
        for number in range(8):
            producer.send("orders", str(number), partition=number % 2).result()
        yield made


def member(broker: SimulatedBroker, **options: Any) -> tfmq.Consumer[Any]:
    return broker.consumer("orders", **{"group": "billing", "session": 10, "save_every": LONG, **options})


def assigned(consumer: tfmq.Consumer[Any]) -> set[str]:
    return set(consumer.stats()["assigned"])


def look(broker: SimulatedBroker, *consumers: tfmq.Consumer[Any], seconds: float = 2.0) -> list[str]:
    """They ask for messages for a while; the texts that came."""
    found: list[str] = []
    for _ in range(int(seconds / 0.25)):
        for consumer in consumers:
            found += [message.text for message in consumer.poll(timeout=0)]
        broker.clock.advance(0.25)
    return found


def other_than(partition: int) -> int:
    return 1 - partition


def test_what_is_to_go_is_released_at_once_where_nothing_of_it_is_in_work(broker: SimulatedBroker) -> None:
    first = member(broker)
    message = next(first)  # a message of one partition; the other one may go while it is worked on
    second = member(broker)
    look(broker, second)
    assert assigned(second) == {f"orders-{other_than(message.partition)}"} or first.stats()["releasing"]
    assert assigned(first) | assigned(second) | set(first.stats()["releasing"]) == {"orders-0", "orders-1"}


@pytest.mark.long
def test_a_handler_of_minutes_keeps_its_partition_and_the_one_who_waits_says_for_whom(broker: SimulatedBroker) -> None:
    first = member(broker)
    in_work = {message.partition for message in first.poll(timeout=1)}
    assert in_work == {0, 1}
    second = member(broker)
    assert look(broker, second, seconds=300) == []
    assert second.stats()["assigned"] == []
    assert "releases when its messages in work are finished" in second.stats()["note"]
    first.poll(timeout=0)
    assert look(broker, first, second) == [], "all of it was processed, and saved before it went"
    assert assigned(first) | assigned(second) == {"orders-0", "orders-1"}
    assert len(assigned(second)) == 1


def test_a_loop_ends_its_batch_after_the_current_message(
    broker: SimulatedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was read ahead of a partition that is to go is the next one's."""
    names = ["m"]
    monkeypatch.setattr("tfmq.client.consumer.membership.token_hex", lambda size: names[-1])
    first = member(broker, strategy="range")
    message = next(first)
    seen = [message.text]
    names.append("az"[message.partition])  # ranges go by names: the second one gets the partition that is in work
    second = member(broker, strategy="range")
    mine: set[str] = set()
    found: list[str] = []
    for _ in range(12):
        found += [message.text for message in second.poll(timeout=0)]
        broker.clock.advance(1)
        mine = assigned(first)
        if len(mine) == 1 and not first.stats()["releasing"]:
            break
        if first.stats()["releasing"]:
            seen += [message.text for message in first.poll(timeout=0, max_messages=1)]
    seen += look(broker, first)
    found += look(broker, second)
    assert sorted(seen + found) == [str(n) for n in range(8)], "each one once"


def test_on_assigned_is_called_before_anything_is_handed_out(broker: SimulatedBroker) -> None:
    events: list[Any] = []
    consumer = member(broker, on_assigned=lambda names: events.append([tuple(name) for name in names]))
    for message in consumer.poll(timeout=1, max_messages=3):
        events.append(message.text)
    assert events[0] == [("orders", 0), ("orders", 1)]
    assert len(events) > 1


def test_on_assigned_may_seek(broker: SimulatedBroker) -> None:
    def to_the_end(names: list[Any]) -> None:
        for name in names:
            consumer.seek(*name, to="latest")

    consumer = member(broker, on_assigned=to_the_end)
    assert look(broker, consumer) == []


def test_on_revoked_may_commit_and_only_then_it_goes(broker: SimulatedBroker) -> None:
    reported: list[Any] = []

    def revoked(names: list[Any]) -> None:
        reported.append((names, assigned(second)))
        first.commit()

    first = member(broker, commits="manual", on_revoked=revoked)
    assert len(look(broker, first)) == 8
    second = member(broker)
    assert look(broker, first, second, seconds=5) == [], "nothing comes again"
    ((names, had),) = reported
    assert had == set() and assigned(second) == {f"{topic}-{number}" for topic, number in names}


def test_a_partition_stays_until_on_revoked_was_called(broker: SimulatedBroker) -> None:
    """Nothing of it is in work, all is saved, and yet it is not released before the callback returns."""
    reported: list[Any] = []
    first = member(broker, on_revoked=reported.append)
    assert len(look(broker, first)) == 8
    second = member(broker)
    assert look(broker, second, seconds=5) == []
    assert (reported, assigned(second)) == ([], set())
    look(broker, first, second)
    assert (len(reported), len(assigned(second))) == (1, 1)


def test_without_a_commit_the_next_member_gets_it_all_again_a_session_later(broker: SimulatedBroker) -> None:
    first = member(broker, commits="manual")
    assert len(look(broker, first)) == 8
    second = member(broker)
    assert look(broker, first, second, seconds=5) == [], "it waits for the commit"
    again = look(broker, first, second, seconds=10)
    assert len(again) == 4, "those of one partition"
    with pytest.raises(tfmq.Fenced, match=f"{next(iter(assigned(second)))}"):
        first.commit()
    first.commit()


def test_offsets_of_what_is_lost_do_not_go_into_a_transaction(broker: SimulatedBroker) -> None:
    producer, first = broker.producer(), member(broker, commits="manual")
    assert len(look(broker, first)) == 8
    second = member(broker)
    look(broker, first, second, seconds=20)
    with pytest.raises(tfmq.Fenced), producer.transaction() as tx:
        tx.send("bills", "all of them")
        tx.commit_offsets(first)
    assert broker.sent("bills") == []


def test_what_is_to_go_waits_for_the_transaction_that_has_its_offsets(broker: SimulatedBroker) -> None:
    producer, first = broker.producer(), member(broker, commits="manual")
    assert len(look(broker, first)) == 8
    second = member(broker)
    look(broker, second, seconds=60)
    with producer.transaction() as tx:
        tx.send("bills", "all of them")
        tx.commit_offsets(first)
    assert look(broker, first, second, seconds=5) == []
    assert len(assigned(first)) == len(assigned(second)) == 1


def test_on_revoked_is_called_at_the_end_and_for_what_was_lost(broker: SimulatedBroker) -> None:
    reported: list[list[str]] = []
    consumer = member(broker, on_revoked=lambda names: reported.append([str(name) for name in names]))
    consumer.poll(timeout=1)
    consumer.close()
    assert reported == [["orders-0", "orders-1"]]
    frozen = member(broker, on_revoked=lambda names: reported.append([str(name) for name in names]))
    frozen.poll(timeout=1)
    broker._simulation.clients.remove(frozen._driver)  # type: ignore[arg-type]
    look(broker, member(broker), seconds=30)
    broker._simulation.clients.append(frozen._driver)  # type: ignore[arg-type]
    look(broker, frozen)
    assert reported[1:] == [["orders-0", "orders-1"]]


def test_what_a_callback_raises_is_raised_to_who_asked(broker: SimulatedBroker) -> None:
    def refuses(names: Any) -> None:
        raise RuntimeError("not these")

    consumer = member(broker, on_assigned=refuses)
    with pytest.raises(RuntimeError, match="not these"):
        consumer.poll(timeout=1)
    assert len(consumer.poll(timeout=1)) > 0, "it was told"


def test_coroutine_functions_are_awaited(broker: SimulatedBroker) -> None:
    reported: list[str] = []

    async def main() -> None:
        async def assigned_to(names: list[Any]) -> None:
            await consumer.committed("orders", 0)
            reported.extend(map(str, names))

        consumer = tfmq.aio.Consumer(broker.servers, topics="orders", group="g", on_assigned=assigned_to)
        assert await consumer.poll(timeout=1)
        await consumer.close()

    asyncio.run(main())
    assert reported == ["orders-0", "orders-1"]


def test_what_is_to_be_awaited_is_refused_where_it_is_not_awaited(broker: SimulatedBroker) -> None:
    async def later(names: list[Any]) -> None: ...

    consumer = member(broker, on_assigned=lambda names: later(names))
    with pytest.raises(NotAllowed, match="a coroutine to be awaited"):
        consumer.poll(timeout=1)
    assert len(consumer.poll(timeout=1)) > 0, "it was told"
    consumer.close()
    consumer = member(broker, on_revoked=lambda names: later(names))
    consumer.poll(timeout=1)
    with pytest.raises(NotAllowed, match="a coroutine to be awaited"):
        consumer.close()
    other = member(broker)
    assert other.poll(timeout=1), "the group was left all the same"


def test_a_run_ends_where_what_is_to_be_awaited_cannot_be(broker: SimulatedBroker) -> None:
    async def later(names: list[Any]) -> None: ...

    consumer = member(broker, on_assigned=lambda names: later(names))
    with pytest.raises(NotAllowed, match="a coroutine to be awaited"):
        consumer.run(lambda message: None, signals=False)


def test_what_a_coroutine_function_raises_is_raised_to_who_asked(broker: SimulatedBroker) -> None:
    async def refuse(names: list[Any]) -> None:
        await asyncio.sleep(0)
        raise ValueError("not these")

    async def main() -> None:
        consumer = tfmq.aio.Consumer(broker.servers, topics="orders", group="g", on_assigned=refuse)
        with pytest.raises(ValueError, match="not these"):
            await consumer.poll(timeout=1)
        assert len(await consumer.poll(timeout=1)) > 0, "it was said once"
        await consumer.close()

    asyncio.run(main())


def test_a_storage_that_does_not_answer_is_waited_for(broker: SimulatedBroker, caplog: Any) -> None:
    class Broken:
        def __init__(self) -> None:
            self.kept: dict[Any, Any] = {}
            self.down = False

        def read(self, group: str, partitions: Any) -> Any:
            self._check()
            return {name: self.kept[name] for name in partitions if name in self.kept}

        def save(self, group: str, generation: int, offsets: Any) -> None:
            self._check()
            self.kept.update(offsets)

        def close(self) -> None: ...

        def _check(self) -> None:
            if self.down:
                raise tfmq.Busy("planted")

    store = Broken()
    first = member(broker, offsets=store)
    assert len(look(broker, first)) == 8
    store.down = True
    second = member(broker, offsets=store)
    look(broker, first, second, seconds=20)
    assert second.stats()["assigned"] == [] and "planted" in caplog.text
    store.down = False
    assert look(broker, first, second, seconds=5) == []
    assert len(assigned(second)) == 1


def test_two_processes_of_one_name_do_not_fence_each_other_without_end(broker: SimulatedBroker) -> None:
    """A machine was copied with its processes: a client that is notified that it is no member takes a new name."""
    first, copy = member(broker), member(broker)
    look(broker, first)
    copy._core.require_membership().member_id = first._core.require_membership().member_id
    look(broker, copy, first, seconds=20)
    generations = first.stats()["generation"], copy.stats()["generation"]
    look(broker, copy, first, seconds=60)
    assert first.stats()["member"] != copy.stats()["member"]
    assert (first.stats()["generation"], copy.stats()["generation"]) == generations, "there is peace"
    assert len(assigned(first)) == len(assigned(copy)) == 1


def test_nothing_of_what_came_is_handed_out_before_on_assigned_returned(broker: SimulatedBroker) -> None:
    """Also by another worker."""
    seen: list[str] = []

    async def came(partitions: Any) -> None:
        for _ in range(500):
            await asyncio.sleep(0)
        seen.append("told")

    async def handle(message: Any) -> None:
        seen.append(message.text)
        if len(seen) - seen.count("told") == 8:
            consumer.stop()

    async def program() -> None:
        nonlocal consumer
        consumer = tfmq.aio.Consumer(
            broker.servers, topics="orders", group="billing", on_assigned=came, dead_letters=None
        )
        await consumer.run(handle, workers=3, signals=False)

    consumer: Any = None
    asyncio.run(asyncio.wait_for(program(), 60))
    assert seen.index("told") == 0 and len(seen) == 9


def test_an_interrupt_during_on_revoked_reports_what_was_assigned(broker: SimulatedBroker) -> None:
    """What on_revoked raises comes out of the call; the next one goes on where that ended."""
    reported: list[Any] = []

    def going(partitions: Any) -> None:
        reported.append(("going", sorted(number for _, number in partitions)))
        raise LookupError("planted")

    def came(partitions: Any) -> None:
        reported.append(("came", sorted(number for _, number in partitions)))

    consumer = member(broker, on_assigned=came, on_revoked=going)
    consumer.poll(timeout=1)
    consumer.poll(timeout=0)
    reported.clear()
    core = consumer._core
    name = min(core.positions.names())
    core.rebalance._queue_revoked(name)
    core.rebalance.assigned([name])
    with pytest.raises(LookupError, match="planted"):
        consumer.poll(timeout=0)
    consumer.poll(timeout=0)
    assert reported == [("going", [name.partition]), ("came", [name.partition])]


def test_a_task_that_is_cancelled_while_on_revoked_is_at_work_does_not_end_that() -> None:
    """The coroutine goes on; the partition goes when it has returned, not before."""
    ends: list[Any] = []
    over: list[str] = []

    async def going(partitions: Any) -> None: ...

    def begin(awaited: Any, done: Any) -> object:
        awaited.close()
        ends.append(done)
        return awaited

    reported = call_user_function(going, [PartitionName("orders", 0)], begin, lambda: over.append("over"))
    next(reported).function()
    (waited,) = next(reported).futures
    assert not waited.done
    reported.close()
    assert over == []
    ends[0](None)
    assert over == ["over"]
