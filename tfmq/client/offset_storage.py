"""Which storage the argument `offsets` of a consumer names. What a storage is: `tfmq.offsets.stored`."""

from typing import Final

from journal.disk import Disk
from tfmq.errors import BadRequest, NotSupported
from tfmq.offsets.file import FileOffsets as FileOffsets
from tfmq.offsets.stored import ClaimingStorage as ClaimingStorage
from tfmq.offsets.stored import OffsetStorage as OffsetStorage
from tfmq.offsets.stored import StoredOffset as StoredOffset
from tfmq.offsets.stored import claim as claim
from tfmq.offsets.stored import fenced_partitions as fenced_partitions

FILE_PREFIX: Final = "file:"
LATER_PREFIXES: Final = ("zookeeper:", "sql:")


def open_storage(offsets: "str | OffsetStorage", disk: Disk | None = None) -> OffsetStorage | None:
    """The storage that the argument `offsets` of a consumer names; None stands for the broker.

    Raises BadRequest for what names none, NotSupported for those that this release lacks.
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
    if offsets.startswith(LATER_PREFIXES):
        raise NotSupported(
            f'offsets="{offsets}" needs a later release; this one has "broker" and "file:PATH".'
        )
    raise BadRequest(f'offsets={offsets!r} names no storage; write "broker" or "file:PATH".')
