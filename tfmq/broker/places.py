"""Where things are in a log: offsets of records, ordinals of offsets, and LOCATE, which asks for them.

Everything here may read the disk, so it runs in a worker; it changes nothing.
"""

from functools import partial
from typing import Final, NamedTuple

from journal.errors import Corrupt
from journal.log.log import Log
from journal.record.block import blocks_of
from journal.record.format import FLAG_FILLER, HEADER_SIZE, LENGTH, BadRecord, records_of
from tfmq.broker.caller import Reply, Run
from tfmq.broker.partition import Partition
from tfmq.broker.polls import read_error
from tfmq.protocol.commands import (
    BY_EARLIEST,
    BY_LATEST,
    BY_ORDINAL,
    BY_TIME_MS,
    ORDINAL_UNKNOWN,
    Locate,
)

ONE_BLOCK: Final = 1
"""Fewer bytes than any block has: a read gives just the block that holds the offset."""


class Place(NamedTuple):
    """A record's start; `ordinal` is ORDINAL_UNKNOWN where it would have to be counted across damage."""

    offset: int
    ordinal: int


def record_offset(log: Log, offset: int, records: int) -> int:
    """The offset of the record that is `records` behind the one at `offset`, in the same control block.

    Raises what `Log.read` does.
    """
    chunk = log.read(offset, ONE_BLOCK, upto="written")
    position = chunk.skip_to - chunk.start
    for _ in range(records):
        if position + HEADER_SIZE > len(chunk.data):
            raise Corrupt(log.folder, offset, chunk.next, "its records end too early")
        position += HEADER_SIZE + LENGTH.unpack_from(chunk.data, position)[0]
    return chunk.start + position


def ordinal_of(log: Log, offset: int) -> int:
    """The ordinal of the record at `offset`, or of the next one to come at the end; unknown in damage, and in what a
    stopped log does not give any more.

    Raises what `Log.read` does.
    """
    if offset == log.end_offset:
        return log.end_ordinal
    forced, ordinal = log.forced_place
    if offset == forced:
        return ordinal
    try:
        chunk = log.read(offset, ONE_BLOCK, upto="written")
        if not chunk.data:
            return ORDINAL_UNKNOWN
        block = next(blocks_of(chunk.data, chunk.start, log.log_id))
    except (Corrupt, BadRecord):  # a read finds damage in the bytes of records only where it verifies them
        return ORDINAL_UNKNOWN
    before = 0
    for record in records_of(block.data):
        if record.position >= chunk.skip_to - chunk.start:
            break
        before += record.checksum if record.flag & FLAG_FILLER else 1
    return block.control.first_ordinal + before


def find(log: Log, by: int, value: int) -> Place:
    """The place that LOCATE asks for; values outside the log give its nearest end."""
    if by == BY_EARLIEST:
        return Place(log.first_offset, log.first_ordinal)
    if by == BY_LATEST:
        return Place(*log.forced_place)
    if by == BY_ORDINAL:
        return Place(*log.offset_of_ordinal(value))
    if by == BY_TIME_MS:
        return _with_ordinal(log, log.offset_of_time(value))
    return _with_ordinal(log, log.seek_offset(min(max(value, log.first_offset), log.end_offset)))


def _with_ordinal(log: Log, offset: int) -> Place:
    return Place(offset, ordinal_of(log, offset))


def locate(request: Locate, partition: Partition, run: Run, reply: Reply) -> None:
    """Answers LOCATE, from memory where that suffices."""
    log = partition.log

    def found(place: Place | None, error: BaseException | None) -> None:
        if error is not None or place is None:
            reply.error(read_error(error or RuntimeError("no result"), partition))
            return
        reply.ok(*place, log.epoch, log.first_offset, log.end_offset, log.forced_offset, log.end_ordinal)

    if request.by in (BY_EARLIEST, BY_LATEST):
        found(find(log, request.by, request.value), None)
    else:
        run(partial(find, log, request.by, request.value), found)
