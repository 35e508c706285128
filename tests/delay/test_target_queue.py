"""Lateness in buckets that double."""

from __future__ import annotations

import logging
import random

import pytest

from journal.record.block_trailer import BlockTrailer, encode_trailer
from journal.record.format import make_log_id
from tests.delay.desk import BILLS, ORDERS, Desk
from tfmq import apply_queue
from tfmq.apply_queue import RETRY_SECONDS, RETRY_SECONDS_MAX
from tfmq.apply_target import AppliedCallback, Effect
from tfmq.delay import flow_control, target_queue
from tfmq.delay import target_queue as lines
from tfmq.delay.rows import RowQueue
from tfmq.delay.target_queue import LATENESS_BUCKETS, LatenessHistogram
from tfmq.errors import UNKNOWN, StorageStopped


def test_a_bucket_counts_from_half_of_its_end() -> None:
    lateness = LatenessHistogram()
    for late in (0, 1, 2, 3, 4, 7, 8, 1 << 60):
        lateness.record(late)
    assert lateness.counts[:5] == [1, 1, 2, 2, 1]
    assert lateness.counts[LATENESS_BUCKETS - 1] == 1
    assert (lateness.total, lateness.max_ms) == (8, 1 << 60)


def test_parts_are_reported_as_the_upper_end_of_their_bucket() -> None:
    lateness = LatenessHistogram()
    assert lateness.percentile_ms(0.5) == 0
    lateness.record(3, 990)
    lateness.record(100, 10)
    assert (lateness.percentile_ms(0.5), lateness.percentile_ms(0.99), lateness.percentile_ms(0.999)) == (
        3,
        3,
        100,
    )
    status = lateness.status()
    assert (status["p50_ms"], status["p999_ms"], status["max_ms"], status["count"]) == (3, 100, 100, 1000)


def test_many_at_once_count_as_each_of_them() -> None:
    dice = random.Random(3)
    for _ in range(50):
        now = 1_000_000
        dues = sorted(now - dice.choice([0, 1, 2, 3, 5, 900, 70_000]) for _ in range(dice.randrange(40)))
        one, other = LatenessHistogram(), LatenessHistogram()
        one.record_sorted(now, dues)
        for due in dues:
            other.record(now - due)
        assert one.status() == other.status()


# One target: everything in the order of the turns, one effect at a time, once, whatever its disk does.


def applies(desk: Desk, key: int = ORDERS) -> int:
    return len([asked for asked in desk.targets.asked if asked[:2] == ("apply", key)])


def test_an_effect_names_the_last_turn_that_it_brings() -> None:
    desk = Desk()
    sent = desk.send([b"a", b"b", b"c"], [5, 5, 5])
    desk.advance(0.02)
    assert desk.applied() == [sent[-1].turn]


def test_a_stopped_partition_holds_only_its_own_timers() -> None:
    desk = Desk()
    desk.send([b"a"], 10)
    desk.send([b"b"], 10, key=BILLS)
    desk.targets.stop(ORDERS)
    desk.advance(1)
    assert (desk.visible(ORDERS), desk.visible(BILLS)) == ([], [b"b"])
    desk.targets.resume(ORDERS)
    desk.queue.target_resumed(ORDERS)
    desk.turn()
    assert desk.visible(ORDERS) == [b"a"]


def test_what_a_stopped_partition_has_not_forced_leaves_room_for_the_others() -> None:
    desk = Desk()
    desk.targets.automatic = False
    for _ in range(8):
        desk.send([bytes(100_000)], 10)
    desk.send([bytes(200_000)], 400, key=BILLS)
    desk.advance(0.1)
    desk.targets.fail_force(ORDERS)
    desk.targets.automatic = True
    desk.advance(100)
    assert len(desk.visible(BILLS)) == 1
    desk.targets.resume(ORDERS, keep=1)
    desk.queue.target_resumed(ORDERS)
    desk.advance(100)
    assert len(desk.visible(ORDERS)) == 8
    assert desk.queue._target_queues.flow_control.in_flight_bytes == 0


def test_a_stop_does_not_wait_for_room_that_a_stopped_partition_has() -> None:
    desk = Desk()
    desk.targets.automatic = False
    for _ in range(8):
        desk.send([bytes(100_000)], 10)
    desk.send([bytes(200_000)], 400, key=BILLS)
    desk.advance(1)
    desk.targets.fail_force(ORDERS)
    desk.stop()


