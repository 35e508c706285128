"""The state derived from the arrival log: producer sequences, cancelled and rescheduled messages, epochs of numbers.

At a start, recovery applies the blocks of the log (`journal.log.checkpoint.State`). Afterwards, for each append, the
broker calls `apply_header` and `epochs.record` and updates `producers`, which has the same effect as applying a block.
"""

from __future__ import annotations

import logging
from array import array
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable
from struct import Struct
from typing import Any, ClassVar, Final, Protocol

from journal.errors import NewerFormat
from journal.record.block import Block, ProducerRun, producer_runs
from journal.record.block_trailer import BlockTrailer
from journal.record.format import FLAG_FILLER, HEADER_SIZE, LENGTH, records_of
from tfmq.bounded_msgpack import decoding, pack, unpack_stored
from tfmq.delay.arrivals.header import CANCEL, PRODUCER_ID, RESCHEDULE, ArrivalHeader, BadArrivalHeader, decode_header
from tfmq.delay.due_time import WORD, decode_words, encode_words

logger = logging.getLogger("tfmq.delay")

SNAPSHOT_VERSION: Final = 1
SNAPSHOT_NAME: Final = "the snapshot of the arrival log"

CANCELLED_MAX: Final = 1 << 24
"""Maximum number of cancelled (8 bytes each) and rescheduled messages (32 bytes each). Further ones are rejected."""
BYTES_MAX: Final = 768 << 20
"""Maximum memory for cancelled and rescheduled messages, and for the spans of due times by which they are grouped."""
EXPIRY_SPANS_MAX: Final = 4096
EXPIRY_INTERVAL_MS: Final = 1 << 22
"""If there are more than EXPIRY_SPANS_MAX spans, `expire_before` examines them once in this interval of due times."""


class ProducerStates(Protocol):
    """The last batches of all producers in the log. Implemented in `tfmq.broker.producer_state`."""

    def load(self, data: bytes) -> None: ...

    def dump(self) -> bytes: ...

    def apply_runs(self, control: BlockTrailer, found: Iterable[tuple[int, ProducerRun]]) -> None: ...


