"""Cancelled messages do not count, whenever the cancel was not known."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from journal.record.format import make_log_id
from tests.delay.rig import BILLS, ORDERS, START_MS, Handle, Rig
from tests.scale import scaled
from tfmq.delay import memory_window

DAY = 86_400_000


def filled() -> tuple[Rig, list[Handle], list[Handle]]:
    """In buckets: ten for orders and ten for bills, of which half of the orders are cancelled."""
    rig = Rig()
    orders = rig.send([b"%d" % n for n in range(10)], [DAY + n * 3_600_000 for n in range(10)])
    bills = rig.send([b"b%d" % n for n in range(10)], [DAY + n * 3_600_000 for n in range(10)], key=BILLS)
    rig.listed()
    for handle in orders[::2]:
        rig.cancel(handle)
    rig.advance(1)
    return rig, orders, bills


def test_what_is_cancelled_on_the_disk_counts_no_more() -> None:
    rig, orders, _ = filled()
    assert rig.queue.pending == 15
    rig.reschedule(orders[1], 2 * DAY)
    rig.advance(1)
    assert rig.queue.pending == 15


def test_a_start_finds_out_what_was_cancelled() -> None:
    rig, _, _ = filled()
    for again in (rig.power_cut(), rig.kill()):
        again.advance(1)
        assert again.queue.pending == 15


def test_what_is_for_a_topic_that_went_counts_no_more() -> None:
    rig, _, _ = filled()
    rig.targets.delete(BILLS >> 24)
    rig.queue.topic_deleted(BILLS >> 24)
    rig.advance(1)
    assert rig.queue.pending == 5
    assert rig.histogram([0, 1 << 62]) == ([5], 5)


def test_what_was_cancelled_before_it_was_in_a_bucket_counts_no_more_either() -> None:
    rig = Rig()
    sent = rig.send([b"a", b"b", b"c"], DAY)
    rig.cancel(sent[0])
    rig.advance(1)
    assert rig.queue.pending == 2
    rig.listed()
    rig.advance(1)
    assert rig.queue.pending == 2


def test_a_bucket_that_is_split_drops_cancelled_messages() -> None:
    rig, orders, _ = filled()
    rows = sum(bucket.count for bucket in rig.buckets.live_buckets)
    rig.until(orders[0].due - 30_000)
    rig.listed()
    rig.advance(1)
    assert rows == 20 and sum(bucket.count for bucket in rig.buckets.live_buckets) < 20
    assert rig.queue.pending == 15
    rig.until(START_MS + 3 * DAY)
    assert rig.queue.pending == 0 and len(rig.fired) == 15


def test_one_count_at_a_time_is_asked_for() -> None:
    rig, _, _ = filled()
    rig.queued = True
    for _ in range(5):
        rig.queue.topic_deleted(99)
    assert len(rig.jobs) == 1
    rig.work()
    assert rig.queue.pending == 15


# What was cancelled or moved counts as waiting no more: at once, wherever it lies, and after every kind of end.

DAY_LEAVING, HOUR, MINUTE = 86_400_000, 3_600_000, 60_000
ENDS: list[Callable[[Rig], Rig]] = [Rig.kill, Rig.power_cut]


def exact(rig: Rig) -> int:
    """What is said to wait, as it is listed, counted and reported."""
    reported = rig.queue._metrics.count_now()
    listed = len(rig.listed().rows)
    counted = rig.histogram([0, 1 << 62])
    assert reported == listed == counted.pending == sum(counted.counts)
    return reported


def many(rig: Rig, count: int = 40, spilled: bool = True) -> list[Handle]:
    sent = rig.send([b"%d" % n for n in range(count)], [HOUR + n * 10 * MINUTE for n in range(count)])
    if spilled:
        rig.listed()
    return sent


@pytest.mark.parametrize("spilled", [False, True], ids=["in arrivals", "in buckets"])
@pytest.mark.parametrize("end", ENDS)
def test_all_are_cancelled(spilled: bool, end: Callable[[Rig], Rig]) -> None:
    rig = Rig()
    sent = many(rig, spilled=spilled)
    for handle in sent:
        assert rig.cancel(handle).known == "cancelled"
    assert rig.queue._metrics.count_now() == 0
    for again in (end(rig), end(end(rig))):
        assert again.queue._metrics.count_now() == 0
        assert exact(again) == 0


@pytest.mark.parametrize("end", ENDS)
def test_some_before_they_are_in_a_bucket_and_some_after_it(end: Callable[[Rig], Rig]) -> None:
    rig = Rig()
    sent = many(rig, spilled=False)
    for handle in sent[::4]:
        rig.cancel(handle)
    rig.listed()
    for handle in sent[1::4]:
        rig.cancel(handle)
    assert exact(rig) == 20
    again = end(rig)
    assert again.queue._metrics.count_now() == 20
    rig = end(again)
    for handle in sent[2::4]:
        rig.cancel(handle)
    assert rig.queue._metrics.count_now() == 10
    rig.advance(20)
    rig = end(rig)
    assert rig.queue._metrics.count_now() == exact(rig) == 10
    rig.until(START_MS + 2 * DAY_LEAVING)
    assert len(rig.fired) == 10 and rig.queue._metrics.count_now() == 0


@pytest.mark.parametrize("end", ENDS)
def test_a_hundred_and_fifty_moves_of_one_message_leave_one(end: Callable[[Rig], Rig]) -> None:
    rig = Rig()
    (handle,) = rig.send([b"one"], DAY_LEAVING)
    for number in range(150):
        if number % 30 == 20:
            rig.listed()
        turn = rig.reschedule(handle, DAY_LEAVING + number * MINUTE).known.turn
        handle = handle._replace(due=turn.due, number=turn.number)
        if number % 50 == 40:
            assert rig.queue._metrics.count_now() == 1
    assert exact(rig) == 1 and exact(end(rig)) == 1


@pytest.mark.long
def test_buckets_that_are_cut_take_the_count_along() -> None:
    rig = Rig()
    sent = many(rig)
    for handle in sent[::2]:
        rig.cancel(handle)
    for _ in range(40):
        rig.advance(10 * 60)
        waiting = sum(handle.due > rig.now_ms for handle in sent[1::2])
        assert rig.queue._metrics.count_now() == waiting
        if rig.clock.monotonic() % 7 < 1:
            rig = rig.kill()
            assert rig.queue._metrics.count_now() == waiting


@pytest.mark.parametrize("step", ["spill", "split", "load", "commit"])
@pytest.mark.parametrize("cancel_first", [False, True], ids=["behind it", "in the middle"])
def test_a_change_beside_work_with_files_counts_once(step: str, cancel_first: bool) -> None:
    """The worker may see it or not; it is entered when the work is over."""
    rig = Rig(queued=True)
    delay = 2 * HOUR if step != "load" else 75_000
    sent = rig.send([b"%d" % n for n in range(20)], delay)
    if step != "spill":
        rig.listed()
    for _ in range(1000):
        busy = rig.queue._scheduler.running_step
        if busy is not None and busy.value == step:
            break
        if not rig.step():
            rig.clock.advance(20 if step == "split" else 1)
            rig.turn()
    else:
        pytest.fail(f"no {step}")
    before = rig.queue._metrics.count_now()
    if not cancel_first:
        rig.step()
    for handle in sent[:5]:
        rig.queue.cancel(handle.key, handle.turn, lambda result, error: None)
    rig.turn()
    assert rig.queue._metrics.count_now() == before - 5 == 15
    rig.work()
    rig.turn()
    assert exact(rig) == 15
    assert exact(rig.kill()) == 15


def test_a_topic_that_goes_takes_what_waits_for_it_out_of_the_count(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    for delay in (5_000, 70_000, 2 * HOUR, 3 * DAY_LEAVING):
        rig.send([b"a", b"b"], delay)
        rig.send([b"c", b"d"], delay, key=BILLS)
    rig.listed()
    rig.send([b"e"], 2 * HOUR, key=BILLS)
    rig.targets.delete(BILLS >> 24)
    rig.queue.topic_deleted(BILLS >> 24)
    rig.advance(1)
    assert exact(rig) == 8
    assert rig.queue.status()["dropped"] == 9
    for again in (rig.kill(), rig.power_cut()):
        again.advance(1)
        assert exact(again) == 8


def test_a_topic_that_went_just_before_the_end_is_found_by_the_start() -> None:
    rig = Rig()
    rig.send([b"a", b"b"], DAY_LEAVING)
    rig.send([b"c", b"d"], DAY_LEAVING, key=BILLS)
    rig.listed()
    rig.targets.delete(BILLS >> 24)
    again = rig.kill()
    again.advance(1)
    assert exact(again) == 2


def test_a_start_reads_the_columns_of_no_bucket_to_know_how_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    sent = many(rig)
    for handle in sent[::2]:
        rig.cancel(handle)
    loads: list[object] = []
    load = "tfmq.delay.buckets.bucket.Bucket.read_columns"
    monkeypatch.setattr(load, lambda self, files: loads.append(self) or iter(()))
    again = rig.power_cut()
    again.advance(5)
    assert again.queue._metrics.count_now() == 20 and not loads


class Tale:
    """Anything in any order, and topics that go, against what is known to wait."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.rig = Rig(segment_bytes=70_000)
        self.alive: dict[bytes, Handle] = {}
        self.keys = [ORDERS, ORDERS + 1, BILLS, make_log_id(18, 0), make_log_id(19, 0)]
        self.number = 0

    def step(self) -> None:
        steps = [self.send] * 4 + [self.cancel] * 3 + [self.move] * 2 + [self.spill] * 2 + [self.wait] * 2
        self.dice.choice([*steps, self.die, self.delete])()
        self.rig.advance(1)
        waiting = {name: each for name, each in self.alive.items() if name not in self.fired()}
        assert self.rig.queue._metrics.count_now() == len(waiting)
        self.alive = waiting

    def fired(self) -> set[bytes]:
        return {payload for key in self.keys for payload in self.rig.visible(key)}

    def send(self) -> None:
        names = [b"%d" % (self.number + n) for n in range(self.dice.choice([1, 5, 30]))]
        self.number += len(names)
        delays = [self.dice.choice([50, 4_000, 40_000, HOUR, 2 * HOUR, DAY_LEAVING]) for _ in names]
        for handle in self.rig.send(names, delays, key=self.dice.choice(self.keys)):
            self.alive[handle.payload] = handle

    def cancel(self) -> None:
        for name in self.dice.sample(sorted(self.alive), min(len(self.alive), 4)):
            assert self.rig.cancel(self.alive.pop(name)).known == "cancelled"

    def move(self) -> None:
        for name in self.dice.sample(sorted(self.alive), min(len(self.alive), 3)):
            turn = self.rig.reschedule(self.alive[name], self.dice.choice([3_000, HOUR, DAY_LEAVING])).known.turn
            self.alive[name] = self.alive[name]._replace(due=turn.due, number=turn.number)

    def spill(self) -> None:
        assert len(self.rig.listed().rows) == self.rig.histogram([0, 1 << 62]).pending == len(self.alive)

    def wait(self) -> None:
        self.rig.advance(self.dice.choice([5, 70, 4_000]))

    def die(self) -> None:
        self.rig = self.dice.choice(ENDS)(self.rig)

    def delete(self) -> None:
        topics = sorted({key >> 24 for key in self.keys} - {ORDERS >> 24})
        if not topics or self.dice.random() < 0.5:
            return
        gone = self.dice.choice(topics)
        self.keys = [key for key in self.keys if key >> 24 != gone]
        self.alive = {name: each for name, each in self.alive.items() if each.key >> 24 != gone}
        self.rig.targets.delete(gone)
        if self.dice.random() < 0.3:
            self.die()
        else:
            self.rig.queue.topic_deleted(gone)


