"""Verification of a sealed segment of a log that is in use, in steps. Only reads.

Each step reads a limited number of bytes through a descriptor of its own, which it closes, so the log may remove the
segment at any time. The checks are those of `journal.fsck.log_verify`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from enum import StrEnum
from typing import Final, NamedTuple

from journal import filenames
from journal.disk import Disk
from journal.fsck.findings import DAMAGE, Finding, VerifyReport
from journal.fsck.log_verify import UNREADABLE, verify_sealed_segment
from journal.log.readonly import ReadOnlyFile
from journal.log.segment import SCAN_SIZE, Segment

FINDINGS_MAX: Final = 100
"""Maximum findings of one segment. The rest of a segment with more is left out, because each may cost a read of 64 MiB
to find the next valid block."""

PIECE_BYTES: Final = 64 << 10
"""Where a read fails, its bytes are read again in pieces of this size, to find which of them cannot be read."""
UNREADABLE_PIECES_MAX: Final = 16
"""The rest of a segment with more unreadable pieces is left out: each may keep the disk busy for many seconds."""
FILLING: Final = b"unreadable bytes"
"""Stands for bytes that cannot be read, repeated. No checksum of a block is right with it."""


class FindingKind(StrEnum):
    """What is wrong with a range of a segment."""

    DAMAGED = "damaged"
    """Its bytes are not those that were written: a checksum or a chain of blocks is wrong."""
    UNREADABLE = "unreadable"
    """The disk reported an error, or the file is missing."""
    INCONSISTENT = "inconsistent"
    """A block is whole, but contradicts the blocks before it."""
    UNVERIFIED = "unverified"
    """The rest of a segment with many findings was left out."""
    INDEX = "index"
    """The index file is wrong. It costs no message: the index in memory is used, and the next start rebuilds it."""


class SegmentFinding(NamedTuple):
    """One finding. The range `first <= x < next` is in offsets; in a finding about an index, in positions of its file.

    `file`: name of the file, without its folder. `reason`: what is wrong, as a reader of the range gets it.
    """

    file: str
    first: int
    next: int
    kind: FindingKind
    reason: str


class VerificationStopped(Exception):
    """The verification was interrupted because `is_stopped` returned true."""


class SealedSegmentVerification:
    """Verification of the sealed `segment`. One thread at a time calls `step`, until `is_done`.

    The segment may be removed, and its log closed, between and during steps. The caller then drops the findings.
    `is_stopped()`: whether a step that runs should end at once; called in the thread of the step.
    """

    def __init__(self, disk: Disk, segment: Segment, is_stopped: Callable[[], bool]) -> None:
        self.segment = segment
        self.findings: list[SegmentFinding] = []
        self.is_done = False
        self._report = VerifyReport()
        self._reader = _UncachedSegment(disk, segment, is_stopped)
        self._steps = verify_sealed_segment(self._reader, self._report, self._set_verified)
        self._verified_size = 0

    def step(self, bytes_max: int) -> int:
        """Verify until at least `bytes_max` bytes were read, or the segment ends. Return how many bytes were read.

        Raises VerificationStopped, and Full if no descriptor is free. Errors of the disk become findings.
        """
        before = self._reader.bytes_read
        try:
            self._continue(before + bytes_max)
        except OSError as error:
            self._add_unreadable(error)
        finally:
            self._reader.file.close()
        return self._reader.bytes_read - before

    def _continue(self, bytes_end: int) -> None:
        while self._reader.bytes_read < bytes_end:
            is_last = next(self._steps, self) is self
            for found in self._report.findings:
                self._add(found)
            self._report.findings.clear()
            if is_last:
                self.is_done = True
                return
            if len(self.findings) >= FINDINGS_MAX:
                self._add_unverified(self.findings[-1].next, f"left out after {FINDINGS_MAX} findings")
                return

    def _add(self, found: Finding) -> None:
        file = found.file.rpartition("/")[2]
        reason = found.what.removeprefix(UNREADABLE)
        if found.field == "block":
            error = self._reader.error_in(found.first, found.next)
            kind = FindingKind.DAMAGED if error is None else FindingKind.UNREADABLE
            reason = error or reason
        elif found.weight == DAMAGE:
            kind = FindingKind.INCONSISTENT
        elif file != self._file_name:
            kind = FindingKind.INDEX
        else:
            return  # a note that concerns no reader, such as a clock that went back
        self.findings.append(SegmentFinding(file, found.first, found.next, kind, reason))

    def _add_unreadable(self, error: OSError) -> None:
        """Add a finding about the bytes that were not verified because of `error`."""
        reason = error.strerror or str(error)
        if self._verified_size == self.segment.size:
            name = filenames.index_name(self.segment.base)
            self.findings.append(SegmentFinding(name, 0, 0, FindingKind.INDEX, reason))
        else:
            first, end = self.segment.base + self._verified_size, self.segment.end
            self.findings.append(SegmentFinding(self._file_name, first, end, FindingKind.UNREADABLE, reason))
        self.is_done = True

    def _add_unverified(self, first: int, reason: str) -> None:
        self.findings.append(SegmentFinding(self._file_name, first, self.segment.end, FindingKind.UNVERIFIED, reason))
        self.is_done = True

    def _set_verified(self, path: str, size: int, total: int) -> None:
        self._verified_size = size

    @property
    def _file_name(self) -> str:
        return self.segment.path.rpartition("/")[2]


class _UncachedSegment(Segment):
    """A sealed segment with a descriptor of its own, whose reads leave the system's cache as it is.

    `pread` opens the file if it is closed. Where the disk reports an error, `pread` returns FILLING and remembers the
    error; it raises the error after UNREADABLE_PIECES_MAX of them.
    """

    def __init__(self, disk: Disk, segment: Segment, is_stopped: Callable[[], bool]) -> None:
        folder = segment.path.rpartition("/")[0]
        file = ReadOnlyFile(disk, segment.path, OrderedDict(), segment.size)
        super().__init__(disk, file, folder, segment.base, segment.log_id)
        self.sealed = True
        self.bytes_read = 0
        """Bytes that reads have requested. Bytes of the index, a thousandth, are not counted."""
        self._is_stopped = is_stopped
        self._errors: dict[int, str] = {}
        """Position of each piece that cannot be read -> the error. The pieces begin at multiples of PIECE_BYTES."""

    def error_in(self, first: int, next: int) -> str | None:
        """Return the error of the disk in a range of offsets; None if all of it could be read."""
        for position, error in self._errors.items():
            if first < self.base + position + PIECE_BYTES and self.base + position < next:
                return error
        return None

    def pread(self, size: int, position: int) -> bytes:
        end = min(position + size, self.size)
        parts: list[bytes | bytearray] = []
        while position < end:
            if self._is_stopped():
                raise VerificationStopped
            wanted = min(SCAN_SIZE, end - position)
            part = self._read(wanted, position)
            parts.append(part)
            position += len(part)
            if len(part) < wanted:
                break
        return b"".join(parts)

    def _read(self, size: int, position: int) -> bytes | bytearray:
        self.bytes_read += size
        try:
            return self.file.pread_uncached(size, position)
        except OSError:
            starts = range(position // PIECE_BYTES * PIECE_BYTES, position + size, PIECE_BYTES)
            return b"".join(self._read_piece(piece, max(piece, position), position + size) for piece in starts)

    def _read_piece(self, piece: int, position: int, end: int) -> bytes | bytearray:
        """Read from `position` to the end of the piece that begins at `piece`, but at most up to `end`."""
        size = min(piece + PIECE_BYTES, end) - position
        if self._is_stopped():
            raise VerificationStopped
        if piece not in self._errors:  # another attempt could keep the disk busy for many seconds again
            try:
                return self.file.pread_uncached(size, position)
            except OSError as error:
                self._errors[piece] = error.strerror or str(error)
                if len(self._errors) > UNREADABLE_PIECES_MAX:
                    raise
        return (FILLING * (size // len(FILLING) + 1))[:size]
