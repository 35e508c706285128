"""Holds: the memory stays until the last one ends, and mistakes say so."""

import pytest

from journal.buffers import Pool, Released


def test_a_buffer_has_exactly_the_bytes_that_were_asked_for() -> None:
    buffer = Pool().allocate(1000)
    buffer.view[:] = b"a" * 1000
    assert (len(buffer.view), buffer.size, buffer.capacity) == (1000, 1000, 1024)


def test_the_memory_stays_until_the_last_hold_ends() -> None:
    pool = Pool()
    buffer = pool.allocate(100).retain().retain()
    buffer.release()
    buffer.release()
    assert buffer.holds == 1
    assert pool.stats().live_count == 1
    buffer.release()
    assert pool.stats().live_count == 0


def test_use_after_the_last_release_says_so() -> None:
    buffer = Pool().allocate(100)
    view = buffer.view
    buffer.release()
    for mistake in (buffer.release, buffer.retain, lambda: buffer.view):
        with pytest.raises(Released, match="100 bytes"):
            mistake()
    with pytest.raises(ValueError, match="released memoryview"):
        view[0]


def test_an_array_over_the_view_does_not_keep_the_memory_back() -> None:
    pool = Pool()
    buffer = pool.allocate(64)
    over_it = bytearray().join([buffer.view]), memoryview(buffer.view)
    buffer.release()
    assert pool.stats().live_count == 0
    assert len(over_it) == 2


def test_a_traced_buffer_knows_who_asked_for_it() -> None:
    buffer = Pool(debug=True).allocate(10)
    assert buffer.allocated_at.startswith(__file__)
    buffer.release()
