"""The streams that transactions send in: ids of their own, so that they never meet the sequences of plain sends.

A stream numbers the messages of its transactions without a gap, and its transactions too: by (id, number) the broker
knows a request again. One transaction at a time has it; then it goes back to the pool, unless what became of its last
request is not certain. Ids are plenty.
"""

from __future__ import annotations

from tfmq.client.identities import Identities
from tfmq.client.link import Link
from tfmq.client.transaction_batch import TransactionBatch
from tfmq.client.waiting import Flag, Operation, Wait
from tfmq.errors import ConnectionFailed, TfmqError, TimedOut
from tfmq.ids import sequences_left

STREAMS_KEPT = 1000
"""More are dropped: so many transactions at once are rare, and a new stream costs a sixteenth of a round trip."""


class TransactionStream:
    """One id with its next sequence and the number of its last transaction."""

    __slots__ = ("number", "producer_id", "sequence", "used_at")

    def __init__(self, producer_id: int, now: float) -> None:
        self.producer_id = producer_id
        self.sequence = 0
        self.number = 0
        self.used_at = now

    def fits(self, count: int) -> bool:
        """Whether it can number `count` messages more."""
        return count <= sequences_left(self.sequence)

    def place(self, batch: TransactionBatch) -> None:
        """Give `batch` the next sequences."""
        batch.number(self.producer_id, self.sequence)
        self.sequence += batch.count


class TransactionStreams:
    """A producer's streams that are free; the last one used is the first to be used again."""

    def __init__(self, link: Link, identities: Identities) -> None:
        self._link = link
        self._identities = identities
        self._free: list[TransactionStream] = []

    def give(self, stream: TransactionStream) -> None:
        """It is free again: the broker's next sequence is its."""
        stream.used_at = self._link.now()
        if len(self._free) < STREAMS_KEPT:
            self._free.append(stream)

    def taking(self, until: float) -> Operation[TransactionStream]:
        """A free stream, or a new one. Raises `TimedOut`, and what leasing ids raised."""
        stream = self._fresh()
        return stream if stream is not None else (yield from self.leasing(until))

    def leasing(self, until: float) -> Operation[TransactionStream]:
        """A stream that is new to the broker."""
        lease = _Leasing()
        self._identities.take(lease.taken)
        while not lease.done:
            remaining = until - self._link.now()
            if remaining <= 0:
                raise self._late()
            yield Wait((lease,), remaining)
        if lease.error is not None:
            raise type(lease.error)(lease.error.sentence, outcome="not done")
        return TransactionStream(lease.producer_id, self._link.now())

    def _late(self) -> TfmqError:
        link = self._link
        if link.state != "ready" and link.last_error is not None:
            return ConnectionFailed(link.last_error.sentence, outcome="not done")
        return TimedOut("The broker gave no producer id in time.", outcome="not done")

    def _fresh(self) -> TransactionStream | None:
        """A free one that the broker has not forgotten meanwhile."""
        oldest = self._link.now() - self._link.limits["producer_idle_seconds"] / 2
        while self._free:
            stream = self._free.pop()
            if stream.used_at > oldest:
                return stream
        return None


class _Leasing(Flag):
    """Waits for one id."""

    __slots__ = ("error", "producer_id")

    def __init__(self) -> None:
        super().__init__()
        self.producer_id = 0
        self.error: TfmqError | None = None

    def taken(self, producer_id: int, error: TfmqError | None) -> None:
        self.producer_id, self.error = producer_id, error
        self.settle()
