"""A consumer against a scripted broker: the contract sentence by sentence, and everything that can go wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.client.blocks import Bytes
from tests.client.handling_rig import Bench
from tests.client.scripted_broker import Broker, Script
from tfmq.client.consumer.core import POLL_CHECKS_MAX, Lag
from tfmq.errors import (
    BadRequest,
    Busy,
    Closed,
    ConnectionFailed,
    Damaged,
    Fenced,
    OffsetOutOfRange,
    StorageStopped,
    TfmqError,
    UnknownPartition,
    UnknownTopic,
)
from tfmq.offsets.storage import PartitionName
from tfmq.protocol import commands as wire
from tfmq.testing.broker import SimulatedBroker

NAME = PartitionName("orders", 0)


@pytest.fixture
def broker() -> Broker:
    return Broker()


def filled(broker: Broker, count: int = 5, topic: str = "orders") -> Bytes:
    """A topic with `count` messages b"0", b"1" ..., a block each."""
    log = broker.create(topic)
    for n in range(count):
        log.append(b"%d" % n)
    return log


def offset_of(log: Bytes, n: int) -> int:
    return log.pieces[n].offset if n < len(log.pieces) else log.end


# Processed


def test_a_message_is_acked_when_the_next_one_is_asked_for(broker: Broker) -> None:
    log = filled(broker)
    script = Script(broker, group="g")
    loop = script.loop()
    next(loop)
    next(loop)
    script.pass_time(6)
    assert broker.saved("g") == offset_of(log, 1)


def test_a_message_is_acked_when_with_ends_without_an_exception(broker: Broker) -> None:
    log = filled(broker)
    script = Script(broker, group="g")
    next(script.loop())
    script.close(processed=True)
    assert broker.saved("g") == offset_of(log, 1)


def test_an_exception_or_a_bare_close_leaves_the_message_unacked(broker: Broker) -> None:
    log = filled(broker)
    script = Script(broker, group="g")
    loop = script.loop()
    next(loop), next(loop)
    script.close()
    assert broker.saved("g") == offset_of(log, 1)
    again = Script(broker, group="g")
    assert next(again.loop()).payload == b"1"


def test_a_polled_batch_is_acked_by_the_next_poll_only(broker: Broker) -> None:
    log = filled(broker)
    script = Script(broker, group="g")
    assert script.poll(count=2) == [b"0", b"1"]
    script.pass_time(6)
    assert broker.saved("g") == 0
    assert script.poll(count=2) == [b"2", b"3"]
    script.pass_time(6)
    assert broker.saved("g") == offset_of(log, 2)
    script.close()
    assert broker.saved("g") == offset_of(log, 2)


def test_commit_saves_all_that_is_out_the_current_message_included(broker: Broker) -> None:
    log = filled(broker)
    script = Script(broker, group="g")
    loop = script.loop()
    next(loop), next(loop)
    script.commit()
    assert broker.saved("g") == offset_of(log, 2)
    script.close()
    assert broker.saved("g") == offset_of(log, 2)


def test_commit_of_a_message_saves_up_to_it(broker: Broker) -> None:
    log = filled(broker)
    script = Script(broker, group="g", commits="manual")
    messages = script.messages()
    script.commit(messages[2])
    assert broker.saved("g") == offset_of(log, 3)


def test_manual_saves_only_on_request(broker: Broker) -> None:
    log = filled(broker)
    script = Script(broker, group="g", commits="manual")
    script.poll(count=2)
    script.poll(count=2)
    script.pass_time(20)
    assert broker.saved("g") is None
    script.commit()
    assert broker.saved("g") == offset_of(log, 4)
    script.poll()
    script.close(processed=True)
    assert broker.saved("g") == offset_of(log, 4)


def test_before_saves_before_it_hands_out(broker: Broker) -> None:
    log = filled(broker)
    script = Script(broker, group="g", commits="before")
    loop = script.loop()
    assert next(loop).payload == b"0"
    assert broker.saved("g") == offset_of(log, 1)
    assert next(loop).payload == b"1"
    assert broker.saved("g") == offset_of(log, 2)
    assert script.poll(count=2) == [b"2", b"3"]
    assert broker.saved("g") == offset_of(log, 4)
    script.close()
    assert Script(broker, group="g").poll() == [b"4"]


def test_before_hands_out_later_what_it_could_not_save(broker: Broker) -> None:
    filled(broker)
    script = Script(broker, group="g", commits="before")
    broker.fail[wire.CommitOffsets] = [BadRequest()]
    with pytest.raises(BadRequest):
        script.poll()
    assert script.poll() == [b"0", b"1", b"2", b"3", b"4"]


def test_offsets_are_saved_every_five_seconds_and_at_close(broker: Broker) -> None:
    filled(broker)
    script = Script(broker, group="g")
    script.poll()
    script.pass_time(4.9)
    assert broker.sent(wire.CommitOffsets) == []
    script.pass_time(0.3)
    assert len(broker.sent(wire.CommitOffsets)) == 1
    script.pass_time(20)
    assert len(broker.sent(wire.CommitOffsets)) == 1, "nothing new, nothing saved"
    script.close(processed=True)
    assert len(broker.sent(wire.CommitOffsets)) == 2


def test_without_a_group_nothing_is_saved(broker: Broker) -> None:
    filled(broker)
    script = Script(broker)
    script.poll()
    script.close(processed=True)
    assert not script.attended
    kinds = {type(request) for request in broker.requests}
    assert kinds == {wire.Metadata, wire.Locate, wire.Fetch}
    with pytest.raises(BadRequest, match="group"):
        Script(broker).commit()


def test_a_break_and_a_new_loop_lose_and_double_nothing(broker: Broker) -> None:
    log = broker.create("orders")
    log.append(*[b"%d" % n for n in range(6)])
    script = Script(broker)
    seen = []
    for size in (2, 1, 3):
        loop = script.loop()
        for _ in range(size):
            seen.append(next(loop).payload)
    assert seen == [b"%d" % n for n in range(6)]


# Groups


def test_what_is_not_this_members_is_not_read_and_is_read_once_it_is(broker: Broker) -> None:
    filled(broker)
    script = Script(broker, group="g")
    grants, broker._grants = broker._grants, lambda *_: []  # type: ignore[method-assign]
    assert script.poll(20) == [] and not script.core.fetcher.partitions
    broker._grants = grants  # type: ignore[method-assign]
    assert script.poll(20)
    broker._grants = lambda *_: []  # type: ignore[method-assign]
    script.pass_time(20)
    assert not script.core.fetcher.partitions


def test_heartbeats_continue_while_no_messages_are_polled(broker: Broker) -> None:
    filled(broker)
    script = Script(broker, group="g", session=9)
    next(script.loop())
    assert script.attended
    script.pass_time(30)
    assert 10 <= len(broker.sent(wire.Heartbeat)) <= 13


def test_a_member_that_was_taken_for_dead_drops_what_it_had_and_saves_nothing(
    broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    filled(broker)
    script = Script(broker, group="g")
    loop = script.loop()
    message = next(loop)
    broker.take_over("g")
    script.pass_time(12)
    assert script.poll() == []
    with pytest.raises(Fenced, match="orders-0"):
        script.commit(message)
    script.close(processed=True)
    assert broker.saved("g") is None
    assert caplog.text.count("expired, and joins again") == 1


def test_it_joins_again_and_goes_on_with_what_it_is_given_then(broker: Broker) -> None:
    log = filled(broker)
    script = Script(broker, group="g")
    script.poll(count=2)
    script.commit()
    assert script.poll(count=1) == [b"2"]
    broker.take_over("g")
    script.pass_time(12)
    broker.thieves.clear()
    assert script.poll(12) == [b"2", b"3", b"4"]
    script.commit()
    assert broker.saved("g") == log.end


def test_a_partition_that_was_away_and_is_back_begins_where_the_group_is(broker: Broker) -> None:
    """Another grant: between the two another member may have had it."""
    log = filled(broker)
    script = Script(broker, group="g")
    script.poll(count=2)
    script.commit()
    assert script.poll(count=1) == [b"2"]
    incarnation, answer = broker.topics["orders"][0], broker.on_heartbeat
    broker.groups["g"] = (8, broker.groups["g"][1])
    broker.given["g"] = {("orders", incarnation, 0): 8}
    back = wire.HeartbeatReply(8, [wire.GrantedPartition("orders", incarnation, 0, 8)], "")
    broker.on_heartbeat = lambda each: answer(each) or (back if each.generation < 8 else None)  # type: ignore[method-assign]
    script.pass_time(12)
    assert script.poll(12) == [b"2", b"3", b"4"]
    script.commit()
    assert broker.saved("g") == log.end


def test_what_goes_again_before_it_was_begun_with_is_released_at_once(broker: Broker) -> None:
    """Its offsets were not to be had meanwhile; the next member must not wait for that."""
    filled(broker)
    broker.fail[wire.ReadOffsets] = [Busy() for _ in range(1000)]
    script = Script(broker, group="g")
    script.poll(0.0)
    script.pass_time(2)
    assert [each.leaving for each in broker.sent(wire.Heartbeat)[-1].held] == [False]
    broker._grants = lambda *_: []  # type: ignore[method-assign]
    script.pass_time(12)
    assert broker.sent(wire.Heartbeat)[-1].held == []


def test_a_commit_of_what_another_has_by_now_says_so_and_the_rest_is_saved(broker: Broker) -> None:
    filled(broker)
    other = broker.grow("orders")
    other.append(b"x")
    script = Script(broker, group="g")
    assert sorted(script.poll() + script.poll()) == [b"0", b"1", b"2", b"3", b"4", b"x"]
    broker.stolen.add(("orders", broker.topics["orders"][0], 0))
    with pytest.raises(Fenced, match="orders-0") as caught:
        script.commit()
    assert caught.value.details["partitions"] == [["orders", 0]]
    assert (broker.saved("g"), broker.saved("g", partition=1)) == (None, other.end)
    script.commit()


def test_a_close_that_comes_too_late_warns_only(broker: Broker, caplog: pytest.LogCaptureFixture) -> None:
    filled(broker)
    script = Script(broker, group="g")
    script.poll()
    broker.take_over("g")
    script.close(processed=True)
    assert broker.saved("g") is None
    assert "orders-0 belongs to another member of group g by now" in caplog.text


def test_a_save_that_fails_in_passing_is_tried_again(broker: Broker) -> None:
    log = filled(broker)
    script = Script(broker, group="g")
    script.poll(), script.poll(0.1)
    broker.fail[wire.CommitOffsets] = [Busy(), ConnectionFailed()]
    script.pass_time(10)
    assert broker.saved("g") == log.end


# What goes wrong


def test_a_deleted_topic_stops_its_partition_and_a_new_one_is_read_after_that_was_reported(broker: Broker) -> None:
    filled(broker)
    filled(broker, 1, "other")
    script = Script(broker, topics=["orders", "other"])
    assert len(script.poll()) == 6
    del broker.topics["orders"]
    with pytest.raises(UnknownTopic, match="orders-0"):
        script.poll(60)
    broker.topics["other"][1][0].append(b"on")
    assert script.poll(60) == [b"on"]
    filled(broker, 1)
    assert script.poll(60) == [b"0"]


def test_lost_offsets_are_raised_after_what_was_read_and_the_partition_stays_stopped(broker: Broker) -> None:
    log = filled(broker)
    script = Script(broker)
    script.poll(), script.poll(0.1)
    old = log.end
    log.first = log.end = log.end + 1000
    log.pieces.clear()
    log.append(b"late")
    for _ in range(2):
        with pytest.raises(OffsetOutOfRange, match=f"offsets {old} to {old + 1000}") as caught:
            script.poll(60)
        assert caught.value.first == old + 1000
    script.run(script.core.seek(*NAME, offset=caught.value.first))
    assert script.poll() == [b"late"]


def test_an_automatic_reset_is_opt_in(broker: Broker) -> None:
    log = filled(broker)
    log.first, log.pieces = log.pieces[3].offset, log.pieces[3:]
    assert Script(broker, start=0, on_out_of_range="earliest").poll() == [b"3", b"4"]
    with pytest.raises(OffsetOutOfRange):
        Script(broker, start=0).poll()


def test_damage_is_raised_or_skipped_and_reported(broker: Broker) -> None:
    log = filled(broker, 3)
    bad = log.pieces[1]
    log.replace(bad, bad.data[:20] + b"!" + bad.data[21:])
    script = Script(broker)
    assert script.poll() == [b"0"]
    with pytest.raises(Damaged) as caught:
        script.poll()
    assert (caught.value.first, caught.value.next) == (bad.offset, log.pieces[2].offset)
    skipping = Script(broker, on_damage="skip")
    assert skipping.poll() == [b"0", b"2"]
    assert skipping.core.stats()["skipped_ranges"][0][1:3] == (bad.offset, log.pieces[2].offset)


def test_a_failure_while_a_poll_is_topped_up_does_not_lose_what_it_has(broker: Broker) -> None:
    log = filled(broker, 2)
    bad = log.pieces[1]
    log.replace(bad, bad.data[:20] + b"!" + bad.data[21:])
    script = Script(broker)
    assert script.poll(count=500) == [b"0"]
    with pytest.raises(Damaged):
        script.poll()


def test_a_broker_that_was_never_there_is_reported_at_once_and_one_that_went_away_is_not(broker: Broker) -> None:
    filled(broker)
    broker.down = True
    script = Script(broker)
    with pytest.raises(ConnectionFailed):
        script.poll(60)
    broker.down = False
    assert len(script.poll()) == 5
    broker.down = True
    assert script.poll(200) == []
    broker.down = False
    broker.topics["orders"][1][0].append(b"again")
    assert script.poll(60) == [b"again"]


@pytest.mark.parametrize("error", [Busy(), ConnectionFailed()])
def test_passing_failures_of_a_fetch_are_not_seen(broker: Broker, error: TfmqError) -> None:
    filled(broker)
    broker.fail[wire.Fetch] = [error] * 5
    assert len(Script(broker).poll(60)) == 5


# A poll without any time


def look_by_look(script: Script, comes: bool) -> tuple[list[Any], int]:
    """A poll(0) whose looks bring what the broker has, and without end something that is no message if `comes`."""
    operation, looks = script.core.poll(0, 500), 0
    while True:
        try:
            next(operation)
        except StopIteration as end:
            return end.value, looks
        looks += 1
        for _ in range(10):  # a task sends several requests, one after the other
            script.link.serve()
            script.core.tasks.tick()
        if comes:
            script.core._change_event.complete()


def test_the_first_poll_asks_and_reads_in_a_few_looks(broker: Broker) -> None:
    filled(broker)
    messages, looks = look_by_look(Script(broker, group="g"), comes=False)
    assert (len(messages), looks) == (5, 2)


def test_its_looks_are_bounded_whatever_comes(broker: Broker) -> None:
    broker.create("orders")
    assert look_by_look(Script(broker), comes=True) == ([], POLL_CHECKS_MAX)


# Filters


def test_item_14_a_filter_that_rejects_all_still_advances(broker: Broker) -> None:
    log = broker.create("orders")
    for n in range(20):
        log.append(b"%d" % n, tag="old")
    script = Script(broker, group="g", tags="new")
    assert script.poll(1) == []
    assert script.poll(1) == []
    script.close(processed=True)
    assert broker.saved("g") == log.end
    log.append(b"wanted", tag="new")
    assert Script(broker, group="g", tags="new").poll() == [b"wanted"]


def test_the_hash_goes_to_the_broker_and_the_tag_is_compared_here(broker: Broker) -> None:
    log = broker.create("orders")
    log.append_records([log.record(b"a", tag="new"), log.record(b"b", tag="old"), log.record(b"c")])
    script = Script(broker, tags=["new"])
    assert script.poll() == [b"a"]
    assert broker.sent(wire.Fetch)[0].tags is not None


def test_where_leaves_out_what_it_says_no_to_and_the_place_advances(broker: Broker) -> None:
    log = filled(broker)
    script = Script(broker, group="g", where=lambda message: int(message.payload) % 2)
    assert script.poll() + script.poll() == [b"1", b"3"]
    script.close(processed=True)
    assert broker.saved("g") == log.end
    rejecting = Script(broker, group="h", where=lambda message: False)
    assert rejecting.poll() == []
    rejecting.close(processed=True)
    assert broker.saved("h") == log.end


def test_what_where_raises_is_raised_and_its_message_stays(broker: Broker) -> None:
    filled(broker, 3)
    broken = [True]

    def where(message: Any) -> bool:
        if message.payload == b"1" and broken[0]:
            raise ValueError("planted")
        return True

    script = Script(broker, where=where)
    assert script.poll() == [b"0"]
    for _ in range(2):
        with pytest.raises(ValueError, match="planted"):
            script.poll()
    broken[0] = False
    assert script.poll() == [b"1", b"2"]


# The end


def test_stop_ends_the_loop_after_the_current_message(broker: Broker) -> None:
    log = broker.create("orders")
    log.append(*[b"%d" % n for n in range(4)])
    script = Script(broker, group="g")
    seen = []
    for message in script.loop():
        seen.append(message)
        if len(seen) == 2:
            script.core.stop()
            script.core.stop_requested.complete()
    script.close(processed=True)
    assert [m.payload for m in seen] == [b"0", b"1"]
    assert broker.saved("g") == seen[-1].next_offset
    assert script.broker.groups["g"][0] == 1


def test_what_is_closed_says_so(broker: Broker) -> None:
    filled(broker)
    script = Script(broker, group="g")
    script.poll()
    script.close()
    script.close()
    for call in (script.poll, script.commit):
        with pytest.raises(Closed):
            call()


def test_an_operation_that_is_dropped_in_the_middle_leaves_a_consumer_that_works(broker: Broker) -> None:
    log = filled(broker, 1)
    script = Script(broker, group="g")
    for steps in range(6):
        operation = script.core.poll(5.0, 10)
        try:
            for _ in range(steps):
                next(operation)
                script.link.serve()
        except StopIteration:
            break
        operation.close()
    log.append(b"1")
    seen = script.poll() + script.poll()
    assert seen[-1] == b"1"


def test_an_interrupt_in_the_middle_of_decoding_loses_nothing(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(broker)
    script = Script(broker)
    assert script.poll(count=2) == [b"0", b"1"]
    script.run(script.core.seek(*NAME, ordinal=1))

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("tfmq.client.consumer.decoder.crc32", interrupted)
        with pytest.raises(KeyboardInterrupt):
            script.poll()
    assert script.poll() == [b"1", b"2", b"3", b"4"]


def test_a_forked_child_reads_on_by_itself_and_is_no_member(broker: Broker) -> None:
    log = filled(broker)
    script = Script(broker)
    assert script.poll(count=2) == [b"0", b"1"]
    script.link.open.clear()
    script.core.reset_after_fork()
    log.append(b"5")
    assert script.poll() == [b"2", b"3", b"4", b"5"]


def test_a_seek_in_a_partition_that_goes_to_another_member_meanwhile_is_refused(broker: Broker) -> None:
    filled(broker)
    script = Script(broker, group="g", commits="manual")
    script.poll()
    locate = broker.on_locate

    def lost(request: wire.Locate) -> Any:
        script.core.assignment.partitions_fenced([NAME])
        return locate(request)

    broker.on_locate = lost  # type: ignore[method-assign]
    with pytest.raises(UnknownPartition, match="orders-0"):
        script.run(script.core.seek(*NAME, to="earliest"))
    assert NAME not in script.core.positions


def test_a_forked_child_of_a_member_has_nothing_of_it_and_begins_where_the_group_is(broker: Broker) -> None:
    """Nothing of it may go out before the child is a member itself: it is the parent's."""
    log = filled(broker)
    script = Script(broker, group="g", commits="manual", start="latest")
    script.run(script.core.seek(*NAME, to="earliest"))
    first = script.messages(count=2)
    script.commit(first[0])
    script.link.open.clear()
    script.core.reset_after_fork()
    broker.fail[wire.JoinGroup] = [Busy("later")] * 3
    assert script.poll(0.0) == []
    assert script.core.positions.ready is None and not script.core.fetcher.partitions
    with pytest.raises(Fenced, match="orders-0"):
        script.commit(first[1])
    assert script.poll() == [b"1", b"2", b"3", b"4"]
    script.commit()
    assert broker.saved("g") == log.end
    assert [each.member for each in broker.sent(wire.JoinGroup)][-1] != broker.sent(wire.JoinGroup)[0].member


