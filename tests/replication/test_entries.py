"""The objects that make up the log: names, bytes, the page that describes them, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from journal.crc32 import crc32
from journal.filenames import join
from tests import paths
from tfmq.bounded_msgpack import pack
from tfmq.replication import entries
from tfmq.replication.entries import (
    CRC,
    FORMAT,
    HEADER,
    NUMBER_MAX,
    Begin,
    Entry,
    EntryKind,
    Fence,
    Identity,
    Position,
    Term,
    decode_entry,
    encode_entry,
    entry_key,
    manifest_key,
    parse_position,
    parse_term,
    term_key,
)
from tfmq.replication.errors import InvalidObject, NewerObject
from tfmq.replication.operations import Kind, Operation, decode_operations, encode_header

GOLDEN = join(str(paths.TESTS), "golden/replication.hex")
PAGE = paths.TESTS.parent / "docs" / "formats" / "replication.md"
TIME_MS = 1_700_000_000_000
POSITION = Position(3, 2)
OPERATIONS = [
    Operation(Kind.MAKE_FOLDER, "orders-0"),
    Operation(Kind.CREATE, "orders-0/a"),
    Operation(Kind.WRITE, "orders-0/a", 256, b"hello"),
    Operation(Kind.TRUNCATE, "orders-0/a", 258),
    Operation(Kind.RENAME, "orders-0/a", target="orders-0/b"),
    Operation(Kind.UNLINK, "orders-0/b"),
    Operation(Kind.REMOVE_FOLDER, "orders-0"),
]
FOLDER, FIRST, SECOND = b"orders-0", b"orders-0/a", b"orders-0/b"
BODY: list[bytes | bytearray | memoryview] = [
    encode_header(Kind.MAKE_FOLDER, FOLDER, 0, 0),
    encode_header(Kind.CREATE, FIRST, 0, 0),
    encode_header(Kind.WRITE, b"", 256, 5),
    bytearray(b"hello"),
    encode_header(Kind.TRUNCATE, b"", 258, 0),
    encode_header(Kind.RENAME, b"", 0, len(SECOND)),
    memoryview(SECOND),
    encode_header(Kind.UNLINK, SECOND, 0, 0),
    encode_header(Kind.REMOVE_FOLDER, FOLDER, 0, 0),
]
WRITTEN: dict[str, bytes] = {
    "operations": encode_entry(EntryKind.OPERATIONS, POSITION, TIME_MS, BODY, len(OPERATIONS)),
    "begin": encode_entry(EntryKind.BEGIN, Position(3, 0), TIME_MS, [Begin(Position(2, 9), "m", "a:7").encode()]),
    "fence": encode_entry(EntryKind.FENCE, Position(2, 10), TIME_MS, [Fence("m", "n").encode()]),
    "identity": Identity("6d").encode(),
}


def golden() -> dict[str, bytes]:
    with open(GOLDEN) as file:
        return {name: bytes.fromhex(data) for name, data in (line.split() for line in file)}


def test_the_objects_are_written_as_ever() -> None:
    assert golden() == WRITTEN


def test_the_page_shows_the_golden_file() -> None:
    shown = re.findall(r"```hex\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert [bytes.fromhex(each) for each in shown] == list(golden().values())


def test_the_golden_objects_are_read_as_ever() -> None:
    found = golden()
    entry = decode_entry(found["operations"], POSITION)
    assert entry[:4] == (EntryKind.OPERATIONS, POSITION, TIME_MS, 7)
    assert list(decode_operations(entry.body)) == OPERATIONS
    begin = decode_entry(found["begin"], Position(3, 0))
    assert begin.kind == EntryKind.BEGIN and Begin.decode(begin) == Begin(Position(2, 9), "m", "a:7")
    assert Fence.decode(decode_entry(found["fence"], Position(2, 10))) == Fence("m", "n")
    assert Identity.decode(found["identity"]) == Identity("6d")


POSITIONS = st.builds(Position, st.integers(1, NUMBER_MAX), st.integers(0, NUMBER_MAX))


@given(POSITIONS, st.sampled_from(EntryKind), st.integers(0, 1 << 62), st.lists(st.binary(max_size=50), max_size=4))
def test_an_entry_is_decoded_as_it_was_encoded(
    position: Position, kind: EntryKind, time_ms: int, parts: list[bytes]
) -> None:
    data = encode_entry(kind, position, time_ms, parts, len(parts))
    entry = decode_entry(data, position)
    assert entry[:4] == (kind, position, time_ms, len(parts)) and bytes(entry.body) == b"".join(parts)


@given(POSITIONS, POSITIONS)
def test_keys_sort_as_positions_do_and_are_parsed(one: Position, other: Position) -> None:
    for key in (entry_key, manifest_key):
        assert parse_position(key(one)) == one
        assert (key(one) < key(other)) == (one < other)
    assert parse_term(term_key(one.term)) == one.term


@pytest.mark.parametrize(
    "key",
    [
        "", "replica", "entries/", "entries/0000000000000001", "entries/0000000000000001/000000000000000x",
        "entries/0000000000000001-0000000000000001", "manifests/0000000000000001/0000000000000001",
        "entries/1/1", "entries/+000000000000001/0000000000000001", "entries/٠000000000000001/0000000000000001",
        "xentries/0000000000000001/0000000000000001", "entries/0000000000000001/0000000000000001/x", "terms/1",
        "terms/0000000000000001/", "chunks/0000000000000001-0000000000000001",
    ],
)  # fmt: skip
def test_other_keys_are_not_parsed(key: str) -> None:
    assert parse_position(key) is None and parse_term(key) is None


# What is refused


def test_an_entry_that_is_cut_off_anywhere_is_refused() -> None:
    data = WRITTEN["operations"]
    for size in range(len(data)):
        with pytest.raises(InvalidObject):
            decode_entry(data[:size], POSITION)
    with pytest.raises(InvalidObject):
        decode_entry(data + b"\0", POSITION)


def test_an_entry_in_which_any_bit_is_wrong_is_refused() -> None:
    data = WRITTEN["operations"]
    for place in range(len(data) * 8):
        damaged = bytearray(data)
        damaged[place // 8] ^= 1 << place % 8
        with pytest.raises(InvalidObject):
            decode_entry(bytes(damaged), POSITION)


def forged(**fields: int) -> bytes:
    """An entry with other fields and a correct checksum."""
    names = ("version", "kind", "term", "slot", "time", "count")
    values = {**dict(zip(names, HEADER.unpack_from(WRITTEN["operations"])[1:], strict=True)), **fields}
    data = HEADER.pack(b"TFMR", *values.values()) + WRITTEN["operations"][HEADER.size : -CRC.size]
    return data + CRC.pack(crc32(data))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"term": 4}, "is the entry 2 of term 4"),
        ({"slot": 3}, "is the entry 3 of term 3"),
        ({"kind": 0}, "unknown kind 0"),
        ({"kind": 5}, "unknown kind 5"),
    ],
)
def test_an_entry_of_another_place_or_kind_is_refused(fields: dict[str, int], reason: str) -> None:
    assert decode_entry(forged(), POSITION).operation_count == 7
    with pytest.raises(InvalidObject, match=reason):
        decode_entry(forged(**fields), POSITION)


def body_of(kind: EntryKind, position: Position, body: bytes) -> Entry:
    return decode_entry(encode_entry(kind, position, 0, [body]), position)


def term_with(**fields: Any) -> bytes:
    known = {"format": FORMAT, "number": 3, **dict.fromkeys(Term._fields[1:], "x")}
    return pack({**known, **fields})


def test_an_object_of_a_newer_format_says_so() -> None:
    for call in (
        lambda: decode_entry(forged(version=FORMAT + 1), POSITION),
        lambda: Term.decode(term_with(format=FORMAT + 1), 3),
        lambda: Identity.decode(pack({"format": FORMAT + 1, "node": "x"})),
    ):
        with pytest.raises(NewerObject, match=f"format {FORMAT + 1}, this version knows up to {FORMAT}"):
            call()


def test_a_term_is_decoded_as_it_was_encoded() -> None:
    term = Term(3, *(f"{name} ä" for name in Term._fields[1:]))
    assert Term.decode(term.encode(), 3) == term
    with pytest.raises(InvalidObject, match="is the term 3"):
        Term.decode(term.encode(), 4)


def test_a_begin_without_a_parent_is_decoded_as_it_was_encoded() -> None:
    begin = Begin(None, "m", "a:7")
    assert Begin.decode(body_of(EntryKind.BEGIN, Position(1, 0), begin.encode())) == begin


@pytest.mark.parametrize(
    "decode",
    [
        lambda data: Begin.decode(body_of(EntryKind.BEGIN, Position(3, 0), data)),
        lambda data: Fence.decode(body_of(EntryKind.FENCE, Position(3, 4), data)),
        lambda data: Term.decode(data, 3),
        Identity.decode,
    ],
    ids=["begin", "fence", "term", "identity"],
)
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        pack([]),
        pack({}),
        pack({"format": 1, "number": 3, "member": 7, "address": "a", "successor": "b", "node": b"bytes", "nonce": "x"}),
        pack({"format": True, "number": 3, "member": None, "successor": "b", "node": None}),
    ],
)
def test_fields_that_are_missing_or_of_another_type_are_refused(decode: Callable[[bytes], object], data: bytes) -> None:
    with pytest.raises(InvalidObject):
        decode(data)


@pytest.mark.parametrize(
    "parent", [[3, 0], [4, 0], [0, 0], [-1, 0], [2, -1], [2, 10**16], [2], [2, 0, 0], 2, "2", [True, 0]]
)
def test_a_parent_that_is_no_earlier_entry_is_refused(parent: object) -> None:
    data = pack({"parent": parent, "member": "m", "address": "a"})
    with pytest.raises(InvalidObject, match="no earlier entry"):
        Begin.decode(body_of(EntryKind.BEGIN, Position(3, 0), data))


def test_the_names_of_the_kinds_have_the_numbers_that_are_stored() -> None:
    assert [(kind.name, kind.value) for kind in entries.EntryKind] == [
        ("OPERATIONS", 1), ("FENCE", 2), ("BEGIN", 3), ("BASE", 4)
    ]  # fmt: skip
