"""The buffer pool: buffers of any size, thread caches, statistics and a leak report."""

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

from journal.buffers.arena import PAGE_BYTES, TINY_LIMIT, Allocation, Arena, rounded_size

ARENA_COUNT = 2
"""Number of arenas of a pool. New threads get the arenas in turn, so that threads rarely wait for the same lock. More
arenas would help only if many threads were busy."""

logger = logging.getLogger("journal.buffers")


class PoolStats(NamedTuple):
    """Statistics of a pool. A buffer counts with its rounded size, which the pool has allocated for the buffer."""

    live_count: int
    """Buffers that are not released."""
    live_bytes: int
    cached_bytes: int
    huge_bytes: int
    chunk_counts: tuple[int, ...]
    """Number of chunks (16 MiB each) in each list of `ChunkLists`, the list with the lowest usage first."""
    slab_count: int
    allocated_count: int
    cache_hit_count: int
    forgotten_count: int
    """Buffers that were garbage-collected without a release (counted in debug mode only)."""


class Leak(NamedTuple):
    """Buffers that were not released: where they were allocated, their total size, their number."""

    place: str
    size_bytes: int
    buffer_count: int


class _Local(threading.local):
    cache: ThreadCache | None = None


class Pool:
    """Pool of buffers. Thread-safe. With `debug` each buffer records where it was allocated, which costs time.

    Each thread gets one of the arenas and allocates from that arena through a cache of its own. If a thread releases a
    buffer of another arena, the memory is not cached but freed in that arena immediately.
    """

    def __init__(self, arena_count: int = ARENA_COUNT, *, debug: bool = False) -> None:
        self._arenas = [Arena() for _ in range(arena_count)]
        self._next_arena = itertools.cycle(self._arenas)
        self._lock = threading.Lock()
        self._local = _Local()
        self._caches: list[ThreadCache] = []
        self._ended_counts = AllocationCounts()
        self._debug = debug
        self._traced: weakref.WeakSet[TracedBuffer] = weakref.WeakSet()
        self._dropped: deque[tuple[str, int]] = deque()

    def allocate(self, size: int) -> Buffer:
        """Allocate a buffer of `size` bytes with one reference. Raises MemoryError, and ValueError if `size` < 0."""
        if size < 0:
            raise ValueError(f"a buffer cannot have {size} bytes")
        cache = self._local.cache or self._new_cache()
        whole = rounded_size(size)
        allocation = cache.allocate(whole) or cache.arena.allocate(whole)
        if not self._debug:
            return Buffer(allocation, size, self.free)
        buffer = TracedBuffer(allocation, size, self)
        self._traced.add(buffer)
        return buffer

    def stats(self) -> PoolStats:
        """Return the current statistics; other threads may change them at the same time."""
        with self._lock:
            self._drain_ended_threads()
            total = AllocationCounts()
            total.add(self._ended_counts)
            for cache in self._caches:
                total.add(cache.counts)
            cached_bytes = sum(cache.cached_bytes for cache in self._caches)
        return PoolStats(
            live_count=total.allocated - total.released,
            live_bytes=total.allocated_bytes - total.released_bytes,
            cached_bytes=cached_bytes,
            huge_bytes=sum(arena.huge_bytes for arena in self._arenas),
            chunk_counts=tuple(map(sum, zip(*(a.chunk_counts() for a in self._arenas), strict=True))),
            slab_count=sum(arena.slab_count() for arena in self._arenas),
            allocated_count=total.allocated,
            cache_hit_count=total.hits,
            forgotten_count=len(self._dropped),
        )

    def leaks(self) -> list[Leak]:
        """Buffers that were not released, by place of allocation; most bytes first. Empty without `debug`."""
        found = [(buffer.allocated_at, buffer.size) for buffer in list(self._traced) if buffer.holds]
        counted: dict[str, list[int]] = {}
        for allocation, size in [*found, *self._dropped]:
            entry = counted.setdefault(allocation, [0, 0])
            entry[0] += size
            entry[1] += 1
        ordered = sorted(counted.items(), key=lambda item: -item[1][0])
        return [Leak(allocation, size, count) for allocation, (size, count) in ordered]

    def trim(self) -> int:
        """Give unused memory of this thread's cache and of the arenas back to the system. Return its size in bytes."""
        if self._local.cache:
            self._local.cache.drain()
        with self._lock:
            self._drain_ended_threads()
        return sum(arena.trim() for arena in self._arenas)

    def free(self, allocation: Allocation) -> None:
        """Put the memory of a released buffer into this thread's cache; if the cache refuses, free it in its arena."""
        cache = self._local.cache or self._new_cache()
        counts = cache.counts
        counts.released += 1
        counts.released_bytes += allocation.size
        if not cache.try_cache(allocation):
            allocation.arena.free(allocation)

    def _new_cache(self) -> ThreadCache:
        with self._lock:
            self._drain_ended_threads()
            cache = ThreadCache(next(self._next_arena))
            self._caches.append(cache)
        self._local.cache = cache
        return cache

    def _drain_ended_threads(self) -> None:
        for cache in [cache for cache in self._caches if not cache.thread.is_alive()]:
            self._caches.remove(cache)
            self._ended_counts.add(cache.counts)
            cache.drain()

    def report_dropped(self, size: int, place: str) -> None:
        self._dropped.append((place, size))
        logger.warning("a buffer of %d bytes was dropped without a release; allocated at %s", size, place)


