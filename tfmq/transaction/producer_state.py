"""Transactional streams: who sent what into transactions, so that nothing is taken twice or with a gap.

A producer lends each transaction a stream of its own: a producer id whose sequences are contiguous over all
partitions, and whose transactions bear growing numbers. Per stream the next sequence and the last number, with
what became of it, are kept. They are folded from journal entries, so they survive restarts. Idle streams are
forgotten, and so are the longest idle of too many; what is forgotten leaves a floor: an unknown id at or below it
may have sent before, so it is never taken for a new one.

What is queued for the journal is *staged* on top: it counts for whoever comes next, and goes again if it is not
written.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from tfmq.errors import BadRequest, SequenceGap, UnknownProducer, UnknownTransaction

LeasedMs = Callable[[int], int | None]
"""When (wall clock, ms) an id was leased, at the latest; None if it never was."""

NO_NUMBER: Final = -1

NOT_STAMPED: Final = 0
"""Seen by records, which bear no time: the next operation's is its time."""

NUMBER_OVER = (
    "The stream's transaction {number} is over and later ones have begun: what became of it is not remembered"
    " by number. Ask for it by its name, if it has one."
)
HALF_KNOWN = (
    "Some of the sequences {first}..{last} are in the journal and the rest is not, or they belong to another"
    " transaction. Repeat batches as they were sent first."
)


class Ending(NamedTuple):
    """What a stream's last number led to. `state` "" while it is not decided, else "prepared", "committed" or
    "rolled_back".
    """

    epoch: int
    state: str


class Stream:
    """One producer id. `next` is the sequence that must come, `begin` the first one of the transaction
    `begin_epoch`, to which the last records belong. `number`, `epoch`, `state`: the last ending. `seen_ms`: wall clock,
    or NOT_STAMPED.
    """

    __slots__ = ("begin", "begin_epoch", "epoch", "next", "number", "seen_ms", "state")

    def __init__(self) -> None:
        self.next = self.begin = self.begin_epoch = 0
        self.number = NO_NUMBER
        self.epoch = 0
        self.state = ""
        self.seen_ms = 0


