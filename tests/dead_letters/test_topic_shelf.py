"""Letters in a topic, when things go wrong: lost answers, crashes, a topic that is deleted, cut, or not there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.dead_letters.helpers import Process, failure, group_of, message
from tests.dead_letters.test_shelf import keeping
from tests.scale import scaled, seeded
from tfmq.client.operation import Operation
from tfmq.dead_letters import model
from tfmq.dead_letters.model import DEAD, DROPPED, WAITING, Letter, LetterBody, Selection, letter_from_message
from tfmq.dead_letters.topic_store import TopicLetterStore
from tfmq.errors import ConnectionFailed, StoreFailed, TfmqError, TimedOut, UnknownTopic
from tfmq.protocol.commands import Fetch
from tfmq.testing.broker import SimulatedBroker


@pytest.fixture
def broker() -> Iterator[SimulatedBroker]:
    with SimulatedBroker({"topics.partitions": 3}) as made:
        yield made


class Holder:
    """A process with the topic open."""

    def __init__(self, broker: SimulatedBroker, *, create: bool = True) -> None:
        self.process = Process(broker, "unused")
        self.shelf = TopicLetterStore(self.process.link, "dead", create=create)

    def apply(self, *steps: Any) -> list[Letter | None]:
        found: list[Letter | None] = self.process.run(self.shelf.apply(steps))
        return found

    def letters(self) -> list[Letter]:
        found: list[Letter] = self.process.run(self.shelf.find(Selection()))
        return found

    def get(self, id: str) -> Letter | None:
        found: Letter | None = self.process.run(self.shelf.get(id))
        return found


def test_all_is_in_one_order_whatever_the_topic_has_in_partitions(broker: SimulatedBroker) -> None:
    holder = Holder(broker)
    for number in range(6):
        holder.apply(keeping(number))
    assert {each.partition for each in broker.sent("dead")} == {0}
    assert len(Holder(broker).letters()) == 6


@pytest.mark.parametrize("done", [True, False])
def test_a_lost_answer_is_asked_for_again_and_doubles_nothing(broker: SimulatedBroker, done: bool) -> None:
    holder = Holder(broker)
    id = keeping(1)[0]
    for error in (TimedOut, ConnectionFailed):
        broker.fail_next("send", error, times=2, done=done)
        holder.apply(keeping(1))
        broker.fail_next("send", error, done=done)
        (dropped,) = holder.apply((id, model.DropEvent(20)))
        assert dropped is not None and dropped.state == DROPPED
        holder.apply((id, model.RetryEvent(30, 3)))
    assert len(broker.sent("dead")) == 6


def test_what_fails_may_be_done_again(broker: SimulatedBroker) -> None:
    holder = Holder(broker)
    holder.apply(keeping(0))
    broker.fail_next("send", TimedOut, times=10_000, done=True)
    with pytest.raises(TimedOut):
        holder.apply(keeping(1))
    broker._faults._planned.clear()
    holder.apply(keeping(1))
    assert [each.state for each in holder.letters()] == [DEAD, DEAD]


def test_a_topic_that_was_deleted_is_begun_anew(broker: SimulatedBroker) -> None:
    holder, other = Holder(broker), Holder(broker)
    holder.apply(keeping(0))
    other.letters()
    broker.admin().delete_topic("dead")
    holder.apply(keeping(1))
    assert [each.id for each in holder.letters()] == [keeping(1)[0]]
    assert [each.id for each in other.letters()] == [keeping(1)[0]]
    assert other.apply((keeping(0)[0], model.DropEvent(20))) == [None]


def test_who_only_looks_makes_no_topic(broker: SimulatedBroker) -> None:
    holder = Holder(broker, create=False)
    assert holder.process.run(holder.shelf.exists()) is False
    with pytest.raises(UnknownTopic, match="no consumer stored"):
        holder.letters()
    assert broker.admin().topics() == []


def test_a_crash_takes_nothing_that_was_kept(broker: SimulatedBroker) -> None:
    holder = Holder(broker)
    for number in range(5):
        holder.apply(keeping(number))
        broker.crash()
    assert len(holder.letters()) == 5


def test_an_idle_store_goes_on_when_the_broker_forgot_it(broker: SimulatedBroker) -> None:
    holder = Holder(broker)
    holder.apply(keeping(0))
    broker.clock.advance(days=9)
    broker.restart()
    holder.apply(keeping(1))
    assert len(holder.letters()) == 2


def test_what_is_too_large_is_read_where_it_stands() -> None:
    with SimulatedBroker({"limits.message_bytes": 300_000}) as broker:
        broker.producer().send("orders", b"x" * 250_000, key="42", tag="new").result()
        (given,) = broker.sent("orders")
        holder = Holder(broker)
        letter = replace(letter_from_message(given, "billing"), failures=(failure(),))
        holder.apply((letter.id, model.KeepEvent(10, letter)))
        assert len(broker.sent("dead")[0].payload or b"") < 5_000
        found = Holder(broker).get(letter.id)
        assert found is not None and found.body == letter.body
        broker.admin().delete_topic("orders")
        with pytest.raises(StoreFailed, match="too large to be copied"):
            Holder(broker).get(letter.id)


def test_several_at_once_in_one_process_wait_for_each_other(broker: SimulatedBroker) -> None:
    holder = Holder(broker)
    operations = [holder.shelf.apply([keeping(number)]) for number in range(6)]
    operations += [holder.shelf.find(Selection()) for _ in range(3)]
    interleave(holder.process, operations, seeded("at once"))
    assert len(holder.letters()) == 6


def test_of_two_who_append_at_once_the_log_says_who_was_first(broker: SimulatedBroker) -> None:
    slow, fast = Holder(broker), Holder(broker)
    id = keeping(1)[0]
    slow.apply(keeping(1))
    slow.apply((id, model.RetryEvent(15, 3)))
    taking = slow.shelf.apply([(id, model.TakeEvent(20, "slow", 90))])
    wait = next(taking)
    assert [type(getattr(each, "request", None)) for each in wait.futures] == [Fetch]
    slow.process.driver.wait(tuple(wait.futures), wait.seconds)
    (taken,) = fast.apply((id, model.TakeEvent(20, "fast", 90)))
    assert taken is not None
    assert slow.process.run(taking) == [None]
    assert [each.token for each in slow.letters()] == ["fast"]


def interleave(process: Process, operations: list[Operation[Any]], chance: Any) -> None:
    """Step operations of one process in a random order until all ended."""
    waits: dict[int, Any] = dict.fromkeys(range(len(operations)))
    while waits:
        number = chance.choice(list(waits))
        wait = waits[number]
        if wait is not None and not any(each.done for each in wait.futures):
            process.driver.wait(tuple(wait.futures), 0.01)
        try:
            waits[number] = next(operations[number])
        except StopIteration:
            del waits[number]


def test_an_operation_that_is_given_up_leaves_the_store_usable(broker: SimulatedBroker) -> None:
    holder = Holder(broker)
    holder.apply(keeping(0))
    given_up = holder.shelf.apply([keeping(1)])
    next(given_up)
    given_up.close()
    holder.apply(keeping(2))
    assert {each.ordinal for each in holder.letters()} >= {0, 2}


def test_random_trouble_over_two_processes_leaves_one_truth() -> None:
    for run in range(scaled(200)):
        chance = seeded("topic", run)
        with SimulatedBroker(seed=run) as broker:
            holders = [Holder(broker), Holder(broker)]
            ids = [keeping(number)[0] for number in range(4)]
            for step in range(30):
                holder = chance.choice(holders)
                trouble(broker, chance)
                number = chance.randrange(4)
                token = chance.choice("ab")
                event: model.Event = chance.choice(
                    [
                        keeping(number, at_ms=step, next_ms=step + 1)[1],
                        model.TakeEvent(step, token, step + 3),
                        model.HandledEvent(step, token),
                        model.DropEvent(step),
                        model.ClaimEvent(step, token),
                        model.ReturnEvent(step, token),
                    ]
                )
                holder.apply((ids[number], event))
            truth = Holder(broker).letters()
            assert [each.letters() for each in holders] == [truth, truth], f"run {run}"


def trouble(broker: SimulatedBroker, chance: Any) -> None:
    kind = chance.randrange(8)
    if kind == 0:
        broker.fail_next("send", chance.choice([TimedOut, ConnectionFailed]), done=chance.random() < 0.5)
    elif kind == 1:
        broker.crash(chance.choice(["nothing", "some", "everything"]))
    elif kind == 2:
        broker.disconnect()


def test_a_member_of_the_group_handles_what_another_one_kept(broker: SimulatedBroker) -> None:
    first, second = Holder(broker), Holder(broker)
    keeper = group_of(first.shelf, first.process.wall_clock)
    first.process.run(keeper.store_letter(message(1, b"later"), [failure()], retry_after=5))
    assert [each.state for each in second.letters()] == [WAITING]
    broker.clock.advance(5)
    taker = group_of(second.shelf, second.process.wall_clock)
    due = second.process.run(taker.lease_next())
    assert due.message.payload == b"later"
    assert first.process.run(keeper.lease_next()) is None
    assert second.process.run(taker.mark_handled(due)) is True


def test_without_a_broker_it_says_so(broker: SimulatedBroker) -> None:
    holder = Holder(broker)
    broker.stop()
    with pytest.raises(TfmqError) as failed:
        holder.apply(keeping(1))
    assert failed.value.retriable


def test_what_retention_took_is_not_kept_in_memory() -> None:
    with SimulatedBroker({"log.segment_bytes": 65536, "retention.bytes": 65536}) as broker:
        holder = Holder(broker)
        for number in range(4):
            id, event = keeping(number)
            assert isinstance(event, model.KeepEvent)
            body = LetterBody(b"x" * 60_000, None)
            holder.apply((id, event._replace(letter=replace(event.letter, body=body))))
        assert len(holder.letters()) == 4
        broker.clock.advance(hours=1)
        left = len(Holder(broker).letters())
        assert left < 4, "retention took the first ones"
        assert holder.process.run(holder.shelf.delete_expired(0)) == 0
        assert len(holder.letters()) == left
