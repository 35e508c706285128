"""Reader of partition logs over a broker connection.

Requests for many partitions are sent at once. While the caller processes the blocks of one fetch response, the next
fetch is already sent, so at most two responses are in memory. A lost connection is opened again, and its requests are
repeated. A request is also repeated after the reply Busy, which a broker sends when it shuts down.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from journal.record.format import make_log_id
from tfmq.backoff import Backoff, pause_seconds
from tfmq.client.connection.connection import READY, REQUEST_TIMEOUT_SECONDS, ClientConnection, PendingRequest
from tfmq.client.connection.factory import make_client_parts
from tfmq.client.connection.requests import request_with_retries
from tfmq.client.drivers.blocking import BlockingDriver
from tfmq.client.operation import Operation, Wait
from tfmq.errors import Busy, ConnectionFailed, Damaged, OffsetOutOfRange, TfmqError, TimedOut, UnknownTopic
from tfmq.protocol import commands as wire
from tfmq.spark import ranges
from tfmq.spark.errors import describe_read_error, out_of_range_error, unreachable_error
from tfmq.spark.ranges import BlockRun, Bounds, OffsetRange, PartitionLog

REQUESTS_MAX: Final = 1000
"""Maximum number of in-flight requests. The broker's limit for a connection is much higher."""
BUSY_SECONDS: Final = 0.05
BUSY_SECONDS_MAX: Final = 2.0
"""First and longest pause after the broker replied Busy; the pause is doubled each time."""
FSYNC_WAIT_MS: Final = 100
FSYNC_WAIT_SECONDS: Final = 1.0
"""How long a fetch of `_wait_for_fsync` waits in the broker; how long the client waits for the reply."""
ONE_BLOCK: Final = 1
"""Maximum bytes of a fetch of a single block. A fetch always returns the whole block that has the requested offset."""

PartitionRequest = tuple[PartitionLog, Any]


