"""Arenas of the buffer pool: chunks of memory, and slabs made from their pages, in the sizes of Netty 4's allocator.

A chunk of 16 MiB has 2,048 pages of 8 KiB. Requests have four kinds, by size. *Tiny*, below 512 bytes: rounded up to a
multiple of 16. *Small*, up to half a page: rounded up to a power of two. A *run*, up to a chunk: rounded up to a power
of two of pages. *Huge*, above a chunk: mapped alone, never pooled. A rounded size is below twice the request, but at
least 16 bytes.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator
from typing import NamedTuple


class Allocation(NamedTuple):
    """Allocated memory: `size` bytes of `view` from `position` on.

    `chunk` is None for a huge allocation, which has a mapping of its own. `slab` is None if whole pages are allocated.
    """

    view: memoryview
    position: int
    size: int
    chunk: MemoryChunk | None
    slab: Slab | None
    arena: Arena


class Arena:
    """Allocates and frees memory under one lock. Thread-safe.

    A pool has several arenas, so that threads rarely wait for each other. An empty slab is freed unless it is the only
    slab of its size with free elements. Such a slab is kept, because another request of its size is likely soon.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chunks = ChunkLists()
        self._free_slabs: dict[int, dict[Slab, None]] = {}
        """Slabs with a free element, by the size of their elements."""
        self._all_slabs: dict[Slab, None] = {}
        self.huge_bytes = 0

    def allocate(self, size: int) -> Allocation:
        """Allocate `size` bytes; `size` is a result of `rounded_size`. Raises MemoryError if no memory is left."""
        if size > CHUNK_BYTES:
            try:
                mapping = map_memory(size)
            except OSError as error:
                raise MemoryError(f"no memory for a buffer of {size} bytes: {error}") from error
            with self._lock:
                self.huge_bytes += size
            return Allocation(memoryview(mapping), 0, size, None, None, self)
        with self._lock:
            if size < PAGE_BYTES:
                slab = self._slab_with_room(size)
                position = slab.allocate()
                if slab.full:
                    del self._slabs(size)[slab]
                return Allocation(slab.chunk.view, position, size, slab.chunk, slab, self)
            chunk, node = self._allocate_run(run_depth(size))
            return Allocation(chunk.view, run_position(node)[0], size, chunk, None, self)

    def free(self, allocation: Allocation) -> None:
        """Free an allocation. Raises ValueError on a double free."""
        with self._lock:
            if allocation.chunk is None:
                self.huge_bytes -= allocation.size
            elif allocation.slab is None:
                node = (1 << run_depth(allocation.size)) + allocation.position // allocation.size
                self._chunks.free(allocation.chunk, node)
            else:
                self._free_element(allocation.slab, allocation.position)

    def trim(self) -> int:
        """Give empty chunks and free pages of other chunks back to the system. Return their size in bytes."""
        with self._lock:
            for slabs in self._free_slabs.values():
                for slab in [slab for slab in slabs if slab.empty]:
                    self._drop_slab(slab)
            dropped = self._chunks.drop_empty() * CHUNK_BYTES
            return dropped + sum(chunk.trim() for chunk in self._chunks)

    def used_bytes(self) -> int:
        """Bytes of all allocations, including released ones that thread caches keep for reuse."""
        with self._lock:
            runs = sum(chunk.used_bytes for chunk in self._chunks)
            unused = sum(PAGE_BYTES - slab.used_count * slab.element_bytes for slab in self._all_slabs)
            return runs - unused + self.huge_bytes

    def chunk_counts(self) -> tuple[int, ...]:
        """Number of chunks in each list of `ChunkLists`, the list with the lowest usage first."""
        with self._lock:
            return self._chunks.counts()

    def slab_count(self) -> int:
        return len(self._all_slabs)

    def _slabs(self, size: int) -> dict[Slab, None]:
        return self._free_slabs.setdefault(size, {})

    def _slab_with_room(self, size: int) -> Slab:
        slabs = self._slabs(size)
        for slab in slabs:
            return slab
        chunk, node = self._allocate_run(TREE_DEPTH)
        slab = Slab(chunk, node, run_position(node)[0], size)
        slabs[slab] = self._all_slabs[slab] = None
        return slab

    def _free_element(self, slab: Slab, position: int) -> None:
        slabs = self._slabs(slab.element_bytes)
        slab.free(position)
        slabs[slab] = None
        if slab.empty and len(slabs) > 1:
            self._drop_slab(slab)

    def _drop_slab(self, slab: Slab) -> None:
        del self._slabs(slab.element_bytes)[slab], self._all_slabs[slab]
        self._chunks.free(slab.chunk, slab.node)

    def _allocate_run(self, depth: int) -> tuple[MemoryChunk, int]:
        try:
            return self._chunks.allocate(depth)
        except OSError as error:
            raise MemoryError(f"no memory for another chunk of {CHUNK_BYTES} bytes: {error}") from error


