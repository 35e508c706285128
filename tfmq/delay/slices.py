"""What one effect brings: the records of due messages joined to one batch, cut into blocks."""

from collections.abc import Sequence
from typing import Final, NamedTuple

from journal.record.batch import Batch, cut_blocks
from journal.record.block_trailer import holds_control_header
from journal.record.format import ATTRIBUTE_SIZE, HEADER, HEADER_SIZE, BadRecord, split_id

RECORD_HEAD: Final = HEADER_SIZE + ATTRIBUTE_SIZE.size
"""What is looked at of a record: enough to tell its attribute."""


class Slice(NamedTuple):
    """`rows` of those that were asked for are through with it: their records in `batches`, or `damaged` ones that
    are left out. `batches` is empty where all are."""

    batches: Sequence[Batch]
    rows: int
    size_bytes: int
    damaged: int


def join(records: Sequence[bytes | None], key: int, bytes_max: int) -> Slice:
    """As many of the records as one effect takes, at least one. None among them is a damaged one.

    It ends before bytes that would look like a control record of the log `key` where two senders' records meet:
    recovery could not tell them apart.
    """
    count = len(records)
    whole = [record for record in records if record is not None]
    size = sum(map(len, whole))
    if size > bytes_max and len(whole) > 1:
        count, size = _fitting(records, bytes_max)
        whole = [record for record in records[:count] if record is not None]
    data = b"".join(whole)
    if len(whole) > 1 and holds_control_header(data, key):
        count = _until_seam(records[:count], key)
        whole = [record for record in records[:count] if record is not None]
        data = b"".join(whole)
    damaged = count - len(whole)
    if not whole:
        return Slice((), count, 0, damaged)
    producer_id, sequence = split_id(HEADER.unpack_from(data)[2])
    return Slice(
        [Batch(data, cut_blocks(data), producer_id, sequence, len(whole))], count, len(data), damaged
    )


def _fitting(records: Sequence[bytes | None], bytes_max: int) -> tuple[int, int]:
    """(how many of the first fit, their bytes), at least one record."""
    size = 0
    for number, record in enumerate(records):
        more = 0 if record is None else len(record)
        if size and size + more > bytes_max:
            return number, size
        size += more
    return len(records), size


def _until_seam(records: Sequence[bytes | None], key: int) -> int:
    """How many of the first can be joined."""
    tail = b""
    for number, record in enumerate(records):
        if record is None:
            continue
        if tail and holds_control_header(tail + record[:HEADER_SIZE], key):
            return number
        tail = (tail + record)[-HEADER_SIZE:]
    return len(records)


def attribute_of(record: bytes) -> bytes | None:
    """The attribute of a whole record; None without. Raises BadRecord."""
    flag = HEADER.unpack_from(record)[3]
    if not flag & 1:
        return None
    end = RECORD_HEAD + ATTRIBUTE_SIZE.unpack_from(record, HEADER_SIZE)[0]
    if end > len(record):
        raise BadRecord(0, "the attribute is longer than the record")
    return record[RECORD_HEAD:end]
