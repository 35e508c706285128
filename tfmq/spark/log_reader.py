"""Where ranges of partitions are read from: a broker over the wire, or the segment files of its data folder.

    with open_logs(Address(servers="127.0.0.1:8367")) as logs:
        (log, *_) = logs.partitions("orders")
        bounds = logs.bounds(log)
        for piece in logs.split(Range(log, bounds.first, bounds.end), 64 << 20):
            for chunk in logs.chunks(piece): ...

Both give the same bytes for the same range. Nothing behind the forced mark is ever given.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import NamedTuple, Protocol

from tfmq.client.connection.connection import SECONDS
from tfmq.errors import NOT_DONE, BadRequest
from tfmq.spark.ranges import CHUNK_BYTES, Bounds, Chunk, PartitionLog, Range

__all__ = ["Address", "Bounds", "Chunk", "Logs", "PartitionLog", "Range", "open_logs"]


class Address(NamedTuple):
    """Exactly one of `servers` (as clients take it: "host:port,host:port") and `path` (a DATA folder on this machine).
    `timeout`: seconds that a broker which is away, or does not answer, is waited for. It can be pickled."""

    servers: str | None = None
    path: str | None = None
    timeout: float = SECONDS


class Logs(Protocol):
    """See the module. One thread at a time. Errors are `TfmqError`s whose sentences name the partition."""

    def node(self) -> str:
        """The broker's own id, for ever the same for the same data; "" where a folder does not say it."""
        ...

    def topics(self) -> list[str]:
        """All names, sorted."""
        ...

    def partitions(self, topic: str) -> list[PartitionLog]:
        """By number, as they are now. Raises UnknownTopic."""
        ...

    def bounds(self, log: PartitionLog) -> Bounds:
        """What may be read now. Raises UnknownTopic: deleted, or made anew."""
        ...

    def all_bounds(self, logs: Sequence[PartitionLog]) -> list[Bounds]:
        """`bounds` of many, asked for together."""
        ...

    def at_time(self, log: PartitionLog, ms: int) -> int:
        """The offset of the first append at or after `ms` since 1970, else the end."""
        ...

    def at_ordinal(self, log: PartitionLog, ordinal: int) -> int:
        """The offset of that record; the first one that is left, or the end, where it is not there."""
        ...

    def at_or_after(self, log: PartitionLog, offset: int) -> int:
        """Where the first message at or behind `offset` begins, within the bounds; the end where there is none. Raises
        Damaged."""
        ...

    def ordinal_at(self, log: PartitionLog, offset: int) -> int:
        """The number of the first record at or behind `offset`; -1 where damage hides it."""
        ...

    def split(self, range: Range, size: int) -> list[Range]:
        """`range` in pieces of at most about `size` bytes and of nearly one size, cut at record starts; every record is
        in exactly one. [] for an empty range."""
        ...

    def chunks(self, range: Range, max_bytes: int = CHUNK_BYTES) -> Iterator[Chunk]:
        """The control blocks that hold the records of `range`, in order and without a gap. Blocks at either end may
        hold records outside of it. A chunk has at most `max_bytes`, or one block.

        Raises OffsetOutOfRange (retention took it, or it is not there yet), LogTruncated, Damaged, UnknownTopic,
        ConnectionFailed, TimedOut.
        """
        ...

    def close(self) -> None:
        """Let go of connections and files. Twice is harmless."""
        ...

    def __enter__(self) -> Logs: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def open_logs(address: Address, *, patient: bool = False) -> Logs:
    """The logs at `address`. A folder is looked at now, a broker with the first question. `patient`: it was there
    before, so it is waited for from the first question on.

    Raises BadRequest: not exactly one address is given, or the path is no data folder.
    """
    if (address.servers is None) == (address.path is None):
        raise BadRequest("Name either servers or path, one of them.", outcome=NOT_DONE)
    if address.path is not None:
        from tfmq.spark.file_reader import FolderLogs  # each without what the other one needs

        return FolderLogs(address.path)
    from tfmq.spark.wire_reader import WireLogs

    return WireLogs(address.servers, address.timeout, patient=patient)
