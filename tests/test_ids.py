"""Ids: what is packed comes apart again, what is printed is read again, leases share nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfmq import ids

producers = st.integers(1, ids.PRODUCER_MAX)
sequences = st.integers(0, ids.SEQUENCE_MAX)


@given(producers, sequences)
def test_an_id_comes_apart_as_it_was_packed(producer_id: int, sequence: int) -> None:
    record_id = ids.pack_id(producer_id, sequence)
    assert 0 < record_id < 1 << 64
    assert (ids.producer_of(record_id), ids.sequence_of(record_id)) == (producer_id, sequence)


@pytest.mark.parametrize(("producer_id", "sequence"), [(0, 0), (-1, 0), (1 << 40, 0), (1, -1), (1, 1 << 24)])
def test_numbers_that_do_not_fit_are_refused(producer_id: int, sequence: int) -> None:
    with pytest.raises(ValueError, match="lies in"):
        ids.pack_id(producer_id, sequence)


@given(st.integers(0, (1 << 64) - 1), st.integers(0, (1 << 64) - 1))
def test_printed_ids_sort_as_the_numbers_do(one: int, other: int) -> None:
    assert (ids.format_id(one) < ids.format_id(other)) == (one < other)


@given(st.integers(1, 1000), st.lists(st.integers(1, 50), max_size=50))
def test_what_is_taken_from_a_lease_is_never_taken_twice(count: int, wanted: list[int]) -> None:
    rest = ids.IdRange(100, count)
    seen: list[int] = []
    for number in wanted:
        taken, rest = rest.split(number)
        seen += range(taken.first, taken.first + taken.count)
    seen += range(rest.first, rest.first + rest.count)
    assert seen == list(range(100, 100 + count))


def test_a_producer_sequence_knows_how_many_it_can_still_number() -> None:
    assert ids.remaining_sequences(0) == 1 << 24
    assert ids.remaining_sequences(ids.SEQUENCE_MAX) == 1