def test_a_forked_child_gets_what_its_parent_was_handed_out(broker: Broker) -> None:
    log = filled(broker)
    script = Script(broker, group="g", commits="manual")
    script.poll(count=2)
    script.link.open.clear()
    script.core.reset_after_fork()
    with pytest.raises(Fenced, match="orders-0"):
        script.commit()
    assert broker.saved("g") is None
    assert script.poll() == [b"0", b"1", b"2", b"3", b"4"]
    script.commit()
    assert broker.saved("g") == log.end


def test_a_commit_of_a_message_says_a_loss_once_and_of_its_own_partition(broker: Broker) -> None:
    filled(broker, count=2)
    broker.grow("orders").append(b"x")
    script = Script(broker, group="g", commits="manual")
    given = {message.partition: message for message in script.messages() + script.messages()}
    script.core.assignment.partitions_fenced([NAME])
    script.commit(given[1])
    with pytest.raises(Fenced, match="orders-0"):
        script.commit(given[0])
    script.commit()


def test_a_message_of_a_partition_that_was_lost_and_came_back_is_not_saved_but_handed_out_again(broker: Broker) -> None:
    """A listener that is notified of a loss drops its work on it: so it must be delivered again."""
    filled(broker)
    script = Script(broker, group="g", commits="manual")
    message = script.messages(count=2)[1]
    broker.take_over("g")
    script.pass_time(12)
    broker.thieves.clear()
    script.pass_time(12)
    again = script.messages(count=3)
    with pytest.raises(Fenced, match="orders-0"):
        script.commit(again[2])
    assert broker.saved("g") is None
    assert script.poll() == [b"0", b"1", b"2", b"3", b"4"]
    script.commit(message)
    assert broker.saved("g") is not None


