"""The connection of a task, or of the driver's verdict, with a simulated broker."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from journal.record.format import HEADER_SIZE, records_of, split_body
from tests.client.transaction.test_commit_group import batch
from tests.scale import scaled
from tfmq.arrow.partitioner import partition_of
from tfmq.client.connection.requests import Topic
from tfmq.client.transaction.commit_group import MemberBatch
from tfmq.errors import BadRequest, ConnectionFailed, MessageTooLarge, TfmqError, UnknownPartition
from tfmq.message import Partition
from tfmq.protocol.commands import CommitGroup, CommitMember
from tfmq.spark import sink_task
from tfmq.spark.sink_task import CommitGroupClient, RowBatcher
from tfmq.testing.broker import SimulatedBroker

MEMBER = CommitMember("query", 0, "run-1")


def test_the_owner_that_an_operator_sees_is_the_task(tfmq_broker: SimulatedBroker) -> None:
    with CommitGroupClient(tfmq_broker.servers, 30.0, "tfmq-spark query 0 task 3") as client:
        part = client.open_part(MEMBER)
        part.send(batch(client, [b"a"]))
        part.prepare()
        (found,) = tfmq_broker.admin().transactions()
        assert "task 3" in found.owner
        assert (found.commit_group, found.state, found.messages) == ("query", "prepared", 1)


def test_a_broker_that_comes_back_in_time_is_waited_for(tfmq_broker: SimulatedBroker) -> None:
    with CommitGroupClient(tfmq_broker.servers, 30.0) as client:
        part = client.open_part(MEMBER)
        part.send(batch(client, [b"a"]))
        names = part.prepare()
        tfmq_broker.crash(down=20)
        assert client.commit(CommitGroup("query", 0, "run-1", names, 1)).rows == 1
    assert [each.payload for each in tfmq_broker.sent("orders")] == [b"a"]


def test_one_that_stays_away_is_reported_after_the_time(tfmq_broker: SimulatedBroker) -> None:
    tfmq_broker.stop()
    began = tfmq_broker.clock.monotonic()
    with CommitGroupClient(tfmq_broker.servers, 12.0) as client, pytest.raises(ConnectionFailed):
        client.topic("orders")
    assert 11 <= tfmq_broker.clock.monotonic() - began <= 15
    tfmq_broker.start()


def test_how_long_a_part_waits_for_the_verdict_is_its_own_choice(tfmq_broker: SimulatedBroker) -> None:
    with CommitGroupClient(tfmq_broker.servers, 30.0) as client:
        part = client.open_part(MEMBER, ttl_ms=60_000)
        part.send(batch(client, [b"a"]))
        part.prepare()
    (found,) = tfmq_broker.admin().transactions()
    assert found.expires_ms - found.prepared_ms == 60_000
    tfmq_broker.clock.advance(61)
    assert tfmq_broker.admin().transactions() == []


def test_a_time_that_the_broker_does_not_give_is_refused(tfmq_broker: SimulatedBroker) -> None:
    with CommitGroupClient(tfmq_broker.servers, 30.0) as client:
        part = client.open_part(MEMBER, ttl_ms=400 * 86_400_000)
        part.send(batch(client, [b"a"]))
        with pytest.raises(TfmqError, match=r"a commit group may be prepared for|ttl_ms"):
            part.prepare()


def test_a_group_is_forgotten_once(tfmq_broker: SimulatedBroker) -> None:
    with CommitGroupClient(tfmq_broker.servers, 30.0) as client:
        client.commit(CommitGroup("query", 0, "run-1", [], 0))
        assert client.delete_group("query") is True
        assert client.delete_group("query") is False


# Rows on their way out: each arrives in its topic and partition, in order, in batches that the broker takes.


def topic_of(name: str, partitions: int = 4, stopped: tuple[int, ...] = ()) -> Topic:
    states = ["stopped" if number in stopped else "open" for number in range(partitions)]
    return Topic(name, 7, tuple(Partition(name, number, state) for number, state in enumerate(states)), {})


def sent(
    *batches: pa.RecordBatch, topic: str = "orders", partitions: int = 4, first: int = 0, **options: Any
) -> list[MemberBatch]:
    """What goes out of these."""
    out = RowBatcher(lambda name: topic_of(name, partitions, **options), topic, first, 8 << 20)
    found = [each for batch in batches for each in out.add_rows(batch)]
    return found + list(out.flush())


def values_of(batch: MemberBatch) -> list[bytes]:
    """The payloads, whatever attributes they have."""
    data = memoryview(bytes(batch.assign_sequence(5, 0).data))
    bodies = [(data[each.position + HEADER_SIZE :][: each.size - HEADER_SIZE], each.flag) for each in records_of(data)]
    return [bytes(split_body(body, flag)[1]) for body, flag in bodies]


def rows(**columns: Any) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(columns)


def numbered(count: int, size: int = 100) -> pa.Array:
    return pa.array([b"%09d" % number + b"x" * (size - 9) for number in range(count)])


def test_rows_without_keys_go_in_full_batches_to_one_partition_after_the_other() -> None:
    count = scaled(300_000)
    batches = sent(*[rows(value=numbered(count)) for _ in range(10)], first=2)
    assert [each.partition for each in batches] == [(2 + n) % 4 for n in range(len(batches))]
    assert sum(each.count for each in batches) == 10 * count
    assert all(each.size_bytes <= sink_task.BATCH_BYTES for each in batches)
    assert len(batches) <= 2 + 10 * count * 164 / sink_task.BATCH_BYTES * 1.2


def test_small_batches_are_gathered_until_it_is_worth_it() -> None:
    out = RowBatcher(topic_of, "orders", 0, 1000)
    for _ in range(10):
        assert list(out.add_rows(rows(value=[b"a", b"b"]))) == []
    (batch,) = out.flush()
    assert batch.count == 20 and list(out.flush()) == []


def test_a_partition_that_takes_no_writes_is_passed_over_by_rows_without_keys() -> None:
    batches = [each for _ in range(6) for each in sent(rows(value=[b"a"]), stopped=(0, 2))]
    assert {each.partition for each in batches} == {1}
    out = RowBatcher(lambda name: topic_of(name, 4, (0, 2)), "orders", 0, 1000)
    found = []
    for _ in range(4):
        list(out.add_rows(rows(value=[b"a"])))
        found += [each.partition for each in out.flush()]
    assert found == [1, 3, 1, 3]
    assert sent(rows(value=[b"a"]), partitions=1, stopped=(0,))[0].partition == 0


def test_rows_of_one_key_stay_in_order_in_the_partition_of_the_key() -> None:
    keys = [b"key-%d" % (number * 7 % 31) for number in range(1000)]
    table = rows(value=numbered(1000), key=keys)
    batches = sent(table.slice(0, 300), table.slice(300))
    chosen = partition_of(table, 4).to_pylist()
    for number in range(4):
        mine = [value for value, at in zip(table["value"].to_pylist(), chosen, strict=True) if at == number]
        there = [value for each in batches if each.partition == number for value in values_of(each)]
        assert there == mine


def test_rows_go_to_the_partition_that_they_name_else_where_their_key_goes() -> None:
    table = rows(
        value=[b"a", b"b", b"c", b"d"], key=[None, None, b"k", b"k"], partition=pa.array([3, 0, None, 2], pa.int64())
    )
    batches = sent(table)
    place = partition_of(rows(key=[b"k"]), 4).to_pylist()[0]
    found = sorted((each.partition, each.count) for each in batches)
    assert sum(count for _, count in found) == 4
    assert {3, 0, place, 2} == {number for number, _ in found}


@pytest.mark.parametrize("wrong", [-1, 4, 1 << 40])
def test_a_partition_that_the_topic_does_not_have_is_refused(wrong: int) -> None:
    with pytest.raises(UnknownPartition, match=f"asks for partition {wrong} of orders, which has 4, from 0 on"):
        sent(rows(value=[b"a", b"b"], partition=pa.array([1, wrong], pa.int64())))


def test_topics_come_from_the_column_unless_the_option_says_one() -> None:
    table = rows(value=[b"a", b"b", b"c"], topic=["one", "two", "one"])
    found = {each.topic: values_of(each) for each in sent(table, topic="", partitions=1)}
    assert found == {"one": [b"a", b"c"], "two": [b"b"]}
    (batch,) = sent(table, topic="all", partitions=1)
    assert (batch.topic, batch.incarnation, values_of(batch)) == ("all", 7, [b"a", b"b", b"c"])


def test_a_row_without_a_topic_or_with_a_wrong_name_is_refused() -> None:
    with pytest.raises(BadRequest, match="A row has no topic: the column topic is null"):
        sent(rows(value=[b"a"], topic=pa.array([None], pa.string())), topic="")
    with pytest.raises(BadRequest, match="'a/b' in the column topic cannot be a topic"):
        sent(rows(value=[b"a"], topic=["a/b"]), topic="")


def test_the_reported_size_is_at_least_that_of_the_records() -> None:
    table = rows(
        value=["short", None, "y" * 300_000, "z" * 900_000, "z" * 2_000_000, "end"],
        key=["k", None, "k" * 100, "k" * 60_000, "k", ""],
        tag=["red", None, "t" * 255, "", "a", "b"],
    )
    batches = sent(table, partitions=1)
    assert [each.count for each in batches] == [3, 1, 1, 1]
    for each in batches:
        assert len(each.assign_sequence(5, 0).data) <= each.size_bytes


def test_a_message_that_is_too_large_is_refused_when_its_turn_comes() -> None:
    out = RowBatcher(topic_of, "orders", 0, 1000)
    list(out.add_rows(rows(value=[b"x" * 1001])))
    (batch,) = out.flush()
    with pytest.raises(MessageTooLarge, match="has 1001 bytes, the broker takes 1000"):
        batch.assign_sequence(5, 0)


def test_columns_that_a_topic_makes_anew_are_left_out() -> None:
    table = rows(value=[b"a"], offset=[5], timestamp=[1], id=[9])
    (batch,) = sent(table, partitions=1)
    assert values_of(batch) == [b"a"]


def test_wide_columns_are_as_good_as_others() -> None:
    wide = pa.RecordBatch.from_arrays(
        [
            pa.array([b"a", b"b"], pa.large_binary()),
            pa.array(["k", "l"], pa.large_string()),
            pa.array(["x", "x"], pa.large_string()),
        ],
        ["value", "key", "topic"],
    )
    plain = rows(value=[b"a", b"b"], key=["k", "l"])
    records = [bytes(each.assign_sequence(5, 0).data) for each in sent(wide, topic="")]
    assert records == [bytes(each.assign_sequence(5, 0).data) for each in sent(plain)]


def test_no_rows_are_nothing() -> None:
    assert sent(rows(value=pa.array([], pa.binary()))) == []
    assert sent(rows(value=pa.array([], pa.binary()), partition=pa.array([], pa.int64()))) == []
