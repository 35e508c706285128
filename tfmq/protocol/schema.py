"""The kinds of fields that requests and replies have: what each takes from the wire, and how a page names it.

`kind.check(value, name)` gives the value as the code uses it, or raises `BadRequest` with a sentence that
names the field. A request is a NamedTuple whose annotations carry the kind: `offset: Annotated[int, Whole(0,
9)]`, so that types, defaults and checks have one source.
"""

from typing import Annotated, Any, Generic, NamedTuple, NoReturn, Protocol, TypeVar, get_type_hints

from tfmq import limits
from tfmq.bounded_msgpack import Malformed, check_depth
from tfmq.errors import BadRequest


class Kind(Protocol):
    """What a field takes."""

    @property
    def text(self) -> str:
        """The kind in the words of docs/protocol.md."""
        ...

    def check(self, value: Any, name: str) -> Any: ...


def _refuse(name: str, wanted: str, value: Any) -> NoReturn:
    shown = repr(value) if isinstance(value, int | float | str | None) else type(value).__name__
    raise BadRequest(f"The field {name} must be {wanted}, not {shown[:80]}.")


class Whole:
    """A whole number from `low` to `high`, both included."""

    def __init__(self, low: int, high: int, text: str = "") -> None:
        self.low, self.high = low, high
        self.text = text or f"{low}..{high}"

    def check(self, value: Any, name: str) -> int:
        if type(value) is int and self.low <= value <= self.high:
            return value
        _refuse(name, f"a whole number from {self.low} to {self.high}", value)


class Flag:
    """True or false."""

    text = "bool"

    def check(self, value: Any, name: str) -> bool:
        if type(value) is bool:
            return value
        _refuse(name, "true or false", value)


class Text:
    """A text of at most `size` bytes in UTF-8; not "" where `empty` is false."""

    def __init__(self, size: int = limits.TEXT_BYTES, empty: bool = True) -> None:
        self.size, self.empty = size, empty
        self.text = f"str of {'at most' if empty else '1 to'} {size:d} bytes"

    def check(self, value: Any, name: str) -> str:
        if type(value) is str and (value or self.empty) and self._fits(value):
            return value
        _refuse(name, f"a text of {'at most' if self.empty else '1 to'} {self.size:d} bytes", value)

    def _fits(self, value: str) -> bool:
        """Whether it is short enough. A text off the wire is valid UTF-8; a lone surrogate never gets here."""
        return len(value) * 4 <= self.size or len(value.encode()) <= self.size


class Octets:
    """At most `size` bytes, in whole pieces of `piece` bytes; not b"" where these are more than one."""

    def __init__(self, size: int, piece: int = 1, text: str = "") -> None:
        self.size, self.piece = size, piece
        self.text = text or f"bin of at most {size:d} bytes"

    def check(self, value: Any, name: str) -> bytes:
        fits = type(value) is bytes and len(value) <= self.size and not len(value) % self.piece
        if fits and (value or self.piece == 1):
            return bytes(value)
        if type(value) is bytes and len(value) > self.size:
            raise BadRequest(f"The field {name} has {len(value)} bytes, {self.size:d} at most are allowed.")
        _refuse(name, self.text, value)


class Name:
    """A name as `limits.valid_name` has it; "" too where `empty` says so."""

    def __init__(self, empty: bool = False) -> None:
        self.empty = empty
        self.text = 'name or ""' if empty else "name"

    def check(self, value: Any, name: str) -> str:
        if type(value) is str and (limits.valid_name(value) or (self.empty and not value)):
            return value
        _refuse(name, "a name of 1 to 249 letters, digits, '.', '_' or '-', and not '.' or '..'", value)


class Map:
    """A map from text to plain values."""

    text = "map"

    def check(self, value: Any, name: str) -> dict[str, Any]:
        if type(value) is dict and len(value) <= limits.MAP_ITEMS and all(type(key) is str for key in value):
            try:
                check_depth(value)
            except Malformed as error:
                raise BadRequest(f"The field {name} is {error}.") from None
            return value
        _refuse(name, f"a map from text, with at most {limits.MAP_ITEMS:d} entries", value)


