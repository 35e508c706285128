"""Lateness in buckets that double."""

from __future__ import annotations

import logging
import random

import pytest

from journal.record.block_trailer import BlockTrailer, encode_trailer
from journal.record.format import make_log_id
from tests.delay.rig import BILLS, ORDERS, Rig
from tfmq import apply_queue
from tfmq.apply_queue import RETRY_SECONDS, RETRY_SECONDS_MAX
from tfmq.apply_target import AppliedCallback, Effect
from tfmq.delay import append_limits, target_queue
from tfmq.delay import target_queue as lines
from tfmq.delay.rows import RowQueue
from tfmq.delay.target_queue import LATENESS_BUCKETS, LatenessHistogram
from tfmq.errors import UNKNOWN, StorageStopped


def test_a_bucket_counts_from_half_of_its_end() -> None:
    lateness = LatenessHistogram()
    for late in (0, 1, 2, 3, 4, 7, 8, 1 << 60):
        lateness.record_sorted(late, [0])
    assert lateness.counts[:5] == [1, 1, 2, 2, 1]
    assert lateness.counts[LATENESS_BUCKETS - 1] == 1
    assert (lateness.total, lateness.max_ms) == (8, 1 << 60)


def test_parts_are_reported_as_the_upper_end_of_their_bucket() -> None:
    lateness = LatenessHistogram()
    assert lateness.percentile_ms(0.5) == 0
    lateness.record_sorted(3, [0] * 990)
    lateness.record_sorted(100, [0] * 10)
    assert (lateness.percentile_ms(0.5), lateness.percentile_ms(0.99), lateness.percentile_ms(0.999)) == (3, 3, 100)
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
            other.record_sorted(now, [due])
        assert one.status() == other.status()


# One target: everything in the order of the turns, one effect at a time, once, whatever its disk does.


def applies(rig: Rig, key: int = ORDERS) -> int:
    return len([asked for asked in rig.targets.asked if asked[:2] == ("apply", key)])


def test_an_effect_names_the_last_turn_that_it_brings() -> None:
    rig = Rig()
    sent = rig.send([b"a", b"b", b"c"], [5, 5, 5])
    rig.advance(0.02)
    assert rig.applied() == [sent[-1].turn]


def test_a_stopped_partition_holds_only_its_own_timers() -> None:
    rig = Rig()
    rig.send([b"a"], 10)
    rig.send([b"b"], 10, key=BILLS)
    rig.targets.stop(ORDERS)
    rig.advance(1)
    assert (rig.visible(ORDERS), rig.visible(BILLS)) == ([], [b"b"])
    rig.targets.resume(ORDERS)
    rig.queue.target_resumed(ORDERS)
    rig.turn()
    assert rig.visible(ORDERS) == [b"a"]


def test_what_a_stopped_partition_has_not_fsynced_leaves_room_for_the_others() -> None:
    rig = Rig()
    rig.targets.automatic = False
    for _ in range(8):
        rig.send([bytes(100_000)], 10)
    rig.send([bytes(200_000)], 400, key=BILLS)
    rig.advance(0.1)
    rig.targets.fail_force(ORDERS)
    rig.targets.automatic = True
    rig.advance(100)
    assert len(rig.visible(BILLS)) == 1
    rig.targets.resume(ORDERS, keep=1)
    rig.queue.target_resumed(ORDERS)
    rig.advance(100)
    assert len(rig.visible(ORDERS)) == 8
    assert rig.queue._target_queues.flow_control.in_flight_bytes == 0


def test_a_stop_does_not_wait_for_room_that_a_stopped_partition_has() -> None:
    rig = Rig()
    rig.targets.automatic = False
    for _ in range(8):
        rig.send([bytes(100_000)], 10)
    rig.send([bytes(200_000)], 400, key=BILLS)
    rig.advance(1)
    rig.targets.fail_force(ORDERS)
    rig.stop()


def test_a_full_disk_is_tried_again_after_growing_pauses() -> None:
    rig = Rig()
    rig.send([b"a", b"b"], [10, 20])
    rig.targets.target(ORDERS).full = True
    rig.advance(300)
    assert 10 <= applies(rig) <= 20
    rig.targets.target(ORDERS).full = False
    rig.advance(RETRY_SECONDS_MAX)
    assert rig.visible() == [b"a", b"b"]
    assert rig.queue.status()["waits_for"] == []