class Streams:
    """The streams, the longest idle first."""

    def __init__(self, *, streams_max: int, idle_ms: int, leased_ms: LeasedMs) -> None:
        self._streams_max = streams_max
        self._idle_ms = idle_ms
        self._leased_ms = leased_ms
        self.clear()

    def clear(self) -> None:
        """Nothing, as before the first entry."""
        self.floor = 0
        self.torn = False
        """Whether a repair of the journal gave up records, ever: what is not here may have been."""
        self._streams: OrderedDict[int, Stream] = OrderedDict()
        self._staged: dict[int, tuple[int, int, int]] = {}
        """Producer id -> (epoch, first sequence of it, next sequence), where records are queued."""
        self._begun: dict[int, tuple[int, int]] = {}
        """Producer id -> (number, epoch) of its latest transaction that has no record yet."""
        self._fresh: set[int] = set()
        """Producer ids of streams that are not stamped."""

    def __len__(self) -> int:
        return len(self._streams)

    @property
    def highest(self) -> int:
        """The highest id that the journal says was given out; 0 if it knows none."""
        return max((self.floor, *self._streams))

    # What may be taken

    def find(self, producer_id: int, number: int, now_ms: int) -> Ending | None:
        """What the request `number` of the stream (TRANSACT, BEGIN) led to; None if it is new.

        Raises UnknownTransaction for a number below the last (its outcome is not remembered), UnknownProducer for
        an id that was forgotten or never leased.
        """
        begun = self._begun.get(producer_id)
        stream = self._streams.get(producer_id)
        if begun is not None and begun[0] == number:
            return Ending(begun[1], "")
        if stream is not None and stream.number == number:
            return Ending(stream.epoch, stream.state)
        if stream is None and begun is None and producer_id not in self._staged:
            self._require_new(producer_id, now_ms)
        last = max(begun[0] if begun else NO_NUMBER, stream.number if stream else NO_NUMBER)
        if number < last:
            raise UnknownTransaction(NUMBER_OVER.format(number=number))
        return None

    def check(self, producer_id: int, epoch: int, sequence: int, count: int, now_ms: int) -> bool:
        """True if these records are in the transaction `epoch` already, or on the way there; False if they come next.

        Raises SequenceGap, UnknownProducer, BadRequest (some known and some not, or known from another transaction).
        """
        staged = self._staged.get(producer_id)
        if staged is not None:
            begin_epoch, begin, expected = staged
        else:
            stream = self._streams.get(producer_id)
            if stream is None:
                self._require_new(producer_id, now_ms)
                if sequence:
                    raise UnknownProducer(producer_id=producer_id)
                return False
            begin_epoch, begin, expected = stream.begin_epoch, stream.begin, stream.next
        if sequence == expected:
            return False
        if sequence > expected:
            raise SequenceGap(expected=expected, found=sequence)
        if begin_epoch == epoch and begin <= sequence and sequence + count <= expected:
            return True
        raise BadRequest(HALF_KNOWN.format(first=sequence, last=sequence + count - 1))

    def next(self, producer_id: int) -> int:
        """The sequence that must come next of a stream for which `find` has raised nothing; 0 for a new one."""
        staged = self._staged.get(producer_id)
        if staged is not None:
            return staged[2]
        stream = self._streams.get(producer_id)
        return stream.next if stream is not None else 0

    def _require_new(self, producer_id: int, now_ms: int) -> None:
        """Raises UnknownProducer unless an id without a stream is so young that it cannot have been forgotten."""
        leased = self._leased_ms(producer_id)
        if producer_id <= self.floor or leased is None or leased + self._idle_ms < now_ms:
            raise UnknownProducer(producer_id=producer_id)

    # What is on the way

    def begin(self, producer_id: int, number: int, epoch: int) -> None:
        """The request `number` has begun `epoch`; nothing of it is in the journal."""
        self._begun[producer_id] = (number, epoch)

    def give_up(self, producer_id: int, number: int) -> None:
        """The transaction of that number is gone without a record."""
        begun = self._begun.get(producer_id)
        if begun is not None and begun[0] == number:
            del self._begun[producer_id]

    def stage(self, producer_id: int, epoch: int, sequence: int, count: int) -> None:
        """Records that passed `check` are queued."""
        staged = self._staged.get(producer_id)
        if staged is not None:
            begin_epoch, begin, _ = staged
        else:
            stream = self._streams.get(producer_id)
            begin_epoch, begin = (stream.begin_epoch, stream.begin) if stream is not None else (0, 0)
        if begin_epoch != epoch:
            begin = sequence
        self._staged[producer_id] = (epoch, begin, sequence + count)

    def unstage(self) -> None:
        """What was queued is not going to be written, none of it."""
        self._staged.clear()

    # The fold

    def sent(self, producer_id: int, epoch: int, sequence: int, count: int) -> int:
        """Records are in the journal; how many before them are missing, which only happens where a repair lost some."""
        stream = self._touch(producer_id, NOT_STAMPED)
        self._fresh.add(producer_id)
        missing = sequence - stream.next
        if stream.begin_epoch != epoch:
            stream.begin_epoch, stream.begin = epoch, sequence
        stream.next = sequence + count
        staged = self._staged.get(producer_id)
        if staged is not None and staged[2] == stream.next:
            del self._staged[producer_id]
        return max(0, missing)

    def ended(self, producer_id: int, number: int, epoch: int, state: str, time_ms: int) -> None:
        """The transaction that the request `number` began is now `state`, by a record in the journal."""
        stream = self._touch(producer_id, time_ms)
        self._fresh.discard(producer_id)
        if number >= stream.number:
            stream.number, stream.epoch, stream.state = number, epoch, state
        self.give_up(producer_id, number)

    def expire(self, now_ms: int) -> None:
        """An operation's time: what sent since the one before is as young; streams idle longer than allowed go."""
        streams = self._streams
        for producer_id in self._fresh:
            streams[producer_id].seen_ms = now_ms
        self._fresh.clear()
        while streams and next(iter(streams.values())).seen_ms + self._idle_ms < now_ms:
            self._forget_idlest()

    def _touch(self, producer_id: int, time_ms: int) -> Stream:
        """The stream, made if need be, moved behind all others."""
        stream = self._streams.get(producer_id)
        if stream is None:
            stream = self._streams[producer_id] = Stream()
            if len(self._streams) > self._streams_max:
                self._forget_idlest()
        else:
            self._streams.move_to_end(producer_id)
        stream.seen_ms = time_ms
        return stream

    def _forget_idlest(self) -> None:
        producer_id, _ = self._streams.popitem(last=False)
        self._fresh.discard(producer_id)
        self.floor = max(self.floor, producer_id)

    # Snapshots

    def dump(self) -> tuple[Any, ...]:
        """What is in the journal of all streams, as plain values."""
        rows = [
            (id, s.next, s.begin, s.begin_epoch, s.number, s.epoch, s.state, s.seen_ms)
            for id, s in self._streams.items()
        ]
        return (self.floor, rows, self.torn)

    def load(self, fields: Sequence[Any]) -> None:
        """Starts from what `dump` gave. Raises ValueError or TypeError if it is none."""
        self.clear()
        self.floor, rows = fields[:2]
        self.torn = bool(fields[2]) if len(fields) > 2 else True
        for id, *row in rows:
            stream = self._streams[id] = Stream()
            stream.next, stream.begin, stream.begin_epoch, stream.number = row[:4]
            stream.epoch, stream.state, stream.seen_ms = row[4:7]
            if stream.seen_ms == NOT_STAMPED:
                self._fresh.add(id)
