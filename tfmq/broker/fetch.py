"""Fetch requests. A reply is sent immediately, or the request is parked (gets no reply) until there are records.

A reader gets whole blocks up to the durable offset, or up to the end of the log if it also requested records that are
not durable yet. If the request names tags, blocks without a matching record are left out, and the reply has the offset
after these blocks, at which the reader continues.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from struct import Struct
from struct import error as StructError
from typing import Any, Final

from journal.crc32 import crc32
from journal.errors import BelowStart, BeyondEnd, TooLarge
from journal.histogram import TimeHistogram
from journal.log.log import Upto
from journal.record.batch import Chunk
from journal.record.block_trailer import BLOCK_SPAN_MAX, TRAILER_SIZE, decode_trailer
from journal.record.format import FLAG_TAG_SHIFT, FLAG_TRAILER, HEADER_SIZE, BadRecord
from tfmq.broker import reply
from tfmq.broker.admission import BoundedExecutor
from tfmq.broker.partition import TOPIC_DELETED, Partition
from tfmq.broker.readable import ReadablePartition, ReadableTopics
from tfmq.broker.reply import Reply, Session
from tfmq.broker.runtime import Runtime
from tfmq.broker.timers import Timer
from tfmq.broker.topics import Topic
from tfmq.errors import Abandoned, BadRequest, Busy, OffsetOutOfRange, UnknownTopic
from tfmq.limits import FETCH_BYTES_FIRST
from tfmq.protocol.commands import EPOCH_UNKNOWN, READ_WRITTEN, Fetch

logger = logging.getLogger("tfmq.broker")

BEHIND = "This server has messages up to offset {end}, and may be behind: ask again for {offset}, or ask the primary."
TOO_MANY_FETCHES = "Too many fetches wait already. Close idle consumers, or raise limits.{limit} on the server."

FILTER_BYTES_INLINE: Final = 64 << 10
"""Larger reads are filtered by tag in a worker: filtering 8 MiB of small records takes a tenth of a second."""

LARGE_BLOCK_BYTES: Final = 256 << 10
"""A larger block, if it is also larger than all that its client has received, is read in its turn (`_read_large`)."""
LARGE_BLOCKS_SHARE: Final = 0.05
"""Reading such blocks takes at most this share of the time, counted from LARGE_BLOCKS_CREDIT_SECONDS ago: after a while
without such reads, some slices of them follow each other without a pause."""
LARGE_BLOCKS_CREDIT_SECONDS: Final = 2.0
LARGE_BLOCKS_PAUSE_SECONDS: Final = 1.0
"""Maximum pause after a slice, however long the disk took to read it."""

FilteredRead = tuple[Chunk, list[memoryview] | None]
"""(result of the read, those of its blocks that match the tags of the fetch, or None if the fetch has no tags)."""


@dataclass(slots=True, eq=False)
class FetchInProgress:
    """One FETCH in progress.

    The next read starts at `offset`, which advances past blocks that the tag filter left out. At `deadline` (monotonic
    seconds) a parked fetch gets an empty reply; 0.0: the fetch is never parked. `started_at`: when the request was
    received (monotonic seconds). `timer`, for the deadline, is set while the fetch is parked. `block_bytes`: a larger
    block, if it is also larger than `max_bytes`, must wait for its turn.
    """

    partition: ReadablePartition
    reply: Reply
    session: Session
    offset: int
    epoch: int | None
    max_bytes: int
    block_bytes: int
    upto: Upto
    tags: frozenset[int] | None
    deadline: float
    started_at: float
    timer: Timer | None = None
    reading: bool = False
    replied: bool = False

    def readable_end(self) -> int:
        """Return the end of the log if the request reads also records that are not durable, else the durable offset."""
        log = self.partition.log
        return log.end_offset if self.upto == "written" else log.forced_offset


class FetchHandler:
    """The commands FETCH and CANCEL (for fetches), and the parked fetches by session and correlation number."""

    def __init__(self, runtime: Runtime, topics: ReadableTopics, read_executor: BoundedExecutor) -> None:
        self._limits, self._timers = runtime.limits, runtime.timers
        self._monotonic, self._pause = runtime.clock.monotonic, runtime.pause
        self._topics, self._read_executor = topics, read_executor
        self._runtime = runtime
        self._short = 0
        """Number of fetches that failed because the broker had no memory for the read."""
        self._large: deque[FetchInProgress] = deque()
        """Fetches that wait for a large block (`_read_large`)."""
        self._is_reading_large = False
        """Whether a large block is being read."""
        self._large_until = 0.0
        """Account of the time of these reads, as a monotonic time: a slice that took t seconds adds t /
        LARGE_BLOCKS_SHARE. Used by the worker that reads a large block."""
        self._closes = 0
        """Number of calls of `close`."""
        self._sessions: dict[Session, dict[int, FetchInProgress]] = {}
        self.parked_count = 0
        self.times = TimeHistogram()
        """Times from the request to its positive reply, of fetches that were not parked."""

    def fetch(self, request: Fetch, reply: Reply, session: Session) -> None:
        """Reply to a fetch or park it. Raises UnknownTopic, UnknownPartition, StorageStopped."""
        partition = self._topics.partition(request.topic, request.incarnation, request.partition)
        wait_ms = min(request.wait_ms, self._limits["fetch_wait_ms"])
        now = self._timers.now()
        poll = FetchInProgress(
            partition,
            reply,
            session,
            request.offset,
            None if request.epoch == EPOCH_UNKNOWN else request.epoch,
            # A client that is new, or reads nothing, gets little: the reply is read, and kept until it is sent.
            min(request.max_bytes, self._limits["fetch_bytes"], max(FETCH_BYTES_FIRST, session.sent_bytes)),
            max(LARGE_BLOCK_BYTES, session.sent_bytes),
            "written" if request.read == READ_WRITTEN else "forced",
            None if request.tags is None else frozenset(request.tags),
            now + wait_ms / 1000 if wait_ms else 0.0,
            now,
        )
        self._try_read(poll)

    def cancel(self, session: Session, correlation: int) -> bool:
        """Send an empty reply to the parked fetch with this correlation. Return whether there was one."""
        poll = self._sessions.get(session, {}).get(correlation)
        if poll is None:
            return False
        self._reply_empty(poll)
        return True

    def end_parked(self, user: str) -> None:
        """Send an empty reply to each parked fetch of the user."""
        for session, waiting in list(self._sessions.items()):
            if session.user == user:
                for poll in list(waiting.values()):
                    self._reply_empty(poll)

    def topic_changed(self, topic: Topic) -> None:
        """Reply to one parked fetch of the topic in each session, to report the new number of partitions."""
        notified: set[Session] = set()
        for partition in topic.partitions:
            for poll in list(partition.parked) if isinstance(partition, Partition) else ():
                if poll.session not in notified:
                    notified.add(poll.session)
                    self._reply_empty(poll)

    def close(self) -> None:
        """Reply to all parked fetches with an error, because the broker is stopping."""
        self._closes += 1
        for waiting in list(self._sessions.values()):
            for poll in list(waiting.values()):
                self._reply_error(poll, Busy(reply.STOPPING))
        while self._large:
            self._reply_error(self._large.popleft(), Busy(reply.STOPPING))

    # Reading the log

    def _try_read(self, poll: FetchInProgress) -> None:
        if poll.reading:
            return
        log = poll.partition.log
        try:
            if poll.partition.deleted:
                raise UnknownTopic(TOPIC_DELETED.format(name=poll.partition.name))
            chunk = None
            if poll.tags is None or min(poll.readable_end() - poll.offset, poll.max_bytes) <= FILTER_BYTES_INLINE:
                chunk = log.read_cached(
                    poll.offset, poll.max_bytes, upto=poll.upto, epoch=poll.epoch, block_bytes=poll.block_bytes
                )
        except TooLarge:
            self._wait_for_large(poll)
            return
        except Exception as error:
            self._read_failed(poll, error)
            return
        if chunk is None:
            poll.reading = True
            self._read_executor.run(partial(self._read_and_filter, poll), partial(self._read_done, poll), poll.session)
        else:
            self._reply_or_park(poll, chunk, None)

    @staticmethod
    def _read_and_filter(poll: FetchInProgress, pause: Callable[[], None] | None = None) -> FilteredRead:
        """Read the log, and filter the blocks if the fetch names tags. Runs in a worker."""
        chunk = poll.partition.log.read(
            poll.offset, poll.max_bytes, upto=poll.upto, epoch=poll.epoch, block_bytes=poll.block_bytes, pause=pause
        )
        return chunk, None if poll.tags is None else _matching_blocks(poll, chunk)

    def _read_done(self, poll: FetchInProgress, found: FilteredRead | None, error: BaseException | None) -> None:
        poll.reading = False
        if poll.replied:
            return
        if isinstance(error, TooLarge):
            self._wait_for_large(poll)
        elif error is not None or found is None:
            self._read_failed(poll, error or RuntimeError("a read ended without a result"))
        else:
            self._reply_or_park(poll, *found)

    def _wait_for_large(self, poll: FetchInProgress) -> None:
        if len(self._large) >= self._limits["parked_fetches"]:
            self._reply_error(poll, Busy(TOO_MANY_FETCHES.format(limit="parked_fetches")))
            return
        if poll.timer is not None:
            self._remove_parked(poll)  # there are records, so the end of its waiting time would only send it back
            poll.replied, poll.started_at = False, self._timers.now()
        poll.reading, poll.block_bytes = True, BLOCK_SPAN_MAX
        self._large.append(poll)
        if not self._is_reading_large:
            self._read_large()

    def _read_large(self) -> None:
        """Read the block of the first fetch that waits for a large one, in a worker; after that those of the others.

        Otherwise each of many new connections could make the broker read the largest block at once, for a client that
        may not take it. So there is one such read at a time, in slices, with pauses: in the milliseconds that a whole
        block takes, others would be delayed.
        """
        while self._large and self._large[0].session.is_closed:
            self._reply_error(self._large.popleft(), Abandoned())
        self._is_reading_large = bool(self._large)
        if not self._large:
            return
        poll = self._large.popleft()

        def work() -> FilteredRead:
            pause = self._pauses_of(poll.session)
            found = self._read_and_filter(poll, pause)
            pause()  # for the rest of the work; for all of it if the log reads at once
            return found

        def done(found: FilteredRead | None, error: BaseException | None) -> None:
            self._timers.after(0.0, self._read_large)  # not here, where each of many could fail inside the other
            self._read_done(poll, found, error)

        self._read_executor.run(work, done, poll.session)

    def _pauses_of(self, session: Session) -> Callable[[], None]:
        """Return the function that a worker calls after each slice of a large block that it reads for the session.

        It raises Busy if the broker is stopping, and Abandoned if the session has closed.
        """
        began, closes = self._monotonic(), self._closes

        def pause() -> None:
            nonlocal began
            if self._closes != closes:
                raise Busy(reply.STOPPING)
            if session.is_closed:
                raise Abandoned()
            now = self._monotonic()
            until = max(self._large_until, began - LARGE_BLOCKS_CREDIT_SECONDS) + (now - began) / LARGE_BLOCKS_SHARE
            self._large_until = min(until, now + LARGE_BLOCKS_PAUSE_SECONDS)
            if self._large_until > now:
                self._pause(self._large_until - now)
            began = self._monotonic()

        return pause

    def _reply_or_park(self, poll: FetchInProgress, chunk: Chunk, blocks: list[memoryview] | None) -> None:
        """Reply with the blocks that were read and match the tags. If no block matches, reply without blocks or park.

        `blocks`: the matching blocks of `chunk`; None if they are not known yet. A reply without blocks advances the
        reader past the blocks that do not match. Such a reply is sent in two cases: if there is more to read, so that
        the work for one request is bounded; and if the fetch was not parked before, so that the reader gets to know
        that it has reached the end.
        """
        if not chunk.data:
            self._park(poll)
            return
        if poll.tags is None:
            self._reply_ok(poll, chunk, memoryview(chunk.data))
            return
        if blocks is None:
            blocks = _matching_blocks(poll, chunk)
        if blocks or chunk.next < poll.readable_end() or poll.timer is None:
            self._reply_ok(poll, chunk, blocks)
        else:
            poll.offset = chunk.next
            self._park(poll)

    def _read_failed(self, poll: FetchInProgress, error: BaseException) -> None:
        """If the offset was beyond the end of the log, but is not any more, park the fetch. Else send the error."""
        if isinstance(error, BeyondEnd):
            if poll.offset <= poll.partition.log.end_offset:
                self._park(poll)
                return
            if self._runtime.may_be_behind() and not poll.partition.deleted:
                # The reader may have got there at another server: it must not go on elsewhere for that.
                self._reply_error(poll, Busy(BEHIND.format(end=poll.partition.log.end_offset, offset=poll.offset)))
                return
        if isinstance(error, MemoryError):
            self._short += 1
            if self._short & (self._short - 1) == 0:
                name = f"{poll.partition.name}-{poll.partition.number}"
                logger.error("out of memory, a fetch of %s was refused; %d so far", name, self._short)
        self._reply_error(poll, read_error(error, poll.partition))

    # Parking fetches that wait for records

    def _park(self, poll: FetchInProgress) -> None:
        if not poll.deadline or self._timers.now() >= poll.deadline:
            self._reply_empty(poll)
            return
        if poll.timer is None:
            self._add_parked(poll)
            if poll.replied:
                return
        partition = poll.partition
        partition.parked[poll] = partial(self._retry_parked, poll)
        if poll.upto == "forced":
            partition.request_fsync()

    def _retry_parked(self, poll: FetchInProgress) -> None:
        if poll.partition.deleted or poll.readable_end() > poll.offset:
            self._try_read(poll)

    def _add_parked(self, poll: FetchInProgress) -> None:
        mine = self._sessions.get(poll.session)
        for limit, count in (("parked_fetches", self.parked_count), ("parked_fetches_per_session", len(mine or ()))):
            if count >= self._limits[limit]:
                self._reply_error(poll, Busy(TOO_MANY_FETCHES.format(limit=limit)))
                return
        if mine is not None and poll.reply.correlation in mine:
            self._reply_error(poll, BadRequest("A fetch of this correlation number waits already: take another one."))
            return
        self.parked_count += 1
        poll.timer = self._timers.after_rounded(poll.deadline - self._timers.now(), partial(self._reply_empty, poll))
        if mine is not None:
            mine[poll.reply.correlation] = poll
        else:
            self._sessions[poll.session] = {poll.reply.correlation: poll}
            poll.session.on_close(partial(self._session_closed, poll.session))

    def _remove_parked(self, poll: FetchInProgress) -> None:
        poll.replied = True
        poll.partition.parked.pop(poll, None)
        if poll.timer is not None:
            self._timers.cancel(poll.timer)
            poll.timer = None
            self.parked_count -= 1
            self._sessions.get(poll.session, {}).pop(poll.reply.correlation, None)

    def _session_closed(self, session: Session) -> None:
        for poll in list(self._sessions.pop(session, {}).values()):
            self._reply_error(poll, Abandoned())

    # Replies to fetches

    def _reply_empty(self, poll: FetchInProgress) -> None:
        self._reply_ok(poll, Chunk(poll.offset, poll.offset, poll.offset, b""), b"")

    def _reply_error(self, poll: FetchInProgress, error: BaseException) -> None:
        self._remove_parked(poll)
        poll.reply.error(error)

    def _reply_ok(self, poll: FetchInProgress, chunk: Chunk, body: Any) -> None:
        if poll.timer is None:
            self.times.record(self._timers.now() - poll.started_at)
        self._remove_parked(poll)
        log = poll.partition.log
        poll.reply.ok(
            chunk.start,
            chunk.skip_to,
            chunk.next,
            log.epoch,
            log.forced_offset,
            log.end_offset,
            log.first_offset,
            log.log_id,
            self._topics.count(poll.partition.name),
            body=body,
        )


def _matching_blocks(poll: FetchInProgress, chunk: Chunk) -> list[memoryview]:
    return blocks_with(chunk.data, poll.tags or (), chunk.start, poll.partition.log.log_id)


def read_error(error: BaseException, partition: ReadablePartition) -> BaseException:
    """Return the client's error for a failed read. For an offset outside of the log, the error has the log's range."""
    log = partition.log
    if partition.deleted:
        return UnknownTopic(TOPIC_DELETED.format(name=partition.name))
    if isinstance(error, BelowStart | BeyondEnd):
        return OffsetOutOfRange(first=log.first_offset, end=log.end_offset, offset=error.offset)
    return reply.of_read(error)


# Filtering by tag: the broker compares hashes of tags, which are in the records' flags; the client compares the tags.

LENGTH_FLAG: Final = Struct(">I12xI")


def blocks_with(
    data: bytes | bytearray | memoryview, wanted: Collection[int], offset: int, log_id: int
) -> list[memoryview]:
    """Return the blocks in `data` that have a record with one of the tag hashes `wanted`; [] if there is none.

    `data` has whole blocks, the first at `offset` of the log. Adjacent blocks are returned as one memoryview.

    A block without a matching record is left out only if its trailer, position and checksum are valid. Otherwise that
    block and all later ones are returned, because a damaged tag or length may have hidden a match. The client verifies
    every block and reports the damage.
    """
    view, found = memoryview(data), list[tuple[int, int]]()
    unpack, size = LENGTH_FLAG.unpack_from, len(data)
    position = start = 0
    matches = False
    try:
        while position < size:
            length, flag = unpack(data, position)
            position += HEADER_SIZE + length
            if flag & FLAG_TRAILER:
                if matches:
                    _add_range(found, start, position)
                elif not _is_valid_block(view, start, position, offset, log_id):
                    break
                start, matches = position, False
            elif flag >> FLAG_TAG_SHIFT in wanted:
                matches = True
    except StructError:
        pass
    if start < size:
        _add_range(found, start, size)
    return [view[first:end] for first, end in found]


def _is_valid_block(data: memoryview, start: int, end: int, offset: int, log_id: int) -> bool:
    at = end - TRAILER_SIZE
    try:
        control = decode_trailer(data, at, log_id)
    except BadRecord:
        return False
    whole = control.size == at - start and control.offset == offset + start
    return whole and crc32(data[start:at]) == control.crc


def _add_range(found: list[tuple[int, int]], start: int, end: int) -> None:
    """Append the range [start, end) to `found`, or extend the last range if that ends at `start`."""
    if found and found[-1][1] == start:
        start = found.pop()[0]
    found.append((start, end))
