"""A message as a consumer receives it; most of its fields are computed on access, the attribute is decoded then.

A message is a tuple of its payload, its row, and the `Origin` that it shares with some messages that were decoded with
it; the other fields are columns of the origin. A tuple is the object that is created fastest, and Python's garbage
collector visits every reference of every new one: with nine fields that took longer than everything else. A kept
message keeps its origin, so an origin has few rows, unless its size does not depend on their number.

Attributes with the same bytes are decoded once, as long as not many others are read between.
"""

import json
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import lru_cache
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, Protocol, cast

from tfmq.errors import DecodeFailed, NotAllowed
from tfmq.message import Attribute, decode_attribute
from tfmq.offsets.storage import PartitionName

CACHED_BYTES_MAX: Final = 1024
"""Maximum size of an attribute of which many are kept decoded."""
CACHED_MAX: Final = 256
"""Number of decoded attributes that are kept, so that equal ones, and the fields of one message, are decoded once."""
CACHED_LARGE_MAX: Final = 4
"""The same for larger attributes, of up to 256 KiB."""
NO_ATTRIBUTE: Final = Attribute()
REPR_CHARACTERS: Final = 40
"""Maximum length of a key or a tag in a `repr`."""


if TYPE_CHECKING:  # typing.TypeVar has `default` only from Python 3.13 on
    from typing import Self

    from typing_extensions import TypeVar

    Value = TypeVar("Value", default=Any)
    Made = TypeVar("Made", covariant=True, default=Any)
else:
    from typing import TypeVar

    Value = TypeVar("Value")
    Made = TypeVar("Made", covariant=True)


class Codec(Protocol[Made]):
    """Converts payloads into values; `tfmq.codecs` has implementations."""

    def decode(self, data: bytes, /) -> Made: ...


class MessageContext(Protocol):
    """Result of `message.handling()`, for `with`, or `async with` in an asyncio consumer."""

    def __enter__(self) -> "MessageContext": ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> bool: ...

    async def __aenter__(self) -> "MessageContext": ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> bool: ...


class FailureHandler(Protocol):
    """Creates the contexts that handle the failures of a consumer's messages."""

    def context(self, message: "ReceivedMessage[Any]", tracebacks: bool) -> MessageContext:
        """Return the context in which one message is handled."""


class LazyAttribute:
    """Attribute of a record, decoded when the first field is accessed. `data` is the encoded form."""

    __slots__ = ("attempts", "born_at", "data", "key", "properties", "redrives", "tag")

    key: bytes | str | None
    tag: str | None
    properties: Mapping[str, str]
    attempts: int
    redrives: int
    born_at: datetime | None

    def __init__(self, data: bytes | None) -> None:
        self.data = data

    def __getattr__(self, name: str) -> Any:
        """Decode the attribute and fill all slots. Raises DecodeFailed if the attribute is invalid."""
        if name not in self.__slots__:
            raise AttributeError(name)
        attribute = decode_attribute(self.data) if self.data else NO_ATTRIBUTE
        self.key, self.tag, self.properties = attribute.key, attribute.tag, attribute.properties
        self.attempts, self.redrives = attribute.attempts, attribute.redrives
        self.born_at = None if attribute.born_ms is None else utc_datetime(attribute.born_ms)
        return object.__getattribute__(self, name)


class AttributeCache(dict[bytes | None, LazyAttribute]):
    """Decoded attributes by their bytes: `cache[data]` is the attribute, also if it has to be created.

    A hit is one call of C, which `lru_cache` would be too, but that calls a function of Python for every size that it
    must not keep. A full cache is emptied: attributes that repeat are soon in it again.
    """

    def __missing__(self, data: bytes | None) -> LazyAttribute:
        if data is not None and len(data) > CACHED_BYTES_MAX:
            return _cached_large_attribute(data)
        if len(self) >= CACHED_MAX:
            self.clear()
        found = self[data] = LazyAttribute(data)
        return found


ATTRIBUTES: Final = AttributeCache()
_cached_large_attribute = lru_cache(CACHED_LARGE_MAX)(LazyAttribute)


