"""The figures of one moment that `/metrics` exports, gathered without stopping the broker's work for long."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, Final, NamedTuple

from journal.histogram import BOUNDS_SECONDS, TimeHistogram
from tfmq.broker.broker import Broker
from tfmq.broker.groups.lag import lag
from tfmq.broker.partition import Partition

STEP_SECONDS: Final = 0.002
"""The partitions are read in steps of this time, between which the broker does other work."""
PARTITIONS_PER_CLOCK: Final = 50
"""Number of partitions that are read between two looks at the clock."""
TOPIC_SERIES_MAX: Final = 100
"""Topics with series of their own: those with the most bytes."""
GROUP_SERIES_MAX: Final = 500
"""Pairs of group and topic whose lag is exported, and groups whose dead letters are."""
OFFSETS_MAX: Final = 1000
"""Offsets of groups of which the lag is computed: each may read a block from the disk."""


@dataclass(slots=True)
class LogFigures:
    """Sums over the partitions of one topic, or of all."""

    topic: str = ""
    messages: int = 0
    bytes: int = 0
    appended: int = 0
    """Messages since the topic was created, those that were removed included."""
    removed: int = 0
    segments: int = 0
    stopped: int = 0
    damaged: int = 0

    def add(self, other: LogFigures) -> None:
        self.messages += other.messages
        self.bytes += other.bytes
        self.appended += other.appended
        self.removed += other.removed
        self.segments += other.segments
        self.stopped += other.stopped
        self.damaged += other.damaged


class HistogramFigures(NamedTuple):
    """`counts`: of each bucket, not summed up; the last has no bound. `sum_seconds`: None where it is not known."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum_seconds: float | None


@dataclass(slots=True)
class Figures:
    """Everything that the metrics are made of. `server`: the figures of connections and of the process."""

    server: dict[str, Any]
    broker: dict[str, Any] = field(default_factory=dict)
    all_logs: LogFigures = field(default_factory=LogFigures)
    topics: list[LogFigures] = field(default_factory=list)
    lags: dict[tuple[str, str], int] = field(default_factory=dict)
    """(group, topic) -> messages."""
    members: dict[str, int] = field(default_factory=dict)
    dead_letters: dict[str, int] = field(default_factory=dict)
    left_out: dict[str, int] = field(default_factory=dict)
    """Kind of series -> how many are not exported, or not known, because of the limits of this module."""
    histograms: dict[str, HistogramFigures] = field(default_factory=dict)


LagQuestion = tuple[str, str, Any, Partition]
"""Group, topic, committed offset, partition."""


