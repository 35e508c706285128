"""In-memory model of a transaction: its origin, state, batch locations and commit decision.

Message data stays in the journal. Memory holds 24 bytes per batch, so a transaction of gigabytes costs
kilobytes.
"""

import sys
from array import array
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from journal.record.batch import Batch
from journal.wal.entry import HEADER_SIZE, MESSAGES
from tfmq.apply_target import GroupPlaces
from tfmq.transaction import states
from tfmq.transaction.journal_records import Origin

Buffer = bytes | bytearray | memoryview

WORDS: Final = 3
"""Words stored per batch: its LSN, its log id, and message count and size packed into one."""

ENTRY_BYTES: Final = HEADER_SIZE + MESSAGES.size
"""Journal overhead of one batch without its blocks; exceeds the messages of tiny batches."""

SIZE_BITS: Final = 32
SIZE_MASK: Final = (1 << SIZE_BITS) - 1

ROW_WORDS: Final = 4
"""Words per row of `Decision.partition_rows`."""

LOST: Final = 0
"""Log id of messages lost in a journal repair: they keep their ordinals but are not applied."""

NOTHING: Final = array("Q")


class Piece(NamedTuple):
    """A batch being sent into a transaction.

    `topic` is only displayed. `blocks` and `data` are as in `journal.record.batch.Batch`. `data` must stay
    unchanged until the end of the turn; the journal writer copies it if it is needed for longer.
    """

    log_id: int
    topic: str
    producer_id: int
    sequence: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which is not used here
    blocks: Sequence[tuple[int, int, int]]
    data: Buffer


class Location(NamedTuple):
    """Location of one batch: LSN of its journal entry, and count and size of its messages."""

    place: int
    log_id: int
    count: int  # type: ignore[assignment]
    size_bytes: int


class Locations(array):  # type: ignore[type-arg]
    """Batch locations of one transaction in send order, packed into an array of 64-bit words."""

    __slots__ = ()

    def __new__(cls, words: Sequence[int] | bytes = ()) -> "Locations":
        return super().__new__(cls, "Q", words)  # type: ignore[return-value]

    def add(self, lsn: int, log_id: int, count: int, size_bytes: int) -> None:
        """Append the location of one batch."""
        self.extend((lsn, log_id, count << SIZE_BITS | size_bytes))

    @property
    def rows(self) -> int:
        """The number of batches."""
        return len(self) // WORDS

    def __call__(self) -> Iterator[Location]:
        """Yield the location of every batch, in send order."""
        for lsn, log_id, count_size in zip(self[0::WORDS], self[1::WORDS], self[2::WORDS], strict=True):
            yield Location(lsn, log_id, count_size >> SIZE_BITS, count_size & SIZE_MASK)


def packed(words: "array[int]") -> bytes:
    """Return the locations as big-endian bytes. `words` must not be used afterwards."""
    if sys.byteorder == "little":
        words.byteswap()
    return words.tobytes()


def unpacked(data: bytes) -> Locations:
    """Decode the result of `pack_locations`.

    Raises: ValueError.
    """
    locations = Locations()
    locations.frombytes(data)
    if len(locations) % WORDS:
        raise ValueError("batch locations that end inside a location")
    if sys.byteorder == "little":
        locations.byteswap()
    return locations


class Transaction:
    """One transaction, created by the store; only journal entries change its durable fields.

    `state` is one of `states.STATES`. `topics` maps log ids to topic names. `offsets` are the consumer
    offsets to commit, known from the prepare or commit record on. `prepared_ms`, `expires_ms` and
    `decided_ms` are wall clock times, 0 if unset. `decision` is None until the commit. `obsolete` is set
    when the journal no longer needs the messages. `lost_messages` counts messages lost in a journal repair;
    `messages` includes them. `runtime` is the `TransactionRuntimeState`: what is not durable.
    """

    __slots__ = (
        "cached",
        "decided_ms",
        "decision",
        "epoch",
        "expires_ms",
        "files",
        "live",
        "locations",
        "lost",
        "messages",
        "offsets",
        "origin",
        "place",
        "prepared_ms",
        "queued",
        "settled",
        "size_bytes",
        "state",
        "topics",
    )

    def __init__(self, epoch: int, origin: Origin) -> None:
        self.epoch = epoch
        self.origin = origin
        self.state = states.OPEN
        self.topics: dict[int, str] = {}
        self.offsets: Sequence[GroupPlaces] = ()
        self.prepared_ms = self.expires_ms = self.decided_ms = 0
        self.locations = Locations()
        self.messages = self.lost = 0
        self.queued = 0
        """Messages queued for the journal and not yet written."""
        self.size_bytes = 0
        """Total size of its messages."""
        self.place = 0
        """LSN of the record that led to `state`; 0 without one, or if an earlier process wrote it."""
        self.decision: Decision | None = None
        self.settled = False
        self.cached: Sequence[Batch] | None = None
        """All its batches, if they are small enough to keep in memory until they are applied."""
        self.files: list[int] = []
        """LSNs that hold references to journal files, one per file."""
        self.live: Any = None

    @property
    def xid(self) -> str:
        """The name of the transaction."""
        return self.origin.xid

    def places(self) -> Iterator[int]:
        """Iterate over the LSNs of its batches in the journal."""
        return filter(None, self.locations[0::WORDS])

    @property
    def empty(self) -> bool:
        """Whether it has no messages, written or queued."""
        return not self.messages and not self.queued


