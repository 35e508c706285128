"""Operations that send requests, some with retries, and a cache of topic metadata.

All operations raise a `TfmqError`: the broker's error, `ConnectionFailed` or `TimedOut`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Final, NamedTuple

from tfmq.backoff import Backoff, pause_seconds
from tfmq.bounded_msgpack import Buffer
from tfmq.client.connection.connection import REQUEST_TIMEOUT_SECONDS, ClientConnection, PendingRequest
from tfmq.client.operation import Future, Operation, Wait
from tfmq.errors import NOT_DONE, UNKNOWN, Busy, Closed, ConnectionFailed, TfmqError, TimedOut, UnknownTopic
from tfmq.message import Partition
from tfmq.protocol import commands
from tfmq.protocol.commands import TopicRow

PAUSE_SECONDS: Final = 0.05
PAUSE_SECONDS_MAX: Final = 2.0
"""Maximum pause between two attempts. After a lost connection, the pause before the reconnect is added."""
ATTEMPT_TIMEOUT_SECONDS: Final = 30.0


def request_with_retries(
    link: ClientConnection, request: Any, until: float, *, in_background: bool = False, while_busy: bool = True
) -> Generator[Wait, None, Any]:
    """Send `request`, again after each retriable error, and return the reply.

    If no further attempt is possible before the time `until` (in the connection's clock), the last error is raised. An
    error is raised at once if it is not retriable, if the client has never been connected to a broker, or if it is
    `Busy` and `while_busy` is false. `in_background`: no caller waits, so the background thread reads the reply. The
    broker may execute the request more than once, so use this only for requests that may safely be repeated.
    """
    pending = yield from send_with_retries(
        link, request, until=until, in_background=in_background, while_busy=while_busy
    )
    return pending.reply


def send_with_retries(
    link: ClientConnection,
    request: Any,
    *body: Buffer,
    until: float,
    in_background: bool = False,
    while_busy: bool = True,
) -> Generator[Wait, None, PendingRequest]:
    """Send a request with `body`, with retries as in `request_with_retries`. Return the completed request."""
    backoff = Backoff(PAUSE_SECONDS, PAUSE_SECONDS_MAX)
    while True:
        seconds = max(0.0, min(ATTEMPT_TIMEOUT_SECONDS, until - link.now()))
        pending = link.send_request(request, *body, seconds=seconds, in_background=in_background)
        try:
            while not pending.done:
                yield Wait((pending,))
            pending.result()
            return pending
        except TfmqError as error:
            give_up = not error.retriable or not link.connection_count or (isinstance(error, Busy) and not while_busy)
            pause = pause_seconds(error, backoff.advance())
            if give_up or link.now() + pause >= until:
                raise
        finally:
            link.abandon(pending)
        yield Wait((), pause)


REFRESH_SECONDS = 60.0
"""When the metadata of a topic is older than this, a producer requests it again at its next send to the topic."""


class Topic(NamedTuple):
    """One topic, as the broker last described it. `partitions[n]` is the partition with the number n."""

    name: str
    incarnation: int
    partitions: tuple[Partition, ...]
    settings: Mapping[str, Any]


class MetadataCache:
    """A cache of topic metadata by name. Does no I/O.

    An entry is used until the broker rejects a request with the entry's incarnation, because the topic was deleted. The
    caller then invalidates the entry. New partitions become known when a producer requests the metadata again after
    `REFRESH_SECONDS`.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._topics: dict[str, tuple[Topic, float]] = {}

    def topic(self, name: str) -> Topic | None:
        known = self._topics.get(name)
        return known[0] if known else None

    def is_stale(self, name: str) -> bool:
        known = self._topics.get(name)
        return known is None or self._clock() - known[1] >= REFRESH_SECONDS

    def update(self, rows: Iterable[TopicRow]) -> list[Topic]:
        """Store the topics that the rows of a METADATA reply describe, and return them."""
        found = []
        for row in rows:
            rows_in_order = sorted(row.partitions, key=attrgetter("partition"))
            partitions = tuple([Partition(row.name, each.partition, each.state) for each in rows_in_order])
            topic = Topic(row.name, row.incarnation, partitions, row.settings)
            self._topics[row.name] = (topic, self._clock())
            found.append(topic)
        return found

    def invalidate(self, name: str) -> None:
        self._topics.pop(name, None)

    def clear(self) -> None:
        self._topics.clear()


def request(
    link: ClientConnection,
    message: Any,
    *body: Buffer,
    seconds: float | None = REQUEST_TIMEOUT_SECONDS,
    repeat: bool = True,
) -> Operation[Any]:
    """Send one request and return its reply. The arguments are those of `ClientConnection.send_request`."""
    pending = link.send_request(message, *body, seconds=seconds, repeat=repeat)
    yield from wait_for_reply(link, pending)
    return pending.result()


def wait_for_reply(link: ClientConnection, *requests: PendingRequest) -> Operation[None]:
    """Wait until all of `requests` are done. If this operation is cancelled before, abandon the requests."""
    try:
        for pending in requests:
            while not pending.done:
                yield Wait((pending,))
    finally:
        for pending in requests:
            link.abandon(pending)


def wait_for_all(futures: Sequence[Future], seconds: float | None, link: ClientConnection) -> Operation[bool]:
    """Wait until all of `futures` are done, and return True; return False if `seconds` pass before (None: no limit)."""
    deadline = None if seconds is None else link.now() + seconds
    for target in futures:
        while not target.done:
            remaining = None if deadline is None else deadline - link.now()
            if remaining is not None and remaining <= 0:
                return False
            yield Wait((target,), remaining)
    return True


def fetch_topics(
    link: ClientConnection,
    cluster: MetadataCache,
    names: Sequence[str] | None,
    *,
    create: bool = False,
    retry_while_busy: bool = False,
    seconds: float = REQUEST_TIMEOUT_SECONDS,
) -> Operation[list[Topic]]:
    """Request and cache the metadata of the topics `names` (None: all). Unknown topics are left out.

    `create`: create missing topics if the broker allows that. `retry_while_busy`: after a retriable error, for example
    while the broker is busy, repeat the request until `seconds` have passed.
    """
    metadata_request = commands.Metadata(None if names is None else list(names), create)
    if retry_while_busy:
        reply = yield from request_with_retries(link, metadata_request, link.now() + seconds)
    else:
        reply = yield from request(link, metadata_request, seconds=seconds)
    for name in names or ():
        cluster.invalidate(name)
    return cluster.update(reply.topics)


def get_topic(
    link: ClientConnection,
    cluster: MetadataCache,
    name: str,
    *,
    create: bool = False,
    retry_while_busy: bool = False,
    seconds: float = REQUEST_TIMEOUT_SECONDS,
) -> Operation[Topic]:
    """Return the topic from the cache `cluster`, or else request it by `fetch_topics`. Raises `UnknownTopic`."""
    if (known := cluster.topic(name)) is not None:
        return known
    found = yield from fetch_topics(
        link, cluster, [name], create=create, retry_while_busy=retry_while_busy, seconds=seconds
    )
    if not found:
        raise UnknownTopic(f"There is no topic {name}: create it (tfmq topic create), or look at the list.")
    return found[0]


TRANSACTION_PAUSE_SECONDS: Final = 0.01
TRANSACTION_PAUSE_SECONDS_MAX: Final = 1.0
UNCHECKED_ERRORS: Final = (Busy, Closed, ConnectionFailed, TimedOut)
"""After these errors an earlier attempt may have been executed: the broker did not check whether it executed one."""


def request_until_not_busy(
    link: ClientConnection,
    request: Any,
    *body: Buffer,
    until: float,
    in_background: bool = False,
    repeat: bool = True,
    maybe_sent: bool = False,
) -> Operation[PendingRequest]:
    """Send a transaction request, again after each `Busy`, up to the time `until` (in the connection's clock).

    Return the completed request with its reply or error. The error is `Busy` if no further attempt is possible before
    `until`. With `repeat` the request is sent again after a reconnect, so the broker must detect duplicates.

    `maybe_sent`: whether the caller has sent the request before, with unknown outcome. In this case, and if the request
    is sent more than once here, an error of `UNCHECKED_ERRORS` gets the outcome "unknown". `send_count` of the result
    includes the earlier attempt. Raises one of `UNCHECKED_ERRORS` if the request cannot be sent.
    """
    backoff = Backoff(TRANSACTION_PAUSE_SECONDS, TRANSACTION_PAUSE_SECONDS_MAX)
    while True:
        seconds = max(0.0, until - link.now())
        try:
            pending = link.send_request(request, *body, seconds=seconds, in_background=in_background, repeat=repeat)
        except UNCHECKED_ERRORS as error:
            raise (_with_unknown_outcome(error) if maybe_sent else error) from None
        try:
            while not pending.done:
                yield Wait((pending,))
        finally:
            link.abandon(pending)
        pending.send_count += maybe_sent
        maybe_sent = maybe_sent or pending.send_count > 1
        if isinstance(pending.error, Busy):
            pause = pause_seconds(pending.error, backoff.advance())
            if link.now() + pause < until:
                yield Wait((), pause)
                continue
        if maybe_sent and isinstance(pending.error, UNCHECKED_ERRORS):
            pending.error = _with_unknown_outcome(pending.error)
        return pending


def _with_unknown_outcome(error: TfmqError) -> TfmqError:
    if error.outcome != NOT_DONE:
        return error
    failure = type(error)(error.sentence, outcome=UNKNOWN)
    failure.details, failure.__cause__ = error.details, error.__cause__
    return failure