def test_a_full_disk_is_tried_again_after_growing_pauses() -> None:
    desk = Desk()
    desk.send([b"a", b"b"], [10, 20])
    desk.targets.target(ORDERS).full = True
    desk.advance(300)
    assert 10 <= applies(desk) <= 20
    desk.targets.target(ORDERS).full = False
    desk.advance(RETRY_SECONDS_MAX)
    assert desk.visible() == [b"a", b"b"]
    assert desk.queue.status()["waits_for"] == []


def test_the_first_pause_is_short() -> None:
    desk = Desk()
    desk.send([b"a"], 10)
    desk.targets.target(ORDERS).full = True
    desk.advance(0.02)
    desk.targets.target(ORDERS).full = False
    desk.advance(RETRY_SECONDS)
    assert desk.visible() == [b"a"]


def test_a_stop_is_reported_once_and_its_end_too(caplog: pytest.LogCaptureFixture) -> None:
    desk = Desk()
    desk.send([b"a"], 10)
    desk.targets.stop(ORDERS, "its disk failed")
    with caplog.at_level(logging.INFO, "tfmq.delay"):
        desk.advance(100)
        desk.targets.resume(ORDERS)
        desk.queue.target_resumed(ORDERS)
        desk.turn()
    told = [each.getMessage() for each in caplog.records if "topic16-0" in each.getMessage()]
    assert len(told) == 2
    assert "its disk failed" in told[0] or "accepts no writes" in told[0]
    assert told[1] == "topic16-0 accepts delayed messages again"


def test_what_a_resumed_target_lost_comes_again_before_what_is_later() -> None:
    desk = Desk()
    desk.targets.automatic = False
    for number in range(6):
        desk.send([b"%d" % number], 10 + 20 * number)
    desk.advance(0.06)
    assert desk.visible() == [b"0", b"1", b"2"]
    desk.targets.target(ORDERS).forced = 1
    desk.targets.fail_force(ORDERS)
    desk.advance(0.1)
    desk.targets.automatic = True
    desk.targets.resume(ORDERS, keep=1)
    desk.queue.target_resumed(ORDERS)
    desk.advance(3)
    assert desk.visible() == [b"%d" % number for number in range(6)]


def test_what_is_lost_is_found_in_buckets_as_in_arrivals() -> None:
    desk = Desk()
    sent = [desk.send([b"%d" % number], 100_000 + number * 20)[0] for number in range(6)]
    desk.targets.automatic = False
    desk.until(sent[3].due + 5)
    assert len(desk.visible()) == 4
    desk.targets.stop(ORDERS)
    desk.targets.resume(ORDERS, keep=0)
    desk.targets.automatic = True
    desk.queue.target_resumed(ORDERS)
    desk.advance(5)
    assert desk.visible() == [b"%d" % number for number in range(6)]
    assert sum(each.count for each in desk.buckets.live_buckets) == 6 or not desk.buckets.live_buckets


def test_a_line_that_waits_keeps_a_bounded_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "QUEUE_ROWS_MAX", 50)
    desk = Desk()
    desk.send([b"first"], 5)
    desk.targets.stop(ORDERS)
    desk.advance(0.1)
    for burst in range(10):
        desk.send([b"%d-%d" % (burst, number) for number in range(20)], 50)
        desk.advance(0.1)
    status = desk.queue.status()
    assert (status["behind"], status["held"]) == (1, 201)
    assert desk.queue._target_queues.row_count <= 50
    desk.targets.resume(ORDERS)
    desk.queue.target_resumed(ORDERS)
    desk.advance(5)
    assert desk.visible() == [
        b"first",
        *(b"%d-%d" % (burst, number) for burst in range(10) for number in range(20)),
    ]
    assert desk.queue.status()["behind"] == 0


def test_a_target_that_lags_continues_from_the_disk_after_days(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "QUEUE_ROWS_MAX", 50)
    desk = Desk()
    desk.targets.stop(ORDERS)
    expected = []
    for hour in range(50):
        payloads = [b"%d-%d" % (hour, number) for number in range(7)]
        desk.send(payloads, 3_600_000)
        desk.send([b"other"], 10, key=BILLS)
        expected += payloads
        desk.advance(1800)
    desk.advance(3600)
    assert desk.queue.status()["held"] == 350
    assert desk.queue._target_queues.row_count <= 50
    desk.targets.resume(ORDERS)
    desk.queue.target_resumed(ORDERS)
    desk.advance(10)
    assert desk.visible() == expected
    assert len(desk.visible(BILLS)) == 50
    desk.advance(60)
    assert not desk.buckets.live_buckets


