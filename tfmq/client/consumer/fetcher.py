"""What to fetch next, and what came: the sans-I/O half of reading.

One `Feed` a partition: where it is to be read next, what of it arrived and is not handed out, whether it is paused or
stopped. At most one fetch a partition is under way; it waits at the broker when there is nothing (a long poll), so an
idle partition costs nothing and a new message comes at once. While one chunk is worked on the next one is fetched. All
chunks that wait for the user take at most `prefetch_bytes`, shared by the partitions; they are handed out in turn,
one chunk a partition, so that no partition starves another; inside a partition order is kept.

What goes wrong stops its partition only, behind everything that was read before it, and is told once (`failure`).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Coroutine
from functools import partial
from typing import Any, Final, NamedTuple

from journal.record.format import tag_hash
from tfmq.client.connection.connection import Call, Link
from tfmq.client.consumer.decoder import Decoder
from tfmq.client.consumer.message import ReceivedMessage
from tfmq.client.consumer.options import FETCH_BYTES, PREFETCH_BYTES, ConsumerOptions
from tfmq.client.consumer.positions import UNKNOWN, Batch, Place
from tfmq.errors import (
    Abandoned,
    BadRequest,
    Damaged,
    DecodeFailed,
    LogTruncated,
    OffsetOutOfRange,
    ServerError,
    TfmqError,
)
from tfmq.limits import KIB, MIB
from tfmq.offsets.storage import PartitionName
from tfmq.protocol.commands import Cancel, Fetch

log = logging.getLogger("tfmq.consumer")

LARGE_MESSAGE_BYTES: Final = 512
FETCH_BYTES_LARGE: Final = MIB
"""Asked for where messages are larger than that, unless the user chose a size: too few share its cost otherwise."""
FETCH_BYTES_MIN: Final = 16 * KIB
"""With very many partitions a fetch brings at least so much, and what waits may pass `prefetch_bytes`."""
WAIT_MS: Final = 50_000
"""How long the broker holds a fetch that has nothing: long, for idleness to be free; below its limit."""
FETCHES_MAX: Final = 1024
"""Fetches under way at once, well below what a broker takes of one connection. Further partitions take turns."""
TURN_WAIT_MS: Final = 250
"""How long a fetch waits at the broker where partitions must take turns."""
RETRY_SECONDS: Final = 0.01
RETRY_SECONDS_MAX: Final = 2.0
"""A fetch that failed for a passing reason is sent again after so long, doubled each time. The link has a back-off
of its own, this one is for a broker that answers Busy."""
SKIPPED_KEPT: Final = 100
"""Skipped ranges that are remembered one by one; all are counted."""


class FetchPlan(NamedTuple):
    """A fetch that is to be sent; `turn` tells its answer from one that a seek has made void."""

    name: PartitionName
    incarnation: int
    offset: int
    epoch: int
    max_bytes: int
    wait_ms: int
    filtered: bool
    turn: int

    def request(self, read: int, tag_hashes: list[int] | None) -> Fetch:
        """The request to send; `read` is one of the protocol's."""
        hashes = tag_hashes if self.filtered else None
        place = (self.offset, self.epoch, self.max_bytes, self.wait_ms)
        return Fetch(self.name.topic, self.incarnation, self.name.partition, *place, read, hashes)


class Chunk(NamedTuple):
    """The answer to a fetch, undecoded: `body` covers offsets `start` to `next_offset`, wanted from `skip_to` on."""

    body: bytes
    start: int
    skip_to: int
    next_offset: int
    epoch: int
    filtered: bool


class Feed:
    """One partition that is read: see the module."""

    def __init__(self, name: PartitionName, incarnation: int, place: Place, decoder: Decoder) -> None:
        self.name = name
        self.incarnation = incarnation
        self.decoder = decoder
        self.turn = 0
        self.paused = False
        self.lined_up = False
        self.unfiltered_until = UNKNOWN
        self.large_messages = False
        self.begin(place)

    def begin(self, place: Place) -> None:
        """Read on at `place`: all that was fetched or is under way is void, and so is a failure."""
        self.turn += 1
        self.place = place
        self.fetch_offset = place.offset
        self.fetch_epoch = place.epoch
        self.chunks: deque[Chunk] = deque()
        self.chunk_bytes = 0
        self.fetching = False
        self.failure: TfmqError | None = None
        self.told = False
        self.retry_at = 0.0
        self.retries = 0

    def stop(self, failure: TfmqError) -> None:
        """Read no further than what was decoded; `begin` goes on."""
        self.begin(self.place)
        self.failure = failure


