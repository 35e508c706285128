"""Logs in memory, for what plans without a broker: partitions of records, each with a size and a time."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from types import TracebackType

from tfmq.errors import UnknownTopic
from tfmq.spark.ranges import BlockRun, Bounds, OffsetRange, PartitionLog

FakeRecord = tuple[int, int]
"""Offset, append time in ms."""


class FakePartition:
    """Records from ordinal 0 on; those below `first` are gone."""

    def __init__(self, incarnation: int) -> None:
        self.incarnation = incarnation
        self.records: list[FakeRecord] = []
        self.end = 0
        self.first = 0
        self.numbered = True

    def add(self, count: int, size: int, ms: int) -> None:
        for _ in range(count):
            self.records.append((self.end, ms))
            self.end += size

    def find(self, offset: int) -> int:
        """The ordinal of the record at or after `offset`."""
        return next((number for number, (at, _) in enumerate(self.records) if at >= offset), len(self.records))

    def offset(self, ordinal: int) -> int:
        return self.records[ordinal][0] if ordinal < len(self.records) else self.end


class FakeLogs:
    """As `Logs`; `asked` counts the questions. Verbs of the test: create, add, retain, delete."""

    def __init__(self) -> None:
        self.kept: dict[str, list[FakePartition]] = {}
        self.asked: list[str] = []
        self.incarnations = 0
        self.name = ""

    def create(self, topic: str, partitions: int = 1) -> None:
        self.incarnations += 1
        self.kept[topic] = []
        self.grow(topic, partitions)

    def grow(self, topic: str, partitions: int) -> None:
        incarnation = self.incarnations if not self.kept[topic] else self.kept[topic][0].incarnation
        self.kept[topic] += [FakePartition(incarnation) for _ in range(partitions - len(self.kept[topic]))]

    def add(self, topic: str, partition: int, count: int, size: int = 10, ms: int = 1000) -> None:
        self.kept[topic][partition].add(count, size, ms)

    def retain(self, topic: str, partition: int, first: int) -> None:
        self.kept[topic][partition].first = first

    def delete(self, topic: str) -> None:
        del self.kept[topic]

    # Logs

    def broker_id(self) -> str:
        return self.name

    def topics(self) -> list[str]:
        self.asked.append("topics")
        return sorted(self.kept)

    def partitions(self, topic: str) -> list[PartitionLog]:
        self.asked.append("partitions")
        if topic not in self.kept:
            raise UnknownTopic(f"no {topic}")
        return [
            PartitionLog(topic, number, each.incarnation, each.incarnation << 24 | number)
            for number, each in enumerate(self.kept[topic])
        ]

    def _one(self, log: PartitionLog) -> FakePartition:
        there = self.kept.get(log.topic, [])
        if log.partition >= len(there) or there[log.partition].incarnation != log.incarnation:
            raise UnknownTopic(f"no {log.topic} of {log.incarnation}")
        return there[log.partition]

    def bounds(self, log: PartitionLog) -> Bounds:
        each = self._one(log)
        if not each.numbered:
            return Bounds(each.first, each.end, -1, -1)
        return Bounds(each.first, each.end, each.find(each.first), len(each.records))

    def all_bounds(self, logs: Sequence[PartitionLog]) -> list[Bounds]:
        self.asked.append("all_bounds")
        return [self.bounds(each) for each in logs]

    def offset_at_time(self, log: PartitionLog, ms: int) -> int:
        each = self._one(log)
        return next((at for at, time in each.records if time >= ms and at >= each.first), each.end)

    def offset_of_ordinal(self, log: PartitionLog, ordinal: int) -> int:
        self.asked.append("at_ordinal")
        each = self._one(log)
        return max(each.first, each.offset(ordinal))

    def next_message_offset(self, log: PartitionLog, offset: int) -> int:
        each = self._one(log)
        return each.offset(each.find(max(offset, each.first)))

    def ordinal_at_or_after(self, log: PartitionLog, offset: int) -> int:
        self.asked.append("ordinal_at")
        each = self._one(log)
        return each.find(offset) if each.numbered else -1

    def split(self, range: OffsetRange, size: int) -> list[OffsetRange]:
        cuts = [range.start]
        while cuts[-1] < range.end:
            cuts.append(min(range.end, self.next_message_offset(range.log, cuts[-1] + size)))
        return [OffsetRange(range.log, a, b) for a, b in pairwise(cuts)]

    def read_blocks(self, range: OffsetRange, max_bytes: int = 0) -> Iterator[BlockRun]:
        raise AssertionError("who plans reads nothing")

    def close(self) -> None:
        self.asked.append("close")

    def __enter__(self) -> "FakeLogs":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
