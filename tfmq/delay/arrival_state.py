"""What the arrivals teach: who has sent what, which messages are cancelled, and which were given another turn.

A pure fold over the blocks of the log (`journal.log.checkpoint.State`). What was appended while the broker runs is
entered by `enter` and by whoever records the producers' batches: both leave what a recovery from the same blocks
leaves.
"""

import logging
from collections.abc import Iterable
from typing import Any, Final, Protocol

import msgpack

from journal.errors import NewerFormat
from journal.record.block import Block, Run, runs
from journal.record.block_trailer import Control
from journal.record.format import FLAG_FILLER, HEADER_SIZE, LENGTH, records_of
from tfmq.delay.cancelled import SPAN_BITS, Cancelled
from tfmq.delay.note import CANCEL, PRODUCER_ID, RESCHEDULE, BadNote, Note, decode_note
from tfmq.delay.rescheduled import Rescheduled

logger = logging.getLogger("tfmq.delay")

SNAPSHOT_VERSION: Final = 1
SNAPSHOT_NAME: Final = "the snapshot of the arrivals"

CANCELLED_MAX: Final = 1 << 24
"""Cancelled and rescheduled messages that are remembered, 128 MiB and 384 MiB of them: then no more are accepted."""
BYTES_MAX: Final = 768 << 20
"""Memory for them: what lies far apart in time takes more than what lies together."""
FORGET_SPANS: Final = 4096
FORGET_MS: Final = 1 << 22
"""With more spans than that it is looked only so often what can be forgotten: each of them is looked at."""


class Streams(Protocol):
    """The rule of contiguous sequences: tfmq.broker.producers."""

    def load(self, data: bytes) -> None: ...

    def dump(self) -> bytes: ...

    def apply_runs(self, control: Control, found: Iterable[tuple[int, Run]]) -> None:
        """The runs of one block, each with the ordinal of its first record."""
        ...


class ArrivalState:
    """See the module. `producers` begins as it is without a snapshot."""

    def __init__(self, producers: Streams) -> None:
        self.producers = producers
        self.cancelled = Cancelled()
        self.rescheduled = Rescheduled()
        self._looked = 0
        """Up to where it was looked what can be forgotten."""
        self._copies = 0
        """Records of a reschedule that are still to come in the append: they are nobody's sequence."""
        self._next = -1
        """Where the next block of an append begins; -1 between two."""

    @property
    def full(self) -> bool:
        """Whether no message may be cancelled or rescheduled before some are forgotten."""
        return self.cancelled.count >= CANCELLED_MAX or self._size_bytes >= BYTES_MAX

    @property
    def _size_bytes(self) -> int:
        return self.cancelled.size_bytes + self.rescheduled.size_bytes

    def enter(self, note: Note, first_number: int) -> None:
        """The note is in the log, and its first record, if it has any, has `first_number`."""
        if note.kind == CANCEL:
            for due, number in zip(*note.old, strict=True):
                self.cancelled.add(due, number)
        elif note.kind == RESCHEDULE:
            numbers = range(first_number, first_number + note.records)
            moves = zip(*note.old, note.dues.times, numbers, strict=True)
            for due, number, new_due, new_number in moves:
                if self.cancelled.add(due, number):
                    self.rescheduled.add(due, number, (new_due, new_number))

    def forget_before(self, due: int) -> int:
        """Drops what was due in spans (see `Cancelled`) that end at `due` or before; how many cancelled messages.

        A span stays as long as a handle of it leads to a message that was rescheduled and is due later, unless half
        of all that may be remembered is taken: a message that is moved on again and again must not fill the rest.
        """
        many = len(self.cancelled) > FORGET_SPANS
        if due >> SPAN_BITS == self._looked >> SPAN_BITS or (many and due - self._looked < FORGET_MS):
            return 0
        self._looked = due
        over = self.cancelled.ended(due)
        if 2 * self.cancelled.count < CANCELLED_MAX and 2 * self._size_bytes < BYTES_MAX:
            over = self.rescheduled.over(over, due)
        self.rescheduled.forget(over)
        return self.cancelled.forget(over)

    # journal.log.checkpoint.State

    def load(self, data: bytes) -> None:
        """Starts from a snapshot; b"" is an empty one. Raises ValueError, NewerFormat."""
        self._copies, self._next = 0, -1
        producers = cancelled = rescheduled = b""
        if data:
            try:
                version, *fields = msgpack.unpackb(data, use_list=False)
                newer = version > SNAPSHOT_VERSION
            except (TypeError, ValueError, msgpack.UnpackException) as error:
                raise ValueError(f"{SNAPSHOT_NAME} does not decode: {error}") from error
            if newer:
                raise NewerFormat(SNAPSHOT_NAME, version, SNAPSHOT_VERSION)
            producers, cancelled, rescheduled = _bytes(fields)
        self.producers.load(producers)
        self.cancelled.load(cancelled)
        self.rescheduled.load(rescheduled)

    def dump(self) -> bytes:
        """A snapshot: version, then the producers', the cancelled and the rescheduled messages' own dumps."""
        parts = (self.producers.dump(), self.cancelled.dump(), self.rescheduled.dump())
        return bytes(msgpack.packb((SNAPSHOT_VERSION, *parts)))

    def apply(self, block: Block) -> None:
        """One more block of the log, in order, during recovery."""
        if block.offset != self._next:
            self._copies = 0
        self._next = block.next if block.control.more_follows else -1
        sent: list[tuple[int, Run]] = []
        for ordinal, run in numbered_runs(block):
            if run.producer_id == PRODUCER_ID:
                self._apply_note(block, ordinal, run.offset)
            elif self._copies:
                self._copies -= min(run.count, self._copies)
            else:
                sent.append((ordinal, run))
        self.producers.apply_runs(block.control, sent)

    def _apply_note(self, block: Block, ordinal: int, offset: int) -> None:
        start = offset - block.offset
        record = block.data[start : start + HEADER_SIZE + LENGTH.unpack_from(block.data, start)[0]]
        try:
            note = decode_note(record)
        except BadNote as error:
            # The block is as it was written, or repaired by the operator's word: what it said is lost.
            logger.error("the arrivals' note at offset %d says nothing: %s", offset, error.reason)
            return
        self.enter(note, ordinal + 1)
        self._copies = note.records if note.kind == RESCHEDULE else 0


def numbered_runs(block: Block) -> list[tuple[int, Run]]:
    """The runs of a block, each with the ordinal of its first record; fillers stand for as many as they say."""
    found = runs(block)
    ordinal = block.control.first_ordinal
    if sum(run.count for run in found) != block.control.records:
        return _numbered_by_walk(block, found)
    numbered = []
    for run in found:
        numbered.append((ordinal, run))
        ordinal += run.count
    return numbered


def _numbered_by_walk(block: Block, found: list[Run]) -> list[tuple[int, Run]]:
    ordinals: dict[int, int] = {}
    ordinal = block.control.first_ordinal
    for record in records_of(block.data):
        ordinals[block.offset + record.position] = ordinal
        ordinal += record.checksum if record.flag & FLAG_FILLER else 1
    return [(ordinals[run.offset], run) for run in found]


def _bytes(fields: list[Any]) -> tuple[bytes, bytes, bytes]:
    """The parts of a snapshot; what a later version adds behind them is left out. Raises ValueError."""
    parts = fields[:3]
    if len(parts) != 3 or not all(isinstance(part, bytes) for part in parts):
        raise ValueError(f"{SNAPSHOT_NAME} has other parts than it should have")
    producers, cancelled, rescheduled = parts
    return producers, cancelled, rescheduled
