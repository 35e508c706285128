"""The handle of a delayed message, which identifies it on the broker that issued it.

    "d" + base32 (RFC 4648, lower case, no padding) of
    store id u64 · log id u64 · due u64 · number u64 · CRC-32 of these 32 bytes u32, big-endian

`due` and `number` are the message's position in the delay queue, so that the broker finds it with one lookup; `log id`
identifies its partition. `store id` identifies the broker's delay store and the epoch in which the number was given. If
a broker runs on an older copy of its data folder, it gives the same numbers again, but in another epoch. Because of the
checksum a handle with a typing error is rejected, and does not identify another message: the checksum detects every
wrong character, every two swapped characters, and all but one in 2^32 of other errors.
"""

from __future__ import annotations

import binascii
from array import array
from base64 import b32decode, b32encode
from collections.abc import Sequence
from hashlib import blake2b
from struct import Struct
from sys import byteorder
from typing import Any, Final, NamedTuple, NoReturn, overload

from journal.crc32 import crc32
from tfmq.errors import BadRequest

HANDLE_LETTER: Final = "d"
"""First character of every handle. Another kind of identifier would have another letter."""
HANDLE_LENGTH: Final = 59
"""Number of characters of a handle."""

_FIELDS: Final = Struct(">QQQQ")
_NUMBER: Final = Struct(">Q")
_CHECKSUM: Final = Struct(">I")
_PADDING: Final = 6
"""Padding characters "=" that base32 appends to 36 bytes."""
_NUMBER_MAX: Final = (1 << 63) - 1


class Handle(NamedTuple):
    """The fields of a handle.

    `store_id` is the result of `issuer`. `due` is in ms since 1970 of broker time. `store_id` and `log_id` are u64, not
    0; `due` and `number` are u63.
    """

    store_id: int
    log_id: int
    due: int
    number: int


def format_handle(handle: Handle) -> str:
    """Return the text of a handle. Raises ValueError if a number is out of range."""
    fits = min(handle.store_id, handle.log_id) > 0 and max(handle.store_id, handle.log_id) < 1 << 64
    if not fits or not 0 <= min(handle.due, handle.number) <= max(handle.due, handle.number) <= _NUMBER_MAX:
        raise ValueError(f"{handle} cannot be the handle of a message")
    return _format_fields(_FIELDS.pack(*handle))


def _format_fields(fields: bytes) -> str:
    return HANDLE_LETTER + b32encode(fields + _CHECKSUM.pack(crc32(fields))).decode().lower()[:-_PADDING]


def parse_handle(text: str) -> Handle:
    """Parse a handle. Raises BadRequest for anything that `format_handle` does not return."""
    if len(text) != HANDLE_LENGTH or not text.startswith(HANDLE_LETTER) or text != text.lower():
        _reject(text)
    try:
        data = b32decode(text[1:].upper() + "=" * _PADDING)
    except (binascii.Error, ValueError):
        _reject(text)
    fields = data[: _FIELDS.size]
    if _format_fields(fields) != text:
        _reject(text)
    handle = Handle(*_FIELDS.unpack(fields))
    if not handle.store_id or not handle.log_id or max(handle.due, handle.number) > _NUMBER_MAX:
        _reject(text)
    return handle


def _reject(text: str) -> NoReturn:
    shown = text if len(text) <= HANDLE_LENGTH + 10 else f"{text[:HANDLE_LENGTH]}..."
    raise BadRequest(
        f"This is no handle of a delayed message: {shown!r}. Handles have {HANDLE_LENGTH} characters and a checksum:"
        " copy it whole from SendResult.delayed or `tfmq delay list`."
    )


def issuer(node: str, store_id: int, epoch: int | None = None) -> int:
    """Return the field `store_id` of handles, a u64 that is not 0, by which a broker recognizes its own handles.

    The field is a hash of three values: the broker's random id `node`; the id of its delay store, which other brokers
    may use too; and the epoch of the arrival log in which the messages got their numbers. `epoch` None: without an
    epoch, as in handles of earlier releases.
    """
    words = (node, store_id) if epoch is None else (node, store_id, epoch)
    digest = blake2b("/".join(map(str, words)).encode(), digest_size=_NUMBER.size).digest()
    return int(_NUMBER.unpack(digest)[0]) or 1


class Handles(Sequence[str]):
    """The handles of messages that were sent together and have consecutive numbers.

    A handle is formatted only when it is read, so that the handles of a large batch take eight bytes per message.
    """

    __slots__ = ("_dues", "_first_number", "_log_id", "_store_id")

    def __init__(self, store_id: int, log_id: int, first_number: int, dues: array[int]) -> None:
        self._store_id = store_id
        self._log_id = log_id
        self._first_number = first_number
        self._dues = dues

    def __len__(self) -> int:
        return len(self._dues)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Handles: ...
    def __getitem__(self, index: int | slice) -> str | Handles:
        if isinstance(index, slice):
            first, _, step = index.indices(len(self))
            if step != 1:
                raise ValueError("handles are cut in one piece: they are numbered one after the other")
            return Handles(self._store_id, self._log_id, self._first_number + first, self._dues[index])
        position = index + len(self) if index < 0 else index
        due = self._dues[position] if position >= 0 else self._dues[index]
        return format_handle(Handle(self._store_id, self._log_id, due, self._first_number + position))

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Sequence) and not isinstance(other, str) and list(self) == list(other)

    def __hash__(self) -> int:
        return hash((self._store_id, self._first_number, len(self)))

    def __repr__(self) -> str:
        return f"<Handles of {len(self)} delayed messages>"


def decode_due_times(packed: bytes) -> array[int]:
    """Decode due times from the wire: u64, big-endian. The length of `packed` must be a multiple of 8."""
    dues = array("Q", packed)
    if byteorder == "little":
        dues.byteswap()
    return dues


def encode_due_times(dues: array[int]) -> bytes:
    """Encode due times for the wire: u64, big-endian."""
    if byteorder == "little":
        dues = dues[:]
        dues.byteswap()
    return dues.tobytes()