@dataclass(slots=True, eq=False, repr=False)
class Origin:
    """Values that messages of one partition share, and the other values of each of them as columns.

    `incarnation`: that of the topic · `append_ms`: when the broker appended them, in ms since 1970 · `epoch`: the log's
    epoch at that time · `codec`: that of the consumer · `handler`: creates the contexts of `handling()` · `end`: the
    offset after the last of them. A message is one row of `offsets`, `ordinals`, `ids` and `attributes`, or all have
    the same `attribute`.
    """

    incarnation: int
    append_ms: int
    epoch: int
    codec: Codec | None
    handler: "FailureHandler | None" = None
    topic: str = ""
    partition: int = 0
    offsets: Sequence[int] = ()
    end: int = 0
    ordinals: Sequence[int] = ()
    ids: Sequence[int] = ()
    attributes: Sequence[bytes | None] = ()
    attribute: LazyAttribute | None = None
    _appended_at: datetime | None = field(default=None, init=False)

    @property
    def appended_at(self) -> datetime:
        """When the broker appended the block (aware, UTC)."""
        found = self._appended_at
        if found is None:
            found = self._appended_at = utc_datetime(self.append_ms)
        return found


def shortened(text: str) -> str:
    return text if len(text) <= REPR_CHARACTERS else f"{text[: REPR_CHARACTERS - 3]}..."


