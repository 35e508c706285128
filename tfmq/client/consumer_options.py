"""What a consumer was told: every argument of its faces checked and put into one value."""

import inspect
import os
import re
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from tfmq import limits
from tfmq.client.offset_storage import ZOOKEEPER_PREFIX, OffsetStorage, open_storage
from tfmq.client.positions import PartitionName
from tfmq.client.received import Codec, ReceivedMessage
from tfmq.client.start import Question, Start, question
from tfmq.client.subscription import Subscription
from tfmq.codecs import check_codec
from tfmq.errors import BadRequest
from tfmq.hooks import checked_hooks
from tfmq.limits import KIB, MIB
from tfmq.protocol.commands import READ
from tfmq.protocol.messages import CONSISTENT_HASH, RANGE, STICKY

Topics = str | Sequence[str] | re.Pattern[str] | None
Partitions = Sequence[tuple[str, int]] | Sequence[int] | None
Where = Callable[[ReceivedMessage[Any]], object] | None
"""A filter: whether the message is wanted."""
Told = Callable[[list[PartitionName]], Any] | None
"""What is called with partitions that came, or are to go; with asyncio it may be a coroutine function."""

FETCH_BYTES: Final = 256 * KIB
"""Measured: smaller ones cost round trips, larger ones leave the processor's caches."""
PREFETCH_BYTES: Final = 8 * MIB
"""Enough to have the next fetch response at hand; more only makes a seek dearer."""
SESSION_SECONDS: Final = 30.0
"""How long a silent member keeps its share: longer than a pause of a busy process, shorter than a person's patience."""
SAVE_SECONDS: Final = 5.0
REFRESH_SECONDS: Final = 5.0
"""How often new partitions, and new topics of a pattern, are looked for."""
TIMEOUT_SECONDS: Final = 30.0
"""How long a commit, a seek or a close tries."""
RETRIES: Final = 5
"""Calls of a handler after the first one."""
OWN_STORE: Final = "~/.local/state/tfmq/NODE/GROUP.db"
"""Stands for the dead letters of whoever names no store."""
BROKER: Final = "broker"
STRATEGIES: Final = (STICKY, RANGE, CONSISTENT_HASH)
EVERY_TAG: Final = "*"
OR: Final = "||"
TOPIC_PREFIX: Final = "topic:"
"""Before the topic that has the dead letters."""
_ON_OUT_OF_RANGE: Final = ("stop", "earliest", "latest")


class ConsumerOptions(NamedTuple):
    """A consumer's arguments, checked. Times in seconds, sizes in bytes. `awaits`: the face is one that awaits what
    `on_assigned` and `on_revoked` return."""

    subscription: Subscription
    group: str | None
    start: Question
    start_latest: bool
    read: int
    skip_damage: bool
    reset: str | None
    commits: str
    storage: OffsetStorage | None
    retries: int
    dead_letters: str | os.PathLike[str] | None
    tags: frozenset[str] | None
    where: Where
    codec: Codec | Mapping[str, Codec] | None
    hooks: tuple[Any, ...]
    strategy: str
    coordinator: str | None
    on_assigned: Told
    on_revoked: Told
    awaits: bool
    timeout: float
    session: float
    save: float
    refresh: float
    fetch_bytes: int
    prefetch_bytes: int


class Arguments(NamedTuple):
    """What a face was given, unchecked; the defaults are those of all faces."""

    topics: Topics = None
    partitions: Partitions = None
    group: str | None = None
    start: Start = "earliest"
    read: str = "forced"
    on_damage: str = "stop"
    on_out_of_range: str = "stop"
    commits: str = "auto"
    offsets: str | OffsetStorage = BROKER
    retries: int = RETRIES
    dead_letters: str | os.PathLike[str] | None = OWN_STORE
    tags: str | Iterable[str] | None = None
    where: Where = None
    codec: Codec | Mapping[str, Codec] | None = None
    hooks: Sequence[Any] = ()
    strategy: str = STICKY
    broadcast: bool | str = False
    coordinator: str = BROKER
    on_assigned: Told = None
    on_revoked: Told = None
    timeout: float = TIMEOUT_SECONDS
    session: float = SESSION_SECONDS
    save_every: float = SAVE_SECONDS
    refresh_every: float = REFRESH_SECONDS
    fetch_bytes: int = FETCH_BYTES
    prefetch_bytes: int = PREFETCH_BYTES

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "Arguments":
        """Those among what a constructor was given."""
        return cls(**{name: given[name] for name in cls._fields})


