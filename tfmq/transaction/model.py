"""In-memory model of a transaction and of its commit. Message data stays in the transaction journal."""

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
"""64-bit words of a batch in `BatchLocations`: its LSN, its log id, and a word with both message count and size."""

ENTRY_BYTES: Final = HEADER_SIZE + MESSAGES.size
"""Bytes of the journal entry of a batch besides the messages and the list of blocks."""

SIZE_BITS: Final = 32
SIZE_MASK: Final = (1 << SIZE_BITS) - 1

ROW_WORDS: Final = 4
"""Words per row of `Decision.partition_rows`."""

LOST_LOG_ID: Final = 0
"""Log id of messages lost by damage. Lost messages keep their ordinals, so that no other ordinal changes."""

NO_ROWS: Final = array("Q")


class IncomingBatch(NamedTuple):
    """A batch that a client sends in a transaction, for the partition whose log has the id `log_id`.

    `blocks`: (size in bytes, number of records, CRC-32) of each block in `data`. `data` must stay unchanged until the
    end of the turn (one pass of the broker's event loop).
    """

    log_id: int
    topic: str
    producer_id: int
    sequence: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which is not used here
    blocks: Sequence[tuple[int, int, int]]
    data: Buffer


class BatchLocation(NamedTuple):
    """Location of one batch: LSN of its journal entry, log id of its target, message count and size."""

    lsn: int
    log_id: int
    count: int  # type: ignore[assignment]
    size_bytes: int


class BatchLocations(array):  # type: ignore[type-arg]
    """Locations of a transaction's batches in the order sent: an array with three 64-bit words for each batch."""

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
    """Return the locations as big-endian bytes. `words` is changed, and must not be used afterwards."""
    if sys.byteorder == "little":
        words.byteswap()
    return words.tobytes()


def unpack_locations(data: bytes) -> BatchLocations:
    """Decode the result of `pack_locations`. Raises ValueError if `data` ends inside a location."""
    locations = BatchLocations()
    locations.frombytes(data)
    if len(locations) % WORDS_PER_BATCH:
        raise ValueError("batch locations that end inside a location")
    if sys.byteorder == "little":
        locations.byteswap()
    return locations


@dataclass(slots=True, eq=False)
class Transaction:
    """A transaction in the `TransactionTable`. Its durable fields change only when a journal entry is applied.

    `topics`: log id -> topic name. `offsets`: the consumer offsets to commit, set by the prepare or commit record.
    Times are wall clock times in ms, 0 if not set. `obsolete`: the transaction no longer needs its journal entries.
    `lost_messages`: how many of `messages` were lost by damage of the journal. `runtime`: `TransactionRuntimeState`.
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
    """Number of messages that are queued for the journal and not yet written."""
    size_bytes: int = 0
    """Total size of the written messages."""
    lsn: int = 0
    """LSN of the record that led to `state`; 0 if there is none, or recovery has read `state` from a snapshot."""
    decision: "Decision | None" = None
    obsolete: bool = False
    cached_batches: Sequence[Batch] | None = None
    """Copies of all batches, kept in memory until they are applied; None if they must be read from the journal."""
    file_references: list[int] = field(default_factory=list)
    """One LSN in each journal file to which the transaction has a reference."""
    runtime: Any = None

    @property
    def xid(self) -> str:
        return self.origin.xid

    def batch_lsns(self) -> Iterator[int]:
        return filter(None, self.locations[0::WORDS_PER_BATCH])


class TargetPart(NamedTuple):
    """The part of a `Decision` for one partition. A partition with message `last_ordinal` has the whole part."""

    log_id: int
    topic: str
    messages: int
    size_bytes: int
    last_ordinal: int


class Slice(NamedTuple):
    """Messages of a decision that one append writes to a partition.

    `last_ordinal`: ordinal of the last message, counted as in `Decision`. `batch_indexes`: for each batch its index in
    the whole decision; -1 for the second and later parts of a split batch. `lost`: (first ordinal, count) of messages
    that are not in `batches`, because damage of the journal destroyed them.
    """

    batches: Sequence[Batch]
    last_ordinal: int
    size_bytes: int
    batch_indexes: Sequence[int]
    lost: Sequence[tuple[int, int]] = ()


class Decision:
    """A commit recorded in the journal, of one transaction or of all members of a commit group.

    `lsn`: LSN of the commit record. Each message has an ordinal, counted from 1, transaction by transaction, and in
    each transaction in the order of sending. Ordinals never change. So after a crash, the ordinal in a partition's
    source position shows which messages of the decision the partition has.
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
        return [positions for each in self.transactions for positions in each.offsets]

    def partition_rows(self, log_id: int) -> "array[int]":
        """Return four words for each batch that the decision has for the partition `log_id`.

        The words: LSN, ordinal of the first message, one word with message count and size, index in the decision.
        """
        if self._targets is None:
            self.compute_targets()
        return self._rows_by_partition.get(log_id, NO_ROWS)

    def release_memory(self) -> None:
        """Free the memory of `targets` and `partition_rows`; both are computed again at their next use."""
        self._targets = None
        self._rows_by_partition = {}

    @property
    def batch_count(self) -> int:
        return sum(each.locations.batch_count for each in self.transactions)

    def compute_targets(self) -> None:
        """Compute `targets` and `partition_rows` (0.5 us a batch); a worker may call this before their first use."""
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
