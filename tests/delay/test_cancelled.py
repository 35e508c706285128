"""Cancelled messages are found, counted, forgotten by their spans, and come back from a dump."""

import sys
import tracemalloc
from threading import Thread

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.delay.steps import steps
from tests.scale import scaled, seeded
from tfmq.delay.arrivals.state import RECENT_MIN, SPAN_BITS, SPANS_CHECKED_MAX, CancelledMessages

SPAN = 1 << SPAN_BITS

turns = st.tuples(st.integers(0, 5 * SPAN), st.integers(0, 1 << 48))


def of(*some: tuple[int, int]) -> CancelledMessages:
    cancelled = CancelledMessages()
    for turn in some:
        cancelled.add(*turn)
    return cancelled


@given(st.lists(turns), st.lists(turns))
def test_it_holds_what_was_added_and_nothing_else(
    some: list[tuple[int, int]], others: list[tuple[int, int]]
) -> None:
    cancelled = of(*some)
    spans = {(due >> SPAN_BITS, number) for due, number in some}
    assert cancelled.count == len(spans)
    for due, number in [*some, *others]:
        assert ((due, number) in cancelled) == ((due >> SPAN_BITS, number) in spans)


@given(st.lists(turns), turns, turns)
def test_a_quick_no_is_never_wrong(
    some: list[tuple[int, int]], one: tuple[int, int], other: tuple[int, int]
) -> None:
    low, high = sorted((one[0], other[0]))
    found = of(*some).any_between(low, high)
    assert found == any(low >> SPAN_BITS <= due >> SPAN_BITS <= high >> SPAN_BITS for due, _ in some)


@pytest.mark.parametrize(
    "stretch", [0, SPANS_CHECKED_MAX // 2 * SPAN, 1 << 40], ids=["a moment", "short", "long"]
)
def test_a_quick_answer_costs_the_same_however_many_are_cancelled(stretch: int) -> None:
    few, many = (of(*((n * SPAN, n) for n in range(count))) for count in (1000, 20_000))
    high = 1 << 50
    counts = [steps(lambda each=each: each.any_between(high - stretch, high)) for each in (few, many)]  # type: ignore[misc]
    assert counts[0] == counts[1] < 4 * SPANS_CHECKED_MAX


@pytest.mark.long
def test_what_lies_far_apart_takes_no_more_memory_than_is_said() -> None:
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        far = of(*((n * SPAN, n) for n in range(20_000)))
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (after - before) / 2 < far.size_bytes < 2 * (after - before)


def test_adding_twice_is_told() -> None:
    cancelled = CancelledMessages()
    assert cancelled.add(5, 7) and not cancelled.add(5, 7)
    assert cancelled.count == 1


def test_many_in_one_span_are_sorted_in_and_still_found() -> None:
    generator = seeded("cancelled")
    numbers = generator.sample(range(1 << 40), RECENT_MIN * 4 + scaled(100_000))
    cancelled = of(*((SPAN, number) for number in numbers))
    assert cancelled.count == len(numbers)
    assert all((SPAN + 1, number) in cancelled for number in numbers)
    known = set(numbers)
    assert not any((SPAN, number + 1) in cancelled for number in numbers if number + 1 not in known)
    assert not any(cancelled.add(SPAN, number) for number in numbers[:1000])


def test_spans_are_forgotten_one_by_one() -> None:
    cancelled = of((10, 1), (SPAN + 10, 2), (SPAN + 11, 3), (9 * SPAN, 4))
    assert sorted(cancelled.spans_ended_by(10 * SPAN)) == [0, SPAN, 9 * SPAN]
    assert sorted(cancelled.spans_ended_by(10 * SPAN - 1)) == [0, SPAN]
    assert cancelled.expire_spans([SPAN, 3 * SPAN]) == 2
    assert cancelled.count == 2
    assert (SPAN + 10, 2) not in cancelled and (10, 1) in cancelled and (9 * SPAN, 4) in cancelled
    assert not cancelled.any_between(SPAN, 9 * SPAN - 1)


@given(st.lists(turns))
def test_a_dump_says_all_whatever_the_order_in_which_they_came(some: list[tuple[int, int]]) -> None:
    cancelled, again = of(*some), CancelledMessages()
    again.add(1, 1)
    again.load(cancelled.dump())
    assert again.count == cancelled.count
    assert all(turn in again for turn in some)
    assert again.dump() == cancelled.dump() == of(*reversed(some)).dump()


def test_an_empty_dump_is_empty() -> None:
    cancelled = of((1, 2))
    cancelled.load(b"")
    assert cancelled.count == 0 and cancelled.dump() == b""


def test_a_dump_that_was_cut_is_refused() -> None:
    data = of((10, 1), (10, 2), (SPAN, 3)).dump()
    for size in set(range(1, len(data))) - {32}:  # behind the first span's numbers a shorter dump ends
        with pytest.raises(ValueError, match="cancelled"):
            CancelledMessages().load(data[:size])
    with pytest.raises(ValueError, match="span 0"):
        CancelledMessages().load(data[:32] * 2)


def test_another_thread_never_misses_one_that_is_there() -> None:
    """A worker asks while the owner adds, and sorts in."""
    cancelled = CancelledMessages()
    cancelled.add(0, 0)
    newest, missed = [0], list[int]()

    def ask() -> None:
        while newest[-1] >= 0:
            missed.extend(n for n in (0, newest[-1] // 2, newest[-1]) if n >= 0 and (0, n) not in cancelled)
            cancelled.any_between(0, 1 << 40)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread = Thread(target=ask)
    try:
        thread.start()
        for number in range(1, scaled(100_000) + 5_000):
            cancelled.add(0, number)
            newest[0] = number
            cancelled.add((1 + number % 64) << 20, number)
    finally:
        newest.append(-1)
        thread.join(60)
        sys.setswitchinterval(interval)
    assert missed == []
