"""Fetching of a consumer: fetch planning, buffered fetch responses, skipped ranges.

`Fetcher` decides what to fetch, without I/O; `FetchSession` sends the requests and processes the responses. At most one
fetch per partition is in flight. If there is no data, the broker delays its response (long poll), so that an idle
partition costs nothing and a new message is returned at once. All buffered responses together take at most
`prefetch_bytes`, shared equally by the partitions, and are delivered round-robin. A failure stops only its partition,
after all messages that were fetched before the failure are delivered.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Coroutine
from functools import partial
from typing import Any, Final, NamedTuple

from journal.record.format import tag_hash
from tfmq.backoff import backoff_seconds, pause_seconds
from tfmq.client.connection.connection import READY, ClientConnection, PendingRequest
from tfmq.client.consumer.decoder import BlockDecoder, Decoder
from tfmq.client.consumer.message import UNKNOWN, Batch, ReadPosition, ReceivedMessage
from tfmq.client.consumer.options import FETCH_BYTES, ConsumerOptions
from tfmq.client.consumer.positions import reset_offset
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
"""Fetch size of a partition if the messages of its last response had more than LARGE_MESSAGE_BYTES on average; a size
that the user has chosen is kept. With the default size, too few of such messages would share the cost of a fetch."""
FETCH_BYTES_MIN: Final = 16 * KIB
"""A fetch size is reduced to half of a partition's share of `prefetch_bytes`, but not below this size. So if a share is
smaller than this, the buffered responses together may exceed `prefetch_bytes`."""
WAIT_MS: Final = 50_000
"""How long the broker waits for data before it replies to a fetch: long, so that idle consumers are cheap."""
FETCHES_MAX: Final = 1024
"""Maximum of fetches in flight, below the broker's limit per connection. If more partitions exist, they take turns."""
TURN_WAIT_MS: Final = 250
"""How long the broker waits for data before it replies to a fetch, if more than FETCHES_MAX partitions take turns."""
RETRY_SECONDS: Final = 0.01
RETRY_SECONDS_MAX: Final = 2.0
"""Maximum delay before a failed fetch is repeated. The delay begins at RETRY_SECONDS and doubles with each error."""
SKIPPED_MAX: Final = 100
"""How many of the latest skipped ranges are kept for the user; older ranges are only counted."""


class FetchPlan(NamedTuple):
    """A FETCH request to send. `filtered`: whether the broker selects messages by the consumer's tags. If the partition
    has another `fetch_version` when the response arrives, for example after a seek, the response is ignored."""

    name: PartitionName
    incarnation: int
    offset: int
    epoch: int
    max_bytes: int
    wait_ms: int
    filtered: bool
    fetch_version: int


class FetchResponse(NamedTuple):
    """An undecoded fetch response. `body` has all blocks from offset `start` to `next_offset`, or if `filtered`, only
    those that may have a requested tag. Messages before `skip_to` were not requested and are not delivered.
    """

    body: bytes
    start: int
    skip_to: int
    next_offset: int
    epoch: int
    filtered: bool


class PartitionFetchState:
    """Fetch state of one partition: next offset to fetch, buffered responses, pause and failure."""

    def __init__(self, name: PartitionName, incarnation: int, position: ReadPosition, decoder: Decoder) -> None:
        self.name = name
        self.incarnation = incarnation
        self.message_decoder = decoder
        self.decoder: BlockDecoder = decoder
        self.fetch_version = 0
        self.paused = False
        self.in_ready_queue = False
        self.unfiltered_until = UNKNOWN
        self.large_messages = False
        self.restart_at(position)

    def restart_at(self, position: ReadPosition) -> None:
        """Restart at `position`: discard buffered responses and the failure, and ignore a fetch in flight."""
        self.fetch_version += 1
        self.position = position
        self.fetch_offset = position.offset
        self.fetch_epoch = position.epoch
        self.responses: deque[FetchResponse] = deque()
        self.buffered_bytes = 0
        self.fetching = False
        self.failure: TfmqError | None = None
        self.failure_raised = False
        self.retry_at = 0.0
        self.retries = 0

    def stop(self, failure: TfmqError) -> None:
        """Stop reading after the last decoded message, because of `failure`. A later `restart_at` ends the stop."""
        self.restart_at(self.position)
        self.failure = failure