class BrokerLogReader:
    """`LogReader` of the broker at `servers`. `wait_for_broker`: let the first request wait up to `timeout` for it."""

    def __init__(
        self, servers: str | None = None, timeout: float = REQUEST_TIMEOUT_SECONDS, *, wait_for_broker: bool = False
    ) -> None:
        self._link, self._driver, _ = make_client_parts(servers, BlockingDriver)
        self._timeout = timeout
        if wait_for_broker:
            self._link.first_connect_timeout = max(self._link.first_connect_timeout, timeout)

    def broker_id(self) -> str:
        if self._link.hello is None:
            self._driver.run(request_with_retries(self._link, wire.Ping(), self._link.now() + self._timeout))
        assert self._link.hello is not None
        return self._link.hello.node

    def topics(self) -> list[str]:
        return sorted(row.name for row in self._topic_rows(None))

    def partitions(self, topic: str) -> list[PartitionLog]:
        rows = self._topic_rows([topic])
        if not rows:
            raise UnknownTopic(f"There is no topic {topic}: create it (tfmq topic create), or look at the list.")
        incarnation = rows[0].incarnation
        numbers = sorted(each.partition for each in rows[0].partitions)
        return [PartitionLog(topic, number, incarnation, make_log_id(incarnation, number)) for number in numbers]

    def bounds(self, log: PartitionLog) -> Bounds:
        return self.all_bounds([log])[0]

    def all_bounds(self, logs: Sequence[PartitionLog]) -> list[Bounds]:
        kinds = (wire.BY_EARLIEST, wire.BY_LATEST)
        found = self._send_all([(log, _locate_request(log, by)) for log in logs for by in kinds])
        not_durable = [n for n, last in enumerate(found[1::2]) if last.end_offset > last.forced_offset]
        if not_durable:
            offsets = [(logs[n], found[2 * n + 1].forced_offset) for n in not_durable]
            self._wait_for_fsync(offsets)
            again = self._send_all([(log, _locate_request(log, wire.BY_LATEST)) for log, _ in offsets])
            for n, last in zip(not_durable, again, strict=True):
                found[2 * n + 1] = last
        return [
            Bounds(first.offset, last.offset, first.ordinal, last.ordinal)
            for first, last in zip(found[::2], found[1::2], strict=True)
        ]

    def offset_at_time(self, log: PartitionLog, ms: int) -> int:
        return self._find_offset(log, wire.BY_TIME_MS, max(0, ms))

    def offset_of_ordinal(self, log: PartitionLog, ordinal: int) -> int:
        return self._find_offset(log, wire.BY_ORDINAL, max(0, ordinal))

    def next_message_offset(self, log: PartitionLog, offset: int) -> int:
        found = self._locate(log, wire.BY_OFFSET, max(0, offset))
        block_offset: int = found.offset
        while block_offset < found.forced_offset:
            fetch = _fetch_request(log, block_offset)
            (block,) = self._driver.run(send_requests(self._link, [(log, fetch)], self._timeout))
            following = ranges.next_message(BlockRun(block.reply.start, block.reply_body), max(offset, block_offset))
            if following is not None:
                return following
            block_offset = block.reply.next
        return found.forced_offset

    def ordinal_at_or_after(self, log: PartitionLog, offset: int) -> int:
        found = self._locate(log, wire.BY_OFFSET, max(0, offset))
        if found.offset < offset < found.forced_offset:
            found = self._locate(log, wire.BY_OFFSET, self.next_message_offset(log, offset))
        if found.offset > found.forced_offset or offset > found.forced_offset:
            found = self._locate(log, wire.BY_LATEST)
        return found.ordinal

    def split(self, range: OffsetRange, size: int) -> list[OffsetRange]:
        log = range.log
        requests = [(log, _locate_request(log, wire.BY_OFFSET, offset)) for offset in ranges.split_targets(range, size)]
        # The range is not split inside damage; the task that reads the damaged part reports the damage.
        found = self._send_all(requests, accepted_errors=Damaged)
        return ranges.split_range(range, [reply.offset for reply in found if not isinstance(reply, Damaged)])

    def read_blocks(self, range: OffsetRange, max_bytes: int = ranges.READ_BYTES) -> Iterator[BlockRun]:
        # The broker was reachable when the range was planned, so the reader waits for a broker that is down now.
        self._link.first_connect_timeout = max(self._link.first_connect_timeout, self._timeout)
        reading = RangeFetch(self._driver, range, max_bytes, self._timeout)
        try:
            while (chunk := self._driver.run(reading.next_blocks())) is not None:
                yield chunk
        finally:
            reading.close()

    def close(self) -> None:
        self._driver.close()

    def __enter__(self) -> BrokerLogReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait_for_fsync(self, offsets: Sequence[tuple[PartitionLog, int]]) -> None:
        """Wait until messages that are appended but not yet durable become durable. `offsets`: (log, durable offset).

        The broker may delay the fsync of appended records for seconds unless a client waits for these records. A fetch
        at the durable offset makes the broker fsync earlier, and gets its reply after the fsync. Errors are ignored:
        the caller then returns a smaller bound.
        """
        requests = [
            (log, _fetch_request(log, durable)._replace(wait_ms=FSYNC_WAIT_MS))
            for log, durable in offsets[:REQUESTS_MAX]
        ]
        self._driver.run(send_requests(self._link, requests, FSYNC_WAIT_SECONDS, TfmqError))

    def _topic_rows(self, names: list[str] | None) -> Sequence[wire.TopicRow]:
        metadata = request_with_retries(self._link, wire.Metadata(names, False), self._link.now() + self._timeout)
        return self._driver.run(metadata).topics  # type: ignore[no-any-return]

    def _find_offset(self, log: PartitionLog, by: int, value: int) -> int:
        found = self._locate(log, by, value)
        return min(found.offset, found.forced_offset)

    def _locate(self, log: PartitionLog, by: int, value: int = 0) -> wire.LocateReply:
        return self._send_all([(log, _locate_request(log, by, value))])[0]  # type: ignore[no-any-return]

    def _send_all(
        self, requests: Sequence[PartitionRequest], accepted_errors: type[TfmqError] | tuple[()] = ()
    ) -> list[Any]:
        """Send requests and return their replies, in order. An accepted error is in the list in place of its reply."""
        found: list[Any] = []
        for first in range(0, len(requests), REQUESTS_MAX):
            part = requests[first : first + REQUESTS_MAX]
            calls = self._driver.run(send_requests(self._link, part, self._timeout, accepted_errors))
            found += [call.reply if call.error is None else call.error for call in calls]
        return found


