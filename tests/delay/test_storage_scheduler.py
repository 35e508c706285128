"""Memory and disk in step: loads, retreats, spills, splits, what is given up and when."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from journal.errors import Full
from journal.record.format import split_id
from journal.testing import SimulatedDisk
from tests.delay.rig import ARRIVALS, BILLS, ORDERS, START_MS, Answer, Rig
from tfmq.delay import append_limits, memory_window, storage_scheduler, target_queue
from tfmq.delay.arrivals import log
from tfmq.delay.memory_window import Step
from tfmq.delay.requests import ListQuery
from tfmq.delay.storage_scheduler import FileReferences, UnspilledArrivals
from tfmq.errors import StorageStopped


def payloads(count: int, name: str = "m") -> list[bytes]:
    return [b"%s-%d" % (name.encode(), number) for number in range(count)]


def in_order(rig: Rig, key: int = ORDERS) -> bool:
    return rig.applied(key) == sorted(rig.applied(key))


@pytest.fixture
def small_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same rules for thousands instead of millions."""
    monkeypatch.setattr(memory_window, "MEMORY_ROWS_MAX", 2000)
    monkeypatch.setattr(memory_window, "LOAD_ROWS_MAX", 1000)
    monkeypatch.setattr(memory_window, "CATCH_UP_ROWS", 200)
    monkeypatch.setattr(memory_window, "SPLIT_ROWS", 500)
    monkeypatch.setattr("tfmq.delay.buckets.store.SPLIT_MESSAGES", 500)
    monkeypatch.setattr(memory_window, "RESCAN_BYTES_MAX", 10_000)


def test_what_is_too_much_for_memory_waits_on_the_disk(small_bounds: None) -> None:
    rig = Rig()
    sent = []
    for burst in range(60):
        sent += rig.send(payloads(100, str(burst)), [20_000 + (n * 331 + burst * 7) % 9000 for n in range(100)])
    rig.advance(1.5)
    most = 0
    for _ in range(30):
        rig.advance(1)
        most = max(most, rig.queue.status()["near"])
    assert most <= 3000
    expected = [each.payload for each in sorted(sent, key=lambda each: each.turn)]
    assert rig.visible() == expected
    dues = {each.payload: each.due for each in sent}
    assert all(at >= dues[payload] for at, payload in rig.fired)


