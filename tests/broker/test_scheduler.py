"""Schedules and the clock: each time once, over restarts, downtimes, crashes, clock steps, stopped partitions.

Virtual time: a broker runs on a simulated disk and clock.
"""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest

from journal.record.batch import Batch
from journal.record.block_trailer import SOURCE_SCHEDULE, SOURCE_TRANSACTION
from journal.record.format import (
    FLAG_TOMBSTONE,
    SEQUENCE_COUNT,
    make_log_id,
    records_of,
    split_body,
    split_id,
    tag_hash,
)
from journal.testing import Moment, SimulatedClock, crash_states
from tests.broker.schedule_helpers import Scheduling, ms
from tests.scale import SEED, scaled
from tfmq import limits
from tfmq.broker.apply_target import BrokerApplyTarget
from tfmq.broker.catalog_state import SCHEDULE, SCHEDULE_STATE, ScheduleRow
from tfmq.broker.scheduler import (
    GRACE_MS,
    MISFIRE_RULES,
    OBSOLETE_ENTRIES_MAX,
    PAUSE_SECONDS,
    PORTION_SECONDS,
    PORTION_STEPS,
    ROUND_SECONDS,
    SEND_ALL,
    SEND_ALL_MAX,
    SEND_LATEST,
    SEND_NONE,
    TOPIC_GONE,
    RunningSchedule,
    ScheduleTimer,
    moments_to_send,
)
from tfmq.broker.timers import Timers
from tfmq.delay.cron import MINUTE_MS, CronSchedule
from tfmq.errors import BadRequest, DecodeFailed, MessageTooLarge
from tfmq.message import decode_attribute, encode_attribute
from tfmq.protocol import commands

RULES = ["one", "all", "skip"]


def hours(times: list[str]) -> list[str]:
    """Only what a clock on the wall shows."""
    return [each[11:16] for each in times]


# In time


def test_it_is_sent_when_its_time_has_come_and_not_a_millisecond_before() -> None:
    broker = Scheduling.with_topic()
    broker.add("0 9 * * *")
    broker.until("2026-11-23T08:59:59.998")
    assert broker.times() == []
    broker.until("2026-11-23T09:00:00.002")
    assert broker.times() == ["2026-11-23T09:00:00+00:00"]
    broker.until("2026-11-23T23:59")
    assert len(broker.times()) == 1


def test_what_is_sent_is_fsynced_at_once_so_that_consumers_get_it() -> None:
    broker = Scheduling.with_topic(flush__seconds=1000.0)
    broker.add("0 9 * * *")
    broker.until("2026-11-23T09:00:00.002")
    assert len(broker.payloads(read=commands.READ_FORCED)) == 1


def test_the_list_shows_the_last_time_and_the_next() -> None:
    broker = Scheduling.with_topic()
    broker.add("0 9 * * *", timezone="America/New_York")
    broker.until("2026-11-23T14:30")
    found = broker.schedule()
    assert (found["last_ms"], found["next_ms"]) == (ms("2026-11-23T09:00-05:00"), ms("2026-11-24T09:00-05:00"))
    assert broker.restart().schedule() == found


def test_ids_of_messages_never_come_twice() -> None:
    broker = Scheduling.with_topic()
    for name in "ab":
        broker.add("* * * * *", name)
    broker.until("2026-11-23T10:00:30")
    ids = Counter(each.id for each in broker.sent())
    assert len(ids) == 240 and set(ids.values()) == {1}


def test_many_that_are_due_together_are_sent_in_several_turns() -> None:
    broker = Scheduling.with_topic(limits__schedules=2 * PORTION_STEPS + 10)
    for number in range(2 * PORTION_STEPS + 5):
        broker.add("0 9 * * *", f"n{number}")
    broker.clock.advance((ms("2026-11-23T09:00") - broker.clock.wall_ms()) / 1000)
    counts: list[int] = []
    while not counts or counts[-1] < 2 * PORTION_STEPS + 5:
        broker.engine.broker.timers.tick(broker.clock.monotonic())
        broker.engine.broker.end_turn()
        counts.append(len(broker.times()))
        broker.clock.advance(0.006)
    assert counts == [PORTION_STEPS, 2 * PORTION_STEPS, 2 * PORTION_STEPS + 5]


def test_both_sides_of_a_change_to_summer_time_and_back_as_the_page_says() -> None:
    broker = Scheduling.with_topic(at="2026-03-28T12:00")
    broker.add("30 2 * * *", timezone="Europe/Berlin")
    broker.until("2026-03-30T12:00")
    broker = broker.down_until("2026-10-24T12:00")
    broker.until("2026-10-26T12:00")
    assert broker.times() == [
        "2026-03-29T03:30:00+02:00",
        "2026-03-30T02:30:00+02:00",
        "2026-10-24T02:30:00+02:00",
        "2026-10-25T02:30:00+02:00",
        "2026-10-26T02:30:00+01:00",
    ]


