"""Where a message waits now that was given another turn: every step of its way is known, the first answer stays."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.delay.steps import steps
from tests.scale import scaled, seeded
from tfmq.delay.arrivals.state import CHAIN_STEPS_MIN, RECENT_MIN, SPAN_BITS, RescheduledMessages

SPAN = 1 << SPAN_BITS

turns = st.tuples(st.integers(0, 5 * SPAN), st.integers(0, 1 << 40))
moves = st.dictionaries(turns, turns)


def of(some: dict[tuple[int, int], tuple[int, int]]) -> RescheduledMessages:
    rescheduled = RescheduledMessages()
    for old, new in some.items():
        rescheduled.add(*old, new)
    return rescheduled


def by_span(some: dict[tuple[int, int], tuple[int, int]]) -> dict[tuple[int, int], tuple[int, int]]:
    """A number stands once in its span; the first answer stays."""
    found: dict[tuple[int, int], tuple[int, int]] = {}
    for (due, number), new in some.items():
        found.setdefault((due >> SPAN_BITS, number), new)
    return found


@given(moves, turns)
def test_each_has_its_new_turn_and_no_other_has_one(
    some: dict[tuple[int, int], tuple[int, int]], other: tuple[int, int]
) -> None:
    rescheduled, known = of(some), by_span(some)
    assert rescheduled.count == len(known)
    for due, number in [*some, other]:
        assert rescheduled.get(due, number) == known.get((due >> SPAN_BITS, number))


def test_a_repeat_changes_nothing() -> None:
    rescheduled = RescheduledMessages()
    assert rescheduled.add(5, 7, (50, 70)) and not rescheduled.add(5, 7, (60, 80))
    assert rescheduled.get(5, 7) == (50, 70) and rescheduled.count == 1


def test_an_old_handle_leads_to_where_the_message_is_now() -> None:
    rescheduled = of({(5, 7): (SPAN, 70), (SPAN, 70): (9, 71), (100, 8): (200, 9)})
    assert rescheduled.latest(5, 7) == rescheduled.latest(SPAN, 70) == rescheduled.latest(9, 71) == (9, 71)
    assert rescheduled.latest(100, 8) == (200, 9)


def test_many_in_one_span_are_sorted_in_and_still_found() -> None:
    generator = seeded("rescheduled")
    numbers = generator.sample(range(1 << 40), RECENT_MIN * 4 + scaled(50_000))
    rescheduled = of({(SPAN, number): (number, number + 1) for number in numbers})
    assert rescheduled.count == len(numbers)
    assert all(rescheduled.get(SPAN, number) == (number, number + 1) for number in numbers)


@given(moves)
def test_a_dump_says_all(some: dict[tuple[int, int], tuple[int, int]]) -> None:
    rescheduled, again = of(some), of({(1, 1): (2, 2)})
    again.load(rescheduled.dump())
    assert again.count == rescheduled.count
    assert all(again.get(*old) == rescheduled.get(*old) for old in some)
    assert again.dump() == rescheduled.dump()


def test_spans_are_forgotten_one_by_one() -> None:
    rescheduled = of({(10, 1): (2 * SPAN, 5), (SPAN, 2): (2 * SPAN, 6), (2 * SPAN, 5): (3 * SPAN, 7)})
    assert rescheduled.expire_spans([0, 7 * SPAN]) == 1
    assert rescheduled.count == 2
    assert rescheduled.get(10, 1) is None and rescheduled.latest(2 * SPAN, 5) == (3 * SPAN, 7)


def test_a_dump_that_was_cut_is_refused() -> None:
    data = of({(10, 1): (11, 2), (SPAN, 3): (SPAN, 4)}).dump()
    for size in set(range(1, len(data))) - {40}:  # behind the first span's columns a shorter dump ends
        with pytest.raises(ValueError, match="rescheduled"):
            RescheduledMessages().load(data[:size])
    with pytest.raises(ValueError, match="span 0"):
        RescheduledMessages().load(data[:40] * 2)


def test_a_span_is_over_when_no_handle_of_it_leads_beyond() -> None:
    rescheduled = of({(SPAN, 1): (2 * SPAN, 5), (2 * SPAN, 5): (50 * SPAN, 6), (3 * SPAN, 2): (4 * SPAN, 7)})
    starts = [0, SPAN, 2 * SPAN, 3 * SPAN]
    assert rescheduled.expirable_spans(starts, 10 * SPAN) == [0, 3 * SPAN]
    assert rescheduled.expirable_spans(starts, 51 * SPAN) == starts
    assert rescheduled.expirable_spans(starts[:2], 51 * SPAN) == [0]  # the step in between is still known
    assert rescheduled.expirable_spans(starts, 5 * SPAN - 1) == [0]
    again = RescheduledMessages()
    again.load(rescheduled.dump())
    assert again.expirable_spans(starts, 10 * SPAN) == [0, 3 * SPAN]


def moved_on(count: int) -> RescheduledMessages:
    """One message that was moved by a minute again and again, from the turn (0, 0) on."""
    return of({(n * SPAN, n): ((n + 1) * SPAN, n + 1) for n in range(count)})


def test_what_is_moved_on_again_and_again_is_forgotten_in_one_pass() -> None:
    counts = []
    for count in (200, 2000):
        rescheduled, starts = moved_on(count), [n * SPAN for n in range(count)]
        assert rescheduled.expirable_spans(starts, count * SPAN) == []
        counts.append(steps(lambda: rescheduled.expirable_spans(starts, count * SPAN)))  # noqa: B023
        assert rescheduled.expirable_spans(starts, (count + 1) * SPAN) == starts
    assert counts[1] < 12 * counts[0]


def test_a_long_way_is_walked_once() -> None:
    rescheduled = moved_on(5000)
    assert rescheduled.latest(0, 0) == (5000 * SPAN, 5000)
    assert steps(lambda: rescheduled.latest(0, 0)) < 30
    for n in range(5000, 5000 + 3 * CHAIN_STEPS_MIN):
        rescheduled.add(n * SPAN, n, ((n + 1) * SPAN, n + 1))
        assert rescheduled.latest(0, 0) == ((n + 1) * SPAN, n + 1)
        assert steps(lambda: rescheduled.latest(7 * SPAN, 7)) < 12 * CHAIN_STEPS_MIN
    rescheduled.expire_spans([1000 * SPAN])
    assert rescheduled.latest(0, 0) == (1000 * SPAN, 1000), "nothing leads over what is forgotten"


def test_ways_that_are_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tfmq.delay.arrivals.state.SHORTCUTS_MAX", 10)
    rescheduled = moved_on(40 * CHAIN_STEPS_MIN)
    for n in range(0, 20 * CHAIN_STEPS_MIN, 7):
        assert rescheduled.latest(n * SPAN, n) == (40 * CHAIN_STEPS_MIN * SPAN, 40 * CHAIN_STEPS_MIN)
        assert len(rescheduled._shortcuts) <= 10