# `stats()`, with a group and without one.


def test_it_says_where_each_partition_and_the_group_stand(tmp_path: Path) -> None:
    with SimulatedBroker() as broker:
        bench = Bench(broker, tmp_path)
        bench.send("a", "b")
        alone, member = bench.open(group=None, dead_letters=None), bench.open()
        for consumer in (alone, member):
            with consumer:
                assert len(consumer.poll()) == 2
                stats = consumer.stats()
                assert (stats["messages"], stats["connections"]) == (2, 1)
                row = stats["partitions"]["orders-0"]
                assert row["offset"] > row["processed_offset"] == 0
        assert alone.stats()["generation"] == 0 < member.stats()["generation"]


# Lag: a number that is the sum of its partitions.


def test_a_lag_is_its_total_and_knows_its_parts() -> None:
    lag = Lag({PartitionName("a", 0): 2, PartitionName("a", 1): 3})
    assert lag == 5
    assert lag.partitions[PartitionName("a", 1)] == 3
    assert Lag({}) == 0


def test_partitions_are_measured_from_what_was_handed_out() -> None:
    broker = Broker()
    broker.create("orders", 2)
    for log in broker.topics["orders"][1]:
        for _ in range(3):
            log.append(b"x")
    script = Script(broker)
    first = script.messages(count=3)
    lag = script.run(script.core.lag())
    assert lag == 3
    assert lag.partitions[PartitionName("orders", first[0].partition)] == 0


