"""An arena: chunks, and slabs cut from their pages, under one lock. A pool has several so that threads
rarely meet.

`take` finds the place for a rounded size and `give` takes it back; a place is (memory, position, size,
slab). Slabs that have a free element stand in a list per size, tiny and small ones apart, as in Netty 4;
the last slab of a size is kept when it empties, because the next request of that size is near.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator
from typing import NamedTuple


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


# A slab: one page of a chunk cut into elements of one sub-page size, with a bitmap of the free ones.


class Slab:
    """Elements of `element_bytes` inside the page at `position` of `chunk`.

    The bitmap is one integer with a bit set for each free element, so the first free one is its lowest set
    bit. Not safe for threads: the arena's lock guards it.
    """

    __slots__ = ("_all", "_free", "chunk", "element_bytes", "node", "position")

    def __init__(self, chunk: Chunk, node: int, position: int, element_bytes: int) -> None:
        self.chunk = chunk
        self.node = node
        self.position = position
        self.element_bytes = element_bytes
        self._all = (1 << (PAGE_BYTES // element_bytes)) - 1
        self._free = self._all

    @property
    def full(self) -> bool:
        """No element is free."""
        return not self._free

    @property
    def empty(self) -> bool:
        """Every element is free."""
        return self._free == self._all

    @property
    def used_count(self) -> int:
        """Elements that are given out."""
        return (self._all ^ self._free).bit_count()

    def take(self) -> int:
        """The position in the chunk of an element that was free; call it only where not `full`."""
        lowest = self._free & -self._free
        self._free ^= lowest
        return self.position + (lowest.bit_length() - 1) * self.element_bytes

    def give(self, position: int) -> None:
        """Take the element at `position` back. Raises ValueError if it is not one that was given out."""
        number, rest = divmod(position - self.position, self.element_bytes)
        bit = 1 << max(number, 0)
        if rest or number < 0 or not bit & self._all or bit & self._free:
            raise ValueError(f"position {position} is no used element of the slab at {self.position}")
        self._free |= bit


# Sizes of the pooled allocator: one place that says how a request is rounded and what a chunk is cut into.
#
# The measures are those of Netty 4's allocator: a chunk of 16 MiB holds 2,048 pages of 8 KiB. A request is
# *tiny* (below 512 bytes, rounded up to a multiple of 16), *small* (a power of two below a page), a *run* (a
# power of two of pages, up to a chunk) or *huge* (above a chunk: mapped alone, never pooled). So a rounded size
# is below twice the request, except that no request costs less than 16 bytes.

PAGE_BYTES = 8192
TREE_DEPTH = 11
"""Levels below the root of a chunk's tree: 2 ** 11 = 2,048 leaves, one a page."""
CHUNK_BYTES = PAGE_BYTES << TREE_DEPTH
TINY_STEP = 16
TINY_LIMIT = 512
"""From here on sub-page sizes double instead of growing by 16: waste stays below a half either way."""


def rounded(size: int) -> int:
    """Bytes that a request of `size` bytes (>= 0) really takes from a pool."""
    if size < TINY_LIMIT:
        return (size + TINY_STEP - 1) & -TINY_STEP or TINY_STEP
    if size > CHUNK_BYTES:
        return (size + PAGE_BYTES - 1) & -PAGE_BYTES
    return 1 << (size - 1).bit_length()


