"""What takes several steps, written once for all faces: generators that a driver runs (see `waiting`).

Each takes the link (and the cluster where it needs topics) and returns plain values. All of them raise `TfmqError`s:
what the broker answered, `ConnectionFailed`, `TimedOut`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tfmq.bounded_msgpack import Buffer
from tfmq.client.asking import ask
from tfmq.client.call import Call
from tfmq.client.cluster import Cluster, Topic
from tfmq.client.link import SECONDS, Link
from tfmq.client.waiting import Operation, Wait, Waitable
from tfmq.errors import UnknownTopic
from tfmq.protocol import commands


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
