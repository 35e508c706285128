"""Objects of the store that make up the log of operations: names, entries, terms.

A *term* is the time of one primary, numbered from 1. Its entries have the slots 0, 1, 2, ... without gaps. Slot 0 is a
BEGIN, which names the entry of an earlier term that the new primary continues from. A FENCE ends a term: entries after
it do not count. docs/formats/replication.md describes the bytes.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from struct import Struct
from typing import Any, Final, NamedTuple, Self

from journal.crc32 import crc32
from tfmq.bounded_msgpack import Malformed, pack, unpack
from tfmq.replication.errors import InvalidObject, NewerObject

FORMAT: Final = 1
MAGIC: Final = b"TFMR"
HEADER: Final = Struct(">4sBBQQQI")
"""Magic, format, kind, term, slot, time (ms since 1970), number of operations. The body and the CRC-32 follow."""
CRC: Final = Struct(">I")
ENTRY_BYTES_MAX: Final = 64 << 20
"""No entry is larger: one is cut at CUT_BYTES, and a single write of a broker has at most the size of a frame."""
CUT_BYTES: Final = 4 << 20
"""An entry is cut when it has this many bytes."""
MEMBER_BYTES_MAX: Final = 64
"""Maximum size of the id of a member in a request for a hand-over."""
UNTIL_BYTES_MAX: Final = 15
NUMBER_MAX: Final = 10**16 - 1
"""Highest term and slot: names have 16 digits, so that they sort by number."""

ENTRIES: Final = "entries/"
TERMS: Final = "terms/"
MANIFESTS: Final = "manifests/"
CHUNKS: Final = "chunks/"
HANDOVERS: Final = "handovers/"
SWEEPS: Final = "sweeps/"
"""Objects that exist while a sweep is under way. It reads the store's clock from the time of its own."""
IDENTITY_KEY: Final = "replica"
"""The object that says which data folder this prefix belongs to. It is the first one that is stored."""


class Position(NamedTuple):
    """An entry: its term and slot. Positions compare as the entries of one history do."""

    term: int
    slot: int


def entry_key(position: Position) -> str:
    return f"{ENTRIES}{position.term:016d}/{position.slot:016d}"


def entries_prefix(term: int) -> str:
    return f"{ENTRIES}{term:016d}/"


def term_key(term: int) -> str:
    return f"{TERMS}{term:016d}"


def parse_handover(key: str) -> int | None:
    """Return the term in the key of a hand-over; None for other keys."""
    number = key.removeprefix(HANDOVERS)
    return int(number) if key.startswith(HANDOVERS) and _is_number(number) else None


def handover_key(term: int) -> str:
    return f"{HANDOVERS}{term:016d}"


def manifest_key(position: Position) -> str:
    """Key of a manifest of the folder after the entry at `position`."""
    return f"{MANIFESTS}{position.term:016d}-{position.slot:016d}"


def manifests_prefix(term: int) -> str:
    return f"{MANIFESTS}{term:016d}-"


def parse_position(key: str) -> Position | None:
    """Return the position in the key of an entry or a manifest; None for other keys."""
    for prefix, between in ((ENTRIES, "/"), (MANIFESTS, "-")):
        term, found, slot = key.removeprefix(prefix).partition(between)
        if key.startswith(prefix) and found and _is_number(term) and _is_number(slot):
            return Position(int(term), int(slot))
    return None


def parse_term(key: str) -> int | None:
    """Return the term in the key of a term; None for other keys."""
    number = key.removeprefix(TERMS)
    return int(number) if key.startswith(TERMS) and _is_number(number) else None


def _is_number(text: str) -> bool:
    return len(text) == 16 and text.isascii() and text.isdigit()


class EntryKind(enum.IntEnum):
    """What an entry is. The numbers are stored and never change."""

    OPERATIONS = 1
    """Its body has operations; none in a heartbeat."""
    FENCE = 2
    """Ends the term: this slot and all after it have no entry that counts."""
    BEGIN = 3
    """Slot 0 of a term."""
    BASE = 4
    """The folder is from here on what the manifest at this position describes, whatever it was before. No body: the
    manifest is stored first, under the position that this entry then gets."""


class Entry(NamedTuple):
    """A decoded entry. `body` is a view of its bytes; `time_ms`: when it was cut, by the clock of its primary, never
    before the entry before it."""

    kind: EntryKind
    position: Position
    time_ms: int
    operation_count: int
    body: memoryview


def encode_entry(
    kind: EntryKind, position: Position, time_ms: int, body: Sequence[bytes | bytearray | memoryview], count: int = 0
) -> bytes:
    """Return the bytes of an entry. `body`: its parts; `count`: how many operations are in it."""
    parts = (HEADER.pack(MAGIC, FORMAT, kind, *position, time_ms, count), *body)
    checksum = 0
    for part in parts:
        checksum = crc32(part, checksum)
    return b"".join((*parts, CRC.pack(checksum)))


