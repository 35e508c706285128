"""The checkpoint of the transaction journal: two slots, of which one whole one is enough."""

from __future__ import annotations

import pytest

from journal.dual_slot_file import SLOT_SIZE
from journal.errors import Corrupt, NewerFormat
from journal.testing import SimulatedDisk, crash_states
from journal.wal.checkpoint import Checkpoint, CheckpointFile, Pointer, decode_checkpoint, encode_checkpoint
from tests.journal.journals import CHECKPOINT, FOLDER, make_disk
from tests.scale import seeded

WHOLE = Checkpoint(5, 99, 1650, 7, (Pointer(3, 1650), Pointer(2, 1200)))


@pytest.fixture
def disk() -> SimulatedDisk:
    disk = make_disk()
    disk.make_folder(FOLDER)
    disk.force_folder("data")
    return disk


@pytest.mark.parametrize(
    "checkpoint", [WHOLE, WHOLE._replace(snapshots=WHOLE.snapshots[:1]), Checkpoint(1, 0, 0, 0, ())]
)
def test_what_is_written_is_read(disk: SimulatedDisk, checkpoint: Checkpoint) -> None:
    assert decode_checkpoint(encode_checkpoint(checkpoint), "c") == checkpoint
    CheckpointFile(disk, FOLDER).settle(checkpoint)
    assert CheckpointFile(disk.crash(keep="nothing"), FOLDER).read() == checkpoint


def test_nothing_was_ever_written(disk: SimulatedDisk) -> None:
    assert CheckpointFile(disk, FOLDER).read() is None


def test_hazard_08_one_slot_is_enough_and_every_flipped_bit_is_found(disk: SimulatedDisk) -> None:
    """The ancestor read only the newest checkpoint, and had no checksum on it."""
    CheckpointFile(disk, FOLDER).settle(WHOLE)
    size = 20 + len(encode_checkpoint(WHOLE))
    whole = disk.read_file(CHECKPOINT)
    for slot in (0, SLOT_SIZE):
        for bit in range(size * 8):
            data = bytearray(whole)
            data[slot + bit // 8] ^= 1 << bit % 8
            disk.write_file(CHECKPOINT, bytes(data))
            assert CheckpointFile(disk, FOLDER).read() == WHOLE
            data[SLOT_SIZE - slot + bit // 8] ^= 1 << bit % 8
            disk.write_file(CHECKPOINT, bytes(data))
            with pytest.raises(Corrupt):
                CheckpointFile(disk, FOLDER).read()


def test_a_note_that_a_power_cut_tears_takes_nothing_but_itself(disk: SimulatedDisk) -> None:
    file = CheckpointFile(disk, FOLDER)
    file.settle(WHOLE)
    later = WHOLE._replace(forced=9999)
    file.note(later)
    file.note(later._replace(forced=10_000))
    found = {CheckpointFile(state, FOLDER).read() for state in crash_states(disk, 50, seeded("note"))}
    assert found <= {WHOLE, later, later._replace(forced=10_000)} and len(found) > 1


def test_what_was_settled_is_never_lost_to_what_is_written_behind_it(disk: SimulatedDisk) -> None:
    file = CheckpointFile(disk, FOLDER)
    generator = seeded("settle")
    seen: set[Checkpoint | None] = set()

    def look(kind: str, path: str) -> None:
        seen.update(CheckpointFile(state, FOLDER).read() for state in crash_states(disk, 10, generator))

    file.settle(WHOLE)
    disk.after = look
    for number in range(8, 16):
        seen.clear()
        file.settle(WHOLE._replace(file_number=number))
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
