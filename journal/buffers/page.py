"""A slab: one page of a chunk cut into elements of one sub-page size, with a bitmap of the free ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from journal.buffers.sizes import PAGE_BYTES

if TYPE_CHECKING:
    from journal.buffers.chunk import Chunk


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