class ArrivalLogState:
    """All state derived from the arrival log. A new object, with empty `producers`, has the state of an empty log."""

    def __init__(self, producers: ProducerStates) -> None:
        self.producers = producers
        self.cancelled = CancelledMessages()
        self.rescheduled = RescheduledMessages()
        self.epochs = NumberEpochs()
        self._expiry_checked_to = 0
        """The due time in the last call of `expire_before` that examined the spans."""
        self._copies_left = 0
        """In recovery: how many records of a reschedule still follow in the append. They have no producer sequence."""
        self._next_offset = -1
        """In recovery: offset where the next block of the current append begins; -1 between two appends."""

    @property
    def is_full(self) -> bool:
        """Whether cancels and reschedules must be rejected until old ones expire."""
        return self.cancelled.count >= CANCELLED_MAX or self._size_bytes >= BYTES_MAX

    @property
    def _size_bytes(self) -> int:
        return self.cancelled.size_bytes + self.rescheduled.size_bytes

    def apply_header(self, header: ArrivalHeader, first_number: int) -> None:
        """Apply a header to the state. `first_number`: the number of the record after the header, if there is one."""
        if header.kind == CANCEL:
            for due, number in zip(*header.old_turns, strict=True):
                self.cancelled.add(due, number)
        elif header.kind == RESCHEDULE:
            numbers = range(first_number, first_number + header.record_count)
            moves = zip(*header.old_turns, header.dues.times, numbers, strict=True)
            for due, number, new_due, new_number in moves:
                if self.cancelled.add(due, number):
                    self.rescheduled.add(due, number, (new_due, new_number))

    def expire_before(self, due: int) -> int:
        """Remove the cancelled and rescheduled messages of spans (65 s of due times) that end at `due` or before.

        Return how many cancelled messages were removed. A span stays if one of its messages was rescheduled to `due` or
        later, so that the old handle stays valid. But if half of CANCELLED_MAX or of BYTES_MAX is in use, such a span
        is removed, too.
        """
        many = len(self.cancelled) > EXPIRY_SPANS_MAX
        if due >> SPAN_BITS == self._expiry_checked_to >> SPAN_BITS or (
            many and due - self._expiry_checked_to < EXPIRY_INTERVAL_MS
        ):
            return 0
        self._expiry_checked_to = due
        over = self.cancelled.spans_ended_by(due)
        if 2 * self.cancelled.count < CANCELLED_MAX and 2 * self._size_bytes < BYTES_MAX:
            over = self.rescheduled.expirable_spans(over, due)
        self.rescheduled.expire_spans(over)
        return self.cancelled.expire_spans(over)

    # The interface journal.log.checkpoint.State

    def load(self, data: bytes) -> None:
        """Restore the state from a snapshot; b"" is the snapshot of an empty log.

        Raises ValueError if the snapshot is invalid, NewerFormat if a later version wrote it.
        """
        self._copies_left, self._next_offset = 0, -1
        parts: list[Any] = [b"", b"", b"", b""]
        if data:
            with decoding(SNAPSHOT_NAME):
                version, *parts = unpack_stored(data)
                if version > SNAPSHOT_VERSION:
                    raise NewerFormat(SNAPSHOT_NAME, version, SNAPSHOT_VERSION)
        if len(parts) == 3:
            parts.append(b"")  # earlier releases wrote no epochs
        # Parts that a later version adds are ignored.
        if len(parts) < 4 or not all(isinstance(part, bytes) for part in parts[:4]):
            raise ValueError(f"{SNAPSHOT_NAME} has other parts than it should have")
        producers, cancelled, rescheduled, epochs = parts[:4]
        self.producers.load(producers)
        self.cancelled.load(cancelled)
        self.rescheduled.load(rescheduled)
        self.epochs.load(epochs)

    def dump(self) -> bytes:
        parts = (self.producers.dump(), self.cancelled.dump(), self.rescheduled.dump(), self.epochs.dump())
        return pack((SNAPSHOT_VERSION, *parts))

    def apply(self, block: Block) -> None:
        """Apply the next block of the log, during recovery."""
        if block.offset != self._next_offset:
            self._copies_left = 0
        self._next_offset = block.next if block.control.more_follows else -1
        sent: list[tuple[int, ProducerRun]] = []
        for ordinal, run in numbered_runs(block):
            if run.producer_id == PRODUCER_ID:
                self._apply_header_record(block, ordinal, run.offset)
            elif self._copies_left:
                self._copies_left -= min(run.count, self._copies_left)
            else:
                sent.append((ordinal, run))
        self.producers.apply_runs(block.control, sent)

    def _apply_header_record(self, block: Block, ordinal: int, offset: int) -> None:
        start = offset - block.offset
        record = block.data[start : start + HEADER_SIZE + LENGTH.unpack_from(block.data, start)[0]]
        try:
            header = decode_header(record)
        except BadArrivalHeader as error:
            # The block passed its checksum, so the header is not damaged: it was written like this, or a repair
            # replaced it.
            logger.error("invalid arrival header at offset %d: %s", offset, error.reason)
            return
        self.apply_header(header, ordinal + 1)
        if header.record_count:
            self.epochs.record(ordinal + 1, block.control.epoch)
        self._copies_left = header.record_count if header.kind == RESCHEDULE else 0


def numbered_runs(block: Block) -> list[tuple[int, ProducerRun]]:
    """Return the producer runs (consecutive records of one producer) of a block, each with its first ordinal."""
    found = producer_runs(block)
    ordinal = block.control.first_ordinal
    if sum(run.count for run in found) != block.control.records:
        return _numbered_by_walk(block, found)
    numbered = []
    for run in found:
        numbered.append((ordinal, run))
        ordinal += run.count
    return numbered


def _numbered_by_walk(block: Block, found: list[ProducerRun]) -> list[tuple[int, ProducerRun]]:
    ordinals: dict[int, int] = {}
    ordinal = block.control.first_ordinal
    for record in records_of(block.data):
        ordinals[block.offset + record.position] = ordinal
        ordinal += record.checksum if record.flag & FLAG_FILLER else 1
    return [(ordinals[run.offset], run) for run in found]


UNMARKED_END_UNKNOWN: Final = (1 << 64) - 1
"""`unmarked_end` in a snapshot written during a start, before the end of the log is known."""
EPOCHS_MAX: Final = 65_536
"""Maximum number of remembered epochs (1 MiB in a snapshot): an unclean start in each minute of 45 days."""