def test_the_first_pause_is_short() -> None:
    rig = Rig()
    rig.send([b"a"], 10)
    rig.targets.target(ORDERS).full = True
    rig.advance(0.02)
    rig.targets.target(ORDERS).full = False
    rig.advance(RETRY_SECONDS)
    assert rig.visible() == [b"a"]


@pytest.mark.parametrize("owner, name", [(lines, "join_records"), (lines.TargetQueue, "_check_target")])
def test_an_unexpected_error_of_one_target_loses_nothing_and_holds_up_no_other(
    owner: object, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig()
    rig.send([b"a"], 10)
    rig.send([b"b"], 10, key=BILLS)

    def fails(*_: object) -> None:
        patched.undo()
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, fails)
        with pytest.raises(MemoryError):
            rig.advance(0.1)
    rig.advance(0)
    assert (rig.visible(ORDERS), rig.visible(BILLS)) == ([], [b"b"])
    rig.advance(RETRY_SECONDS)
    assert rig.visible(ORDERS) == [b"a"]


def test_a_stop_is_reported_once_and_its_end_too(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig()
    rig.send([b"a"], 10)
    rig.targets.stop(ORDERS, "its disk failed")
    with caplog.at_level(logging.INFO, "tfmq.delay"):
        rig.advance(100)
        rig.targets.resume(ORDERS)
        rig.queue.target_resumed(ORDERS)
        rig.turn()
    reported = [each.getMessage() for each in caplog.records if "topic16-0" in each.getMessage()]
    assert len(reported) == 2
    assert "its disk failed" in reported[0] or "accepts no writes" in reported[0]
    assert reported[1] == "topic16-0 accepts delayed messages again"


def test_what_a_resumed_target_lost_comes_again_before_what_is_later() -> None:
    rig = Rig()
    rig.targets.automatic = False
    for number in range(6):
        rig.send([b"%d" % number], 10 + 20 * number)
    rig.advance(0.06)
    assert rig.visible() == [b"0", b"1", b"2"]
    rig.targets.target(ORDERS).forced = 1
    rig.targets.fail_force(ORDERS)
    rig.advance(0.1)
    rig.targets.automatic = True
    rig.targets.resume(ORDERS, keep=1)
    rig.queue.target_resumed(ORDERS)
    rig.advance(3)
    assert rig.visible() == [b"%d" % number for number in range(6)]


def test_what_is_lost_is_found_in_buckets_as_in_arrivals() -> None:
    rig = Rig()
    sent = [rig.send([b"%d" % number], 100_000 + number * 20)[0] for number in range(6)]
    rig.targets.automatic = False
    rig.until(sent[3].due + 5)
    assert len(rig.visible()) == 4
    rig.targets.stop(ORDERS)
    rig.targets.resume(ORDERS, keep=0)
    rig.targets.automatic = True
    rig.queue.target_resumed(ORDERS)
    rig.advance(5)
    assert rig.visible() == [b"%d" % number for number in range(6)]
    assert sum(each.count for each in rig.buckets.live_buckets) == 6 or not rig.buckets.live_buckets


def test_a_target_queue_that_waits_keeps_a_bounded_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "QUEUE_ROWS_MAX", 50)
    rig = Rig()
    rig.send([b"first"], 5)
    rig.targets.stop(ORDERS)
    rig.advance(0.1)
    for burst in range(10):
        rig.send([b"%d-%d" % (burst, number) for number in range(20)], 50)
        rig.advance(0.1)
    status = rig.queue.status()
    assert (status["behind"], status["held"]) == (1, 201)
    assert rig.queue._target_queues.row_count <= 50
    rig.targets.resume(ORDERS)
    rig.queue.target_resumed(ORDERS)
    rig.advance(5)
    assert rig.visible() == [b"first", *(b"%d-%d" % (burst, number) for burst in range(10) for number in range(20))]
    assert rig.queue.status()["behind"] == 0


