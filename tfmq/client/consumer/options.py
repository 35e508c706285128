"""Consumer configuration: arguments of all consumer APIs, validated into `ConsumerOptions`.

Here are also the parsed forms of single arguments: offset storage (`offsets`), start position (`start` and seeks), and
subscription (`topics` and `partitions`).
"""

from __future__ import annotations

import inspect
import os
import re
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

from journal.disk import Disk
from tfmq import limits
from tfmq.client.consumer.message import Codec, ReceivedMessage
from tfmq.codecs import check_codec
from tfmq.databases import url_without_passwords
from tfmq.errors import BadRequest
from tfmq.hooks import check_hooks
from tfmq.limits import KIB, MIB
from tfmq.message import Ordinal
from tfmq.offsets.file import FileOffsets
from tfmq.offsets.storage import OffsetStorage, PartitionName
from tfmq.protocol import commands

Topics = str | Sequence[str] | re.Pattern[str] | None
Partitions = Sequence[tuple[str, int]] | Sequence[int] | None
MessageFilter = Callable[[ReceivedMessage[Any]], object] | None
"""A function that returns whether a message is wanted."""
PartitionCallback = Callable[[list[PartitionName]], Any] | None
"""Called with partitions that were assigned or revoked. With asyncio a coroutine function is permitted."""

FETCH_BYTES: Final = 257 * KIB
"""Default fetch size: four full blocks with their block trailers. Measured: smaller fetches cost more round trips,
larger ones exceed the processor's caches."""
PREFETCH_BYTES: Final = 8 * MIB
"""Default limit of buffered responses. With it, a next response is there when one has been delivered. It is not higher,
because a seek discards all buffered responses."""
SESSION_SECONDS: Final = 30.0
"""Default session timeout: longer than the pauses of a busy process, so that its membership does not end. It is not
longer, because the partitions of a dead member get a new owner only after this time."""
SAVE_SECONDS: Final = 5.0
REFRESH_SECONDS: Final = 5.0
"""Default interval of checks for new partitions, and for new topics that match a pattern."""
TIMEOUT_SECONDS: Final = 30.0
"""Default time limit of a commit, a seek or a close."""
RETRIES: Final = 5
"""How often a handler is called again by default after its first call failed."""
DEFAULT_STORE: Final = "~/.local/state/tfmq/NODE/GROUP.db"
"""Default of `dead_letters`: one database for each broker (NODE stands for its id) and group."""
BROKER: Final = "broker"
EVERY_TAG: Final = "*"
TAG_SEPARATOR: Final = "||"
TOPIC_PREFIX: Final = "topic:"
"""Prefix of a topic's name in `dead_letters`, if the dead letters are stored in a topic."""
_CHOICES: Final[dict[str, tuple[str, ...]]] = {
    "read": tuple(commands.READ),
    "on_damage": ("stop", "skip"),
    "on_out_of_range": ("stop", "earliest", "latest"),
    "commits": ("auto", "manual", "before"),
    "strategy": (commands.STICKY, commands.RANGE, commands.CONSISTENT_HASH),
}


class ConsumerOptions(NamedTuple):
    """Validated arguments. Times in seconds, sizes in bytes. `awaits`: whether callbacks may be coroutine functions."""

    subscription: Subscription
    group: str | None
    start: StartPosition
    start_latest: bool
    read: int
    skip_damage: bool
    reset: str | None
    commits: str
    storage: OffsetStorage | None
    retries: int
    dead_letters: str | os.PathLike[str] | None
    tags: frozenset[str] | None
    where: MessageFilter
    codec: Codec | Mapping[str, Codec] | None
    hooks: tuple[Any, ...]
    strategy: str
    coordinator: str | None
    on_assigned: PartitionCallback
    on_revoked: PartitionCallback
    awaits: bool
    timeout: float
    session_timeout: float
    commit_interval: float
    refresh_interval: float
    fetch_bytes: int
    prefetch_bytes: int


