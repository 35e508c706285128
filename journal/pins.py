"""Who is using a set of files; a file that left the set is closed when nobody does.

Whoever uses the set pins it first, then takes the list of files. Whoever takes a file out replaces the list first, then
retires the file. So a file that somebody can have in his hand is not closed. Any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Protocol


class Closable(Protocol):
    """What can be retired."""

    def close(self) -> None: ...


class Pins:
    """See the module. `with pins:` pins for the time of the block."""

    def __init__(self) -> None:
        # One that may be taken twice: a generator that is collected inside `pin` ends its own block there.
        self._lock = threading.RLock()
        self._count = 0
        self._retired: list[Closable] = []

    def pin(self) -> None:
        """What is retired from now on is not closed before `unpin`; pins are counted."""
        with self._lock:
            self._count += 1

    def unpin(self) -> None:
        """Takes one `pin` back."""
        with self._lock:
            self._count -= 1
        if self._retired:
            self._close_retired()

    def __enter__(self) -> None:
        self.pin()

    def __exit__(self, *error: object) -> None:
        self.unpin()

    def retire(self, files: Iterable[Closable]) -> None:
        """Closes them as soon as nothing is pinned, which may be at once."""
        gone = list(files)  # first: whatever may call `unpin` meanwhile does not meet half of them
        with self._lock:
            self._retired.extend(gone)
        self._close_retired()

    def _close_retired(self) -> None:
        with self._lock:
            if self._count:
                return
            retired, self._retired = self._retired, []
        for file in retired:
            file.close()