@pytest.mark.parametrize(("error", "partitions"), [(UnknownTopic(), {}), (StorageStopped("planted"), {0: -1})])
def test_an_unknown_part_is_no_reason_to_report_nothing(error: TfmqError, partitions: dict[int, int]) -> None:
    broker = Broker()
    broker.create("orders", 2)
    for log in broker.topics["orders"][1]:
        log.append(b"x")
    script = Script(broker, fetch_bytes=1, prefetch_bytes=1)
    script.run(script.core._wait_for_partitions(script.link.now() + 10))
    ask = broker.on_locate

    def locate(request: wire.Locate) -> Any:
        if request.partition == 0:
            raise error
        return ask(request)

    broker.on_locate = locate  # type: ignore[method-assign]
    lag = script.run(script.core.lag())
    assert lag == 1
    assert {name.partition: each for name, each in lag.partitions.items()} == {**partitions, 1: 1}


def test_a_place_in_a_damaged_range_has_no_lag_that_could_be_reported() -> None:
    broker = Broker()
    broker.create("orders").append(b"x")
    script = Script(broker, start=0)
    script.run(script.core._wait_for_partitions(script.link.now() + 10))
    ask = broker.on_locate
    broker.on_locate = lambda request: (  # type: ignore[method-assign]
        ask(request)._replace(ordinal=-1) if request.by == wire.BY_OFFSET else ask(request)
    )
    lag = script.run(script.core.lag())
    assert (lag, lag.partitions) == (0, {PartitionName("orders", 0): -1})


