"""The forces of one log's files: one at a time, and none behind one that failed.

The system tells a failed force to one caller only: a second one beside it, or after it, would be told that all is well.
So the error is kept, and every later force fails alike: nothing is retried. Any thread, but for `begin` and the end of
what it began, which are the owner's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, TypeVar

from journal.aio import Begin, Flight, Landed
from journal.file import File
from journal.pins import Pins

KEPT_OPEN: list[File] = []
"""Files with bytes whose force failed: closing one could swallow the error, so they stay open until the process
ends."""


class GatedFile(Protocol):
    """One of the log's files; a sealed one is forced, and only read. `end`: where its bytes end, as the log counts."""

    sealed: bool

    @property
    def file(self) -> File: ...

    @property
    def end(self) -> int: ...


Gated = TypeVar("Gated", bound=GatedFile)


class Gate:
    """See the module. `pins` keep the files open while one is forced."""

    def __init__(self, pins: Pins) -> None:
        self.shut = False
        """True once the files are no longer the log's: they are not forced any more."""
        self._pins = pins
        self._lock = threading.Lock()
        self._error: Exception | None = None
        self._flight: Flight | None = None

    def force(self, file: GatedFile, how: Callable[[], None] | None = None) -> None:
        """Forces a file; a sealed one is forced already. `how` does it instead, with what must come before others may.

        Raises OSError.
        """
        with self._pins, self._lock:
            flight = self._flight
            if flight is not None:
                self._error = self._error or flight.wait()
            if self._error is not None:
                raise self._error
            if file.sealed or self.shut:
                return
            try:
                (how or file.file.force)()
            except OSError as error:
                self._error = error
                raise

    def begin(self, file: GatedFile, begin: Begin, landed: Landed) -> bool:
        """Starts a force of a file that needs no thread; `landed(error)` when it has ended.

        False: nothing was begun, `force` does it, or says why not.
        """
        if self._flight is not None or not self._lock.acquire(blocking=False):
            return False
        try:
            if self._error is not None or file.sealed or self.shut:
                return False
            self._pins.pin()
            try:
                self._flight = begin(file.file, partial(self._landed, landed))
            finally:
                if self._flight is None:
                    self._pins.unpin()
            return self._flight is not None
        finally:
            self._lock.release()

    def _landed(self, landed: Landed, error: OSError | None) -> None:
        if error is not None:
            self._error = self._error or error
        self._flight = None  # last: a worker that does not wait for it any more must find the error
        self._pins.unpin()
        landed(error)

    def keep_unforced(self, files: Sequence[Gated], forced: int) -> list[Gated]:
        """Those of `files` with bytes that are not known to be forced: they must never be closed, and are kept open.

        `forced`: up to there the log is.
        """
        unforced = [file for file in files if not file.sealed and (file.end > forced or self._error)]
        KEPT_OPEN.extend(file.file for file in unforced)
        return unforced