class Slab:
    """A page at `position` of `chunk`, split into elements of `element_bytes`. Protected by the arena's lock.

    The integer `_free` is the bitmap of the free elements; its lowest set bit is the first free element.
    """

    __slots__ = ("_all", "_free", "chunk", "element_bytes", "node", "position")

    def __init__(self, chunk: MemoryChunk, node: int, position: int, element_bytes: int) -> None:
        self.chunk = chunk
        self.node = node
        self.position = position
        self.element_bytes = element_bytes
        self._all = (1 << (PAGE_BYTES // element_bytes)) - 1
        self._free = self._all

    @property
    def full(self) -> bool:
        return not self._free

    @property
    def empty(self) -> bool:
        return self._free == self._all

    @property
    def used_count(self) -> int:
        return (self._all ^ self._free).bit_count()

    def allocate(self) -> int:
        """Allocate an element and return its position in the chunk. Must not be called if `full`."""
        lowest = self._free & -self._free
        self._free ^= lowest
        return self.position + (lowest.bit_length() - 1) * self.element_bytes

    def free(self, position: int) -> None:
        """Free the element at `position`. Raises ValueError if it is not an allocated element."""
        number, rest = divmod(position - self.position, self.element_bytes)
        bit = 1 << max(number, 0)
        if rest or number < 0 or not bit & self._all or bit & self._free:
            raise ValueError(f"position {position} is not an allocated element of the slab at {self.position}")
        self._free |= bit


PAGE_BYTES = 8192
TREE_DEPTH = 11
"""Levels below the root of a chunk's tree: 2 ** 11 = 2,048 leaves, one per page."""
CHUNK_BYTES = PAGE_BYTES << TREE_DEPTH
TINY_STEP = 16
TINY_LIMIT = 512
"""Below this size, rounded sizes are multiples of 16; from this size to a chunk they are powers of two."""


def rounded_size(size: int) -> int:
    """Return how many bytes a pool allocates for a request of `size` bytes (>= 0)."""
    if size < TINY_LIMIT:
        return (size + TINY_STEP - 1) & -TINY_STEP or TINY_STEP
    if size > CHUNK_BYTES:
        return (size + PAGE_BYTES - 1) & -PAGE_BYTES
    return 1 << (size - 1).bit_length()


def run_depth(size: int) -> int:
    """Return the tree level at which each node is a run of `size` bytes (a rounded size, from a page to a chunk)."""
    return TREE_DEPTH - (size // PAGE_BYTES).bit_length() + 1


NOTHING_FREE = TREE_DEPTH + 1
"""Value of a tree node below which nothing is free."""

_LEVELS = bytes(max(node, 1).bit_length() - 1 for node in range(2 << TREE_DEPTH))


class MemoryChunk:
    """16 MiB of anonymous memory, whose pages are allocated in runs by a buddy tree. Protected by the arena's lock.

    The tree is a complete binary tree in an array (children of n: 2n and 2n + 1; the leaves are pages). The value of a
    node is the tree level of the largest free run in the node's subtree. So one walk down the tree finds a run, and one
    walk up allocates or frees it: the buddy system (Knowlton 1965) in Netty 4's form. `used_bytes`: bytes of all
    allocated runs, including pages used as slabs. A slice of `view` keeps the mapping alive: a chunk that was removed
    from its arena is unmapped when its last slice is garbage-collected.
    """

    __slots__ = ("_mapping", "_tree", "used_bytes", "view")

    def __init__(self) -> None:
        self._mapping = map_memory(CHUNK_BYTES)
        self._tree = bytearray(_LEVELS)
        self.view = memoryview(self._mapping)
        self.used_bytes = 0

    @property
    def usage_percent(self) -> int:
        """Allocated share of the chunk in percent: 0 only if nothing is allocated, 100 only if nothing is free."""
        if not self.used_bytes:
            return 0
        return max(1, self.used_bytes * 100 // CHUNK_BYTES)

    def allocate(self, depth: int) -> int:
        """Allocate a run of `CHUNK_BYTES >> depth` bytes and return its node; 0 if none is free."""
        tree = self._tree
        if tree[1] > depth:
            return 0
        node = 1
        for _ in range(depth):
            node <<= 1
            if tree[node] > depth:
                node ^= 1
        tree[node] = NOTHING_FREE
        self.used_bytes += CHUNK_BYTES >> depth
        self._update_parents(node)
        return node

    def free(self, node: int) -> None:
        """Free the page run at `node`. Raises ValueError on a double free."""
        if not 0 < node < len(self._tree) or self._tree[node] != NOTHING_FREE or self._is_split(node):
            raise ValueError(f"node {node} is not an allocated run of this chunk")
        depth = _LEVELS[node]
        self._tree[node] = depth
        self.used_bytes -= CHUNK_BYTES >> depth
        self._update_parents(node)

    def _is_split(self, node: int) -> bool:
        """True if both children of `node` are used. Then `node` has nothing free, but is no allocated run itself."""
        # The children of an allocated run still have the values of free nodes, because `allocate` does not change them.
        left = node << 1
        return left < len(self._tree) and self._tree[left] == NOTHING_FREE and self._tree[left + 1] == NOTHING_FREE

    def _update_parents(self, node: int) -> None:
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
        """Give free runs back to the system, so that they contain zeros. Return their size in bytes."""
        total = 0
        for node in self._free_runs():
            position, size = run_position(node)
            self._mapping.madvise(mmap.MADV_DONTNEED, position, size)
            total += size
        return total

    def _free_runs(self) -> Iterator[int]:
        waiting = [1]
        while waiting:
            node = waiting.pop()
            if self._tree[node] == _LEVELS[node]:
                yield node
            elif self._tree[node] != NOTHING_FREE:
                waiting += (node << 1, node << 1 | 1)


def map_memory(size: int) -> mmap.mmap:
    # The mapping is private, because `MADV_DONTNEED` in `trim` does not free the pages of a shared mapping.
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def run_position(node: int) -> tuple[int, int]:
    """(position in the chunk, size in bytes) of the run at tree node `node`."""
    level = _LEVELS[node]
    size = CHUNK_BYTES >> level
    return (node - (1 << level)) * size, size


UNREACHABLE = 1000
RANGES_PERCENT = ((-UNREACHABLE, 25), (1, 50), (25, 75), (50, 100), (75, 100), (100, UNREACHABLE))
"""(minimum, limit) of the usage in each list. A chunk moves to the next list at `limit` or more, and to the previous
list below `minimum`."""
SEARCH_ORDER = (3, 2, 1, 0, 4)
"""Order in which `allocate` searches the lists, as indices. The last list is left out: its chunks are full."""


class ChunkLists:
    """The chunks of an arena, each in one of several lists by usage. Protected by the arena's lock.

    The ranges of the lists are Netty 4's. They overlap, so that a chunk near a limit does not move back and forth.
    Half-full chunks are searched first: fuller chunks rarely have room, and emptier chunks may become empty and be
    unmapped. An empty chunk that never left the first list is kept, so that a repeated brief use maps no new memory.
    """

    def __init__(self) -> None:
        self._lists: tuple[dict[MemoryChunk, None], ...] = tuple({} for _ in RANGES_PERCENT)
        self._list_index: dict[MemoryChunk, int] = {}

    def __len__(self) -> int:
        return len(self._list_index)

    def __iter__(self) -> Iterator[MemoryChunk]:
        return iter(list(self._list_index))

    def counts(self) -> tuple[int, ...]:
        return tuple(map(len, self._lists))

    def allocate(self, depth: int) -> tuple[MemoryChunk, int]:
        """Allocate a run at tree level `depth`, in a new chunk if no chunk has room. Return (chunk, node)."""
        for index in SEARCH_ORDER:
            for chunk in self._lists[index]:
                if node := chunk.allocate(depth):
                    self._move_by_usage(chunk)
                    return chunk, node
        chunk = MemoryChunk()
        node = chunk.allocate(depth)
        self._insert(chunk, 0)
        self._move_by_usage(chunk)
        return chunk, node

    def free(self, chunk: MemoryChunk, node: int) -> None:
        """Free a run of `chunk`. If the chunk becomes empty, it is removed, unless it is in the first list."""
        chunk.free(node)
        self._move_by_usage(chunk)

    def drop_empty(self) -> int:
        """Remove all empty chunks, also the chunks in the first list; return their number."""
        empty = [chunk for chunk in self._list_index if not chunk.used_bytes]
        for chunk in empty:
            self._remove(chunk)
        return len(empty)

    def _move_by_usage(self, chunk: MemoryChunk) -> None:
        index = start = self._list_index[chunk]
        usage = chunk.usage_percent
        while usage >= RANGES_PERCENT[index][1]:
            index += 1
        while index and usage < RANGES_PERCENT[index][0]:
            index -= 1
        if index == start:
            return
        self._remove(chunk)
        if index:
            self._insert(chunk, index)

    def _insert(self, chunk: MemoryChunk, index: int) -> None:
        self._lists[index][chunk] = None
        self._list_index[chunk] = index

    def _remove(self, chunk: MemoryChunk) -> None:
        del self._lists[self._list_index.pop(chunk)][chunk]