@pytest.mark.parametrize("seed", range(scaled(60)))
def test_whatever_happens_as_many_are_said_to_wait_as_wait(seed: int) -> None:
    tale = Tale(seed)
    for _ in range(60):
        tale.step()


def test_bytes_follow_the_count() -> None:
    rig = Rig()
    sent = many(rig)
    rig.advance(70)
    full = rig.queue.pending_bytes
    for handle in sent:
        rig.cancel(handle)
    rig.listed()
    rig.advance(0.2)
    assert full > 40 * 50 and rig.queue.pending_bytes == 0


def test_a_retreat_of_the_window_end_counts_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    sent = rig.send([b"%d" % n for n in range(60)], [3_000 + 1_000 * n for n in range(60)])
    rig.listed()
    rig.advance(1)
    for handle in sent[10::3]:
        rig.cancel(handle)
    monkeypatch.setattr(memory_window, "MEMORY_ROWS_MAX", 10)
    monkeypatch.setattr(memory_window, "LOAD_ROWS_MAX", 5)
    for _ in range(20):
        rig.advance(2.5)
        alive = [handle for n, handle in enumerate(sent) if n < 10 or (n - 10) % 3]
        assert rig.queue._metrics.count_now() == sum(handle.due > rig.now_ms for handle in alive)
