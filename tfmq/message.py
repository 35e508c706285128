"""Types that producers and consumers share, and the codec of a record's attribute.

The attribute of a record is one msgpack map with small integers as keys, in ascending order (docs/protocol.md). Readers
ignore unknown keys.
"""

from collections.abc import Mapping
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, Final, NamedTuple

from tfmq import limits
from tfmq.bounded_msgpack import Buffer, Malformed, pack, unpack
from tfmq.errors import DecodeFailed, MessageTooLarge

# Keys of the attribute map. They are never reused with another meaning.
BORN_AT: Final = 1
KEY: Final = 2
TAG: Final = 3
PROPERTIES: Final = 4
DELAY: Final = 5  # reserved: the delay of a message, in ms
ATTEMPTS: Final = 6
REDRIVES: Final = 7

BORN_MS_MAX: Final = 253_402_300_799_999  # the end of the year 9999, the latest that `datetime` supports

_COUNT_KEYS: Final = frozenset({ATTEMPTS, REDRIVES})
_NO_PROPERTIES: Final[dict[str, str]] = {}  # shared, never modified
_new = tuple.__new__

Payload = bytes | bytearray | memoryview | str | None
Key = bytes | str


class Message(NamedTuple):
    """A message to send. `payload` None is a tombstone; types other than bytes and text need a codec.

    `key`: messages with the same key keep their order · `tag`: one word for filters · `properties`: text to text ·
    `partition`: replaces the selector's choice · `delay` (seconds or timedelta) or `deliver_at` (aware datetime, or
    seconds since 1970): the delivery time of a delayed message.
    """

    payload: Any
    key: bytes | bytearray | memoryview | str | None = None
    tag: str | None = None
    properties: Mapping[str, str] | None = None
    partition: int | None = None
    delay: float | timedelta | None = None
    deliver_at: datetime | float | None = None


class Attribute(NamedTuple):
    """The decoded attribute of a record.

    `born_ms`: when the sender created the message, in ms since 1970, or None · `attempts`: how often a handler of the
    message failed · `redrives`: how often the message was a dead letter and was sent again.
    """

    born_ms: int | None = None
    key: bytes | str | None = None
    tag: str | None = None
    properties: Mapping[str, str] = {}
    attempts: int = 0
    redrives: int = 0


class SendResult(NamedTuple):
    """The result of one message, or of `count` consecutive messages of one batch.

    `offset` and `message_id` are those of the first message; `offset` is None where it is unknown (a delayed message,
    or acks "none"). `durability`: "replicated", "synced", "written" or "none". `delayed`: the handle of a delayed
    message, or a sequence of handles for several. `delayed` is None in three cases: the messages have no delay; another
    process commits their transaction; the broker's reply was lost, and the broker no longer has the handle.
    """

    topic: str
    partition: int
    offset: int | None
    message_id: int
    durability: str
    count: int = 1  # type: ignore[assignment]
    delayed: Any = None


class Ordinal(NamedTuple):
    """A start position: the n-th message of a partition, counted from 0."""

    number: int


class PartitionState(StrEnum):
    """The state of a partition. A stopped one accepts no appends; in a damaged one a range cannot be read."""

    OPEN = "open"
    STOPPED = "stopped"
    DAMAGED = "damaged"


class Partition(NamedTuple):
    """One partition of a topic, for selectors. `state`: see `PartitionState`."""

    topic: str
    number: int
    state: str = PartitionState.OPEN

    @property
    def writable(self) -> bool:
        return self.state != PartitionState.STOPPED


