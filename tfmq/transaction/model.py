"""In-memory model of a transaction. Message data stays in the transaction journal."""

import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from journal.record.batch import Batch
from journal.wal.entry import HEADER_SIZE, MESSAGES
from tfmq.apply_target import GroupPositions
from tfmq.transaction import states
from tfmq.transaction.journal_records import Origin

Buffer = bytes | bytearray | memoryview

WORDS_PER_BATCH: Final = 3
"""Words of a batch in `BatchLocations`: its LSN, its log id, and a word with both message count and size."""

ENTRY_BYTES: Final = HEADER_SIZE + MESSAGES.size
"""Bytes of the journal entry of a batch besides its messages and blocks; a tiny message is smaller than this."""

SIZE_BITS: Final = 32
SIZE_MASK: Final = (1 << SIZE_BITS) - 1

ROW_WORDS: Final = 4
"""Words per row of `Decision.partition_rows`."""

LOST_LOG_ID: Final = 0
"""Log id in the locations of messages that a journal repair has lost; their ordinals stay in use."""

NO_ROWS: Final = array("Q")


class IncomingBatch(NamedTuple):
    """A batch that a client sends into a transaction, for the partition with the log `log_id`.

    `blocks` and `data`: as in `journal.record.batch.Batch`. `data` must stay unchanged until the end of the turn.
    """

    log_id: int
    topic: str
    producer_id: int
    sequence: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which is not used here
    blocks: Sequence[tuple[int, int, int]]
    data: Buffer


class BatchLocation(NamedTuple):
    """Where one batch is: LSN of its journal entry, log id of its target, message count and size."""

    lsn: int
    log_id: int
    count: int  # type: ignore[assignment]
    size_bytes: int


class BatchLocations(array):  # type: ignore[type-arg]
    """Locations of a transaction's batches in the order sent, packed into an array of 64-bit words."""

    __slots__ = ()

    def __new__(cls, words: Sequence[int] | bytes = ()) -> "BatchLocations":
        return super().__new__(cls, "Q", words)  # type: ignore[return-value]

    def add_batch(self, lsn: int, log_id: int, count: int, size_bytes: int) -> None:
        self.extend((lsn, log_id, count << SIZE_BITS | size_bytes))

    @property
    def batch_count(self) -> int:
        return len(self) // WORDS_PER_BATCH

    def __call__(self) -> Iterator[BatchLocation]:
        for lsn, log_id, count_size in zip(
            self[0::WORDS_PER_BATCH], self[1::WORDS_PER_BATCH], self[2::WORDS_PER_BATCH], strict=True
        ):
            yield BatchLocation(lsn, log_id, count_size >> SIZE_BITS, count_size & SIZE_MASK)


def pack_locations(words: "array[int]") -> bytes:
    """Return the locations as big-endian bytes. `words` must not be used afterwards."""
    if sys.byteorder == "little":
        words.byteswap()
    return words.tobytes()


def unpack_locations(data: bytes) -> BatchLocations:
    """Decode the result of `pack_locations`. Raises ValueError."""
    locations = BatchLocations()
    locations.frombytes(data)
    if len(locations) % WORDS_PER_BATCH:
        raise ValueError("batch locations that end inside a location")
    if sys.byteorder == "little":
        locations.byteswap()
    return locations


@dataclass(slots=True, eq=False)
class Transaction:
    """A transaction in the `TransactionTable`; only journal entries change its durable fields.

    `topics`: topic name by log id. `offsets`: the consumer offsets to commit, set by the prepare or commit record.
    Times are wall clock times in ms, 0 if not set. `obsolete`: the journal no longer needs the messages. `messages`
    includes the `lost_messages`, which a journal repair has lost. `runtime`: the `TransactionRuntimeState`.
    """

    epoch: int
    origin: Origin
    state: states.State = states.OPEN
    topics: dict[int, str] = field(default_factory=dict)
    offsets: Sequence[GroupPositions] = ()
    prepared_ms: int = 0
    expires_ms: int = 0
    decided_ms: int = 0
    locations: BatchLocations = field(default_factory=BatchLocations)
    messages: int = 0
    lost_messages: int = 0
    queued_messages: int = 0
    """Messages that are queued for the journal and not yet written."""
    size_bytes: int = 0
    """Total size of the written messages."""
    lsn: int = 0
    """LSN of the record that led to `state`; 0 if there is none, or an earlier process wrote it."""
    decision: "Decision | None" = None
    obsolete: bool = False
    cached_batches: Sequence[Batch] | None = None
    """All batches, if they are so small that they stay in memory until they are applied; else None."""
    file_references: list[int] = field(default_factory=list)
    """LSNs by which the transaction has references to journal files, one for each file."""
    runtime: Any = None

    @property
    def xid(self) -> str:
        return self.origin.xid

    def batch_lsns(self) -> Iterator[int]:
        return filter(None, self.locations[0::WORDS_PER_BATCH])


