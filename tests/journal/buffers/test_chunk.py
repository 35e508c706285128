"""The buddy tree against a plain list of pages: runs never overlap, neighbours join again."""

import pytest

from journal.buffers.arena import CHUNK_BYTES, PAGE_BYTES, TREE_DEPTH, MemoryChunk, page_leaf, run_position
from tests.scale import scaled, seeded

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


def test_a_position_knows_its_page() -> None:
    assert run_position(page_leaf(5 * PAGE_BYTES + 17)) == (5 * PAGE_BYTES, PAGE_BYTES)
