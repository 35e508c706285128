"""What a thread keeps: bounded, of its own arena, and not longer than it is needed."""

from journal.buffers.arena import PAGE_BYTES, Arena
from journal.buffers.pool import BYTES_MAX, LOOK_EVERY, RUN_BYTES_MAX, RUN_COUNT_MAX, Cache


def test_a_kept_place_is_given_again_and_only_for_its_size() -> None:
    arena = Arena()
    cache = Cache(arena)
    place = arena.take(1024)
    assert cache.keep(place)
    assert cache.take(2048) is None
    assert cache.take(1024) is place
    assert cache.take(1024) is None
    assert (cache.counts.allocated, cache.counts.hits) == (3, 1)


def test_the_count_of_one_size_and_the_bytes_of_all_are_bounded() -> None:
    arena = Arena()
    cache = Cache(arena)
    assert sum(cache.keep(arena.take(PAGE_BYTES)) for _ in range(100)) == RUN_COUNT_MAX
    while cache.keep(arena.take(RUN_BYTES_MAX)):
        pass
    assert cache.kept_bytes <= BYTES_MAX
    assert not Cache(arena).keep(arena.take(2 * RUN_BYTES_MAX))


def test_another_arenas_place_is_not_kept() -> None:
    assert not Cache(Arena()).keep(Arena().take(64))


def test_what_nobody_asked_for_goes_back() -> None:
    arena = Arena()
    cache = Cache(arena)
    for _ in range(10):
        cache.keep(arena.take(1024))
    for _ in range(2 * LOOK_EVERY):
        place = cache.take(1024)
        assert place is not None
        cache.keep(place)
    assert cache.kept_bytes == arena.used_bytes() == 1024, "one was in use at a time"


def test_draining_gives_everything_back() -> None:
    arena = Arena()
    cache = Cache(arena)
    for size in (16, 1024, PAGE_BYTES):
        cache.keep(arena.take(size))
    cache.drain()
    assert cache.kept_bytes == arena.used_bytes() == 0
