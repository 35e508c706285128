"""A walk over a segment that may be damaged: blocks, and between them the stretches that nobody vouches for.

`verify` reports what it finds here, `repair` mends it; both need to know which log a file belongs to without
being told, so that they work on a lone file.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Final, NamedTuple

from journal.block import Block
from journal.control import (
    CONTROL_BODY,
    CONTROL_MARK_POSITION,
    CONTROL_SIZE,
    BadControl,
    Control,
    decode_control,
)
from journal.disk import Disk
from journal.header import FLAG_CONTROL, BadRecord
from journal.segment import SCAN_SIZE, Segment

VOTES_MAX: Final = 64
"""Control records that are asked for the id of their log; a forged one in a payload is outvoted."""

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
    """The id that most of the first control records of a segment file carry; None if none is whole."""
    votes: Counter[int] = Counter()
    file = disk.open_read(path)
    try:
        position, size = 0, file.size()
        while position < size and votes.total() < VOTES_MAX:
            data = file.pread(SCAN_SIZE + CONTROL_SIZE, position)
            for match in _CONTROL_HEADER.finditer(data):
                log_id = int.from_bytes(match[1], "big")
                if votes.total() < VOTES_MAX and _is_control(data, match.start(1), log_id):
                    votes[log_id] += 1
            position += SCAN_SIZE
    finally:
        file.close()
    return votes.most_common(1)[0][0] if votes else None


def _is_control(data: bytes, id_position: int, log_id: int) -> bool:
    try:
        decode_control(data, id_position - CONTROL_MARK_POSITION, log_id)
    except BadRecord:
        return False
    return True


def has_moved_blocks(data: bytes, offset: int, log_id: int) -> bool:
    """Whether a whole control record in `data`, which stands at `offset` of the log `log_id`, says that its block is
    from another offset or of another log: it is a copy of what stood there.
    """
    for match in _CONTROL_HEADER.finditer(data):
        position = match.start(1) - CONTROL_MARK_POSITION
        named = int.from_bytes(match[1], "big")
        try:
            control = decode_control(data, position, named)
        except BadRecord:
            continue
        if named != log_id or control.offset + control.size != offset + position:
            return True
    return False