class NumberEpochs:
    """Stores the epoch of the arrival log (the count of its unclean starts) in which each number was assigned.

    If a broker is started with an older copy of the data folder, it assigns some numbers a second time: those that were
    assigned after the copy was made. But the epoch is another one then (`journal.log.checkpoint.next_epoch`). So number
    and epoch together identify a message, and handles contain both.
    """

    def __init__(self) -> None:
        self._firsts = array("Q")
        """The first number that was assigned in each epoch, ascending."""
        self._epochs = array("Q")
        self._unmarked_end: int | None = None

    @property
    def unmarked_end(self) -> int:
        """Messages with numbers below this may have handles without an epoch, which earlier releases have made."""
        return self._unmarked_end or 0

    def record(self, number: int, epoch: int) -> None:
        """Record that `number` was assigned in `epoch`. Neither value may be lower than in the last call."""
        if self._epochs and epoch <= self._epochs[-1]:
            return
        self._firsts.append(number)
        self._epochs.append(epoch)
        if len(self._firsts) > EPOCHS_MAX:
            del self._firsts[0], self._epochs[0]
            self._unmarked_end = max(self.unmarked_end, self._firsts[0])

    def epoch_of(self, number: int) -> int | None:
        """Return the epoch in which a number was assigned; None if that is not known."""
        at = bisect_right(self._firsts, number)
        return self._epochs[at - 1] if at else None

    def finish_recovery(self, end_number: int) -> None:
        """Set `unmarked_end` to `end_number`, the next number at the end of the log, unless a snapshot has set it."""
        if self._unmarked_end is None:
            self._unmarked_end = end_number

    def load(self, data: bytes) -> None:
        if len(data) % WORD:
            raise ValueError("the epochs of the numbers end inside a word")
        words = decode_words(data)
        firsts, epochs = words[1::2], words[2::2]
        rising = all(list(column) == sorted(set(column)) for column in (firsts, epochs))
        if len(firsts) != len(epochs) or not rising:
            raise ValueError("the epochs of the numbers are not in order")
        self._unmarked_end = words[0] if words and words[0] != UNMARKED_END_UNKNOWN else None
        self._firsts, self._epochs = firsts, epochs

    def dump(self) -> bytes:
        """Encode `unmarked_end`, then for each epoch its first number and the epoch; all u64, big-endian."""
        end = UNMARKED_END_UNKNOWN if self._unmarked_end is None else self._unmarked_end
        pairs = zip(self._firsts, self._epochs, strict=True)
        return encode_words(array("Q", (end, *(word for pair in pairs for word in pair))))


SPAN_BITS: Final = 16
"""Messages are grouped by spans of due times of 2^16 ms, as in buckets of the level DEFAULT_LEVEL."""

RECENT_MIN: Final = 256
RECENT_PART: Final = 16
"""The newest rows of a span are merged into its n older ones if they are more than RECENT_MIN + n / RECENT_PART."""

SPANS_CHECKED_MAX: Final = 64
"""Maximum of spans that `any_between` looks up one by one."""

_ROW: Final = Struct(">QQ")

Turn = tuple[int, int]
"""(effective due time in ms, number)."""