def consumer_options(**arguments: Any) -> ConsumerOptions:
    """The options for the `Arguments` of a consumer. Raises BadRequest for a wrong one, NotSupported for a storage or a
    coordinator whose library is missing, TypeError for one that there is not."""
    return checked(Arguments(**arguments))


def checked(given: Arguments, *, awaits: bool = True) -> ConsumerOptions:
    """As `consumer_options`. `awaits`: see there."""
    subscription = Subscription.of(given.topics, given.partitions)
    by_broker = _by_broker(given.coordinator)
    _check(given, by_broker)
    _check_functions(given, awaits)
    _check_letters(given.dead_letters, subscription)
    for topic in given.codec if isinstance(given.codec, Mapping) else ():
        if not subscription.reads(topic):
            raise BadRequest(f"codec= has one for the topic {topic}, which this consumer does not read.")
    return ConsumerOptions(
        subscription=subscription,
        group=_group(given.group, given.broadcast),
        start=question(given.start),
        start_latest=given.start == "latest",
        read=READ[given.read],
        skip_damage=given.on_damage == "skip",
        reset=None if given.on_out_of_range == "stop" else given.on_out_of_range,
        commits=given.commits,
        storage=open_storage(given.offsets if by_broker or given.offsets != BROKER else given.coordinator),
        retries=given.retries,
        dead_letters=given.dead_letters,
        tags=_tags(given.tags),
        where=given.where,
        codec=given.codec,
        hooks=checked_hooks(given.hooks, "before_handle", "after_handle"),
        strategy=given.strategy,
        coordinator=None if by_broker else given.coordinator,
        on_assigned=given.on_assigned,
        on_revoked=given.on_revoked,
        awaits=awaits,
        timeout=given.timeout,
        session=given.session,
        save=given.save_every,
        refresh=given.refresh_every,
        fetch_bytes=given.fetch_bytes,
        prefetch_bytes=given.prefetch_bytes,
    )


def check_poll(timeout: Any, max_messages: Any) -> None:
    """What `poll` was given. Raises BadRequest."""
    number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
    if timeout is not None and not (number and timeout >= 0):
        raise BadRequest(f"timeout={timeout!r} is no number of seconds from 0 on; None is without end.")
    if type(max_messages) is not int or max_messages < 1:
        raise BadRequest(f"max_messages={max_messages!r} asks for nothing; it takes a number from 1 on.")


def _check(given: Arguments, by_broker: bool) -> None:
    _one_of("read", given.read, READ)
    _one_of("on_damage", given.on_damage, ("stop", "skip"))
    _one_of("on_out_of_range", given.on_out_of_range, _ON_OUT_OF_RANGE)
    _one_of("commits", given.commits, ("auto", "manual", "before"))
    _one_of("strategy", given.strategy, STRATEGIES)
    saves = given.commits != "auto" or given.offsets != BROKER or given.broadcast or not by_broker
    if given.group is None and saves:
        raise BadRequest(
            "commits=, offsets=, broadcast= and coordinator= need a group: without one nothing is saved."
        )
    if type(given.retries) is not int or given.retries < 0:
        raise BadRequest(f"retries={given.retries!r} is no number of calls; it takes one from 0 on.")
    _check_seconds(
        timeout=given.timeout,
        session=given.session,
        save_every=given.save_every,
        refresh_every=given.refresh_every,
    )
    _check_bytes(fetch_bytes=given.fetch_bytes, prefetch_bytes=given.prefetch_bytes)
    check_codec(given.codec, "decode")


def _check_functions(given: Arguments, awaits: bool) -> None:
    """That calling them does what their bodies say: a generator's never runs, a coroutine's where it is awaited."""
    for name in ("where", "on_assigned", "on_revoked"):
        value = getattr(given, name)
        if value is None:
            continue
        if not callable(value):
            raise BadRequest(f"{name}={value!r} cannot be called.")
        if _is(value, inspect.isgeneratorfunction) or _is(value, inspect.isasyncgenfunction):
            raise BadRequest(
                f"{name}= has a yield in it, so calling it would run nothing of it; take that out."
            )
        if not _is(value, inspect.iscoroutinefunction):
            continue
        if name == "where":
            raise BadRequest(
                "where= is asked message by message and takes a plain function, not a coroutine function."
            )
        if not awaits:
            raise BadRequest(
                f"{name}= is a coroutine function, and this consumer awaits nothing: write a plain function, or take"
                " tfmq.aio.Consumer."
            )


