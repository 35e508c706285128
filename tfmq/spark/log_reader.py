"""Interface to read ranges of partition logs, from a broker or from the files of a broker's data folder.

    with open_log_reader(SourceAddress(servers="127.0.0.1:8367")) as reader:
        (log, *_) = reader.partitions("orders")
        bounds = reader.bounds(log)
        for part in reader.split(OffsetRange(log, bounds.first, bounds.end), 64 << 20):
            for blocks in reader.read_blocks(part): ...

`BrokerLogReader` and `FolderLogReader` return the same bytes for a range, and no bytes after the durable offset.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from tfmq.client.connection.connection import REQUEST_TIMEOUT_SECONDS
from tfmq.errors import NOT_DONE, BadRequest
from tfmq.spark.ranges import READ_BYTES, BlockRun, Bounds, OffsetRange, PartitionLog


class SourceAddress(NamedTuple):
    """Where to read from: exactly one of `servers` and `path`. Can be pickled.

    `servers`: the broker's address, "host:port", perhaps with a password: do not show it · `path`: the data folder of a
    broker, on this machine · `timeout`: seconds to wait for a broker that is down or does not reply.
    """

    servers: str | None = None
    path: str | None = None
    timeout: float = REQUEST_TIMEOUT_SECONDS


class LogReader(Protocol):
    """Reader of partition logs. Not thread-safe. Each TfmqError that a method raises names the partition."""

    def broker_id(self) -> str:
        """Return the permanent id of the broker; "" if the data folder's version file is missing or damaged."""

    def topics(self) -> list[str]:
        """Return the names of all topics, sorted."""

    def partitions(self, topic: str) -> list[PartitionLog]:
        """Return the current partitions of `topic`, sorted by number. Raises UnknownTopic."""

    def bounds(self, log: PartitionLog) -> Bounds:
        """Return the range of `log` that can be read now: from its first record to its durable offset.

        Raises UnknownTopic if the topic was deleted, even if a topic of the same name was created afterwards.
        """

    def all_bounds(self, logs: Sequence[PartitionLog]) -> list[Bounds]:
        """Return the `bounds` of each log in `logs`, in order. The requests for all logs are sent at once."""

    def offset_at_time(self, log: PartitionLog, ms: int) -> int:
        """Return the offset of the first append at or after `ms` since 1970; the durable offset if there is none."""

    def offset_of_ordinal(self, log: PartitionLog, ordinal: int) -> int:
        """Return the offset of the record `ordinal`; the log's start or end if this ordinal is too low or too high."""

    def next_message_offset(self, log: PartitionLog, offset: int) -> int:
        """Return the offset of the first message from `offset` on, or the durable offset. Damage raises Damaged."""

    def ordinal_at_or_after(self, log: PartitionLog, offset: int) -> int:
        """Return the ordinal of the first record at or after `offset`; -1 if damage makes the ordinal unreadable."""

    def split(self, range: OffsetRange, size: int) -> list[OffsetRange]:
        """Split `range` at record starts into ranges of about equal size, each of at most about `size` bytes.

        Every record of `range` is in exactly one of the returned ranges. Returns [] for an empty range.
        """

    def read_blocks(self, range: OffsetRange, max_bytes: int = READ_BYTES) -> Iterator[BlockRun]:
        """Yield the blocks that contain the records of `range`, in order and without gaps.

        The first and the last block may also contain records outside of the range. Each item has blocks of at most
        `max_bytes` together, or a single larger block. If a repair has replaced the record at `range.start` by a
        filler, the first block is the one with the filler.

        Raises OffsetOutOfRange (records were deleted by retention, or are not durable yet), NotARecord (no record
        starts at `range.start`), LogTruncated, Damaged, UnknownTopic, ConnectionFailed, TimedOut.
        """

    def close(self) -> None:
        """Close connections and files. Calling it twice is harmless."""

    def __enter__(self) -> LogReader: ...

    def __exit__(self, *_: object) -> None: ...


def open_log_reader(address: SourceAddress, *, wait_for_broker: bool = False) -> LogReader:
    """Open a reader for `address`. A folder is checked now; a broker is contacted only at the first request.

    `wait_for_broker`: if true, the first request waits up to the timeout for a broker that is down; true is meant for a
    broker that was reachable before. If false, the first request fails after 2 s, because the address may be wrong.

    Raises BadRequest (not exactly one of `servers` and `path`, or no data folder), NotSupported (a newer format).
    """
    if (address.servers is None) == (address.path is None):
        raise BadRequest("Name either servers or path, one of them.", outcome=NOT_DONE)
    if address.path is not None:
        from tfmq.spark.file_reader import FolderLogReader  # imported here: a process needs only one of the readers

        return FolderLogReader(address.path)
    from tfmq.spark.wire_reader import BrokerLogReader

    return BrokerLogReader(address.servers, address.timeout, wait_for_broker=wait_for_broker)
