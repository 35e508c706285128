"""An arena: chunks, and slabs cut from their pages, under one lock. A pool has several so that threads
rarely meet.

`take` finds the place for a rounded size and `give` takes it back; a place is (memory, position, size,
slab). Slabs that have a free element stand in a list per size, tiny and small ones apart, as in Netty 4;
the last slab of a size is kept when it empties, because the next request of that size is near.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

from journal.buffers.chunk import Chunk, mapped, page_node, place_of
from journal.buffers.page import Slab
from journal.buffers.sizes import CHUNK_BYTES, PAGE_BYTES, TINY_LIMIT, TREE_DEPTH, run_depth
from journal.buffers.usage import ChunkLists


class Place(NamedTuple):
    """Memory that is given out: `size` bytes of `view` from `position`.

    `chunk` is None for a huge one, which has a mapping of its own; `slab` is None for a run of pages.
    """

    view: memoryview
    position: int
    size: int
    chunk: Chunk | None
    slab: Slab | None
    arena: Arena


class Arena:
    """Gives out places and takes them back; safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chunks = ChunkLists()
        self._tiny: dict[int, dict[Slab, None]] = {}
        self._small: dict[int, dict[Slab, None]] = {}
        self._slab_used: dict[Slab, None] = {}
        self.huge_bytes = 0

    def take(self, size: int) -> Place:
        """A place of `size` bytes (rounded). Raises MemoryError when the system has no more."""
        if size > CHUNK_BYTES:
            return self._take_huge(size)
        with self._lock:
            if size < PAGE_BYTES:
                slab = self._slab_with_room(size)
                position = slab.take()
                if slab.full:
                    del self._slabs(size)[slab]
                return Place(slab.chunk.view, position, size, slab.chunk, slab, self)
            chunk, node = self._take_run(run_depth(size))
            return Place(chunk.view, place_of(node)[0], size, chunk, None, self)

    def give(self, place: Place) -> None:
        """Take a place back. Raises ValueError if it is not given out."""
        if place.chunk is None:
            self._give_huge(place)
            return
        with self._lock:
            if place.slab is None:
                node = (1 << run_depth(place.size)) + place.position // place.size
                self._chunks.give(place.chunk, node)
            else:
                self._give_element(place.slab, place.position)

    def trim(self) -> int:
        """Give back what is only kept for later: empty slabs, empty chunks, the free pages of the rest.

        Returns the bytes of address space and pages handed back to the system.
        """
        with self._lock:
            for lists in (self._tiny, self._small):
                for slabs in lists.values():
                    for slab in [slab for slab in slabs if slab.empty]:
                        self._drop_slab(slab)
            dropped = self._chunks.drop_empty() * CHUNK_BYTES
            return dropped + sum(chunk.trim() for chunk in self._chunks)

    def used_bytes(self) -> int:
        """Bytes of every place that is given out, those in thread caches included."""
        with self._lock:
            runs = sum(chunk.used_bytes for chunk in self._chunks)
            unused = sum(PAGE_BYTES - slab.used_count * slab.element_bytes for slab in self._slab_used)
            return runs - unused + self.huge_bytes

    def chunk_counts(self) -> tuple[int, ...]:
        """Chunks in each of the usage lists, the emptiest list first."""
        with self._lock:
            return self._chunks.counts()

    def slab_count(self) -> int:
        """Pages that are cut into slabs."""
        return len(self._slab_used)

    def _slabs(self, size: int) -> dict[Slab, None]:
        return (self._tiny if size < TINY_LIMIT else self._small).setdefault(size, {})

    def _slab_with_room(self, size: int) -> Slab:
        slabs = self._slabs(size)
        for slab in slabs:
            return slab
        chunk, node = self._take_run(TREE_DEPTH)
        slab = Slab(chunk, node, place_of(node)[0], size)
        slabs[slab] = self._slab_used[slab] = None
        return slab

    def _give_element(self, slab: Slab, position: int) -> None:
        slabs = self._slabs(slab.element_bytes)
        slab.give(position)
        slabs[slab] = None
        if slab.empty and len(slabs) > 1:
            self._drop_slab(slab)

    def _drop_slab(self, slab: Slab) -> None:
        del self._slabs(slab.element_bytes)[slab], self._slab_used[slab]
        self._chunks.give(slab.chunk, page_node(slab.position))

    def _take_run(self, depth: int) -> tuple[Chunk, int]:
        try:
            return self._chunks.take(depth)
        except OSError as error:
            raise MemoryError(f"no memory for another chunk of {CHUNK_BYTES} bytes: {error}") from error

    def _take_huge(self, size: int) -> Place:
        try:
            mapping = mapped(size)
        except OSError as error:
            raise MemoryError(f"no memory for a buffer of {size} bytes: {error}") from error
        with self._lock:
            self.huge_bytes += size
        return Place(memoryview(mapping), 0, size, None, None, self)

    def _give_huge(self, place: Place) -> None:
        with self._lock:
            self.huge_bytes -= place.size