class _Span:
    """The messages of one span, as rows: the newest in a dict by number, the others in columns sorted by number."""

    __slots__ = ("_columns", "_recent")

    def __init__(self, columns: tuple[array[int], ...]) -> None:
        self._columns = columns
        self._recent: dict[int, tuple[int, ...]] | None = None

    def __len__(self) -> int:
        return len(self._columns[0]) + len(self._recent or ())

    def __contains__(self, number: int) -> bool:
        if self._recent is not None and number in self._recent:
            return True
        column = self._columns[0]  # read second: rows are added here before they are removed from the dict
        at = bisect_left(column, number)
        return at < len(column) and column[at] == number

    def get(self, number: int) -> tuple[int, ...] | None:
        """Return the new turn of the rescheduled message with this old number; None if the span does not have it."""
        if self._recent is not None and (row := self._recent.get(number)) is not None:
            return row
        numbers, dues, new_numbers = self._columns  # read second, as in `__contains__`
        at = bisect_left(numbers, number)
        if at < len(numbers) and numbers[at] == number:
            return dues[at], new_numbers[at]
        return None

    def add(self, number: int, *row: int) -> bool:
        """Add a row; return whether the row is new. An existing row is not changed."""
        if number in self:
            return False
        if self._recent is None:
            if len(self._columns[0]) < RECENT_MIN:
                at = bisect_left(self._columns[0], number)
                self._columns = tuple(
                    [
                        column[:at] + array("Q", (value,)) + column[at:]
                        for column, value in zip(self._columns, (number, *row), strict=True)
                    ]
                )
                return True
            self._recent = {}
        self._recent[number] = row
        if len(self._recent) > RECENT_MIN + len(self._columns[0]) // RECENT_PART:
            self.columns()
        return True

    def columns(self) -> tuple[array[int], ...]:
        if self._recent:
            before, start = self._columns, 0
            merged = tuple([array("Q") for _ in before])
            for number, row in sorted(self._recent.items()):
                at = bisect_left(before[0], number, start)
                for column, old, value in zip(merged, before, (number, *row), strict=True):
                    column.extend(old[start:at])
                    column.append(value)
                start = at
            for column, old in zip(merged, before, strict=True):
                column.extend(old[start:])
            self._columns = merged
            self._recent.clear()
        return self._columns


class _SpannedMessages:
    """Rows of messages by span. `column_count`: words in a row. `span_bytes`: memory of an empty span."""

    what: ClassVar[str]
    column_count: ClassVar[int]
    span_bytes: ClassVar[int]

    def __init__(self) -> None:
        self._spans: dict[int, _Span] = {}
        self.count = 0

    def __len__(self) -> int:
        return len(self._spans)

    @property
    def size_bytes(self) -> int:
        return self.span_bytes * len(self._spans) + self.column_count * WORD * self.count

    def _span(self, due: int) -> _Span:
        span = self._spans.get(due >> SPAN_BITS)
        if span is None:
            columns = tuple([array("Q") for _ in range(self.column_count)])
            span = self._spans[due >> SPAN_BITS] = _Span(columns)
        return span

    def expire_spans(self, starts: Iterable[int]) -> int:
        """Remove the spans that begin at these due times; return how many messages were removed."""
        before = self.count
        for start in starts:
            self.count -= len(self._spans.pop(start >> SPAN_BITS, ()))
        return before - self.count

    def load(self, data: bytes) -> None:
        """Restore the rows from the result of `dump`; b"" has no rows. Raises ValueError."""
        self._spans.clear()
        self.count = position = 0
        while position < len(data):
            if len(data) - position < _ROW.size:
                raise ValueError(f"the {self.what} messages end inside a row")
            span, count = _ROW.unpack_from(data, position)
            position += _ROW.size
            end = position + self.column_count * WORD * count
            if end > len(data) or span in self._spans:
                raise ValueError(f"the {self.what} messages of the span {span} do not match their count")
            words = decode_words(data[position:end])
            columns = [words[n * count : (n + 1) * count] for n in range(self.column_count)]
            self._spans[span] = _Span(tuple(columns))
            self.count += count
            position = end

    def dump(self) -> bytes:
        """Encode each span as: span u64, count of its rows u64, the columns sorted by number; big-endian."""
        rows: list[bytes] = []
        for span, rows_of_span in sorted(self._spans.items()):
            rows += [_ROW.pack(span, len(rows_of_span)), *map(encode_words, rows_of_span.columns())]
        return b"".join(rows)


class CancelledMessages(_SpannedMessages):
    """Turns that will not be delivered, because their messages were cancelled or rescheduled; 8 bytes each.

    A turn must be remembered as long as a file may contain its message, and as long as the state of this message may be
    queried. After that, the caller removes the turn by `expire_spans`. One thread changes the set; other threads may
    test `(due, number) in cancelled` meanwhile.
    """

    what, column_count, span_bytes = "cancelled", 1, 256

    def __contains__(self, turn: tuple[int, int]) -> bool:
        span = self._spans.get(turn[0] >> SPAN_BITS)
        return span is not None and turn[1] in span

    def add(self, due: int, number: int) -> bool:
        new = self._span(due).add(number)
        self.count += new
        return new

    def any_between(self, low: int, high: int) -> bool:
        """Return whether a message due in [low, high] may be cancelled. False is certain, True may be wrong."""
        first, last = low >> SPAN_BITS, high >> SPAN_BITS
        if last - first < SPANS_CHECKED_MAX:
            return any(span in self._spans for span in range(first, last + 1))
        return len(self._spans) > SPANS_CHECKED_MAX or any(first <= span <= last for span in list(self._spans))

    def spans_ended_by(self, due: int) -> list[int]:
        """Return the spans that end at `due` or before, as their first due times, unsorted."""
        return [span << SPAN_BITS for span in self._spans if (span + 1) << SPAN_BITS <= due]


