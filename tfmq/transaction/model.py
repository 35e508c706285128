"""One transaction as the broker's memory has it: who began it, how far it is, and where its messages lie.

Messages live in the journal; what is kept here of a batch is 24 bytes, so that a transaction of gigabytes
costs kilobytes.
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
"""Numbers kept of a batch: its place in the journal, its log's id, and its count and size in one."""

ENTRY_BYTES: Final = HEADER_SIZE + MESSAGES.size
"""What a batch has in the journal beside its messages and blocks: of tiny ones the greater part."""

SIZE_BITS: Final = 32
SIZE_MASK: Final = (1 << SIZE_BITS) - 1

ROW_WORDS: Final = 4
"""Numbers of a row of `Decision.rows`."""

LOST: Final = 0
"""The log id of messages that a repair of the journal lost: they keep their numbers, and go nowhere."""

NOTHING: Final = array("Q")


class Piece(NamedTuple):
    """A batch on its way into a transaction. `topic` is for people, `blocks` and `data` as
    `journal.record.batch.Batch`.

    `data` need only stay unchanged until the turn ends: the store takes a copy of what must wait longer.
    """

    log_id: int
    topic: str
    producer_id: int
    sequence: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody needs here
    blocks: Sequence[tuple[int, int, int]]
    data: Buffer


class Location(NamedTuple):
    """Where one batch lies: `place` of its entry in the journal; `count` messages of `size_bytes` in all."""

    place: int
    log_id: int
    count: int  # type: ignore[assignment]
    size_bytes: int


class Locations(array):  # type: ignore[type-arg]
    """The batches of a transaction in the order sent, packed; `array` in all but the views by row."""

    __slots__ = ()

    def __new__(cls, words: Sequence[int] | bytes = ()) -> "Locations":
        return super().__new__(cls, "Q", words)  # type: ignore[return-value]

    def add(self, place: int, log_id: int, count: int, size_bytes: int) -> None:
        self.extend((place, log_id, count << SIZE_BITS | size_bytes))

    @property
    def rows(self) -> int:
        """How many batches."""
        return len(self) // WORDS

    def __call__(self) -> Iterator[Location]:
        """Every batch in turn."""
        for place, log_id, both in zip(self[0::WORDS], self[1::WORDS], self[2::WORDS], strict=True):
            yield Location(place, log_id, both >> SIZE_BITS, both & SIZE_MASK)


def packed(words: "array[int]") -> bytes:
    """Locations as bytes, big-endian on every machine; `words` is not used again."""
    if sys.byteorder == "little":
        words.byteswap()
    return words.tobytes()


def unpacked(data: bytes) -> Locations:
    """What `packed` was given. Raises ValueError."""
    locations = Locations()
    locations.frombytes(data)
    if len(locations) % WORDS:
        raise ValueError("locations that end inside one")
    if sys.byteorder == "little":
        locations.byteswap()
    return locations


class Transaction:
    """See the module. Made by the store; only the store's folds change what is durable of it.

    `state` one of `states`; `topics` log id -> name; `offsets` of groups, known from the prepare or the decision
    on. `prepared_ms`, `expires_ms` (0 never), `decided_ms`: wall clock, 0 if not. `decision`: None before it is
    decided. `settled`: nothing of it is needed in the journal any more. `lost`: messages that a repair of the
    journal lost; they are counted in `messages`. `live` belongs to the handler: sessions, timers, who waits.
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
        """Messages that are on their way to the journal."""
        self.size_bytes = 0
        """Of its messages, once each."""
        self.place = 0
        """Of the record that made its state; 0 if an earlier life wrote it, or none did."""
        self.decision: Decision | None = None
        self.settled = False
        self.cached: Sequence[Batch] | None = None
        """All its batches while they are few, small, and not yet in their partitions."""
        self.files: list[int] = []
        """Places at which the journal's files are held for it, one in each."""
        self.live: Any = None

    @property
    def xid(self) -> str:
        return self.origin.xid

    def places(self) -> Iterator[int]:
        """Where its batches lie in the journal."""
        return filter(None, self.locations[0::WORDS])

    @property
    def empty(self) -> bool:
        """No messages are in it, or on their way."""
        return not self.messages and not self.queued


class Target(NamedTuple):
    """What a decision brings to one partition. `last`: the number of its last message, which is the low part of
    the position that says that all of it is there.
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
    """A commit that is in the journal at `place`: of one transaction, or of all members of a commit group.

    Messages are numbered from 1 over all transactions in their order, each one's batches in the order sent. That
    numbering never changes, so it says after any crash how far a partition has come.
    """

    __slots__ = ("_plans", "_targets", "place", "time_ms", "transactions")

    def __init__(self, place: int, time_ms: int, transactions: Sequence[Transaction]) -> None:
        self.place = place
        self.time_ms = time_ms
        self.transactions = transactions
        self._targets: dict[int, Target] | None = None
        self._plans: dict[int, array[int]] = {}

    @property
    def targets(self) -> dict[int, Target]:
        """Every partition that it goes to, in the order first sent to; counted at the first call."""
        if self._targets is None:
            self.count()
        assert self._targets is not None
        return self._targets

    @property
    def offsets(self) -> list[GroupPlaces]:
        """Offsets of groups of all its transactions, in their order."""
        return [places for each in self.transactions for places in each.offsets]

    def rows(self, log_id: int) -> "array[int]":
        """For each batch of one partition four numbers: its place, the number of its first message, count and size as
        in `Locations`, and its index over the whole decision. Empty if nothing goes there.
        """
        if self._targets is None:
            self.count()
        return self._plans.get(log_id, NOTHING)

    def release(self) -> None:
        """Gives the memory of `targets` and `rows` back; the next call counts again."""
        self._targets = None
        self._plans = {}

    @property
    def batches(self) -> int:
        """How many there are to be counted."""
        return sum(each.locations.rows for each in self.transactions)

    def count(self) -> None:
        """Works out `targets` and `rows`, half a microsecond a batch; in a worker too, before anybody asks for them."""
        plans: dict[int, array[int]] = {}
        number, index = 1, 0
        for transaction in self.transactions:
            words = transaction.locations
            for place, log_id, both in zip(words[0::WORDS], words[1::WORDS], words[2::WORDS], strict=True):
                if log_id != LOST:
                    plan = plans.get(log_id)
                    if plan is None:
                        plan = plans[log_id] = array("Q")
                    plan.extend((place, number, both, index))
                number += both >> SIZE_BITS
                index += 1
        self._plans = plans
        names = {log_id: name for each in self.transactions for log_id, name in each.topics.items()}
        self._targets = {log_id: _target(log_id, names, plan) for log_id, plan in plans.items()}


def _target(log_id: int, names: dict[int, str], plan: "array[int]") -> Target:
    boths = plan[2::ROW_WORDS]
    messages = sum(both >> SIZE_BITS for both in boths)
    size_bytes = sum(both & SIZE_MASK for both in boths)
    last = plan[-3] + (plan[-2] >> SIZE_BITS) - 1
    return Target(log_id, names.get(log_id, ""), messages, size_bytes, last)