_LAST_REFERENCE = True
_OTHER_REFERENCE = False
"""Entries of a buffer's list of references. The first entry is _LAST_REFERENCE, all others are _OTHER_REFERENCE. The
newest entry is popped first, so _LAST_REFERENCE is popped last."""
STACK_FRAMES = 6
"""Stack frames that are recorded for each allocation: enough to see the caller and its purpose."""


class Released(RuntimeError):
    """A buffer was used, retained or released after its last release: a bug in the program."""


class Buffer:
    """`size` bytes of pooled memory with a reference count; the initial contents are undefined.

    A new buffer has one reference. After the last release the memory is reused, although slices of `view` may still
    exist: so retain the buffer for each reader that gets a slice. Several threads may add and remove references.
    """

    __slots__ = ("_allocation", "_free", "_holds", "_view", "size")

    def __init__(self, allocation: Allocation, size: int, free: Callable[[Allocation], None]) -> None:
        self.size = size
        self._allocation = allocation
        self._view = allocation.view[allocation.position : allocation.position + size]
        self._free = free
        # The length of the list is the reference count. Popping is atomic, so exactly one thread pops _LAST_REFERENCE,
        # and this thread frees the memory.
        self._holds = [_LAST_REFERENCE]

    @property
    def view(self) -> memoryview:
        """The bytes, writable. Raises Released after the last release."""
        if not self._holds:
            raise Released(f"a buffer of {self.size} bytes was used after its release")
        return self._view

    @property
    def capacity(self) -> int:
        """Number of bytes that the buffer takes from the pool."""
        return self._allocation.size

    @property
    def holds(self) -> int:
        """Number of references; 0 after the last release."""
        return len(self._holds)

    @property
    def allocated_at(self) -> str:
        """File, line and function of the allocation, the nearest caller first; "" in a pool without `debug`."""
        return ""

    def retain(self) -> Buffer:
        """Add a reference. The caller must have one already. Raises Released after the last release."""
        if not self._holds:
            raise Released(f"a buffer of {self.size} bytes was retained after its release")
        self._holds.append(_OTHER_REFERENCE)
        return self

    def release(self) -> None:
        """Remove a reference; the last release returns the memory to the pool. Raises Released if none is left."""
        try:
            last = self._holds.pop()
        except IndexError:
            raise Released(f"a buffer of {self.size} bytes was released twice") from None
        if last:
            # An object that exports the view, such as a NumPy array, prevents the release of the view; the memory is
            # returned to the pool nevertheless.
            with contextlib.suppress(BufferError):
                self._view.release()
            self._free(self._allocation)


