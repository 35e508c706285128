"""Errors of the journal. All derive from `JournalError`, so that a caller can catch them all.

Errors of the disk are passed on as `OSError`, except that a full disk is `Full` and a held lock is `Locked`.
"""

from __future__ import annotations


class JournalError(Exception):
    """Base class of all errors of the journal."""


class Corrupt(JournalError):
    """Bytes on the disk fail a check.

    `path` names the file, `reason` the check. `first <= x < next` is the range that cannot be trusted, in offsets if
    the file is a segment, else in positions. `first` and `next` are equal if the error concerns the whole file or
    folder.
    """

    def __init__(self, path: str, first: int, next: int, reason: str) -> None:
        where = path if first == next else f"{path} is damaged from {first} to {next}"
        super().__init__(f"{where}: {reason}")
        self.path = path
        self.first = first
        self.next = next
        self.reason = reason


class Lost(Corrupt):
    """The bytes were damaged, and a repair has replaced them. Their messages or entries cannot be recovered."""


class BadBatch(JournalError):
    """A batch violates the record format. No record of the batch was written."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the batch is rejected: {reason}")
        self.reason = reason


class OutOfRange(JournalError):
    """A requested offset is not in the log."""


class BelowStart(OutOfRange):
    """`offset` was deleted by retention or truncation; the log starts at `first`."""

    def __init__(self, offset: int, first: int) -> None:
        super().__init__(f"offset {offset} was deleted; the log starts at {first}")
        self.offset = offset
        self.first = first


class BeyondEnd(OutOfRange):
    """`offset` is above `end`, the offset of the next record."""

    def __init__(self, offset: int, end: int) -> None:
        super().__init__(f"offset {offset} is not written yet; the log ends at {end}")
        self.offset = offset
        self.end = end


class NotARecord(JournalError):
    """`offset` is inside the log, but no record starts there."""

    def __init__(self, offset: int) -> None:
        super().__init__(f"no record starts at offset {offset}; seek to the nearest one before it")
        self.offset = offset


class CutAway(JournalError):
    """Recovery truncated the log at `cut` after a reader had read up to `offset`: the records after `cut` are lost."""

    def __init__(self, offset: int, cut: int) -> None:
        super().__init__(f"the log was truncated at {cut} since offset {offset} was read; continue at {cut}")
        self.offset = offset
        self.cut = cut


class Stopped(JournalError):
    """The log accepts no writes, also after restarts, until an operator resumes it. Reads are possible."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the log is stopped for writes: {reason}")
        self.reason = reason


class Full(JournalError):
    """No space, quota or file descriptor left. The operation had no effect and may be retried."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"no room left: {reason}")
        self.reason = reason


class NewerFormat(JournalError):
    """`path` has format version `found`; this library reads versions up to `known`."""

    def __init__(self, path: str, found: int, known: int) -> None:
        super().__init__(f"{path} has format version {found}, this library knows up to {known}: upgrade to read it")
        self.path = path
        self.found = found
        self.known = known


class Locked(JournalError):
    """Another process holds the lock file `path`. `holder`: the process id in the file, "" if there is none."""

    def __init__(self, path: str, holder: str = "") -> None:
        by = f" by process {holder}" if holder else ""
        super().__init__(f"{path} is locked{by}: only one broker may use a data folder")
        self.path = path
        self.holder = holder


class Closed(JournalError):
    """A file or log was used after it was closed."""

    def __init__(self, what: str = "the log") -> None:
        super().__init__(f"{what} is closed")


class TooLarge(JournalError):
    """`size_bytes` is above the limit `max_bytes`."""

    def __init__(self, what: str, size_bytes: int, max_bytes: int) -> None:
        super().__init__(f"{what} has {size_bytes} bytes; at most {max_bytes} are allowed")
        self.size_bytes = size_bytes
        self.max_bytes = max_bytes
