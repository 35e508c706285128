"""A walk over a segment that may be damaged: blocks, and between them the stretches that nobody vouches for.

`verify` reports what it finds here, `repair` mends it; both need to know which log a file belongs to without
being told, so that they work on a lone file.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Final, NamedTuple
from zlib import crc32

from journal.block import BLOCK_SPAN_MAX, Block, control_position
from journal.control import (
    CONTROL_BODY,
    CONTROL_MARK_POSITION,
    CONTROL_SIZE,
    BadControl,
    Control,
    decode_control,
)
from journal.disk import Disk, File
from journal.header import FLAG_CONTROL, BadRecord, Incomplete
from journal.segment import SCAN_SIZE, Segment

VOTES_MAX: Final = 64
"""Control records that are asked for the id of their log."""

_CONTROL_HEADER: Final = re.compile(
    re.escape(CONTROL_BODY.size.to_bytes(4, "big"))
    + b".{4}(.{8})"
    + re.escape(FLAG_CONTROL.to_bytes(4, "big")),
    re.DOTALL,
)


class Stretch(NamedTuple):
    """Positions `first <= x < next` of a segment that cannot be relied on, and why.

    `ordinal` is that of the first lost record, None if no block before says it. `next_ordinal` is that behind
    the stretch, None if nothing follows. `control` closes the stretch, if it is one block of which only the
    records are damaged. `version` is set if a newer library wrote the control record there.
    """

    first: int
    next: int
    reason: str
    ordinal: int | None
    next_ordinal: int | None
    control: Control | None
    version: int | None = None


def survey(segment: Segment) -> Iterator[Block | Stretch]:
    """Every byte of `segment`, in order: verified blocks, and stretches of what is no block. Raises
    OSError."""
    position, ordinal = 0, None
    while position < segment.size:
        try:
            for block in segment.blocks(position):
                yield block
                position, ordinal = block.next - segment.base, block.control.next_ordinal
        except BadRecord as error:
            good = segment.next_good(position)
            version = error.version if isinstance(error, BadControl) else None
            if good is None:
                yield Stretch(position, segment.size, error.reason, ordinal, None, None, version)
                return
            first = good.control.first_ordinal if good.control is not None and ordinal is None else ordinal
            yield Stretch(position, good.position, error.reason, first, good.ordinal, good.control, version)
            position, ordinal = good.position, good.ordinal


def find_log_id(disk: Disk, path: str) -> int | None:
    """The id that most of the first control records of a segment file carry; None if none is whole.

    Those of the whole blocks that follow each other from the file's beginning count, so that no bytes of a payload do;
    where there are none, those that are found behind the damage.
    """
    proven: Counter[int] = Counter()
    others: Counter[int] = Counter()
    file = disk.open_read(path)
    try:
        for log_id, is_proven in _controls(file, file.size()):
            (proven if is_proven else others)[log_id] += 1
            if proven.total() + others.total() >= VOTES_MAX:
                break
    finally:
        file.close()
    votes = proven or others
    return votes.most_common(1)[0][0] if votes else None


def _controls(file: File, size: int) -> Iterator[tuple[int, bool]]:
    """(id of the log, whether all before is whole) of the control records of a file whose checksum holds."""
    position, span = 0, SCAN_SIZE
    is_proven, is_block_start = True, True
    while position < size:
        data = file.pread(span, position)
        start = 0
        try:
            while is_block_start and start < len(data):
                at = control_position(data, start)
                found = _named_control(data, at)
                is_proven &= found is not None and _closes(found[1], data, start, at)
                if found is not None:
                    yield found[0], is_proven
                start = at + CONTROL_SIZE
        except Incomplete:
            if position + len(data) < size and span <= BLOCK_SPAN_MAX:
                position, span = position + start, SCAN_SIZE if start else span * 2
                continue
            is_block_start = False
        except BadRecord:
            is_block_start = False
        if is_block_start:
            position += start
            continue
        is_proven, span = False, SCAN_SIZE
        for match in _CONTROL_HEADER.finditer(data, start):
            if match.start() + CONTROL_SIZE > len(data):
                break
            found = _named_control(data, match.start())
            if found is not None:
                yield found[0], False
                position, is_block_start = position + match.start() + CONTROL_SIZE, True
                break
        if not is_block_start:
            position += max(len(data) - CONTROL_SIZE, start) + 1


def _named_control(data: bytes, position: int) -> tuple[int, Control] | None:
    """The log that the control record at `position` names, and what it says; None if its checksum does not hold. Raises
    Incomplete."""
    log_id = int.from_bytes(data[position + CONTROL_MARK_POSITION :][:8], "big")
    try:
        return log_id, decode_control(data, position, log_id)
    except BadControl:
        return None


def _closes(control: Control, data: bytes, start: int, end: int) -> bool:
    return control.size == end - start and crc32(memoryview(data)[start:end]) == control.crc
