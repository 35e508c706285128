"""A log without a broker around it: open a folder on the real disk, walk its records one by one.

The broker hands on whole blocks and never looks at a record; a program that keeps its own log wants the records.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

from journal.block import blocks_of
from journal.clock import Clock, SystemClock
from journal.disk import Disk, RealDisk
from journal.errors import BeyondEnd
from journal.header import FLAG_FILLER, HEADER_SIZE, records_of, split_body
from journal.log import Log, Upto
from journal.options import LogOptions

LOG_ID: Final = 1 << 24
"""The id of a log that is alone: incarnation 1, partition 0."""

READ_BYTES: Final = 1 << 20
"""What is read at once; a larger block comes alone."""


class StoredRecord(NamedTuple):
    """One record: where it is, when it was appended (ms since 1970), and what it holds."""

    offset: int
    ordinal: int
    append_time: int
    id: int
    attribute: bytes | None
    payload: bytes


@contextmanager
def open_log(
    folder: str,
    options: LogOptions = LogOptions(),  # noqa: B008 - frozen, so one default serves all
    *,
    disk: Disk | None = None,
    clock: Clock | None = None,
    log_id: int = LOG_ID,
) -> Iterator[Log]:
    """The log in `folder`, made where it is not there, recovered where it is, closed clean at the end.

    One process at a time: the folder is locked. Raises Locked, NewerFormat, Corrupt, Full, OSError.
    """
    disk = disk or RealDisk()
    parent = folder.rstrip("/").rpartition("/")[0] or "."
    if not disk.exists(folder):
        disk.make_folder(folder)
        disk.force_folder(parent)
    lock = disk.lock(f"{folder.rstrip('/')}/lock")
    try:
        log = Log.open(disk, folder, log_id=log_id, clock=clock or SystemClock(), options=options)
        try:
            yield log
        finally:
            log.close()
    finally:
        lock.release()


def records(
    log: Log,
    *,
    offset: int | None = None,
    ordinal: int | None = None,
    time_ms: int | None = None,
    upto: Upto = "forced",
) -> Iterator[StoredRecord]:
    """Every record from a place on, up to the forced mark as it is then, or with "written" to the end.

    `offset`: a record's own, or any at or behind one · `ordinal`: the n-th record · `time_ms`: the first block appended
    then or later; none of them: the first record that is left. Raises BelowStart, BeyondEnd, Corrupt.
    """
    start = _start(log, offset, ordinal, time_ms)
    at = start
    while True:
        try:
            chunk = log.read(at, READ_BYTES, upto=upto)
        except BeyondEnd:
            # A place between the forced mark and the end: nothing that may be shown yet.
            if at <= log.end_offset:
                return
            raise
        if not chunk.data:
            return
        for record in _records(chunk.data, chunk.start, log.log_id):
            if record.offset >= start:
                yield record
        at = chunk.next


def _start(log: Log, offset: int | None, ordinal: int | None, time_ms: int | None) -> int:
    if sum(place is not None for place in (offset, ordinal, time_ms)) > 1:
        raise ValueError("give one place to start from: offset, ordinal or time_ms")
    if offset is not None:
        return log.seek_offset(offset) if log.first_offset <= offset < log.end_offset else offset
    if ordinal is not None:
        return log.offset_of_ordinal(ordinal)[0]
    return log.first_offset if time_ms is None else log.offset_of_time(time_ms)


def _records(data: bytes | bytearray | memoryview, start: int, log_id: int) -> Iterator[StoredRecord]:
    for block in blocks_of(data, start, log_id):
        ordinal = block.control.first_ordinal
        for record in records_of(block.data):
            if record.flag & FLAG_FILLER:
                ordinal += record.checksum
                continue
            body = block.data[record.position + HEADER_SIZE : record.position + record.size]
            attribute, payload = split_body(body, record.flag)
            kept = None if attribute is None else bytes(attribute)
            where = block.offset + record.position
            yield StoredRecord(where, ordinal, block.control.append_time, record.id, kept, bytes(payload))
            ordinal += 1