def test_a_target_that_lags_continues_from_the_disk_after_days(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "QUEUE_ROWS_MAX", 50)
    rig = Rig()
    rig.targets.stop(ORDERS)
    expected = []
    for hour in range(50):
        payloads = [b"%d-%d" % (hour, number) for number in range(7)]
        rig.send(payloads, 3_600_000)
        rig.send([b"other"], 10, key=BILLS)
        expected += payloads
        rig.advance(1800)
    rig.advance(3600)
    assert rig.queue.status()["held"] == 350
    assert rig.queue._target_queues.row_count <= 50
    rig.targets.resume(ORDERS)
    rig.queue.target_resumed(ORDERS)
    rig.advance(10)
    assert rig.visible() == expected
    assert len(rig.visible(BILLS)) == 50
    rig.advance(60)
    assert not rig.buckets.live_buckets


def test_a_topic_that_is_gone_drops_what_was_for_it_and_counts() -> None:
    rig = Rig()
    rig.send([b"a", b"b"], 10)
    rig.send([b"far"], 100_000)
    rig.targets.delete(16)
    rig.queue.topic_deleted(16)
    rig.advance(200)
    assert rig.queue.status()["dropped"] == 3
    assert rig.queue.pending == 0


def test_a_topic_that_is_deleted_while_its_target_queue_waits_leaves_nothing() -> None:
    rig = Rig()
    rig.send([b"a", b"b"], 10)
    rig.targets.stop(ORDERS)
    rig.advance(1)
    rig.targets.delete(16)
    rig.queue.topic_deleted(16)
    rig.advance(1)
    assert rig.queue.status()["waits_for"] == []
    assert rig.queue.status()["dropped"] == 2


def test_large_messages_go_one_at_a_time_and_a_maximum_size_one_too() -> None:
    rig = Rig(segment_bytes=64 << 20)
    payloads = [b"%d" % number + b"x" * 300_000 for number in range(5)] + [b"y" * (16 << 20)]
    rig.send(payloads, 50)
    rig.advance(1)
    assert rig.visible() == payloads
    assert max(each.size_bytes for each in rig.targets.target(ORDERS).appends[:5]) < 400_000


def test_records_that_would_make_a_block_trailer_where_they_meet_go_apart() -> None:
    """That could not be distinguished from a true one after a torn end."""
    header = encode_trailer(ORDERS, BlockTrailer(1, 100, 0, 0, 0, 0, 0, 0))[:20]
    rig = Rig()
    rig.send([b"payload" + header[:16]], 10, turn=False)
    rig.send([b"x" * 0x40, b"last"], 10)
    rig.advance(1)
    assert rig.visible() == [b"payload" + header[:16], b"x" * 0x40, b"last"]
    assert [len(append.records) for append in rig.targets.target(ORDERS).appends] == [1, 2]


