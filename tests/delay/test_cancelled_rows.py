"""What nobody waits for any more counts as little, whenever that was not known."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from journal.record.format import make_log_id
from tests.delay.desk import BILLS, ORDERS, START_MS, Desk, Handle
from tests.scale import scaled
from tfmq.delay import memory_window

DAY = 86_400_000


def filled() -> tuple[Desk, list[Handle], list[Handle]]:
    """In buckets: ten for orders and ten for bills, of which half of the orders are cancelled."""
    desk = Desk()
    orders = desk.send([b"%d" % n for n in range(10)], [DAY + n * 3_600_000 for n in range(10)])
    bills = desk.send([b"b%d" % n for n in range(10)], [DAY + n * 3_600_000 for n in range(10)], key=BILLS)
    desk.listed()
    for handle in orders[::2]:
        desk.cancel(handle)
    desk.advance(1)
    return desk, orders, bills


def test_what_is_cancelled_on_the_disk_counts_no_more() -> None:
    desk, orders, _ = filled()
    assert desk.queue.pending == 15
    desk.reschedule(orders[1], 2 * DAY)
    desk.advance(1)
    assert desk.queue.pending == 15


def test_a_start_finds_out_what_was_cancelled() -> None:
    desk, _, _ = filled()
    for again in (desk.power_cut(), desk.kill()):
        again.advance(1)
        assert again.queue.pending == 15


def test_what_is_for_a_topic_that_went_counts_no_more() -> None:
    desk, _, _ = filled()
    desk.targets.delete(BILLS >> 24)
    desk.queue.topic_deleted(BILLS >> 24)
    desk.advance(1)
    assert desk.queue.pending == 5
    assert desk.histogram([0, 1 << 62]) == ([5], 5)


def test_what_was_cancelled_before_it_was_in_a_bucket_counts_no_more_either() -> None:
    desk = Desk()
    sent = desk.send([b"a", b"b", b"c"], DAY)
    desk.cancel(sent[0])
    desk.advance(1)
    assert desk.queue.pending == 2
    desk.listed()
    desk.advance(1)
    assert desk.queue.pending == 2


def test_a_bucket_that_is_split_drops_cancelled_messages() -> None:
    desk, orders, _ = filled()
    rows = sum(bucket.count for bucket in desk.buckets.live_buckets)
    desk.until(orders[0].due - 30_000)
    desk.listed()
    desk.advance(1)
    assert rows == 20 and sum(bucket.count for bucket in desk.buckets.live_buckets) < 20
    assert desk.queue.pending == 15
    desk.until(START_MS + 3 * DAY)
    assert desk.queue.pending == 0 and len(desk.fired) == 15


def test_one_count_at_a_time_is_asked_for() -> None:
    desk, _, _ = filled()
    desk.queued = True
    for _ in range(5):
        desk.queue.topic_deleted(99)
    assert len(desk.jobs) == 1
    desk.work()
    assert desk.queue.pending == 15


# What was cancelled or moved counts as waiting no more: at once, wherever it lies, and after every kind of end.

DAY_LEAVING, HOUR, MINUTE = 86_400_000, 3_600_000, 60_000
ENDS: list[Callable[[Desk], Desk]] = [Desk.kill, Desk.power_cut]


def exact(desk: Desk) -> int:
    """What is said to wait, as it is listed, counted and told."""
    told = desk.queue._metrics.count_now()
    listed = len(desk.listed().rows)
    counted = desk.histogram([0, 1 << 62])
    assert told == listed == counted.pending == sum(counted.counts)
    return told


def many(desk: Desk, count: int = 40, spilled: bool = True) -> list[Handle]:
    sent = desk.send([b"%d" % n for n in range(count)], [HOUR + n * 10 * MINUTE for n in range(count)])
    if spilled:
        desk.listed()
    return sent


@pytest.mark.parametrize("spilled", [False, True], ids=["in arrivals", "in buckets"])
@pytest.mark.parametrize("end", ENDS)
def test_all_are_cancelled(spilled: bool, end: Callable[[Desk], Desk]) -> None:
    desk = Desk()
    sent = many(desk, spilled=spilled)
    for handle in sent:
        assert desk.cancel(handle).known == "cancelled"
    assert desk.queue._metrics.count_now() == 0
    for again in (end(desk), end(end(desk))):
        assert again.queue._metrics.count_now() == 0
        assert exact(again) == 0


@pytest.mark.parametrize("end", ENDS)
def test_some_before_they_are_in_a_bucket_and_some_after_it(end: Callable[[Desk], Desk]) -> None:
    desk = Desk()
    sent = many(desk, spilled=False)
    for handle in sent[::4]:
        desk.cancel(handle)
    desk.listed()
    for handle in sent[1::4]:
        desk.cancel(handle)
    assert exact(desk) == 20
    again = end(desk)
    assert again.queue._metrics.count_now() == 20
    desk = end(again)
    for handle in sent[2::4]:
        desk.cancel(handle)
    assert desk.queue._metrics.count_now() == 10
    desk.advance(20)
    desk = end(desk)
    assert desk.queue._metrics.count_now() == exact(desk) == 10
    desk.until(START_MS + 2 * DAY_LEAVING)
    assert len(desk.fired) == 10 and desk.queue._metrics.count_now() == 0


@pytest.mark.parametrize("end", ENDS)
def test_a_hundred_and_fifty_moves_of_one_message_leave_one(end: Callable[[Desk], Desk]) -> None:
    desk = Desk()
    (handle,) = desk.send([b"one"], DAY_LEAVING)
    for number in range(150):
        if number % 30 == 20:
            desk.listed()
        turn = desk.reschedule(handle, DAY_LEAVING + number * MINUTE).known.turn
        handle = handle._replace(due=turn.due, number=turn.number)
        if number % 50 == 40:
            assert desk.queue._metrics.count_now() == 1
    assert exact(desk) == 1 and exact(end(desk)) == 1


@pytest.mark.long
def test_buckets_that_are_cut_take_the_count_along() -> None:
    desk = Desk()
    sent = many(desk)
    for handle in sent[::2]:
        desk.cancel(handle)
    for _ in range(40):
        desk.advance(10 * 60)
        waiting = sum(handle.due > desk.now_ms for handle in sent[1::2])
        assert desk.queue._metrics.count_now() == waiting
        if desk.clock.monotonic() % 7 < 1:
            desk = desk.kill()
            assert desk.queue._metrics.count_now() == waiting


@pytest.mark.parametrize("step", ["spill", "split", "load", "commit"])
@pytest.mark.parametrize("cancel_first", [False, True], ids=["behind it", "in the middle"])
def test_a_change_beside_work_with_files_counts_once(step: str, cancel_first: bool) -> None:
    """The worker may see it or not; it is entered when the work is over."""
    desk = Desk(queued=True)
    delay = 2 * HOUR if step != "load" else 75_000
    sent = desk.send([b"%d" % n for n in range(20)], delay)
    if step != "spill":
        desk.listed()
    for _ in range(1000):
        busy = desk.queue._scheduler.running_step
        if busy is not None and busy.value == step:
            break
        if not desk.step():
            desk.clock.advance(20 if step == "split" else 1)
            desk.turn()
    else:
        pytest.fail(f"no {step}")
    before = desk.queue._metrics.count_now()
    if not cancel_first:
        desk.step()
    for handle in sent[:5]:
        desk.queue.cancel(handle.key, handle.turn, lambda result, error: None)
    desk.turn()
    assert desk.queue._metrics.count_now() == before - 5 == 15
    desk.work()
    desk.turn()
    assert exact(desk) == 15
    assert exact(desk.kill()) == 15


def test_a_topic_that_goes_takes_what_waits_for_it_out_of_the_count(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk()
    for delay in (5_000, 70_000, 2 * HOUR, 3 * DAY_LEAVING):
        desk.send([b"a", b"b"], delay)
        desk.send([b"c", b"d"], delay, key=BILLS)
    desk.listed()
    desk.send([b"e"], 2 * HOUR, key=BILLS)
    desk.targets.delete(BILLS >> 24)
    desk.queue.topic_deleted(BILLS >> 24)
    desk.advance(1)
    assert exact(desk) == 8
    assert desk.queue.status()["dropped"] == 9
    for again in (desk.kill(), desk.power_cut()):
        again.advance(1)
        assert exact(again) == 8


def test_a_topic_that_went_just_before_the_end_is_found_by_the_start() -> None:
    desk = Desk()
    desk.send([b"a", b"b"], DAY_LEAVING)
    desk.send([b"c", b"d"], DAY_LEAVING, key=BILLS)
    desk.listed()
    desk.targets.delete(BILLS >> 24)
    again = desk.kill()
    again.advance(1)
    assert exact(again) == 2


def test_a_start_reads_the_columns_of_no_bucket_to_know_how_many_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    desk = Desk()
    sent = many(desk)
    for handle in sent[::2]:
        desk.cancel(handle)
    loads: list[object] = []
    load = "tfmq.delay.buckets.bucket.Bucket.read_columns"
    monkeypatch.setattr(load, lambda self, files: loads.append(self) or iter(()))
    again = desk.power_cut()
    again.advance(5)
    assert again.queue._metrics.count_now() == 20 and not loads


class Tale:
    """Anything in any order, and topics that go, against what is known to wait."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.desk = Desk(segment_bytes=70_000)
        self.alive: dict[bytes, Handle] = {}
        self.keys = [ORDERS, ORDERS + 1, BILLS, make_log_id(18, 0), make_log_id(19, 0)]
        self.number = 0

    def step(self) -> None:
        steps = [self.send] * 4 + [self.cancel] * 3 + [self.move] * 2 + [self.spill] * 2 + [self.wait] * 2
        self.dice.choice([*steps, self.die, self.delete])()
        self.desk.advance(1)
        waiting = {name: each for name, each in self.alive.items() if name not in self.fired()}
        assert self.desk.queue._metrics.count_now() == len(waiting)
        self.alive = waiting

    def fired(self) -> set[bytes]:
        return {payload for key in self.keys for payload in self.desk.visible(key)}

    def send(self) -> None:
        names = [b"%d" % (self.number + n) for n in range(self.dice.choice([1, 5, 30]))]
        self.number += len(names)
        delays = [self.dice.choice([50, 4_000, 40_000, HOUR, 2 * HOUR, DAY_LEAVING]) for _ in names]
        for handle in self.desk.send(names, delays, key=self.dice.choice(self.keys)):
            self.alive[handle.payload] = handle

    def cancel(self) -> None:
        for name in self.dice.sample(sorted(self.alive), min(len(self.alive), 4)):
            assert self.desk.cancel(self.alive.pop(name)).known == "cancelled"

    def move(self) -> None:
        for name in self.dice.sample(sorted(self.alive), min(len(self.alive), 3)):
            turn = self.desk.reschedule(
                self.alive[name], self.dice.choice([3_000, HOUR, DAY_LEAVING])
            ).known.turn
            self.alive[name] = self.alive[name]._replace(due=turn.due, number=turn.number)

    def spill(self) -> None:
        assert len(self.desk.listed().rows) == self.desk.histogram([0, 1 << 62]).pending == len(self.alive)

    def wait(self) -> None:
        self.desk.advance(self.dice.choice([5, 70, 4_000]))

    def die(self) -> None:
        self.desk = self.dice.choice(ENDS)(self.desk)

    def delete(self) -> None:
        topics = sorted({key >> 24 for key in self.keys} - {ORDERS >> 24})
        if not topics or self.dice.random() < 0.5:
            return
        gone = self.dice.choice(topics)
        self.keys = [key for key in self.keys if key >> 24 != gone]
        self.alive = {name: each for name, each in self.alive.items() if each.key >> 24 != gone}
        self.desk.targets.delete(gone)
        if self.dice.random() < 0.3:
            self.die()
        else:
            self.desk.queue.topic_deleted(gone)


