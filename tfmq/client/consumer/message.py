"""A message as a consumer gets it: made in one step from the columns of a block, its attribute read when asked for.

It is a tuple underneath, because nothing else is made as cheaply a million times a second; use its names, not its
places. What all messages of one control block share stands in their `Origin`, and an attribute that all of them
share is decoded once.
"""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import lru_cache
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, Protocol, cast

from tfmq.errors import DecodeFailed, NotAllowed
from tfmq.message import Attribute, decode_attribute

DECODED_KEPT: Final = 64
"""Decoded attributes that are remembered: several fields of one message are read one after the other."""
NO_ATTRIBUTE: Final = Attribute()
SHOWN_CHARACTERS: Final = 40
"""Of a key or a tag, in a `repr`."""


if TYPE_CHECKING:  # typing has the default only from Python 3.13 on
    from typing_extensions import TypeVar

    Value = TypeVar("Value", default=Any)
    Made = TypeVar("Made", covariant=True, default=Any)
else:
    from typing import TypeVar

    Value = TypeVar("Value")
    Made = TypeVar("Made", covariant=True)


class Codec(Protocol[Made]):
    """Turns payloads into values; `tfmq.codecs` has some."""

    def decode(self, data: bytes, /) -> Made: ...


class MessageContext(Protocol):
    """What `message.handling()` returns: `with` it, and `async with` it when the consumer is an asyncio one."""

    def __enter__(self) -> "MessageContext": ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> bool: ...

    async def __aenter__(self) -> "MessageContext": ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> bool: ...


class FailureHandler(Protocol):
    """What a consumer does about messages whose handling fails."""

    def context(self, message: "ReceivedMessage[Any]", tracebacks: bool) -> MessageContext:
        """Return the context in which one message is handled."""
        ...


class Origin:
    """What the messages of one control block share: `incarnation` of the topic, `append_ms` (ms since 1970) when
    the broker wrote it, `epoch` of the log then, the consumer's `codec`, and what handles its messages' failures."""

    __slots__ = ("_appended_at", "append_ms", "codec", "epoch", "handler", "incarnation")

    def __init__(
        self,
        incarnation: int,
        append_ms: int,
        epoch: int,
        codec: Codec | None,
        handler: "FailureHandler | None" = None,
    ) -> None:
        self.incarnation = incarnation
        self.append_ms = append_ms
        self.epoch = epoch
        self.codec = codec
        self.handler = handler
        self._appended_at: datetime | None = None

    @property
    def appended_at(self) -> datetime:
        found = self._appended_at
        if found is None:
            found = self._appended_at = moment(self.append_ms)
        return found


class LazyAttribute:
    """A record's attribute, decoded when the first field is asked for, and once.

    Fields: `key`, `tag`, `properties`, `attempts`, `redrives`, `born_at` (aware, UTC; None where the sender did not
    say). `data`: its bytes.
    """

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
        """A slot is empty: fill all of them. Raises DecodeFailed."""
        if name not in self.__slots__:
            raise AttributeError(name)
        attribute = decode_attribute(self.data) if self.data else NO_ATTRIBUTE
        self.key, self.tag, self.properties = attribute.key, attribute.tag, attribute.properties
        self.attempts, self.redrives = attribute.attempts, attribute.redrives
        self.born_at = None if attribute.born_ms is None else moment(attribute.born_ms)
        return object.__getattribute__(self, name)


_opened = lru_cache(DECODED_KEPT)(LazyAttribute)


def shortened(text: str) -> str:
    """At most `SHOWN_CHARACTERS` of it."""
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[: SHOWN_CHARACTERS - 3]}..."


def moment(time_ms: int) -> datetime:
    """A time in ms since 1970 as an aware datetime. Raises DecodeFailed for one that no calendar has."""
    try:
        return datetime.fromtimestamp(time_ms / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        raise DecodeFailed(f"A message names a time that no calendar has: {time_ms} ms since 1970.") from None


class _Fields(NamedTuple):
    payload: bytes | None
    topic: str
    partition: int
    offset: int
    next_offset: int
    ordinal: int
    id: int
    attribute: LazyAttribute | bytes | None
    origin: Origin


class ReceivedMessage(_Fields, Generic[Value]):
    """One message that was read.

    `payload`: bytes, None for a tombstone · `topic`, `partition` · `offset`: its place in the partition, in bytes ·
    `next_offset`: where reading goes on behind it · `ordinal`: how many messages came before it in the partition ·
    `id`: unique in the broker for ever. The rest is worked out when asked for; what cannot be decoded raises
    DecodeFailed.
    """

    __slots__ = ()

    @property
    def key(self) -> bytes | str | None:
        """What keeps messages in order, as it was sent."""
        attribute = self.attribute
        return attribute.key if attribute.__class__ is LazyAttribute else _opened(attribute).key

    @property
    def tag(self) -> str | None:
        """The word to filter by."""
        attribute = self.attribute
        return attribute.tag if attribute.__class__ is LazyAttribute else _opened(attribute).tag

    @property
    def properties(self) -> dict[str, str]:
        """Text by name; the caller's own copy."""
        attribute = self.attribute
        found = attribute if attribute.__class__ is LazyAttribute else _opened(attribute)
        return dict(found.properties)

    @property
    def born_at(self) -> datetime | None:
        """When the sender made it (aware, UTC), by the sender's clock; None if it did not say."""
        attribute = self.attribute
        return attribute.born_at if attribute.__class__ is LazyAttribute else _opened(attribute).born_at

    @property
    def appended_at(self) -> datetime:
        """When the broker wrote it (aware, UTC)."""
        return self.origin.appended_at

    @property
    def attempts(self) -> int:
        """How often its handling failed before, as far as it travels with the message."""
        attribute = self.attribute
        return attribute.attempts if attribute.__class__ is LazyAttribute else _opened(attribute).attempts

    @property
    def redrives(self) -> int:
        """How often it had been a dead letter, and was sent again by `tfmq dlq redrive`."""
        attribute = self.attribute
        return attribute.redrives if attribute.__class__ is LazyAttribute else _opened(attribute).redrives

    @property
    def attribute_bytes(self) -> bytes | None:
        """The attribute as it stands in the record, whether it can be decoded or not; None without one."""
        attribute = self.attribute
        return attribute.data if isinstance(attribute, LazyAttribute) else attribute

    @property
    def text(self) -> str:
        """The payload as UTF-8 text; "" for a tombstone. Raises DecodeFailed."""
        try:
            return (self.payload or b"").decode()
        except UnicodeDecodeError as error:
            raise self._unreadable(f"the payload is not UTF-8 text ({error})") from None

    def json(self) -> Any:
        """The payload parsed as JSON; None for a tombstone. Raises DecodeFailed."""
        if self.payload is None:
            return None
        try:
            return json.loads(self.payload)
        except ValueError as error:
            raise self._unreadable(f"the payload is not JSON ({error})") from None

    def handling(self, *, tracebacks: bool = True) -> "MessageContext":
        """Around the body of a loop: `with message.handling():` hands the message out again when the body raises, and
        makes it a dead letter in the end, as `run` does. With asyncio it is `async with`. `tracebacks`: False: what the
        body raises is logged with its class only. Raises NotAllowed for a message that no consumer gave."""
        if self.origin.handler is None:
            raise NotAllowed("handling() is for a message that a consumer gave to a loop.")
        return self.origin.handler.context(self, tracebacks)

    @property
    def value(self) -> Value:
        """The payload as the consumer's codec reads it, the bytes without one; None for a tombstone."""
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
        """Where it stands, its key and tag, and the size of its payload; never the payload."""
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
