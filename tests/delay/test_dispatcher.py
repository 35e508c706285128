"""When something is due."""

import errno
from collections.abc import Sequence
from itertools import pairwise

import pytest

from journal.errors import Full
from tests.delay.desk import ARRIVALS, BILLS, ORDERS, Answer, Desk, Handle
from tfmq.delay import dispatcher
from tfmq.delay.buckets.loader import BucketLoader
from tfmq.delay.requests import ListQuery
from tfmq.errors import DiskFull


@pytest.mark.parametrize("tick_ms", [1, 10, 25, 1000])
def test_at_the_first_tick_and_never_early(tick_ms: int) -> None:
    desk = Desk(tick_ms=tick_ms)
    sent = [
        desk.send([b"%d" % n], delay)[0] for n, delay in enumerate((1, 9, 10, 11, 99, 100, 1000, 1001, 2500))
    ]
    desk.advance(5)
    for (at, payload), handle in zip(desk.fired, sorted(sent, key=lambda each: each.turn), strict=True):
        assert payload == handle.payload
        assert handle.due <= at < handle.due + tick_ms


def test_nothing_fires_before_its_arrival_is_on_the_disk() -> None:
    desk = Desk()
    desk.landing.automatic = False
    desk.send([b"a"], 10)
    desk.advance(1)
    assert desk.visible() == []
    desk.landing.force()
    desk.turn()
    assert desk.visible() == [b"a"]


def test_nothing_fires_before_what_is_lower_and_not_sure() -> None:
    desk = Desk()
    desk.send([b"b"], 100)
    desk.landing.automatic = False
    desk.send([b"a"], 50)
    desk.advance(1)
    assert desk.visible() == []
    desk.landing.force()
    desk.turn()
    assert desk.visible() == [b"a", b"b"]


def test_while_dues_are_given_and_not_written_nothing_after_them_fires() -> None:
    desk = Desk()
    desk.send([b"b"], 100)
    ticket = desk.queue.begin_append(desk.now_ms + 50)
    desk.advance(1)
    assert desk.visible() == []
    desk.queue.append_failed(ticket)
    desk.turn()
    assert desk.visible() == [b"b"]


def test_little_is_taken_out_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher, "POP_ROWS_MAX", 10)
    desk = Desk()
    desk.targets.stop(ORDERS)
    desk.send([b"%03d" % n for n in range(100)], 10)
    desk.clock.advance(0.01)
    taken = []
    for _ in range(5):
        desk.timers.tick(desk.clock.monotonic() - 1e-9)
        desk.queue._dispatcher.dispatch_due()
        taken.append(desk.queue._target_queues.row_count)
    assert all(later - before <= 10 for before, later in pairwise(taken))
    desk.targets.resume(ORDERS)
    desk.queue.target_resumed(ORDERS)
    desk.advance(2)
    assert len(desk.visible()) == 100


def test_nothing_happens_while_nothing_waits_and_little_while_it_is_far() -> None:
    desk = Desk()
    assert desk.timers.next_due() is None
    desk.send([b"a"], 3_600_000)
    desk.advance(70)
    firm = desk.timers.next_not_deferrable()
    assert firm is not None and firm - desk.clock.monotonic() > 3000


def test_after_a_stop_nothing_fires() -> None:
    desk = Desk()
    desk.send([b"a"], 10)
    desk.stop()
    desk.clock.advance(10)
    desk.timers.tick(desk.clock.monotonic())
    desk.targets.write()
    assert desk.visible() == []
    again = desk.again(desk.disk, desk.targets.killed())
    again.advance(1)
    assert again.visible() == [b"a"]


def test_the_tail_that_waits_for_space_is_taken_in_when_it_is_sure() -> None:
    desk = Desk(started=False)
    desk.queue._dispatcher.wait_for_tail(0, (0, 0))
    desk.queue.start()
    desk.send([b"a"], 10)
    assert desk.visible() == []
    desk.advance(3)
    assert desk.visible() == [b"a"]


