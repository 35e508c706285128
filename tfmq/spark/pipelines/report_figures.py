"""What a report tells of a topic, out of histograms: Spark counts into bins, all else follows from them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

BINS_PER_DOUBLING: Final = 16
"""A bin is 4.4 % wide; it knows its smallest and largest value, so few different values are told exactly."""
QUANTILES: Final = (0.5, 0.9, 0.99, 0.999)


class Bin(NamedTuple):
    """`count` values from `least` to `most`, with this `total`."""

    count: int  # type: ignore[assignment]  # hides tuple.count
    least: int
    most: int
    total: int


class Spread(NamedTuple):
    """A distribution: bins by rising values, none of them empty."""

    bins: tuple[Bin, ...] = ()

    @property
    def values(self) -> int:
        """How many."""
        return sum(each.count for each in self.bins)

    @property
    def mean(self) -> float:
        """0 where there is nothing."""
        return sum(each.total for each in self.bins) / max(1, self.values)

    def quantile(self, share: float) -> int:
        """The value that `share` of all are not above; within a bin evenly spread. 0 where there is nothing."""
        left = share * self.values
        for each in self.bins:
            if left <= each.count:
                return round(each.least + (each.most - each.least) * left / each.count)
            left -= each.count
        return self.bins[-1].most if self.bins else 0

    def row(self) -> dict[str, float | None]:
        """As tables and JSON have it; None where there is nothing, since 0 would be a figure."""
        if not self.bins:
            names = ("mean", "min", *(name_of(share) for share in QUANTILES), "max")
            return {"values": 0, **dict.fromkeys(names)}
        named = {name_of(share): self.quantile(share) for share in QUANTILES}
        least, most = self.bins[0].least, self.bins[-1].most
        return {"values": self.values, "mean": round(self.mean, 1), "min": least, **named, "max": most}


def name_of(share: float) -> str:
    """'p99.9' for 0.999."""
    return f"p{str(share * 100).removesuffix('.0')}"


class Moment(NamedTuple):
    """`messages` with `size_bytes` of payload were appended in the `seconds` from `at` (s since 1970) on."""

    at: int
    seconds: int
    messages: int
    size_bytes: int


class GroupLag(NamedTuple):
    """How far a group is behind in the topic: in messages, and the age of the oldest that it has not consumed (s); -1:
    cannot be told."""

    group: str
    lag: int
    age_seconds: float


def lag_text(lag: int) -> str:
    """'1,200', or 'unknown'."""
    return f"{lag:,}" if lag >= 0 else "unknown"


class TopicFigures(NamedTuple):
    """All of one topic. `partitions`: messages by partition · `sizes` of payloads, bytes · `latencies` from born to
    appended, ms; `unborn` messages do not say when they were born, `early` ones before by their own clock · `calls`:
    how often dead letters were handled -> how many; `letters` by state."""

    topic: str
    partitions: dict[int, int]
    moments: tuple[Moment, ...]
    sizes: Spread
    latencies: Spread
    unborn: int = 0
    early: int = 0
    groups: tuple[GroupLag, ...] = ()
    calls: Mapping[int, int] = MappingProxyType({})
    letters: Mapping[str, int] = MappingProxyType({})

    @property
    def messages(self) -> int:
        """All that were read."""
        return sum(self.partitions.values())

    @property
    def size_bytes(self) -> int:
        """Of all payloads."""
        return sum(each.size_bytes for each in self.moments)

    @property
    def span_seconds(self) -> int:
        """From the first append to the last."""
        return self.moments[-1].at + self.moments[-1].seconds - self.moments[0].at if self.moments else 0

    def row(self) -> dict[str, Any]:
        """As JSON has it."""
        peak = max((each.messages / each.seconds for each in self.moments), default=0.0)
        return {
            "topic": self.topic,
            "messages": self.messages,
            "payload_bytes": self.size_bytes,
            "seconds": self.span_seconds,
            "messages_per_second": round(self.messages / max(1, self.span_seconds), 3),
            "peak_per_second": round(peak, 3),
            "partitions": {str(number): count for number, count in sorted(self.partitions.items())},
            "size_bytes": self.sizes.row(),
            "latency_ms": self.latencies.row(),
            "without_birth": self.unborn,
            "before_birth": self.early,
            "groups": [each._asdict() for each in self.groups],
            "letters": dict(self.letters),
            "calls": {str(calls): count for calls, count in sorted(self.calls.items())},
            "moments": [each._asdict() for each in self.moments],
        }


def spread_of(bins: Iterable[Sequence[int]]) -> Spread:
    """Of rows (count, least, most, total), in any order."""
    return Spread(tuple(sorted((Bin(*each) for each in bins), key=lambda each: each.least)))


WIDTHS: Final = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 86400, 604800)
MOMENTS_MAX: Final = 240


def width_of(span_seconds: int) -> int:
    """Seconds that one point of a plot over so long a time stands for: a round number, so that there are at most
    MOMENTS_MAX."""
    return next(
        (width for width in WIDTHS if span_seconds <= width * MOMENTS_MAX), -(-span_seconds // MOMENTS_MAX)
    )
