"""Which delayed messages will not be delivered: 8 bytes each, by the span of time in which they were due.

A number is kept as long as some file may hold its message, and until nobody needs the exact answer any more; whoever
knows both calls `forget`. The spans are those of the smallest buckets, so that what was asked for a bucket's messages
is one look at one span.

One thread changes it; others may ask whether a message is cancelled meanwhile.
"""

from array import array
from bisect import bisect_left
from collections.abc import Iterable
from struct import Struct
from typing import Final

from tfmq.delay.dues import WORD, word_bytes, words

SPAN_BITS: Final = 16
"""A span is 2^16 ms, as the smallest bucket that is not split."""

RECENT_MIN: Final = 256
RECENT_PART: Final = 16
"""So many numbers, or this part of the sorted ones, wait in a set before they are sorted in: then adding one costs
the same whether there are ten or ten million."""

LOOK_MAX: Final = 64
"""So many spans are looked at for a quick answer about a stretch of time."""
SPAN_BYTES: Final = 256
"""What a span takes in memory beside its numbers: where they lie far apart, that is the most of it."""

_ROW: Final = Struct(">QQ")


class _Span:
    """The numbers of one span: sorted; of many, the newest in a set."""

    __slots__ = ("_recent", "_sorted")

    def __init__(self, numbers: "array[int]") -> None:
        self._sorted = numbers
        self._recent: set[int] | None = None

    def __len__(self) -> int:
        return len(self._sorted) + len(self._recent or ())

    def __contains__(self, number: int) -> bool:
        if self._recent is not None and number in self._recent:
            return True
        column = self._sorted  # looked at second: what leaves the set is in here before
        at = bisect_left(column, number)
        return at < len(column) and column[at] == number

    def add(self, number: int) -> bool:
        """Whether it is new."""
        if number in self:
            return False
        if self._recent is None:
            if len(self._sorted) < RECENT_MIN:
                column = self._sorted
                at = bisect_left(column, number)
                self._sorted = column[:at] + array("Q", (number,)) + column[at:]
                return True
            self._recent = set()
        self._recent.add(number)
        if len(self._recent) > RECENT_MIN + len(self._sorted) // RECENT_PART:
            self.numbers()
        return True

    def numbers(self) -> "array[int]":
        """All of them, sorted."""
        if self._recent:
            before, merged, start = self._sorted, array("Q"), 0
            for number in sorted(self._recent):
                at = bisect_left(before, number, start)
                merged.extend(before[start:at])
                merged.append(number)
                start = at
            merged.extend(before[start:])
            self._sorted = merged
            self._recent.clear()
        return self._sorted


class Cancelled:
    """See the module. `(due, number) in cancelled` asks for one message."""

    def __init__(self) -> None:
        self._spans: dict[int, _Span] = {}
        self.count = 0

    def __len__(self) -> int:
        """Spans in which any is."""
        return len(self._spans)

    def __contains__(self, turn: tuple[int, int]) -> bool:
        span = self._spans.get(turn[0] >> SPAN_BITS)
        return span is not None and turn[1] in span

    def add(self, due: int, number: int) -> bool:
        """The message will not be delivered; whether that is new."""
        span = self._spans.get(due >> SPAN_BITS)
        if span is None:
            span = self._spans[due >> SPAN_BITS] = _Span(array("Q"))
        new = span.add(number)
        self.count += new
        return new

    def any_between(self, low: int, high: int) -> bool:
        """Whether a message of the spans from the due time `low` to `high` (both among them) may be cancelled.

        False needs no look at single messages, and the answer costs the same however many are cancelled: where both
        the stretch and the spans are many, it is True.
        """
        first, last = low >> SPAN_BITS, high >> SPAN_BITS
        if last - first < LOOK_MAX:
            return any(span in self._spans for span in range(first, last + 1))
        return len(self._spans) > LOOK_MAX or any(first <= span <= last for span in list(self._spans))

    @property
    def size_bytes(self) -> int:
        """Memory that it takes, about."""
        return SPAN_BYTES * len(self._spans) + WORD * self.count

    def ended(self, due: int) -> list[int]:
        """The first due times of the spans that end at `due` or before, in no order."""
        return [span << SPAN_BITS for span in self._spans if (span + 1) << SPAN_BITS <= due]

    def forget(self, starts: Iterable[int]) -> int:
        """Drops the spans that begin at these due times; how many messages are forgotten."""
        before = self.count
        for start in starts:
            span = self._spans.pop(start >> SPAN_BITS, None)
            self.count -= len(span) if span is not None else 0
        return before - self.count

    def load(self, data: bytes) -> None:
        """Starts from what `dump` gave; b"" is empty. Raises ValueError."""
        self._spans.clear()
        self.count = position = 0
        while position < len(data):
            if len(data) - position < _ROW.size:
                raise ValueError("the cancelled messages end inside a row")
            span, count = _ROW.unpack_from(data, position)
            position += _ROW.size
            column = data[position : position + 8 * count]
            if len(column) != 8 * count or span in self._spans:
                raise ValueError(f"the cancelled messages of the span {span} are not as many as it says")
            self._spans[span] = _Span(words(column))
            self.count += count
            position += len(column)

    def dump(self) -> bytes:
        """Rows by span: span u64, count u64, the numbers sorted; big-endian."""
        rows: list[bytes] = []
        for span, held in sorted(self._spans.items()):
            rows += [_ROW.pack(span, len(held)), word_bytes(held.numbers())]
        return b"".join(rows)
