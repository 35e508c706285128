"""When something is due."""

import errno
from collections.abc import Sequence
from itertools import pairwise

import pytest

from journal.errors import Full
from tests.delay.rig import ARRIVALS, BILLS, ORDERS, Answer, Handle, Rig
from tfmq.delay import dispatcher
from tfmq.delay.buckets.loader import BucketLoader
from tfmq.delay.requests import ListQuery
from tfmq.errors import DiskFull


@pytest.mark.parametrize("tick_ms", [1, 10, 25, 1000])
def test_at_the_first_tick_and_never_early(tick_ms: int) -> None:
    rig = Rig(tick_ms=tick_ms)
    sent = [rig.send([b"%d" % n], delay)[0] for n, delay in enumerate((1, 9, 10, 11, 99, 100, 1000, 1001, 2500))]
    rig.advance(5)
    for (at, payload), handle in zip(rig.fired, sorted(sent, key=lambda each: each.turn), strict=True):
        assert payload == handle.payload
        assert handle.due <= at < handle.due + tick_ms


def test_nothing_fires_before_its_arrival_is_on_the_disk() -> None:
    rig = Rig()
    rig.landing.automatic = False
    rig.send([b"a"], 10)
    rig.advance(1)
    assert rig.visible() == []
    rig.landing.force()
    rig.turn()
    assert rig.visible() == [b"a"]


def test_nothing_fires_before_what_is_lower_and_not_sure() -> None:
    rig = Rig()
    rig.send([b"b"], 100)
    rig.landing.automatic = False
    rig.send([b"a"], 50)
    rig.advance(1)
    assert rig.visible() == []
    rig.landing.force()
    rig.turn()
    assert rig.visible() == [b"a", b"b"]


def test_while_dues_are_given_and_not_written_nothing_after_them_fires() -> None:
    rig = Rig()
    rig.send([b"b"], 100)
    ticket = rig.queue.begin_append(rig.now_ms + 50)
    rig.advance(1)
    assert rig.visible() == []
    rig.queue.append_failed(ticket)
    rig.turn()
    assert rig.visible() == [b"b"]


def test_little_is_taken_out_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher, "POP_ROWS_MAX", 10)
    rig = Rig()
    rig.targets.stop(ORDERS)
    rig.send([b"%03d" % n for n in range(100)], 10)
    rig.clock.advance(0.01)
    taken = []
    for _ in range(5):
        rig.timers.tick(rig.clock.monotonic() - 1e-9)
        rig.queue._dispatcher.dispatch_due()
        taken.append(rig.queue._target_queues.row_count)
    assert all(later - before <= 10 for before, later in pairwise(taken))
    rig.targets.resume(ORDERS)
    rig.queue.target_resumed(ORDERS)
    rig.advance(2)
    assert len(rig.visible()) == 100


def test_nothing_happens_while_nothing_waits_and_little_while_it_is_far() -> None:
    rig = Rig()
    assert rig.timers.next_due() is None
    rig.send([b"a"], 3_600_000)
    rig.advance(70)
    firm = rig.timers.next_not_deferrable()
    assert firm is not None and firm - rig.clock.monotonic() > 3000


def test_after_a_stop_nothing_fires() -> None:
    rig = Rig()
    rig.send([b"a"], 10)
    rig.stop()
    rig.clock.advance(10)
    rig.timers.tick(rig.clock.monotonic())
    rig.targets.write()
    assert rig.visible() == []
    again = rig.again(rig.disk, rig.targets.killed())
    again.advance(1)
    assert again.visible() == [b"a"]


def test_the_tail_that_waits_for_space_is_taken_in_when_it_is_sure() -> None:
    rig = Rig(started=False)
    rig.queue._dispatcher.wait_for_tail(0, (0, 0))
    rig.queue.start()
    rig.send([b"a"], 10)
    assert rig.visible() == []
    rig.advance(3)
    assert rig.visible() == [b"a"]


