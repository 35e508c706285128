"""How fast due messages are brought: so that whoever else sends and reads hardly notices.

Two bounds. What is written and not forced lies in front of everybody who waits for a force, so all lines together
have a window of bytes. And a turn of the broker's thread brings no more than a part of a tick's work; the rest goes on
in the next turn, behind whatever came in meanwhile.
"""

from collections import deque
from collections.abc import Callable
from typing import Final

WINDOW_BYTES: Final = 512 << 10
"""As for large transactions (`tfmq.transaction.convoy`), where it was measured."""
SLICE_BYTES: Final = 256 << 10
"""One effect brings no more, unless one message alone is larger."""
TURN_ROWS: Final = 1024
"""Some two milliseconds' work. With 2,048 and with 512 (and each time twice as many taken out of the wheel at once) a
neighbour's slowest sends beside a burst took longer, and fewer messages came a second."""
TURN_BYTES: Final = 512 << 10
"""Some milliseconds' work where messages are large."""


class Pacing:
    """See the module. One owner's thread."""

    def __init__(self) -> None:
        self.unforced_bytes = 0
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()
        self._giving = False
        self._rows = 0
        self._bytes = 0

    # The window

    def fits(self, size_bytes: int) -> bool:
        """Whether so many bytes more may be written now; a slice larger than the window goes alone. Nobody passes those
        who wait: else small slices would keep a large one waiting for ever."""
        return (self._giving or not self._waiting) and self._has_room(size_bytes)

    def _has_room(self, size_bytes: int) -> bool:
        return not self.unforced_bytes or self.unforced_bytes + size_bytes <= WINDOW_BYTES

    def wait(self, size_bytes: int, go: Callable[[], None]) -> None:
        """`go()` once when it is its turn and there is room for so much; it asks anew then."""
        self._waiting.append((size_bytes, go))

    def take(self, size_bytes: int) -> None:
        """They are going to be written."""
        self.unforced_bytes += size_bytes

    def give(self, size_bytes: int) -> None:
        """They are forced, or were not written, or their target has stopped."""
        self.unforced_bytes -= size_bytes
        if self._giving:
            return
        self._giving = True
        try:
            while self._waiting and self._has_room(self._waiting[0][0]):
                self._waiting.popleft()[1]()
        finally:
            self._giving = False

    # The turn

    def begin_turn(self) -> None:
        """Everybody else had a chance."""
        self._rows = self._bytes = 0

    @property
    def rows_left(self) -> int:
        """So many rows may still be brought in this turn."""
        return 0 if self._bytes >= TURN_BYTES else max(0, TURN_ROWS - self._rows)

    def spend(self, rows: int, size_bytes: int) -> None:
        """They are brought in this turn."""
        self._rows += rows
        self._bytes += size_bytes
