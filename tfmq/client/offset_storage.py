"""Which storage the argument `offsets` of a consumer names. What a storage is: `tfmq.offsets.storage`."""

from typing import Final

from journal.disk import Disk
from tfmq.errors import BadRequest
from tfmq.offsets.file import FileOffsets as FileOffsets
from tfmq.offsets.storage import ClaimingStorage as ClaimingStorage
from tfmq.offsets.storage import OffsetStorage as OffsetStorage
from tfmq.offsets.storage import PartitionName as PartitionName
from tfmq.offsets.storage import StoredOffset as StoredOffset
from tfmq.offsets.storage import claim as claim
from tfmq.offsets.storage import fenced_partitions as fenced_partitions
from tfmq.offsets.storage import shown_url

FILE_PREFIX: Final = "file:"
SQL_PREFIX: Final = "sql:"
ZOOKEEPER_PREFIX: Final = "zookeeper://"
WORDS: Final = '"broker", "file:PATH", "sql:URL" or "zookeeper://HOST:PORT/ROOT"'


def open_storage(offsets: "str | OffsetStorage", disk: Disk | None = None) -> OffsetStorage | None:
    """The storage that the argument `offsets` of a consumer names; None stands for the broker. Touches no network.

    Raises BadRequest for what names none, NotSupported where a library is missing, with the words to install it.
    """
    if not isinstance(offsets, str):
        if isinstance(offsets, OffsetStorage):
            return offsets
        raise BadRequest(
            f"offsets= takes text or an OffsetStorage (read, save, close), not {type(offsets).__name__}."
        )
    if offsets == "broker":
        return None
    if offsets.startswith(FILE_PREFIX) and len(offsets) > len(FILE_PREFIX):
        return FileOffsets(offsets.removeprefix(FILE_PREFIX), disk)
    if offsets.startswith(SQL_PREFIX):
        from tfmq.offsets.sql import SqlOffsets  # SQLAlchemy is for who uses it

        return SqlOffsets(offsets.removeprefix(SQL_PREFIX))
    if offsets.startswith(ZOOKEEPER_PREFIX):
        from tfmq.zookeeper.offsets import ZooKeeperOffsets  # and so is kazoo

        return ZooKeeperOffsets(offsets)
    raise BadRequest(f"offsets={shown_url(offsets)!r} names no storage; write {WORDS}.")