CHAIN_STEPS_MIN: Final = 64
"""The latest turn of a message is cached if the message was rescheduled more than this many times."""
SHORTCUTS_MAX: Final = 65_536


class RescheduledMessages(_SpannedMessages):
    """The new turns of rescheduled messages. A row has the old number, the new due time and the new number.

    The rows are stored so that a repeated request has the same result and old handles stay valid. Rows expire together
    with the old turns, which are in `CancelledMessages` too.
    """

    what, column_count, span_bytes = "rescheduled", 3, 1024

    def __init__(self) -> None:
        super().__init__()
        self._shortcuts: dict[Turn, Turn] = {}
        """Cache for messages that were rescheduled often: an earlier turn -> the latest turn."""
        self._targets: defaultdict[int, set[int]] = defaultdict(set)
        """By span: the spans (due time >> SPAN_BITS) to which its messages were rescheduled."""

    def get(self, due: int, number: int) -> Turn | None:
        """Return the turn that replaced this turn, or None. The new turn may have been replaced too: see `latest`."""
        span = self._spans.get(due >> SPAN_BITS)
        row = span.get(number) if span is not None else None
        return None if row is None else (row[0], row[1])

    def latest(self, due: int, number: int) -> Turn:
        """Return the latest turn of a message, which is (due, number) if the message was never rescheduled."""
        turn, steps, passed = (due, number), 0, [(due, number)]
        while (moved := self._shortcuts.get(turn) or self.get(*turn)) is not None:
            turn, steps = moved, steps + 1
            if steps % CHAIN_STEPS_MIN == 0:
                passed.append(turn)
        if steps > CHAIN_STEPS_MIN:
            if len(self._shortcuts) + len(passed) > SHORTCUTS_MAX:
                self._shortcuts.clear()
            self._shortcuts.update((each, turn) for each in passed[-SHORTCUTS_MAX:] if each != turn)
        return turn

    def add(self, due: int, number: int, turn: Turn) -> bool:
        """Add a message's new turn; return False if it has one already. The new number is higher than the old one."""
        new = self._span(due).add(number, *turn)
        if new:
            self._targets[due >> SPAN_BITS].add(turn[0] >> SPAN_BITS)
            self.count += 1
        return new

    def expirable_spans(self, starts: Iterable[int], before: int) -> list[int]:
        """Return which of these spans can be removed. Spans are given and returned as their first due times.

        A span must stay if one of its messages was rescheduled, in one or more steps, to `before` or later.
        """
        spans = {start >> SPAN_BITS for start in starts}
        leads_to: dict[int, list[int]] = {}
        needed: list[int] = []
        for span in spans & self._spans.keys():
            for target in self._targets[span]:
                if (target + 1) << SPAN_BITS > before or (target in self._spans and target not in spans):
                    needed.append(span)
                elif target != span:
                    leads_to.setdefault(target, []).append(span)
        while needed:
            span = needed.pop()
            if span in spans:
                spans.remove(span)
                needed += leads_to.get(span, ())
        return sorted(span << SPAN_BITS for span in spans)

    def expire_spans(self, starts: Iterable[int]) -> int:
        for start in starts:
            self._targets.pop(start >> SPAN_BITS, None)
        expired = super().expire_spans(starts)
        if expired:
            self._shortcuts.clear()
        return expired

    def load(self, data: bytes) -> None:
        super().load(data)
        self._shortcuts.clear()
        self._targets.clear()
        for number, span in self._spans.items():
            self._targets[number] = {due >> SPAN_BITS for due in span.columns()[1]}
