"""The pages of the formats show what the code writes: golden files, and the hex on each page, byte for byte.

A golden file is made once. One that no longer matches means that the format has changed, and the files on people's
disks have not.
"""

import re
from zlib import crc32

import pytest

from journal.dual_slot_file import DualSlotFile
from journal.log.checkpoint import (
    LogCheckpoint,
    Snapshot,
    decode_checkpoint,
    decode_snapshot,
    encode_checkpoint,
    encode_snapshot,
)
from journal.record.format import make_id, make_log_id, make_record
from journal.testing.memory_disk import SimulatedDisk
from journal.wal.checkpoint import (
    JournalCheckpoint,
    JournalCheckpointFile,
    JournalSnapshot,
    ListedFile,
    SnapshotHead,
    SnapshotPointer,
)
from journal.wal.checkpoint import JournalSnapshotFiles as JournalSnapshots
from journal.wal.entry import (
    COMMIT,
    AppendMsg,
    LostEntries,
    Operation,
    checksum_seed,
    encode_entries,
    encode_filler,
    entries_of,
)
from journal.wal.file import FILE_HEADER_SIZE, JournalFileHeader, decode_header, encode_header
from tests import paths

TESTS = paths.TESTS
GOLDEN = TESTS / "golden"
PAGES = TESTS.parent / "docs" / "formats"

LOG_ID = make_log_id(9, 3)
MARKS = LogCheckpoint(4096, 10, 8192, 40, 1_700_000_000_000, 2, ((1, 5000), (2, 8192)), stopped="force: EIO")
SNAPSHOT = Snapshot(8192, 40, 1_700_000_000_000, {(1, 5): (6, 7), (2, 8): (9, 0)}, b"state")

BLOCK_SIZE = {"record": 208}
"""Pages that show the beginning of their golden file only: how much of it."""


def golden(name: str) -> bytes:
    return bytes.fromhex((GOLDEN / f"{name}.hex").read_text())


@pytest.mark.parametrize("name", ["record", "index", "mark", "state", "journal"])
def test_the_page_shows_the_golden_file(name: str) -> None:
    page = (PAGES / f"{name}.md").read_text()
    (shown,) = re.findall(r"```hex\n(.*?)```", page, re.DOTALL)
    assert bytes.fromhex(shown) == golden(name)[: BLOCK_SIZE.get(name)]


def test_every_golden_file_is_named_on_a_page() -> None:
    pages = "".join(page.read_text() for page in PAGES.glob("*.md"))
    assert [path.name for path in GOLDEN.glob("*.hex") if f"tests/golden/{path.name}" not in pages] == []


def test_the_golden_mark_is_written_and_read_as_ever() -> None:
    disk = SimulatedDisk()
    disk.make_folder("/log")
    DualSlotFile(disk, "/log/log.mark").write(encode_checkpoint(LOG_ID, MARKS), fsync=True)
    data = disk.read_file("/log/log.mark")
    assert data[4096:] == golden("mark")
    disk.write_file("/log/other", data)
    found = DualSlotFile(disk, "/log/other").read()
    assert found is not None
    assert decode_checkpoint(found[1], "/log/other", LOG_ID) == MARKS


def test_the_golden_snapshot_is_written_and_read_as_ever() -> None:
    assert encode_snapshot(LOG_ID, SNAPSHOT) == golden("state")
    assert decode_snapshot(golden("state"), "a.state", LOG_ID) == SNAPSHOT


# The transaction journal: a file, a snapshot and a slot of the checkpoint, one after the other.
IDENTITY = (5, 0x0102030405060708)
FILE_HEAD = JournalFileHeader(*IDENTITY, 2, 1000)
RECORD = make_record(b"hello", make_id(70, 5))
PIECE = AppendMsg(12, LOG_ID, 70, 5, 1, ((len(RECORD), 1, crc32(RECORD)),), RECORD)
DECISION = Operation(COMMIT, 12, bytes.fromhex("91cf0000018bcfe56fd0"))
FILLER_SIZE = 30


def journal_parts() -> tuple[bytes, bytes, bytes]:
    """(file, snapshot, slot) as the code writes them."""
    seed = checksum_seed(*IDENTITY)
    buffers, _, end = encode_entries([PIECE, DECISION], FILE_HEAD.first + FILE_HEADER_SIZE, 1044, seed)
    file = encode_header(FILE_HEAD) + b"".join(buffers) + encode_filler(FILLER_SIZE, end, 1044, seed)
    end += FILLER_SIZE
    disk = SimulatedDisk()
    disk.make_folder("/t")
    head = SnapshotHead(IDENTITY[0], 3, end, (ListedFile(1, 0, 500), ListedFile(2, 1000, end)))
    JournalSnapshots(disk, "/t", IDENTITY[0]).write(JournalSnapshot(head, b"state"))
    pointers = (SnapshotPointer(3, end), SnapshotPointer(2, 600))
    JournalCheckpointFile(disk, "/t").write_unsynced(JournalCheckpoint(*IDENTITY, end, 2, pointers))
    return file, disk.read_file(f"/t/{3:020d}.snapshot"), disk.read_file("/t/checkpoint")[4096:]


def test_the_golden_journal_is_written_and_read_as_ever() -> None:
    file, snapshot, slot = journal_parts()
    assert file + snapshot + slot == golden("journal")
    assert decode_header(file, "f") == FILE_HEAD
    found = list(entries_of(file[FILE_HEADER_SIZE:], 1044, checksum_seed(*IDENTITY)))
    piece, decision, filler = (entry.content for entry in found)
    assert isinstance(piece, AppendMsg) and piece._replace(data=bytes(piece.data)) == PIECE
    assert (decision, filler) == (DECISION, LostEntries(FILLER_SIZE))
    disk = SimulatedDisk()
    disk.make_folder("/t")
    disk.write_file(f"/t/{3:020d}.snapshot", snapshot)
    disk.write_file("/t/checkpoint", bytes(4096) + slot)
    assert JournalSnapshots(disk, "/t", IDENTITY[0]).read(3).state == b"state"
    checkpoint = JournalCheckpointFile(disk, "/t").read()
    assert checkpoint is not None and checkpoint.snapshots == (
        SnapshotPointer(3, found[-1].next),
        SnapshotPointer(2, 600),
    )
