"""What the journal raises. One tree, so that a caller can catch `JournalError` and know that nothing else of
ours escapes; an `OSError` from the disk comes through as it is, except a full disk (`Full`) and a held lock
(`Locked`).

    JournalError
     +- Corrupt          bytes on the disk are not what was written
     |   +- Lost         they were, and a repair has given them up
     +- BadBatch         what was handed to append is not well formed
     +- OutOfRange
     |   +- BelowStart   deleted by retention or truncation
     |   +- BeyondEnd    not written yet
     +- NotARecord       the offset lies inside a record
     +- CutAway          the reader's position lies beyond a cut that it does not know of
     +- Stopped          the log takes no writes until an operator acts
     +- Full             no space, no descriptor; writing goes on when there is some
     +- NewerFormat      a later version of this library wrote the file
     +- Locked           another process has the folder open
     +- Closed           used after close
     +- TooLarge         larger than a limit allows
"""

from __future__ import annotations


class JournalError(Exception):
    """The root of everything that the journal raises by itself."""


class Corrupt(JournalError):
    """Bytes on the disk fail a check.

    `path` names the file; `first` and `next` are the range that cannot be trusted, `first <= x < next`:
    offsets where the file is a segment, positions elsewhere; both are the same where it is about the file or folder
    as a whole. `reason` says which check failed.
    """

    def __init__(self, path: str, first: int, next: int, reason: str) -> None:
        where = path if first == next else f"{path} is damaged from {first} to {next}"
        super().__init__(f"{where}: {reason}")
        self.path = path
        self.first = first
        self.next = next
        self.reason = reason


class Lost(Corrupt):
    """What was there could not be read any more, and a repair has closed the gap: it will never come back."""


class BadBatch(JournalError):
    """A batch breaks a rule of the record format; nothing of it was written."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the batch is refused: {reason}")
        self.reason = reason


class OutOfRange(JournalError):
    """An offset that the log does not hold."""


class BelowStart(OutOfRange):
    """`offset` was deleted by retention or truncation; the log begins at `first`."""

    def __init__(self, offset: int, first: int) -> None:
        super().__init__(f"offset {offset} was deleted; the log begins at {first}")
        self.offset = offset
        self.first = first


class BeyondEnd(OutOfRange):
    """`offset` lies above `end`, where the next record will go."""

    def __init__(self, offset: int, end: int) -> None:
        super().__init__(f"offset {offset} is not written yet; the log ends at {end}")
        self.offset = offset
        self.end = end


class NotARecord(JournalError):
    """`offset` is inside the log, but no record begins there."""

    def __init__(self, offset: int) -> None:
        super().__init__(f"no record begins at offset {offset}; seek to the nearest one before it")
        self.offset = offset


class CutAway(JournalError):
    """Recovery cut the log at `cut` after the reader had read up to `offset`: what it read there is gone."""

    def __init__(self, offset: int, cut: int) -> None:
        super().__init__(f"the log was cut at {cut} since offset {offset} was read; go back to {cut}")
        self.offset = offset
        self.cut = cut


class Stopped(JournalError):
    """The log takes no writes, over restarts too, until an operator resumes it. Reading goes on."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the log is stopped for writes: {reason}")
        self.reason = reason


class Full(JournalError):
    """No space, quota or file descriptor left; what was attempted left nothing behind, and may be tried
    again.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(f"no room left: {reason}")
        self.reason = reason


class NewerFormat(JournalError):
    """`path` has format version `found`; this library reads versions up to `known`."""

    def __init__(self, path: str, found: int, known: int) -> None:
        super().__init__(
            f"{path} has format version {found}, this library knows up to {known}: upgrade to read it"
        )
        self.path = path
        self.found = found
        self.known = known


class Locked(JournalError):
    """Another process holds the lock file `path`; `holder` is what it wrote there (its process id), if
    anything.
    """

    def __init__(self, path: str, holder: str = "") -> None:
        by = f" by process {holder}" if holder else ""
        super().__init__(f"{path} is held{by}: only one broker may use a data folder")
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
