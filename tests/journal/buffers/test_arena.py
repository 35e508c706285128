"""Places of every kind, taken and given back at random: none overlap, everything comes back."""

import pytest

from journal.buffers.arena import CHUNK_BYTES, PAGE_BYTES, Allocation, Arena, rounded_size
from tests.scale import scaled, seeded


def overlap(one: Allocation, other: Allocation) -> bool:
    if one.view is not other.view:
        return False
    return one.position < other.position + other.size and other.position < one.position + one.size


def random_size(random) -> int:  # type: ignore[no-untyped-def]
    return rounded_size(
        random.choice((random.randint(1, 511), random.randint(512, 8000), 1 << random.randint(13, 23)))
    )


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