def check_arguments(arguments: Mapping[str, Any], *, awaits: bool = True) -> ConsumerOptions:
    """Validate a consumer's arguments. Raises BadRequest if one is invalid, NotSupported if one names ZooKeeper
    and kazoo is not installed."""
    given = SimpleNamespace(**arguments)
    subscription = Subscription.from_arguments(given.topics, given.partitions)
    coordinator = given.coordinator
    by_broker = coordinator == BROKER
    if not by_broker and not (isinstance(coordinator, str) and coordinator.startswith(ZOOKEEPER_PREFIX)):
        raise BadRequest(f'coordinator={coordinator!r}: it takes "broker" or "zookeeper://HOST:PORT/ROOT".')
    _check_values(given, by_broker)
    _check_functions(given, awaits)
    _check_dead_letters(given.dead_letters, subscription, given.group)
    for topic in given.codec if isinstance(given.codec, Mapping) else ():
        if not subscription.reads(topic):
            raise BadRequest(f"codec= has one for the topic {topic}, which this consumer does not read.")
    unchanged = {name: arguments[name] for name in ConsumerOptions._fields if name in arguments}
    converted: dict[str, Any] = {
        "group": _group_name(given.group, given.broadcast),
        "start": start_position(given.start),
        "read": commands.READ[given.read],
        "storage": open_storage(given.offsets if by_broker or given.offsets != BROKER else given.coordinator),
        "tags": _parse_tags(given.tags),
        "hooks": check_hooks(given.hooks, "before_handle", "after_handle"),
        "coordinator": None if by_broker else given.coordinator,
    }
    return ConsumerOptions(
        **{**unchanged, **converted},
        subscription=subscription,
        start_latest=given.start == "latest",
        skip_damage=given.on_damage == "skip",
        reset=None if given.on_out_of_range == "stop" else given.on_out_of_range,
        awaits=awaits,
        session_timeout=given.session,
        commit_interval=given.save_every,
        refresh_interval=given.refresh_every,
    )


def check_poll(timeout: Any, max_messages: Any) -> None:
    number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
    if timeout is not None and not (number and timeout >= 0):
        raise BadRequest(f"timeout={timeout!r} is no number of seconds from 0 on; None waits without a limit.")
    if type(max_messages) is not int or max_messages < 1:
        raise BadRequest(f"max_messages={max_messages!r} is not possible; it must be at least 1.")


def _check_values(given: SimpleNamespace, by_broker: bool) -> None:
    for name, allowed in _CHOICES.items():
        if (value := getattr(given, name)) not in allowed:
            words = ", ".join(f'"{each}"' for each in allowed)
            raise BadRequest(f"{name}={value!r} is not known; it takes {words}.")
    saves = given.commits != "auto" or given.offsets != BROKER or given.broadcast or not by_broker
    if given.group is None and saves:
        raise BadRequest("commits=, offsets=, broadcast= and coordinator= need a group: without one nothing is saved.")
    if given.standby and given.group is not None:
        raise BadRequest("standby=True reads without a group: offsets and members are kept by the primary.")
    if type(given.retries) is not int or given.retries < 0:
        raise BadRequest(f"retries={given.retries!r} is no number of calls; it takes one from 0 on.")
    for name in ("session", "timeout", "save_every", "refresh_every"):
        value = getattr(given, name)
        if not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise BadRequest(f"{name}={value!r} is no number of seconds above 0.")
    if not limits.SESSION_MS_MIN <= given.session * 1000 <= limits.SESSION_MS.cap:
        raise BadRequest(f"session={given.session!r}: it must be from 1 to {limits.SESSION_MS.cap // 1000} seconds.")
    for name in ("fetch_bytes", "prefetch_bytes"):
        value = getattr(given, name)
        if type(value) is not int or not 0 < value < 1 << 32:
            raise BadRequest(f"{name}={value!r} is no number of bytes from 1 to 4 GiB.")
    check_codec(given.codec, "decode")


def _check_functions(given: SimpleNamespace, awaits: bool) -> None:
    """Raises BadRequest for a callback whose call would not run its body: generator functions, and coroutine functions
    that this consumer does not await."""
    for name in ("where", "on_assigned", "on_revoked"):
        value = getattr(given, name)
        if value is None:
            continue
        if not callable(value):
            raise BadRequest(f"{name}={value!r} cannot be called.")
        if _matches(value, inspect.isgeneratorfunction) or _matches(value, inspect.isasyncgenfunction):
            raise BadRequest(f"{name}= contains a yield, so calling it would not run its body; use a plain function.")
        if not _matches(value, inspect.iscoroutinefunction):
            continue
        if name == "where":
            raise BadRequest(
                "where= is called for each message and must be a plain function, not a coroutine function."
            )
        if not awaits:
            raise BadRequest(
                f"{name}= is a coroutine function, and this consumer awaits nothing: write a plain function, or take"
                " tfmq.aio.Consumer."
            )