class Optional:
    """`kind`, or nil."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.text = f"{kind.text}, or nil"

    def check(self, value: Any, name: str) -> Any:
        return None if value is None else self.kind.check(value, name)


class ListOf:
    """A list of at most `count` of `kind`."""

    def __init__(self, kind: Kind, count: int) -> None:
        self.kind, self.count = kind, count
        self.text = f"list of {kind.text}"

    def check(self, value: Any, name: str) -> list[Any]:
        if type(value) is not list or len(value) > self.count:
            _refuse(name, f"a list of at most {self.count:d} entries", value)
        check = self.kind.check
        return [check(item, name) for item in value]


_new = tuple.__new__
Tuple = TypeVar("Tuple", bound=tuple[Any, ...])


class Row(Generic[Tuple]):
    """An array read into a NamedTuple: missing trailing fields take their defaults, further ones are
    ignored.
    """

    def __init__(self, shape: type[Tuple]) -> None:
        self.shape = shape
        hints = get_type_hints(shape, include_extras=True)
        self.names: tuple[str, ...] = tuple(hints)
        self.kinds: tuple[Kind, ...] = tuple(hint.__metadata__[0] for hint in hints.values())
        self.defaults: dict[str, Any] = shape._field_defaults  # type: ignore[attr-defined]
        # Most fields are whole numbers: those are compared in place, (1, 0) sends the others to their kind.
        self._columns = tuple(
            (kind.low, kind.high, kind.check, name) if type(kind) is Whole else (1, 0, kind.check, name)
            for kind, name in zip(self.kinds, self.names, strict=True)
        )

    @property
    def text(self) -> str:
        return f"[{', '.join(self.names)}]"

    def check(self, value: Any, name: str) -> Tuple:
        if type(value) is not list:
            _refuse(name, f"a list {self.text}", value)
        return self.read(value, name)

    def read(self, values: list[Any], name: str, start: int = 0) -> Tuple:
        """The NamedTuple made of `values[start:]`. Raises `BadRequest` for a wrong field."""
        fields = [
            value if type(value) is int and low <= value <= high else check(value, field)
            for value, (low, high, check, field) in zip(
                values[start:] if start else values, self._columns, strict=False
            )
        ]
        if len(fields) < len(self.names):
            self._complete(fields, name)
        return _new(self.shape, fields)

    def _complete(self, fields: list[Any], name: str) -> None:
        for field in self.names[len(fields) :]:
            if field not in self.defaults:
                raise BadRequest(f"{name} lacks its field {field}.")
            fields.append(self.defaults[field])


# The parts that several commands share: the types of single fields, and the rows that their lists hold.
#
# Each type is the Python type together with its kind, what the wire may bring there.

# What a send waits for, and what an answer says was reached.
ACKS_NONE, ACKS_WRITTEN, ACKS_SYNCED = 0, 1, 2
EPOCH_UNKNOWN = ORDINAL_UNKNOWN = SEQUENCE_NONE = -1

_U32 = Whole(0, (1 << 32) - 1, "u32")
_U63 = Whole(0, (1 << 63) - 1, "u63")

Size = Annotated[int, _U32]
Offset = Annotated[int, _U63]
Number = Annotated[int, _U63]
Signed = Annotated[int, Whole(-1, (1 << 63) - 1, "u63, or -1")]
TimeMs = Annotated[int, _U63]
Identity = Annotated[int, Whole(1, (1 << 64) - 1, "u64, not 0")]
Incarnation = Annotated[int, Whole(0, (1 << 40) - 1, "u40")]
ProducerId = Annotated[int, Whole(1, (1 << 40) - 1, "u40, not 0")]
Sequence = Annotated[int, Whole(0, (1 << 24) - 1, "u24")]
SignedSequence = Annotated[int, Whole(-1, (1 << 24) - 1, "u24, or -1")]
Partition = Annotated[int, Whole(0, (1 << 24) - 1, "u24")]
PartitionOrNil = Annotated[int | None, Optional(Whole(0, (1 << 24) - 1, "u24"))]
Partitions = Annotated[int, Whole(1, limits.PARTITIONS_PER_TOPIC.cap)]
Acks = Annotated[int, Whole(ACKS_NONE, ACKS_SYNCED)]
Topic = Annotated[str, Name()]
Group = Annotated[str, Name()]
Member = Annotated[str, Name(empty=True)]
Words = Annotated[str, Text()]
Plain = Annotated[dict[str, Any], Map()]
Yes = Annotated[bool, Flag()]
# The number of a transaction from the broker's one counter, never given twice; and the name that people and
# other systems give it.
TransactionEpoch = Annotated[int, Whole(1, (1 << 63) - 1, "u63, not 0")]
Xid = Annotated[str, Text(limits.XID_BYTES, empty=False)]

# When messages are due, u64 each, as many as there are records. The top bit says that the rest is a delay in ms,
# counted from the moment at which the broker takes it; else it is a moment, ms since 1970 by the wall clock.
DUE_RELATIVE = 1 << 63
DUE_MAX = DUE_RELATIVE - 1
DUE_BYTES = 8
_DUES = Octets(DUE_BYTES * limits.BATCH_RECORDS_DELAYED, DUE_BYTES, "bin of one u64 a record")
DuesOrNil = Annotated[bytes | None, Optional(_DUES)]


class Block(NamedTuple):
    """One block of a batch: whole records, with the CRC-32 of all their bytes."""

    size: Annotated[int, Whole(1, (1 << 32) - 1, "u32, not 0")]
    count: Annotated[int, Whole(1, limits.BATCH_RECORDS, "u32, not 0")]  # type: ignore[assignment]
    crc: Size


class Position(NamedTuple):
    """From record `first_record` of the batch on, records lie back to back starting at `offset`."""

    first_record: Size
    offset: Offset


class PartitionRow(NamedTuple):
    partition: Partition
    state: Words


class TopicRow(NamedTuple):
    name: Topic
    incarnation: Incarnation
    partitions: Annotated[list[PartitionRow], ListOf(Row(PartitionRow), limits.PARTITIONS_PER_TOPIC.cap)]
    settings: Plain


class PartitionName(NamedTuple):
    topic: Topic
    partition: Partition


class GroupOffset(NamedTuple):
    """Where a group goes on: at `offset`, behind `index` messages of the record there (0 outside of
    batches).
    """

    topic: Topic
    incarnation: Incarnation
    partition: Partition
    offset: Offset
    index: Size = 0  # type: ignore[assignment]
    epoch: Signed = EPOCH_UNKNOWN


class SavedOffset(NamedTuple):
    topic: Topic
    incarnation: Incarnation
    partition: Partition
    offset: Offset
    index: Size  # type: ignore[assignment]
    epoch: Signed
    generation: Number


class GrantedPartition(NamedTuple):
    """A partition that a member of a group has; `grant` is the generation under which it was given."""

    topic: Topic
    incarnation: Incarnation
    partition: Partition
    grant: Number


class HeldPartition(NamedTuple):
    """A partition that a member still works on; `leaving` says that it knows that this is to end."""

    topic: Topic
    incarnation: Incarnation
    partition: Partition
    leaving: Yes = False


class TransactionBatch(NamedTuple):
    """One batch of a TRANSACT: the next `size` bytes of the body."""

    topic: Topic
    incarnation: Incarnation
    partition: Partition
    sequence: Sequence
    count: Annotated[int, Whole(1, limits.BATCH_RECORDS)]  # type: ignore[assignment]
    size: Annotated[int, Whole(1, (1 << 32) - 1, "u32, not 0")]
    blocks: Annotated[list[Block], ListOf(Row(Block), limits.BATCH_BLOCKS)]
    due: DuesOrNil = None


class DelayedBatch(NamedTuple):
    """A delayed batch as the broker took it: message n has the number `first_number` + n, and is due at number n of
    `dues`. A message's handle is made of these.
    """

    store_id: Identity
    log_id: Identity
    first_number: Number
    dues: Annotated[bytes, _DUES]


class TransactionDelayed(NamedTuple):
    """The delayed batch with that index among all of a transaction, as the broker took it: as DelayedBatch, but one due
    time alone is that of all its messages.
    """

    batch: Size
    store_id: Identity
    log_id: Identity
    first_number: Number
    dues: Annotated[bytes, _DUES]


class TransactionOffsets(NamedTuple):
    """Where a consumer group goes on once the transaction is committed."""

    group: Group
    member: Member
    generation: Number
    offsets: Annotated[list[GroupOffset], ListOf(Row(GroupOffset), limits.OFFSETS_PER_COMMIT)]


class CommitMember(NamedTuple):
    """What a transaction is a member of: the commit group, its sequence there, and the run that made it."""

    group: Group
    sequence: Number
    run: Group


class TransactionName(NamedTuple):
    xid: Xid
    epoch: TransactionEpoch


GrantedPartitions = Annotated[list[GrantedPartition], ListOf(Row(GrantedPartition), limits.PARTITIONS.cap)]
PartitionNamesOrNil = Annotated[
    list[PartitionName] | None, Optional(ListOf(Row(PartitionName), limits.PARTITIONS.cap))
]
SessionMs = Annotated[int, Whole(limits.SESSION_MS_MIN, limits.SESSION_MS.cap)]
Topics = Annotated[list[str], ListOf(Name(), limits.TOPICS.cap)]
Blocks = Annotated[list[Block], ListOf(Row(Block), limits.BATCH_BLOCKS)]
Positions = Annotated[list[Position], ListOf(Row(Position), limits.BATCH_BLOCKS)]
GroupOffsets = Annotated[list[GroupOffset], ListOf(Row(GroupOffset), limits.OFFSETS_PER_COMMIT)]
FencedPartitions = Annotated[list[PartitionName], ListOf(Row(PartitionName), limits.OFFSETS_PER_COMMIT)]
SavedOffsets = Annotated[list[SavedOffset], ListOf(Row(SavedOffset), limits.PARTITIONS.cap)]
HeldPartitions = Annotated[list[HeldPartition], ListOf(Row(HeldPartition), limits.PARTITIONS.cap)]
TransactionBatches = Annotated[list[TransactionBatch], ListOf(Row(TransactionBatch), limits.TRANSACT_BATCHES)]
OffsetsInside = Annotated[
    list[TransactionOffsets], ListOf(Row(TransactionOffsets), limits.TRANSACTION_OFFSET_GROUPS)
]
SentDelayed = Annotated[list[TransactionDelayed], ListOf(Row(TransactionDelayed), limits.TRANSACT_BATCHES)]
SentOffsets = Annotated[
    list[int], ListOf(Whole(-1, (1 << 63) - 1, "u63, or -1"), limits.TRANSACTION_PIECES.cap)
]


class Subscription(NamedTuple):
    """What a member of a group asked for when it joined."""

    topics: Topics
    session_ms: SessionMs
    strategy: Words
    only: PartitionNamesOrNil = None


SubscriptionOrNil = Annotated[Subscription | None, Optional(Row(Subscription))]
