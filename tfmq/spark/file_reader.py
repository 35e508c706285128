"""Reader of partition logs from the segment files of a data folder on this machine.

The reader works whether the broker of the folder runs or not: the reader locks and writes nothing, and reads each log
only up to its durable offset.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Final, TypeVar

from journal import filenames
from journal.disk import Disk, RealDisk
from journal.errors import BelowStart, BeyondEnd, Corrupt, CutAway, JournalError, NewerFormat, NotARecord
from journal.log.checkpoint import WrongLog, read_log_id
from journal.log.readonly import ReadOnlyLog
from journal.record.block import blocks_of
from journal.record.format import FLAG_FILLER, BadRecord, records_of, split_id
from tfmq import errors
from tfmq.data_dir import META_NAME, VERSION_NAME, decode_version
from tfmq.errors import BadRequest, Damaged, NotSupported, OffsetOutOfRange, UnknownPartition, UnknownTopic
from tfmq.spark import ranges
from tfmq.spark.errors import damaged_error, describe_read_error, replaced_topic_error, truncated_error
from tfmq.spark.ranges import BlockRun, Bounds, OffsetRange, PartitionLog

OPEN_LOGS_MAX: Final = 64
"""Maximum number of logs that a reader keeps open, because each open log may keep several files open."""
ONE_BLOCK: Final = 1
"""Maximum bytes of a read of a single block. A read always returns the whole block that has the requested offset."""

Found = TypeVar("Found")


class FolderLogReader:
    """`LogReader` of the data folder at `path`. Raises BadRequest (no data folder), NotSupported (a newer format)."""

    def __init__(self, path: str, disk: Disk | None = None) -> None:
        self._disk = disk or RealDisk()
        self._path = absolute_path(path)
        self._open_logs: OrderedDict[PartitionLog, ReadOnlyLog] = OrderedDict()
        with self._translated_errors():
            self._topics = FolderTopics(self._disk, self._path)

    def broker_id(self) -> str:
        return self._topics.broker_id

    def topics(self) -> list[str]:
        with self._translated_errors():
            return self._topics.names()

    def partitions(self, topic: str) -> list[PartitionLog]:
        with self._translated_errors():
            return self._topics.partitions(topic)

    def bounds(self, log: PartitionLog) -> Bounds:
        marks = self._query(log, lambda seen: seen.refresh())
        return Bounds(marks.first, marks.durable, marks.first_ordinal, marks.durable_ordinal)

    def all_bounds(self, logs: Sequence[PartitionLog]) -> list[Bounds]:
        return [self.bounds(log) for log in logs]

    def offset_at_time(self, log: PartitionLog, ms: int) -> int:
        return self._query(log, lambda seen: seen.offset_of_time(ms))

    def offset_of_ordinal(self, log: PartitionLog, ordinal: int) -> int:
        return self._query(log, lambda seen: seen.offset_of_ordinal(ordinal))

    def next_message_offset(self, log: PartitionLog, offset: int) -> int:

        def find(seen: ReadOnlyLog) -> int:
            block_offset = seen.seek_offset(offset)
            while block_offset < seen.checkpoint.durable:
                chunk = seen.read(block_offset, ONE_BLOCK)
                following = ranges.next_message(BlockRun(chunk.start, chunk.data), max(offset, block_offset))
                if following is not None:
                    return following
                block_offset = chunk.next
            return seen.checkpoint.durable

        return self._query(log, find)

    def ordinal_at_or_after(self, log: PartitionLog, offset: int) -> int:
        start = self.next_message_offset(log, offset)

        def count(seen: ReadOnlyLog) -> int:
            if start == seen.checkpoint.durable:
                return seen.checkpoint.durable_ordinal
            chunk = seen.read(start, ONE_BLOCK)
            block = next(blocks_of(chunk.data, chunk.start, log.log_id))
            before = [each for each in records_of(block.data) if chunk.start + each.position < start]
            lost = sum(each.checksum - 1 for each in before if each.flag & FLAG_FILLER)
            return block.control.first_ordinal + len(before) + lost

        return self._query(log, count)

    def split(self, range: OffsetRange, size: int) -> list[OffsetRange]:
        return ranges.split_range(range, self._query(range.log, lambda seen: _find_cuts(seen, range, size)))

    def read_blocks(self, range: OffsetRange, max_bytes: int = ranges.READ_BYTES) -> Iterator[BlockRun]:
        log, offset, epoch = range.log, range.start, None
        while offset < range.end:
            size = min(max_bytes, range.end - offset)
            # `epoch`: the log's epoch at the previous read. `read` raises if recovery has cut off records since then.
            chunk, epoch = self._query(
                log,
                lambda seen: (seen.read(offset, size, epoch), seen.checkpoint.epoch),  # noqa: B023
                offset,
            )
            if not chunk.data:
                marks = self.bounds(log)
                raise describe_read_error(OffsetOutOfRange(first=marks.first, end=marks.end), log, range.end)
            offset = chunk.next
            yield BlockRun(chunk.start, chunk.data)

    def close(self) -> None:
        while self._open_logs:
            self._open_logs.popitem()[1].close()

    def __enter__(self) -> FolderLogReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _query(self, log: PartitionLog, query: Callable[[ReadOnlyLog], Found], offset: int | None = None) -> Found:
        """Open and refresh `log`, and return the result of `query(log)`. `offset`: the offset that errors name."""
        with self._translated_errors(log, offset):
            seen = self._open_log(log)
            seen.refresh()
            return query(seen)

    def _open_log(self, log: PartitionLog) -> ReadOnlyLog:
        found = self._open_logs.get(log)
        if found is None:
            found = ReadOnlyLog(self._disk, self._topics.partition_path(log.topic, log.partition), log.log_id)
            while len(self._open_logs) >= OPEN_LOGS_MAX:
                self._open_logs.popitem(last=False)[1].close()
            self._open_logs[log] = found
        self._open_logs.move_to_end(log)
        return found

    @contextmanager
    def _translated_errors(self, log: PartitionLog | None = None, offset: int | None = None) -> Iterator[None]:
        try:
            yield
        except (OSError, JournalError) as error:
            if isinstance(error, errors.TfmqError):
                raise
            raise self._tfmq_error(error, log, offset) from error

    def _tfmq_error(
        self, error: OSError | JournalError, log: PartitionLog | None, offset: int | None
    ) -> errors.TfmqError:
        if isinstance(error, NewerFormat):
            return NotSupported(f"{error}.")
        if isinstance(error, PermissionError):
            return BadRequest(
                f"{error.filename or self._path} cannot be read by this process: {error.strerror}. The user of Spark"
                " needs the right to read the data folder."
            )
        if log is None:
            return Damaged(f"The data folder {self._path} cannot be read: {error}.", first=0, next=0)
        if isinstance(error, WrongLog):
            return replaced_topic_error(log)
        if isinstance(error, FileNotFoundError):
            return replaced_topic_error(log, deleted=True)
        if isinstance(error, BelowStart | BeyondEnd):
            marks = self._open_logs[log].checkpoint
            return describe_read_error(
                OffsetOutOfRange(first=marks.first, end=marks.durable, offset=error.offset), log, offset
            )
        if isinstance(error, CutAway):
            return truncated_error(log, error.cut)
        if isinstance(error, NotARecord):
            return describe_read_error(errors.NotARecord(offset=error.offset), log, error.offset)
        if isinstance(error, Corrupt):
            return damaged_error(log, error.first, error.next, error.reason)
        first = offset or 0
        return damaged_error(log, first, first + (isinstance(error, BadRecord)), str(error))


def _find_cuts(seen: ReadOnlyLog, range: OffsetRange, size: int) -> list[int]:
    found = []
    for offset in ranges.split_targets(range, size):
        try:
            found.append(seen.seek_offset(offset))
        except Corrupt:
            continue  # the range is not split inside damage; the task that reads the damaged part reports the damage
    return found


LISTING_ATTEMPTS: Final = 5
"""Maximum attempts to list all partitions of a topic: the broker may be creating or deleting the topic at this time."""
TOPICS_NAMED_MAX: Final = 5
"""Maximum number of topics that an error names."""


class FolderTopics:
    """Topics and partitions in the data folder at `path`.

    The constructor raises BadRequest if `path` is no data folder, and NotSupported if a newer tfmq has written it. The
    methods raise OSError if a file cannot be read, and JournalError if a log's checkpoint is damaged.
    """

    def __init__(self, disk: Disk, path: str) -> None:
        self._disk = disk
        self.path = path
        self.broker_id = ""
        self._check_folder()

    def names(self) -> list[str]:
        return sorted(self._partition_numbers())

    def partitions(self, topic: str) -> list[PartitionLog]:
        """Return the topic's partitions by number. Raises UnknownTopic, UnknownPartition (not all are there)."""
        trouble = ""
        for _ in range(LISTING_ATTEMPTS):
            found = self._partition_logs(topic)
            trouble = _describe_mismatch(found)
            if not trouble:
                break
        if not found:
            known = ", ".join(self.names()[:TOPICS_NAMED_MAX]) or "none"
            raise UnknownTopic(f"There is no topic {topic} in the folder {self.path}; it has {known}.")
        if trouble:
            raise UnknownPartition(f"The folder {self.path} does not have all of {topic}: {trouble}.")
        return found

    def partition_path(self, topic: str, partition: int) -> str:
        return filenames.join(self.path, filenames.partition_folder(topic, partition))

    def _partition_logs(self, topic: str) -> list[PartitionLog]:
        """Return the partitions of `topic`, without those whose folder has no checkpoint to read the log id from."""
        found = []
        for number in sorted(self._partition_numbers().get(topic, ())):
            log_id = read_log_id(self._disk, self.partition_path(topic, number))
            if log_id is not None:
                found.append(PartitionLog(topic, number, split_id(log_id)[0], log_id))
        return found

    def _partition_numbers(self) -> dict[str, list[int]]:
        """Return a dict: topic -> numbers of the topic's partitions whose folders have a checkpoint."""
        found: dict[str, list[int]] = {}
        for name in self._disk.list(self.path):
            partition = filenames.parse_partition_folder(name)
            mark = filenames.join(filenames.join(self.path, name), filenames.log_checkpoint_name())
            if partition is not None and self._disk.exists(mark):
                found.setdefault(partition[0], []).append(partition[1])
        return found

    def _check_folder(self) -> None:
        disk, path = self._disk, self.path
        if not disk.exists(path):
            raise BadRequest(
                f"There is no folder {path} on this machine: path names the data folder of a broker that runs here;"
                " write servers for one elsewhere."
            )
        if not disk.is_folder(path):
            raise BadRequest(f"{path} is a file: path names the data folder of a broker.")
        if disk.exists(filenames.join(path, filenames.log_checkpoint_name())):
            above = path.rstrip("/").rpartition("/")[0]
            raise BadRequest(
                f"{path} is the folder of one partition: name the data folder above it, {above}, and the topic in"
                " subscribe."
            )
        meta = filenames.join(path, META_NAME)
        if disk.exists(meta):
            self._read_version(filenames.join(meta, VERSION_NAME))
        elif not self._partition_numbers():
            raise BadRequest(f"{path} is no data folder of a broker: it has neither {META_NAME} nor a partition in it.")

    def _read_version(self, path: str) -> None:
        if not self._disk.exists(path):
            return  # the broker is starting for the first time and has not written the file yet
        with closing(self._disk.open_read(path)) as file:
            text = file.pread(file.size(), 0)
        try:
            self.broker_id = decode_version(text, path).node
        except Corrupt:
            return  # the damaged file is not needed: the checkpoint of each log has the format version, too
        except NewerFormat as error:
            raise NotSupported(
                f"The data folder {self.path} has format {error.found}, this tfmq reads up to {error.known}: upgrade it"
                " here."
            ) from error


def _describe_mismatch(logs: list[PartitionLog]) -> str:
    """Return a text that names the partitions missing in `logs`, or says that `logs` mix incarnations; else ""."""
    numbers = {log.partition for log in logs}
    missing = sorted(set(range(max(numbers, default=-1) + 1)) - numbers)
    if missing:
        return f"{'partition' if len(missing) == 1 else 'partitions'} {', '.join(map(str, missing))} missing"
    if len({log.incarnation for log in logs}) > 1:
        return "its partitions are those of different topics of that name"
    return ""


def absolute_path(path: str) -> str:
    """Return the absolute form of `path`, with ~ expanded and without a file: prefix."""
    return os.path.abspath(os.path.expanduser(path.removeprefix("file://").removeprefix("file:")))
