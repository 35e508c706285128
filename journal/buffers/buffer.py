"""A buffer: memory out of a pool, held by reference count and given back with the last hold.

Whoever allocates holds it once; `retain` adds a hold, `release` ends one. After the last release the memory
belongs to somebody else: `view` raises Released, and so does a second release. Slices of `view` that were
made before are not tracked, so whoever hands one on retains the buffer for its reader.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable

from journal.buffers.arena import Place

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