def test_damage_is_reported_and_left_out(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig()
    rig.send([b"a" * 50], 200_000)
    rig.send([b"b" * 50], 200_001)
    rig.advance(70)
    (bucket,) = rig.buckets.live_buckets
    data = rig.disk.read_file(bucket.path)
    rig.disk.damage(bucket.path, data.index(b"a" * 50), b"X")
    with caplog.at_level(logging.ERROR, "tfmq.delay"):
        rig.advance(150)
    assert rig.visible() == [b"b" * 50]
    assert rig.queue.status()["damaged"] == 1
    assert "cannot be read" in caplog.text


def test_what_is_loaded_again_and_what_is_still_in_the_wheel_come_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A target that lags is loaded while the rest of the same millisecond has not left the wheel."""
    monkeypatch.setattr(lines, "QUEUE_ROWS_MAX", 20)
    monkeypatch.setattr("tfmq.delay.storage_scheduler.QUEUE_ROWS_MAX", 20)
    monkeypatch.setattr("tfmq.delay.dispatcher.POP_ROWS_MAX", 7)
    rig = Rig()
    rig.targets.stop(ORDERS)
    rig.send([b"first"], 5)
    rig.advance(0.1)
    payloads = [b"%03d" % number for number in range(200)]
    rig.send(payloads, 100)
    rig.clock.advance(0.12)
    for _ in range(12):
        rig.timers.tick(rig.clock.monotonic())
        rig.queue.write()
    rig.targets.resume(ORDERS)
    rig.queue.target_resumed(ORDERS)
    rig.advance(30)
    assert rig.visible() == [b"first", *payloads]


def test_sends_that_a_stopped_log_refuses_hold_nothing_back() -> None:
    rig = Rig()
    rig.send([b"a"], 1000)
    rig.landing.log.stop("its disk failed")
    assert rig.send([b"refused"], 10) == []
    rig.advance(2)
    assert rig.visible() == [b"a"]


@pytest.mark.parametrize("keep", [0, 1])
def test_what_a_stopped_target_has_is_not_sure_after_a_restart_either(keep: int) -> None:
    """Its tail was never forced: a power cut may take it yet."""
    rig = Rig()
    (a,) = rig.send([b"a"], 100)
    rig.targets.automatic = False
    rig.advance(0.2)
    assert rig.visible() == [b"a"]
    rig.targets.fail_force(ORDERS)
    left = rig.targets
    rig.stop()
    again = rig.again(rig.disk, left)
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
    """Whether a failed write is there is unknown: of a cancel and a delivery exactly one happens."""
    rig = Rig()
    (sent,) = rig.send([b"a"], 10)

    def fail() -> None:
        rig.targets.before_append = lambda: None
        rig.targets.target(ORDERS).stopped = "a write failed"

    def write(effect: Effect, done: AppliedCallback) -> None:
        rig.targets.before_append = fail
        plain(effect, lambda mark, error: done(None, StorageStopped(outcome=UNKNOWN)))

    plain, rig.targets._write = rig.targets._write, write
    rig.advance(1)
    assert rig.visible() == [b"a"] and rig.queue._metrics.count_now() == 1
    with pytest.raises(StorageStopped):
        _ = rig.cancel(sent).known
    rig.targets._write = plain
    rig.targets.resume(ORDERS)
    rig.queue.target_resumed(ORDERS)
    rig.advance(10)
    assert rig.cancel(sent).known == "delivered"
    assert rig.visible() == [b"a"] and rig.queue._metrics.count_now() == 0


# All lines together: their turns, their memory.


def test_all_target_queues_that_wait_keep_a_bounded_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_queue, "BLOCKED_ROWS_MAX", 100)
    rig = Rig()
    keys = [ORDERS + n for n in range(5)]
    for key in keys:
        rig.targets.stop(key)
        rig.send([b"first"], 5, key=key)
    rig.advance(0.1)
    for _ in range(3):
        for key in keys:
            rig.send([b"%d" % n for n in range(20)], 10, key=key)
        rig.advance(0.1)
    assert rig.queue._target_queues.row_count <= 100 and rig.queue.status()["held"] == 305
    for key in keys:
        rig.targets.resume(key)
        rig.queue.target_resumed(key)
    rig.advance(60)
    assert [len(rig.visible(key)) for key in keys] == [61] * 5


def test_no_more_than_the_limit_is_written_and_not_fsynced() -> None:
    rig = Rig(segment_bytes=64 << 20)
    rig.targets.automatic = False
    rig.send([b"%03d" % n + b"x" * 10_000 for n in range(200)], 10)
    rig.send([b"%03d" % n + b"x" * 10_000 for n in range(200)], 10, key=BILLS)
    rig.advance(0.5)
    most = 0
    while len(rig.visible()) + len(rig.visible(BILLS)) < 400:
        unforced = 0
        for key in (ORDERS, BILLS):
            target = rig.targets.target(key)
            unforced += sum(each.size_bytes for each in target.appends[target.forced :])
        most = max(most, unforced)
        rig.targets.force()
        rig.advance(0.02)
    assert append_limits.SLICE_BYTES_MAX < most <= apply_queue.IN_FLIGHT_BYTES_MAX


def test_a_target_queue_without_anything_is_removed() -> None:
    rig = Rig()
    rig.send([b"a"], 10)
    rig.advance(1)
    assert rig.queue._target_queues.by_key == {}
    assert rig.queue._target_queues.flow_control.in_flight_bytes == 0


def test_targets_that_take_nothing_are_looked_at_together_once_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a full disk all are stuck: each beside all others would be work by the square of them."""
    looks: list[int] = []
    look = RowQueue.__len__
    monkeypatch.setattr(RowQueue, "__len__", lambda self: looks.append(1) or look(self))
    counts = []
    for count in (50, 400):
        rig = Rig()
        for key in [make_log_id(100 + n, 0) for n in range(count)]:
            rig.targets.stop(key)
            rig.send([b"x"], 1000, key=key, turn=False)
        rig.turn()
        looks.clear()
        rig.advance(1.5)
        counts.append(len(looks) / count)
        assert rig.queue.status()["held"] == count
    assert counts[1] < 2 * counts[0]