def _matches(function: Any, kind: Callable[[Any], bool]) -> bool:
    """Return whether the `inspect` predicate `kind` is true for `function` or, if it is an object, its `__call__`."""
    return kind(function) or kind(getattr(function, "__call__", None))  # noqa: B004


def _check_dead_letters(where: Any, subscription: Subscription, group: str | None) -> None:
    """Raises BadRequest for an invalid store, for a store without a group, and for a topic that the consumer reads."""
    if not isinstance(where, str | os.PathLike | None):
        raise BadRequest(f"dead_letters={where!r} names no store: it takes a path, a SQLAlchemy URL or topic:NAME.")
    if group is None and where not in (None, DEFAULT_STORE):
        raise BadRequest("dead_letters= needs a group: the dead letters of a store belong to a group.")
    if not isinstance(where, str) or not where.startswith(TOPIC_PREFIX):
        return
    topic = where.removeprefix(TOPIC_PREFIX)
    if subscription.reads(topic):
        raise BadRequest(
            f"dead_letters={where!r}: this consumer reads {topic} itself, so what is stored there would be delivered as"
            " messages; give the dead letters a topic of their own."
        )


def _group_name(group: str | None, broadcast: bool | str) -> str | None:
    """Return the group's name, for a broadcast with the name of this machine. Raises BadRequest for an invalid name."""
    if group is None:
        return None
    name = group
    if not isinstance(broadcast, bool) and not limits.is_valid_name(broadcast):
        raise BadRequest(
            f"broadcast={broadcast!r}: it takes True, or a name that stands for this machine: {limits.NAME_RULE}."
        )
    if broadcast:
        own = broadcast if isinstance(broadcast, str) else re.sub(r"[^A-Za-z0-9._-]", "_", socket.gethostname())
        name = f"{group}-{own}"
    if not limits.is_valid_name(name):
        raise BadRequest(f"{name!r} cannot be a group: {limits.NAME_RULE}.")
    return name


def _parse_tags(tags: str | Iterable[str] | None) -> frozenset[str] | None:
    """Return the tags of which a message must have one: for "a || b", the tags a and b. If `tags` is None or contains
    "*", there is no filter: return None. Raises BadRequest for an invalid tag, for no tag, and for too many tags."""
    if tags is None:
        return None
    if not isinstance(tags, Iterable) or isinstance(tags, bytes):
        raise BadRequest(f'tags={tags!r} is no tag to filter by; it takes text, as in "paid || sent", or a list.')
    if isinstance(tags, str) and any("|" in part for part in tags.split(TAG_SEPARATOR)):
        raise BadRequest(
            f'tags={tags!r} has a single bar: "paid || sent" is both (a tag with a bar in it goes into a list).'
        )
    given = (tags,) if isinstance(tags, str) else tuple(tags)
    found: set[str] = set()
    for each in given:
        if not isinstance(each, str):
            raise BadRequest(f"{each!r} is no tag to filter by; it takes text.")
        found.update(part.strip() for part in each.split(TAG_SEPARATOR))
    for tag in found:
        if not tag or len(tag.encode()) > limits.TAG_BYTES:
            raise BadRequest(f"{tag!r} is no tag to filter by: it takes words of up to {limits.TAG_BYTES:d} bytes.")
    if EVERY_TAG in found:
        return None
    if not 0 < len(found) <= limits.FETCH_TAGS:
        raise BadRequest(f"{len(found)} tags to filter by; it takes 1 to {limits.FETCH_TAGS:d}.")
    return frozenset(found)


FILE_PREFIX: Final = "file:"
SQL_PREFIX: Final = "sql:"
ZOOKEEPER_PREFIX: Final = "zookeeper://"
STORAGE_FORMS: Final = '"broker", "file:PATH", "sql:URL" or "zookeeper://HOST:PORT/ROOT"'


