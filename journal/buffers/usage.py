"""The chunks of an arena, kept in lists by how full they are.

A chunk moves to the next list when it grows fuller than its list allows and to the one before when it
empties; the ranges overlap, so a chunk at a border does not flutter. Half-full chunks are asked first: the
full ones are spared useless walks, and the nearly empty ones get the chance to become empty and go. Chunks
that never left the first list stay although they are empty (the pool would map and unmap at every burst
otherwise). Ranges and order are Netty 4's.
"""

from __future__ import annotations

from collections.abc import Iterator

from journal.buffers.chunk import Chunk

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