class Skipped(NamedTuple):
    """A range that was left out: it cannot be read, or is not there any more."""

    name: PartitionName
    first: int
    next_offset: int
    sentence: str


class Fetcher:
    """All partitions of one consumer. It never waits and never sends; see the module.

    `skip_damage`: go on behind a damaged range, and note it in `damage`. `reset`: what to do where the place is
    no longer there: None stops the partition, "earliest" and "latest" go on there.
    """

    def __init__(
        self,
        *,
        fetch_bytes: int = FETCH_BYTES,
        prefetch_bytes: int = PREFETCH_BYTES,
        wait_ms: int = WAIT_MS,
        tags: frozenset[str] | None = None,
        skip_damage: bool = False,
        reset: str | None = None,
    ) -> None:
        self.feeds: dict[PartitionName, Feed] = {}
        self.skipped: list[Skipped] = []
        self.skipped_count = 0
        self.handler: Any = None
        self.fetches = 0
        self.bytes_read = 0
        self._ready: deque[Feed] = deque()
        self._hungry: dict[Feed, None] = {}
        self._fetch_sizes = (fetch_bytes, FETCH_BYTES_LARGE if fetch_bytes == FETCH_BYTES else fetch_bytes)
        self._prefetch_bytes = prefetch_bytes
        self._wait_ms = wait_ms
        self._tags = tags
        self._skip_damage = skip_damage
        self._reset = reset
        self._under_way = 0

    # Partitions

    def add(self, feed: Feed) -> None:
        """Read one more partition."""
        feed.decoder.handle_by(self.handler)
        self.feeds[feed.name] = feed
        self._hungry[feed] = None

    def remove(self, name: PartitionName) -> None:
        """Read it no more; what is under way for it is void."""
        feed = self.feeds.pop(name)
        feed.begin(feed.place)
        self._hungry.pop(feed, None)

    def seek(self, name: PartitionName, place: Place) -> None:
        """Go on at `place`; a partition that had stopped goes on, too."""
        feed = self.feeds[name]
        feed.begin(place)
        self._hungry[feed] = None

    def pause(self, name: PartitionName) -> None:
        """Hand out nothing of the partition until `resume`; what has arrived waits."""
        self.feeds[name].paused = True

    def resume(self, name: PartitionName) -> None:
        feed = self.feeds[name]
        if feed.paused:
            feed.paused = False
            self._line_up(feed)
            self._hungry[feed] = None

    def renew(self) -> None:
        """In a forked child: nothing is under way any more."""
        self._under_way = 0

    # To the broker

    def plans(self, now: float) -> list[FetchPlan]:
        """The fetches that are to be sent now; each is answered by one `arrived` or `failed`."""
        if not self._hungry:
            return []
        share = self._prefetch_bytes // max(1, len(self.feeds))
        sizes = [min(size, max(FETCH_BYTES_MIN, share // 2)) for size in self._fetch_sizes]
        wait_ms = self._wait_ms if len(self.feeds) <= FETCHES_MAX else min(TURN_WAIT_MS, self._wait_ms)
        found = []
        for feed in list(self._hungry):
            if self._under_way >= FETCHES_MAX:
                break
            if feed.fetching or feed.paused or feed.failure is not None:
                del self._hungry[feed]
                continue
            max_bytes = sizes[feed.large_messages]
            if now >= feed.retry_at and (not feed.chunk_bytes or feed.chunk_bytes + max_bytes <= share):
                del self._hungry[feed]
                found.append(self._plan(feed, max_bytes, wait_ms))
        return found

    def next_retry(self) -> float | None:
        """When `plans` has something to send that it holds back after a failure; None: nothing."""
        return min((feed.retry_at for feed in self._hungry if feed.retry_at), default=None)

    def _plan(self, feed: Feed, max_bytes: int, wait_ms: int) -> FetchPlan:
        feed.fetching = True
        self._under_way += 1
        self.fetches += 1
        filtered = self._tags is not None and feed.fetch_offset >= feed.unfiltered_until
        place = (feed.fetch_offset, feed.fetch_epoch, max_bytes, wait_ms)
        return FetchPlan(feed.name, feed.incarnation, *place, filtered, feed.turn)

    # From the broker

    def arrived(self, plan: FetchPlan, chunk: Chunk) -> None:
        """The answer to `plan`."""
        feed = self._answered(plan)
        if feed is None:
            return
        feed.retry_at, feed.retries = 0.0, 0
        if chunk.next_offset < plan.offset or (chunk.body and chunk.next_offset == plan.offset):
            feed.failure = ServerError(
                f"The broker answered a fetch of {plan.name} at offset {plan.offset} with a place before it,"
                f" {chunk.next_offset}."
            )
            return
        feed.fetch_epoch = chunk.epoch
        if chunk.next_offset > plan.offset:
            feed.fetch_offset = chunk.next_offset
            feed.chunks.append(chunk)
            feed.chunk_bytes += len(chunk.body)
            self.bytes_read += len(chunk.body)
            self._line_up(feed)

    def failed(self, plan: FetchPlan, error: TfmqError, now: float) -> None:
        """`plan` came to nothing."""
        feed = self._answered(plan)
        if feed is None:
            return
        if error.retriable or isinstance(error, Abandoned):
            feed.retries += 1
            feed.retry_at = now + min(RETRY_SECONDS_MAX, RETRY_SECONDS * 2 ** min(feed.retries, 16))
            return
        if isinstance(error, Damaged) and self._skip_damage and error.next > plan.offset:
            self._note_skipped(feed, max(error.first, plan.offset), error.next, str(error))
            self._go_on_at(feed, error.next, feed.fetch_epoch)
            return
        place = self._reset_place(error)
        if place is None or place < 0:
            feed.failure = explained(error, plan.name, plan.offset)
            return
        first, following = min(plan.offset, place), max(plan.offset, place)
        self._note_skipped(feed, first, following, str(explained(error, plan.name, plan.offset)))
        self._go_on_at(feed, place, UNKNOWN)

    def _go_on_at(self, feed: Feed, offset: int, epoch: int) -> None:
        """Fetch from `offset`. A chunk without bytes takes the reader's place there too, after what was read before:
        nothing may ever follow, and a reader that waits for the present end has reached it."""
        feed.fetch_offset, feed.fetch_epoch = offset, epoch
        feed.chunks.append(Chunk(b"", offset, offset, offset, epoch, filtered=False))
        self._line_up(feed)

    def _answered(self, plan: FetchPlan) -> Feed | None:
        """The feed that `plan` was for; None if its answer is void."""
        self._under_way -= 1
        feed = self.feeds.get(plan.name)
        if feed is None or feed.turn != plan.turn:
            return None
        feed.fetching = False
        self._hungry[feed] = None
        return feed

    def _reset_place(self, error: TfmqError) -> int | None:
        """Where the user wants to go on after `error`, if he does."""
        if self._reset is None:
            return None
        if isinstance(error, LogTruncated):
            return error.cut
        if isinstance(error, OffsetOutOfRange):
            return error.first if self._reset == "earliest" else error.end
        return None

    # To the user

    def take(self, held: Collection[PartitionName] = ()) -> Batch | None:
        """The next chunk as messages, of the partition whose turn it is, `held` ones left out; None: nothing came."""
        passed = 0
        while passed < len(self._ready):
            feed = self._ready.popleft()
            if feed.name in held:
                passed += 1
                self._ready.append(feed)
                continue
            feed.lined_up = False
            if feed.paused or not feed.chunks or self.feeds.get(feed.name) is not feed:
                continue
            batch = self._decoded(feed)
            self._line_up(feed)
            self._hungry[feed] = None
            if batch is not None:
                feed.place = batch.following
                return batch
        return None

    def failure(self) -> TfmqError | None:
        """Why a partition stopped, once for each, when everything before it was taken."""
        for feed in self.feeds.values():
            if feed.failure is not None and not feed.told and not feed.chunks and not feed.paused:
                feed.told = True
                return feed.failure
        return None

    def standstill(self) -> TfmqError | None:
        """A failure if no partition can ever bring anything again, because each has stopped."""
        failures = [feed.failure for feed in self.feeds.values()]
        return failures[0] if failures and None not in failures else None

    def _decoded(self, feed: Feed) -> Batch | None:
        """The first chunk of `feed`; what is wrong in it stops the feed, or is skipped, behind what is right."""
        chunk = feed.chunks.popleft()
        feed.chunk_bytes -= len(chunk.body)
        messages: list[ReceivedMessage] = []
        following = feed.place
        try:
            for decoded in feed.decoder.decode(
                chunk.body, chunk.start, chunk.skip_to, chunk.next_offset, gaps=chunk.filtered
            ):
                messages += decoded.messages
                following = Place(decoded.next_offset, decoded.next_ordinal, decoded.epoch)
        except Damaged as damaged:
            self._damaged_chunk(feed, chunk, damaged)
        except DecodeFailed as failed:
            feed.stop(failed)
        else:
            if following.offset != chunk.next_offset:
                following = Place(chunk.next_offset, UNKNOWN, chunk.epoch)
        feed.large_messages = len(chunk.body) > LARGE_MESSAGE_BYTES * len(messages)
        if self._tags is not None:
            messages = [message for message in messages if message.tag in self._tags]
        if not messages and following.offset <= feed.place.offset:
            return None
        return Batch(feed.name, messages, following)

    def _damaged_chunk(self, feed: Feed, chunk: Chunk, damaged: Damaged) -> None:
        if chunk.filtered:
            feed.begin(Place(damaged.first, UNKNOWN, chunk.epoch))
            feed.unfiltered_until = chunk.next_offset
        elif not self._skip_damage:
            feed.stop(damaged)
        else:
            self._note_skipped(feed, damaged.first, damaged.next, str(damaged))
            rest = chunk.body[damaged.next - chunk.start :]  # without bytes it still moves the reader's place
            feed.chunks.appendleft(chunk._replace(body=rest, start=damaged.next, skip_to=damaged.next))
            feed.chunk_bytes += len(rest)

    def _note_skipped(self, feed: Feed, first: int, next_offset: int, sentence: str) -> None:
        log.warning("Skipped offsets %d to %d. %s", first, next_offset, sentence)
        self.skipped_count += 1
        self.skipped.append(Skipped(feed.name, first, next_offset, sentence))
        del self.skipped[:-SKIPPED_KEPT]

    def _line_up(self, feed: Feed) -> None:
        if feed.chunks and not feed.paused and not feed.lined_up:
            feed.lined_up = True
            self._ready.append(feed)


def explained(error: TfmqError, name: PartitionName, offset: int) -> TfmqError:
    """`error` with a sentence that names the partition and, where offsets are gone, the range that is lost."""
    if isinstance(error, OffsetOutOfRange):
        if offset < error.first:
            lost = f"offsets {offset} to {error.first} were removed and are lost to this reader"
        else:
            lost = f"offset {offset} lies behind the end, {error.end}"
        error.sentence = (
            f"{name}: {lost}; it holds {error.first} to {error.end}. Seek, or set on_out_of_range."
        )
    elif isinstance(error, LogTruncated):
        error.sentence = (
            f"{name}: what this reader had read from offset {error.cut} up to {offset} was cut off after a crash."
            f" Seek to {error.cut} to go on, or set on_out_of_range."
        )
    elif str(name) not in error.sentence:
        error.sentence = f"{name} at offset {offset}: {error.sentence}"
    error.args = (error.sentence,)
    return error


# The fetches of one consumer: sent as its `Fetcher` plans them, their answers given to it, and taken from there.

FETCH_GRACE_SECONDS: Final = 30.0
"""So much longer than the broker holds a fetch does the client wait for its answer."""


def fetcher_of(options: ConsumerOptions) -> Fetcher:
    """What decides what to fetch, as these options have it."""
    return Fetcher(
        fetch_bytes=options.fetch_bytes,
        prefetch_bytes=options.prefetch_bytes,
        tags=options.tags,
        skip_damage=options.skip_damage,
        reset=options.reset,
    )


class Fetching:
    """`arrived` is called at each answer; `flush` tells the driver that requests should leave now; `counted` gets what
    an answer says in passing: how many partitions its topic has."""

    def __init__(
        self,
        options: ConsumerOptions,
        link: Link,
        fetcher: Fetcher,
        *,
        arrived: Callable[[], None],
        flush: Callable[[], None],
    ) -> None:
        self._read = options.read
        self._where = options.where
        self._hashes = None if options.tags is None else sorted({tag_hash(tag) for tag in options.tags})
        self._link = link
        self._fetcher = fetcher
        self._arrived = arrived
        self._flush = flush
        self.counted: Callable[[str, int], None] = lambda topic, count: None
        self._calls: dict[PartitionName, Call] = {}

    def send(self) -> None:
        """What is planned now goes out."""
        plans = self._fetcher.plans(self._link.now())
        for plan in plans:
            request = plan.request(self._read, self._hashes)
            call = self._link.call(request, seconds=plan.wait_ms / 1000 + FETCH_GRACE_SECONDS)
            self._calls[plan.name] = call
            call.when_done(partial(self._fetched, plan))
        if plans:
            self._flush()

    def take(self, held: Collection[PartitionName] = ()) -> Batch | None:
        """The next batch of what has arrived, without what the user's filter says no to; `held` ones are left out. What
        the filter raises is raised, behind what stands before it."""
        batch = self._fetcher.take(held)
        if batch is None or self._where is None:
            return batch
        batch, again = filtered(batch, self._where)
        if again is not None:
            self._fetcher.seek(batch.name, again)
        return batch

    def void(self, name: PartitionName) -> None:
        """What is under way for the partition is not wanted any more; the broker is told, so that it need not wait."""
        call = self._calls.pop(name, None)
        if call is not None and not call.done:
            self._link.abandon(call)
            if call.sent and self._link.state == "ready":
                self._link.call(Cancel(call.correlation))

    def clear(self) -> None:
        """Nothing is under way any more: the end, or a forked child."""
        self._calls.clear()

    def _fetched(self, plan: FetchPlan, call: Call) -> None:
        if self._calls.get(plan.name) is call:
            del self._calls[plan.name]
        try:
            self._answered(plan, call)
        except BaseException:  # Ctrl-C in the thread that leads: it is asked for once more
            self._fetcher.failed(plan, Abandoned(), self._link.now())
            raise
        finally:
            self._arrived()

    def _answered(self, plan: FetchPlan, call: Call) -> None:
        if call.error is not None:
            self._fetcher.failed(plan, call.error, self._link.now())
        else:
            reply = call.reply
            self.counted(plan.name.topic, reply.partitions)
            body = bytes(call.reply_body)
            self._fetcher.arrived(
                plan, Chunk(body, reply.start, reply.skip_to, reply.next, reply.epoch, plan.filtered)
            )


# A user's filter over a batch: what it says yes to is kept; where it fails, what stands before that comes first.


def filtered(batch: Batch, where: Callable[[ReceivedMessage[Any]], object]) -> tuple[Batch, Place | None]:
    """`batch` without what `where` says no to. Where it raises, the part before that message, and the place at which to
    read on, so that it is asked again; for the first message that is raised here."""
    kept: list[ReceivedMessage[Any]] = []
    for number, message in enumerate(batch.messages):
        try:
            wanted = where(message)
            if wanted is not True and wanted is not False:
                _refuse_awaitable(wanted)
            if wanted:
                kept.append(message)
        except Exception:
            if not number:
                raise
            place = Place(message.offset, message.ordinal, message.origin.epoch)
            return Batch(batch.name, kept, place), place
    return batch._replace(messages=kept), None


def _refuse_awaitable(wanted: object) -> None:
    """It would be a yes to every message. Raises BadRequest."""
    if isinstance(wanted, Awaitable):
        if isinstance(wanted, Coroutine):
            wanted.close()  # else Python warns of it, somewhere else
        raise BadRequest(f"where= said neither yes nor no, but gave a {type(wanted).__name__} to be awaited.")
