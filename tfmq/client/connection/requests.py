"""One question to the broker, asked again while it fails for a passing reason: what longer operations are made of."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from tfmq.bounded_msgpack import Buffer
from tfmq.client.connection.connection import SECONDS, Call, Link
from tfmq.client.operation import Operation, Wait, Waitable
from tfmq.errors import NOT_DONE, UNKNOWN, Busy, Closed, ConnectionFailed, TfmqError, TimedOut, UnknownTopic
from tfmq.message import Partition
from tfmq.protocol import commands
from tfmq.protocol.commands import TopicRow

PAUSE_SECONDS: Final = 0.05
PAUSE_SECONDS_MAX: Final = 2.0
"""Between two tries, doubled each time; the link's own back-off comes before it where there is no connection."""
CALL_SECONDS: Final = 30.0
"""How long one try waits for its answer."""


def ask(
    link: Link, request: Any, until: float, *, unattended: bool = False, while_busy: bool = True
) -> Generator[Wait, None, Any]:
    """The reply to `request`. Raises what is not retriable at once, what is retriable at `until` (the link's clock).

    A link that never reached a broker gives up by itself after its patience, and that is raised at once, too.
    `unattended`: nobody waits, a keeper reads the answer. Without `while_busy`, `Busy` is raised at once. Asking again
    must do no harm: not for PRODUCE.
    """
    pause = PAUSE_SECONDS
    while True:
        seconds = max(0.0, min(CALL_SECONDS, until - link.now()))
        call = link.call(request, seconds=seconds, unattended=unattended)
        try:
            while not call.done:
                yield Wait((call,))
            return call.result()
        except TfmqError as error:
            hopeless = (
                not error.retriable or not link.connections or (isinstance(error, Busy) and not while_busy)
            )
            if hopeless or link.now() + pause >= until:
                raise
        finally:
            link.abandon(call)
        yield Wait((), pause)
        pause = min(pause * 2, PAUSE_SECONDS_MAX)


# What the client knows of the broker's topics: names, incarnations, partitions. Pure memory; `operations` asks.
#
# A topic stays known until somebody who was refused under it forgets it. So a topic that was deleted and made anew is
# noticed by the first request that bears the old incarnation, and a grown one by whoever looks again.

REFRESH_SECONDS = 60.0
"""After so long a producer looks whether a topic has grown, when it sends to it next."""


class Topic(NamedTuple):
    """One topic as the broker described it last. `partitions[n].number == n`."""

    name: str
    incarnation: int
    partitions: tuple[Partition, ...]
    settings: Mapping[str, Any]


