"""Which delayed messages were given another turn, so that a repeat gets the first answer and an old handle still works.

24 bytes each, by the span in which the old one was due; kept and forgotten together with `Cancelled`, where every old
one is too.
"""

from array import array
from bisect import bisect_left
from collections.abc import Iterable
from struct import Struct
from typing import Final

from tfmq.delay.cancelled import RECENT_MIN, RECENT_PART, SPAN_BITS
from tfmq.delay.dues import WORD, word_bytes, words

COLUMNS: Final = 3
"""Old number, new due time, new number."""
SPAN_BYTES: Final = 1024
"""What a span takes in memory beside its messages."""
STRIDE: Final = 64
"""A way of more steps is remembered: who moves a message by its first handle again and again does not walk it all."""
SHORTCUTS_MAX: Final = 65_536
"""So many of them; with more, all are found anew."""

_ROW: Final = Struct(">QQ")

Turn = tuple[int, int]
"""(effective due time in ms, number)."""


class _Span:
    """The messages of one span by their old numbers: most of them sorted, the newest in a dict."""

    __slots__ = ("_columns", "_recent", "targets")

    def __init__(self, columns: "tuple[array[int], array[int], array[int]] | None" = None) -> None:
        self._columns = columns or (array("Q"), array("Q"), array("Q"))
        self._recent: dict[int, Turn] = {}
        self.targets = {due >> SPAN_BITS for due in self._columns[1]}
        """The spans to which its messages were moved."""

    def __len__(self) -> int:
        return len(self._columns[0]) + len(self._recent)

    def get(self, number: int) -> Turn | None:
        if (turn := self._recent.get(number)) is not None:
            return turn
        olds, dues, numbers = self._columns  # looked at second: what leaves the dict is in here before
        at = bisect_left(olds, number)
        if at < len(olds) and olds[at] == number:
            return dues[at], numbers[at]
        return None

    def add(self, number: int, turn: Turn) -> bool:
        """Whether it is new; the first answer stays."""
        if self.get(number) is not None:
            return False
        self._recent[number] = turn
        self.targets.add(turn[0] >> SPAN_BITS)
        if len(self._recent) > RECENT_MIN + len(self._columns[0]) // RECENT_PART:
            self.columns()
        return True

    def columns(self) -> "tuple[array[int], array[int], array[int]]":
        """All of them, sorted by the old number."""
        if self._recent:
            before, start = self._columns, 0
            merged = (array("Q"), array("Q"), array("Q"))
            for number in sorted(self._recent):
                at = bisect_left(before[0], number, start)
                row = (number, *self._recent[number])
                for column, old, value in zip(merged, before, row, strict=True):
                    column.extend(old[start:at])
                    column.append(value)
                start = at
            for column, old in zip(merged, before, strict=True):
                column.extend(old[start:])
            self._columns = merged
            self._recent.clear()
        return self._columns


class Rescheduled:
    """See the module."""

    def __init__(self) -> None:
        self._spans: dict[int, _Span] = {}
        self._shortcuts: dict[Turn, Turn] = {}
        """From turns to where they led when that was asked."""
        self.count = 0

    @property
    def size_bytes(self) -> int:
        """Memory that it takes, about."""
        return SPAN_BYTES * len(self._spans) + COLUMNS * WORD * self.count

    def get(self, due: int, number: int) -> Turn | None:
        """The turn that this one was given instead; None if none is known. It may have been moved on since."""
        span = self._spans.get(due >> SPAN_BITS)
        return span.get(number) if span is not None else None

    def latest(self, due: int, number: int) -> Turn:
        """Where the message is now, by all that is known: its own turn if it was never moved."""
        turn, steps, passed = (due, number), 0, [(due, number)]
        while (moved := self._shortcuts.get(turn) or self.get(*turn)) is not None:
            turn, steps = moved, steps + 1
            if steps % STRIDE == 0:
                passed.append(turn)
        if steps > STRIDE:
            if len(self._shortcuts) + len(passed) > SHORTCUTS_MAX:
                self._shortcuts.clear()
            self._shortcuts.update((each, turn) for each in passed[-SHORTCUTS_MAX:] if each != turn)
        return turn

    def add(self, due: int, number: int, turn: Turn) -> bool:
        """The message waits for `turn` from now on; whether that is new. New numbers are higher than old ones."""
        span = self._spans.setdefault(due >> SPAN_BITS, _Span())
        new = span.add(number, turn)
        self.count += new
        return new

    def over(self, starts: Iterable[int], before: int) -> list[int]:
        """Those of the spans that begin at `starts` from which no handle leads, in however many steps, to a message
        that is due at `before` or later."""
        spans = {start >> SPAN_BITS for start in starts}
        leads_to: dict[int, list[int]] = {}
        held: list[int] = []
        for span in spans & self._spans.keys():
            for target in self._spans[span].targets:
                if (target + 1) << SPAN_BITS > before or (target in self._spans and target not in spans):
                    held.append(span)
                elif target != span:
                    leads_to.setdefault(target, []).append(span)
        while held:
            span = held.pop()
            if span in spans:
                spans.remove(span)
                held += leads_to.get(span, ())
        return sorted(span << SPAN_BITS for span in spans)

    def forget(self, starts: Iterable[int]) -> int:
        """Drops the spans that begin at these due times; how many messages are forgotten."""
        before = self.count
        for start in starts:
            span = self._spans.pop(start >> SPAN_BITS, None)
            self.count -= len(span) if span is not None else 0
        if self.count < before:
            self._shortcuts.clear()
        return before - self.count

    def load(self, data: bytes) -> None:
        """Starts from what `dump` gave; b"" is empty. Raises ValueError."""
        self._spans.clear()
        self._shortcuts.clear()
        self.count = position = 0
        while position < len(data):
            if len(data) - position < _ROW.size:
                raise ValueError("the rescheduled messages end inside a row")
            span, count = _ROW.unpack_from(data, position)
            position += _ROW.size
            size = WORD * count
            columns = [data[position + n * size : position + (n + 1) * size] for n in range(COLUMNS)]
            if len(columns[-1]) != size or span in self._spans:
                raise ValueError(f"the rescheduled messages of the span {span} are not as many as it says")
            olds, dues, numbers = map(words, columns)
            self._spans[span] = _Span((olds, dues, numbers))
            self.count += count
            position += COLUMNS * size

    def dump(self) -> bytes:
        """Rows by span: span u64, count u64, old numbers sorted, new due times, new numbers; big-endian."""
        rows: list[bytes] = []
        for span, held in sorted(self._spans.items()):
            rows += [_ROW.pack(span, len(held)), *map(word_bytes, held.columns())]
        return b"".join(rows)