def decode_entry(data: bytes, position: Position) -> Entry:
    """Decode what is stored as the entry at `position`. Raises InvalidObject, NewerObject."""
    view = memoryview(data)
    if len(data) < HEADER.size + CRC.size or bytes(view[:4]) != MAGIC:
        raise InvalidObject(f"{entry_key(position)} is no entry")
    _, version, kind, term, slot, time_ms, count = HEADER.unpack_from(data)
    if version > FORMAT:
        raise NewerObject(f"{entry_key(position)} has format {version}, this version knows up to {FORMAT}")
    end = len(data) - CRC.size
    if crc32(view[:end]) != CRC.unpack_from(data, end)[0]:
        raise InvalidObject(f"{entry_key(position)} fails its checksum")
    if Position(term, slot) != position:
        raise InvalidObject(f"{entry_key(position)} is the entry {slot} of term {term}")
    if kind not in _KINDS:
        raise InvalidObject(f"{entry_key(position)} has the unknown kind {kind}")
    return Entry(EntryKind(kind), position, time_ms, count, view[HEADER.size : end])


_KINDS: Final = frozenset(EntryKind)


class Begin(NamedTuple):
    """Body of a BEGIN. `parent`: the last entry that counts of the history before; None for the first term.

    `member` identifies the primary's process for good, `address` is where clients reach it.
    """

    parent: Position | None
    member: str
    address: str

    def encode(self) -> bytes:
        return pack({**self._asdict(), "parent": self.parent and list(self.parent)})

    @classmethod
    def decode(cls, entry: Entry) -> Self:
        """Raises InvalidObject."""
        fields = _fields(entry.body, entry_key(entry.position), {"member": str, "address": str})
        parent = fields.get("parent")
        return cls(None if parent is None else _position(parent, entry), fields["member"], fields["address"])


class Fence(NamedTuple):
    """Body of a FENCE. `member` has put it; `successor`: in a hand-over, the member that is to be primary, else ""."""

    member: str
    successor: str = ""

    def encode(self) -> bytes:
        return pack(self._asdict())

    @classmethod
    def decode(cls, entry: Entry) -> Self:
        """Raises InvalidObject."""
        fields = _fields(entry.body, entry_key(entry.position), {"member": str, "successor": str})
        return cls(fields["member"], fields["successor"])


class Term(NamedTuple):
    """The object of a term: which member has claimed it, and where clients reach that member.

    `nonce` is random. By it a claimant knows its own object, also if a copy of its folder is started elsewhere.
    """

    number: int
    member: str
    address: str
    nonce: str

    def encode(self) -> bytes:
        return pack({"format": FORMAT, **self._asdict()})

    @classmethod
    def decode(cls, data: bytes, number: int) -> Self:
        """Raises InvalidObject, NewerObject."""
        key = term_key(number)
        fields = _fields(data, key, {"format": int, "number": int, "member": str, "address": str, "nonce": str})
        if fields["format"] > FORMAT:
            raise NewerObject(f"{key} has format {fields['format']}, this version knows up to {FORMAT}")
        if fields["number"] != number:
            raise InvalidObject(f"{key} is the term {fields['number']}")
        return cls(number, fields["member"], fields["address"], fields["nonce"])


class HandOver(NamedTuple):
    """The object of a request for a hand-over. `member`: who is to be primary after the term.

    The request is void after `until_ms`, by the clock of the primary, as the standby knows it from its entries.
    """

    member: str
    until_ms: int

    def encode(self) -> bytes:
        return f"{self.member} {self.until_ms}".encode()

    @classmethod
    def decode(cls, data: bytes, term: int) -> Self:
        """Raises InvalidObject."""
        member, _, until = data.partition(b" ")
        if not 0 < len(member) <= MEMBER_BYTES_MAX or not member.isalnum():
            raise InvalidObject(f"{handover_key(term)} does not name a member")
        if not until.isdigit() or len(until) > UNTIL_BYTES_MAX:
            raise InvalidObject(f"{handover_key(term)} does not say until when it holds")
        return cls(member.decode("ascii"), int(until))


class Identity(NamedTuple):
    """The object at IDENTITY_KEY. `node`: the id in DATA/meta/version of the data folder that is replicated here."""

    node: str

    def encode(self) -> bytes:
        return pack({"format": FORMAT, **self._asdict()})

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Raises InvalidObject, NewerObject."""
        fields = _fields(data, IDENTITY_KEY, {"format": int, "node": str})
        if fields["format"] > FORMAT:
            raise NewerObject(f"{IDENTITY_KEY} has format {fields['format']}, this version knows up to {FORMAT}")
        return cls(fields["node"])


def _fields(data: bytes | memoryview, key: str, types: dict[str, type]) -> dict[str, Any]:
    """Return the fields of an object that is stored as msgpack, each of its type. Raises InvalidObject."""
    try:
        fields = unpack(bytes(data))
    except Malformed as error:
        raise InvalidObject(f"{key} cannot be read: {error}") from None
    if not isinstance(fields, dict) or any(type(fields.get(name)) is not kind for name, kind in types.items()):
        raise InvalidObject(f"{key} does not have the fields {', '.join(types)}")
    return fields


def _position(value: Any, entry: Entry) -> Position:
    is_pair = isinstance(value, list) and len(value) == 2 and all(type(each) is int for each in value)
    if not is_pair or not (0 < value[0] < entry.position.term and 0 <= value[1] <= NUMBER_MAX):
        raise InvalidObject(f"{entry_key(entry.position)} names no earlier entry")
    return Position(*value)
