"""A chunk: 16 MiB of anonymous memory whose pages are given out in runs by a buddy tree.

The tree is a complete binary tree kept in an array (children of n: 2n and 2n + 1; the leaves are pages). Each
node holds the level of the largest free run below it, so a run is found by one walk down, and taken and given
back by one walk up. This is the buddy system (Knowlton 1965) in the form that Netty 4 gave it.

The memory is mapped, not allocated: pages that were never touched cost nothing, and `trim` hands free ones
back.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator

from journal.buffers.sizes import CHUNK_BYTES, PAGE_BYTES, TREE_DEPTH

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
