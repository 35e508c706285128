"""The buckets that count, by time: spans that never overlap, and which span a new due goes to.

A value: whoever changes the set makes a new one and puts it in the old one's place, so that any thread may read.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Sequence
from typing import Generic, Protocol, TypeVar

from tfmq.delay.spans import USUAL, Span, finer, level_of, span_of


class Spanned(Protocol):
    """What has a span."""

    @property
    def span(self) -> Span: ...


Leaf = TypeVar("Leaf", bound=Spanned)


class Leaves(Generic[Leaf]):
    """See the module."""

    def __init__(self, leaves: Iterable[Leaf] = ()) -> None:
        self.all: Sequence[Leaf] = tuple(sorted(leaves, key=lambda leaf: leaf.span))
        self.coarse: Sequence[Leaf] = tuple(leaf for leaf in self.all if leaf.span.exponent > USUAL)
        """Those that are cut finer before they are due: few, however many there are."""
        self._starts = [leaf.span.start for leaf in self.all]

    def at(self, due: int) -> Leaf | None:
        """The one whose span holds `due`."""
        index = bisect_right(self._starts, due) - 1
        return self.all[index] if index >= 0 and due < self.all[index].span.end else None

    def from_due(self, due: int) -> Sequence[Leaf]:
        """Those with a span that ends behind `due`, in order."""
        index = bisect_right(self._starts, due)
        return self.all[index - 1 if index and self.all[index - 1].span.end > due else index :]

    def overlapping(self) -> list[tuple[Leaf, Leaf]]:
        """Neighbours that overlap: there should be none."""
        pairs = zip(self.all, self.all[1:], strict=False)
        return [(one, other) for one, other in pairs if other.span.start < one.span.end]


class Plan:
    """Which span each due of a spill goes to: that of a leaf, or a new one, which later dues then find.

    `taken`: no new one may be exactly one of these; none of them is of the finest level.
    """

    def __init__(self, leaves: Iterable[Spanned], now_ms: int, taken: Collection[Span] = ()) -> None:
        self._spans = sorted(leaf.span for leaf in leaves)
        self._now_ms = now_ms
        self._taken = taken

    def span_of(self, due: int) -> Span:
        """The leaf's that holds `due`; else a new one's, as coarse as `level_of` says where that overlaps no leaf."""
        spans = self._spans
        index = bisect_right(spans, due, key=_start) - 1
        if index >= 0 and due < spans[index].end:
            return spans[index]
        span = span_of(due, level_of(due, self._now_ms))
        while span in self._taken or self._overlaps(span):
            span = span_of(due, finer(span.exponent))
        spans.insert(bisect_left(spans, span), span)
        return span

    def _overlaps(self, span: Span) -> bool:
        """Whether a leaf begins in it: one that holds all of it would hold the due."""
        index = bisect_left(self._spans, span.start, key=_start)
        return index < len(self._spans) and self._spans[index].start < span.end


def _start(span: Span) -> int:
    return span.start
