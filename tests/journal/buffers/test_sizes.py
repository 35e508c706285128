"""What a request is rounded to."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from journal.buffers.arena import CHUNK_BYTES, PAGE_BYTES, TREE_DEPTH, rounded_size, run_depth


@pytest.mark.parametrize(
    ("size", "whole"),
    [
        (0, 16),
        (1, 16),
        (16, 16),
        (17, 32),
        (496, 496),
        (497, 512),
        (512, 512),
        (513, 1024),
        (4097, 8192),
        (8193, 16384),
        (CHUNK_BYTES, CHUNK_BYTES),
        (CHUNK_BYTES + 1, CHUNK_BYTES + PAGE_BYTES),
    ],
)
def test_a_request_is_rounded_to_its_class(size: int, whole: int) -> None:
    assert rounded_size(size) == whole


@given(st.integers(1, 3 * CHUNK_BYTES))
def test_rounding_holds_the_request_wastes_less_than_half_and_is_stable(size: int) -> None:
    whole = rounded_size(size)
    assert size <= whole < max(2 * size, 17)
    assert rounded_size(whole) == whole


def test_a_page_is_a_leaf_and_a_chunk_the_root() -> None:
    assert run_depth(PAGE_BYTES) == TREE_DEPTH
    assert run_depth(CHUNK_BYTES) == 0
