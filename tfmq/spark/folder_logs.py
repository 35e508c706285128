"""Ranges of partitions from the segment files of a data folder on this machine, beside the broker that writes it.

Nothing is locked, nothing is written, and no broker need run: what lies below the forced marks is read as it lies.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Final, NoReturn, TypeVar

from journal.disk import Disk, RealDisk
from journal.errors import BelowStart, BeyondEnd, Corrupt, CutAway, JournalError, NewerFormat, NotARecord
from journal.log.checkpoint import WrongLog
from journal.log.readonly import Onlooker
from journal.record import batch
from journal.record.block import blocks_of
from journal.record.format import FLAG_FILLER, BadRecord, records_of
from tfmq import errors
from tfmq.errors import BadRequest, Damaged, NotSupported, OffsetOutOfRange
from tfmq.spark.folder_topics import FolderTopics, absolute
from tfmq.spark.ranges import CHUNK_BYTES, Bounds, Chunk, PartitionLog, Range, message_starts, pieces, targets
from tfmq.spark.read_errors import damaged, renewed, told, truncated

LOGS_MAX: Final = 64
"""Logs of which the last look is kept; each may have some files open."""
ONE_BLOCK: Final = 1
"""Fewer bytes than any block has: a read gives just the block that holds the offset."""

Found = TypeVar("Found")


class FolderLogs:
    """`Logs` of the data folder at `path`. Raises BadRequest for what is none, NotSupported for a newer one."""

    def __init__(self, path: str, disk: Disk | None = None) -> None:
        self._disk = disk or RealDisk()
        self._path = absolute(path)
        self._topics = self._told(None, lambda: FolderTopics(self._disk, self._path))
        self._onlookers: OrderedDict[PartitionLog, Onlooker] = OrderedDict()

    def node(self) -> str:
        """See `Logs`."""
        return self._topics.node

    def topics(self) -> list[str]:
        """See `Logs`."""
        return self._told(None, self._topics.names)

    def partitions(self, topic: str) -> list[PartitionLog]:
        """See `Logs`."""
        return self._told(None, lambda: self._topics.partitions(topic))

    def bounds(self, log: PartitionLog) -> Bounds:
        """See `Logs`."""
        marks = self._ask(log, lambda seen: seen.look())
        return Bounds(marks.first, marks.forced, marks.first_ordinal, marks.forced_ordinal)

    def all_bounds(self, logs: Sequence[PartitionLog]) -> list[Bounds]:
        """See `Logs`."""
        return [self.bounds(log) for log in logs]

    def at_time(self, log: PartitionLog, ms: int) -> int:
        """See `Logs`."""
        return self._ask(log, lambda seen: seen.offset_of_time(ms))

    def at_ordinal(self, log: PartitionLog, ordinal: int) -> int:
        """See `Logs`."""
        return self._ask(log, lambda seen: seen.offset_of_ordinal(ordinal))

    def at_or_after(self, log: PartitionLog, offset: int) -> int:
        """See `Logs`."""

        def find(seen: Onlooker) -> int:
            place = seen.seek_offset(offset)
            while place < seen.marks.forced:
                chunk = seen.read(place, ONE_BLOCK)
                starts = message_starts(Chunk(chunk.start, chunk.data))
                following = min((each for each in starts if each >= max(offset, place)), default=None)
                if following is not None:
                    return following
                place = chunk.next
            return seen.marks.forced

        return self._ask(log, find)

    def ordinal_at(self, log: PartitionLog, offset: int) -> int:
        """See `Logs`."""
        start = self.at_or_after(log, offset)

        def count(seen: Onlooker) -> int:
            if start == seen.marks.forced:
                return seen.marks.forced_ordinal
            chunk = seen.read(start, ONE_BLOCK)
            block = next(blocks_of(chunk.data, chunk.start, log.log_id))
            before = [each for each in records_of(block.data) if chunk.start + each.position < start]
            lost = sum(each.checksum - 1 for each in before if each.flag & FLAG_FILLER)
            return block.control.first_ordinal + len(before) + lost

        return self._ask(log, count)

    def split(self, range: Range, size: int) -> list[Range]:
        """See `Logs`."""
        return pieces(range, self._ask(range.log, lambda seen: _cuts(seen, range, size)))

    def chunks(self, range: Range, max_bytes: int = CHUNK_BYTES) -> Iterator[Chunk]:
        """See `Logs`."""
        log, offset, epoch = range.log, range.start, None
        while offset < range.end:
            size = min(max_bytes, range.end - offset)
            chunk, epoch = self._ask(log, lambda seen: _read(seen, offset, size, epoch), offset)  # noqa: B023
            if not chunk.data:
                marks = self.bounds(log)
                raise told(OffsetOutOfRange(first=marks.first, end=marks.end), log, range.end)
            offset = chunk.next
            yield Chunk(chunk.start, chunk.data)

    def close(self) -> None:
        """See `Logs`."""
        while self._onlookers:
            self._onlookers.popitem()[1].close()

    def __enter__(self) -> FolderLogs:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask(
        self, log: PartitionLog, question: Callable[[Onlooker], Found], offset: int | None = None
    ) -> Found:
        """The answer of who looks on at `log`, after a look at its mark."""

        def ask() -> Found:
            seen = self._onlooker(log)
            seen.look()
            return question(seen)

        return self._told(log, ask, offset)

    def _onlooker(self, log: PartitionLog) -> Onlooker:
        found = self._onlookers.get(log)
        if found is None:
            found = Onlooker(self._disk, self._topics.folder(log), log.log_id)
            while len(self._onlookers) >= LOGS_MAX:
                self._onlookers.popitem(last=False)[1].close()
            self._onlookers[log] = found
        self._onlookers.move_to_end(log)
        return found

    def _told(self, log: PartitionLog | None, ask: Callable[[], Found], offset: int | None = None) -> Found:
        """What `ask` gives. Raises what it raises as errors with sentences."""
        try:
            return ask()
        except (OSError, JournalError) as error:
            self._tell(error, log, offset)

    def _tell(self, error: Exception, log: PartitionLog | None, offset: int | None) -> NoReturn:
        if isinstance(error, errors.TfmqError):
            raise error
        if isinstance(error, NewerFormat):
            raise NotSupported(f"{error}.") from error
        if isinstance(error, PermissionError):
            raise BadRequest(
                f"{error.filename or self._path} may not be read by this process: {error.strerror}. Who runs Spark has"
                " to have the right to read the data folder."
            ) from error
        if log is not None:
            raise self._told_of(error, log, offset) from error
        raise Damaged(f"The data folder {self._path} cannot be read: {error}.", first=0, next=0) from error

    def _told_of(self, error: Exception, log: PartitionLog, offset: int | None) -> errors.TfmqError:
        if isinstance(error, WrongLog):
            return renewed(log)
        if isinstance(error, FileNotFoundError):
            return renewed(log, gone=True)
        if isinstance(error, BelowStart | BeyondEnd):
            marks = self._onlookers[log].marks
            return told(
                OffsetOutOfRange(first=marks.first, end=marks.forced, offset=error.offset), log, offset
            )
        if isinstance(error, CutAway):
            return truncated(log, error.cut)
        if isinstance(error, NotARecord):
            return told(errors.NotARecord(offset=error.offset), log, error.offset)
        if isinstance(error, Corrupt):
            return damaged(log, error.first, error.next, error.reason)
        first = offset or 0
        return damaged(log, first, first + (isinstance(error, BadRecord)), str(error))


def _read(seen: Onlooker, offset: int, size: int, epoch: int | None) -> tuple[batch.Chunk, int]:
    """A chunk, and the epoch of the log then."""
    return seen.read(offset, size, epoch), seen.marks.epoch


def _cuts(seen: Onlooker, range: Range, size: int) -> list[int]:
    found = []
    for offset in targets(range, size):
        try:
            found.append(seen.seek_offset(offset))
        except Corrupt:
            continue  # no cut inside of damage; whoever reads that piece is told
    return found
