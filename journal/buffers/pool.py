"""The pool: `allocate` a buffer of any size, `release` it, see what is out.

A thread allocates from one arena, chosen in turn, behind a cache of its own; a buffer of another arena goes
back to it at once. `trim` returns to the system whatever is only kept for later.
"""

from __future__ import annotations

import itertools
import logging
import threading
import weakref
from collections import deque
from typing import NamedTuple

from journal.buffers.arena import Arena, Place
from journal.buffers.buffer import Buffer, TracedBuffer
from journal.buffers.cache import Cache, Counts
from journal.buffers.sizes import rounded

ARENA_COUNT = 2
"""Arenas of a pool: the thread that serves and one for all the others; more only pay with many busy
threads.
"""

logger = logging.getLogger("journal.buffers")


class PoolStats(NamedTuple):
    """What a pool has out, and what it keeps. Bytes are rounded sizes, as they are taken from chunks."""

    live_count: int
    """Buffers that nobody released yet."""
    live_bytes: int
    cached_bytes: int
    huge_bytes: int
    chunk_counts: tuple[int, ...]
    """Chunks of 16 MiB by usage, the emptiest list first."""
    slab_count: int
    allocated_count: int
    cache_hit_count: int
    forgotten_count: int
    """Buffers that were dropped without a release (counted in debug mode only)."""


class Leak(NamedTuple):
    """A buffer that was not released: where it was allocated, its size, and how many like it."""

    place: str
    size_bytes: int
    buffer_count: int


class _Local(threading.local):
    cache: Cache | None = None


class Pool:
    """Buffers out of arenas; safe for threads. With `debug` each remembers its allocation's place, at a
    cost.
    """

    def __init__(self, arena_count: int = ARENA_COUNT, *, debug: bool = False) -> None:
        self._arenas = [Arena() for _ in range(arena_count)]
        self._next_arena = itertools.cycle(self._arenas)
        self._lock = threading.Lock()
        self._local = _Local()
        self._caches: list[Cache] = []
        self._ended = Counts()
        self._debug = debug
        self._traced: weakref.WeakSet[TracedBuffer] = weakref.WeakSet()
        self._forgotten: deque[tuple[str, int]] = deque()

    def allocate(self, size: int) -> Buffer:
        """A buffer of exactly `size` bytes, held once. Raises ValueError below 0, MemoryError without
        memory.
        """
        if size < 0:
            raise ValueError(f"a buffer cannot have {size} bytes")
        cache = self._local.cache or self._new_cache()
        whole = rounded(size)
        place = cache.take(whole) or cache.arena.take(whole)
        if self._debug:
            return self._trace(place, size)
        return Buffer(place, size, self._give)

    def stats(self) -> PoolStats:
        """What is out and what is kept, now; other threads may be changing it meanwhile."""
        with self._lock:
            self._bury_ended_threads()
            total = Counts()
            total.add(self._ended)
            for cache in self._caches:
                total.add(cache.counts)
            cached_bytes = sum(cache.kept_bytes for cache in self._caches)
        return PoolStats(
            live_count=total.allocated - total.released,
            live_bytes=total.allocated_bytes - total.released_bytes,
            cached_bytes=cached_bytes,
            huge_bytes=sum(arena.huge_bytes for arena in self._arenas),
            chunk_counts=tuple(map(sum, zip(*(a.chunk_counts() for a in self._arenas), strict=True))),
            slab_count=sum(arena.slab_count() for arena in self._arenas),
            allocated_count=total.allocated,
            cache_hit_count=total.hits,
            forgotten_count=len(self._forgotten),
        )

    def leaks(self) -> list[Leak]:
        """Buffers held or forgotten, by place of allocation, the most bytes first. Empty without `debug`."""
        found = [(buffer.allocated_at, buffer.size) for buffer in list(self._traced) if buffer.holds]
        counted: dict[str, list[int]] = {}
        for place, size in [*found, *self._forgotten]:
            entry = counted.setdefault(place, [0, 0])
            entry[0] += size
            entry[1] += 1
        ordered = sorted(counted.items(), key=lambda item: -item[1][0])
        return [Leak(place, size, count) for place, (size, count) in ordered]

    def trim(self) -> int:
        """Give the system back what is only kept: this thread's cache, empty slabs and chunks, free pages.

        Returns the bytes handed back (address space of whole chunks, memory of pages).
        """
        if self._local.cache:
            self._local.cache.drain()
        with self._lock:
            self._bury_ended_threads()
        return sum(arena.trim() for arena in self._arenas)

    def _give(self, place: Place) -> None:
        cache = self._local.cache or self._new_cache()
        counts = cache.counts
        counts.released += 1
        counts.released_bytes += place.size
        if not cache.keep(place):
            place.arena.give(place)

    def _new_cache(self) -> Cache:
        with self._lock:
            self._bury_ended_threads()
            cache = Cache(next(self._next_arena))
            self._caches.append(cache)
        self._local.cache = cache
        return cache

    def _bury_ended_threads(self) -> None:
        for cache in [cache for cache in self._caches if not cache.thread.is_alive()]:
            self._caches.remove(cache)
            self._ended.add(cache.counts)
            cache.drain()

    def _trace(self, place: Place, size: int) -> Buffer:
        buffer = TracedBuffer(place, size, self._give, self._forget)
        self._traced.add(buffer)
        return buffer

    def _forget(self, size: int, place: str) -> None:
        self._forgotten.append((place, size))
        logger.warning("a buffer of %d bytes was dropped without a release; allocated at %s", size, place)