class RangeFetch:
    """Fetches the blocks of one range. While the caller uses one response, the request for the next is in flight."""

    def __init__(self, driver: BlockingDriver, range: OffsetRange, max_bytes: int, timeout: float) -> None:
        self._driver, self._link = driver, driver.link
        self._log, self._end = range.log, range.end
        self._max_bytes, self._timeout = max_bytes, timeout
        self._offset = range.start
        self._epoch = wire.EPOCH_UNKNOWN
        self._call: PendingRequest | None = None

    def next_blocks(self) -> Operation[BlockRun | None]:
        """Return the next blocks of the range; None at its end. `LogReader.read_blocks` lists the errors."""
        deadline = self._link.now() + self._timeout
        backoff = Backoff(BUSY_SECONDS, BUSY_SECONDS_MAX)
        while self._offset < self._end:
            call = self._call or self._send_fetch()
            while not call.done:
                remaining = deadline - self._link.now()
                if remaining > 0:
                    yield Wait((call,), remaining)
                    continue
                down = self._link.state != READY and self._link.last_error is not None
                self._link.abandon(call, self._link.last_error if down else call.timeout_error(self._link.server))
            self._call = None
            if isinstance(call.error, Busy):
                pause = pause_seconds(call.error, backoff.advance())
                if self._link.now() + pause < deadline:
                    yield Wait((), pause)
                    continue
            return self._complete(call)
        return None

    def close(self) -> None:
        call, self._call = self._call, None
        if call is not None and not call.done:
            with self._driver.lock:
                self._link.abandon(call)

    def _send_fetch(self) -> PendingRequest:
        size = min(self._max_bytes, self._end - self._offset)
        fetch = _fetch_request(self._log, self._offset, self._epoch, size)
        # The request itself has no time limit: `next_blocks` limits how long a caller waits for the response.
        self._call = self._link.send_request(fetch, seconds=None)
        self._driver.flush()
        return self._call

    def _complete(self, call: PendingRequest) -> BlockRun:
        if isinstance(call.error, ConnectionFailed | TimedOut):
            raise unreachable_error(call.error, self._log, self._offset, self._timeout)
        if call.error is not None:
            raise describe_read_error(call.error, self._log, self._offset)
        reply = call.reply
        if reply.next <= self._offset:
            raise out_of_range_error(self._log, self._end, OffsetOutOfRange(first=reply.first, end=reply.forced))
        self._offset, self._epoch = reply.next, reply.epoch
        if self._offset < self._end:
            self._send_fetch()
        return BlockRun(reply.start, call.reply_body)


def send_requests(
    link: ClientConnection,
    requests: Sequence[PartitionRequest],
    seconds: float,
    accepted_errors: type[TfmqError] | tuple[()] = (),
) -> Operation[list[PendingRequest]]:
    """Send `requests` at once, repeat each request with the reply Busy, and return the ended requests in order.

    All this takes at most `seconds`. A request that ended with an error of `accepted_errors` is returned with its
    `error`. Other errors are raised.
    """
    deadline = link.now() + seconds
    calls: dict[int, PendingRequest] = {}
    due = dict(enumerate(requests))
    backoff = Backoff(BUSY_SECONDS, BUSY_SECONDS_MAX)
    try:
        while True:
            left = max(0.0, deadline - link.now())
            calls |= {number: link.send_request(message, seconds=left) for number, (_, message) in due.items()}
            for number in due:
                while not calls[number].done:
                    yield Wait((calls[number],))
            due = {number: requests[number] for number in due if isinstance(calls[number].error, Busy)}
            if not due:
                break
            pause = backoff.advance()
            pause = max(pause_seconds(calls[number].error, pause) for number in due)
            if link.now() + pause >= deadline:
                break
            yield Wait((), pause)
    finally:
        for call in calls.values():
            link.abandon(call)
    for number, call in sorted(calls.items()):
        if call.error is not None and not isinstance(call.error, accepted_errors):
            raise describe_read_error(call.error, requests[number][0])
    return [calls[number] for number in range(len(requests))]


def _locate_request(log: PartitionLog, by: int, value: int = 0) -> wire.Locate:
    return wire.Locate(log.topic, log.incarnation, log.partition, by, value)


def _fetch_request(
    log: PartitionLog, offset: int, epoch: int = wire.EPOCH_UNKNOWN, max_bytes: int = ONE_BLOCK
) -> wire.Fetch:
    return wire.Fetch(log.topic, log.incarnation, log.partition, offset, epoch, max_bytes)
