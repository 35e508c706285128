"""Busy polling begins after short waits, yields the processor, ends at its limit; an idle program blocks at once."""

from __future__ import annotations

import pytest

from tfmq.busy_poll import (
    PAUSE_SECONDS,
    PAUSE_SECONDS_MAX,
    SECONDS,
    SECONDS_MAX,
    SHORT_WAITS_MIN,
    WORK_FACTOR,
    BusyPoll,
)

EVENT = [(7, 1)]


class Peer:
    """A poll object, a clock and a processor: each poll takes 1 us, and an event comes `delay` seconds after a wait."""

    def __init__(self) -> None:
        self.now = 0.0
        self.delay = SECONDS / 2
        self.work = 0.0
        """Seconds between the end of a wait and the next one."""
        self.slice = 0.0
        """Seconds that another program runs on the processor when it is yielded."""
        self.due = 0.0
        self.blocked: list[float] = []
        self.polled = self.yielded = 0

    def poll(self, timeout: float, most: int) -> list[tuple[int, int]]:
        assert most == 5
        self.now += 1e-6
        if timeout:
            self.blocked.append(timeout)
            self.now = max(self.now, self.due)
        self.polled += 1
        return EVENT if self.now >= self.due else []

    def yield_processor(self) -> None:
        self.yielded += 1
        self.now += self.slice

    def wait(self, busy: BusyPoll, timeout: float = 2.0) -> list[tuple[int, int]]:
        self.now += self.work
        self.due, self.blocked, self.polled, self.yielded = self.now + self.delay, [], 0, 0
        return busy.poll(self.poll, timeout, 5)


def after_short_waits() -> tuple[Peer, BusyPoll]:
    peer = Peer()
    busy = BusyPoll(lambda: peer.now, peer.yield_processor)
    for _ in range(SHORT_WAITS_MIN):
        assert peer.wait(busy) == EVENT
        assert (peer.blocked, peer.polled) == ([2.0], 1)
    return peer, busy


def test_after_some_short_waits_it_polls_without_blocking_and_yields_between_the_polls() -> None:
    peer, busy = after_short_waits()
    for _ in range(3):
        assert peer.wait(busy) == EVENT
        assert peer.blocked == []
        assert peer.yielded == peer.polled - 1 > 1


def test_a_long_wait_blocks_after_the_limit_and_the_next_ones_at_once() -> None:
    peer, busy = after_short_waits()
    peer.delay = 3 * SECONDS
    begun = peer.now
    assert peer.wait(busy) == EVENT
    assert peer.blocked == [2.0]
    assert peer.polled * 1e-6 < SECONDS + 3e-6 < peer.now - begun
    for _ in range(3):
        assert peer.wait(busy) == EVENT
        assert (peer.blocked, peer.polled) == ([2.0], 1)
    peer.delay = SECONDS / 2
    for _ in range(SHORT_WAITS_MIN):
        peer.wait(busy)
        assert peer.polled == 1


@pytest.mark.parametrize(
    ("work", "delay", "blocks"),
    [
        (SECONDS / 2, SECONDS * 1.4, False),
        (SECONDS / 2, SECONDS * 1.6, True),
        (SECONDS_MAX, SECONDS_MAX * 0.9, False),
        (SECONDS_MAX, SECONDS_MAX * 1.1, True),
    ],
)
def test_the_limit_is_in_proportion_to_the_work_before_the_wait(work: float, delay: float, blocks: bool) -> None:
    assert WORK_FACTOR == 3
    peer, busy = after_short_waits()
    peer.work, peer.delay = work, delay
    assert peer.wait(busy) == EVENT
    assert peer.blocked == ([2.0] if blocks else [])


def test_each_loss_of_the_processor_doubles_the_pause_until_it_was_kept_for_a_while() -> None:
    peer, busy = after_short_waits()

    def pause() -> float:
        peer.slice, peer.yielded = 0.004, 0
        while not peer.yielded:
            peer.wait(busy)
        peer.slice, lost_at = 0.0, peer.now
        peer.wait(busy)
        while not peer.yielded:
            peer.wait(busy)
        return peer.now - lost_at

    pauses = [pause() for _ in range(9)]
    assert pauses == pytest.approx([min(PAUSE_SECONDS * 2**n, PAUSE_SECONDS_MAX) for n in range(9)], abs=SECONDS * 9)
    kept_at = peer.now
    while peer.now < kept_at + PAUSE_SECONDS_MAX + SECONDS:
        peer.wait(busy)
    assert pause() == pytest.approx(PAUSE_SECONDS, abs=SECONDS * 9)


@pytest.mark.parametrize("delay", [SECONDS / 2, SECONDS * 10])
def test_while_another_program_uses_the_processor_the_polls_block(delay: float) -> None:
    peer, busy = after_short_waits()
    peer.slice = 0.004
    peer.delay = delay
    assert peer.wait(busy) == EVENT
    assert peer.yielded == 1
    peer.slice, peer.delay, begun = 0.0, SECONDS / 2, peer.now
    while peer.now < begun + PAUSE_SECONDS - SECONDS:
        peer.wait(busy)
        assert (peer.blocked, peer.yielded) == ([2.0], 0)
    for _ in range(SHORT_WAITS_MIN):
        peer.wait(busy)
    assert peer.yielded > 1, "after a pause it tries again"


def test_a_timeout_of_zero_polls_once() -> None:
    peer, busy = after_short_waits()
    assert peer.wait(busy, 0) == []
    assert (peer.blocked, peer.polled) == ([], 1)


def test_without_a_way_to_yield_the_processor_each_poll_blocks() -> None:
    peer = Peer()
    busy = BusyPoll(lambda: peer.now, None)
    for _ in range(2 * SHORT_WAITS_MIN):
        peer.wait(busy)
        assert (peer.blocked, peer.polled) == ([2.0], 1)
