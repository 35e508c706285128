"""Where micro-batches begin and end, which task reads what, and what becomes of messages that are gone."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.spark.fake_logs import FakeLogs
from tfmq.errors import BadRequest, LogTruncated, OffsetOutOfRange, UnknownTopic
from tfmq.spark.offsets import Offsets, PartitionOffset
from tfmq.spark.planner import SMALL_RANGE_BYTES, BatchLimit, Planner, share_limit
from tfmq.spark.ranges import OffsetRange, PartitionLog, group_small
from tfmq.spark.settings import SourceSettings, parse_source_settings

NO_LIMIT = BatchLimit()


def settings(options: Mapping[str, str], streaming: bool = True) -> SourceSettings:
    given = {"servers": "127.0.0.1:1", "startingOffsets": "earliest", **options}
    if {"subscribePattern", "assign"} & given.keys():
        given.pop("subscribe", None)
    else:
        given.setdefault("subscribe", "orders")
    return parse_source_settings(given, streaming=streaming)


class Query:
    """A streaming query over fake logs; `batch` plans one more micro-batch and gives (partition, start, end) of it."""

    def __init__(self, logs: FakeLogs, **options: str) -> None:
        self.now = 0.0
        self.logs, self.options = logs, options
        self.planner = Planner(settings(options), logs, lambda: self.now)
        self.place: Offsets = self.planner.initial_offsets()

    def restart(self, **options: str) -> None:
        self.planner = Planner(settings({**self.options, **options}), self.logs, lambda: self.now)

    def batch(self, limit: BatchLimit = NO_LIMIT) -> list[tuple[str, int, int, int]]:
        end = self.planner.plan_end(self.place, limit)
        tasks = self.planner.plan_micro_batch(self.place, end) if end != self.place else []
        self.place = end
        return [(each.log.topic, each.log.partition, each.start, each.end) for task in tasks for each in task]


@pytest.fixture
def logs() -> FakeLogs:
    found = FakeLogs()
    found.create("orders", 2)
    found.add("orders", 0, 10)
    found.add("orders", 1, 30)
    return found


def test_a_new_query_reads_all_and_then_what_is_new(logs: FakeLogs) -> None:
    query = Query(logs)
    assert query.batch() == [("orders", 0, 0, 100), ("orders", 1, 0, 300)]
    assert query.batch() == []
    logs.add("orders", 1, 1)
    assert query.batch() == [("orders", 1, 300, 310)]


def test_without_a_word_a_stream_begins_at_the_end(logs: FakeLogs) -> None:
    query = Query(logs, startingOffsets="latest")
    assert query.batch() == []
    logs.add("orders", 0, 1)
    assert query.batch() == [("orders", 0, 100, 110)]


def test_partitions_that_are_added_are_read_from_their_beginning(logs: FakeLogs) -> None:
    query = Query(logs, startingOffsets="latest")
    query.batch()
    logs.grow("orders", 3)
    logs.add("orders", 2, 4)
    assert query.batch() == [("orders", 2, 0, 40)]


def test_topics_that_a_pattern_matches_later_are_read_too(logs: FakeLogs) -> None:
    query = Query(logs, subscribePattern="ord.*", startingOffsets="latest")
    logs.create("order-lines")
    logs.create("reorders")
    logs.add("order-lines", 0, 2)
    logs.add("reorders", 0, 2)
    assert query.batch() == [("order-lines", 0, 0, 20)]


def test_only_the_partitions_that_are_assigned_are_read(logs: FakeLogs) -> None:
    assert Query(logs, assign='{"orders": [1]}').batch() == [("orders", 1, 0, 300)]
    with pytest.raises(UnknownTopic, match="no partition orders-7"):
        Query(logs, assign='{"orders": [1, 7]}')


def test_messages_are_limited_in_proportion_to_what_waits(logs: FakeLogs) -> None:
    query = Query(logs)
    assert query.batch(BatchLimit(rows=8)) == [("orders", 0, 0, 20), ("orders", 1, 0, 60)]
    read = [query.batch(BatchLimit(rows=8)) for _ in range(4)]
    assert all(read)
    assert query.batch(BatchLimit(rows=8)) == []
    assert query.place == {("orders", 0): PartitionOffset(1, 100), ("orders", 1): PartitionOffset(1, 300)}


def test_a_limit_of_messages_asks_for_no_place_twice(logs: FakeLogs) -> None:
    query = Query(logs)
    query.batch(BatchLimit(rows=8))
    logs.asked.clear()
    query.batch(BatchLimit(rows=8))
    assert "ordinal_at" not in logs.asked
    for _ in range(20):
        logs.add("orders", 0, 1)
        query.batch(BatchLimit(rows=1000))
    assert len(query.planner._ordinals) <= 4, "what is not needed any more is forgotten"
    logs.add("orders", 0, 9)
    query.batch(BatchLimit(rows=8))
    query.restart()
    query.batch(BatchLimit(rows=8))
    assert "ordinal_at" in logs.asked


def test_one_message_at_a_time_reaches_every_partition(logs: FakeLogs) -> None:
    query = Query(logs)
    read = [query.batch(BatchLimit(rows=1)) for _ in range(20)]
    assert all(len(each) == 1 and each[0][3] - each[0][2] == 10 for each in read)
    assert [each[0][1] for each in read[:4]] == [0, 1, 0, 1]


def test_a_message_larger_than_the_limit_of_bytes_is_read_alone() -> None:
    logs = FakeLogs()
    logs.create("orders")
    logs.add("orders", 0, 1, size=10_000)
    logs.add("orders", 0, 3, size=10)
    query = Query(logs)
    assert query.batch(BatchLimit(bytes=15)) == [("orders", 0, 0, 10_000)]
    assert query.batch(BatchLimit(bytes=15)) == [("orders", 0, 10_000, 10_020)]
    assert query.batch(BatchLimit(bytes=15)) == [("orders", 0, 10_020, 10_030)]
    logs.add("orders", 0, 2)
    assert query.batch(BatchLimit(bytes=1)) == [("orders", 0, 10_030, 10_040)]


def test_a_partition_whose_numbers_damage_hides_is_read_to_its_end_and_keeps_no_other_from_it(logs: FakeLogs) -> None:
    logs.kept["orders"][1].numbered = False
    query = Query(logs)
    read = []
    while batch := query.batch(BatchLimit(rows=4)):
        read += batch
        assert sum(end - start for _, number, start, end in batch if number == 0) <= 40
    assert [each for each in read if each[1] == 1] == [("orders", 1, 0, 300)]
    assert read[1] == ("orders", 1, 0, 300), "in the first micro-batch"
    assert query.place == {("orders", 0): PartitionOffset(1, 100), ("orders", 1): PartitionOffset(1, 300)}
    logs.kept["orders"][1].numbered = True
    logs.add("orders", 1, 8)
    assert query.batch(BatchLimit(rows=4)) == [("orders", 1, 300, 340)]
    logs.kept["orders"][1].numbered = False
    assert batch_of(logs, maxRecordsPerPartition="7") == [[(0, 0, 70)], [(0, 70, 100)], [(1, 0, 380)]]


def test_with_available_now_a_query_ends_with_what_was_there(logs: FakeLogs) -> None:
    query = Query(logs)
    query.planner.freeze_end()
    logs.add("orders", 0, 5)
    logs.grow("orders", 3)
    logs.add("orders", 2, 5)
    read = []
    while batch := query.batch(BatchLimit(rows=15)):
        read += batch
        logs.add("orders", 1, 50)
    assert max(end for _, number, _, end in read if number == 0) == 100
    assert max(end for _, number, _, end in read if number == 1) == 300
    assert {number for _, number, _, _ in read} == {0, 1}
    query.restart()
    query.planner.freeze_end()
    assert ("orders", 2, 0, 50) in query.batch()


def test_a_micro_batch_waits_for_a_minimum_but_not_without_end(logs: FakeLogs) -> None:
    query = Query(logs, startingOffsets="latest", minOffsetsPerTrigger="5", maxTriggerDelay="10s")
    logs.add("orders", 0, 4)
    assert query.batch() == []
    logs.add("orders", 1, 1)
    assert query.batch() == [("orders", 0, 100, 140), ("orders", 1, 300, 310)]
    logs.add("orders", 0, 1)
    query.now += 9
    assert query.batch() == []
    query.now += 2
    assert query.batch() == [("orders", 0, 140, 150)]


def test_what_retention_took_before_it_was_read_stops_the_query(logs: FakeLogs) -> None:
    query = Query(logs)
    query.batch(BatchLimit(rows=8))
    logs.retain("orders", 1, 200)
    with pytest.raises(OffsetOutOfRange, match=r"orders-1 from offset 60 to 200 are gone.*failOnDataLoss"):
        query.batch()


def test_or_the_query_goes_on_after_it_and_says_so_once(logs: FakeLogs, caplog: pytest.LogCaptureFixture) -> None:
    query = Query(logs, failOnDataLoss="false")
    query.batch(BatchLimit(rows=8))
    logs.retain("orders", 1, 200)
    with caplog.at_level(logging.WARNING):
        assert query.batch() == [("orders", 0, 20, 100), ("orders", 1, 200, 300)]
    assert [record.message for record in caplog.records] == [
        "Messages of orders-1 from offset 60 to 200 are gone, by retention, before this query had read them. The query"
        " continues after them, because failOnDataLoss is false."
    ]


def test_what_is_gone_when_a_planned_batch_is_read_again_stops_the_query_too(logs: FakeLogs) -> None:
    query = Query(logs)
    start, end = query.place, query.planner.plan_end(query.place, NO_LIMIT)
    logs.retain("orders", 0, 50)
    query.restart()
    with pytest.raises(OffsetOutOfRange):
        query.planner.plan_micro_batch(start, end)
    query.restart(failOnDataLoss="false")
    tasks = query.planner.plan_micro_batch(start, end)
    assert [(each.start, each.end) for task in tasks for each in task] == [(50, 100), (0, 300)]


def test_a_topic_that_is_gone_when_a_planned_batch_is_read_again(logs: FakeLogs) -> None:
    query = Query(logs)
    start, end = query.place, query.planner.plan_end(query.place, NO_LIMIT)
    logs.delete("orders")
    for made_anew in (False, True):
        if made_anew:
            logs.create("orders", 2)
        query.restart()
        with pytest.raises(UnknownTopic, match="orders was deleted"):
            query.planner.plan_micro_batch(start, end)
        query.restart(failOnDataLoss="false")
        assert query.planner.plan_micro_batch(start, end) == []


def test_a_topic_that_was_made_anew_is_not_read_as_the_old_one(logs: FakeLogs) -> None:
    query = Query(logs)
    query.batch()
    logs.delete("orders")
    logs.create("orders", 2)
    logs.add("orders", 0, 50)
    with pytest.raises(UnknownTopic, match="deleted, and perhaps created again"):
        query.batch()
    query.restart(failOnDataLoss="false")
    assert query.batch() == [("orders", 0, 0, 500)]


def test_a_topic_that_is_made_anew_before_a_query_with_available_now_read_it_is_reported(logs: FakeLogs) -> None:
    query = Query(logs)
    query.planner.freeze_end()
    logs.delete("orders")
    logs.create("orders", 2)
    logs.add("orders", 0, 50)
    with pytest.raises(UnknownTopic, match="deleted, and perhaps created again"):
        query.batch()
    query.restart(failOnDataLoss="false")
    assert query.batch() == [("orders", 0, 0, 500)]


def test_a_checkpoint_of_another_broker_is_distinguished_from_one_of_this(logs: FakeLogs) -> None:
    logs.name = "here"
    query = Query(logs)
    query.batch()
    assert query.batch() == []
    logs.name = "there"
    logs.add("orders", 0, 5)
    with pytest.raises(UnknownTopic, match="offsets of the topic orders of another broker"):
        query.batch()
    query.restart(failOnDataLoss="false")
    assert query.batch() == [("orders", 0, 0, 150), ("orders", 1, 0, 300)]
    assert query.batch() == []


def test_a_checkpoint_that_names_no_broker_is_any_ones(logs: FakeLogs) -> None:
    query = Query(logs)
    query.batch()
    logs.name = "here"
    logs.add("orders", 0, 5)
    assert query.batch() == [("orders", 0, 100, 150)]


def test_a_topic_that_is_gone_stops_the_query_or_is_left_out(logs: FakeLogs) -> None:
    logs.create("payments")
    query = Query(logs, subscribe="orders,payments")
    query.batch()
    logs.delete("payments")
    with pytest.raises(UnknownTopic, match="payments was deleted"):
        query.batch()
    query.restart(failOnDataLoss="false")
    logs.add("orders", 0, 1)
    assert query.batch() == [("orders", 0, 100, 110)]


def test_a_topic_that_was_read_and_is_gone_is_not_called_unknown_with_available_now(logs: FakeLogs) -> None:
    query = Query(logs)
    query.batch()
    logs.delete("orders")
    query.restart()
    query.planner.freeze_end()
    with pytest.raises(UnknownTopic, match="The topic orders was deleted"):
        query.batch()
    query.restart(failOnDataLoss="false")
    query.planner.freeze_end()
    assert query.batch() == []


def test_a_topic_that_never_was_is_unknown_also_after_a_checkpoint(logs: FakeLogs) -> None:
    query = Query(logs)
    query.batch()
    query.restart(subscribe="orders,paymens")
    with pytest.raises(UnknownTopic, match="There is no topic 'paymens'"):
        query.batch()
    query.restart(subscribe="", assign='{"orders": [0, 1, 7]}')
    with pytest.raises(UnknownTopic, match="there is no partition orders-7"):
        query.batch()


def test_a_topic_that_is_not_subscribed_any_more_is_not_dropped_in_silence(logs: FakeLogs) -> None:
    logs.create("payments")
    query = Query(logs, subscribe="orders,payments")
    query.batch()
    query.restart(subscribe="orders")
    with pytest.raises(UnknownTopic, match="checkpoint has offsets of the topic payments"):
        query.batch()


def test_an_end_below_what_was_read_stops_the_query(logs: FakeLogs) -> None:
    query = Query(logs)
    query.batch()
    logs.kept["orders"][0].end = 50
    for available_now in (False, True):
        query.restart()
        if available_now:
            query.planner.freeze_end()
        with pytest.raises(LogTruncated, match="ends at offset 50, and this query had read up to 100"):
            query.batch()


def test_a_checkpoint_counts_more_than_changed_starting_offsets(logs: FakeLogs) -> None:
    query = Query(logs)
    query.batch()
    query.restart(startingOffsets="latest")
    logs.add("orders", 0, 1)
    assert query.batch() == [("orders", 0, 100, 110)]


def test_how_far_the_topics_reach_is_reported_without_asking(logs: FakeLogs) -> None:
    query = Query(logs)
    assert query.planner.latest_seen is None
    query.batch(BatchLimit(rows=8))
    logs.asked.clear()
    assert query.planner.latest_seen == {("orders", 0): PartitionOffset(1, 100), ("orders", 1): PartitionOffset(1, 300)}
    assert logs.asked == []


def test_an_idle_micro_batch_costs_two_questions(logs: FakeLogs) -> None:
    query = Query(logs)
    query.batch()
    logs.asked.clear()
    assert query.batch() == []
    assert logs.asked == ["partitions", "all_bounds"]


def test_a_topic_deleted_while_it_is_looked_at_is_looked_at_again(
    logs: FakeLogs, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = Query(logs, subscribePattern=".*", failOnDataLoss="false")
    query.batch()
    logs.create("payments")
    ask, times = logs.all_bounds, []

    def deleted_meanwhile(found: Any) -> Any:
        times.append(1)
        if len(times) == 1:
            logs.delete("payments")
        return ask(found)

    monkeypatch.setattr(logs, "all_bounds", deleted_meanwhile)
    logs.add("orders", 0, 1)
    assert query.batch() == [("orders", 0, 100, 110)]


def batch_of(logs: FakeLogs, **options: str) -> list[list[tuple[int, int, int]]]:
    tasks = Planner(settings(options, streaming=False), logs).plan_batch()
    return [[(each.log.partition, each.start, each.end) for each in task] for task in tasks]


def test_a_batch_ends_at_its_planned_end(logs: FakeLogs) -> None:
    assert batch_of(logs) == [[(0, 0, 100), (1, 0, 300)]]
    ending = '{"orders": {"0": 20, "1": -1}}'
    assert batch_of(logs, endingOffsets=ending) == [[(0, 0, 20), (1, 0, 300)]]
    logs.add("orders", 0, 5, ms=2000)
    assert batch_of(logs, endingTimestamp="2000") == [[(0, 0, 100), (1, 0, 300)]]


def test_a_batch_whose_start_is_after_its_end_is_refused(logs: FakeLogs) -> None:
    start, end = '{"orders": {"0": 50, "1": 0}}', '{"orders": {"0": 20, "1": -1}}'
    with pytest.raises(BadRequest, match="orders-0 is to be read from offset 50 to 20"):
        batch_of(logs, startingOffsets=start, endingOffsets=end)


def test_large_partitions_are_cut_for_more_tasks(logs: FakeLogs) -> None:
    tasks = batch_of(logs, minPartitions="4")
    assert tasks == [[(0, 0, 100)], [(1, 0, 100)], [(1, 100, 200)], [(1, 200, 300)]]


def test_a_task_has_at_most_so_many_messages(logs: FakeLogs) -> None:
    tasks = batch_of(logs, maxRecordsPerPartition="12")
    assert tasks == [[(0, 0, 100)], [(1, 0, 120)], [(1, 120, 240)], [(1, 240, 300)]]


def test_small_ranges_share_a_task_and_large_ones_do_not() -> None:
    logs = FakeLogs()
    logs.create("orders", 4)
    for number, size in enumerate((10, 1 << 20, 1 << 19, 1 << 19)):
        logs.add("orders", number, 1, size)
    assert [[each[0] for each in task] for task in batch_of(logs)] == [[0], [1], [2, 3]]


def test_a_query_that_reads_nothing_says_why(logs: FakeLogs, caplog: pytest.LogCaptureFixture) -> None:
    Query(logs, subscribePattern="zzz.*")
    assert Planner(settings({"subscribePattern": "zzz.*"}, streaming=False), logs).plan_batch() == []
    assert caplog.messages == ["No topic matches subscribePattern 'zzz.*', so nothing is read."] * 2
    caplog.clear()
    times = {"startingTimestamp": "1700000000001", "startingOffsetsByTimestampStrategy": "latest"}
    for last, said in (("1700000000000", 1), ("1700000000001", 0)):
        caplog.clear()
        chosen = {**times, "subscribe": "orders", "servers": "127.0.0.1:1", "endingTimestamp": last}
        assert Planner(parse_source_settings(chosen, streaming=False), logs).plan_batch() == []
        assert len(caplog.messages) == said


# Limits shared among partitions, ranges shared among tasks.
#
# What must hold of shares, whatever waits: the sum is the limit or all that waits, no share is more than waits, and
# while the limit is as large as the number of those who wait, none of them gets nothing.


@given(
    st.dictionaries(st.integers(0, 99), st.integers(0, 1 << 40), max_size=30),
    st.integers(1, 1 << 41),
    st.integers(0, 1000),
)
@example(dict.fromkeys(range(5), 10), 2, 3)
@example({0: 1, 1: 1 << 40}, 2, 0)
@example({0: 1, 1: 1 << 40, 2: 0}, 100, 0)
def test_shares(waiting: dict[int, int], limit: int, turn: int) -> None:
    found = share_limit(waiting, limit, turn)
    assert sum(found.values()) == min(limit, sum(waiting.values()))
    assert all(0 < amount <= waiting[name] for name, amount in found.items())
    if limit >= len([amount for amount in waiting.values() if amount]):
        assert found.keys() == {name for name, amount in waiting.items() if amount}


def test_a_share_is_in_proportion() -> None:
    found = share_limit({"a": 100_000, "b": 900_000}, 1000)
    assert found["a"] + found["b"] == 1000
    assert abs(found["a"] - 100) <= 1


def test_who_gets_nothing_gets_something_in_another_turn() -> None:
    waiting = dict.fromkeys("abcde", 10)
    got = {name for turn in range(5) for name in share_limit(waiting, 2, turn)}
    assert got == set("abcde")


def ranges(*sizes: int) -> list[OffsetRange]:
    return [OffsetRange(PartitionLog("t", number, 1, 1), 0, size) for number, size in enumerate(sizes)]


def grouped(*sizes: int) -> list[list[OffsetRange]]:
    return group_small(ranges(*sizes), lambda each: each.end - each.start, SMALL_RANGE_BYTES)


@given(st.lists(st.integers(1, 2 * SMALL_RANGE_BYTES), max_size=20))
def test_tasks_have_all_ranges_in_order(sizes: list[int]) -> None:
    tasks = grouped(*sizes)
    assert [each for task in tasks for each in task] == ranges(*sizes)
    assert all(len(task) == 1 or sum(each.end for each in task) <= SMALL_RANGE_BYTES for task in tasks)


def test_small_ranges_are_one_task() -> None:
    assert len(grouped(*[1000] * 64)) == 1