def _is(function: Any, kind: Callable[[Any], bool]) -> bool:
    """Also of an object that is called like a function."""
    return kind(function) or kind(getattr(function, "__call__", None))  # noqa: B004


def _check_letters(where: Any, subscription: Subscription) -> None:
    """What is noted of a letter must not be read as a message, of which a letter is made again."""
    if not isinstance(where, str | os.PathLike | None):
        raise BadRequest(
            f"dead_letters={where!r} names no store: it takes a path, a SQLAlchemy URL or topic:NAME."
        )
    if not isinstance(where, str) or not where.startswith(TOPIC_PREFIX):
        return
    topic = where.removeprefix(TOPIC_PREFIX)
    if subscription.reads(topic):
        raise BadRequest(
            f"dead_letters={where!r}: this consumer reads {topic} itself, so what is kept there would come back as"
            " messages; give the dead letters a topic of their own."
        )


def _group(group: str | None, broadcast: bool | str) -> str | None:
    """The group's name; of a broadcast the one that this machine, or who is named, has for itself."""
    if group is None:
        return None
    name = group
    if not isinstance(broadcast, bool) and not limits.valid_name(broadcast):
        raise BadRequest(
            f"broadcast={broadcast!r}: it takes True, or a name that stands for this machine: letters, digits, '.', '_'"
            " and '-', at most 249."
        )
    if broadcast:
        own = broadcast if isinstance(broadcast, str) else _machine()
        name = f"{group}-{own}"
    if not limits.valid_name(name):
        raise BadRequest(f"{name!r} is no name of a group: letters, digits, '.', '_' and '-', at most 249.")
    return name


def _machine() -> str:
    """The machine's own name, in letters that a group's may have."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", socket.gethostname())


def _by_broker(coordinator: str) -> bool:
    """Whether the broker coordinates the group, not a ZooKeeper."""
    if coordinator == BROKER:
        return True
    if isinstance(coordinator, str) and coordinator.startswith(ZOOKEEPER_PREFIX):
        return False
    raise BadRequest(f'coordinator={coordinator!r}: it takes "broker" or "zookeeper://HOST:PORT/ROOT".')


def _one_of(name: str, value: Any, allowed: Iterable[str]) -> None:
    if value not in tuple(allowed):
        words = ", ".join(f'"{each}"' for each in allowed)
        raise BadRequest(f"{name}={value!r} is not known; it takes {words}.")


def _check_seconds(session: float, **times: float) -> None:
    for name, value in {"session": session, **times}.items():
        if not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise BadRequest(f"{name}={value!r} is no number of seconds above 0.")
    if not limits.SESSION_MS_MIN <= session * 1000 <= limits.SESSION_MS.cap:
        raise BadRequest(f"session={session!r}: it has from 1 to {limits.SESSION_MS.cap // 1000} seconds.")


def _check_bytes(**sizes: int) -> None:
    for name, value in sizes.items():
        if type(value) is not int or not 0 < value < 1 << 32:
            raise BadRequest(f"{name}={value!r} is no number of bytes from 1 to 4 GiB.")


def _tags(tags: str | Iterable[str] | None) -> frozenset[str] | None:
    """The tags to filter by; None: no filter. "a || b" is both, "*" everything. Raises BadRequest."""
    if tags is None:
        return None
    if not isinstance(tags, Iterable) or isinstance(tags, bytes):
        raise BadRequest(
            f'tags={tags!r} is no tag to filter by; it takes text, as in "paid || sent", or a list.'
        )
    if isinstance(tags, str) and any("|" in part for part in tags.split(OR)):
        raise BadRequest(
            f'tags={tags!r} has a single bar: "paid || sent" is both (a tag with a bar in it goes into a list).'
        )
    given = (tags,) if isinstance(tags, str) else tuple(tags)
    found: set[str] = set()
    for each in given:
        if not isinstance(each, str):
            raise BadRequest(f"{each!r} is no tag to filter by; it takes text.")
        found.update(part.strip() for part in each.split(OR))
    for tag in found:
        if not tag or len(tag.encode()) > limits.TAG_BYTES:
            raise BadRequest(
                f"{tag!r} is no tag to filter by: it takes words of up to {limits.TAG_BYTES:d} bytes."
            )
    if EVERY_TAG in found:
        return None
    if not 0 < len(found) <= limits.FETCH_TAGS:
        raise BadRequest(f"{len(found)} tags to filter by; it takes 1 to {limits.FETCH_TAGS:d}.")
    return frozenset(found)
