"""When something is due."""

from itertools import pairwise

import pytest

from tests.delay.desk import BILLS, ORDERS, Desk
from tfmq.delay import firing


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


def test_while_dues_are_given_and_not_written_nothing_behind_them_fires() -> None:
    desk = Desk()
    desk.send([b"b"], 100)
    ticket = desk.queue.expect(desk.now_ms + 50)
    desk.advance(1)
    assert desk.visible() == []
    desk.queue.failed(ticket)
    desk.turn()
    assert desk.visible() == [b"b"]


def test_little_is_taken_out_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(firing, "POP_ROWS", 10)
    desk = Desk()
    desk.targets.stop(ORDERS)
    desk.send([b"%03d" % n for n in range(100)], 10)
    desk.clock.advance(0.01)
    taken = []
    for _ in range(5):
        desk.timers.tick(desk.clock.monotonic() - 1e-9)
        desk.queue._firing.look()
        taken.append(desk.queue._lines.queued)
    assert all(later - before <= 10 for before, later in pairwise(taken))
    desk.targets.resume(ORDERS)
    desk.queue.resumed(ORDERS)
    desk.advance(2)
    assert len(desk.visible()) == 100


def test_nothing_happens_while_nothing_waits_and_little_while_it_is_far() -> None:
    desk = Desk()
    assert desk.timers.next_due() is None
    desk.send([b"a"], 3_600_000)
    desk.advance(70)
    firm = desk.timers.next_firm()
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
    desk.queue._firing.wait_for_tail(0, 0)
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


def test_arrivals_that_stopped_hold_back_what_nobody_knows_of_and_what_is_behind_it() -> None:
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
