"""One page cut into elements: each given out once, each taken back once."""

import pytest

from journal.buffers.arena import PAGE_BYTES, MemoryChunk, Slab
from tests.scale import scaled, seeded


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