class TargetPart(NamedTuple):
    """The part of a decision for one partition, which has all of it if it has the message with `last_ordinal`."""

    log_id: int
    topic: str
    messages: int
    size_bytes: int
    last_ordinal: int


class Slice(NamedTuple):
    """A part of a decision: the messages that one append writes to a partition.

    `last_ordinal`: the ordinal of its last message, counted as in `Decision`. `batch_indexes`: for each batch its index
    in the whole decision; if a batch was split, its later parts have -1. `lost`: (first ordinal, count) of messages
    that are missing because of a journal repair.
    """

    batches: Sequence[Batch]
    last_ordinal: int
    size_bytes: int
    batch_indexes: Sequence[int]
    lost: Sequence[tuple[int, int]] = ()


class Decision:
    """A commit recorded in the journal, of one transaction or of all members of a commit group.

    `lsn`: LSN of the commit record. The messages are numbered from 1 by ordinals: transaction by transaction, and in
    each transaction in the order in which they were sent. Ordinals never change, so after any crash an ordinal shows
    how much of the decision a partition has.
    """

    __slots__ = ("_rows_by_partition", "_targets", "lsn", "time_ms", "transactions")

    def __init__(self, lsn: int, time_ms: int, transactions: Sequence[Transaction]) -> None:
        self.lsn = lsn
        self.time_ms = time_ms
        self.transactions = transactions
        self._targets: dict[int, TargetPart] | None = None
        self._rows_by_partition: dict[int, array[int]] = {}

    @property
    def targets(self) -> dict[int, TargetPart]:
        """Target partitions by log id, in the order of their first batch; computed on first use."""
        if self._targets is None:
            self.compute_targets()
        assert self._targets is not None
        return self._targets

    @property
    def offsets(self) -> list[GroupPositions]:
        return [places for each in self.transactions for places in each.offsets]

    def partition_rows(self, log_id: int) -> "array[int]":
        """Return four words for each batch that is for the partition `log_id`; empty if the decision has none.

        The words are: LSN, ordinal of the first message, count and size as in `BatchLocations`, index in the decision.
        """
        if self._targets is None:
            self.compute_targets()
        return self._rows_by_partition.get(log_id, NO_ROWS)

    def release_memory(self) -> None:
        """Free the memory of `targets` and `partition_rows`, which are computed again when they are used."""
        self._targets = None
        self._rows_by_partition = {}

    @property
    def batch_count(self) -> int:
        return sum(each.locations.batch_count for each in self.transactions)

    def compute_targets(self) -> None:
        """Compute `targets` and `partition_rows` (0.5 us a batch). A worker may do so before their first use."""
        plans: dict[int, array[int]] = {}
        number, index = 1, 0
        for transaction in self.transactions:
            words = transaction.locations
            for lsn, log_id, count_size in zip(
                words[0::WORDS_PER_BATCH], words[1::WORDS_PER_BATCH], words[2::WORDS_PER_BATCH], strict=True
            ):
                if log_id != LOST_LOG_ID:
                    plan = plans.get(log_id)
                    if plan is None:
                        plan = plans[log_id] = array("Q")
                    plan.extend((lsn, number, count_size, index))
                number += count_size >> SIZE_BITS
                index += 1
        self._rows_by_partition = plans
        names = {log_id: name for each in self.transactions for log_id, name in each.topics.items()}
        self._targets = {log_id: _target_part(log_id, names, plan) for log_id, plan in plans.items()}


def _target_part(log_id: int, names: dict[int, str], plan: "array[int]") -> TargetPart:
    count_sizes = plan[2::ROW_WORDS]
    messages = sum(count_size >> SIZE_BITS for count_size in count_sizes)
    size_bytes = sum(count_size & SIZE_MASK for count_size in count_sizes)
    last = plan[-3] + (plan[-2] >> SIZE_BITS) - 1
    return TargetPart(log_id, names.get(log_id, ""), messages, size_bytes, last)
