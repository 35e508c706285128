"""Places of every kind, taken and given back at random: none overlap, everything comes back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from journal.buffers.arena import (
    CHUNK_BYTES,
    PAGE_BYTES,
    RANGES_PERCENT,
    TREE_DEPTH,
    Allocation,
    Arena,
    ChunkLists,
    MemoryChunk,
    Slab,
    rounded_size,
    run_depth,
    run_position,
)
from tests.scale import scaled, seeded


def overlap(one: Allocation, other: Allocation) -> bool:
    if one.view is not other.view:
        return False
    return one.position < other.position + other.size and other.position < one.position + one.size


def random_size(random) -> int:  # type: ignore[no-untyped-def]
    return rounded_size(random.choice((random.randint(1, 511), random.randint(512, 8000), 1 << random.randint(13, 23))))


def test_places_never_overlap_and_all_come_back() -> None:
    random = seeded("arena")
    arena = Arena()
    out: list[Allocation] = []
    for _ in range(scaled(60_000)):
        if random.random() < 0.52 or not out:
            place = arena.allocate(random_size(random))
            assert not any(overlap(place, other) for other in out)
            assert place.position + place.size <= len(place.view)
            out.append(place)
        else:
            arena.free(out.pop(random.randrange(len(out))))
    assert arena.used_bytes() == sum(place.size for place in out)
    for place in out:
        arena.free(place)
    assert arena.used_bytes() == 0
    arena.trim()
    assert sum(arena.chunk_counts()) == arena.slab_count() == 0


def test_one_size_fills_its_slab_before_the_next_page() -> None:
    arena = Arena()
    places = [arena.allocate(1024) for _ in range(8)]
    assert arena.slab_count() == 1
    arena.allocate(1024)
    assert arena.slab_count() == 2
    assert len({place.position for place in places}) == 8


def test_the_last_empty_slab_of_a_size_stays_for_the_next_request() -> None:
    arena = Arena()
    places = [arena.allocate(4096) for _ in range(6)]
    for place in places:
        arena.free(place)
    assert arena.slab_count() == 1


@pytest.mark.parametrize("size", [64, 2048, PAGE_BYTES, 1 << 20])
def test_a_place_is_not_taken_back_twice(size: int) -> None:
    arena = Arena()
    place = arena.allocate(size)
    arena.allocate(size)
    arena.free(place)
    with pytest.raises(ValueError, match="not an allocated"):
        arena.free(place)


def test_more_than_a_chunk_is_mapped_alone() -> None:
    arena = Arena()
    place = arena.allocate(rounded_size(CHUNK_BYTES + 1))
    assert place.chunk is None
    assert arena.huge_bytes == CHUNK_BYTES + PAGE_BYTES
    arena.free(place)
    assert arena.huge_bytes == 0


# The buddy tree against a plain list of pages: runs never overlap, neighbours join again.

PAGES = 1 << TREE_DEPTH


def largest_aligned_run(free: list[bool]) -> int:
    """Brute force: the level of the largest aligned power-of-two run of free pages, TREE_DEPTH + 1 for
    none.
    """
    for depth in range(TREE_DEPTH + 1):
        step = PAGES >> depth
        if any(all(free[at : at + step]) for at in range(0, PAGES, step)):
            return depth
    return TREE_DEPTH + 1


def test_random_runs_agree_with_a_list_of_pages() -> None:
    random = seeded("chunk")
    chunk = MemoryChunk()
    free = [True] * PAGES
    out: list[int] = []
    for step in range(scaled(60_000)):
        if not out or random.random() < 0.55:
            depth = random.choice([TREE_DEPTH] * 4 + list(range(2, TREE_DEPTH)))
            possible = largest_aligned_run(free) <= depth if step % 20 == 0 else None
            node = chunk.allocate(depth)
            if possible is not None:
                assert bool(node) == possible
            if node:
                position, size = run_position(node)
                assert size == CHUNK_BYTES >> depth
                pages = range(position // PAGE_BYTES, (position + size) // PAGE_BYTES)
                assert all(free[page] for page in pages)
                for page in pages:
                    free[page] = False
                out.append(node)
        else:
            node = out.pop(random.randrange(len(out)))
            position, size = run_position(node)
            chunk.free(node)
            for page in range(position // PAGE_BYTES, (position + size) // PAGE_BYTES):
                free[page] = True
        assert chunk.used_bytes == free.count(False) * PAGE_BYTES
    for node in out:
        chunk.free(node)
    assert chunk.allocate(0) == 1, "every run given back, the whole chunk is one run again"


def test_a_full_chunk_gives_nothing() -> None:
    chunk = MemoryChunk()
    assert [chunk.allocate(1), chunk.allocate(1)] == [2, 3]
    assert chunk.allocate(TREE_DEPTH) == 0
    assert chunk.usage_percent == 100


@pytest.mark.parametrize("node", [0, 1, 2, 4096, -1])
def test_a_run_that_is_not_out_is_not_taken_back(node: int) -> None:
    chunk = MemoryChunk()
    chunk.allocate(2)
    with pytest.raises(ValueError, match="not an allocated run"):
        chunk.free(node)


def test_the_parent_of_two_taken_halves_is_not_a_run() -> None:
    chunk = MemoryChunk()
    chunk.allocate(1), chunk.allocate(1)
    with pytest.raises(ValueError, match="not an allocated run"):
        chunk.free(1)


def test_trimming_hands_back_free_pages_and_keeps_the_others() -> None:
    chunk = MemoryChunk()
    node = chunk.allocate(TREE_DEPTH)
    position, size = run_position(node)
    chunk.view[:] = b"x" * CHUNK_BYTES
    assert chunk.trim() == CHUNK_BYTES - PAGE_BYTES
    assert chunk.view[position : position + size] == b"x" * size
    assert bytes(chunk.view).count(b"x") == size


# One page cut into elements: each given out once, each taken back once.


def slab(element_bytes: int) -> Slab:
    return Slab(MemoryChunk(), 2048, 3 * PAGE_BYTES, element_bytes)


@pytest.mark.parametrize("element_bytes", [16, 48, 496, 512, 4096])
def test_a_slab_gives_every_element_of_its_page_once(element_bytes: int) -> None:
    page = slab(element_bytes)
    positions = []
    while not page.full:
        positions.append(page.allocate())
    assert len(set(positions)) == len(positions) == PAGE_BYTES // element_bytes
    assert min(positions) >= page.position
    assert max(positions) + element_bytes <= page.position + PAGE_BYTES


def test_what_was_given_out_and_taken_back_at_random_agrees_with_a_set() -> None:
    random = seeded("slab")
    page = slab(112)
    out: set[int] = set()
    for _ in range(scaled(60_000)):
        if not page.full and (not out or random.random() < 0.5):
            position = page.allocate()
            assert position not in out
            out.add(position)
        elif out:
            position = random.choice(sorted(out))
            out.remove(position)
            page.free(position)
        assert page.used_count == len(out)
        assert page.empty == (not out)


@pytest.mark.parametrize("wrong", [0, 8, -112, PAGE_BYTES])
def test_an_element_that_is_not_out_is_not_taken_back(wrong: int) -> None:
    page = slab(112)
    with pytest.raises(ValueError, match="not an allocated element"):
        page.free(page.position + wrong)


# What a request is rounded to.


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


# Chunks move between the lists of their usage, and the empty ones go.


def test_a_chunk_moves_up_as_it_fills_and_goes_when_it_empties() -> None:
    lists = ChunkLists()
    taken = [lists.allocate(2) for _ in range(3)]
    assert lists.counts() == (0, 0, 0, 1, 0, 0), "three quarters"
    taken.append(lists.allocate(2))
    assert lists.counts() == (0, 0, 0, 0, 0, 1), "full"
    for chunk, node in taken:
        lists.free(chunk, node)
    assert len(lists) == 0


def test_a_chunk_that_never_left_the_first_list_stays() -> None:
    lists = ChunkLists()
    lists.free(*lists.allocate(TREE_DEPTH))
    assert lists.counts() == (1, 0, 0, 0, 0, 0)
    assert lists.drop_empty() == 1
    assert len(lists) == 0


def test_every_chunk_is_always_in_a_list_whose_range_holds_its_usage() -> None:
    random = seeded("usage")
    lists = ChunkLists()
    out = []
    for _ in range(scaled(60_000)):
        if random.random() < (0.6 if len(out) < 60 else 0.4) or not out:
            out.append(lists.allocate(random.randint(1, TREE_DEPTH)))
        else:
            lists.free(*out.pop(random.randrange(len(out))))
        for chunk, index in lists._list_index.items():
            least, limit = RANGES_PERCENT[index]
            assert least <= chunk.usage_percent < limit
    for place in out:
        lists.free(*place)
    assert sum(lists.counts()) == lists.counts()[0]