class SkippedRange(NamedTuple):
    name: PartitionName
    first: int
    next_offset: int
    sentence: str


class Fetcher:
    """Decides what to fetch for the partitions of one consumer, and buffers the responses. No I/O."""

    def __init__(self, options: ConsumerOptions) -> None:
        self.partitions: dict[PartitionName, PartitionFetchState] = {}
        self.skipped: list[SkippedRange] = []
        self.skipped_count = 0
        self.failure_handler: Any = None
        self._create_column_decoder: Callable[[PartitionName, int], BlockDecoder] | None = None
        self.fetch_count = 0
        self.bytes_read = 0
        self._ready: deque[PartitionFetchState] = deque()
        self.fetchable: dict[PartitionFetchState, None] = {}
        size = options.fetch_bytes
        self._fetch_sizes = (size, FETCH_BYTES_LARGE if size == FETCH_BYTES else size)
        self._prefetch_bytes = options.prefetch_bytes
        self._tags = options.tags
        self._skip_damage = options.skip_damage
        self._reset = options.reset
        self._in_flight = 0

    # Partitions

    def add(self, feed: PartitionFetchState) -> None:
        feed.message_decoder.failure_handler = self.failure_handler
        self._set_decoder(feed)
        self.partitions[feed.name] = feed
        self.fetchable[feed] = None

    def remove(self, name: PartitionName) -> None:
        """Stop reading a partition. The response to a fetch in flight will be ignored."""
        feed = self.partitions.pop(name)
        feed.restart_at(feed.position)
        self.fetchable.pop(feed, None)

    def seek(self, name: PartitionName, position: ReadPosition) -> None:
        """Continue at `position`; also restarts a stopped partition."""
        feed = self.partitions[name]
        feed.restart_at(position)
        self.fetchable[feed] = None

    def pause(self, name: PartitionName) -> None:
        """Deliver nothing of the partition until `resume`; buffered responses are kept."""
        self.partitions[name].paused = True

    def resume(self, name: PartitionName) -> None:
        feed = self.partitions[name]
        if feed.paused:
            feed.paused = False
            self._enqueue_ready(feed)
            self.fetchable[feed] = None

    def set_column_decoders(self, create: Callable[[PartitionName, int], BlockDecoder] | None) -> None:
        """From now on decode responses to record batches with decoders from `create`, or if it is None, to messages."""
        self._create_column_decoder = create
        for feed in self.partitions.values():
            self._set_decoder(feed)

    def _set_decoder(self, feed: PartitionFetchState) -> None:
        create = self._create_column_decoder
        feed.decoder = feed.message_decoder if create is None else create(feed.name, feed.incarnation)

    def reset_after_fork(self) -> None:
        self._in_flight = 0

    # Requests

    def plan_fetches(self, now: float) -> list[FetchPlan]:
        """Return the fetches to send now. The caller must call `add_response` or `fetch_failed` once for each fetch."""
        share = self._prefetch_bytes // max(1, len(self.partitions))
        sizes = [min(size, max(FETCH_BYTES_MIN, share // 2)) for size in self._fetch_sizes]
        wait_ms = WAIT_MS if len(self.partitions) <= FETCHES_MAX else TURN_WAIT_MS
        found = []
        for feed in list(self.fetchable):
            if self._in_flight >= FETCHES_MAX:
                break
            if feed.fetching or feed.paused or feed.failure is not None:
                del self.fetchable[feed]
                continue
            max_bytes = sizes[feed.large_messages]
            if now >= feed.retry_at and (not feed.buffered_bytes or feed.buffered_bytes + max_bytes <= share):
                del self.fetchable[feed]
                feed.fetching = True
                self._in_flight += 1
                self.fetch_count += 1
                filtered = self._tags is not None and feed.fetch_offset >= feed.unfiltered_until
                fields = (feed.fetch_offset, feed.fetch_epoch, max_bytes, wait_ms)
                found.append(FetchPlan(feed.name, feed.incarnation, *fields, filtered, feed.fetch_version))
        return found

    def next_retry(self) -> float | None:
        """Return the earliest time at which a failed fetch may be repeated; None if no failed fetch is waiting."""
        if not self.fetchable:
            return None
        return min([feed.retry_at for feed in self.fetchable if feed.retry_at], default=None)

    # Responses

    def add_response(self, plan: FetchPlan, response: FetchResponse) -> None:
        feed = self._finish_fetch(plan)
        if feed is None:
            return
        feed.retry_at, feed.retries = 0.0, 0
        if response.next_offset < plan.offset or (response.body and response.next_offset == plan.offset):
            feed.failure = ServerError(
                f"The broker answered a fetch of {plan.name} at offset {plan.offset} with an offset before it,"
                f" {response.next_offset}."
            )
            return
        feed.fetch_epoch = response.epoch
        if response.next_offset > plan.offset:
            feed.fetch_offset = response.next_offset
            feed.responses.append(response)
            feed.buffered_bytes += len(response.body)
            self.bytes_read += len(response.body)
            self._enqueue_ready(feed)

    def fetch_failed(self, plan: FetchPlan, error: TfmqError, now: float) -> None:
        feed = self._finish_fetch(plan)
        if feed is None:
            return
        if error.retriable or isinstance(error, Abandoned):
            feed.retries += 1
            pause = backoff_seconds(feed.retries + 1, RETRY_SECONDS, RETRY_SECONDS_MAX)
            feed.retry_at = now + pause_seconds(error, pause)
            return
        if isinstance(error, Damaged) and self._skip_damage and error.next > plan.offset:
            self._record_skipped(feed, max(error.first, plan.offset), error.next, str(error))
            self._continue_at(feed, error.next, feed.fetch_epoch)
            return
        offset = reset_offset(error, self._reset)
        if offset is None or offset < 0:
            feed.failure = add_partition_to_error(error, plan.name, plan.offset)
            return
        first, following = min(plan.offset, offset), max(plan.offset, offset)
        self._record_skipped(feed, first, following, str(add_partition_to_error(error, plan.name, plan.offset)))
        self._continue_at(feed, offset, UNKNOWN)

    def _continue_at(self, feed: PartitionFetchState, offset: int, epoch: int) -> None:
        # The empty response moves the read position to `offset` after all earlier responses are delivered. Otherwise a
        # reader that waits until its position is the current end would wait forever if no message followed.
        feed.fetch_offset, feed.fetch_epoch = offset, epoch
        feed.responses.append(FetchResponse(b"", offset, offset, offset, epoch, filtered=False))
        self._enqueue_ready(feed)

    def _finish_fetch(self, plan: FetchPlan) -> PartitionFetchState | None:
        """Count the fetch as complete. Return its partition; None if a seek or removal made the response obsolete."""
        self._in_flight -= 1
        feed = self.partitions.get(plan.name)
        if feed is None or feed.fetch_version != plan.fetch_version:
            return None
        feed.fetching = False
        self.fetchable[feed] = None
        return feed

    # Delivery

    def next_batch(self, skipped: Collection[PartitionName] = ()) -> Batch | None:
        """Decode buffered responses until one yields a batch, and return the batch; None if no response is left. The
        partitions take turns. The partitions in `skipped` are left out."""
        passed = 0
        while passed < len(self._ready):
            feed = self._ready.popleft()
            if feed.name in skipped:
                passed += 1
                self._ready.append(feed)
                continue
            feed.in_ready_queue = False
            if feed.paused or not feed.responses or self.partitions.get(feed.name) is not feed:
                continue
            batch = self._decode_first_response(feed)
            self._enqueue_ready(feed)
            self.fetchable[feed] = None
            if batch is not None:
                feed.position = batch.end_position
                return batch
        return None

    def next_failure(self) -> TfmqError | None:
        """Return the failure of a stopped partition once, after the messages fetched before the failure are delivered.
        If all partitions are stopped, return a failure at every call instead, because waiting would be in vain."""
        failure = None
        all_stopped = True
        for feed in self.partitions.values():
            if feed.failure is None:
                all_stopped = False
            elif not (feed.failure_raised or feed.responses or feed.paused):
                feed.failure_raised = True
                return feed.failure
            failure = failure or feed.failure
        return failure if all_stopped else None

    def _decode_first_response(self, feed: PartitionFetchState) -> Batch | None:
        """Decode the first buffered response, up to the first damage or undecodable record. An undecodable record stops
        the partition. Damage stops it too, unless the option `skip_damage` skips the bad range."""
        response = feed.responses.popleft()
        feed.buffered_bytes -= len(response.body)
        messages: list[ReceivedMessage] = []
        following = feed.position
        try:
            for decoded in feed.decoder.decode(
                response.body, response.start, response.skip_to, response.next_offset, gaps=response.filtered
            ):
                messages += decoded.messages
                following = ReadPosition(decoded.next_offset, decoded.next_ordinal, decoded.epoch)
        except Damaged as damaged:
            self._handle_damage(feed, response, damaged)
        except DecodeFailed as failed:
            feed.stop(failed)
        else:
            if following.offset != response.next_offset:
                following = ReadPosition(response.next_offset, UNKNOWN, response.epoch)
        feed.large_messages = len(response.body) > LARGE_MESSAGE_BYTES * len(messages)
        if self._tags is not None:
            messages = [message for message in messages if message.tag in self._tags]
        if not messages and following.offset <= feed.position.offset:
            return None
        return Batch(feed.name, messages, following)

    def _handle_damage(self, feed: PartitionFetchState, response: FetchResponse, damaged: Damaged) -> None:
        """If the response is filtered, fetch the damaged range again without a filter. Otherwise skip the range if the
        option `skip_damage` is set, or stop the partition."""
        # In a filtered response the end of the damage is unknown: the broker may have left out the blocks that follow.
        if response.filtered:
            feed.restart_at(ReadPosition(damaged.first, UNKNOWN, response.epoch))
            feed.unfiltered_until = response.next_offset
        elif not self._skip_damage:
            feed.stop(damaged)
        else:
            self._record_skipped(feed, damaged.first, damaged.next, str(damaged))
            # The rest of the response is queued even if it is empty, because it also moves the read position past the
            # damage.
            rest = response.body[damaged.next - response.start :]
            feed.responses.appendleft(response._replace(body=rest, start=damaged.next, skip_to=damaged.next))
            feed.buffered_bytes += len(rest)

    def _record_skipped(self, feed: PartitionFetchState, first: int, next_offset: int, sentence: str) -> None:
        log.warning("Skipped offsets %d to %d. %s", first, next_offset, sentence)
        self.skipped_count += 1
        self.skipped.append(SkippedRange(feed.name, first, next_offset, sentence))
        del self.skipped[:-SKIPPED_MAX]

    def _enqueue_ready(self, feed: PartitionFetchState) -> None:
        if feed.responses and not feed.paused and not feed.in_ready_queue:
            feed.in_ready_queue = True
            self._ready.append(feed)


def add_partition_to_error(error: TfmqError, name: PartitionName, offset: int) -> TfmqError:
    """Add the partition to the text of `error`, and if offsets are lost, their range. Return `error`."""
    if isinstance(error, OffsetOutOfRange):
        if offset < error.first:
            lost = f"offsets {offset} to {error.first} were removed and are lost to this reader"
        else:
            lost = f"offset {offset} is after the end, {error.end}"
        error.sentence = f"{name}: {lost}; the log has {error.first} to {error.end}. Seek, or set on_out_of_range."
    elif isinstance(error, LogTruncated):
        error.sentence = (
            f"{name}: what this reader had read from offset {error.cut} up to {offset} was cut off after a crash."
            f" Seek to {error.cut} to go on, or set on_out_of_range."
        )
    elif str(name) not in error.sentence:
        error.sentence = f"{name} at offset {offset}: {error.sentence}"
    error.args = (error.sentence,)
    return error


FETCH_GRACE_SECONDS: Final = 30.0
"""How much longer the client waits for a response than the broker may wait for data."""


class FetchSession:
    """Sends planned fetches. `arrived` is called after each response; `flush` makes the driver send requests now."""

    def __init__(
        self,
        options: ConsumerOptions,
        link: ClientConnection,
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
        self._on_response = arrived
        self._flush = flush
        self.on_partition_count: Callable[[str, int], None] = lambda topic, count: None
        self._requests: dict[PartitionName, PendingRequest] = {}

    def send_fetches(self) -> None:
        plans = self._fetcher.plan_fetches(self._link.now())
        for plan in plans:
            name, hashes = plan.name, self._hashes if plan.filtered else None
            fields = (plan.offset, plan.epoch, plan.max_bytes, plan.wait_ms)
            request = Fetch(name.topic, plan.incarnation, name.partition, *fields, self._read, hashes)
            pending = self._link.send_request(request, seconds=plan.wait_ms / 1000 + FETCH_GRACE_SECONDS)
            self._requests[plan.name] = pending
            pending.add_done_callback(partial(self._request_done, plan))
        if plans:
            self._flush()

    def next_batch(self, skipped: Collection[PartitionName] = ()) -> Batch | None:
        """Return the next batch without the messages that the user's filter rejects. Raises errors of the filter."""
        batch = self._fetcher.next_batch(skipped)
        if batch is None or self._where is None:
            return batch
        batch, again = filter_batch(batch, self._where)
        if again is not None:
            self._fetcher.seek(batch.name, again)
        return batch

    def cancel(self, name: PartitionName) -> None:
        """Cancel the fetch in flight for the partition, and send CANCEL, so that the broker stops waiting for data."""
        pending = self._requests.pop(name, None)
        if pending is not None and not pending.done:
            self._link.abandon(pending)
            if pending.sent and self._link.state == READY:
                self._link.send_request(Cancel(pending.correlation_id))

    def clear(self) -> None:
        self._requests.clear()

    def _request_done(self, plan: FetchPlan, pending: PendingRequest) -> None:
        if self._requests.get(plan.name) is pending:
            del self._requests[plan.name]
        try:
            if pending.error is not None:
                self._fetcher.fetch_failed(plan, pending.error, self._link.now())
            else:
                reply, body = pending.reply, bytes(pending.reply_body)
                self.on_partition_count(plan.name.topic, reply.partitions)
                fields = (reply.start, reply.skip_to, reply.next, reply.epoch, plan.filtered)
                self._fetcher.add_response(plan, FetchResponse(body, *fields))
        except BaseException:  # Ctrl-C raised in this thread, which does the network I/O: let the fetch be repeated.
            self._fetcher.fetch_failed(plan, Abandoned(), self._link.now())
            raise
        finally:
            self._on_response()


def filter_batch(batch: Batch, where: Callable[[ReceivedMessage[Any]], object]) -> tuple[Batch, ReadPosition | None]:
    """Return `batch` without the messages that `where` rejects, and None.

    If `where` raises an exception for a message, return the part of the batch before this message, and the message's
    position. Reading must continue there, so that `where` is called for the message again. If the message is the first
    of the batch, the exception is raised.
    """
    kept: list[ReceivedMessage[Any]] = []
    for number, message in enumerate(batch.messages):
        try:
            accepted = where(message)
            if accepted is not True and accepted is not False:
                _raise_if_awaitable(accepted)
            if accepted:
                kept.append(message)
        except Exception:
            if not number:
                raise
            position = ReadPosition(message.offset, message.ordinal, message.origin.epoch)
            return Batch(batch.name, kept, position), position
    return batch._replace(messages=kept), None


def _raise_if_awaitable(accepted: object) -> None:
    """Raise BadRequest if the user's filter has returned an awaitable, which would count as true for every message."""
    if isinstance(accepted, Awaitable):
        if isinstance(accepted, Coroutine):
            accepted.close()  # Otherwise Python logs a "never awaited" warning later.
        raise BadRequest(f"where= returned neither True nor False, but a {type(accepted).__name__} to be awaited.")