def open_storage(offsets: str | OffsetStorage, disk: Disk | None = None) -> OffsetStorage | None:
    """Return the offset storage that `offsets` names; None if the broker stores the offsets. The storage opens no
    connection before its first use. Raises BadRequest if `offsets` is invalid, NotSupported if it needs kazoo and kazoo
    is not installed."""
    if not isinstance(offsets, str):
        if isinstance(offsets, OffsetStorage):
            return offsets
        raise BadRequest(f"offsets= takes text or an OffsetStorage (read, save, close), not {type(offsets).__name__}.")
    if offsets == "broker":
        return None
    if offsets.startswith(FILE_PREFIX) and len(offsets) > len(FILE_PREFIX):
        return FileOffsets(offsets.removeprefix(FILE_PREFIX), disk)
    if offsets.startswith(SQL_PREFIX):
        from tfmq.offsets.sql import SqlOffsets  # SQLAlchemy is loaded only if it is used

        return SqlOffsets(offsets.removeprefix(SQL_PREFIX))
    if offsets.startswith(ZOOKEEPER_PREFIX):
        from tfmq.zookeeper.offsets import ZooKeeperOffsets  # kazoo is an optional dependency

        return ZooKeeperOffsets(offsets)
    raise BadRequest(f"offsets={url_without_passwords(offsets)!r} names no storage; write {STORAGE_FORMS}.")


OFFSET_MAX = (1 << 63) - 1


Start = str | int | Ordinal | datetime
"""Start position: "earliest", "latest", a byte offset, an `Ordinal` or an aware append time."""


class StartPosition(NamedTuple):
    """Fields `by` and `value` of a LOCATE request. `exact`: start at the offset `value` itself, without a LOCATE."""

    by: int
    value: int = 0
    exact: bool = False


EARLIEST = StartPosition(commands.BY_EARLIEST)
LATEST = StartPosition(commands.BY_LATEST)


def start_position(start: Start) -> StartPosition:
    if start == "earliest":
        return EARLIEST
    if start == "latest":
        return LATEST
    if isinstance(start, Ordinal):
        return StartPosition(commands.BY_ORDINAL, _check_range(start.number, "an ordinal"))
    if isinstance(start, datetime):
        return StartPosition(commands.BY_TIME_MS, time_ms(start))
    if isinstance(start, int) and not isinstance(start, bool):
        return StartPosition(commands.BY_OFFSET, _check_range(start, "an offset"), exact=True)
    raise BadRequest(
        f'{start!r} is no place to start at; write "earliest", "latest", an offset, tfmq.Ordinal(n) or a datetime.'
    )


def time_ms(time: datetime) -> int:
    """Convert an aware time to ms since 1970, at least 0. Raises BadRequest without a time zone."""
    if time.tzinfo is None:
        raise BadRequest(f"{time} has no time zone, so it is no moment; add one, for example tzinfo=datetime.UTC.")
    return max(0, round(time.timestamp() * 1000))


def seek_position(
    offset: int | None = None, ordinal: int | None = None, time: datetime | None = None, to: str | None = None
) -> StartPosition:
    """Convert the arguments of a seek. Raises BadRequest unless exactly one argument is given and is valid."""
    given = [each for each in (offset, ordinal, time, to) if each is not None]
    if len(given) != 1:
        raise BadRequest("A seek takes exactly one of offset=, ordinal=, time= and to=.")
    if ordinal is not None:
        return StartPosition(commands.BY_ORDINAL, _check_range(ordinal, "an ordinal"))
    if offset is not None:
        return StartPosition(commands.BY_OFFSET, _check_range(offset, "an offset"))
    if to is not None and to not in ("earliest", "latest"):
        raise BadRequest(f'to={to!r} is no place; write "earliest" or "latest".')
    return start_position(given[0])


def _check_range(value: int, what: str) -> int:
    if not 0 <= value <= OFFSET_MAX:
        raise BadRequest(f"{value} is not {what}: it must be from 0 to 2**63 - 1.")
    return value


