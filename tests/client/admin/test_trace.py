"""The life of one message, as `Admin.trace`, `trace_delayed` and `find_key` describe it, at a real broker."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import tfmq
from tfmq.client.admin.trace import GroupProgress
from tfmq.testing.broker import SimulatedBroker
from tfmq.testing.clock import START

START_MS = round(START.timestamp() * 1000)


@pytest.fixture
def broker() -> Iterator[SimulatedBroker]:
    with SimulatedBroker({"topics.partitions": 1}) as broker:
        yield broker


def send(broker: SimulatedBroker, payload: Any, **options: Any) -> tfmq.SendResult:
    return broker.producer().send("orders", payload, **options).result(5)


def offsets(broker: SimulatedBroker) -> list[int]:
    return [message.offset for message in broker.sent("orders")]


def test_a_message_is_described_from_its_birth_to_the_durable_offset(broker: SimulatedBroker) -> None:
    sent = send(broker, "hello", key="42", tag="paid", properties={"n": "1"})
    send(broker, None)
    first, second = (broker.admin().trace("orders", 0, offset) for offset in offsets(broker))
    assert (first.state, first.source, first.transaction, first.delay) == ("stored", "sent", None, None)
    assert (first.offset, first.next_offset, first.ordinal) == (sent.offset, second.offset, 0)
    assert first.message_id == sent.message_id
    assert first.producer_id == sent.message_id >> 24 and first.sequence == 0
    assert (first.key, first.tag, first.properties, first.payload_bytes) == ("42", "paid", {"n": "1"}, 5)
    assert (first.born_ms, first.appended_ms) == (START_MS, START_MS)
    assert first.durable and (first.first_offset, first.end_offset) == (0, first.durable_offset)
    assert (second.ordinal, second.payload_bytes) == (1, -1)
    assert any("name of the client" in each for each in first.unknown)


def test_a_message_that_is_not_durable_is_described_so_and_stays_so(broker: SimulatedBroker) -> None:
    broker.producer(acks="written").send("orders", "x").result(5)
    admin = broker.admin()
    for _ in range(2):
        found = admin.trace("orders", 0, 0)
        assert found.durable is False and found.durable_offset < found.end_offset
    broker.clock.advance(60)
    assert admin.trace("orders", 0, 0).durable is True


def test_groups_have_passed_it_or_are_so_far_behind(broker: SimulatedBroker) -> None:
    for number in range(4):
        send(broker, str(number))
    broker.producer().send("other", "x").result(5)
    ahead, behind = (broker.consumer("orders", group=group) for group in ("ahead", "behind"))
    for consumer, count in ((ahead, 3), (behind, 1)):
        assert len(consumer.poll(timeout=0, max_messages=count)) == count
        consumer.commit()
    new = broker.consumer("orders", group="new")
    stranger = broker.consumer("other", group="stranger")
    for consumer in (new, stranger):
        consumer.poll(timeout=0, max_messages=1)
    third = offsets(broker)[2]
    found = {each.group: each for each in broker.admin().trace("orders", 0, third).groups}
    after_one, after_three = offsets(broker)[1], offsets(broker)[3]
    assert found == {
        "ahead": GroupProgress("ahead", "passed", after_three),
        "behind": GroupProgress("behind", "behind", after_one, 2),
        "new": GroupProgress("new", "none"),
    }
    first, next_one = (broker.admin().trace("orders", 0, offset).groups for offset in (0, after_one))
    assert GroupProgress("behind", "passed", after_one) in first
    assert GroupProgress("behind", "behind", after_one, 1) in next_one


def test_a_group_whose_offset_is_in_doubt_is_named(broker: SimulatedBroker) -> None:
    send(broker, "x")
    consumer = broker.consumer("orders", group="billing", commits="manual")
    assert consumer.poll(timeout=0)
    transaction = broker.producer().begin("x1")
    transaction.send("bills", "b")
    transaction.commit_offsets(consumer)
    transaction.prepare()
    assert broker.admin().trace("orders", 0, 0).groups == (GroupProgress("billing", "in_doubt"),)


def test_the_transaction_of_a_message_is_named_by_its_xid(broker: SimulatedBroker) -> None:
    producer = broker.producer(client_id="shop")
    with producer.transaction() as local:
        local.send("orders", "local")
        local.send("bills", "local")
        local.send("orders", "local")
    for name, prepared in (("one-phase", False), ("two-phase", True)):
        transaction = producer.begin(name)
        transaction.send("orders", name)
        if prepared:
            transaction.prepare()
        transaction.commit()
    for _ in range(2):
        traces = [broker.admin().trace("orders", 0, offset) for offset in offsets(broker)]
        found = [each.transaction for each in traces if each.transaction is not None]
        assert [each.xid for each in found] == ["", "", "one-phase", "two-phase"]
        assert {each.state for each in found} == {"committed"}
        assert [each.epoch - found[0].epoch for each in found] == [0, 0, 1, 2]
        assert {each.details["decided_ms"] for each in found} == {START_MS}
        assert [each.source for each in traces] == ["transaction"] * 4
        assert found[0].owner.startswith("shop") and found[0].details["local"]
        assert not any("transaction" in each for trace in traces for each in trace.unknown)
        broker.restart()


def test_transactions_that_were_appended_together_are_told_apart_or_not_named(broker: SimulatedBroker) -> None:
    producers = [broker.producer() for _ in range(2)]
    for number, producer in enumerate((producers[0], producers[1], producers[0], producers[0])):
        transaction = producer.begin(f"x{number}")
        for _ in range(2):
            transaction.send("orders", transaction.xid)
        transaction.commit()
    broker.crash("nothing")  # all commits are durable, and none is applied: the start applies them in one append
    traces = [broker.admin().trace("orders", 0, offset) for offset in offsets(broker)]
    assert len({each.commit_lsn for each in traces}) == 1
    assert [None if each.transaction is None else each.transaction.xid for each in traces] == [None] * 6 + ["x3"] * 2
    assert all("together with others, of which x3 is the last" in each.unknown[0] for each in traces[:6])


def test_a_commit_by_an_operator_and_one_of_a_commit_group_are_described(broker: SimulatedBroker) -> None:
    admin, producer = broker.admin(), broker.producer()
    transaction = producer.begin("x1")
    transaction.send("orders", "by hand")
    transaction.prepare()
    admin.commit_transaction("x1")
    found = admin.trace("orders", 0, 0).transaction
    assert found is not None and (found.xid, found.state) == ("x1", "heuristic_committed")
    admin.forget_transaction("x1")
    trace = admin.trace("orders", 0, 0)
    assert trace.transaction is not None and (trace.transaction.xid, trace.transaction.epoch) == ("", found.epoch)
    assert any("transaction's name" in each for each in trace.unknown)


def test_a_transaction_that_is_forgotten_is_still_known_to_be_committed() -> None:
    with SimulatedBroker({"topics.partitions": 1, "transaction.journal_file_bytes": "1MiB"}) as broker:
        producer = broker.producer()
        for payload in (b"first", *[b"x" * 200_000] * 12):
            with producer.transaction() as transaction:
                transaction.send("orders", payload)
        broker.clock.advance(60)
        found = broker.admin().trace("orders", 0, 0)
    assert found.source == "transaction" and found.commit_lsn > 0
    assert found.transaction is not None and found.transaction.state == "unknown"
    assert any("deleted the commit record" in each for each in found.unknown)


def test_a_delayed_message_is_followed_from_its_handle_to_its_offset(broker: SimulatedBroker) -> None:
    admin = broker.admin()
    send(broker, "before")
    handle = send(broker, "later", delay=10, key="k").delayed
    pending = admin.trace_delayed(handle)
    assert pending.delay is not None
    assert (pending.state, pending.topic, pending.partition, pending.key) == ("pending", "orders", 0, "k")
    assert (pending.offset, pending.delay.due_ms, pending.delay.late_ms) == (None, START_MS + 10_000, -1)
    broker.clock.advance(9)
    send(broker, "between")
    broker.clock.advance(5)
    found, (_, _, offset) = admin.trace_delayed(handle), offsets(broker)
    assert found.delay is not None
    assert (found.state, found.source, found.offset, found.key) == ("stored", "delay", offset, "k")
    assert (found.delay.state, found.delay.handle, found.delay.due_ms) == ("delivered", handle, START_MS + 10_000)
    assert found.delay.late_ms == found.appended_ms - found.delay.due_ms >= 0
    by_offset = admin.trace("orders", 0, offset)
    assert by_offset == found._replace(delay=found.delay._replace(handle=""))


def test_cancelled_rescheduled_and_unknown_handles_are_told_apart(broker: SimulatedBroker) -> None:
    admin = broker.admin()
    handle = send(broker, "never", delay=10).delayed
    assert admin.cancel(handle) == "cancelled"
    cancelled = admin.trace_delayed(handle)
    assert (cancelled.state, cancelled.offset, bool(cancelled.unknown)) == ("cancelled", None, True)
    moved = send(broker, "moved", delay=10).delayed
    assert admin.reschedule(moved, 20)
    broker.clock.advance(30)
    found = admin.trace_delayed(moved)
    assert found.delay is not None
    assert (found.state, found.offset, found.delay.due_ms) == ("stored", 0, START_MS + 20_000)
    with SimulatedBroker(seed=2) as other:
        stranger = other.producer().send("orders", "x", delay=10).result(5).delayed
    assert admin.trace_delayed(stranger).state == "unknown"


def test_which_of_several_that_were_delivered_together_is_said_to_be_unknown(broker: SimulatedBroker) -> None:
    results = broker.producer().send_many("orders", ["a", "b", "c"], delay=10)
    handles = [handle for each in results.result(5) for handle in each.delayed]
    broker.clock.advance(20)
    admin = broker.admin()
    traces = [admin.trace_delayed(handle) for handle in handles]
    assert [each.offset for each in traces] == [None, None, offsets(broker)[-1]]
    assert all(each.delay is not None and each.delay.state == "delivered" for each in traces)
    assert "3 messages were delivered together" in traces[0].unknown[0]
    by_offset = [admin.trace("orders", 0, offset) for offset in offsets(broker)]
    assert [each.delay.due_is_exact for each in by_offset if each.delay is not None] == [False, False, True]


def test_a_delivered_message_that_was_removed_is_not_taken_for_another(broker: SimulatedBroker) -> None:
    admin = broker.admin()
    first = send(broker, "x" * 1000, delay=10).delayed
    broker.clock.advance(20)
    admin.purge("orders")
    assert offsets(broker) == []
    found = admin.trace_delayed(first)
    assert (found.state, found.offset) == ("delivered", None) and "removed it" in found.unknown[0]
    send(broker, "another", delay=1)
    broker.clock.advance(5)
    found = admin.trace_delayed(first)
    assert (found.state, found.offset) == ("delivered", None) and "another one" in found.unknown[0]
    assert found.delay is not None and found.delay.delivered_ms == -1


def test_a_message_of_a_schedule_is_described_as_such(broker: SimulatedBroker) -> None:
    broker.admin().create_topic("orders")
    broker.admin().schedule("@hourly", "orders", "tick", name="hourly")
    broker.clock.advance(2 * 3600)
    found = broker.admin().trace("orders", 0, offsets(broker)[0])
    assert found.source == "schedule" and found.properties["schedule"] == "hourly"


def test_what_was_removed_is_described_by_the_groups_that_passed_it(broker: SimulatedBroker) -> None:
    send(broker, "x")
    consumer = broker.consumer("orders", group="billing")
    assert consumer.poll(timeout=0)
    consumer.commit()
    consumer.close()
    admin = broker.admin()
    admin.purge("orders")
    found = admin.trace("orders", 0, 0)
    assert (found.state, found.ordinal, found.message_id) == ("removed", None, None)
    assert [each.state for each in found.groups] == ["passed"] and "retention" in found.unknown[0]


def test_what_cannot_be_a_message_is_refused_in_a_sentence(broker: SimulatedBroker) -> None:
    send(broker, "x")
    admin = broker.admin()
    end = admin.topic("orders").partitions[0].end_offset
    with pytest.raises(tfmq.UnknownTopic):
        admin.trace("order", 0, 0)
    with pytest.raises(tfmq.UnknownPartition, match="1 partition, numbered from 0; there is no 1"):
        admin.trace("orders", 1, 0)
    with pytest.raises(tfmq.OffsetOutOfRange, match=f"ends at offset {end}; no message is at {end}"):
        admin.trace("orders", 0, end)
    with pytest.raises(tfmq.errors.NotARecord, match="starts at offset 3; the one before it starts at 0"):
        admin.trace("orders", 0, 3)
    for wrong in (-1, "0", True):
        with pytest.raises(tfmq.BadRequest, match="whole number"):
            admin.trace("orders", 0, wrong)  # type: ignore[arg-type]
    with pytest.raises(tfmq.BadRequest, match="no handle"):
        admin.trace_delayed("dabc")
    with pytest.raises(tfmq.BadRequest, match="whole number"):
        admin.find_key("orders", "k", messages=0)


def test_the_newest_message_with_a_key_is_found_and_how_far_was_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tfmq.client.admin.trace.WINDOW_MESSAGES", 4)
    with SimulatedBroker({"topics.partitions": 2}) as broker:
        producer, admin = broker.producer(), broker.admin()
        places = [
            (number % 2, producer.send("orders", "x", key=key, partition=number % 2).result(5).offset)
            for number, key in enumerate(["a", "b", b"a", "ab", "c"] * 6)
            if broker.clock.advance(1) is None
        ]
        newest = admin.find_key("orders", "a")
        assert (newest.partition, newest.offset) == places[27]
        assert (admin.find_key("orders", b"b").partition, admin.find_key("orders", b"b").offset) == places[26]
        assert admin.find_key("orders", "a", 1).offset == places[27][1]
        assert admin.find_key("orders", "a", 0).offset == places[22][1]
        assert admin.find_key("orders", "none") == (None, None, 30, True, 0)
        assert admin.find_key("orders", "none", messages=3) == (None, None, 6, False, 0)
        with pytest.raises(tfmq.UnknownPartition):
            admin.find_key("orders", "a", 2)