class Cluster:
    """A cache of topics by name."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._topics: dict[str, tuple[Topic, float]] = {}

    def topic(self, name: str) -> Topic | None:
        """The topic, if it is known."""
        known = self._topics.get(name)
        return known[0] if known else None

    def stale(self, name: str) -> bool:
        """Whether it is time to ask for the topic again."""
        known = self._topics.get(name)
        return known is None or self._clock() - known[1] >= REFRESH_SECONDS

    def learn(self, rows: Iterable[TopicRow]) -> list[Topic]:
        """Take over what METADATA answered."""
        learned = []
        for row in rows:
            partitions = tuple(
                Partition(row.name, each.partition, each.state)
                for each in sorted(row.partitions, key=lambda each: each.partition)
            )
            topic = Topic(row.name, row.incarnation, partitions, row.settings)
            self._topics[row.name] = (topic, self._clock())
            learned.append(topic)
        return learned

    def forget(self, name: str) -> None:
        self._topics.pop(name, None)

    def clear(self) -> None:
        self._topics.clear()


# What takes several steps, written once for all faces: generators that a driver runs (see `waiting`).
#
# Each takes the link (and the cluster where it needs topics) and returns plain values. All of them raise `TfmqError`s:
# what the broker answered, `ConnectionFailed`, `TimedOut`.


def request(
    link: Link, message: Any, *body: Buffer, seconds: float | None = SECONDS, repeat: bool = True
) -> Operation[Any]:
    """Send one request, wait, give the reply (a NamedTuple of `protocol.commands`)."""
    call = link.call(message, *body, seconds=seconds, repeat=repeat)
    yield from settled(link, call)
    return call.result()


def settled(link: Link, call: Call) -> Operation[None]:
    """Wait until `call` is done. Leaving early (an exception, a cancelled task) gives it up."""
    try:
        while not call.done:
            yield Wait((call,))
    finally:
        link.abandon(call)


def all_done(targets: Sequence[Waitable], seconds: float | None, link: Link) -> Operation[bool]:
    """Wait until every one of `targets` is done; False when `seconds` are over first."""
    deadline = None if seconds is None else link.now() + seconds
    for target in targets:
        while not target.done:
            remaining = None if deadline is None else deadline - link.now()
            if remaining is not None and remaining <= 0:
                return False
            yield Wait((target,), remaining)
    return True


def sleep(seconds: float) -> Operation[None]:
    """Let `seconds` pass."""
    yield Wait((), seconds)


def find_topics(
    link: Link,
    cluster: Cluster,
    names: Sequence[str] | None,
    *,
    create: bool = False,
    patient: bool = False,
    seconds: float = SECONDS,
) -> Operation[list[Topic]]:
    """Ask for topics (None: all) and remember them. Unknown ones are left out; `create` makes them. `patient`: a broker
    that is busy, or stops, is asked again until `seconds` are over.
    """
    asked = commands.Metadata(None if names is None else list(names), create)
    if patient:
        reply = yield from ask(link, asked, link.now() + seconds)
    else:
        reply = yield from request(link, asked, seconds=seconds)
    if names is not None:
        for name in names:
            cluster.forget(name)
    return cluster.learn(reply.topics)


def find_topic(
    link: Link,
    cluster: Cluster,
    name: str,
    *,
    create: bool = False,
    patient: bool = False,
    seconds: float = SECONDS,
) -> Operation[Topic]:
    """The topic, from memory if it is known, else asked for as by `find_topics`. Raises `UnknownTopic`."""
    known = cluster.topic(name)
    if known is None:
        found = yield from find_topics(link, cluster, [name], create=create, patient=patient, seconds=seconds)
        if not found:
            raise UnknownTopic(
                f"There is no topic {name}: create it (tfmq topic create), or look at the list."
            )
        known = found[0]
    return known


def locate(
    link: Link, topic: Topic, partition: int, by: int, value: int = 0, *, seconds: float = SECONDS
) -> Operation[commands.LocateReply]:
    """Find an offset; `by` is one of `commands.BY_...`."""
    message = commands.Locate(topic.name, topic.incarnation, partition, by, value)
    reply: commands.LocateReply = yield from request(link, message, seconds=seconds)
    return reply


# One request of a transaction, asked again while the broker is busy.

TRANSACTION_PAUSE_SECONDS: Final = 0.01
TRANSACTION_PAUSE_SECONDS_MAX: Final = 1.0
"""Between two tries, doubled each time."""
PASSING: Final = (Busy, Closed, ConnectionFailed, TimedOut)
"""Refusals before anybody looked whether the request came before: they say nothing of an earlier sending."""


def answered(
    link: Link,
    request: Any,
    *body: Buffer,
    until: float,
    unattended: bool = False,
    repeat: bool = True,
    doubtful: bool = False,
) -> Operation[Call]:
    """The call, done: with its reply, or with an error that is not `Busy` unless it is `until` (the link's clock) by
    then. The link sends it again over a new connection (`repeat`), so it must be one that the broker knows again.

    `doubtful`: it was sent before, and nobody knows what became of that. Then, and where it went out more than once
    here, a refusal that says nothing of the earlier sending is "unknown". The call's `sends` count that one, too.
    """
    pause = TRANSACTION_PAUSE_SECONDS
    while True:
        seconds = max(0.0, until - link.now())
        try:
            call = link.call(request, *body, seconds=seconds, unattended=unattended, repeat=repeat)
        except PASSING as error:
            raise (_unknown(error) if doubtful else error) from None
        try:
            while not call.done:
                yield Wait((call,))
        finally:
            link.abandon(call)
        call.sends += doubtful
        doubtful = doubtful or call.sends > 1
        if not isinstance(call.error, Busy) or link.now() + pause >= until:
            if doubtful and isinstance(call.error, PASSING):
                call.error = _unknown(call.error)
            return call
        yield Wait((), pause)
        pause = min(pause * 2, TRANSACTION_PAUSE_SECONDS_MAX)


def _unknown(error: TfmqError) -> TfmqError:
    if error.outcome != NOT_DONE:
        return error
    told = type(error)(error.sentence, outcome=UNKNOWN)
    told.details, told.__cause__ = error.details, error.__cause__
    return told