class Survey:
    """Gathers the figures of a broker: the logs step by step, in the reactor's thread; then group lags in a worker."""

    def __init__(self, broker: Broker, call_later: Callable[..., Any], now: Callable[[], float]) -> None:
        self._broker, self._call_later, self._now = broker, call_later, now

    def gather(self, server: dict[str, Any], done: Callable[[Figures | None, BaseException | None], None]) -> None:
        """Call `done` with the figures, or with an error. `server`: as in `Figures`."""
        figures = Figures(server)
        self._step(figures, self._read_topics(figures), done)

    def _step(
        self, figures: Figures, reading: Iterator[None], done: Callable[[Figures | None, BaseException | None], None]
    ) -> None:
        deadline = self._now() + STEP_SECONDS
        try:
            for _ in reading:
                if self._now() > deadline:
                    self._call_later(0, self._step, figures, reading, done)
                    return
            self._read_broker(figures)
            questions = self._lag_questions(figures)
        except Exception as error:
            done(None, error)
            return
        self._broker.read_executor.run(partial(_with_lags, figures, questions), done, self)

    def _read_topics(self, figures: Figures) -> Iterator[None]:
        """Add up the partitions of all topics, and yield now and then."""
        largest: list[tuple[int, str, LogFigures]] = []
        read = 0
        for name in list(self._broker.topics):
            topic = self._broker.topics.get(name)  # it may have been deleted since
            if topic is None:
                continue
            own = LogFigures(name)
            for partition in topic.partitions:
                _add_partition(own, partition)
                read += 1
                if read % PARTITIONS_PER_CLOCK == 0:
                    yield
            figures.all_logs.add(own)
            entry = (own.bytes, name, own)
            if len(largest) < TOPIC_SERIES_MAX:
                heapq.heappush(largest, entry)
            else:
                heapq.heappushpop(largest, entry)
        figures.topics = [own for _, _, own in largest]
        figures.left_out["topics"] = max(0, len(self._broker.topics) - TOPIC_SERIES_MAX)

    def _read_broker(self, figures: Figures) -> None:
        broker = self._broker
        own_logs = (
            broker.catalog.log.stopped,
            broker.transaction_commands.store.stopped,
            broker.delay_commands.partition.log.stopped,
        )
        figures.all_logs.stopped += sum(reason is not None for reason in own_logs)
        figures.broker = {
            "node": broker.node,
            "uptime_seconds": broker.clock.monotonic() - broker.started,
            "topics": len(broker.topics),
            "partitions": broker.topics.partition_count(),
            "groups": len(broker.catalog.state.groups),
            "free_bytes": broker.free_bytes(),
            "disk_full": broker.full_disk.is_full,
            "parked_fetches": broker.fetches.parked_count,
            "pending_bytes": broker.backpressure.pending_bytes,
            "transactions": broker.transaction_commands.coordinator.status(),
            "delay": broker.delay_commands.status(),
            "schedules": broker.schedule_commands.status(),
            "verification": broker.segment_verifier.status(),
        }
        lateness = figures.broker["delay"]["lateness"]["counts"]
        figures.histograms = {
            "produce": _copy(broker.produce_handler.times),
            "fetch": _copy(broker.fetches.times),
            "fsync": _copy(broker.forcer.times),
            # Bucket n has lateness below 2^n ms; those of a day and more are one bucket here.
            "lateness": HistogramFigures(
                tuple((1 << n) / 1000 for n in range(LATENESS_BOUNDS)),
                (*lateness[:LATENESS_BOUNDS], sum(lateness[LATENESS_BOUNDS:])),
                None,
            ),
        }

    def _lag_questions(self, figures: Figures) -> list[LagQuestion]:
        """Return whose lag to compute, and note the members and dead letters of the groups."""
        broker, questions = self._broker, list[LagQuestion]()
        pairs: set[tuple[str, str]] = set()
        left_out = 0
        for group, state in broker.catalog.state.groups.items():
            if len(questions) >= OFFSETS_MAX or len(pairs) >= GROUP_SERIES_MAX:
                left_out += 1
                continue
            for key, place, topic in broker.group_offset_store.in_existing_topics(state):
                partition = broker.topics.find_partition(*key)
                if partition is None:
                    continue
                pair = group, topic
                if len(questions) >= OFFSETS_MAX or (pair not in pairs and len(pairs) >= GROUP_SERIES_MAX):
                    left_out += 1
                    break
                pairs.add(pair)
                questions.append((group, topic, place, partition))
        figures.left_out["groups"] = left_out
        figures.members = dict(islice(broker.group_coordinator.member_counts(), GROUP_SERIES_MAX))
        dead_letters = broker.group_coordinator.dead_letters
        figures.dead_letters = dict(islice(dead_letters.items(), GROUP_SERIES_MAX))
        return questions


LATENESS_BOUNDS: Final = 27
"""Bounds of the histogram of lateness: from 1 ms to 2^26 ms, which is 18 hours."""


def _add_partition(own: LogFigures, partition: Partition | str) -> None:
    if isinstance(partition, str):
        own.stopped += 1
        return
    log = partition.log
    first, end = log.first_ordinal, log.end_ordinal
    own.messages += end - first
    own.bytes += log.size_bytes
    own.appended += end
    own.removed += first
    own.segments += log.segment_count
    own.stopped += log.stopped is not None
    own.damaged += bool(log.damage)


def _copy(histogram: TimeHistogram) -> HistogramFigures:
    return HistogramFigures(BOUNDS_SECONDS, tuple(histogram.counts), histogram.sum_seconds)


def _with_lags(figures: Figures, questions: list[LagQuestion]) -> Figures:
    """Compute the lags. Runs in a worker, because a block may be read from the disk for each."""
    unknown = 0
    for group, topic, place, partition in questions:
        messages = lag(partition, place)
        if messages < 0:
            unknown += 1
        else:
            figures.lags[group, topic] = figures.lags.get((group, topic), 0) + messages
    figures.left_out["offsets"] = unknown
    return figures
