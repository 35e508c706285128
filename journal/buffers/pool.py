"""The pool: `allocate` a buffer of any size, `release` it, see what is out.

A thread allocates from one arena, chosen in turn, behind a cache of its own; a buffer of another arena goes
back to it at once. `trim` returns to the system whatever is only kept for later.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from journal.buffers.arena import PAGE_BYTES, TINY_LIMIT, Arena, Place, rounded

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


# A buffer: memory out of a pool, held by reference count and given back with the last hold.
#
# Whoever allocates holds it once; `retain` adds a hold, `release` ends one. After the last release the memory
# belongs to somebody else: `view` raises Released, and so does a second release. Slices of `view` that were
# made before are not tracked, so whoever hands one on retains the buffer for its reader.

_LAST = True
_MORE = False
"""Marks of a buffer's holds: the oldest is _LAST, so it is popped last."""
PLACE_FRAMES = 6
"""Stack frames kept of an allocation's place: enough to see who asked for it and why."""


class Released(RuntimeError):
    """A buffer was used, retained or released after its last release: a mistake of the program, not of a
    peer.
    """


class Buffer:
    """`size` bytes of pooled memory; its contents start as whatever was there before.

    Holds may be taken and ended from several threads. Their count is a list of marks: popping is atomic, and
    whoever pops the last mark gives the memory back.
    """

    __slots__ = ("_give_back", "_holds", "_place", "_view", "size")

    def __init__(self, place: Place, size: int, give_back: Callable[[Place], None]) -> None:
        self.size = size
        self._place = place
        self._view = place.view[place.position : place.position + size]
        self._give_back = give_back
        self._holds = [_LAST]

    @property
    def view(self) -> memoryview:
        """The bytes, writable. Raises Released after the last release."""
        if not self._holds:
            raise Released(f"a buffer of {self.size} bytes was used after its release")
        return self._view

    @property
    def capacity(self) -> int:
        """Bytes that it takes from the pool."""
        return self._place.size

    @property
    def holds(self) -> int:
        """How often it is held; 0 after the last release."""
        return len(self._holds)

    @property
    def allocated_at(self) -> str:
        """Where it was allocated; only a pool with `debug` knows it."""
        return ""

    def retain(self) -> Buffer:
        """Hold it once more; only a holder may ask. Raises Released after the last release."""
        if not self._holds:
            raise Released(f"a buffer of {self.size} bytes was retained after its release")
        self._holds.append(_MORE)
        return self

    def release(self) -> None:
        """End one hold; with the last one the memory goes back to the pool. Raises Released after that."""
        try:
            last = self._holds.pop()
        except IndexError:
            raise Released(f"a buffer of {self.size} bytes was released twice") from None
        if last:
            # An array over the view may still export it; the memory goes back all the same.
            with contextlib.suppress(BufferError):
                self._view.release()
            self._give_back(self._place)


class TracedBuffer(Buffer):
    """A buffer that knows where it was allocated, and tells when it is forgotten without a release."""

    __slots__ = ("__weakref__", "_forgotten", "_stack")

    def __init__(
        self,
        place: Place,
        size: int,
        give_back: Callable[[Place], None],
        forgotten: Callable[[int, str], None],
    ) -> None:
        super().__init__(place, size, give_back)
        self._forgotten = forgotten
        self._stack = traceback.extract_stack(limit=PLACE_FRAMES + 3)[:-3]

    @property
    def allocated_at(self) -> str:
        """File, line and function of the allocation, the nearest caller first."""
        return " < ".join(f"{f.filename}:{f.lineno} in {f.name}" for f in reversed(self._stack))

    def __del__(self) -> None:
        if getattr(self, "_holds", None):
            self._forgotten(self.size, self.allocated_at)


# What one thread keeps of the places it gave back, so that the next request of that size takes no lock.
#
# Bounded in bytes and per size; and every so many requests, what was never needed since the last look goes
# back to its arena (the low-water mark of each size is just the surplus that nobody asked for).

TINY_COUNT_MAX = 512
SMALL_COUNT_MAX = 256
RUN_COUNT_MAX = 64
"""Places kept of one size, by kind: a full set of each costs some hundred KiB of the smallest sizes."""
RUN_BYTES_MAX = 1 << 20
"""Larger runs go straight back: few are in use, and one kept would hold much."""
BYTES_MAX = 4 << 20
"""All that one thread keeps: a quarter of a chunk."""
LOOK_EVERY = 8192
"""Requests between two looks at what was not needed."""


class Counts:
    """What a thread asked for and gave back; sums of several threads are the pool's."""

    __slots__ = ("allocated", "allocated_bytes", "hits", "released", "released_bytes")

    def __init__(self) -> None:
        self.allocated = self.allocated_bytes = self.hits = self.released = self.released_bytes = 0

    def add(self, other: Counts) -> None:
        """Add another thread's counts to these."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class Cache:
    """Places by rounded size, of one arena, and what its thread did. Used by that thread only."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.thread = threading.current_thread()
        self.kept_bytes = 0
        self.counts = Counts()
        self._kept: dict[int, deque[Place]] = {}
        self._lowest: dict[int, int] = {}
        self._until_look = LOOK_EVERY

    def take(self, size: int) -> Place | None:
        """A kept place of exactly `size` bytes."""
        counts = self.counts
        counts.allocated += 1
        counts.allocated_bytes += size
        self._until_look -= 1
        if self._until_look <= 0:
            self._give_surplus()
        kept = self._kept.get(size)
        if not kept:
            return None
        self.kept_bytes -= size
        counts.hits += 1
        place = kept.pop()
        if len(kept) < self._lowest[size]:
            self._lowest[size] = len(kept)
        return place

    def keep(self, place: Place) -> bool:
        """Keep a place for the next request; False if there is no room for it here."""
        size = place.size
        if size > RUN_BYTES_MAX or self.kept_bytes + size > BYTES_MAX or place.arena is not self.arena:
            return False
        kept = self._kept.get(size)
        if kept is None:
            kept = self._kept[size] = deque()
            self._lowest[size] = 0
        if len(kept) >= count_max(size):
            return False
        kept.append(place)
        self.kept_bytes += size
        return True

    def drain(self) -> None:
        """Give everything back to the arenas."""
        for size in self._kept:
            self._give(size, len(self._kept[size]))

    def _give_surplus(self) -> None:
        self._until_look = LOOK_EVERY
        for size, kept in self._kept.items():
            self._give(size, self._lowest[size])
            self._lowest[size] = len(kept)

    def _give(self, size: int, count: int) -> None:
        kept = self._kept[size]
        for _ in range(count):
            place = kept.popleft()
            self.kept_bytes -= size
            place.arena.give(place)
        self._lowest[size] = min(self._lowest[size], len(kept))


def count_max(size: int) -> int:
    """How many places of `size` bytes one thread keeps."""
    if size < TINY_LIMIT:
        return TINY_COUNT_MAX
    return SMALL_COUNT_MAX if size < PAGE_BYTES else RUN_COUNT_MAX
