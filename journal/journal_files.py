"""The files of the transaction journal: which there are, where the journal ends, how far it is forced, what is held.

One object, shared by the parts of a journal. The owner's thread changes it, or a worker that does the owner's work.
Readers in other threads take each value once: the list of files is replaced, never changed. A file that leaves the list
is closed when no read is under way. A *hold* keeps a file; an *idle* one is sealed and nothing holds it.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from operator import attrgetter

from journal.errors import Closed
from journal.journal_file import JournalFile
from journal.pins import Pins

_first = attrgetter("first")


class JournalFiles:
    """See the module. `files` by rising number; places between them may be missing where files were given up."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.files: tuple[JournalFile, ...] = ()
        self.end = 0
        """The place where the next entry goes."""
        self.forced = 0
        """The place up to which everything is on the disk."""
        self.stopped: str | None = None
        self.idle = 0
        """How many files are idle."""
        self.lock = threading.RLock()
        """Held for short changes of several fields; never for anything that may wait for the disk."""
        self.pins = Pins()
        """What keeps files open that have left the list."""

    @property
    def active(self) -> JournalFile:
        """The file that is written. Raises Closed."""
        files = self.files
        if not files:
            raise Closed("the transaction journal")
        return files[-1]

    def forced_to(self, place: int) -> None:
        """Everything up to an append's end is forced; never goes back."""
        with self.lock:
            if place > self.forced:
                self.forced = place

    def find(self, place: int) -> JournalFile | None:
        """The file that has the byte at `place`; None: there is none."""
        return find(self.files, place)

    def seal(self) -> None:
        """The active file, whole and forced, takes no more entries."""
        with self.lock:
            active = self.active
            if not active.sealed:
                active.sealed = True
                self.idle += not active.holds

    def add(self, file: JournalFile) -> None:
        """The next file, forced, goes behind the others: what is appended comes into it."""
        with self.lock:
            self.files = (*self.files, file)
            self.end = file.end
            self.forced = file.end

    def hold(self, place: int) -> None:
        """One hold more on the file of `place`. Raises KeyError: no file has it."""
        with self.lock:
            file = self._holder(place)
            self.idle -= file.sealed and not file.holds
            file.holds += 1

    def release(self, place: int) -> None:
        """One hold less. Raises KeyError: nothing holds it."""
        with self.lock:
            file = self._holder(place)
            if not file.holds:
                raise KeyError(place)
            file.holds -= 1
            self.idle += file.sealed and not file.holds

    def _holder(self, place: int) -> JournalFile:
        files = self.files
        if files and files[-1].first <= place < self.end:
            return files[-1]
        file = find(files, place)
        if file is None:
            raise KeyError(place)
        return file

    def take_idle(self, kept: Callable[[int], bool]) -> tuple[JournalFile, ...]:
        """Takes the idle files, but those whose numbers are `kept`, out of the list, and closes them; answers them."""
        with self.lock:
            gone = tuple(
                file for file in self.files[:-1] if file.sealed and not file.holds and not kept(file.number)
            )
            self.idle -= len(gone)
            self.files = tuple(file for file in self.files if file not in gone)
        self.pins.retire(gone)
        return gone

    def drop(self, kept_open: Collection[JournalFile] = ()) -> None:
        """No files any more; those of `kept_open` are not closed."""
        with self.lock:
            gone, self.files = self.files, ()
        self.pins.retire(file for file in gone if file not in kept_open)

    @contextmanager
    def reading(self) -> Iterator[tuple[JournalFile, ...]]:
        """The files, none of which is closed before the end of the block."""
        with self.pins:
            yield self.files


def find(files: tuple[JournalFile, ...], place: int) -> JournalFile | None:
    """The one of `files` that has the byte at `place`."""
    number = bisect_right(files, place, key=_first) - 1
    if number < 0 or place >= files[number].end:
        return None
    return files[number]
