"""Ranges of partitions from a broker, over the link that every client has.

Questions that belong together go out together. Chunks are read ahead by one: the request for the next chunk leaves
before a chunk is handed out, so the broker reads and sends while this one is worked on; no more than two are ever in
memory. A connection that breaks is made again by the link, which repeats what was asked; a broker that stops says so
before it is gone, and is waited for likewise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Final

from journal.record.format import make_log_id
from tfmq.client.connection.connection import SECONDS, Call, Link
from tfmq.client.connection.factory import reach
from tfmq.client.connection.requests import ask
from tfmq.client.drivers.blocking import BlockingDriver
from tfmq.client.operation import Operation, Wait
from tfmq.errors import Busy, ConnectionFailed, Damaged, OffsetOutOfRange, TfmqError, TimedOut, UnknownTopic
from tfmq.protocol import commands as wire
from tfmq.spark.errors import out_of_range, read_error, unreached
from tfmq.spark.ranges import CHUNK_BYTES, Bounds, Chunk, PartitionLog, Range, message_starts, pieces, targets

QUESTIONS_MAX: Final = 1000
"""So many are under way at once, well below what a broker takes of one connection."""
BUSY_SECONDS: Final = 0.05
BUSY_SECONDS_MAX: Final = 2.0
"""The pause after a broker that is busy, or stops; doubled each time."""
FORCE_MS: Final = 100
FORCE_SECONDS: Final = 1.0
"""So long a force is waited for by who asks for bounds: many times what one takes."""
ONE_BLOCK: Final = 1
"""Fewer bytes than any block has: a fetch gives just the block that holds the offset."""

Question = tuple[PartitionLog, Any]
"""A request, and the partition that it is about."""


class WireLogs:
    """`Logs` of the broker at `servers`; making one touches no network. `patient` as of `open_logs`."""

    def __init__(
        self, servers: str | None = None, timeout: float = SECONDS, *, patient: bool = False
    ) -> None:
        self._link, self._driver, _ = reach(servers, BlockingDriver)
        self._timeout = timeout
        if patient:
            self._link.patience_seconds = max(self._link.patience_seconds, timeout)

    def node(self) -> str:
        """See `Logs`."""
        if self._link.hello is None:
            self._driver.run(ask(self._link, wire.Ping(), self._link.now() + self._timeout))
        assert self._link.hello is not None
        return self._link.hello.node

    def topics(self) -> list[str]:
        """See `Logs`."""
        return sorted(row.name for row in self._metadata(None))

    def partitions(self, topic: str) -> list[PartitionLog]:
        """See `Logs`."""
        for row in self._metadata([topic]):
            numbers = sorted(each.partition for each in row.partitions)
            return [PartitionLog(topic, n, row.incarnation, make_log_id(row.incarnation, n)) for n in numbers]
        raise UnknownTopic(f"There is no topic {topic}: create it (tfmq topic create), or look at the list.")

    def bounds(self, log: PartitionLog) -> Bounds:
        """See `Logs`."""
        return self.all_bounds([log])[0]

    def all_bounds(self, logs: Sequence[PartitionLog]) -> list[Bounds]:
        """See `Logs`."""
        kinds = (wire.BY_EARLIEST, wire.BY_LATEST)
        found = self._ask([(log, _locate(log, by)) for log in logs for by in kinds])
        unforced = [n for n, last in enumerate(found[1::2]) if last.end_offset > last.forced_offset]
        if unforced:
            places = [(logs[n], found[2 * n + 1].forced_offset) for n in unforced]
            self._await_force(places)
            again = self._ask([(log, _locate(log, wire.BY_LATEST)) for log, _ in places])
            for n, last in zip(unforced, again, strict=True):
                found[2 * n + 1] = last
        return [
            Bounds(first.offset, last.offset, first.ordinal, last.ordinal)
            for first, last in zip(found[::2], found[1::2], strict=True)
        ]

    def at_time(self, log: PartitionLog, ms: int) -> int:
        """See `Logs`."""
        return self._place(log, wire.BY_TIME_MS, max(0, ms))

    def at_ordinal(self, log: PartitionLog, ordinal: int) -> int:
        """See `Logs`."""
        return self._place(log, wire.BY_ORDINAL, max(0, ordinal))

    def at_or_after(self, log: PartitionLog, offset: int) -> int:
        """See `Logs`."""
        found = self._locate(log, wire.BY_OFFSET, max(0, offset))
        place: int = found.offset
        while place < found.forced_offset:
            block = self._ask_for_call(log, _fetch(log, place, wire.EPOCH_UNKNOWN, ONE_BLOCK))
            starts = message_starts(Chunk(block.reply.start, block.reply_body))
            following = min((each for each in starts if each >= max(offset, place)), default=None)
            if following is not None:
                return following
            place = block.reply.next
        return found.forced_offset

    def ordinal_at(self, log: PartitionLog, offset: int) -> int:
        """See `Logs`."""
        found = self._locate(log, wire.BY_OFFSET, max(0, offset))
        if found.offset < offset < found.forced_offset:
            found = self._locate(log, wire.BY_OFFSET, self.at_or_after(log, offset))
        if found.offset > found.forced_offset or offset > found.forced_offset:
            found = self._locate(log, wire.BY_LATEST)
        return found.ordinal

    def split(self, range: Range, size: int) -> list[Range]:
        """See `Logs`."""
        log = range.log
        questions = [(log, _locate(log, wire.BY_OFFSET, offset)) for offset in targets(range, size)]
        # Where a cut would fall into damage there is none; whoever reads that piece is told.
        found = self._ask(questions, but=Damaged)
        return pieces(range, [reply.offset for reply in found if not isinstance(reply, Damaged)])

    def chunks(self, range: Range, max_bytes: int = CHUNK_BYTES) -> Iterator[Chunk]:
        """See `Logs`."""
        # Who has a range had it from a broker that was there: one that is away is waited for.
        self._link.patience_seconds = max(self._link.patience_seconds, self._timeout)
        reading = Reading(self._driver, range, max_bytes, self._timeout)
        try:
            while (chunk := self._driver.run(reading.next())) is not None:
                yield chunk
        finally:
            reading.close()

    def close(self) -> None:
        """See `Logs`."""
        self._driver.close()

    def __enter__(self) -> WireLogs:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _await_force(self, places: Sequence[tuple[PartitionLog, int]]) -> None:
        """What is written and not forced may wait for its force for seconds, unless somebody wants to read it: a fetch
        at the mark says so, and is answered behind the force. Nothing is lost where it fails."""
        part = places[:QUESTIONS_MAX]
        questions = [
            (log, _fetch(log, forced, wire.EPOCH_UNKNOWN, ONE_BLOCK)._replace(wait_ms=FORCE_MS))
            for log, forced in part
        ]
        self._driver.run(answered(self._link, questions, FORCE_SECONDS, TfmqError))

    def _metadata(self, names: list[str] | None) -> Sequence[wire.TopicRow]:
        asked = ask(self._link, wire.Metadata(names, False), self._link.now() + self._timeout)
        return self._driver.run(asked).topics  # type: ignore[no-any-return]

    def _place(self, log: PartitionLog, by: int, value: int) -> int:
        """What LOCATE finds; what is written and not forced counts for nothing."""
        found = self._locate(log, by, value)
        return min(found.offset, found.forced_offset)

    def _locate(self, log: PartitionLog, by: int, value: int = 0) -> wire.LocateReply:
        return self._ask([(log, _locate(log, by, value))])[0]  # type: ignore[no-any-return]

    def _ask_for_call(self, log: PartitionLog, message: Any) -> Call:
        return self._driver.run(answered(self._link, [(log, message)], self._timeout))[0]

    def _ask(self, questions: Sequence[Question], but: type[TfmqError] | tuple[()] = ()) -> list[Any]:
        """The replies, in order; an error of kind `but` stands where its answer would, any other is raised."""
        found: list[Any] = []
        for first in range(0, len(questions), QUESTIONS_MAX):
            part = questions[first : first + QUESTIONS_MAX]
            calls = self._driver.run(answered(self._link, part, self._timeout, but))
            found += [call.reply if call.error is None else call.error for call in calls]
        return found


class Reading:
    """One range on its way. `driver` runs `next`, which is an operation; `close` gives up what is under way."""

    def __init__(self, driver: BlockingDriver, range: Range, max_bytes: int, timeout: float) -> None:
        self._driver, self._link = driver, driver.link
        self._log, self._end = range.log, range.end
        self._max_bytes, self._timeout = max_bytes, timeout
        self._offset = range.start
        self._epoch = wire.EPOCH_UNKNOWN
        self._call: Call | None = None

    def next(self) -> Operation[Chunk | None]:
        """The next chunk; None behind the last one. Raises as `Logs.chunks`."""
        deadline = self._link.now() + self._timeout
        pause = BUSY_SECONDS
        while self._offset < self._end:
            call = self._call or self._send()
            yield from self._wait(call, deadline)
            self._call = None
            if not isinstance(call.error, Busy) or self._link.now() + pause >= deadline:
                return self._taken(call)
            yield Wait((), pause)
            pause = min(2 * pause, BUSY_SECONDS_MAX)
        return None

    def close(self) -> None:
        """Nobody waits for more."""
        call, self._call = self._call, None
        if call is not None and not call.done:
            with self._driver.lock:
                self._link.abandon(call)

    def _send(self) -> Call:
        """Ask for what is at `offset`, without a time of its own: it counts only while somebody waits."""
        size = min(self._max_bytes, self._end - self._offset)
        fetch = _fetch(self._log, self._offset, self._epoch, size)
        self._call = self._link.call(fetch, seconds=None)
        self._driver.flush()
        return self._call

    def _wait(self, call: Call, deadline: float) -> Operation[None]:
        while not call.done:
            remaining = deadline - self._link.now()
            if remaining <= 0:
                down = self._link.state != "ready" and self._link.last_error is not None
                self._link.abandon(call, self._link.last_error if down else call.late(self._link.server))
                return
            yield Wait((call,), remaining)

    def _taken(self, call: Call) -> Chunk:
        """What came, the next request being under way."""
        if isinstance(call.error, ConnectionFailed | TimedOut):
            raise unreached(call.error, self._log, self._offset, self._timeout)
        if call.error is not None:
            raise read_error(call.error, self._log, self._offset)
        reply = call.reply
        if reply.next <= self._offset:
            raise out_of_range(self._log, self._end, OffsetOutOfRange(first=reply.first, end=reply.forced))
        self._offset, self._epoch = reply.next, reply.epoch
        if self._offset < self._end:
            self._send()
        return Chunk(reply.start, call.reply_body)


def answered(
    link: Link, questions: Sequence[Question], seconds: float, but: type[TfmqError] | tuple[()] = ()
) -> Operation[list[Call]]:
    """All of `questions` asked at once, and again where the broker is busy; their calls, done. Raises the first error
    that is none of `but`."""
    deadline = link.now() + seconds
    calls: dict[int, Call] = {}
    due = dict(enumerate(questions))
    pause = BUSY_SECONDS
    try:
        while True:
            left = max(0.0, deadline - link.now())
            calls |= {number: link.call(message, seconds=left) for number, (_, message) in due.items()}
            for number in due:
                while not calls[number].done:
                    yield Wait((calls[number],))
            due = {number: questions[number] for number in due if isinstance(calls[number].error, Busy)}
            if not due or link.now() + pause >= deadline:
                break
            yield Wait((), pause)
            pause = min(2 * pause, BUSY_SECONDS_MAX)
    finally:
        for call in calls.values():
            link.abandon(call)
    for number, call in sorted(calls.items()):
        if call.error is not None and not isinstance(call.error, but):
            raise read_error(call.error, questions[number][0])
    return [calls[number] for number in range(len(questions))]


def _locate(log: PartitionLog, by: int, value: int = 0) -> wire.Locate:
    return wire.Locate(log.topic, log.incarnation, log.partition, by, value)


def _fetch(log: PartitionLog, offset: int, epoch: int, max_bytes: int) -> wire.Fetch:
    return wire.Fetch(log.topic, log.incarnation, log.partition, offset, epoch, max_bytes)
