"""The checkpoint of the transaction journal: two slots, of which one whole one is enough."""

from __future__ import annotations

import pytest

from journal.dual_slot_file import SLOT_SIZE
from journal.errors import Corrupt, NewerFormat
from journal.testing import SimulatedDisk, crash_states
from journal.wal.checkpoint import (
    JournalCheckpoint,
    JournalCheckpointFile,
    SnapshotPointer,
    decode_checkpoint,
    encode_checkpoint,
)
from tests.journal.journals import CHECKPOINT, FOLDER, make_disk
from tests.scale import seeded

WHOLE = JournalCheckpoint(5, 99, 1650, 7, (SnapshotPointer(3, 1650), SnapshotPointer(2, 1200)))


@pytest.fixture
def disk() -> SimulatedDisk:
    disk = make_disk()
    disk.make_folder(FOLDER)
    disk.force_folder("data")
    return disk


@pytest.mark.parametrize(
    "checkpoint", [WHOLE, WHOLE._replace(snapshots=WHOLE.snapshots[:1]), JournalCheckpoint(1, 0, 0, 0, ())]
)
def test_what_is_written_is_read(disk: SimulatedDisk, checkpoint: JournalCheckpoint) -> None:
    assert decode_checkpoint(encode_checkpoint(checkpoint), "c") == checkpoint
    JournalCheckpointFile(disk, FOLDER).write_durably(checkpoint)
    assert JournalCheckpointFile(disk.crash(keep="nothing"), FOLDER).read() == checkpoint


def test_nothing_was_ever_written(disk: SimulatedDisk) -> None:
    assert JournalCheckpointFile(disk, FOLDER).read() is None


def test_hazard_08_one_slot_is_enough_and_every_flipped_bit_is_found(disk: SimulatedDisk) -> None:
    """The ancestor read only the newest checkpoint, and had no checksum on it."""
    JournalCheckpointFile(disk, FOLDER).write_durably(WHOLE)
    size = 20 + len(encode_checkpoint(WHOLE))
    whole = disk.read_file(CHECKPOINT)
    for slot in (0, SLOT_SIZE):
        for bit in range(size * 8):
            data = bytearray(whole)
            data[slot + bit // 8] ^= 1 << bit % 8
            disk.write_file(CHECKPOINT, bytes(data))
            assert JournalCheckpointFile(disk, FOLDER).read() == WHOLE
            data[SLOT_SIZE - slot + bit // 8] ^= 1 << bit % 8
            disk.write_file(CHECKPOINT, bytes(data))
            with pytest.raises(Corrupt):
                JournalCheckpointFile(disk, FOLDER).read()


def test_a_note_that_a_power_cut_tears_takes_nothing_but_itself(disk: SimulatedDisk) -> None:
    file = JournalCheckpointFile(disk, FOLDER)
    file.write_durably(WHOLE)
    later = WHOLE._replace(durable_lsn=9999)
    file.write_unsynced(later)
    file.write_unsynced(later._replace(durable_lsn=10_000))
    found = {JournalCheckpointFile(state, FOLDER).read() for state in crash_states(disk, 50, seeded("note"))}
    assert found <= {WHOLE, later, later._replace(durable_lsn=10_000)} and len(found) > 1


def test_what_was_settled_is_never_lost_to_what_is_written_after_it(disk: SimulatedDisk) -> None:
    file = JournalCheckpointFile(disk, FOLDER)
    generator = seeded("settle")
    seen: set[JournalCheckpoint | None] = set()

    def look(kind: str, path: str) -> None:
        seen.update(JournalCheckpointFile(state, FOLDER).read() for state in crash_states(disk, 10, generator))

    file.write_durably(WHOLE)
    disk.after = look
    for number in range(8, 16):
        seen.clear()
        file.write_durably(WHOLE._replace(file_number=number))
        assert seen == {WHOLE._replace(file_number=number - 1), WHOLE._replace(file_number=number)}


def test_a_newer_checkpoint_is_refused_by_name() -> None:
    data = bytearray(encode_checkpoint(WHOLE))
    data[0:2] = (2).to_bytes(2, "big")
    with pytest.raises(NewerFormat, match="version 2"):
        decode_checkpoint(bytes(data), "c")


def test_sizes_that_do_not_add_up_are_damage() -> None:
    data = encode_checkpoint(WHOLE)
    for bad in (data[:-1], data + b"?", data[:10], b"", data[:2] + b"\0\x09" + data[4:]):
        with pytest.raises(Corrupt):
            decode_checkpoint(bad, "c")
