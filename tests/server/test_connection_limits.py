"""The shared arena goes back to its start when it is not referenced; a tail costs what really arrived."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from journal.buffers import Pool
from tests.server.fakes import FakeReactor, Net
from tfmq.server.connection_limits import (
    EXPIRED_AT_ONCE,
    EXPIRED_PAUSE_SECONDS,
    PARTIAL_FRAME_BYTES_AT_ONCE,
    PARTIAL_FRAME_BYTES_MIN,
    PARTIAL_FRAME_GROWTH,
    RECEIVING_BYTES_PLENTIFUL,
    DeadlineQueue,
    PartialFrame,
    ReceiveArena,
    allocates_at_once,
    partial_frame_size,
)


def arena(pool: Pool) -> ReceiveArena:
    return ReceiveArena(pool, arena_bytes=1024, read_bytes=256)


def test_reads_of_a_turn_lie_one_after_the_other_and_the_next_turn_begins_anew() -> None:
    memory = arena(Pool())
    memory.read_buffer()[:3] = b"abc"
    memory.mark_filled(3)
    memory.read_buffer()[:3] = b"def"
    memory.mark_filled(3)
    assert memory.buffer.view[:6] == b"abcdef"
    memory.end_turn()
    memory.read_buffer()[:1] = b"x"
    assert memory.buffer.view[:3] == b"xbc"


def test_what_is_held_is_not_written_over() -> None:
    pool = Pool()
    memory = arena(pool)
    memory.read_buffer()[:3] = b"abc"
    memory.mark_filled(256)
    held = memory.buffer.retain()
    memory.end_turn()
    for _ in range(20):
        memory.read_buffer()[:] = b"x" * 256
        memory.mark_filled(256)
        memory.end_turn()
    assert held.view[:3] == b"abc"
    assert memory.buffer is not held
    held.release()
    memory.close()
    assert pool.stats().live_count == 0


def test_a_full_arena_without_references_starts_again() -> None:
    memory = arena(Pool())
    first = memory.buffer
    for _ in range(9):
        memory.read_buffer()
        memory.mark_filled(256)
    assert memory.buffer is first


@given(st.data())
def test_a_tail_gathers_its_frame_and_never_costs_much_more_than_arrived(data: st.DataObject) -> None:
    pool = Pool()
    needed = data.draw(st.integers(5, 200_000))
    frame = (bytes(range(251)) * (needed // 251 + 1))[:needed]
    arrived = data.draw(st.integers(4, needed - 1))
    tail = PartialFrame(pool, memoryview(frame)[:arrived], needed)
    while tail.filled < tail.needed:
        room = tail.buffer.view[tail.filled :]
        assert room
        assert tail.buffer.size <= max(PARTIAL_FRAME_BYTES_MIN, PARTIAL_FRAME_GROWTH * tail.filled)
        count = data.draw(st.integers(max(1, len(room) // 4), len(room)))
        room[:count] = frame[tail.filled : tail.filled + count]
        tail.mark_filled(count)
    assert tail.buffer.view == frame
    tail.buffer.release()
    assert pool.stats().live_count == 0


@pytest.mark.parametrize(
    ("arrived", "needed", "size"), [(4, 16 << 20, 4096), (4, 100, 100), (1 << 20, 3 << 20, 3 << 20)]
)
def test_an_announced_size_alone_costs_nothing(arrived: int, needed: int, size: int) -> None:
    assert partial_frame_size(arrived, needed) == size


def test_a_tail_that_gets_all_at_once_is_received_in_one_piece() -> None:
    pool = Pool()
    tail = PartialFrame(pool, memoryview(b"\0\3\xff\xff"), 262_147, at_once=True)
    assert tail.buffer.size == tail.needed and len(tail.buffer.view[tail.filled :]) == 262_143
    tail.mark_filled(262_143)
    assert tail.filled == tail.needed
    tail.buffer.release()


def test_many_announced_frames_use_up_what_is_plenty_and_then_cost_what_arrived() -> None:
    receiving = count = 0
    while allocates_at_once(receiving, 256 << 10):
        receiving += 256 << 10
        count += 1
    assert count == RECEIVING_BYTES_PLENTIFUL // (256 << 10)
    assert not allocates_at_once(0, PARTIAL_FRAME_BYTES_AT_ONCE + 1), "a large frame never gets it at once"


class Standing:
    """What all connections share; the rules for peers that stand still are tested with the transport that they
    end.
    """

    def __init__(self, since: float | None) -> None:
        self.since = since
        self.unsent_bytes = 0
        self.is_waiting = True
        self.flushed = 0
        self.ends: list[str] = []

    def flush(self) -> None:
        self.flushed += 1

    def cut_off(self, why: str) -> None:
        self.ends.append(why)
        self.since = None

    def stalled_since(self) -> float | None:
        return self.since


def test_who_has_something_to_send_is_flushed_at_the_turns_end() -> None:
    net = Net()
    one = Standing(None)
    net.traffic.flush_later(one)
    assert one.flushed == 0
    net.reactor.advance(0)
    assert one.flushed == 1


def test_no_task_is_watched_when_none_is_suspended() -> None:
    net = Net()
    one = Standing(0.0)
    net.traffic.monitor(one)
    net.reactor.pump([1] * 15)
    assert len(one.ends) == 1
    assert not net.reactor.getDelayedCalls()


def test_who_is_gone_is_not_looked_after() -> None:
    net = Net()
    one = Standing(0.0)
    net.traffic.monitor(one)
    net.traffic.remove(one)
    net.reactor.pump([1] * 15)
    assert one.ends == []


def test_closing_gives_the_memory_back() -> None:
    net = Net()
    net.traffic.close()
    assert net.pool.stats().live_count == 0


def queue_of_deadlines() -> tuple[FakeReactor, DeadlineQueue, list[str]]:
    reactor = FakeReactor()
    return reactor, DeadlineQueue(reactor.callLater, reactor.monotonic), []


def test_deadlines_expire_at_their_time_in_order_unless_they_are_cancelled() -> None:
    reactor, queue, ended = queue_of_deadlines()
    made = []
    for name in "abcd":
        made.append(queue.call_later(10.0, partial(ended.append, name)))
        reactor.advance(1)
    made[1].cancel()
    reactor.pump([1.0] * 5)
    assert ended == []
    reactor.pump([0.5] * 3)
    assert (ended, made[0].active(), made[1].active(), made[2].active()) == (["a"], False, False, True)
    reactor.pump([1.0] * 4)
    assert ended == ["a", "c", "d"]
    assert reactor.getDelayedCalls() == [], "no timer without a deadline"
    queue.call_later(10.0, partial(ended.append, "e"))
    reactor.pump([1.0] * 10)
    assert ended[-1] == "e"


def test_cancelled_deadlines_take_neither_a_timer_nor_memory() -> None:
    reactor, queue, ended = queue_of_deadlines()
    for _ in range(1000):
        queue.call_later(10.0, partial(ended.append, "never")).cancel()
        assert len(queue) <= 1 and len(reactor.getDelayedCalls()) == 1


def test_few_deadlines_expire_at_a_time_and_one_that_fails_keeps_none_from_it() -> None:
    reactor, queue, ended = queue_of_deadlines()
    queue.call_later(1.0, lambda: ended.append(str(1 // 0)))
    for number in range(3 * EXPIRED_AT_ONCE):
        queue.call_later(1.0, partial(ended.append, f"{number}"))
    reactor.advance(1.0)
    assert len(ended) == EXPIRED_AT_ONCE - 1
    reactor.pump([EXPIRED_PAUSE_SECONDS] * 3)
    assert ended == [f"{number}" for number in range(3 * EXPIRED_AT_ONCE)]