class Target(NamedTuple):
    """The part of a decision for one partition.

    `last_ordinal` is the ordinal of its last message. Once the partition's applied position reaches it, the
    whole part is applied.
    """

    log_id: int
    topic: str
    messages: int
    size_bytes: int
    last: int


class Slice(NamedTuple):
    """What goes into a partition in one append. `last`: number of its last message, counted from 1 over the whole
    decision. `pieces`: for each batch the index of the piece that it is, or is a part of, over the whole decision;
    a part after the first has -1. `lost`: (number of the first, count) of messages that a repair gave up.
    """

    batches: Sequence[Batch]
    last: int
    size_bytes: int
    pieces: Sequence[int]
    lost: Sequence[tuple[int, int]] = ()


class Decision:
    """A commit recorded in the journal, of one transaction or of all members of a commit group.

    Messages are numbered from 1 over all transactions in order, and within each in send order. The
    numbering never changes, so after any crash an ordinal shows how much of the decision a partition has.
    """

    __slots__ = ("_plans", "_targets", "place", "time_ms", "transactions")

    def __init__(self, lsn: int, time_ms: int, transactions: Sequence[Transaction]) -> None:
        self.place = lsn
        self.time_ms = time_ms
        self.transactions = transactions
        self._targets: dict[int, Target] | None = None
        self._plans: dict[int, array[int]] = {}

    @property
    def targets(self) -> dict[int, Target]:
        """Target partitions by log id, in the order of their first batch; computed on first use."""
        if self._targets is None:
            self.count()
        assert self._targets is not None
        return self._targets

    @property
    def offsets(self) -> list[GroupPlaces]:
        """The consumer offsets of all its transactions, in order."""
        return [places for each in self.transactions for places in each.offsets]

    def rows(self, log_id: int) -> "array[int]":
        """Return four words per batch of one partition; empty if the decision has none for it.

        The words are: LSN, ordinal of the first message, count and size packed as in `BatchLocations`, and
        the index of the batch within the decision.
        """
        if self._targets is None:
            self.count()
        return self._plans.get(log_id, NOTHING)

    def release(self) -> None:
        """Free the memory of `targets` and `partition_rows`; they are computed again on the next use."""
        self._targets = None
        self._plans = {}

    @property
    def batches(self) -> int:
        """The number of batches of all its transactions."""
        return sum(each.locations.rows for each in self.transactions)

    def count(self) -> None:
        """Compute `targets` and `partition_rows`, at about half a microsecond per batch.

        May run in a worker thread, before anything uses `targets` or `partition_rows`.
        """
        plans: dict[int, array[int]] = {}
        number, index = 1, 0
        for transaction in self.transactions:
            words = transaction.locations
            for lsn, log_id, count_size in zip(
                words[0::WORDS], words[1::WORDS], words[2::WORDS], strict=True
            ):
                if log_id != LOST:
                    plan = plans.get(log_id)
                    if plan is None:
                        plan = plans[log_id] = array("Q")
                    plan.extend((lsn, number, count_size, index))
                number += count_size >> SIZE_BITS
                index += 1
        self._plans = plans
        names = {log_id: name for each in self.transactions for log_id, name in each.topics.items()}
        self._targets = {log_id: _target(log_id, names, plan) for log_id, plan in plans.items()}


def _target(log_id: int, names: dict[int, str], plan: "array[int]") -> Target:
    count_sizes = plan[2::ROW_WORDS]
    messages = sum(count_size >> SIZE_BITS for count_size in count_sizes)
    size_bytes = sum(count_size & SIZE_MASK for count_size in count_sizes)
    last = plan[-3] + (plan[-2] >> SIZE_BITS) - 1
    return Target(log_id, names.get(log_id, ""), messages, size_bytes, last)
