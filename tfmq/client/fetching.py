"""The fetches of one consumer: sent as its `Fetcher` plans them, their answers given to it, and taken from there."""

from collections.abc import Callable, Collection
from functools import partial
from typing import Final

from journal.record.format import tag_hash
from tfmq.client.call import Call
from tfmq.client.consumer_options import ConsumerOptions
from tfmq.client.fetcher import Chunk, Fetcher, FetchPlan
from tfmq.client.filtering import filtered
from tfmq.client.link import Link
from tfmq.client.positions import Batch, PartitionName
from tfmq.errors import Abandoned
from tfmq.protocol.commands import Cancel

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
