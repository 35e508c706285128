"""What goes into a log and what comes out of it: batches and their sources, answers, chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from journal.control import SOURCE_PLAIN, SOURCE_SUCCESSION
from journal.header import Buffer


class Batch(NamedTuple):
    """Records of one producer for one partition, as one piece of bytes.

    `blocks` is (bytes, count, CRC-32) for each run of whole records of at most BLOCK_SIZE_MAX bytes (one
    larger record may stand alone); control records stand only at ends of blocks. Empty: the log cuts and
    checksums itself. `sequence` is the first record's, `count` the number of records. `data` must not change
    until append returns.
    """

    data: Buffer
    blocks: Sequence[tuple[int, int, int]]
    producer_id: int
    sequence: int
    count: int  # type: ignore[assignment]


class Source(NamedTuple):
    """Where an append comes from, and its place there: `kind` and `id` name the source, (high, low) the
    position.

    Positions of one source only grow; `Log.applied` answers the highest. Kind 0 is a plain send, without
    position.
    """

    kind: int
    id: int
    high: int
    low: int


PLAIN = Source(SOURCE_PLAIN, 0, 0, 0)


def succession(closed_id: int, successor_id: int, last_sequence: int) -> Source:
    """The source that closes a producer id for good; `last_sequence` -1 if it never sent anything here."""
    return Source(SOURCE_SUCCESSION, closed_id, successor_id, last_sequence + 1)


class Appended(NamedTuple):
    """The answer to one batch.

    `positions`: (index of the first record, its offset) for each contiguous run, since control records lie
    between. `end_offset` is the end of the whole append: the batch survives a power cut once the log is
    forced up to there. `append_time` in ms since 1970, never lower than that of an earlier append.
    """

    positions: list[tuple[int, int]]
    first_ordinal: int
    end_offset: int
    append_time: int


class Chunk(NamedTuple):
    """Whole control blocks from `start` to `next`; the reader skips to `skip_to` (`start <= skip_to`).

    `data` is empty if the offset asked for is the end of what may be read; then `next` is that offset.
    """

    start: int
    skip_to: int
    next: int
    data: bytes | bytearray
