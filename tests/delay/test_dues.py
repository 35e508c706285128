"""Effective due times: never before the next ms, never behind the end of time, and by columns what it is one by one."""

from array import array
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.delay.steps import steps
from tfmq.delay.due_time import (
    DUE_MAX,
    NO_DUE_TIMES,
    RELATIVE,
    DueTimes,
    decode_words,
    due_times_of,
    effective_due_times,
    encode_words,
)
from tfmq.errors import BadRequest

NOW = 1_700_000_000_000

near = st.integers(0, 1 << 20)
any_word = st.integers(0, DUE_MAX)
delays = st.one_of(near, any_word).map(RELATIVE.__or__)
times = st.one_of(near.map((NOW - 1000).__add__), near, any_word)
batches = st.one_of(*(st.lists(each, min_size=1, max_size=40) for each in (delays, times, delays | times)))
differences = st.one_of(st.just(0), st.integers(-(10**7), 10**7), st.integers(-NOW, 0))


def wire(*asked: int) -> bytes:
    return b"".join(word.to_bytes(8, "big") for word in asked)


def one_by_one(asked: list[int], now_ms: int, ahead_ms: int) -> list[int]:
    """What the module does, message by message and in plain words."""
    found = []
    for word in asked:
        due = now_ms + word - RELATIVE if word >= RELATIVE else word + ahead_ms
        found.append(min(max(due, now_ms + 1), DUE_MAX))
    return found


@given(batches, differences)
def test_columns_give_what_single_messages_would_get(asked: list[int], ahead_ms: int) -> None:
    found = effective_due_times(wire(*asked), len(asked), NOW, ahead_ms)
    assert list(found.times) == one_by_one(asked, NOW, ahead_ms)
    assert list(found.absolute) == [word < RELATIVE for word in asked]
    assert (found.low, found.high) == (min(found.times), max(found.times))


@given(delays | times, st.integers(1, 300), differences)
def test_a_batch_with_one_due_time_has_it_for_all(word: int, count: int, ahead_ms: int) -> None:
    found = effective_due_times(wire(word) * count, count, NOW, ahead_ms)
    assert list(found.times) == one_by_one([word], NOW, ahead_ms) * count
    assert found.absolute == bytes((word < RELATIVE,)) * count
    assert found.low == found.high == found.times[0]


@pytest.mark.parametrize(
    ("word", "due"),
    [
        (RELATIVE, NOW + 1),  # no delay
        (RELATIVE | 1, NOW + 1),
        (RELATIVE | 2, NOW + 2),
        (RELATIVE | 315_576_000_000, NOW + 315_576_000_000),  # ten years
        (RELATIVE | DUE_MAX, DUE_MAX),
        (0, NOW + 1),  # long ago
        (NOW, NOW + 1),
        (NOW + 1, NOW + 1),
        (NOW + 2, NOW + 2),
        (DUE_MAX, DUE_MAX),
    ],
)
def test_bounds(word: int, due: int) -> None:
    """Also beside another message, where columns are used."""
    assert list(effective_due_times(wire(word), 1, NOW, 0).times) == [due]
    assert effective_due_times(wire(word, RELATIVE | 5), 2, NOW, 0).times[0] == due
    assert effective_due_times(wire(word, NOW + 5), 2, NOW, 0).times[0] == due


def test_a_time_is_one_of_the_wall_clock_and_a_delay_is_not() -> None:
    asked = wire(NOW + 500, RELATIVE | 500)
    ahead = effective_due_times(asked, 2, NOW, 3_600_000)  # the wall clock was set back by an hour
    assert list(ahead.times) == [NOW + 3_600_500, NOW + 500]
    behind = effective_due_times(asked, 2, NOW, -300)  # or forward
    assert list(behind.times) == [NOW + 200, NOW + 500]
    assert list(effective_due_times(asked, 2, NOW, -3_600_000).times) == [NOW + 1, NOW + 500], (
        "it is over there"
    )


@pytest.mark.parametrize(("size", "count"), [(0, 0), (0, 1), (7, 1), (9, 1), (16, 1), (8, 2), (800, 99)])
def test_one_word_for_each_message_or_none_is_taken(size: int, count: int) -> None:
    with pytest.raises(BadRequest, match=f"{size} bytes of due times for {count} messages"):
        effective_due_times(bytes(size), count, NOW, 0)


@pytest.mark.parametrize(
    "word",
    [
        lambda n: RELATIVE | 60_000,
        lambda n: NOW + 86_400_000 + n,
        lambda n: RELATIVE | n,
        lambda n: NOW - 50 + n,
    ],
    ids=["one delay for all", "times far ahead", "a delay for each", "times of which some are over"],
)
def test_no_step_of_python_is_made_for_a_message(word: Callable[[int], int]) -> None:
    few, many = (wire(*map(word, range(count))) for count in (100, 5_000))
    taken = steps(lambda: effective_due_times(few, 100, NOW, 0))
    assert steps(lambda: effective_due_times(many, 5_000, NOW, 0)) == taken < 40
    for ahead in (9, -9):
        taken = steps(lambda ahead=ahead: effective_due_times(few, 100, NOW, ahead))  # type: ignore[misc]
        assert steps(lambda ahead=ahead: effective_due_times(many, 5_000, NOW, ahead)) == taken < 40  # type: ignore[misc]


def test_a_column_is_big_endian_and_comes_back() -> None:
    data = bytes(range(16))
    column = decode_words(data)
    assert list(column) == [0x0001020304050607, 0x08090A0B0C0D0E0F]
    assert encode_words(column) == data
    assert list(column) == [0x0001020304050607, 0x08090A0B0C0D0E0F]  # as it was


@given(st.lists(any_word, min_size=1, max_size=9), st.data())
def test_a_part_is_what_the_whole_says_of_it(asked: list[int], data: st.DataObject) -> None:
    whole = due_times_of(array("Q", asked), bytes(number % 2 for number in range(len(asked))))
    start = data.draw(st.integers(0, len(asked) - 1))
    end = data.draw(st.integers(start + 1, len(asked)))
    part = whole.section(start, end)
    assert list(part.times) == asked[start:end]
    assert part == due_times_of(part.times, whole.absolute[start:end])


def test_nobody_is_due_among_nobody() -> None:
    assert DueTimes(array("Q"), b"", 0, 0) == NO_DUE_TIMES
    assert NO_DUE_TIMES.section(0, 0) is NO_DUE_TIMES
