"""The command LOCATE: find a record by offset, ordinal or time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from journal.errors import Corrupt, NotARecord
from journal.record.block import blocks_of
from journal.record.format import FLAG_FILLER, HEADER_SIZE, LENGTH, BadRecord, records_of
from tfmq.broker.admission import BoundedExecutor
from tfmq.broker.fetch import BEHIND, read_error
from tfmq.broker.readable import ReadableLog, ReadableTopics
from tfmq.broker.reply import Reply, Session
from tfmq.errors import Busy
from tfmq.protocol.commands import BY_EARLIEST, BY_LATEST, BY_OFFSET, BY_ORDINAL, BY_TIME_MS, ORDINAL_UNKNOWN, Locate

ONE_BLOCK: Final = 1
"""Limit in bytes of a read. Every block is larger, so the read returns only one block: the one that has the offset."""


def record_offset(log: ReadableLog, offset: int, records: int) -> int:
    """Return the offset of the record that is `records` records after the record at `offset`, in the same block.

    Reads the disk: call it in a worker. Raises NotARecord if a repair has replaced the record, Corrupt if the block is
    damaged, and the other errors of `Log.read`.
    """
    chunk = log.read(offset, ONE_BLOCK, upto="written")
    if chunk.skip_to != offset:  # a repair replaced the record by a filler
        raise NotARecord(offset)
    position = chunk.skip_to - chunk.start
    for _ in range(records):
        if position + HEADER_SIZE > len(chunk.data):
            raise Corrupt(log.folder, offset, chunk.next, "its records end too early")
        position += HEADER_SIZE + LENGTH.unpack_from(chunk.data, position)[0]
    return chunk.start + position


def ordinal_of(log: ReadableLog, offset: int) -> int:
    """Return the ordinal of the record at `offset`.

    If the offset is the end of the log, or inside a filler (written by a repair in place of lost records), return the
    ordinal of the next record. Return ORDINAL_UNKNOWN if the log cannot be read at the offset, because of damage or a
    stop. May read the disk: call it in a worker. Raises BelowStart or BeyondEnd if the offset is not in the log,
    NotARecord if no record starts there, OSError.
    """
    if offset == log.end_offset:
        return log.end_ordinal
    durable_offset, ordinal = log.forced_place
    if offset == durable_offset:
        return ordinal
    try:
        chunk = log.read(offset, ONE_BLOCK, upto="written")
        if not chunk.data:
            return ORDINAL_UNKNOWN
        block = next(blocks_of(chunk.data, chunk.start, log.log_id))
    except (Corrupt, BadRecord):  # BadRecord: `Log.read` verifies records only if the setting `log.verify` says so
        return ORDINAL_UNKNOWN
    before = 0
    for record in records_of(block.data):
        if record.position >= chunk.skip_to - chunk.start:
            break
        before += record.checksum if record.flag & FLAG_FILLER else 1
    return block.control.first_ordinal + before


def find_location(log: ReadableLog, by: int, value: int) -> tuple[int, int]:
    """Return the offset and ordinal of the record that LOCATE requests.

    `by` (a BY_ constant) says what is requested: the first record, the durable offset, or the record whose offset,
    ordinal or time (ms) is `value`. If `value` is outside of the log, the start or the end of the log is returned. If
    the ordinal cannot be counted because of damage, it is ORDINAL_UNKNOWN.
    """
    if by == BY_EARLIEST:
        return log.first_offset, log.first_ordinal
    if by == BY_LATEST:
        return log.forced_place
    if by == BY_ORDINAL:
        return log.offset_of_ordinal(value)
    if by == BY_TIME_MS:
        offset = log.offset_of_time(value)
    else:
        offset = log.seek_offset(min(max(value, log.first_offset), log.end_offset))
    return offset, ordinal_of(log, offset)


def locate(
    topics: ReadableTopics,
    executor: BoundedExecutor,
    may_be_behind: Callable[[], bool],
    request: Locate,
    reply: Reply,
    session: Session,
) -> None:
    """Reply to LOCATE. The search runs in a worker, except for the first record and the durable offset.

    Where `may_be_behind()` (`Runtime`), an offset or ordinal after the end is Busy: a reader that got there at another
    server would be moved back.
    """
    partition = topics.partition(request.topic, request.incarnation, request.partition)
    log = partition.log
    end = {BY_OFFSET: log.end_offset, BY_ORDINAL: log.end_ordinal}.get(request.by)
    if end is not None and request.value > end and may_be_behind():
        reply.error(Busy(BEHIND.format(end=log.end_offset, offset=request.value)))
        return

    def found(location: tuple[int, int] | None, error: BaseException | None) -> None:
        if error is not None or location is None:
            reply.error(read_error(error or RuntimeError("no result"), partition))
            return
        reply.ok(*location, log.epoch, log.first_offset, log.end_offset, log.forced_offset, log.end_ordinal)

    if request.by in (BY_EARLIEST, BY_LATEST):
        found(find_location(log, request.by, request.value), None)
    else:
        executor.run(partial(find_location, log, request.by, request.value), found, session)
