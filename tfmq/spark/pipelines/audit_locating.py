"""Where exactly the messages of a repeat stand: what a run says of their place is only about where to look."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Final

from journal import filenames
from journal.disk import Disk, File
from journal.record.format import FLAG_CONTROL, FLAG_FILLER, HEADER, HEADER_SIZE
from tfmq.spark.pipelines.audit_judging import Repeat
from tfmq.spark.pipelines.audit_plan import AuditedLog

READ_BYTES: Final = 1 << 20


def located(disk: Disk, logs: list[AuditedLog], repeat: Repeat) -> Repeat:
    """The same with the offsets of its first and behind its last message; as it was where the files say nothing."""
    ids = repeat.first_id, repeat.first_id + repeat.count
    here = _between(disk, logs[repeat.log], repeat.offset, repeat.next, *ids)
    there = _between(disk, logs[repeat.other_log], repeat.other_offset, repeat.other_next, *ids)
    return repeat._replace(offset=here[0], next=here[1], other_offset=there[0], other_next=there[1])


def _between(
    disk: Disk, log: AuditedLog, offset: int, next: int, first_id: int, end_id: int
) -> tuple[int, int]:
    """Offsets around the records with these ids, of which none lies outside `offset` to `next`."""
    segment = max((each for each in log.segments if each.base <= offset), default=None)
    if segment is None:
        return offset, next
    first = last = -1
    try:
        with closing(disk.open_read(filenames.join(log.path, log.file(segment.base)))) as file:
            for position, size, id, flag in _headers(file, offset - segment.base, next - segment.base):
                if first_id <= id < end_id and not flag & (FLAG_CONTROL | FLAG_FILLER):
                    first = position if first < 0 else first
                    last = position + size
    except OSError:
        return offset, next
    return (segment.base + first, segment.base + last) if first >= 0 else (offset, next)


def _headers(file: File, position: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """(position, size, id, flag) of every record from `position` on, control records too."""
    data, start = b"", position
    while position + HEADER_SIZE <= end:
        if position + HEADER_SIZE > start + len(data):
            data, start = file.pread(READ_BYTES, position), position
            if len(data) < HEADER_SIZE:
                return
        length, _, id, flag = HEADER.unpack_from(data, position - start)
        yield position, HEADER_SIZE + length, id, flag
        position += HEADER_SIZE + length
