"""What one thread keeps of the places it gave back, so that the next request of that size takes no lock.

Bounded in bytes and per size; and every so many requests, what was never needed since the last look goes
back to its arena (the low-water mark of each size is just the surplus that nobody asked for).
"""

from __future__ import annotations

import threading
from collections import deque

from journal.buffers.arena import Arena, Place
from journal.buffers.sizes import PAGE_BYTES, TINY_LIMIT

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
