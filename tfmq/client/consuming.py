"""A consumer without a face: what is fetched, handed out, processed and saved, as operations that any driver runs.

`next_batch` and `poll` are where more is asked for, and so where what was handed out before becomes processed. Finding
partitions, heartbeats and the saving of offsets go on beside them as tasks. A failure that ends the consumer (fenced,
no second member allowed) or a partition (lost offsets, damage, a deleted topic) is raised by the next of these calls,
behind everything that was read before it.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from journal.record import tag_hash
from tfmq.client.assignment import Assignment
from tfmq.client.call import NEVER, Call
from tfmq.client.consumer_options import ConsumerOptions
from tfmq.client.fetcher import Chunk, Feed, Fetcher, FetchPlan
from tfmq.client.lag import Lag, measure
from tfmq.client.link import Link
from tfmq.client.membership import Membership
from tfmq.client.positions import PartitionName, Place, Positions
from tfmq.client.received import ReceivedMessage
from tfmq.client.saving import Saving
from tfmq.client.start import Question
from tfmq.client.tasks import Task, Tasks
from tfmq.client.waiting import Flag, Operation, Wait
from tfmq.client.work import Run, inline
from tfmq.errors import BadRequest, Closed, Fenced, TfmqError, TimedOut, UnknownPartition
from tfmq.protocol.commands import Cancel

log = logging.getLogger("tfmq.consumer")

FETCH_GRACE_SECONDS: Final = 30.0
"""So much longer than the broker holds a fetch does the client wait for its answer."""
LOOKS: Final = 3
"""A poll whose time is over looks again when something came: partitions, places, then messages. But no oftener."""


class Consuming:
    """One consumer; give `tasks` to its driver's tickers.

    `run` does the work of offset storages; `attend` tells the driver that tasks are due although nobody waits, `flush`
    that requests should leave now, although nobody waits yet.
    """

    def __init__(
        self,
        options: ConsumerOptions,
        link: Link,
        run: Run = inline,
        *,
        attend: Callable[[], None],
        flush: Callable[[], None],
    ) -> None:
        self._attend, self._flush = attend, flush
        self.options = options
        self.link = link
        self.closed = False
        self.messages = 0
        self.stop_asked = Flag()
        self.tasks = Tasks(link.now)
        self.positions = Positions(manual=options.commits == "manual")
        self.fetcher = Fetcher(
            fetch_bytes=options.fetch_bytes,
            prefetch_bytes=options.prefetch_bytes,
            tags=options.tags,
            skip_damage=options.skip_damage,
            reset=options.reset,
        )
        self.membership: Membership | None = None
        if options.group is not None:
            session_ms = int(options.session * 1000)
            self.membership = Membership(
                link, options.group, run=run, session_ms=session_ms, storage=options.storage
            )
        self.assignment = Assignment(
            options, link, self.fetcher, self.positions, self.membership, self._changed
        )
        self._hashes = None if options.tags is None else sorted({tag_hash(tag) for tag in options.tags})
        self._calls: dict[PartitionName, Call] = {}
        self._arrival = Flag()
        self._saving = Saving(options, link, self.positions, self.fetcher, self.membership)
        self._watching: Task | None = None
        self._keeping: Task | None = None
        self._failures: list[Exception] = []
        self._told: TfmqError | None = None

    # Handing out

    def next_batch(self) -> Operation[list[ReceivedMessage] | None]:
        """Messages for a loop, which sets `positions.current` to each; None once `stop` was called."""
        self.positions.settle()
        self._raise_failures()
        if not self.positions.loop() and not (yield from self._receive(NEVER)):
            return None
        if self.options.commits == "before":
            return (yield from self._saved_first(1))
        self.messages += len(self.positions.loop())
        return self.positions.loop()

    def poll(self, seconds: float | None, count: int) -> Operation[list[ReceivedMessage]]:
        """Up to `count` messages, as soon as there are any; [] after `seconds` (None: no limit) without one."""
        if count < 1:
            raise BadRequest(f"max_messages={count} asks for nothing; it takes a number from 1 on.")
        until = NEVER if seconds is None else self.link.now() + seconds
        self.positions.settle()
        self._raise_failures()
        if not self.positions.loop() and not (yield from self._receive(until)):
            return []
        if self.options.commits == "before":
            return (yield from self._saved_first(count))
        found = self.positions.poll(count)
        while len(found) < count and self._take():
            found += self.positions.poll(count - len(found))
        self.messages += len(found)
        return found

    def _receive(self, until: float) -> Operation[bool]:
        """Makes a batch with messages ready; False after `stop`, or at `until` and a look at the connection."""
        looks = 0
        while True:
            self._raise_failures()
            if self.stop_asked.done:
                return False
            came = self._arrival.done
            self._arrival = Flag() if came else self._arrival
            if self.positions.loop() or self._take():  # another thread's poll may have left some
                return True
            failure = self.fetcher.failure() or self.fetcher.standstill()
            if failure is not None:
                raise failure
            remaining = until - self.link.now()
            if remaining <= 0 and looks and (looks >= LOOKS or not came):
                return False
            looks, remaining = looks + 1, max(0.0, remaining)
            retry = self.fetcher.next_retry()
            if retry is not None:
                remaining = min(remaining, max(0.0, retry - self.link.now()))
            yield Wait((self._arrival, self.stop_asked), None if remaining == NEVER else remaining)

    def _take(self) -> bool:
        """Makes a batch with messages ready of what has arrived, if it has."""
        self._send_fetches()  # the broker works on the next chunk while this one is decoded
        taken = False
        try:
            while (batch := self.fetcher.take()) is not None:
                self.positions.begin(batch)
                if batch.messages:
                    break
            taken = True
        finally:
            if not taken:  # interrupted (Ctrl-C) with a chunk in hand: read again what was not handed out
                self._rewind()
        self._send_fetches()
        return batch is not None

    def _saved_first(self, count: int) -> Operation[list[ReceivedMessage]]:
        """Up to `count` ready messages, once the store says that they are done. What cannot be saved is given later."""
        messages = self.positions.poll(count)
        self.positions.settle()
        saved = False
        try:
            yield from self._saving.save(self.positions.unsaved, self.link.now() + self.options.timeout)
            saved = True
        finally:
            if not saved and messages:
                first = messages[0]
                name = PartitionName(first.topic, first.partition)
                self._go_to(name, Place(first.offset, first.ordinal, first.origin.epoch))
        self.messages += len(messages)
        return messages

    def stop(self) -> None:
        """Nothing more is handed out; a driver's `raise_flag(stop_asked)` wakes who waits."""
        self.positions.drop_ready()

    # Fetching

    def _send_fetches(self) -> None:
        plans = self.fetcher.plans(self.link.now())
        for plan in plans:
            request = plan.request(self.options.read, self._hashes)
            call = self.link.call(request, seconds=plan.wait_ms / 1000 + FETCH_GRACE_SECONDS)
            self._calls[plan.name] = call
            call.when_done(partial(self._fetched, plan))
        if plans:
            self._flush()

    def _fetched(self, plan: FetchPlan, call: Call) -> None:
        if self._calls.get(plan.name) is call:
            del self._calls[plan.name]
        if call.error is not None:
            self.fetcher.failed(plan, call.error, self.link.now())
        else:
            reply = call.reply
            body = bytes(call.reply_body)
            self.fetcher.arrived(
                plan, Chunk(body, reply.start, reply.skip_to, reply.next, reply.epoch, plan.filtered)
            )
        self._arrival.settle()

    def _void_fetch(self, name: PartitionName) -> None:
        """What is under way for the partition is not wanted any more; the broker is told, so that it need not wait."""
        call = self._calls.pop(name, None)
        if call is not None and not call.done:
            self.link.abandon(call)
            if call.sent and self.link.state == "ready":
                self.link.call(Cancel(call.correlation))

    def _go_to(self, name: PartitionName, place: Place) -> None:
        """Reading and handing out go on at `place`."""
        self._void_fetch(name)
        self.positions.seek(name, place)
        self.fetcher.seek(name, place)

    def _rewind(self) -> None:
        """Reading goes on behind what was handed out, whatever had been read ahead."""
        self.positions.drop_ready()
        for name, feed in self.fetcher.feeds.items():
            if feed.failure is None:
                self.fetcher.seek(name, self.positions.handed_out(name))

    # Moving

    def seek(self, name: PartitionName, question: Question) -> Operation[None]:
        """Go on at the place that `question` asks for; a stopped partition goes on, too."""
        feed = yield from self._feed(name)
        place = yield from self.assignment.locate(name, feed.incarnation, question)
        self._go_to(name, place)

    def pause(self, name: PartitionName) -> Operation[None]:
        """Hand out nothing of the partition until `resume`."""
        yield from self._feed(name)
        ready = self.positions.ready
        if ready is not None and ready.name == name:
            place = self.positions.handed_out(name)
            self.positions.drop_ready()
            self._void_fetch(name)
            self.fetcher.seek(name, place)
        self.fetcher.pause(name)

    def resume(self, name: PartitionName) -> Operation[None]:
        """Hand out messages of the partition again."""
        yield from self._feed(name)
        self.fetcher.resume(name)
        self._arrival.settle()

    def _feed(self, name: PartitionName) -> Operation[Feed]:
        """The partition. Raises UnknownPartition for one that this consumer does not read, once it has looked."""
        until = self.link.now() + self.options.timeout
        yield from self._looked(until)
        feed = self.fetcher.feeds.get(name)
        if feed is None:
            raise UnknownPartition(f"This consumer does not read {name}, or it is not there yet.")
        return feed

    def _looked(self, until: float) -> Operation[None]:
        """Waits until the partitions are known."""
        while True:
            self._raise_failures()
            if self.assignment.looked:
                return
            if self.link.now() >= until:
                raise TimedOut("The broker did not say in time which partitions there are.")
            if self._arrival.done:
                self._arrival = Flag()
            yield Wait((self._arrival,), until - self.link.now())

    # Asking

    def lag(self) -> Operation[Lag]:
        """Messages that are there and were not handed out; to the end of the log, whatever of it is forced."""
        yield from self._looked(self.link.now() + self.options.timeout)
        return (yield from measure(self.link, self.fetcher, self.positions, self.options.timeout))

    def position(self, name: PartitionName) -> Operation[int]:
        """The offset behind everything that was handed out of the partition."""
        yield from self._feed(name)
        return self.positions.handed_out(name).offset

    def committed(self, name: PartitionName) -> Operation[int | None]:
        """The offset that the group's store has of the partition; None: none."""
        membership = self.member()
        feed = yield from self._feed(name)
        stored = (yield from membership.read([name])).get(name)
        return stored.offset if stored is not None and stored.incarnation == feed.incarnation else None

    def stats(self) -> dict[str, Any]:
        """Counts since the start, and where it stands now."""
        return {
            "messages": self.messages,
            "bytes": self.fetcher.bytes_read,
            "fetches": self.fetcher.fetches,
            "connections": self.link.connections,
            "commits": self.membership.commits if self.membership is not None else 0,
            "generation": self.membership.generation if self.membership is not None else 0,
            "skipped": self.fetcher.skipped_count,
            "skipped_ranges": [tuple(each) for each in self.fetcher.skipped],
            "partitions": {
                str(name): {
                    "offset": self.positions.handed_out(name).offset,
                    "processed_offset": self.positions.processed(name).offset,
                    "saved_offset": self.positions.saved(name),
                    "waiting_bytes": feed.chunk_bytes,
                    "paused": feed.paused,
                    "stopped": None if feed.failure is None else str(feed.failure),
                }
                for name, feed in self.fetcher.feeds.items()
            },
        }

    # Saving

    def commit(self, message: ReceivedMessage | None = None) -> Operation[None]:
        """Saves all that was handed out, or one partition up to `message` and including it."""
        self.member()
        try:
            yield from self._saving.commit(message, self.link.now() + self.options.timeout)
        except Fenced as fenced:
            self._told = fenced
            self.positions.drop_ready()
            raise

    def member(self) -> Membership:
        """Its place in the group. Raises `Closed`, `BadRequest` without a group."""
        if self.closed:
            raise Closed("The consumer is closed; make a new one.")
        if self.membership is None:
            raise BadRequest("Without a group nothing is saved: give the consumer group=.")
        return self.membership

    # Beside

    def _changed(self) -> None:
        """The partitions were looked for; from the first time on heartbeats and saves are due."""
        if self.membership is not None and (self._keeping is None or self._keeping.done):
            self._keeping = self.tasks.start(self._keep(), self._failed)
            self._attend()
        self._arrival.settle()

    def _keep(self) -> Operation[None]:
        yield from self._saving.keep()
        self.positions.drop_ready()
        self._arrival.settle()

    def _failed(self, error: Exception) -> None:
        """A task came to an end: the next call raises it."""
        self._failures.append(error)
        self._arrival.settle()

    def _raise_failures(self) -> None:
        """Raises what a task met; begins to look for partitions where that is not being done."""
        if self.closed or self.link.state == "closed":
            raise Closed("The consumer is closed; make a new one.")
        if self.membership is not None and self.membership.failure is not None:
            self.positions.drop_ready()
            self._told = self.membership.failure
            raise self._told
        if not self._failures and (self._watching is None or self._watching.done):
            self._watching = self.tasks.start(self.assignment.watch(), self._failed)
        if self._failures:
            raise self._failures.pop(0)

    # The end

    def renew(self) -> None:
        """In a forked child: a reader of its own, at the same places, that is no member of the group yet."""
        self._calls.clear()
        self.tasks.cancel()
        self._watching = self._keeping = None
        self._arrival = Flag()
        self._saving.renew()
        self.fetcher.renew()
        self._rewind()
        if self.membership is not None:
            self.membership.renew()

    def close(self, processed: bool) -> Operation[None]:
        """Saves what is processed (`processed`: all that is out is), leaves the group. A second time does nothing.

        Raises what kept the offsets from being saved.
        """
        if self.closed:
            return
        until = self.link.now() + self.options.timeout
        try:
            if processed:
                self.positions.settle()
            membership = self.membership
            if membership is not None and membership.joined and self.link.state != "closed":
                if self.options.commits != "manual" and (membership.failure is None or self._told is None):
                    yield from self._saving.save(self.positions.unsaved, until)
                yield from membership.leave(until)
        finally:
            self.closed = True
            self.tasks.cancel()
            self._calls.clear()
            if self.options.storage is not None:
                self.options.storage.close()
