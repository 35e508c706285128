"""What the records say, packed and unpacked: golden bytes, tolerance, and every bit of it flipped."""

import contextlib
import random
import re
from typing import Any

import msgpack
import pytest

from journal.wal import entry
from tests import paths
from tests.memory_bombs import NESTED_LISTS, refused_in_little_memory
from tests.scale import scaled, seeded
from tfmq.apply_target import GroupPositions
from tfmq.transaction import journal_records
from tfmq.transaction.journal_records import Origin
from tfmq.transaction.requests import CommitGroupMember

GOLDEN = paths.TESTS / "golden" / "operations.hex"

ORIGIN = Origin("order-42", False, 4000, 7, 1_700_000_000_000, "payments", "a client", None)
MEMBER = ORIGIN._replace(xid="part-1", member=CommitGroupMember("query", 12, "run-1"))
OFFSETS = (GroupPositions("readers", 5, ((50, 0, 1234, 0, 1), (50, 1, 99, 3, -1))),)
TOPICS = ((50 << 24, "orders"), (51 << 24 | 3, "bills"))

ALL: dict[str, journal_records.Operation] = {
    "prepare": journal_records.PrepareRecord(17, 1_700_000_000_500, ORIGIN, TOPICS, OFFSETS, 12, 0),
    "prepare of a member": journal_records.PrepareRecord(
        18, 1_700_000_000_500, MEMBER, TOPICS, (), 1, 1_700_086_400_000
    ),
    "prepare of a user": journal_records.PrepareRecord(
        24, 1_700_000_000_500, ORIGIN._replace(user="billing"), TOPICS, (), 1, 0
    ),
    "commit": journal_records.CommitRecord(17, 1_700_000_000_600),
    "commit with an xid": journal_records.CommitRecord(17, 1_700_000_000_600, "order-42"),
    "rollback": journal_records.RollbackRecord(17, 1_700_000_000_600),
    "local commit": journal_records.LocalCommitRecord(
        19, 1_700_000_000_700, Origin("", True, 4001, 1, 1_700_000_000_690), TOPICS[:1], (), 10
    ),
    "local rollback": journal_records.LocalRollbackRecord(20, 1_700_000_000_800, ORIGIN),
    "heuristic commit": journal_records.HeuristicCommitRecord(17, 1_700_000_000_900),
    "heuristic rollback": journal_records.HeuristicRollbackRecord(17, 1_700_000_000_900),
    "forget": journal_records.ForgetRecord(17, 1_700_000_001_000),
    "epochs": journal_records.EpochLeaseRecord(1 << 20, 1_700_000_000_000, bytes(range(16))),
    "group commit": journal_records.GroupCommitRecord("query", 12, "run-1", 1000, (18, 21), (22,), 1_700_000_002_000),
    "group abort": journal_records.GroupAbortRecord("query", 13, "run-2", (23,), 1_700_000_003_000),
    "group forget": journal_records.GroupForgetRecord("query", 1_700_000_004_000),
}


def lines() -> list[str]:
    return [
        f"{name}: {kind} {epoch} {payload.hex()}"
        for name, operation in ALL.items()
        for kind, epoch, payload in [journal_records.pack(operation)]
    ]


def test_the_bytes_are_those_of_the_golden_file() -> None:
    assert GOLDEN.read_text().splitlines() == lines()


@pytest.mark.parametrize("line", GOLDEN.read_text().splitlines() if GOLDEN.exists() else [])
def test_the_golden_file_is_read(line: str) -> None:
    name, rest = line.split(": ")
    kind, epoch, payload = rest.split(" ")
    assert journal_records.unpack(int(kind), int(epoch), bytes.fromhex(payload)) == ALL[name]


def test_the_worked_examples_of_the_page_are_in_the_golden_file() -> None:
    page = (GOLDEN.parent.parent.parent / "docs" / "formats" / "operations.md").read_text()
    examples = re.findall(r"```hex\n([0-9a-f\n]+)```", page)
    payloads = {line.split(" ")[-1] for line in GOLDEN.read_text().splitlines()}
    assert len(examples) == 3 and {each.strip() for each in examples} <= payloads


@pytest.mark.parametrize("name", ALL)
def test_what_was_packed_comes_back(name: str) -> None:
    found = journal_records.unpack(*journal_records.pack(ALL[name]))
    assert found == ALL[name] and type(found) is type(ALL[name])


def test_the_kinds_are_those_of_the_journal() -> None:
    assert {journal_records.KINDS[type(each)] for each in ALL.values()} == set(entry.OPERATION_NAMES)


@pytest.mark.parametrize("name", [name for name in ALL if name != "commit"])  # the next field of that one is the xid
def test_fields_that_a_later_version_adds_are_left_out(name: str) -> None:
    kind, epoch, payload = journal_records.pack(ALL[name])
    fields = [*msgpack.unpackb(payload, use_list=False), "new", {"more": 1}]
    assert journal_records.unpack(kind, epoch, msgpack.packb(fields)) == ALL[name]


def test_an_origin_with_more_fields_is_read() -> None:
    kind, epoch, payload = journal_records.pack(ALL["prepare of a member"])
    time_ms, origin, *rest = msgpack.unpackb(payload, use_list=False)
    member = (*origin[-1], "new")
    data = msgpack.packb([time_ms, (*origin[:-1], member, "", "new"), *rest])
    assert journal_records.unpack(kind, epoch, data) == ALL["prepare of a member"]


def test_an_unknown_kind_is_named() -> None:
    with pytest.raises(ValueError, match="unknown kind 99"):
        journal_records.unpack(99, 1, b"\x90")


def test_damage_raises_value_error_and_nothing_else() -> None:
    """Item 38, the payload's part: after a checksum that holds by chance, or a bug, nothing worse than a refusal."""
    generator = seeded("operations")
    packed = [journal_records.pack(each) for each in ALL.values()]
    for _ in range(scaled(20_000)):
        kind, epoch, payload = generator.choice(packed)
        data = damaged(generator, payload)
        with contextlib.suppress(ValueError):
            journal_records.unpack(kind, epoch, data)


def damaged(generator: random.Random, payload: bytes) -> bytes:
    data = bytearray(payload)
    for _ in range(generator.randrange(1, 4)):
        data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
    return bytes(data[: generator.randrange(len(data) + 1)])


@pytest.mark.parametrize("value", [b"", b"\x90", b"\xc0", b"\xc4\x01a", b"\x81\x01\x02", b"\x94\x01\x02\x03\x04"])
@pytest.mark.parametrize("kind", sorted(entry.OPERATION_NAMES))
def test_a_payload_of_another_shape_is_refused(kind: int, value: Any) -> None:
    if kind in (entry.COMMIT, entry.ROLLBACK, entry.FORGET) and value[:1] == b"\x94":
        return
    if kind in (entry.HEURISTIC_COMMIT, entry.HEURISTIC_ROLLBACK) and value[:1] == b"\x94":
        return
    with pytest.raises(ValueError, match="does not fit"):
        journal_records.unpack(kind, 1, value)


@pytest.mark.parametrize("kind", journal_records.KINDS.values())
def test_a_payload_that_announces_too_much_takes_no_memory(kind: int) -> None:
    with refused_in_little_memory("does not fit"):
        journal_records.unpack(kind, 1, NESTED_LISTS)