def test_a_tail_of_which_all_was_due_long_ago_is_taken_in_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Space comes an hour after the start: the wheel began long before what the tail brings."""
    rig = Rig(started=False)
    rig.send([b"a", b"b"], [20, 10])
    rig.landing.log.force()
    end = rig.landing.log.end_offset
    rig.clock.advance(3600)
    with monkeypatch.context() as patched:
        patched.setattr(type(rig.landing.log), "forced_offset", property(lambda log: 0))
        again = rig.kill()
        assert again.landing.log.end_offset == end
        again.advance(3)
        assert again.visible() == []
    again.advance(3)
    assert again.visible() == [b"b", b"a"]
    (later,) = again.send([b"c"], 50)
    again.advance(1)
    assert again.visible()[2:] == [later.payload]


def waiting_for_space(before: Sequence[int], after: Sequence[int]) -> tuple[Rig, list[Handle]]:
    """A start on a full disk: it cannot make true what was written and not forced, with delays `after`."""
    rig = Rig()
    sent = rig.send([b"%d" % delay for delay in before], before) if before else []
    rig.landing.log.force()
    rig.landing.automatic = False
    sent += rig.send([b"%d" % delay for delay in after], after)
    disk = rig.disk.crash(keep="everything")
    disk.faults.fail("write", error=errno.ENOSPC, times=None)
    again = rig.again(disk, rig.targets.killed())
    assert again.landing.log.waits_for_space
    again.advance(3)
    return again, sent


@pytest.mark.parametrize("next", ["nothing", "a send", "a later send", "a list", "a cancel"])
@pytest.mark.parametrize("before", [[], [40_000]], ids=["alone", "behind others"])
def test_what_waits_for_space_comes_when_there_is_some(before: list[int], next: str) -> None:
    rig, sent = waiting_for_space(before, [20_000, 80_000, 500_000])
    assert rig.cancel(sent[-1]).error is not None, "it is there, and there is no room for a note"
    rig.disk.faults.clear()
    expected = sorted([*before, 20_000, 80_000, 500_000])
    if "send" in next:
        delay = 1000 if next == "a send" else 90_000
        rig.send([b"%d" % delay], delay)
        expected = sorted([*expected, delay])
    elif next == "a list":
        rig.listed()
    elif next == "a cancel":
        assert rig.cancel(sent[-1]).known == "cancelled"
        del expected[-1]
    rig.advance(3)
    assert len(rig.listed().rows) + len(rig.visible()) == len(expected) == rig.queue.pending + len(rig.visible())
    rig.advance(600)
    assert rig.visible() == [b"%d" % delay for delay in expected]
    again = rig.power_cut()
    again.advance(600)
    assert again.visible() == [b"%d" % delay for delay in expected]


def test_what_waits_for_space_is_not_spilled_before_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be loaded from its bucket, and come once more from the arrivals."""
    rig, _ = waiting_for_space([], [20_000, 80_000])
    rig.disk.faults.clear()
    rig.send([b"90000"], 90_000)
    with monkeypatch.context() as patched:
        patched.setattr(BucketLoader, "recover", refused)
        rig.advance(15)
        listed = Answer()
        rig.queue.list(ListQuery(0, 1 << 62, None, 100, None, None), listed)
        rig.advance(5)
        rig.queue._dispatcher._run_maintenance()
        assert (listed.calls, rig.visible()) == (0, [])
    rig.advance(31)
    assert len(listed.known.rows) == 3
    rig.advance(100)
    assert rig.visible() == [b"20000", b"80000", b"90000"]


def test_what_waits_for_space_and_is_in_buckets_comes_once() -> None:
    """The log knows less of what is forced than the buckets: its mark is written now and then."""
    rig = Rig()
    sent = rig.send([b"20", b"300"], [20_000, 300_000])
    rig.listed()
    disk = rig.disk.crash(keep="everything")
    disk.faults.fail("write", error=errno.ENOSPC, times=None, path=ARRIVALS)
    again = rig.again(disk, rig.targets.killed())
    assert again.landing.log.end_offset < again.buckets.spilled_offset
    again.advance(3)
    assert again.describe(sent[1]).state == "pending"
    disk.faults.clear()
    again.advance(600)
    assert again.visible() == [b"20", b"300"]
    assert again.kill().visible() == [b"20", b"300"]


def test_while_it_waits_for_space_it_is_not_reported_as_unknown() -> None:
    rig, sent = waiting_for_space([], [20_000, 80_000])
    described = Answer()
    rig.queue.describe(ORDERS, sent[0].turn, described)
    for answer in (rig.cancel(sent[0]), rig.reschedule(sent[1], 90_000), described):
        assert isinstance(answer.error, DiskFull | Full)
    rig.disk.faults.clear()
    rig.advance(100)
    assert rig.visible() == [b"20000", b"80000"]


def refused(*_: object) -> None:
    raise OSError(errno.EIO, "a bad sector")


def test_arrivals_that_stopped_hold_back_unknown_messages_and_later_ones() -> None:
    rig = Rig()
    rig.send([b"a", b"b", b"c"], [100, 200, 300])
    rig.send([b"d"], 300, key=BILLS)
    rig.landing.automatic = False
    (unsure,) = rig.send([b"?"], 150)
    rig.landing.log.stop("its disk failed")
    rig.landing.force()
    rig.advance(5)
    assert (rig.visible(), rig.visible(BILLS)) == ([b"a"], [b"d"])
    again = rig.kill()
    again.advance(1)
    assert again.visible() in ([b"a", b"?", b"b", b"c"], [b"a", b"b", b"c"])
    assert unsure.payload == b"?"


def test_cancels_alone_do_not_fill_the_arrivals() -> None:
    """No message is stored after them, so nothing else says that they are there."""
    rig = Rig(segment_bytes=4096)
    sent = [each for n in range(10) for each in rig.send([b"%d" % n + bytes([64 + m]) for m in range(40)], 10**9)]
    rig.listed()
    for at in range(0, len(sent), 4):
        for handle in sent[at : at + 4]:
            rig.cancel(handle)
        rig.advance(30)
    rig.advance(130)
    log = rig.landing.log
    assert log.end_offset > 10 * 4096
    assert log.end_offset - log.first_offset < 3 * 4096
    assert log.end_offset == rig.buckets.spilled_offset
    again = rig.kill()
    assert again.queue.pending == 0 and not again.listed().rows


def test_no_more_than_a_bound_is_out_of_the_wheel_and_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher, "FIREABLE_ROWS_MAX", 8)
    rig = Rig()
    sent = rig.send([b"%02d" % number for number in range(50)], 10)
    lines, moving = rig.queue._target_queues, []
    put = lines.add_due

    def noted(*found: object) -> None:
        put(*found)  # type: ignore[arg-type]
        moving.append(lines.fireable_count)

    monkeypatch.setattr(lines, "add_due", noted)
    rig.advance(5)
    assert rig.visible() == [each.payload for each in sent]
    assert 0 < max(moving) <= 8


def test_an_effect_is_no_larger_than_its_partition_takes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    monkeypatch.setattr(rig.targets, "append_bytes_max", lambda key: 400)
    sent = rig.send([bytes([number]) * 100 for number in range(20)], 10)
    rig.advance(5)
    assert rig.visible() == [each.payload for each in sent]
    assert max(len(each.records) for each in rig.targets.target(ORDERS).appends) <= 3