def run_depth(size: int) -> int:
    """The tree level whose nodes are runs of `size` bytes; `size` is rounded, a page at least, a chunk at
    most.
    """
    return TREE_DEPTH - (size // PAGE_BYTES).bit_length() + 1


# A chunk: 16 MiB of anonymous memory whose pages are given out in runs by a buddy tree.
#
# The tree is a complete binary tree kept in an array (children of n: 2n and 2n + 1; the leaves are pages). Each
# node holds the level of the largest free run below it, so a run is found by one walk down, and taken and given
# back by one walk up. This is the buddy system (Knowlton 1965) in the form that Netty 4 gave it.
#
# The memory is mapped, not allocated: pages that were never touched cost nothing, and `trim` hands free ones
# back.

TAKEN = TREE_DEPTH + 1
"""A node's value when nothing below it is free."""

_LEVELS = bytes(max(node, 1).bit_length() - 1 for node in range(2 << TREE_DEPTH))


class Chunk:
    """Runs of pages out of one mapping. Not safe for threads: the arena's lock guards it.

    `used_bytes` counts what is given out in runs, slabs included. `view` spans all of the memory; a slice
    of it keeps the mapping alive, so a chunk that its arena forgot goes when the last slice does.
    """

    __slots__ = ("_mapping", "_tree", "used_bytes", "view")

    def __init__(self) -> None:
        self._mapping = mapped(CHUNK_BYTES)
        self._tree = bytearray(_LEVELS)
        self.view = memoryview(self._mapping)
        self.used_bytes = 0

    @property
    def usage_percent(self) -> int:
        """Share given out, 0 only if nothing is, 100 only if all is."""
        if not self.used_bytes:
            return 0
        return max(1, self.used_bytes * 100 // CHUNK_BYTES)

    def take(self, depth: int) -> int:
        """The node of a free run of `CHUNK_BYTES >> depth` bytes, or 0 when there is none."""
        tree = self._tree
        if tree[1] > depth:
            return 0
        node = 1
        for _ in range(depth):
            node <<= 1
            if tree[node] > depth:
                node ^= 1
        tree[node] = TAKEN
        self.used_bytes += CHUNK_BYTES >> depth
        self._settle_parents(node)
        return node

    def give(self, node: int) -> None:
        """Take the run of `node` back. Raises ValueError if it is not given out."""
        if not 0 < node < len(self._tree) or self._tree[node] != TAKEN or self._split(node):
            raise ValueError(f"node {node} is no used run of this chunk")
        depth = _LEVELS[node]
        self._tree[node] = depth
        self.used_bytes -= CHUNK_BYTES >> depth
        self._settle_parents(node)

    def _split(self, node: int) -> bool:
        """TAKEN because of its children, not as a run: a taken run leaves its children as they were, free."""
        left = node << 1
        return left < len(self._tree) and self._tree[left] == TAKEN and self._tree[left + 1] == TAKEN

    def _settle_parents(self, node: int) -> None:
        tree = self._tree
        level = _LEVELS[node]
        while node > 1:
            level -= 1
            left, right = tree[node & -2], tree[node | 1]
            node >>= 1
            whole = left == right == level + 1
            best = level if whole else min(left, right)
            if tree[node] == best:
                return
            tree[node] = best

    def trim(self) -> int:
        """Hand the memory of free runs back to the system; the bytes handed back. They read as zeros
        afterwards.
        """
        total = 0
        for node in self._free_runs():
            position, size = place_of(node)
            self._mapping.madvise(mmap.MADV_DONTNEED, position, size)
            total += size
        return total

    def _free_runs(self) -> Iterator[int]:
        waiting = [1]
        while waiting:
            node = waiting.pop()
            if self._tree[node] == _LEVELS[node]:
                yield node
            elif self._tree[node] != TAKEN:
                waiting += (node << 1, node << 1 | 1)


def mapped(size: int) -> mmap.mmap:
    """`size` bytes of memory of this process alone; only private memory can be handed back page by page."""
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def place_of(node: int) -> tuple[int, int]:
    """(position in the chunk, bytes) of a node's run."""
    level = _LEVELS[node]
    size = CHUNK_BYTES >> level
    return (node - (1 << level)) * size, size


def page_node(position: int) -> int:
    """The leaf of the page that holds `position`."""
    return (1 << TREE_DEPTH) + position // PAGE_BYTES


# The chunks of an arena, kept in lists by how full they are.
#
# A chunk moves to the next list when it grows fuller than its list allows and to the one before when it
# empties; the ranges overlap, so a chunk at a border does not flutter. Half-full chunks are asked first: the
# full ones are spared useless walks, and the nearly empty ones get the chance to become empty and go. Chunks
# that never left the first list stay although they are empty (the pool would map and unmap at every burst
# otherwise). Ranges and order are Netty 4's.

NEVER = 1000
RANGES_PERCENT = ((-NEVER, 25), (1, 50), (25, 75), (50, 100), (75, 100), (100, NEVER))
"""(least, limit) of each list: a chunk moves up at or above `limit`, down below `least`."""
ASK_ORDER = (3, 2, 1, 0, 4)
"""Indices into RANGES_PERCENT; the last list holds only full chunks and is never asked."""


class ChunkLists:
    """Every chunk of an arena, in exactly one list. Not safe for threads: the arena's lock guards it."""

    def __init__(self) -> None:
        self._lists: tuple[dict[Chunk, None], ...] = tuple({} for _ in RANGES_PERCENT)
        self._where: dict[Chunk, int] = {}

    def __len__(self) -> int:
        return len(self._where)

    def __iter__(self) -> Iterator[Chunk]:
        return iter(list(self._where))

    def counts(self) -> tuple[int, ...]:
        """Chunks in each list, emptiest list first."""
        return tuple(map(len, self._lists))

    def take(self, depth: int) -> tuple[Chunk, int]:
        """(chunk, node) of a run at tree level `depth`, out of a new chunk when no other has one."""
        for index in ASK_ORDER:
            for chunk in self._lists[index]:
                if node := chunk.take(depth):
                    self._settle(chunk)
                    return chunk, node
        chunk = Chunk()
        node = chunk.take(depth)
        self._put(chunk, 0)
        self._settle(chunk)
        return chunk, node

    def give(self, chunk: Chunk, node: int) -> None:
        """Take a run back; a chunk that is empty now and outside the first list is let go."""
        chunk.give(node)
        self._settle(chunk)

    def drop_empty(self) -> int:
        """Let go of every empty chunk, the first list's too; how many went."""
        empty = [chunk for chunk in self._where if not chunk.used_bytes]
        for chunk in empty:
            self._remove(chunk)
        return len(empty)

    def _settle(self, chunk: Chunk) -> None:
        index = start = self._where[chunk]
        usage = chunk.usage_percent
        while usage >= RANGES_PERCENT[index][1]:
            index += 1
        while index and usage < RANGES_PERCENT[index][0]:
            index -= 1
        if index == start:
            return
        self._remove(chunk)
        if index:
            self._put(chunk, index)

    def _put(self, chunk: Chunk, index: int) -> None:
        self._lists[index][chunk] = None
        self._where[chunk] = index

    def _remove(self, chunk: Chunk) -> None:
        del self._lists[self._where.pop(chunk)][chunk]