class Subscription(NamedTuple):
    """The subscription of a consumer: topics by name, topics by pattern, or single partitions.

    `topics`: names, empty for a pattern · `partition_numbers`: the wanted partitions of each topic, None: all ·
    `single_partitions`: wanted partitions of any topics.
    """

    topics: tuple[str, ...] = ()
    pattern: re.Pattern[str] | None = None
    partition_numbers: frozenset[int] | None = None
    single_partitions: frozenset[PartitionName] = frozenset()

    @property
    def shown(self) -> str | list[str]:
        """The subscription as the `repr` of a consumer shows it."""
        if self.pattern is not None:
            return self.pattern.pattern
        if self.single_partitions:
            return sorted(map(str, self.single_partitions))
        return self.topics[0] if len(self.topics) == 1 else list(self.topics)

    @staticmethod
    def from_arguments(
        topics: str | Sequence[str] | re.Pattern[str] | None,
        partitions: Sequence[tuple[str, int]] | Sequence[int] | None,
    ) -> Subscription:
        if topics is None:
            return Subscription(single_partitions=_parse_single_partitions(partitions))
        numbers = None
        if partitions is not None:
            if isinstance(partitions, str | bytes) or not isinstance(partitions, Iterable):
                raise BadRequest(f"partitions={partitions!r} is no list of numbers, as in [0, 1].")
            numbers = frozenset(map(_check_partition_number, partitions))
        if numbers is not None and not numbers:
            raise BadRequest("partitions= is an empty list; leave it out to read all of them.")
        if isinstance(topics, re.Pattern):
            if not isinstance(topics.pattern, str):
                raise BadRequest(f"topics={topics!r} is a pattern over bytes; names of topics are text.")
            return Subscription(pattern=topics, partition_numbers=numbers)
        if not isinstance(topics, Iterable):
            raise BadRequest(f"topics={topics!r} names nothing; it takes a name, a list, a compiled pattern.")
        names = tuple(dict.fromkeys(map(_check_topic_name, [topics] if isinstance(topics, str) else topics)))
        if not names:
            raise BadRequest("topics= is an empty list; name at least one topic.")
        return Subscription(names, partition_numbers=numbers)

    def topics_to_request(self) -> list[str] | None:
        """Return the topics whose metadata is to be requested; None: all topics."""
        if self.pattern is not None:
            return None
        return sorted({*self.topics, *(name.topic for name in self.single_partitions)})

    def reads(self, topic: str) -> bool:
        if self.pattern is not None and self.pattern.fullmatch(topic) is not None:
            return True
        return topic in self.topics or any(name.topic == topic for name in self.single_partitions)

    def subscribed_partitions(self, rows: Iterable[commands.TopicRow]) -> dict[PartitionName, int]:
        """Return the subscribed partitions among existing topics, with their topics' incarnations."""
        return {
            name: row.incarnation
            for row in rows
            for partition in row.partitions
            if self._includes(name := PartitionName(row.name, partition.partition))
        }

    def requested_partitions(self, found: Iterable[PartitionName]) -> list[PartitionName] | None:
        """Return the partitions to request from the group: `found` (those that exist), and all that the user has named,
        even if they do not exist yet. None: all partitions of the topics."""
        if not self.single_partitions and self.partition_numbers is None:
            return None
        named = (PartitionName(topic, number) for topic in self.topics for number in self.partition_numbers or ())
        return sorted({*named, *self.single_partitions, *found})

    def missing_names(self, found: Iterable[PartitionName]) -> list[str]:
        names = set(found)
        topics = {name.topic for name in names}
        single = sorted(str(name) for name in self.single_partitions - names)
        return [each for each in self.topics if each not in topics] + single

    def _includes(self, name: PartitionName) -> bool:
        if name in self.single_partitions:
            return True
        if self.partition_numbers is not None and name.partition not in self.partition_numbers:
            return False
        if self.pattern is not None:
            return self.pattern.fullmatch(name.topic) is not None
        return name.topic in self.topics


def _parse_single_partitions(partitions: Sequence[tuple[str, int]] | Sequence[int] | None) -> frozenset[PartitionName]:
    if not partitions:
        raise BadRequest("A consumer needs topics= (a name, a list, a compiled pattern) or partitions=.")
    if isinstance(partitions, str | bytes) or not isinstance(partitions, Iterable):
        raise BadRequest(f'partitions={partitions!r} is no list of pairs, as in [("orders", 0)].')
    found = set()
    for each in partitions:
        if not isinstance(each, Sequence) or isinstance(each, str) or len(each) != 2:
            raise BadRequest(f"partitions= without topics= takes pairs (topic, partition), not {each!r}.")
        found.add(PartitionName(_check_topic_name(each[0]), _check_partition_number(each[1])))
    return frozenset(found)


def _check_partition_number(value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < limits.PARTITIONS_PER_TOPIC.cap:
        return value
    raise BadRequest(f"{value!r} is not the number of a partition; with topics= it takes numbers from 0 on.")


def _check_topic_name(name: object) -> str:
    if isinstance(name, str) and limits.is_valid_name(name):
        return name
    raise BadRequest(f"{name!r} cannot be a topic: {limits.NAME_RULE}.")