def test_a_tail_of_which_all_was_due_long_ago_is_taken_in_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Space comes an hour after the start: the wheel began far behind what the tail brings."""
    desk = Desk(started=False)
    desk.send([b"a", b"b"], [20, 10])
    desk.landing.log.force()
    end = desk.landing.log.end_offset
    desk.clock.advance(3600)
    with monkeypatch.context() as patched:
        patched.setattr(type(desk.landing.log), "forced_offset", property(lambda log: 0))
        again = desk.kill()
        assert again.landing.log.end_offset == end
        again.advance(3)
        assert again.visible() == []
    again.advance(3)
    assert again.visible() == [b"b", b"a"]
    (later,) = again.send([b"c"], 50)
    again.advance(1)
    assert again.visible()[2:] == [later.payload]


def waiting_for_space(before: Sequence[int], behind: Sequence[int]) -> tuple[Desk, list[Handle]]:
    """A start on a full disk: it cannot make true what was written and not forced, with delays `behind`."""
    desk = Desk()
    sent = desk.send([b"%d" % delay for delay in before], before) if before else []
    desk.landing.log.force()
    desk.landing.automatic = False
    sent += desk.send([b"%d" % delay for delay in behind], behind)
    disk = desk.disk.crash(keep="everything")
    disk.faults.fail("write", error=errno.ENOSPC, times=None)
    again = desk.again(disk, desk.targets.killed())
    assert again.landing.log.waits_for_space
    again.advance(3)
    return again, sent


@pytest.mark.parametrize("next", ["nothing", "a send", "a later send", "a list", "a cancel"])
@pytest.mark.parametrize("before", [[], [40_000]], ids=["alone", "behind others"])
def test_what_waits_for_space_comes_when_there_is_some(before: list[int], next: str) -> None:
    desk, sent = waiting_for_space(before, [20_000, 80_000, 500_000])
    assert desk.cancel(sent[-1]).error is not None, "it is there, and there is no room for a note"
    desk.disk.faults.clear()
    expected = sorted([*before, 20_000, 80_000, 500_000])
    if "send" in next:
        delay = 1000 if next == "a send" else 90_000
        desk.send([b"%d" % delay], delay)
        expected = sorted([*expected, delay])
    elif next == "a list":
        desk.listed()
    elif next == "a cancel":
        assert desk.cancel(sent[-1]).known == "cancelled"
        del expected[-1]
    desk.advance(3)
    assert (
        len(desk.listed().rows) + len(desk.visible())
        == len(expected)
        == desk.queue.pending + len(desk.visible())
    )
    desk.advance(600)
    assert desk.visible() == [b"%d" % delay for delay in expected]
    again = desk.power_cut()
    again.advance(600)
    assert again.visible() == [b"%d" % delay for delay in expected]


def test_what_waits_for_space_is_not_spilled_before_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be loaded from its bucket, and come once more from the arrivals."""
    desk, _ = waiting_for_space([], [20_000, 80_000])
    desk.disk.faults.clear()
    desk.send([b"90000"], 90_000)
    with monkeypatch.context() as patched:
        patched.setattr(BucketLoader, "recover", refused)
        desk.advance(15)
        listed = Answer()
        desk.queue.list(ListQuery(0, 1 << 62, None, 100, None, None), listed)
        desk.advance(5)
        desk.queue._dispatcher._run_maintenance()
        assert (listed.calls, desk.visible()) == (0, [])
    desk.advance(31)
    assert len(listed.known.rows) == 3
    desk.advance(100)
    assert desk.visible() == [b"20000", b"80000", b"90000"]


def test_what_waits_for_space_and_is_in_buckets_comes_once() -> None:
    """The log knows less of what is forced than the buckets: its mark is written now and then."""
    desk = Desk()
    sent = desk.send([b"20", b"300"], [20_000, 300_000])
    desk.listed()
    disk = desk.disk.crash(keep="everything")
    disk.faults.fail("write", error=errno.ENOSPC, times=None, path=ARRIVALS)
    again = desk.again(disk, desk.targets.killed())
    assert again.landing.log.end_offset < again.buckets.spilled_offset
    again.advance(3)
    assert again.describe(sent[1]).state == "pending"
    disk.faults.clear()
    again.advance(600)
    assert again.visible() == [b"20", b"300"]
    assert again.kill().visible() == [b"20", b"300"]


def test_while_it_waits_for_space_it_is_not_reported_as_unknown() -> None:
    desk, sent = waiting_for_space([], [20_000, 80_000])
    described = Answer()
    desk.queue.describe(ORDERS, sent[0].turn, described)
    for answer in (desk.cancel(sent[0]), desk.reschedule(sent[1], 90_000), described):
        assert isinstance(answer.error, DiskFull | Full)
    desk.disk.faults.clear()
    desk.advance(100)
    assert desk.visible() == [b"20000", b"80000"]


def refused(*_: object) -> None:
    raise OSError(errno.EIO, "a bad sector")


def test_arrivals_that_stopped_hold_back_unknown_messages_and_later_ones() -> None:
    desk = Desk()
    desk.send([b"a", b"b", b"c"], [100, 200, 300])
    desk.send([b"d"], 300, key=BILLS)
    desk.landing.automatic = False
    (unsure,) = desk.send([b"?"], 150)
    desk.landing.log.stop("its disk failed")
    desk.landing.force()
    desk.advance(5)
    assert (desk.visible(), desk.visible(BILLS)) == ([b"a"], [b"d"])
    again = desk.kill()
    again.advance(1)
    assert again.visible() in ([b"a", b"?", b"b", b"c"], [b"a", b"b", b"c"])
    assert unsure.payload == b"?"


def test_cancels_alone_do_not_fill_the_arrivals() -> None:
    """No message lands behind them, so nothing else says that they are there."""
    desk = Desk(segment_bytes=4096)
    sent = [
        each for n in range(10) for each in desk.send([b"%d" % n + bytes([64 + m]) for m in range(40)], 10**9)
    ]
    desk.listed()
    for at in range(0, len(sent), 4):
        for handle in sent[at : at + 4]:
            desk.cancel(handle)
        desk.advance(30)
    desk.advance(130)
    log = desk.landing.log
    assert log.end_offset > 10 * 4096
    assert log.end_offset - log.first_offset < 3 * 4096
    assert log.end_offset == desk.buckets.spilled_offset
    again = desk.kill()
    assert again.queue.pending == 0 and not again.listed().rows


def test_no_more_than_a_bound_is_out_of_the_wheel_and_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher, "FIREABLE_ROWS_MAX", 8)
    desk = Desk()
    sent = desk.send([b"%02d" % number for number in range(50)], 10)
    lines, moving = desk.queue._target_queues, []
    put = lines.add_due

    def noted(*found: object) -> None:
        put(*found)  # type: ignore[arg-type]
        moving.append(lines.fireable_count)

    monkeypatch.setattr(lines, "add_due", noted)
    desk.advance(5)
    assert desk.visible() == [each.payload for each in sent]
    assert 0 < max(moving) <= 8


def test_an_effect_is_no_larger_than_its_partition_takes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk()
    monkeypatch.setattr(desk.targets, "append_bytes_max", lambda key: 400)
    sent = desk.send([bytes([number]) * 100 for number in range(20)], 10)
    desk.advance(5)
    assert desk.visible() == [each.payload for each in sent]
    assert max(len(each.records) for each in desk.targets.target(ORDERS).appends) <= 3
