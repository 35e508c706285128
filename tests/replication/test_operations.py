"""The encoding of operations, what is refused, and their application to another folder."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from journal.testing import SimulatedDisk
from tests.replication.followed_disk import DATA
from tfmq.replication import operations
from tfmq.replication.errors import InvalidObject
from tfmq.replication.operations import (
    HEADER,
    KINDS,
    LOCAL_NAMES,
    OPEN_FILES_MAX,
    RESERVE_PATH,
    Kind,
    Operation,
    OperationApplier,
    check_path,
    decode_operations,
    encode_header,
    is_replicated,
)

NAMES = st.text("aä.-7", min_size=1, max_size=8)
PATHS = (
    st.lists(NAMES, min_size=1, max_size=4)
    .map("/".join)
    .filter(lambda path: is_replicated(path) and not {".", ".."} & set(path.split("/")))
)


@st.composite
def one_operation(draw: st.DrawFn) -> Operation:
    kind = draw(st.sampled_from(sorted(KINDS)))
    path = draw(PATHS)
    if kind == Kind.RENAME:
        return Operation(kind, path, target=draw(PATHS))
    if kind == Kind.WRITE:
        return Operation(kind, path, draw(st.integers(0, (1 << 64) - 1)), draw(st.binary(max_size=100)))
    return Operation(kind, path, draw(st.integers(0, (1 << 64) - 1)) if kind == Kind.TRUNCATE else 0)


def encode(listed: list[Operation]) -> bytes:
    parts, last = [], ""
    for one in listed:
        data = one.target.encode() if one.kind == Kind.RENAME else one.data
        name = b"" if one.path == last else one.path.encode()
        parts += [encode_header(one.kind, name, one.position, len(data)), data]
        last = one.path
    return b"".join(parts)


def decoded(data: bytes) -> list[Operation]:
    return list(decode_operations(memoryview(data)))


@given(st.lists(one_operation(), max_size=10))
def test_what_was_encoded_is_decoded(listed: list[Operation]) -> None:
    assert decoded(encode(listed)) == listed


SOME = [
    Operation(Kind.MAKE_FOLDER, "f"),
    Operation(Kind.CREATE, "f/a"),
    Operation(Kind.WRITE, "f/a", 7, b"bytes"),
    Operation(Kind.RENAME, "f/a", target="b"),
    Operation(Kind.TRUNCATE, "b", 5),
]


def test_cut_off_at_any_byte_it_is_refused_or_ends_after_an_operation() -> None:
    data = encode(SOME)
    whole = {len(encode(SOME[:count])) for count in range(len(SOME) + 1)}
    for size in range(len(data) + 1):
        if size in whole:
            assert decoded(data[:size]) == SOME[: sorted(whole).index(size)]
        else:
            with pytest.raises(InvalidObject, match="ends in the middle"):
                decoded(data[:size])


FORGED = [
    "", "/", "/etc/passwd", "../x", "a/../../x", "a/..", "..", ".", "./a", "a/./b", "a//b", "a/", "//a", "a\0b",
    *sorted(LOCAL_NAMES), "replica/state", "address.7", RESERVE_PATH,
]  # fmt: skip


@pytest.mark.parametrize("path", FORGED)
def test_a_path_that_leads_elsewhere_or_is_local_is_refused(path: str) -> None:
    with pytest.raises(InvalidObject):
        check_path(path)
    if path:
        for kind in sorted(KINDS):
            with pytest.raises(InvalidObject):
                decoded(HEADER.pack(kind, len(path), 0, 0) + path.encode())
    with pytest.raises(InvalidObject):
        decoded(HEADER.pack(Kind.RENAME, 1, 0, len(path)) + b"a" + path.encode())


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (HEADER.pack(0, 1, 0, 0) + b"a", "unknown kind 0"),
        (HEADER.pack(8, 1, 0, 0) + b"a", "unknown kind 8"),
        (HEADER.pack(Kind.CREATE, 0, 0, 0), "no path"),
        (HEADER.pack(Kind.CREATE, 1, 0, 1) + b"ax", "has some"),
        (HEADER.pack(Kind.CREATE, 1, 0, 0) + b"\xff", "no UTF-8"),
        (HEADER.pack(Kind.WRITE, 1, 0, 1 << 31) + b"ax", "middle of its data"),
    ],
)
def test_what_is_no_operation_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(InvalidObject, match=reason):
        decoded(data)


@given(st.binary(max_size=60), st.randoms(use_true_random=False))
def test_any_bytes_are_decoded_or_refused(data: bytes, chance: random.Random) -> None:
    damaged = bytearray(encode(SOME))
    damaged[chance.randrange(len(damaged))] = chance.randrange(256)
    for each in (data, bytes(damaged)):
        try:
            for one in decoded(each):
                check_path(one.path)
        except InvalidObject:
            pass


# Application. That the result is the primary's folder is what test_theorem.py shows.


def applier() -> tuple[SimulatedDisk, OperationApplier]:
    disk = SimulatedDisk()
    disk.make_folder(DATA)
    disk.force_folder("")
    return disk, OperationApplier(disk, DATA)


def test_what_was_forced_survives_a_power_cut() -> None:
    disk, applied = applier()
    applied.apply(SOME)
    applied.apply([Operation(Kind.RENAME, "f", target="g"), Operation(Kind.CREATE, "g/c")])
    applied.apply([Operation(Kind.WRITE, "g/c", 0, b"c"), Operation(Kind.CREATE, "g/d"), Operation(Kind.UNLINK, "g/d")])
    applied.apply([Operation(Kind.MAKE_FOLDER, "h"), Operation(Kind.REMOVE_FOLDER, "h")])
    applied.force()
    left = disk.crash(keep="nothing")
    assert left.list(DATA) == ["b", "g"] and left.list(f"{DATA}/g") == ["c"]
    assert left.read_file(f"{DATA}/b") == bytes(5) and left.read_file(f"{DATA}/g/c") == b"c"
    assert not applied.changed and not applied.changed_folders


def test_a_file_with_changes_is_fsynced_before_it_is_closed() -> None:
    disk, applied = applier()
    for number in range(OPEN_FILES_MAX + 5):
        applied.apply([Operation(Kind.CREATE, f"{number}"), Operation(Kind.WRITE, f"{number}", 0, b"x")])
        assert len(disk.open_files) <= OPEN_FILES_MAX
    applied.apply([Operation(Kind.RENAME, "7", target="8"), Operation(Kind.WRITE, "0", 1, b"y")])
    applied.close()
    assert disk.closed_unforced == [] and not disk.open_files
    assert disk.read_file(f"{DATA}/0") == b"xy"


def test_the_names_in_a_renamed_folder_survive_a_power_cut() -> None:
    disk, applied = applier()
    applied.apply(
        [Operation(Kind.MAKE_FOLDER, "f"), Operation(Kind.CREATE, "f/a"), Operation(Kind.RENAME, "f", target="g")]
    )
    applied.force()
    assert disk.crash(keep="nothing").list(f"{DATA}/g") == ["a"]


def test_an_unlinked_file_is_not_fsynced() -> None:
    disk, applied = applier()
    applied.apply([Operation(Kind.CREATE, "a"), Operation(Kind.WRITE, "a", 0, b"x"), Operation(Kind.UNLINK, "a")])
    applied.force()
    assert disk.faults.counts["force"] == 0


def test_the_names_of_the_kinds_have_the_numbers_that_are_stored() -> None:
    assert [(kind.name, kind.value) for kind in operations.Kind] == [
        ("CREATE", 1), ("WRITE", 2), ("TRUNCATE", 3), ("RENAME", 4), ("UNLINK", 5), ("MAKE_FOLDER", 6),
        ("REMOVE_FOLDER", 7),
    ]  # fmt: skip
