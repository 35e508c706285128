"""A message as a consumer receives it; the attribute is decoded on first access.

A message is a tuple, because a tuple is the object that is created fastest; use the names of the fields, not the
indexes. Values that all messages of one block share are in their `Origin`. If all messages of a block have the same
attribute, it is decoded once.
"""

import json
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, Protocol, cast

from tfmq.errors import DecodeFailed, NotAllowed
from tfmq.message import Attribute, decode_attribute
from tfmq.offsets.storage import PartitionName

DECODED_MAX: Final = 64
"""Size of the cache of decoded attributes, so that reading several fields of a message decodes its attribute once."""
NO_ATTRIBUTE: Final = Attribute()
REPR_CHARACTERS: Final = 40
"""Maximum length of a key or a tag in a `repr`."""


if TYPE_CHECKING:  # typing.TypeVar has `default` only from Python 3.13 on
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


@dataclass(slots=True, eq=False, repr=False)
class Origin:
    """Values that the messages of one block share.

    `incarnation`: that of the topic · `append_ms`: when the broker appended the block, in ms since 1970 · `epoch`: the
    log's epoch at that time · `codec`: that of the consumer · `handler`: creates the contexts of `handling()`.
    """

    incarnation: int
    append_ms: int
    epoch: int
    codec: Codec | None
    handler: "FailureHandler | None" = None
    _appended_at: datetime | None = field(default=None, init=False)

    @property
    def appended_at(self) -> datetime:
        """When the broker appended the block (aware, UTC)."""
        found = self._appended_at
        if found is None:
            found = self._appended_at = utc_datetime(self.append_ms)
        return found


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


_cached_attribute = lru_cache(DECODED_MAX)(LazyAttribute)


def shortened(text: str) -> str:
    return text if len(text) <= REPR_CHARACTERS else f"{text[: REPR_CHARACTERS - 3]}..."


def utc_datetime(time_ms: int) -> datetime:
    """Convert ms since 1970 to an aware datetime. Raises DecodeFailed for a time out of range."""
    try:
        return datetime.fromtimestamp(time_ms / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        raise DecodeFailed(f"A message names a time that no calendar has: {time_ms} ms since 1970.") from None


class ReceivedMessage(NamedTuple, Generic[Value]):
    """One received message.

    `payload`: bytes, None for a tombstone · `topic`, `partition` · `offset`: byte position in the partition ·
    `next_offset`: offset at which reading continues after this message · `ordinal`: number of messages before it in the
    partition · `id`: unique in the broker. The other properties are decoded when they are accessed, and raise
    DecodeFailed if that fails.
    """

    payload: bytes | None
    topic: str
    partition: int
    offset: int
    next_offset: int
    ordinal: int
    id: int
    attribute: LazyAttribute | bytes | None
    origin: Origin

    @property
    def key(self) -> bytes | str | None:
        """The ordering key, bytes or text as it was sent; None if the message has no key."""
        attribute = self.attribute
        return attribute.key if attribute.__class__ is LazyAttribute else _cached_attribute(attribute).key

    @property
    def tag(self) -> str | None:
        """The tag, by which consumers can filter; None if the message has no tag."""
        attribute = self.attribute
        return attribute.tag if attribute.__class__ is LazyAttribute else _cached_attribute(attribute).tag

    @property
    def properties(self) -> dict[str, str]:
        """The text properties, as a new dict."""
        attribute = self.attribute
        found = attribute if attribute.__class__ is LazyAttribute else _cached_attribute(attribute)
        return dict(found.properties)

    @property
    def born_at(self) -> datetime | None:
        """When the sender created the message (aware, UTC, sender's clock); None if not set."""
        attribute = self.attribute
        found = attribute if attribute.__class__ is LazyAttribute else _cached_attribute(attribute)
        return found.born_at

    @property
    def appended_at(self) -> datetime:
        """When the broker appended the message (aware, UTC)."""
        return self.origin.appended_at

    @property
    def attempts(self) -> int:
        """If the message is a dead letter that was sent again: how often its handling had failed before; else 0.

        The number does not grow while `run` repeats a handler's calls.
        """
        attribute = self.attribute
        found = attribute if attribute.__class__ is LazyAttribute else _cached_attribute(attribute)
        return found.attempts

    @property
    def redrives(self) -> int:
        """How many times `tfmq dlq redrive` has sent this message again after it had become a dead letter."""
        attribute = self.attribute
        found = attribute if attribute.__class__ is LazyAttribute else _cached_attribute(attribute)
        return found.redrives

    @property
    def attribute_bytes(self) -> bytes | None:
        """The encoded attribute, also if it cannot be decoded; None if the message has none."""
        attribute = self.attribute
        return attribute.data if isinstance(attribute, LazyAttribute) else attribute

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