def test_too_much_for_memory_on_a_full_disk_is_loaded_when_its_time_comes(
    small_bounds: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig()
    loads: list[int] = []
    near = rig.queue._loader.load

    def counted(*args: object) -> object:
        loads.append(1)
        return near(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(rig.queue._loader, "load", counted)
    monkeypatch.setattr(type(rig.buckets), "spill", refused)
    monkeypatch.setattr(type(rig.buckets), "commit", refused)
    sent = []
    for burst in range(40):
        sent += rig.send(payloads(100, str(burst)), [9_000 + (n * 97 + burst) % 900 for n in range(100)])
    rig.advance(20)
    assert rig.visible() == [each.payload for each in sorted(sent, key=lambda each: each.turn)]
    assert len(loads) < 20


def refused(*args: object) -> None:
    raise Full("no space")


def test_a_burst_that_lands_in_one_second_is_fired_in_order(small_bounds: None) -> None:
    rig = Rig()
    sent = []
    for burst in range(50):
        sent += rig.send(payloads(100, str(burst)), [30_000 + (n * 37) % 900 for n in range(100)])
    rig.advance(60)
    assert rig.visible() == [each.payload for each in sorted(sent, key=lambda each: each.turn)]


@pytest.mark.long
def test_thousands_far_away_in_one_minute_are_split_and_fired_in_order(small_bounds: None) -> None:
    rig = Rig()
    sent = []
    for burst in range(100):
        delays = [7_200_000 + (n * 3001 + burst * 13) % 60_000 for n in range(20)]
        sent += rig.send(payloads(20, str(burst)), delays)
    rig.advance(7200 + 100)
    assert rig.visible() == [each.payload for each in sorted(sent, key=lambda each: each.turn)]
    late = {payload: at for at, payload in rig.fired}
    assert all(0 <= late[each.payload] - each.due <= 20 for each in sent)
    rig.advance(20)
    assert not rig.buckets.live_buckets


@pytest.mark.long
@pytest.mark.parametrize("down", [100, 100_000, 40_000_000])
def test_after_a_downtime_all_comes_in_order(down: int, small_bounds: None) -> None:
    rig = Rig()
    sent = []
    for burst in range(40):
        sent += rig.send(payloads(50, str(burst)), [(n * n * 977 + burst * 7919) % 30_000_000 for n in range(50)])
        rig.advance(3)
    fired = set(rig.visible())
    rig.clock.advance(down)
    rig = rig.kill()
    rig.advance(30)
    now = rig.now_ms
    overdue = [each.payload for each in sorted(sent, key=lambda each: each.turn) if each.due < now - 15_000]
    assert [p for p in rig.visible() if p not in fired][: len(overdue) - len(fired)] == [
        p for p in overdue if p not in fired
    ]
    rig.advance(31_000)
    assert rig.visible() == [each.payload for each in sorted(sent, key=lambda each: each.turn)]


def test_a_catch_up_leaves_every_turn_a_part(monkeypatch: pytest.MonkeyPatch, small_bounds: None) -> None:
    """What came in meanwhile is served between two turns of it."""
    monkeypatch.setattr(append_limits, "TURN_ROWS_MAX", 100)
    rig = Rig()
    for burst in range(20):
        rig.send(payloads(200, str(burst)), 50)
    rig.clock.advance(10)
    served, before = [], 0
    rig.timers.after(0, lambda: None)
    while len(rig.visible()) < 4000:
        rig.timers.tick(rig.clock.monotonic())
        while rig.queue.write() or rig.landing.write() or rig.targets.write():
            pass
        served.append(len(rig.visible()) - before)
        before = len(rig.visible())
        rig.work()
    assert max(served) <= 200


def test_arrivals_are_given_up_once_they_are_in_buckets_and_fired() -> None:
    rig = Rig(segment_bytes=1 << 20)
    for _ in range(30):
        rig.send([b"x" * 100_000], 3_600_000)
        rig.send([b"y" * 1000], 20, key=BILLS)
        rig.advance(61)
    log = rig.landing.log
    assert log.first_offset > 0
    assert log.end_offset - log.first_offset <= 3 << 20
    assert len(rig.visible(BILLS)) == 30
    rig.advance(5000)
    assert len(rig.visible()) == 30


def test_a_target_that_stays_away_does_not_keep_the_arrivals() -> None:
    rig = Rig(segment_bytes=1 << 20)
    rig.targets.stop(ORDERS)
    for number in range(40):
        rig.send([b"%d" % number + b"x" * 100_000], 20)
        rig.advance(61)
    log = rig.landing.log
    assert log.end_offset - log.first_offset <= 3 << 20
    rig.targets.resume(ORDERS)
    rig.queue.target_resumed(ORDERS)
    rig.advance(10)
    assert [int(payload.split(b"x")[0]) for payload in rig.visible()] == list(range(40))


def test_a_full_disk_keeps_nothing_from_firing() -> None:
    """What cannot be spilled is loaded from the arrivals."""
    rig = Rig(SimulatedDisk_with_folders(space_bytes=6 << 20))
    sent = rig.send(payloads(100), [n * 2000 for n in range(100)])
    rig.disk.space_bytes = rig.disk.used_bytes()
    for handle in sent:
        rig.until(handle.due + 12)
        assert rig.visible()[-1] == handle.payload
    rig.disk.space_bytes = 60 << 20
    rig.advance(120)
    rig.send([b"more"], 10)
    rig.advance(1)
    assert rig.visible()[-1] == b"more"


def SimulatedDisk_with_folders(space_bytes: int) -> SimulatedDisk:
    disk = SimulatedDisk(space_bytes=space_bytes)
    for folder in ("/data", "/data/delay", "/data/delay/arrivals"):
        disk.make_folder(folder)
    for folder in ("/", "/data", "/data/delay"):
        disk.force_folder(folder)
    return disk


def test_the_time_is_written_down_so_that_a_wrong_clock_does_not_turn_it_back() -> None:
    rig = Rig()
    handle = rig.send([b"m"], 3_600_000)[0]
    rig.send([b"n"], 100)
    rig.advance(70)
    rig.clock.jump_wall(-86_400)
    again = rig.kill()
    assert START_MS + 60_000 <= again.now_ms <= START_MS + 70_000
    again.until(handle.due - 1)
    assert b"m" not in again.visible()
    again.advance(0.02)
    assert again.visible() == [b"n", b"m"]


def test_cancelled_ones_are_forgotten_when_they_are_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(outcome_seconds=600)
    handle = rig.send([b"m"], 100_000)[0]
    assert rig.cancel(handle).known == "cancelled"
    rig.advance(300)
    assert rig.cancel(handle).known == "cancelled"
    rig.send([b"other"], 10_000)
    rig.advance(2000)
    rig.send([b"other"], 10_000)
    rig.advance(100)
    assert rig.state.cancelled.count == 0
    assert rig.cancel(handle).known == "unknown"
    assert rig.describe(handle).state == "unknown"
    assert rig.kill().cancel(handle).known in ("unknown", "cancelled"), "the log may know it still"


def test_a_load_that_fails_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    handle = rig.send([b"m"], 200_000)[0]
    rig.advance(100)
    near, calls = rig.queue._loader.load, []

    def fails(*args: object) -> object:
        calls.append(1)
        if len(calls) < 3:
            raise OSError(5, "the disk is away")
        return near(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(rig.queue._loader, "load", fails)
    rig.until(handle.due + 12)
    assert rig.visible() == [b"m"]
    assert len(calls) >= 3


def test_a_list_waits_for_a_spill_and_is_notified_when_there_can_be_none() -> None:
    rig = Rig()
    rig.send([b"m"], 3_600_000)
    rig.buckets.stop_reason = "its disk failed"
    with pytest.raises(StorageStopped, match=r"cannot be listed .* start the broker again"):
        rig.listed()


@pytest.mark.parametrize("after", range(3))
@pytest.mark.parametrize("between", range(5))
@pytest.mark.parametrize("due_passes", ["before", "between", "after", "held"])
def test_a_list_is_answered_at_any_time_around_the_work_for_a_deleted_topic(
    after: int, between: int, due_passes: str
) -> None:
    """The topic is deleted, then the list is asked for: with so many jobs done in between and afterwards, and the due
    time of a message of the topic before, in between, afterwards, or not reached."""
    rig = Rig(queued=True)
    going = rig.send([b"going"], 1000)[0]
    kept = rig.send([b"kept"], 3_600_000, key=BILLS)[0]
    rig.work()

    def jobs(count: int, *, late: bool) -> None:
        if late:
            rig.clock.advance((going.due + 12 - rig.now_ms) / 1000)
        rig.turn()
        for _ in range(count):
            rig.step()
            rig.turn()

    jobs(0, late=due_passes == "before")
    rig.targets.delete(split_id(ORDERS)[0])
    rig.queue.topic_deleted(split_id(ORDERS)[0])
    jobs(between, late=due_passes == "between")
    answer = Answer()
    rig.queue.list(ListQuery(0, 1 << 62, None, 1000, None, None), answer)
    jobs(after, late=due_passes == "after")
    rig.work()
    rig.turn()
    rig.work()
    assert [(row.due, row.number) for row in answer.known.rows] == [kept.turn], (
        "no time passes, and nothing more is sent"
    )


@pytest.mark.parametrize("step", [Step.SPILL, Step.COMMIT])
def test_a_list_that_is_asked_for_while_work_stops_the_buckets_is_refused(step: Step) -> None:
    rig = Rig(queued=True)
    rig.send([b"m"], 3_600_000)
    for _ in range(200):
        rig.work()
        rig.clock.advance(1)
        rig.turn()
        if rig.queue._scheduler.running_step is step:
            break
    rig.send([b"meanwhile"], 3_600_000)
    assert rig.queue._scheduler.running_step is step
    answer = Answer()
    rig.queue.list(ListQuery(0, 1 << 62, None, 1000, None, None), answer)
    rig.turn()
    assert not answer.calls
    rig.disk.faults.fail("write", path="checkpoint", error=5)
    rig.work()
    with pytest.raises(StorageStopped, match=r"cannot be listed .* start the broker again"):
        assert answer.known


def test_nothing_is_done_while_nothing_waits() -> None:
    rig = Rig()
    rig.send([b"m"], 10)
    rig.advance(200)
    assert rig.timers.next_due() is None


def test_what_is_on_its_way_to_the_buckets_is_cancelled_as_ever() -> None:
    """While a spill runs it is in no bucket that counts, and is pending all the same."""
    rig = Rig(queued=True)
    handle, kept = rig.send(payloads(2), 3_600_000)
    while rig.queue._scheduler.running_step is not Step.SPILL:
        rig.work()
        rig.clock.advance(1.0)
        rig.turn()
    assert rig.jobs and not rig.buckets.live_buckets
    answer = rig.cancel(handle)
    assert answer.known == "cancelled"
    rig.until(kept.due + 12)
    assert rig.visible() == [kept.payload]


@pytest.mark.timeout(60)
def test_a_target_queue_that_gave_way_for_old_files_is_loaded_once_and_goes_on() -> None:
    """What it had lay in arrivals that are long in buckets: these go, and the line looks into the new files."""
    rig = Rig(segment_bytes=70_000)
    held = rig.send([b"held"], 64_000)[0]
    for number in range(20):
        rig.send([b"%d" % number + bytes(10_000)], 3_600_000 + number)
    later = rig.send([b"later"], 66_000)[0]
    rig.targets.stop(ORDERS)
    rig.until(later.due + 120_000)
    assert rig.visible() == [] and rig.landing.log.first_offset > 0
    rig.targets.resume(ORDERS)
    rig.queue.target_resumed(ORDERS)
    rig.advance(1)
    assert rig.visible() == [held.payload, later.payload]


def test_damaged_arrivals_that_a_spill_leaves_out_are_counted() -> None:
    """A block with what one send brought; also what was cancelled in it, or had been delivered, is not lost twice."""
    rig = Rig()
    rig.send([b"first", b"second"], 3_600_000)
    bad = rig.send([b"rotten", b"with it", b"cancelled", b"soon"], [3_600_000, 7_200_000, 3_600_000, 5000])
    rig.send([b"last"], 3_600_000)
    assert rig.cancel(bad[2]).known == "cancelled"
    assert rig.queue.status()["pending"] == 6
    path = next(f"{ARRIVALS}/{name}" for name in rig.disk.list(ARRIVALS) if name.endswith(log.ARRIVALS_SUFFIX))
    rig.disk.damage(path, rig.disk.read_file(path).index(b"rotten"), b"#")
    rig.advance(120)
    status = rig.queue.status()
    assert rig.visible() == []
    assert (status["pending"], status["damaged"]) == (3, 3), "the one that was due soon could not be read either"
    rig.advance(7200)
    assert sorted(rig.visible()) == [b"first", b"last", b"second"]
    assert rig.queue.status()["damaged"] == 3 and rig.queue._metrics.count_now() == 0


# What is added to the wheel with a new end of the window.


def test_many_rows_come_some_a_turn_and_nothing_of_them_fires_before_all_are_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(storage_scheduler, "ADD_ROWS_MAX", 10)
    rig = Rig()
    sent = rig.send([b"%03d" % n for n in range(95)], 300_000)
    rig.until(sent[0].due + 20)
    assert rig.visible() == [each.payload for each in sent]


def test_what_arrives_during_a_load_comes_once() -> None:
    rig = Rig(queued=True)
    first = rig.send([b"a"], 250_000)[0]
    rig.advance(130)
    rig.work()
    while not rig.jobs and rig.now_ms < first.due - 9000:
        rig.clock.advance(0.5)
        rig.turn()
    assert rig.jobs, "the load is under way"
    rig.send([b"b"], first.due - rig.now_ms - 1)
    rig.send([b"c"], first.due - rig.now_ms + 1)
    rig.clock.advance((first.due - rig.now_ms) / 1000 + 1)
    rig.turn()
    assert rig.visible() == []
    rig.work()
    rig.advance(1)
    assert rig.visible() == [b"b", b"a", b"c"]


# Until when files must stay.


def bucket(name: str) -> Any:
    return SimpleNamespace(name=name)


def test_what_was_near_at_a_spill_keeps_its_arrivals_until_it_fired() -> None:
    pins = FileReferences(100)
    pins.add(1000, offset=500)
    pins.add(2000, offset=900)
    assert (pins.offset, pins.oldest_window_end) == (100, 1000)
    assert pins.release_before(999) == []
    assert pins.offset == 100
    pins.release_before(1000)
    assert (pins.offset, pins.oldest_window_end) == (500, 2000)
    pins.release_before(5000)
    assert (pins.offset, pins.oldest_window_end) == (900, 0)


def test_a_split_bucket_goes_in_its_turn() -> None:
    pins = FileReferences(0)
    one, other = bucket("one"), bucket("other")
    pins.add(1000, bucket=one)
    pins.add(1500, offset=10)
    pins.add(1200, bucket=other)
    assert pins.release_before(1200) == [one]
    assert pins.release_before(1499) == []
    assert pins.release_before(1500) == [other]
    assert pins.offset == 10


# Rows come back to a line that gave them up, a bounded number at a time.


@pytest.mark.parametrize("rows_max", [1, 7, 50])
def test_everything_comes_once_however_little_is_loaded_at_a_time(
    rows_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target_queue, "QUEUE_ROWS_MAX", rows_max)
    monkeypatch.setattr(storage_scheduler, "QUEUE_ROWS_MAX", rows_max)
    rig = Rig()
    rig.targets.stop(ORDERS)
    expected = []
    for burst in range(12):
        sent = rig.send([b"%d-%d" % (burst, n) for n in range(10)], [(n * 37) % 50 * 3000 for n in range(10)])
        rig.send([b"other"], 5, key=BILLS)
        expected += sent
        rig.advance(30)
    rig.advance(200)
    assert rig.queue.status()["behind"] == 1
    rig.targets.resume(ORDERS)
    rig.queue.target_resumed(ORDERS)
    rig.advance(60)
    assert rig.visible() == [each.payload for each in sorted(expected, key=lambda each: each.turn)]


def test_a_load_that_fails_is_tried_again_of_reloading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_queue, "QUEUE_ROWS_MAX", 2)
    rig = Rig()
    rig.targets.stop(ORDERS)
    for number in range(6):
        rig.send([b"%d" % number], 5)
        rig.advance(0.1)
    calls: list[int] = []
    find = rig.queue._scheduler._find_rows

    def fails(*args: object) -> object:
        calls.append(1)
        if len(calls) < 3:
            raise OSError(5, "the disk is away")
        return find(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(rig.queue._scheduler, "_find_rows", fails)
    rig.targets.resume(ORDERS)
    rig.queue.target_resumed(ORDERS)
    rig.advance(20)
    assert rig.visible() == [b"%d" % number for number in range(6)]


# Arrivals that are in no bucket.


def test_the_lowest_due_is_known_until_it_is_in_a_bucket() -> None:
    arrivals = UnspilledArrivals()
    assert arrivals.lows == [] and arrivals.since is None
    arrivals.add(50, 1000)
    arrivals.add(70, 2000)
    assert arrivals.lows == [50] and arrivals.since == 1000
    arrivals.begin_spill()
    arrivals.add(60, 3000)
    assert sorted(arrivals.lows) == [50, 60] and arrivals.since == 3000
    arrivals.end_spill(True)
    assert arrivals.lows == [60] and arrivals.since == 3000


def test_a_spill_that_failed_leaves_them_as_old_as_they_are() -> None:
    arrivals = UnspilledArrivals()
    arrivals.add(50, 1000)
    arrivals.begin_spill()
    arrivals.add(60, 3000)
    arrivals.end_spill(False)
    assert arrivals.lows == [50] and arrivals.since == 1000


def test_notes_have_no_due_but_an_age() -> None:
    arrivals = UnspilledArrivals()
    arrivals.add(None, 1000)
    assert arrivals.lows == [] and arrivals.since == 1000
