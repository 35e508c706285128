"""What a thread keeps: bounded, of its own arena, and not longer than it is needed."""

from journal.buffers.arena import PAGE_BYTES, Arena
from journal.buffers.pool import CACHE_BYTES_MAX, RUN_BYTES_MAX, RUN_COUNT_MAX, TRIM_INTERVAL, ThreadCache


def test_a_kept_place_is_given_again_and_only_for_its_size() -> None:
    arena = Arena()
    cache = ThreadCache(arena)
    place = arena.allocate(1024)
    assert cache.try_cache(place)
    assert cache.allocate(2048) is None
    assert cache.allocate(1024) is place
    assert cache.allocate(1024) is None
    assert (cache.counts.allocated, cache.counts.hits) == (3, 1)


def test_the_count_of_one_size_and_the_bytes_of_all_are_bounded() -> None:
    arena = Arena()
    cache = ThreadCache(arena)
    assert sum(cache.try_cache(arena.allocate(PAGE_BYTES)) for _ in range(100)) == RUN_COUNT_MAX
    while cache.try_cache(arena.allocate(RUN_BYTES_MAX)):
        pass
    assert cache.cached_bytes <= CACHE_BYTES_MAX
    assert not ThreadCache(arena).try_cache(arena.allocate(2 * RUN_BYTES_MAX))


def test_another_arenas_place_is_not_kept() -> None:
    assert not ThreadCache(Arena()).try_cache(Arena().allocate(64))


def test_what_nobody_asked_for_goes_back() -> None:
    arena = Arena()
    cache = ThreadCache(arena)
    for _ in range(10):
        cache.try_cache(arena.allocate(1024))
    for _ in range(2 * TRIM_INTERVAL):
        place = cache.allocate(1024)
        assert place is not None
        cache.try_cache(place)
    assert cache.cached_bytes == arena.used_bytes() == 1024, "one was in use at a time"


def test_draining_gives_everything_back() -> None:
    arena = Arena()
    cache = ThreadCache(arena)
    for size in (16, 1024, PAGE_BYTES):
        cache.try_cache(arena.allocate(size))
    cache.drain()
    assert cache.cached_bytes == arena.used_bytes() == 0