@pytest.mark.parametrize("seed", range(scaled(60)))
def test_whatever_happens_as_many_are_said_to_wait_as_wait(seed: int) -> None:
    tale = Tale(seed)
    for _ in range(60):
        tale.step()


def test_bytes_follow_the_count() -> None:
    desk = Desk()
    sent = many(desk)
    desk.advance(70)
    full = desk.queue.pending_bytes
    for handle in sent:
        desk.cancel(handle)
    desk.listed()
    desk.advance(0.2)
    assert full > 40 * 50 and desk.queue.pending_bytes == 0


def test_a_retreat_of_the_window_end_counts_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk()
    sent = desk.send([b"%d" % n for n in range(60)], [3_000 + 1_000 * n for n in range(60)])
    desk.listed()
    desk.advance(1)
    for handle in sent[10::3]:
        desk.cancel(handle)
    monkeypatch.setattr(memory_window, "MEMORY_ROWS_MAX", 10)
    monkeypatch.setattr(memory_window, "LOAD_ROWS_MAX", 5)
    for _ in range(20):
        desk.advance(2.5)
        alive = [handle for n, handle in enumerate(sent) if n < 10 or (n - 10) % 3]
        assert desk.queue._metrics.count_now() == sum(handle.due > desk.now_ms for handle in alive)