class TracedBuffer(Buffer):
    """A buffer with the place of its allocation. If it is garbage-collected without a release, a warning is logged."""

    __slots__ = ("__weakref__", "_report_dropped", "_stack")

    def __init__(self, allocation: Allocation, size: int, pool: Pool) -> None:
        super().__init__(allocation, size, pool.free)
        self._report_dropped = pool.report_dropped
        self._stack = traceback.extract_stack(limit=STACK_FRAMES + 2)[:-2]

    @property
    def allocated_at(self) -> str:
        return " < ".join(f"{f.filename}:{f.lineno} in {f.name}" for f in reversed(self._stack))

    def __del__(self) -> None:
        if getattr(self, "_holds", None):
            self._report_dropped(self.size, self.allocated_at)


TINY_COUNT_MAX = 512
SMALL_COUNT_MAX = 256
RUN_COUNT_MAX = 64
"""Maximum allocations of one size in a thread's cache: TINY_COUNT_MAX of each tiny size, SMALL_COUNT_MAX of each small
size, RUN_COUNT_MAX of each size of runs."""
RUN_BYTES_MAX = 1 << 20
"""Maximum bytes of a cached run. Larger runs are used rarely, so they are not cached."""
CACHE_BYTES_MAX = 4 << 20
"""Maximum bytes in a thread's cache: a quarter of a chunk."""
TRIM_INTERVAL = 8192
"""Number of requests between two trims of a thread's cache (see `ThreadCache`)."""


class AllocationCounts:
    """Allocation counters of one thread; the pool's statistics are the sums over the threads."""

    __slots__ = ("allocated", "allocated_bytes", "hits", "released", "released_bytes")

    def __init__(self) -> None:
        self.allocated = self.allocated_bytes = self.hits = self.released = self.released_bytes = 0

    def add(self, other: AllocationCounts) -> None:
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class ThreadCache:
    """A thread's cache of freed allocations of one arena, by rounded size. A request served from it takes no lock.

    Every TRIM_INTERVAL requests, the cache is trimmed. If it always had at least n allocations of a size since the last
    trim, n of them were not needed: the n oldest ones are freed in the arena.
    """

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.thread = threading.current_thread()
        self.cached_bytes = 0
        self.counts = AllocationCounts()
        self._cached: dict[int, deque[Allocation]] = {}
        self._unused_counts: dict[int, int] = {}
        self._requests_until_trim = TRIM_INTERVAL

    def allocate(self, size: int) -> Allocation | None:
        """Remove and return a cached allocation of exactly `size` bytes; None if there is none."""
        counts = self.counts
        counts.allocated += 1
        counts.allocated_bytes += size
        self._requests_until_trim -= 1
        if self._requests_until_trim <= 0:
            self._free_unused()
        cached = self._cached.get(size)
        if not cached:
            return None
        self.cached_bytes -= size
        counts.hits += 1
        allocation = cached.pop()
        if len(cached) < self._unused_counts[size]:
            self._unused_counts[size] = len(cached)
        return allocation

    def try_cache(self, allocation: Allocation) -> bool:
        """Put a freed allocation into the cache; False if it is too large, of another arena, or the cache is full."""
        size = allocation.size
        if size > RUN_BYTES_MAX or self.cached_bytes + size > CACHE_BYTES_MAX or allocation.arena is not self.arena:
            return False
        cached = self._cached.get(size)
        if cached is None:
            cached = self._cached[size] = deque()
            self._unused_counts[size] = 0
        if len(cached) >= cached_count_max(size):
            return False
        cached.append(allocation)
        self.cached_bytes += size
        return True

    def drain(self) -> None:
        for size in self._cached:
            self._free_oldest(size, len(self._cached[size]))

    def _free_unused(self) -> None:
        self._requests_until_trim = TRIM_INTERVAL
        for size, cached in self._cached.items():
            self._free_oldest(size, self._unused_counts[size])
            self._unused_counts[size] = len(cached)

    def _free_oldest(self, size: int, count: int) -> None:
        cached = self._cached[size]
        for _ in range(count):
            allocation = cached.popleft()
            self.cached_bytes -= size
            allocation.arena.free(allocation)
        self._unused_counts[size] = min(self._unused_counts[size], len(cached))


def cached_count_max(size: int) -> int:
    if size < TINY_LIMIT:
        return TINY_COUNT_MAX
    return SMALL_COUNT_MAX if size < PAGE_BYTES else RUN_COUNT_MAX