def utc_datetime(time_ms: int) -> datetime:
    """Convert ms since 1970 to an aware datetime. Raises DecodeFailed for a time out of range."""
    try:
        return datetime.fromtimestamp(time_ms / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        raise DecodeFailed(f"A message names a time that no calendar has: {time_ms} ms since 1970.") from None


class _Row(NamedTuple):
    payload: bytes | None
    row: int
    origin: Origin


class ReceivedMessage(tuple[Any, ...], Generic[Value]):
    """One received message.

    `payload`: bytes, None for a tombstone · `topic`, `partition` · `offset`: byte position in the partition ·
    `next_offset`: offset at which reading continues after this message · `ordinal`: number of messages before it in the
    partition · `id`: unique in the broker. The properties that are decoded when they are accessed raise DecodeFailed
    if that fails. Use the names of the fields, not the indexes of the tuple. Messages are ordered by topic, partition
    and offset, and equal if they are the same stored message. A message cannot be changed, so its copy is itself.
    """

    # Without a `__new__` in Python, the class creates an instance of a tuple in one call of C: `make_message` makes
    # one from the values of all fields. The descriptors of a NamedTuple read any tuple, and faster than a property.
    __slots__ = ()

    if TYPE_CHECKING:

        def __new__(cls, row: tuple[bytes | None, int, Origin], /) -> Self: ...

        @property
        def payload(self) -> bytes | None: ...

        @property
        def row(self) -> int: ...

        @property
        def origin(self) -> Origin: ...
    else:
        payload = _Row.payload
        row = _Row.row
        origin = _Row.origin

    def __copy__(self) -> "Self":
        """Return the message itself, which cannot change."""
        return self

    def __deepcopy__(self, memo: Any) -> "Self":
        """Return the message itself, which cannot change. Its consumer, to which it refers, cannot be copied."""
        return self

    def __eq__(self, other: object) -> bool:
        """Whether both are the same message: of the same incarnation of a topic, with the same place and payload."""
        if not isinstance(other, ReceivedMessage):
            return NotImplemented
        origins = self.origin.incarnation, other.origin.incarnation
        return self._place() == other._place() and self.payload == other.payload and origins[0] == origins[1]

    def __hash__(self) -> int:
        return hash(self._place())

    # Messages are ordered by their place, so that they can be sorted and put into a heap. In a tuple's own order they
    # would be sorted by payload, and two with the same payload could not be compared.

    def __lt__(self, other: tuple[Any, ...]) -> bool:
        return self._place() < other._place() if isinstance(other, ReceivedMessage) else NotImplemented

    def __le__(self, other: tuple[Any, ...]) -> bool:
        return self._place() <= other._place() if isinstance(other, ReceivedMessage) else NotImplemented

    def __gt__(self, other: tuple[Any, ...]) -> bool:
        return self._place() > other._place() if isinstance(other, ReceivedMessage) else NotImplemented

    def __ge__(self, other: tuple[Any, ...]) -> bool:
        return self._place() >= other._place() if isinstance(other, ReceivedMessage) else NotImplemented

    def _place(self) -> tuple[str, int, int]:
        return self.topic, self.partition, self.offset

    def _replace(self, **changes: Any) -> "ReceivedMessage[Value]":
        """Return a copy with other values of some arguments of `make_message`."""
        return make_message(**{**self._arguments(), **changes})

    def _arguments(self) -> dict[str, Any]:
        names = ("payload", "topic", "partition", "offset", "next_offset", "ordinal", "id")
        fields = {name: getattr(self, name) for name in names}
        return {**fields, "attribute": self.attribute_bytes, "origin": self.origin}

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy the message alone, without the handler of its consumer, which stays in its process."""
        shared = self.origin
        origin = Origin(shared.incarnation, shared.append_ms, shared.epoch, shared.codec)
        return make_message, (*[*self._arguments().values()][:-1], origin)

    @property
    def topic(self) -> str:
        return self.origin.topic

    @property
    def partition(self) -> int:
        return self.origin.partition

    @property
    def offset(self) -> int:
        """Position of the message in its partition, in bytes."""
        return self.origin.offsets[self.row]

    @property
    def next_offset(self) -> int:
        """Offset at which reading continues after this message."""
        origin, row = self.origin, self.row + 1
        return origin.offsets[row] if row < len(origin.offsets) else origin.end

    @property
    def ordinal(self) -> int:
        """Number of messages before this one in its partition."""
        return self.origin.ordinals[self.row]

    @property
    def id(self) -> int:
        """Id of the message, unique in the broker."""
        return self.origin.ids[self.row]

    @property
    def attribute(self) -> LazyAttribute:
        """The fields that the sender has set, decoded at the first access."""
        origin = self.origin
        return origin.attribute or ATTRIBUTES[origin.attributes[self.row]]

    # The properties below find the attribute themselves: another call between takes longer than the search for it.

    @property
    def key(self) -> bytes | str | None:
        """The ordering key, bytes or text as it was sent; None if the message has no key."""
        origin = self.origin
        return (origin.attribute or ATTRIBUTES[origin.attributes[self.row]]).key

    @property
    def tag(self) -> str | None:
        """The tag, by which consumers can filter; None if the message has no tag."""
        origin = self.origin
        return (origin.attribute or ATTRIBUTES[origin.attributes[self.row]]).tag

    @property
    def properties(self) -> dict[str, str]:
        """The text properties, as a new dict."""
        origin = self.origin
        return dict((origin.attribute or ATTRIBUTES[origin.attributes[self.row]]).properties)

    @property
    def born_at(self) -> datetime | None:
        """When the sender created the message (aware, UTC, sender's clock); None if not set."""
        origin = self.origin
        return (origin.attribute or ATTRIBUTES[origin.attributes[self.row]]).born_at

    @property
    def appended_at(self) -> datetime:
        """When the broker appended the message (aware, UTC)."""
        return self.origin.appended_at

    @property
    def attempts(self) -> int:
        """If the message is a dead letter that was sent again: how often its handling had failed before; else 0.

        The number does not grow while `run` repeats a handler's calls.
        """
        origin = self.origin
        return (origin.attribute or ATTRIBUTES[origin.attributes[self.row]]).attempts

    @property
    def redrives(self) -> int:
        """How many times `tfmq dlq redrive` has sent this message again after it had become a dead letter."""
        origin = self.origin
        return (origin.attribute or ATTRIBUTES[origin.attributes[self.row]]).redrives

    @property
    def attribute_bytes(self) -> bytes | None:
        """The encoded attribute, also if it cannot be decoded; None if the message has none."""
        origin = self.origin
        return origin.attributes[self.row] if origin.attribute is None else origin.attribute.data

    @property
    def text(self) -> str:
        """The payload as UTF-8 text; "" for a tombstone. Raises DecodeFailed if the payload is not UTF-8."""
        try:
            return (self.payload or b"").decode()
        except UnicodeDecodeError as error:
            raise self._unreadable(f"the payload is not UTF-8 text ({error})") from None

    def json(self) -> Any:
        """Parse the payload as JSON; None for a tombstone. Raises DecodeFailed if the payload is not JSON."""
        if self.payload is None:
            return None
        try:
            return json.loads(self.payload)
        except ValueError as error:
            raise self._unreadable(f"the payload is not JSON ({error})") from None

    def handling(self, *, tracebacks: bool = True) -> "MessageContext":
        """Return a context for a loop's body: `with message.handling():` (asyncio: `async with`).

        If the body raises, the message is delivered again, and finally becomes a dead letter, as in `run`. If
        `tracebacks` is False, only the class of the exception is logged. Raises NotAllowed for a message that no
        consumer delivered.
        """
        if self.origin.handler is None:
            raise NotAllowed("handling() is for a message that a consumer gave to a loop.")
        return self.origin.handler.context(self, tracebacks)

    @property
    def value(self) -> Value:
        """The payload decoded by the consumer's codec; the bytes if there is no codec; None for a tombstone.
        Raises DecodeFailed if the codec cannot decode the payload."""
        codec = self.origin.codec
        if codec is None or self.payload is None:
            return cast(Value, self.payload)
        try:
            return cast(Value, codec.decode(self.payload))
        except DecodeFailed:
            raise
        except Exception as error:
            raise self._unreadable(f"the codec cannot decode the payload ({error})") from error

    def __repr__(self) -> str:
        """Return position, key, tag and payload size; never the payload."""
        size = "tombstone" if self.payload is None else f"{len(self.payload)} bytes"
        words = [f"<message {self.topic}-{self.partition} offset {self.offset} ordinal {self.ordinal}"]
        try:
            named = {"key": self.key, "tag": self.tag}
        except DecodeFailed:
            named = {}
            words.append("with an attribute that cannot be read")
        words += [f"{name} {shortened(repr(each))}" for name, each in named.items() if each is not None]
        return f"{' '.join(words)}: {size}>"

    def _unreadable(self, reason: str) -> DecodeFailed:
        return DecodeFailed(f"{self.topic}-{self.partition} at offset {self.offset}: {reason}.")


def make_message(
    payload: bytes | None,
    topic: str,
    partition: int,
    offset: int,
    next_offset: int,
    ordinal: int,
    id: int,
    attribute: LazyAttribute | bytes | None,
    origin: Origin,
) -> ReceivedMessage[Any]:
    """Create a message alone, with the shared values of `origin`."""
    shared = replace(origin, topic=topic, partition=partition, offsets=(offset,), end=next_offset)
    shared.ordinals, shared.ids = (ordinal,), (id,)
    shared.attribute = attribute if isinstance(attribute, LazyAttribute) else LazyAttribute(attribute)
    return ReceivedMessage((payload, 0, shared))


UNKNOWN = -1


class ReadPosition(NamedTuple):
    """Offset, ordinal and log epoch from which a consumer reads on. `ordinal` and `epoch` are -1 if unknown."""

    offset: int
    ordinal: int = UNKNOWN
    epoch: int = UNKNOWN


class Batch(NamedTuple):
    """Messages of one partition in order. `end_position`: the position after these messages and after the filtered-out
    messages that follow them."""

    name: PartitionName
    messages: list[ReceivedMessage]
    end_position: ReadPosition

    def ends_with(self, message: ReceivedMessage) -> bool:
        """Return whether `message` is the last of the batch."""
        last = self.messages[-1:]  # A slice, because another thread may clear the list at any moment.
        return bool(last) and last[0] is message


def partition_of(message: ReceivedMessage) -> PartitionName:
    return PartitionName(message.topic, message.partition)


def position_after(message: ReceivedMessage) -> ReadPosition:
    return ReadPosition(message.next_offset, message.ordinal + 1, message.origin.epoch)


CURRENT_MESSAGE: ContextVar[ReceivedMessage | None] = ContextVar("tfmq_message_in_work", default=None)
"""The message of the running handler; None outside of handlers."""
