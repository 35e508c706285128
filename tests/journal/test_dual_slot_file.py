"""Two slots: whatever a power cut or rot does to one, the other says the last thing or the one before."""

from __future__ import annotations

import pytest

from journal.dual_slot_file import SLOT_HEADER, SLOT_SIZE, DualSlotFile
from journal.errors import Corrupt, TooLarge
from journal.testing import SimulatedDisk, crash_states
from tests.scale import seeded

PATH = "data/log.mark"


@pytest.fixture
def disk() -> SimulatedDisk:
    disk = SimulatedDisk()
    disk.make_folder("data")
    disk.force_folder("")
    return disk


def test_nothing_was_ever_written(disk: SimulatedDisk) -> None:
    assert DualSlotFile(disk, PATH).read() is None
    assert not disk.exists(PATH)


def test_the_newest_counts(disk: SimulatedDisk) -> None:
    slots = DualSlotFile(disk, PATH)
    for number in range(1, 6):
        assert slots.write(b"payload %d" % number, fsync=True) == number
        assert DualSlotFile(disk, PATH).read() == (number, b"payload %d" % number)


def test_numbers_go_on_after_opening(disk: SimulatedDisk) -> None:
    DualSlotFile(disk, PATH).write(b"one", fsync=True)
    assert DualSlotFile(disk, PATH).write(b"two", fsync=True) == 2


def test_the_slots_lie_apart(disk: SimulatedDisk) -> None:
    slots = DualSlotFile(disk, PATH)
    slots.write(b"one", fsync=True)
    before = disk.read_file(PATH)[SLOT_SIZE:]
    slots.write(b"two", fsync=True)
    assert disk.read_file(PATH)[SLOT_SIZE:] == before


def test_an_empty_payload_is_one(disk: SimulatedDisk) -> None:
    DualSlotFile(disk, PATH).write(b"", fsync=True)
    assert DualSlotFile(disk, PATH).read() == (1, b"")


def test_what_does_not_fit_is_refused(disk: SimulatedDisk) -> None:
    slots = DualSlotFile(disk, PATH)
    slots.write(b"x" * (SLOT_SIZE - SLOT_HEADER.size), fsync=True)
    with pytest.raises(TooLarge):
        slots.write(b"x" * (SLOT_SIZE - SLOT_HEADER.size + 1), fsync=True)


def test_a_power_cut_leaves_what_was_fsynced_or_something_newer(disk: SimulatedDisk) -> None:
    slots = DualSlotFile(disk, PATH)
    slots.write(b"a" * 2000, fsync=True)
    slots.write(b"b" * 2000, fsync=False)
    slots.write(b"c" * 2000, fsync=False)
    slots.write(b"d" * 2000, fsync=False)
    states = list(crash_states(disk, 2000, seeded("slots")))
    assert len(states) > 100
    assert {_letter(state) for state in states} == {"a", "b", "c", "d"}


def test_a_process_that_comes_later_trusts_nothing_that_it_did_not_fsync(disk: SimulatedDisk) -> None:
    DualSlotFile(disk, PATH).write(b"a" * 2000, fsync=True)
    DualSlotFile(disk, PATH).write(b"b" * 2000, fsync=False)
    later = DualSlotFile(disk, PATH)
    later.write(b"c" * 2000, fsync=False)
    assert {_letter(state) for state in crash_states(disk, 500, seeded("later"))} == {"b", "c"}


def test_a_fsynced_write_makes_the_name_durable_also_of_a_file_that_an_unsynced_one_created(
    disk: SimulatedDisk,
) -> None:
    slots = DualSlotFile(disk, PATH)
    slots.write(b"a", fsync=False)
    slots.write(b"b", fsync=True)
    assert _letter(disk.crash(keep="nothing")) == "b"
    before = disk.faults.counts["force_folder"]
    slots.write(b"c", fsync=True)
    assert disk.faults.counts["force_folder"] == before, "once is enough"


def test_a_fsynced_write_makes_the_name_durable_also_of_a_file_of_a_process_that_was_killed(
    disk: SimulatedDisk,
) -> None:
    DualSlotFile(disk, PATH).write(b"a", fsync=False)
    DualSlotFile(disk, PATH).write(b"b", fsync=True)
    assert _letter(disk.crash(keep="nothing")) == "b"


def test_a_failed_fsync_of_the_folder_is_made_up_for_by_the_next_write(disk: SimulatedDisk) -> None:
    slots = DualSlotFile(disk, PATH)
    disk.faults.fail("force_folder")
    with pytest.raises(OSError, match="Input/output"):
        slots.write(b"a", fsync=True)
    slots.write(b"b", fsync=True)
    assert _letter(disk.crash(keep="nothing")) == "b"


def _letter(disk: SimulatedDisk) -> str:
    found = DualSlotFile(disk, PATH).read()
    assert found is not None
    return found[1][:1].decode()


def test_one_torn_write_never_takes_both(disk: SimulatedDisk) -> None:
    slots = DualSlotFile(disk, PATH)
    slots.write(b"a" * 2000, fsync=True)
    slots.write(b"b" * 2000, fsync=False)
    found = {DualSlotFile(state, PATH).read() for state in crash_states(disk, 500, seeded("one torn"))}
    assert found == {(1, b"a" * 2000), (2, b"b" * 2000)}


@pytest.mark.parametrize("bit", range(0, 8 * (SLOT_HEADER.size + 5), 3))
def test_a_flipped_bit_is_never_believed(disk: SimulatedDisk, bit: int) -> None:
    slots = DualSlotFile(disk, PATH)
    slots.write(b"older", fsync=True)
    slots.write(b"newer", fsync=True)
    position, number = divmod(bit, 8)
    disk.damage(PATH, position, bytes([disk.read_file(PATH)[position] ^ 1 << number]))
    assert DualSlotFile(disk, PATH).read() == (1, b"older")


def test_when_both_are_damaged_it_says_so_and_can_be_written_anew(disk: SimulatedDisk) -> None:
    slots = DualSlotFile(disk, PATH)
    slots.write(b"older", fsync=True)
    slots.write(b"newer", fsync=True)
    disk.damage(PATH, SLOT_HEADER.size, b"?")
    disk.damage(PATH, SLOT_SIZE + SLOT_HEADER.size, b"?")
    again = DualSlotFile(disk, PATH)
    with pytest.raises(Corrupt, match=r"log\.mark"):
        again.read()
    again.write(b"anew", fsync=True)
    assert DualSlotFile(disk, PATH).read() == (1, b"anew")


def test_a_failed_write_leaves_the_older_one_valid(disk: SimulatedDisk) -> None:
    slots = DualSlotFile(disk, PATH)
    slots.write(b"older", fsync=True)
    disk.faults.fail("force", path=PATH)
    with pytest.raises(OSError, match="Input/output"):
        slots.write(b"newer", fsync=True)
    assert DualSlotFile(disk.crash(keep="nothing"), PATH).read() == (1, b"older")