def test_a_topic_that_is_gone_drops_what_was_for_it_and_counts() -> None:
    desk = Desk()
    desk.send([b"a", b"b"], 10)
    desk.send([b"far"], 100_000)
    desk.targets.delete(16)
    desk.queue.topic_deleted(16)
    desk.advance(200)
    assert desk.queue.status()["dropped"] == 3
    assert desk.queue.pending == 0


def test_a_topic_that_goes_while_its_line_waits_lets_go() -> None:
    desk = Desk()
    desk.send([b"a", b"b"], 10)
    desk.targets.stop(ORDERS)
    desk.advance(1)
    desk.targets.delete(16)
    desk.queue.topic_deleted(16)
    desk.advance(1)
    assert desk.queue.status()["waits_for"] == []
    assert desk.queue.status()["dropped"] == 2


def test_large_messages_go_one_at_a_time_and_a_maximum_size_one_too() -> None:
    desk = Desk(segment_bytes=64 << 20)
    payloads = [b"%d" % number + b"x" * 300_000 for number in range(5)] + [b"y" * (16 << 20)]
    desk.send(payloads, 50)
    desk.advance(1)
    assert desk.visible() == payloads
    assert max(each.size_bytes for each in desk.targets.target(ORDERS).appends[:5]) < 400_000


def test_records_that_would_make_a_control_record_where_they_meet_go_apart() -> None:
    """Nobody could tell that from a true one behind a torn end."""
    header = encode_trailer(ORDERS, BlockTrailer(1, 100, 0, 0, 0, 0, 0, 0))[:20]
    desk = Desk()
    desk.send([b"payload" + header[:16]], 10, turn=False)
    desk.send([b"x" * 0x40, b"last"], 10)
    desk.advance(1)
    assert desk.visible() == [b"payload" + header[:16], b"x" * 0x40, b"last"]
    assert [len(append.records) for append in desk.targets.target(ORDERS).appends] == [1, 2]


def test_damage_is_reported_and_left_out(caplog: pytest.LogCaptureFixture) -> None:
    desk = Desk()
    desk.send([b"a" * 50], 200_000)
    desk.send([b"b" * 50], 200_001)
    desk.advance(70)
    (bucket,) = desk.buckets.live_buckets
    data = desk.disk.read_file(bucket.path)
    desk.disk.damage(bucket.path, data.index(b"a" * 50), b"X")
    with caplog.at_level(logging.ERROR, "tfmq.delay"):
        desk.advance(150)
    assert desk.visible() == [b"b" * 50]
    assert desk.queue.status()["damaged"] == 1
    assert "cannot be read" in caplog.text


