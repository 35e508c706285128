"""Disk space reserved for deletions of topics (`DATA/meta/reserve`), and log lines about a full disk."""

import logging
from collections.abc import Callable
from functools import partial
from hashlib import shake_256
from typing import Any, Final

from journal.clock import Clock
from journal.disk import Disk, write_all
from journal.errors import Full
from journal.filenames import join
from tfmq.broker.reply import Run
from tfmq.broker.timers import Timers

logger = logging.getLogger("tfmq.broker")

NAME: Final = "reserve"

PIECE_BYTES: Final = 256 << 10
"""Size of a piece, the disk space for one entry of the catalog. An entry is small, but a file system allocates whole
blocks, and needs some blocks for its own metadata."""

PIECE_COUNT: Final = 4
"""Number of pieces in the reserve file. The deletion of a topic needs two, one for each catalog entry. The others are
for a roll of the catalog's log, and for a second deletion."""

SIZE_BYTES: Final = PIECE_COUNT * PIECE_BYTES

FREE_BYTES_MIN: Final = 8 * SIZE_BYTES
"""The reserve file is filled only if at least this many bytes are free. Less free space is left to messages."""

RETRY_SECONDS: Final = 10.0
"""Minimum time between two attempts to bring the file back to its full size."""

RECOVERED_SECONDS: Final = 10.0
"""The disk counts as full until appends succeed and none is rejected for this long. One success proves nothing:
on a full disk small appends still succeed between rejected ones, and clients retry several times per second."""


class FullDiskLog:
    """Writes one log line when appends fail because of a full disk or too many open files, and one when that ends."""

    def __init__(self, timers: Timers) -> None:
        self._timers = timers
        self.is_full = self._armed = self._appended = self._is_of_files = False
        self._refused_at = 0.0
        self._refused_bytes = 0
        """Size in bytes of the smallest append that was rejected since the disk became full."""

    @property
    def description(self) -> str:
        """What is used up while `is_full` is set."""
        return "No more files can be opened (ulimit -n)." if self._is_of_files else "No space is left on the disk."

    def refused(self, partition: str, size_bytes: int, *, files: bool = False) -> None:
        """Record a rejected append. If `files` is set, the reason is not a full disk, but too many open files."""
        self._refused_at, self._appended = self._timers.now(), False
        self._refused_bytes = min(self._refused_bytes, size_bytes) if self.is_full else size_bytes
        if not self.is_full:
            self.is_full = True
            self._is_of_files = files
            logger.error(
                "no more files can be opened (ulimit -n): %s takes no messages, nor does any partition that needs"
                " a new segment, and new connections are closed; they go on as soon as some are free"
                if files
                else "no space is left on the disk: %s takes no messages, nor does any partition that needs space;"
                " they go on as soon as there is some",
                partition,
            )

    def appended(self, size_bytes: int) -> None:
        """Record a successful append while the disk is full.

        The append proves that there is space again in two cases: if it is at least as large as the smallest rejected
        append, or if no append was rejected in the last RECOVERED_SECONDS.
        """
        if size_bytes >= self._refused_bytes or self._timers.now() >= self._refused_at + RECOVERED_SECONDS:
            self._appended = True
            self._set_timer()

    def _set_timer(self) -> None:
        if not self._armed:
            self._armed = True
            wait = max(0.0, self._refused_at + RECOVERED_SECONDS - self._timers.now())
            self._timers.after(wait, self._check_recovered, deferrable=True)

    def _check_recovered(self) -> None:
        self._armed = False
        if not self._appended:
            return  # an append was rejected after the timer was set; the next successful append sets the timer again
        if self._timers.now() < self._refused_at + RECOVERED_SECONDS:
            self._set_timer()
            return
        self.is_full = self._appended = False
        found = "files can be opened" if self._is_of_files else "there is space on the disk"
        logger.info("%s: partitions take messages again", found)


class SpaceReserve:
    """A file that occupies disk space in pieces of PIECE_BYTES, so that topics can be deleted on a full disk.

    Each deletion must first be written to the catalog. If there is no space for that entry, the file is truncated by
    one piece, and the entry is appended at once in the same thread, before other writers can use the space. `fill` is
    called at the start and in workers, all other methods in the broker's thread.
    """

    def __init__(self, disk: Disk, folder: str, clock: Clock, run: Run) -> None:
        self._disk = disk
        self._folder = folder
        self._path = join(folder, NAME)
        self._clock = clock
        self._run = run
        self._size = 0
        self._filling = False
        self._not_before = 0.0

    def open(self) -> None:
        """Fill the reserve file at startup. Errors are only logged, because the broker works without the file."""
        self._size = _size_or_zero(self.fill)

    def release_piece(self) -> bool:
        """Truncate the reserve file by one piece. Return False if the file has no piece left or is being filled."""
        if self._filling or self._size < PIECE_BYTES:
            return False
        self._size = _size_or_zero(partial(self._truncate, self._size - PIECE_BYTES))
        self._not_before = self._clock.monotonic() + RETRY_SECONDS
        logger.warning("the disk is full: %d bytes are left of the room for deletions", self._size)
        return True

    def refill(self) -> None:
        """Fill the reserve file in a worker, unless it is full, or was changed in the last RETRY_SECONDS."""
        now = self._clock.monotonic()
        if self._filling or self._size == SIZE_BYTES or now < self._not_before:
            return
        self._filling = True
        self._not_before = now + RETRY_SECONDS

        def filled(size: Any, error: BaseException | None) -> None:
            self._filling = False
            self._size = 0 if error is not None else size

        self._run(lambda: _size_or_zero(self.fill), filled)

    def fill(self) -> int:
        """Extend the reserve file to SIZE_BYTES, if at least FREE_BYTES_MIN are free. Return its size in bytes.

        The file system cannot compress the content, and the file is fsynced, so that the space is really allocated.
        Raises OSError, Full.
        """
        exists = self._disk.exists(self._path)
        size = self._disk.size(self._path) if exists else 0
        if size >= SIZE_BYTES or self._disk.free_space(self._folder) < FREE_BYTES_MIN:
            return size
        file = self._disk.open_write(self._path) if exists else self._disk.create(self._path)
        try:
            write_all(file, [shake_256(NAME.encode()).digest(SIZE_BYTES)[size:]], size)
            file.force()
        except Full:
            file.truncate(size)
            return size
        finally:
            file.close()
        return SIZE_BYTES

    def _truncate(self, size: int) -> int:
        file = self._disk.open_write(self._path)
        try:
            file.truncate(size)
        finally:
            file.close()
        return size


def _size_or_zero(work: Callable[[], int]) -> int:
    """Return the size that `work` returns. If `work` fails, log the error and return 0."""
    try:
        return work()
    except (OSError, Full) as error:
        logger.warning("no room could be kept for deletions on a full disk: %s", error)
        return 0