def shown(broker: SimulatedBroker) -> list[tuple[int, int, int]]:
    """What `tfmq group show` says: partition, offset, lag; and the total is their sum."""
    found = broker.admin().group("billing")
    rows = [(each["partition"], each["offset"], each["lag"]) for each in found.offsets]
    assert found.lag == sum(lag for _, _, lag in rows)
    return rows


def filled_of_lag(broker: SimulatedBroker, count: int = 4) -> None:
    producer = broker.producer()
    for number in range(count):
        producer.send("orders", str(number), tag="red" if number % 2 else "blue", partition=0).result()


@pytest.mark.parametrize(
    "filters", [{"tags": "green"}, {"where": lambda message: False}, {"tags": "red", "where": lambda _: False}]
)
def test_a_consumer_that_filters_everything_out_has_no_lag(filters: dict[str, Any]) -> None:
    with SimulatedBroker() as broker:
        filled_of_lag(broker)
        consumer = broker.consumer("orders", group="billing", save_every=1, **filters)
        assert consumer.poll(timeout=2) == []
        consumer.poll(timeout=2)
        assert consumer.lag() == 0
        ((_, offset, lag),) = shown(broker)
        assert (offset > 0, lag) == (True, 0)
        filled_of_lag(broker, 2)
        assert shown(broker)[0][2] == 2 == broker.admin().group("billing").lag


