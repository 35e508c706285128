"""What a transaction gathers before it goes: messages in batches, one open for each partition, and full ones.

Order is kept per partition. A topic is taken as it was when its first message came: if it is deleted and made anew
meanwhile, the broker refuses the transaction, so that no part of it lands in another topic than the rest.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from tfmq.client.batch import Delivery
from tfmq.client.cluster import Topic
from tfmq.client.dues import Dues, Given, due_of
from tfmq.client.partition_selector import choose_partition
from tfmq.client.sender import Sender
from tfmq.client.transaction_batch import Teller, TransactionBatch
from tfmq.message import Message

BATCH_BYTES: Final = 256 << 10
"""As much as a plain batch has; larger ones gain nothing."""
LOOK_BYTES: Final = 64 << 10
"""How late it may be seen that a transaction has grown."""
NOT_YET: Final = 0.0
"""Delays in a transaction count from its commit: nothing of them passes before."""
KEYLESS: Final = Message(None)
"""Stands for any message without a key where a selector is asked for a whole batch."""


class Gathering:
    """The messages of one transaction that are not on their way. Runs under the driver's lock."""

    def __init__(self, teller: Teller, sender: Sender, wall_clock: Callable[[], float] = time.time) -> None:
        self.shared: dict[str, TransactionBatch] = {}
        """Open batches, by topic, that take any message without a key: what `send`'s short way appends to."""
        self._teller = teller
        self._sender = sender
        self._wall_clock = wall_clock
        self._topics: dict[str, Topic] = {}
        self._shared_delayed: dict[str, TransactionBatch] = {}
        self._open: dict[tuple[str, int, bool], TransactionBatch] = {}
        self._full: list[TransactionBatch] = []
        self._full_bytes = 0
        self._bytes_max = self._look_at = 0

    def knows(self, topic: str) -> bool:
        """Whether a message for `topic` can be taken without asking the broker about it."""
        return topic in self._topics or self._sender.lanes.knows(topic)

    @property
    def empty(self) -> bool:
        return not self._full and not any(batch.payloads for batch in self._open.values())

    def append(self, topic: str, message: Message, payload: bytes | None) -> Delivery:
        """Take one message of a topic that is known. Raises `MessageTooLarge`, `UnknownPartition`, and what a
        selector raises.
        """
        sender = self._sender
        length = 0 if payload is None else len(payload)
        sender.check_size(length)
        part = sender.part(message)
        due = due_of(message.delay, message.deliver_at)
        batch = self._target(topic, message, due is not None)
        size = length + batch.overhead_bytes + len(part or b"")
        if size > batch.room and batch.payloads:
            self._close(batch)
            batch = self._target(topic, message, due is not None)
        index = batch.add(payload, part, message.tag)
        if due is not None and batch.dues is not None:
            batch.dues.add(Given(due, NOT_YET))
        self._bytes_max += size
        if batch.room <= 0:
            self._close(batch)
        return Delivery((batch, index))

    def append_many(
        self, topic: str, payloads: list[bytes], size_bytes: int, due: int | None = None
    ) -> tuple[TransactionBatch, int]:
        """Take payloads without anything beside but one due, all into one batch; which, and the index of the first one
        there. `size_bytes`: with what each record adds.
        """
        self._sender.check_size(max(map(len, payloads)))
        batch = self._target(topic, KEYLESS, due is not None)
        if size_bytes > batch.room and batch.payloads:
            self._close(batch)
            batch = self._target(topic, KEYLESS, due is not None)
        if due is not None and batch.dues is not None:
            batch.dues.add(Given(due, NOT_YET), len(payloads))
        first = len(batch.payloads)
        batch.payloads += payloads
        batch.room -= size_bytes
        self._bytes_max += size_bytes
        if batch.room <= 0:
            self._close(batch)
        return batch, first

    def outgrew(self, limit_bytes: int) -> bool:
        """Whether more than `limit_bytes` are gathered; may be seen `LOOK_BYTES` late."""
        if self._bytes_max <= max(limit_bytes, self._look_at):
            return False
        size = self.size_bytes()
        self._bytes_max = size + sum(batch.room for batch in self.shared.values())
        self._look_at = self._bytes_max + LOOK_BYTES
        return size > limit_bytes

    @property
    def batch_count(self) -> int:
        """How many batches `take_all` would give at most."""
        return len(self._full) + len(self._open)

    def size_bytes(self) -> int:
        """What is gathered, exactly."""
        return self._full_bytes + sum(BATCH_BYTES - batch.room for batch in self._open.values())

    def take_full(self) -> list[TransactionBatch]:
        """The full batches, in order; they are not gathered any more."""
        taken, self._full, self._full_bytes = self._full, [], 0
        return taken

    def take_all(self) -> list[TransactionBatch]:
        """Every batch with something in it, closed; nothing is gathered behind this."""
        for batch in list(self._open.values()):
            self._close(batch)
        self._bytes_max = self._look_at = 0
        return self.take_full()

    def put_back(self, batches: list[TransactionBatch]) -> None:
        """What `take_all` gave did not go: it comes before everything that is gathered now."""
        self._full[:0] = batches
        self._full_bytes += sum(batch.size_bytes for batch in batches)
        self._bytes_max += sum(batch.size_bytes for batch in batches)

    def forget_topics(self) -> None:
        """Whoever uses these topics next asks for them anew: one of them may be gone."""
        for topic in self._topics.values():
            self._sender.cluster.forget(topic.name)
            self._sender.lanes.forget(topic)

    def _target(self, topic: str, message: Message, delayed: bool) -> TransactionBatch:
        """The open batch for `message`."""
        free = message.partition is None and message.key is None and self._sender.selector.per_batch
        shared = self._shared_delayed if delayed else self.shared
        if free and topic in shared:
            return shared[topic]
        known = self._topics.get(topic) or self._pin(topic)
        partition = choose_partition(self._sender.selector, known, message)
        batch = self._open.get((topic, partition, delayed))
        if batch is None:
            born_ms = int(self._wall_clock() * 1000)
            batch = TransactionBatch(self._teller, topic, known.incarnation, partition, BATCH_BYTES, born_ms)
            batch.dues = Dues() if delayed else None
            self._open[topic, partition, delayed] = batch
        if free:
            shared[topic] = batch
            if not delayed:
                self._bytes_max += batch.room  # the short way counts nothing
        return batch

    def _pin(self, name: str) -> Topic:
        sender = self._sender
        lane = sender.lanes.lane(name)
        assert lane.topic is not None, "asked for before"
        if sender.cluster.stale(name):
            sender.lanes.ask(lane)  # whether it has grown, for later transactions
        self._topics[name] = lane.topic
        return lane.topic

    def _close(self, batch: TransactionBatch) -> None:
        delayed = batch.dues is not None
        del self._open[batch.topic, batch.partition, delayed]
        shared = self._shared_delayed if delayed else self.shared
        if shared.get(batch.topic) is batch:
            del shared[batch.topic]
        batch.close(BATCH_BYTES)
        if batch.count:
            self._full.append(batch)
            self._full_bytes += batch.size_bytes