def test_what_is_loaded_again_and_what_is_still_in_the_wheel_come_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A line that is behind is loaded while the rest of the same millisecond has not left the wheel."""
    monkeypatch.setattr(lines, "QUEUE_ROWS_MAX", 20)
    monkeypatch.setattr("tfmq.delay.storage_scheduler.QUEUE_ROWS_MAX", 20)
    monkeypatch.setattr("tfmq.delay.dispatcher.POP_ROWS_MAX", 7)
    desk = Desk()
    desk.targets.stop(ORDERS)
    desk.send([b"first"], 5)
    desk.advance(0.1)
    payloads = [b"%03d" % number for number in range(200)]
    desk.send(payloads, 100)
    desk.clock.advance(0.12)
    for _ in range(12):
        desk.timers.tick(desk.clock.monotonic())
        desk.queue.write()
    desk.targets.resume(ORDERS)
    desk.queue.target_resumed(ORDERS)
    desk.advance(30)
    assert desk.visible() == [b"first", *payloads]


def test_sends_that_a_stopped_log_refuses_hold_nothing_back() -> None:
    desk = Desk()
    desk.send([b"a"], 1000)
    desk.landing.log.stop("its disk failed")
    assert desk.send([b"refused"], 10) == []
    desk.advance(2)
    assert desk.visible() == [b"a"]


@pytest.mark.parametrize("keep", [0, 1])
def test_what_a_stopped_target_has_is_not_sure_after_a_restart_either(keep: int) -> None:
    """Its tail was never forced: a power cut may take it yet."""
    desk = Desk()
    (a,) = desk.send([b"a"], 100)
    desk.targets.automatic = False
    desk.advance(0.2)
    assert desk.visible() == [b"a"]
    desk.targets.fail_force(ORDERS)
    left = desk.targets
    desk.stop()
    again = desk.again(desk.disk, left)
    again.targets.automatic = True
    again.advance(200)
    assert again.visible() == [b"a"]
    with pytest.raises(StorageStopped):
        again.cancel(a).known  # noqa: B018
    again.targets.resume(ORDERS, keep=keep)
    again.queue.target_resumed(ORDERS)
    again.advance(5)
    assert again.visible() == [b"a"]
    assert again.cancel(a).known == "delivered"


def test_what_a_failed_write_left_is_not_cancelled_before_its_partition_reports_it() -> None:
    """Nobody knows of a write that failed whether it is there: of a cancel and a delivery exactly one happens."""
    desk = Desk()
    (sent,) = desk.send([b"a"], 10)

    def fail() -> None:
        desk.targets.before_append = lambda: None
        desk.targets.target(ORDERS).stopped = "a write failed"

    def write(effect: Effect, done: AppliedCallback) -> None:
        desk.targets.before_append = fail
        plain(effect, lambda mark, error: done(None, StorageStopped(outcome=UNKNOWN)))

    plain, desk.targets._write = desk.targets._write, write
    desk.advance(1)
    assert desk.visible() == [b"a"] and desk.queue._metrics.count_now() == 1
    with pytest.raises(StorageStopped):
        _ = desk.cancel(sent).known
    desk.targets._write = plain
    desk.targets.resume(ORDERS)
    desk.queue.target_resumed(ORDERS)
    desk.advance(10)
    assert desk.cancel(sent).known == "delivered"
    assert desk.visible() == [b"a"] and desk.queue._metrics.count_now() == 0


# All lines together: their turns, their memory.


def test_all_lines_that_wait_keep_a_bounded_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_queue, "BLOCKED_ROWS_MAX", 100)
    desk = Desk()
    keys = [ORDERS + n for n in range(5)]
    for key in keys:
        desk.targets.stop(key)
        desk.send([b"first"], 5, key=key)
    desk.advance(0.1)
    for _ in range(3):
        for key in keys:
            desk.send([b"%d" % n for n in range(20)], 10, key=key)
        desk.advance(0.1)
    assert desk.queue._target_queues.row_count <= 100 and desk.queue.status()["held"] == 305
    for key in keys:
        desk.targets.resume(key)
        desk.queue.target_resumed(key)
    desk.advance(60)
    assert [len(desk.visible(key)) for key in keys] == [61] * 5


def test_no_more_than_the_window_is_written_and_not_forced() -> None:
    desk = Desk(segment_bytes=64 << 20)
    desk.targets.automatic = False
    desk.send([b"%03d" % n + b"x" * 10_000 for n in range(200)], 10)
    desk.send([b"%03d" % n + b"x" * 10_000 for n in range(200)], 10, key=BILLS)
    desk.advance(0.5)
    most = 0
    while len(desk.visible()) + len(desk.visible(BILLS)) < 400:
        unforced = 0
        for key in (ORDERS, BILLS):
            target = desk.targets.target(key)
            unforced += sum(each.size_bytes for each in target.appends[target.forced :])
        most = max(most, unforced)
        desk.targets.force()
        desk.advance(0.02)
    assert flow_control.SLICE_BYTES_MAX < most <= apply_queue.IN_FLIGHT_BYTES_MAX


def test_a_line_without_anything_is_forgotten() -> None:
    desk = Desk()
    desk.send([b"a"], 10)
    desk.advance(1)
    assert desk.queue._target_queues.all() == []
    assert desk.queue._target_queues.flow_control.in_flight_bytes == 0


def test_targets_that_take_nothing_are_looked_at_together_once_a_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a full disk all are stuck: each beside all others would be work by the square of them."""
    looks: list[int] = []
    look = RowQueue.__len__
    monkeypatch.setattr(RowQueue, "__len__", lambda self: looks.append(1) or look(self))
    counts = []
    for count in (50, 400):
        desk = Desk()
        for key in [make_log_id(100 + n, 0) for n in range(count)]:
            desk.targets.stop(key)
            desk.send([b"x"], 1000, key=key, turn=False)
        desk.turn()
        looks.clear()
        desk.advance(1.5)
        counts.append(len(looks) / count)
        assert desk.queue.status()["held"] == count
    assert counts[1] < 2 * counts[0]