def test_a_new_partition_with_an_owner_lags_by_all_of_it() -> None:
    """It is shown from the moment in which it has an owner: a handler may take long for its first message."""
    with SimulatedBroker() as broker:
        broker.admin().create_topic("orders", partitions=2)
        filled_of_lag(broker)
        consumer = broker.consumer("orders", group="billing", commits="manual")
        assert len(consumer.poll(timeout=1)) == 4
        assert shown(broker) == [(0, -1, 4), (1, -1, 0)]
        consumer.commit()
        assert [row[::2] for row in shown(broker)] == [(0, 0), (1, 0)]
        assert shown(broker)[0][1] > 0


def test_what_retention_took_away_is_not_part_of_the_lag() -> None:
    with SimulatedBroker({"log.segment_bytes": 65536, "retention.bytes": 65536}) as broker:
        consumer = broker.consumer("orders", group="billing", commits="manual", on_out_of_range="earliest")
        producer = broker.producer()
        producer.send("orders", "0").result()
        assert [message.text for message in broker.drain(consumer)] == ["0"]
        consumer.commit()
        for _ in range(40):
            producer.send("orders", b"x" * 10_000).result()
        broker.clock.advance(hours=1)
        there = broker.admin().topic("orders").partitions[0]
        left = there.end_ordinal - there.first_ordinal
        assert 0 < left < 40, "some are gone"
        assert [row[2] for row in shown(broker)] == [left]