def text_bytes(text: str) -> bytes:
    """Encode text as UTF-8. Raises UnicodeEncodeError with advice for a text that UTF-8 cannot encode."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        reason = f"{error.reason}; the text of a payload is sent as UTF-8: give bytes for anything other"
        raise UnicodeEncodeError("utf-8", text, error.start, error.end, reason) from None


def payload_bytes(payload: Any) -> bytes | bytearray | memoryview | None:
    """Return the payload as it is stored. Raises `TypeError` for a type that needs a codec."""
    if isinstance(payload, str):
        return text_bytes(payload)
    if payload is None or isinstance(payload, bytes | bytearray):
        return payload
    if isinstance(payload, memoryview):
        return payload.cast("B") if payload.contiguous else payload.tobytes()
    raise TypeError(
        f"A payload is bytes or text, not {type(payload).__name__}: give the producer a codec, for example"
        " codec=tfmq.codecs.json."
    )


def key_bytes_or_text(key: bytes | bytearray | memoryview | str | None) -> bytes | str | None:
    """Return the key as it is stored. Raises `TypeError` for types other than bytes and text."""
    if key is None or isinstance(key, str | bytes):
        return key
    if isinstance(key, bytearray | memoryview):
        return bytes(key)
    raise TypeError(f"A key is bytes or text, not {type(key).__name__}.")


def encode_attribute(
    born_ms: int | None = None,
    key: bytes | str | None = None,
    tag: str | None = None,
    properties: Mapping[str, str] | None = None,
    attempts: int = 0,
) -> bytes:
    """Encode the attribute. The result is b"" if all values are empty: the record then has no attribute.

    Raises `TypeError` for values that are not text, `MessageTooLarge` for values above a limit, `ValueError` for text
    that UTF-8 cannot encode or a time out of range.
    """
    attribute: dict[int, Any] = {}
    if born_ms is not None:
        if not 0 <= born_ms <= BORN_MS_MAX:
            raise ValueError(f"born_ms counts from 1970 to the year 9999, it cannot be {born_ms}")
        attribute[BORN_AT] = born_ms
    if key is not None:
        attribute[KEY] = _check_size("key", key_bytes_or_text(key), limits.KEY_BYTES)
    if tag:
        attribute[TAG] = _check_size("tag", _check_text("tag", tag), limits.TAG_BYTES)
    if properties:
        attribute[PROPERTIES] = _check_properties(properties)
    if attempts:
        attribute[ATTEMPTS] = attempts
    if not attribute:
        return b""
    packed = pack(attribute)
    _check_size("attribute (key, tag and properties together)", packed, limits.ATTRIBUTE_BYTES)
    return packed


def _check_text(name: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    raise TypeError(f"A {name} is text, not {type(value).__name__}.")


def _check_size(name: str, value: Any, most: int) -> Any:
    size = len(value.encode()) if isinstance(value, str) else len(value)
    if size > most:
        raise MessageTooLarge(f"The message's {name} has {size} bytes, {most:d} are allowed: put it into the payload.")
    return value


def _check_properties(properties: Mapping[str, str]) -> dict[str, str]:
    if not isinstance(properties, Mapping):
        raise TypeError(f"Properties are a map of text to text, not {type(properties).__name__}.")
    if len(properties) > limits.PROPERTIES:
        raise MessageTooLarge(f"The message has {len(properties)} properties, {limits.PROPERTIES:d} are allowed.")
    return {
        _check_text("property's name", name): _check_size(
            f"property {name}", _check_text(f"property ({name})", value), limits.PROPERTY_BYTES
        )
        for name, value in properties.items()
    }


def decode_attribute(data: Buffer) -> Attribute:
    """Decode an attribute. Raises `DecodeFailed` for bytes that are no valid attribute."""
    get = _decode_map(data).get
    born_ms, key, tag = get(BORN_AT), get(KEY), get(TAG)
    properties, attempts, redrives = get(PROPERTIES, _NO_PROPERTIES), get(ATTEMPTS, 0), get(REDRIVES, 0)
    if born_ms is not None and not (type(born_ms) is int and 0 <= born_ms <= BORN_MS_MAX):
        raise _wrong_type_error("time of birth")
    if key is not None and type(key) is not str and type(key) is not bytes:
        raise _wrong_type_error("key")
    if tag is not None and type(tag) is not str:
        raise _wrong_type_error("tag")
    if type(attempts) is not int or attempts < 0:
        raise _wrong_type_error("number of attempts")
    if type(redrives) is not int or redrives < 0:
        raise _wrong_type_error("number of redrives")
    if type(properties) is not dict:
        raise _wrong_type_error("set of properties")
    for name, value in properties.items():
        if type(name) is not str or type(value) is not str:
            raise _wrong_type_error("set of properties")
    return _new(Attribute, (born_ms, key, tag, properties, attempts, redrives))


def replace_counts(data: Buffer | None, attempts: int, redrives: int) -> bytes:
    """Return the attribute `data` (None: no attribute) with these counts. All other keys, also unknown ones, are kept.

    Raises `DecodeFailed` for an invalid attribute, `MessageTooLarge` if the counts do not fit.
    """
    found = _decode_map(data) if data else {}
    found.update({ATTEMPTS: attempts, REDRIVES: redrives})
    packed = pack({key: value for key, value in found.items() if value or key not in _COUNT_KEYS})
    _check_size("attribute (key, tag and properties together)", packed, limits.ATTRIBUTE_BYTES)
    return packed


def _decode_map(data: Buffer) -> dict[Any, Any]:
    size = len(data)
    if size > limits.ATTRIBUTE_BYTES:
        raise DecodeFailed(f"An attribute of {size} bytes is larger than any that can be sent.")
    try:
        found = unpack(data, text_keys=False)
    except Malformed as error:
        raise DecodeFailed(f"A message's attribute cannot be read: {error}.") from None
    if type(found) is not dict:
        raise _wrong_type_error("attribute")
    return found


def _wrong_type_error(what: str) -> DecodeFailed:
    return DecodeFailed(f"A message's {what} has an unknown type: use a newer client.")
