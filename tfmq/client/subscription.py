"""What a consumer reads, in the user's words, and what that means with the topics that the broker has now."""

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tfmq import limits
from tfmq.client.positions import PartitionName
from tfmq.errors import BadRequest
from tfmq.protocol.commands import TopicRow


class Subscription(NamedTuple):
    """Topics by name or by pattern, whole or with some partitions, or single partitions.

    `topics`: names, empty for a pattern · `numbers`: the partitions of each topic, None: all · `single`: partitions
    of their own.
    """

    topics: tuple[str, ...] = ()
    pattern: re.Pattern[str] | None = None
    numbers: frozenset[int] | None = None
    single: frozenset[PartitionName] = frozenset()

    @property
    def shown(self) -> str | list[str]:
        """What is read, as `repr` of a consumer shows it."""
        if self.pattern is not None:
            return self.pattern.pattern
        if self.single:
            return sorted(map(str, self.single))
        return self.topics[0] if len(self.topics) == 1 else list(self.topics)

    @staticmethod
    def of(
        topics: str | Sequence[str] | re.Pattern[str] | None,
        partitions: Sequence[tuple[str, int]] | Sequence[int] | None,
    ) -> "Subscription":
        """The arguments `topics` and `partitions` of a consumer. Raises BadRequest."""
        if topics is None:
            return Subscription(single=_single(partitions))
        if partitions is not None and (
            isinstance(partitions, str | bytes) or not isinstance(partitions, Iterable)
        ):
            raise BadRequest(f"partitions={partitions!r} is no list of numbers, as in [0, 1].")
        numbers = None if partitions is None else frozenset(_number(each) for each in partitions)
        if numbers is not None and not numbers:
            raise BadRequest("partitions= is an empty list; leave it out to read all of them.")
        if isinstance(topics, re.Pattern):
            if not isinstance(topics.pattern, str):
                raise BadRequest(f"topics={topics!r} is a pattern over bytes; names of topics are text.")
            return Subscription(pattern=topics, numbers=numbers)
        if not isinstance(topics, Iterable):
            raise BadRequest(f"topics={topics!r} names nothing; it takes a name, a list, a compiled pattern.")
        names = tuple(dict.fromkeys(map(_check_name, [topics] if isinstance(topics, str) else topics)))
        if not names:
            raise BadRequest("topics= is an empty list; name at least one topic.")
        return Subscription(names, numbers=numbers)

    def asked(self) -> list[str] | None:
        """The topics to ask the broker about; None: all."""
        if self.pattern is not None:
            return None
        return sorted({*self.topics, *(name.topic for name in self.single)})

    def reads(self, topic: str) -> bool:
        """Whether something of a topic of that name is wanted."""
        if self.pattern is not None and self.pattern.fullmatch(topic) is not None:
            return True
        return topic in self.topics or any(name.topic == topic for name in self.single)

    def wanted(self, rows: Iterable[TopicRow]) -> dict[PartitionName, int]:
        """The partitions to read among those that are there, each with its topic's incarnation."""
        return {
            name: row.incarnation
            for row in rows
            for partition in row.partitions
            if self._wants(name := PartitionName(row.name, partition.partition))
        }

    def only(self, found: Iterable[PartitionName]) -> list[PartitionName] | None:
        """The partitions that a member of a group asks for, also those that are not there yet; None: all of its topics.
        `found`: those that are there."""
        if not self.single and self.numbers is None:
            return None
        named = (PartitionName(topic, number) for topic in self.topics for number in self.numbers or ())
        return sorted({*named, *self.single, *found})

    def missing(self, found: Iterable[PartitionName]) -> list[str]:
        """What was named and is not there: topics, and partitions that were named one by one."""
        names = set(found)
        topics = {name.topic for name in names}
        single = sorted(str(name) for name in self.single - names)
        return [each for each in self.topics if each not in topics] + single

    def _wants(self, name: PartitionName) -> bool:
        if name in self.single:
            return True
        if self.numbers is not None and name.partition not in self.numbers:
            return False
        if self.pattern is not None:
            return self.pattern.fullmatch(name.topic) is not None
        return name.topic in self.topics


def _single(partitions: Sequence[tuple[str, int]] | Sequence[int] | None) -> frozenset[PartitionName]:
    if not partitions:
        raise BadRequest("A consumer needs topics= (a name, a list, a compiled pattern) or partitions=.")
    if isinstance(partitions, str | bytes) or not isinstance(partitions, Iterable):
        raise BadRequest(f'partitions={partitions!r} is no list of pairs, as in [("orders", 0)].')
    found = set()
    for each in partitions:
        if not isinstance(each, Sequence) or isinstance(each, str) or len(each) != 2:
            raise BadRequest(f"partitions= without topics= takes pairs (topic, partition), not {each!r}.")
        found.add(PartitionName(_check_name(each[0]), _number(each[1])))
    return frozenset(found)


def _number(value: object) -> int:
    if (
        isinstance(value, int)
        and not isinstance(value, bool)
        and 0 <= value < limits.PARTITIONS_PER_TOPIC.cap
    ):
        return value
    raise BadRequest(f"{value!r} is not the number of a partition; with topics= it takes numbers from 0 on.")


def _check_name(name: object) -> str:
    if isinstance(name, str) and limits.valid_name(name):
        return name
    raise BadRequest(f"{name!r} is no name of a topic: letters, digits, '.', '_' and '-', at most 249.")