# Restarts and downtimes


@pytest.mark.parametrize("rule", RULES)
def test_a_restart_between_two_times_changes_nothing(rule: str) -> None:
    broker = Scheduling.with_topic()
    broker.add("0 * * * *", misfire=rule)
    for hour in (9, 10, 11):
        broker.until(f"2026-11-23T{hour:02}:00:01")
        broker = broker.restart()
        broker.look()
    assert hours(broker.times()) == ["09:00", "10:00", "11:00"]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("one", ["09:00", "14:00", "15:00"]),
        ("all", ["09:00", "10:00", "11:00", "12:00", "13:00", "14:00", "15:00"]),
        ("skip", ["09:00", "15:00"]),
    ],
)
def test_after_a_downtime_its_misfire_rule_decides(
    rule: str, expected: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    broker = Scheduling.with_topic()
    broker.add("0 * * * *", misfire=rule)
    broker.until("2026-11-23T09:10")
    broker = broker.down_until("2026-11-23T14:30")
    broker.until("2026-11-23T15:00:01")
    assert hours(broker.times()) == expected
    again = broker.restart()
    again.look()
    assert hours(again.times()) == expected
    assert "skips" not in caplog.text, "what the rule says is no trouble"


def test_what_is_left_out_for_want_of_the_topic_is_said_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    broker = Scheduling.with_topic()
    broker.add("0 9 * * *")
    broker.delete()
    broker.until("2026-11-23T09:00:01")
    (reported,) = [record.getMessage() for record in caplog.records if "skips" in record.getMessage()]
    assert reported.endswith(TOPIC_GONE.format(topic="orders")) and broker.schedule()["trouble"] in reported


@pytest.mark.parametrize("rule", RULES)
def test_a_short_restart_at_the_very_time_misses_nothing(rule: str) -> None:
    broker = Scheduling.with_topic()
    broker.add("0 9 * * *", misfire=rule)
    broker.until("2026-11-23T08:59:55")
    broker = broker.down_until("2026-11-23T09:00:20")
    assert hours(broker.times()) == ["09:00"]


def test_a_downtime_of_years_sends_the_newest_thousand_at_most_in_their_order() -> None:
    broker = Scheduling.with_topic()
    broker.add("* * * * *", misfire="all", payload=bytes(1000))
    broker.until("2026-11-23T08:02:01")
    broker = broker.down_until("2036-11-23T12:00:30")
    broker.look()
    found = broker.times()
    assert len(found) == 2 + SEND_ALL_MAX and found == sorted(found) and found[-1] == "2036-11-23T12:00:00+00:00"
    appends = broker.log().end_offset / len(found)
    assert appends < 1400, "times that were missed share appends"


def test_large_messages_that_were_missed_come_in_several_appends_each_fsynced_before_the_next() -> None:
    broker = Scheduling.with_topic(queued=True)
    broker.add("* * * * *", misfire="all", payload=bytes(60_000))
    broker.stop()
    broker.clock.advance(3600)
    again = Scheduling(broker.disk, broker.clock, queued=True)
    seen = [0]
    while seen[-1] < 60:
        again.advance(0.01)
        while again.jobs:
            again.step()
            seen.append(len(again.times()))
    assert seen[-1] == 60 and 0 < max(right - left for left, right in pairwise(seen)) <= 4


def test_a_topic_that_is_made_anew_in_the_middle_of_a_catch_up_gets_nothing_of_the_rest() -> None:
    broker = Scheduling.with_topic(queued=True)
    broker.add("* * * * *", misfire="all", payload=bytes(60_000))
    broker.stop()
    broker.clock.advance(3600)
    again = Scheduling(broker.disk, broker.clock, queued=True)
    while not again.times():
        again.advance(0.01)
        while again.jobs and not again.times():
            again.step()
    assert len(again.times()) < 10
    again.delete()
    again.create()
    again.look()
    assert again.times() == [] and again.schedule()["state"] == "active"
    again.until("2026-11-23T09:01:01")
    assert hours(again.times()) == ["09:01"]


def test_a_message_that_its_partition_does_not_take_any_more_is_left_out_and_holds_up_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broker = Scheduling.with_topic()
    broker.add("0 9 * * *", payload=bytes(2000))
    broker.add("0 9 * * *", "small")
    check = BrokerApplyTarget.check_batch

    def smaller(self: BrokerApplyTarget, partition: Any, batch: Batch) -> None:
        if len(batch.data) > 1000:
            raise MessageTooLarge(size_bytes=len(batch.data), max_bytes=1000)
        check(self, partition, batch)

    monkeypatch.setattr(BrokerApplyTarget, "check_batch", smaller)
    broker.until("2026-11-23T09:00:01")
    assert len(broker.times()) == 1
    assert "is larger than" in broker.schedule()["trouble"] and not broker.schedule("small")["trouble"]
    monkeypatch.undo()
    broker.until("2026-11-24T09:00:01")
    assert len(broker.times()) == 3


def test_retention_cannot_take_away_what_says_that_it_was_sent() -> None:
    broker = Scheduling.with_topic(log__segment_bytes=1 << 16, log__state_bytes=1 << 16)
    broker.add("0 9 * * *")
    broker.until("2026-11-23T09:01")
    producer = broker.lease()
    for number in range(20):
        broker.produce(producer, number, [bytes(20_000)])
    log = broker.log()
    broker.ask(commands.Truncate("orders", broker.incarnation(), 0, log.end_offset))
    assert log.first_offset > 0
    again = broker.restart()
    again.look()
    assert again.times().count("2026-11-23T09:00:00+00:00") == 0 and again.schedule()["last_ms"] > 0


# Crashes


@pytest.mark.parametrize("rule", RULES)
def test_no_crash_doubles_or_loses_a_time(rule: str) -> None:
    """A power cut or a kill at every change of the disk, whatever of it survived, then on to the next time. Seeded by
    TFMQ_TEST_SEED.
    """
    broker = Scheduling.with_topic(log__segment_bytes=1 << 16, log__state_bytes=1 << 16)
    broker.add("* * * * *", misfire=rule, payload=bytes(12_000))
    moments: list[tuple[Moment, int]] = []
    broker.disk.after = lambda kind, path: moments.append((Moment(broker.disk), broker.clock.wall_ms()))
    for minute in range(1, 8):
        broker.until(f"2026-11-23T08:{minute:02}:02")
    chance = random.Random(SEED)
    states = 0
    for moment, wall in moments:
        for disk in crash_states(moment, scaled(60), chance):
            states += 1
            again = Scheduling(disk, at=_text(wall), **broker.values)
            again.until("2026-11-23T08:09:01")
            found = Counter(hours(again.times()))
            assert set(found.values()) == {1}, found
            # A time that the crash took is missed by less than a minute, so every rule sends it.
            assert sorted(found) == [f"08:{minute:02}" for minute in range(1, 10)]
    assert states >= 20


def _text(wall_ms: int) -> str:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(wall_ms / 1000, UTC).isoformat()


@pytest.mark.parametrize("rule", RULES)
def test_a_crash_in_a_catch_up_doubles_nothing(rule: str) -> None:
    """Seeded by TFMQ_TEST_SEED."""
    broker = Scheduling.with_topic()
    broker.add("0 * * * *", misfire=rule, payload=bytes(60_000))
    broker.stop()
    broker.clock.advance(12.25 * 3600)
    again = Scheduling(broker.disk, broker.clock)
    moments: list[Moment] = []
    again.disk.after = lambda kind, path: moments.append(Moment(again.disk))
    again.look()
    again.disk.after = None
    expected = hours(again.times())
    chance = random.Random(SEED)
    for moment in moments:
        for disk in crash_states(moment, scaled(40), chance):
            third = Scheduling(disk, broker.clock)
            third.look()
            assert hours(third.times()) == expected
    assert len(expected) == {"one": 1, "all": 12, "skip": 0}[rule]


def test_what_a_power_cut_took_before_it_was_fsynced_is_sent_again() -> None:
    broker = Scheduling.with_topic(queued=True)
    broker.add("0 9 * * *")
    broker.advance((ms("2026-11-23T09:00:00.002") - broker.clock.wall_ms()) / 1000)
    assert len(broker.times()) == 1
    again = broker.crashed(broker.disk.crash(keep="nothing"))
    assert again.times() == []
    again.look()
    assert hours(again.times()) == ["09:00"]


# The clock


def test_a_clock_that_is_set_forth_misses_what_it_passed() -> None:
    for rule, expected in (("one", ["12:00"]), ("all", ["09:00", "10:00", "11:00", "12:00"]), ("skip", [])):
        broker = Scheduling.with_topic()
        broker.add("0 * * * *", misfire=rule)
        broker.clock.jump_wall(4.25 * 3600)
        broker.advance(ROUND_SECONDS + 0.1)
        assert hours(broker.times()) == expected, rule
        broker.until("2026-11-23T13:00:01")
        assert hours(broker.times()) == [*expected, "13:00"]


def test_a_clock_that_is_set_back_doubles_nothing_and_waits() -> None:
    broker = Scheduling.with_topic()
    broker.add("0 * * * *")
    broker.until("2026-11-23T10:30")
    assert hours(broker.times()) == ["09:00", "10:00"]
    broker.clock.jump_wall(-2 * 3600)
    broker.advance(ROUND_SECONDS)
    assert broker.schedule()["state"] == "waiting" and "tfmq schedule resume" in broker.schedule()["trouble"]
    broker.until("2026-11-23T10:59")
    assert hours(broker.times()) == ["09:00", "10:00"] and broker.schedule()["state"] == "active"
    broker.until("2026-11-23T11:00:01")
    assert hours(broker.times()) == ["09:00", "10:00", "11:00"]


def test_a_small_step_back_right_after_a_time_does_not_double_it() -> None:
    broker = Scheduling.with_topic()
    broker.add("0 9 * * *")
    broker.until("2026-11-23T09:00:01")
    broker.clock.jump_wall(-5)
    broker.until("2026-11-23T09:01")
    broker = broker.restart()
    broker.clock.jump_wall(-90)
    broker.until("2026-11-23T09:02")
    assert len(broker.times()) == 1


def test_resuming_after_a_small_step_back_doubles_nothing() -> None:
    broker = Scheduling.with_topic()
    first = broker.add("0 9 * * *").fields.schedule
    broker.until("2026-11-23T09:00:01")
    broker.clock.jump_wall(-30)
    assert broker.resume().fields.schedule["id"] == first["id"]
    broker.pause()
    assert broker.resume().fields.schedule["id"] == first["id"]
    broker.until("2026-11-23T09:05")
    assert len(broker.times()) == 1


def test_after_a_wrong_clock_was_corrected_resuming_goes_on_from_now() -> None:
    """Ten years ahead for a while: what it sent then stands in its way until it is resumed, under another id."""
    broker = Scheduling.with_topic()
    broker.add("0 * * * *", key="k", tag="t")
    broker.clock.jump_wall(10 * 365 * 86_400)
    broker.advance(ROUND_SECONDS + 0.1)
    assert len(broker.times()) == 1
    broker.clock.jump_wall(-10 * 365 * 86_400)
    broker.until("2026-11-23T12:30")
    assert len(broker.times()) == 1
    before = broker.schedule()
    found = broker.resume().fields.schedule
    assert found["id"] > before["id"] and found["next_ms"] == ms("2026-11-23T13:00") and found["state"] == "active"
    broker = broker.restart()
    broker.until("2026-11-23T14:00:01")
    assert hours(broker.times())[1:] == ["13:00", "14:00"] and broker.names() == ["daily"]
    assert {each.key for each in broker.sent()} == {"k"}


def test_what_skip_left_out_while_the_clock_was_wrong_comes_when_it_is_right() -> None:
    broker = Scheduling.with_topic()
    broker.add("0 9 * * *", misfire="skip")
    broker.clock.jump_wall(30 * 86_400)
    broker.advance(ROUND_SECONDS + 0.1)
    broker.clock.jump_wall(-30 * 86_400)
    broker.advance(ROUND_SECONDS)
    broker.until("2026-11-23T09:00:01")
    assert hours(broker.times()) == ["09:00"]


def test_a_wrong_clock_at_the_start_sends_nothing_early() -> None:
    broker = Scheduling.with_topic()
    broker.add("0 9 * * *")
    broker.until("2026-11-23T09:30")
    broker.stop()
    broker.clock.jump_wall(-20 * 365 * 86_400)
    again = Scheduling(broker.disk, broker.clock)
    again.advance(3 * 86_400)
    assert len(again.times()) == 1
    again.clock.jump_wall(20 * 365 * 86_400 - 3 * 86_400)
    again.until("2026-11-24T09:00:01")
    assert hours(again.times()) == ["09:00", "09:00"]


def test_a_machine_that_slept_looks_at_the_clock_soon() -> None:
    """While it sleeps only the wall clock goes on."""
    broker = Scheduling.with_topic()
    broker.add("0 9 * * *")
    broker.clock.jump_wall(2 * 3600)
    broker.advance(ROUND_SECONDS)
    assert hours(broker.times()) == ["09:00"]


# Partitions that do not take it


def test_a_stopped_partition_holds_only_its_own_and_gets_its_own_when_it_is_resumed() -> None:
    broker = Scheduling.with_topic(2)
    broker.add("0 * * * *", "stopped", partition=0, misfire="all")
    broker.add("0 * * * *", "well", partition=1)
    broker.log(partition=0).stop("a test stops it")
    broker.until("2026-11-23T10:30")
    assert hours(broker.times(partition=1)) == ["09:00", "10:00"] and broker.times() == []
    found = broker.schedule("stopped")
    assert found["state"] == "waiting" and "topic resume" in found["trouble"]
    broker.ask(commands.ResumePartition("orders", 0))
    broker.look()
    assert hours(broker.times()) == ["09:00", "10:00"] and broker.schedule("stopped")["state"] == "active"


@pytest.mark.parametrize(("rule", "expected"), [("one", ["10:00"]), ("all", ["09:00", "10:00"]), ("skip", [])])
def test_what_a_stopped_partition_missed_is_a_matter_of_the_rule(rule: str, expected: list[str]) -> None:
    broker = Scheduling.with_topic()
    broker.add("0 * * * *", misfire=rule)
    broker.log().stop("a test stops it")
    broker.until("2026-11-23T10:30")
    broker.ask(commands.ResumePartition("orders", 0))
    broker.look()
    assert hours(broker.times()) == expected


def test_a_time_whose_fsync_failed_is_sent_again_if_the_resumption_lost_it_and_not_if_it_did_not() -> None:
    broker = Scheduling.with_topic()
    broker.add("0 9 * * *")
    broker.disk.faults.fail("force", path="orders-0")
    broker.until("2026-11-23T09:00:01")
    assert broker.log().stopped is not None and broker.schedule()["state"] == "waiting"
    broker.disk.faults.clear()
    broker.ask(commands.ResumePartition("orders", 0))
    broker.look()
    assert hours(broker.times()) == ["09:00"] and broker.schedule()["state"] == "active"
    again = broker.crashed(broker.disk.crash(keep="nothing"))
    again.look()
    assert hours(again.times()) == ["09:00"]


def stopped_with_an_unsure_end(rule: str) -> Scheduling:
    """The force of nine o'clock failed, and the broker was started again: what the partition has is on no disk."""
    broker = Scheduling.with_topic()
    broker.add("0 * * * *", misfire=rule)
    broker.until("2026-11-23T08:59:59")
    broker.disk.faults.fail("force", path="orders-0")
    broker.until("2026-11-23T09:00:01")
    broker.disk.faults.clear()
    broker = broker.restart()
    broker.look()
    assert broker.log().stopped is not None and broker.log().end_offset > broker.log().forced_offset == 0
    return broker


@pytest.mark.parametrize("rule", ["one", "all"])
def test_what_a_stopped_partition_has_after_a_restart_does_not_count_as_sent(rule: str) -> None:
    """The system dropped the pages whose force failed: the resumption finds nothing there."""
    broker = stopped_with_an_unsure_end(rule)
    found = broker.schedule()
    assert found["state"] == "waiting" and "topic resume" in found["trouble"]
    assert found["next_ms"] == ms("2026-11-23T10:00")
    path = f"{broker.log().folder}/{0:032}.zxQueue"
    broker.disk.damage(path, 0, bytes(broker.disk.size(path)))
    broker.until("2026-11-23T09:30")
    broker.ask(commands.ResumePartition("orders", 0))
    broker.look()
    assert hours(broker.times()) == ["09:00"] and broker.schedule()["state"] == "active"
    broker.until("2026-11-23T10:00:01")
    assert hours(broker.times()) == ["09:00", "10:00"]


@pytest.mark.parametrize("rule", RULES)
def test_what_the_resumption_found_there_is_not_sent_again(rule: str) -> None:
    broker = stopped_with_an_unsure_end(rule)
    broker.until("2026-11-23T09:30")
    broker.ask(commands.ResumePartition("orders", 0))
    broker.look()
    broker.until("2026-11-23T10:00:01")
    assert hours(broker.times()) == ["09:00", "10:00"]


def test_a_partition_that_stops_later_changes_nothing_about_what_was_fsynced() -> None:
    broker = Scheduling.with_topic()
    broker.add("0 * * * *")
    broker.until("2026-11-23T09:00:01")
    broker.log().stop("a test stops it")
    broker.pause()
    broker.until("2026-11-23T09:10")
    broker.resume()
    assert broker.schedule()["state"] == "active" and broker.schedule()["next_ms"] == ms("2026-11-23T10:00")
    broker.ask(commands.ResumePartition("orders", 0))
    broker.until("2026-11-23T09:59")
    assert hours(broker.times()) == ["09:00"]


def test_on_a_full_disk_it_waits_and_goes_on_by_itself() -> None:
    broker = Scheduling.with_topic()
    broker.add("0 9 * * *")
    broker.disk.space_bytes = broker.disk.used_bytes()
    broker.until("2026-11-23T09:00:30")
    assert broker.times() == [] and "space" in broker.schedule()["trouble"]
    broker.disk.space_bytes = None
    broker.advance(ROUND_SECONDS + 0.1)
    assert hours(broker.times()) == ["09:00"] and broker.schedule()["trouble"] == ""


def test_a_partition_that_could_not_be_opened_is_waited_for_and_gets_nothing_twice() -> None:
    broker = Scheduling.with_topic()
    broker.add("0 * * * *")
    broker.until("2026-11-23T09:00:01")
    broker.stop()
    broker.disk.faults.fail("open", path="orders-0", times=None)
    again = Scheduling(broker.disk, broker.clock)
    again.look()
    assert again.schedule()["state"] == "waiting"
    broker.disk.faults.clear()
    again.ask(commands.ResumePartition("orders", 0))
    again.look()
    assert hours(again.times()) == ["09:00"]
    again.until("2026-11-23T10:00:01")
    assert hours(again.times()) == ["09:00", "10:00"]


def test_a_partition_that_a_large_transaction_holds_gets_it_after_that() -> None:
    broker = Scheduling.with_topic()
    broker.add("* * * * *")
    partition = broker.engine.broker.topics.partition("orders", broker.incarnation(), 0)
    partition.begin_exclusive((SOURCE_TRANSACTION, 5))
    broker.until("2026-11-23T08:03:01")
    assert broker.times() == []
    broker.engine.broker.produce_handler.end_exclusive(partition)
    broker.advance(1)
    broker.advance(1)
    assert hours(broker.times()) == ["08:01", "08:03"]
    broker.until("2026-11-23T08:04:01")
    assert hours(broker.times()) == ["08:01", "08:03", "08:04"]


# Housekeeping


def test_a_stop_sends_nothing_more() -> None:
    broker = Scheduling.with_topic()
    broker.add("* * * * *")
    broker.engine.broker.stop(lambda: None)
    broker.clock.advance(300)
    broker.engine.broker.timers.tick(broker.clock.monotonic())
    broker.engine.broker.end_turn()
    again = Scheduling(broker.disk, broker.clock)
    assert again.times() == []


def test_changes_leave_no_rest_in_memory() -> None:
    broker = Scheduling.with_topic()
    broker.add("0 0 1 1 *")
    for _ in range(3 * OBSOLETE_ENTRIES_MAX):
        broker.pause()
        broker.resume()
    watch = broker.engine.broker.schedule_commands.scheduler.timer
    assert len(watch._heap) <= OBSOLETE_ENTRIES_MAX + 3
    broker.remove()
    assert not watch.schedules and not watch._blocked


def test_a_broker_without_schedules_sets_no_alarm_for_them() -> None:
    broker = Scheduling.with_topic()
    watch = broker.engine.broker.schedule_commands.scheduler.timer
    broker.advance(60)
    assert watch._alarm is None and watch._round is None
    broker.add()
    assert watch._alarm is not None and watch._round is not None
    broker.remove()
    broker.advance(ROUND_SECONDS)
    assert watch._round.call is None
    broker.advance(86_400)
    assert watch._alarm.call is None


def test_a_simulation_need_not_stop_at_each_look_at_the_clock() -> None:
    broker = Scheduling.with_topic()
    broker.add("0 9 * * *")
    broker.advance(ROUND_SECONDS * 3)
    timers = broker.engine.broker.timers
    assert timers.next_not_deferrable() == pytest.approx(broker.clock.monotonic() + 3540, abs=1)


# A schedule's messages: whose they are, for which time, under which id; the same bytes whenever they are made.

NINE = ms("2026-11-23T09:00+01:00")


def row(**changed: Any) -> ScheduleRow:
    made = ScheduleRow(20, "daily", "0 9 * * *", "Europe/Berlin", "orders", None, b"", b"go", "one", 5, 17, 2, 5)
    return made._replace(**changed)


def test_a_message_reports_its_schedule_and_its_time_beside_what_was_given() -> None:
    attribute = encode_attribute(None, "k", "new", {"n": "1"})
    batch = RunningSchedule(row(attribute=attribute)).batch(NINE)
    (record,) = records_of(bytes(batch.data))
    found, payload = split_body(memoryview(bytes(batch.data))[20:], record.flag)
    known = decode_attribute(bytes(found or b""))
    assert bytes(payload) == b"go" and (known.key, known.tag, known.born_ms) == ("k", "new", NINE)
    assert known.properties == {"n": "1", "schedule": "daily", "scheduled_for": "2026-11-23T09:00:00+01:00"}
    assert record.flag >> 16 == tag_hash("new") and not record.flag & FLAG_TOMBSTONE


def test_without_payload_it_is_a_tombstone() -> None:
    (record,) = records_of(bytes(RunningSchedule(row(payload=None)).batch(NINE).data))
    assert record.flag & FLAG_TOMBSTONE


def test_the_id_is_the_schedules_own_and_counts_minutes() -> None:
    run = RunningSchedule(row())
    for moment in (NINE, NINE + 60_000):
        batch = run.batch(moment)
        (record,) = records_of(bytes(batch.data))
        assert split_id(record.id) == (20, moment // 60_000 % SEQUENCE_COUNT) == (batch.producer_id, batch.sequence)
    assert bytes(run.batch(NINE).data) == bytes(RunningSchedule(row()).batch(NINE).data)


def test_several_times_are_one_append_under_the_place_of_the_last() -> None:
    effect = RunningSchedule(row()).append([NINE, NINE + 60_000])
    assert effect.key == make_log_id(17, 2) and len(effect.batches) == 2
    assert effect.source == (SOURCE_SCHEDULE, 20, NINE + 60_000, 0)


def test_its_entries_are_what_the_catalog_reads() -> None:
    run = RunningSchedule(row())
    assert run.add_entry() == (SCHEDULE, *row()[:-1])
    assert run.state_entry(paused=True, through_ms=9) == (SCHEDULE_STATE, 20, 17, 2, 9, True)


def test_what_makes_no_sense_is_refused_and_if_it_is_kept_already_said() -> None:
    own = encode_attribute(None, None, None, {"schedule": "x"})
    many = encode_attribute(None, None, None, {f"p{n}": "" for n in range(limits.PROPERTIES - 1)})
    for bad, error in (
        (row(cron="nonsense"), BadRequest),
        (row(timezone="Europe/Atlantis"), BadRequest),
        (row(attribute=b"\xc1"), DecodeFailed),
        (row(attribute=own), BadRequest),
        (row(attribute=many), BadRequest),
    ):
        with pytest.raises(error) as caught:
            RunningSchedule(bad)
        kept = RunningSchedule(bad, kept=True)
        assert kept.cron is None and kept.trouble == str(caught.value)
        assert kept.description(0, None, kept.trouble)["state"] == "waiting"


# When schedules are looked at: at their time, every few seconds where something is in the way, in portions.


class Rig:
    """A watch whose looks are written down; `costs` is how long one takes."""

    def __init__(self, runs: int = 1, costs: float = 0.0) -> None:
        self.clock = SimulatedClock()
        self.timers = Timers(self.clock)
        self.met: list[tuple[int, int]] = []
        self.set_back: list[int] = []
        self.costs = costs
        self.watch = ScheduleTimer(timers=self.timers, clock=self.clock, meet=self.meet, set_back=self.set_back.append)
        self.runs = [self.run(number) for number in range(1, runs + 1)]
        self.watch.start()

    def run(self, id: int) -> RunningSchedule:
        row = ScheduleRow(id, f"s{id}", "@daily", "UTC", "orders", None, b"", b"", "one", 0, 16 + id, 0, 0)
        made = self.watch.schedules[id] = RunningSchedule(row)
        return made

    def meet(self, run: RunningSchedule) -> None:
        self.met.append((run.row.id, self.clock.wall_ms()))
        self.clock.advance(self.costs)

    def advance(self, seconds: float) -> None:
        """In steps to whatever is due."""
        end = self.clock.monotonic() + seconds
        while (due := self.timers.next_due()) is not None and due <= end:
            self.clock.advance(max(0.0, due - self.clock.monotonic()))
            self.timers.tick(self.clock.monotonic())
        self.clock.advance(max(0.0, end - self.clock.monotonic()))

    def in_ms(self, milliseconds: int) -> int:
        return self.clock.wall_ms() + milliseconds


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_a_run_is_met_at_its_time_once(rig: Rig) -> None:
    moment = rig.in_ms(1_500)
    rig.watch.process_at(rig.runs[0], moment)
    rig.advance(1.499)
    assert rig.met == []
    rig.advance(60)
    assert rig.met == [(1, moment)]


def test_the_last_word_on_its_time_counts(rig: Rig) -> None:
    rig.watch.process_at(rig.runs[0], rig.in_ms(1_000))
    rig.watch.process_at(rig.runs[0], later := rig.in_ms(3_000))
    rig.advance(2)
    assert rig.met == []
    rig.advance(2)
    assert rig.met == [(1, later)]
    rig.watch.process_at(rig.runs[0], rig.in_ms(1_000))
    rig.watch.process_at(rig.runs[0], None)
    rig.advance(60)
    assert len(rig.met) == 1


def test_what_is_dropped_is_not_met(rig: Rig) -> None:
    rig.watch.process_at(rig.runs[0], rig.in_ms(1_000))
    rig.watch.remove(rig.runs[0])
    rig.advance(60)
    assert rig.met == []


def test_a_wall_clock_that_jumps_forth_is_seen_within_a_round(rig: Rig) -> None:
    rig.watch.process_at(rig.runs[0], rig.in_ms(3_600_000))
    rig.clock.jump_wall(7200)
    rig.advance(ROUND_SECONDS)
    assert len(rig.met) == 1 and rig.set_back == []


def test_a_wall_clock_that_jumps_back_is_reported_once_and_nothing_is_early(rig: Rig) -> None:
    moment = rig.in_ms(60_000)
    rig.watch.process_at(rig.runs[0], moment)
    rig.clock.jump_wall(-30)
    rig.advance(89.9)
    assert rig.met == [] and len(rig.set_back) == 1
    rig.advance(0.2)
    assert rig.met == [(1, moment)]


def test_a_blocked_schedule_is_tried_again_every_few_seconds_until_it_has_a_time(rig: Rig) -> None:
    (run,) = rig.runs
    rig.watch.retry_later(run)
    assert rig.watch.is_blocked(run)
    start = rig.clock.monotonic()
    for number in range(1, 4):
        rig.advance(ROUND_SECONDS - (rig.clock.monotonic() - start) % ROUND_SECONDS)
        assert len(rig.met) == number
        rig.watch.retry_later(run)
    rig.watch.process_at(run, None)
    rig.advance(60)
    assert len(rig.met) == 3 and not rig.watch.is_blocked(run)


def test_a_resumed_log_is_retried_at_once_and_others_are_not(rig: Rig) -> None:
    (run,) = rig.runs
    rig.watch.retry_later(run)
    rig.watch.retry_now(run.key + 1)
    rig.advance(0.1)
    assert rig.met == []
    rig.watch.retry_now(run.key)
    rig.advance(0.1)
    assert len(rig.met) == 1


def test_many_are_met_in_portions_with_a_pause_between() -> None:
    rig = Rig(runs=2 * PORTION_STEPS + 1)
    for run in rig.runs:
        rig.watch.process_at(run, rig.clock.wall_ms())
    times = []
    for _ in range(3):
        rig.timers.tick(rig.clock.monotonic())
        times.append(len(rig.met))
        rig.clock.advance(PAUSE_SECONDS)
    assert times == [PORTION_STEPS, 2 * PORTION_STEPS, 2 * PORTION_STEPS + 1]


def test_a_portion_ends_when_its_time_is_over() -> None:
    rig = Rig(runs=10, costs=PORTION_SECONDS)
    for run in rig.runs:
        rig.watch.process_at(run, rig.clock.wall_ms())
    rig.timers.tick(rig.clock.monotonic())
    assert 1 <= len(rig.met) <= 2
    rig.advance(1)
    assert sorted(id for id, _ in rig.met) == list(range(1, 11))


def test_steps_are_done_soon_and_in_their_order(rig: Rig) -> None:
    done: list[Any] = []
    for number in range(3):
        rig.watch.run_soon(lambda number=number: done.append(number))  # type: ignore[misc]
    assert done == []
    rig.advance(0.001)
    assert done == [0, 1, 2]


def test_a_watch_that_stopped_calls_no_callback(rig: Rig) -> None:
    rig.watch.process_at(rig.runs[0], rig.in_ms(1_000))
    rig.watch.stop()
    rig.watch.retry_later(rig.runs[0])
    rig.watch.run_soon(lambda: rig.met.append((0, 0)))
    rig.advance(60)
    assert rig.met == [] and rig.timers.next_due() is None


def test_a_simulation_stops_only_for_what_is_due(rig: Rig) -> None:
    rig.watch.process_at(rig.runs[0], rig.in_ms(3_600_000))
    assert rig.timers.next_not_deferrable() == pytest.approx(rig.clock.monotonic() + 3600)


def test_words_that_were_taken_back_leave_no_rest(rig: Rig) -> None:
    for number in range(5 * OBSOLETE_ENTRIES_MAX):
        rig.watch.process_at(rig.runs[0], rig.in_ms(10**9 + number))
    assert len(rig.watch._heap) <= OBSOLETE_ENTRIES_MAX + 3


# Misfire rules: what is sent of the times that were missed.

DAILY = CronSchedule("0 9 * * *")
LAST_SENT = ms("2026-11-20T09:00")
NINE_O_CLOCK = [ms(f"2026-11-{day}T09:00") for day in (21, 22, 23)]


@pytest.mark.parametrize("rule", MISFIRE_RULES)
def test_what_is_met_in_time_is_sent_by_every_rule(rule: str) -> None:
    for late in (0, 1, GRACE_MS - 1):
        assert moments_to_send(DAILY, rule, LAST_SENT, NINE_O_CLOCK[0] + late) == NINE_O_CLOCK[:1]


@pytest.mark.parametrize("rule", MISFIRE_RULES)
def test_nothing_is_sent_before_its_time_or_twice(rule: str) -> None:
    assert moments_to_send(DAILY, rule, LAST_SENT, NINE_O_CLOCK[0] - 1) == []
    assert moments_to_send(DAILY, rule, NINE_O_CLOCK[0], NINE_O_CLOCK[0] + 5000) == []


@pytest.mark.parametrize(("rule", "sent"), [(SEND_LATEST, NINE_O_CLOCK[2:]), (SEND_ALL, NINE_O_CLOCK), (SEND_NONE, [])])
def test_after_three_missed_days_the_rule_decides(rule: str, sent: list[int]) -> None:
    assert moments_to_send(DAILY, rule, LAST_SENT, NINE_O_CLOCK[2] + GRACE_MS) == sent


def test_skip_leaves_out_what_was_missed_and_sends_what_is_in_time() -> None:
    assert moments_to_send(DAILY, SEND_NONE, LAST_SENT, NINE_O_CLOCK[2] + GRACE_MS - 1) == NINE_O_CLOCK[2:]


def test_all_sends_the_newest_thousand_at_most_the_oldest_of_them_first() -> None:
    now = NINE_O_CLOCK[2]
    found = moments_to_send(CronSchedule("* * * * *"), SEND_ALL, ms("2020-01-01"), now)
    assert found == [now - MINUTE_MS * back for back in range(SEND_ALL_MAX - 1, -1, -1)]
