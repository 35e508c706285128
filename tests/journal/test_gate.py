"""One force at a time, and none behind one that failed, whichever way each was made."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from journal.disk import FileReferences
from journal.fsync import NEVER_CLOSED, FsyncGate
from journal.testing import SimulatedDisk
from tests.journal.test_force import Kernel

PATH = "/file"


class Written:
    """A file with some unforced bytes, as a log has it."""

    def __init__(self, disk: SimulatedDisk, path: str = PATH) -> None:
        self.file = disk.create(path)
        self.file.pwritev([b"bytes"], 0)
        self.sealed = False
        self.end = 5

    def close(self) -> None:
        self.file.close()


class Bench:
    """A gate, its pins, and a file to force."""

    def __init__(self) -> None:
        self.disk = SimulatedDisk()
        self.pins = FileReferences()
        self.gate = FsyncGate(self.pins)
        self.file = Written(self.disk)
        self.kernel = Kernel()
        self.told: list[OSError | None] = []

    @property
    def forces(self) -> int:
        return self.disk.faults.counts["force"]

    def begin(self) -> bool:
        return self.gate.start(self.file, self.kernel.begin, self.told.append)

    def durable(self) -> bool:
        return self.disk.durable_file(PATH) == b"bytes"

    def refused(self) -> bool:
        """Whether each way to force says no, and asks the disk for nothing."""
        before = self.forces
        with pytest.raises(OSError):
            self.gate.fsync(self.file)
        return not self.begin() and self.forces == before


def test_a_force_puts_the_bytes_on_the_disk() -> None:
    bench = Bench()
    bench.gate.fsync(bench.file)
    assert bench.durable() and bench.forces == 1


def test_a_force_may_be_done_in_another_way_that_nobody_comes_between() -> None:
    bench = Bench()
    steps: list[str] = []

    def how() -> None:
        steps.append("forced")
        assert not bench.begin(), "the gate is taken"
        bench.file.sealed = True

    bench.gate.fsync(bench.file, how)
    bench.gate.fsync(bench.file, how)
    assert steps == ["forced"] and bench.forces == 0, "a sealed file is forced already"
    assert not bench.begin()


@pytest.mark.parametrize("own_way", [True, False])
def test_behind_a_force_that_failed_every_one_fails_and_none_is_tried(own_way: bool) -> None:
    bench = Bench()
    bench.disk.faults.fail("force")
    with pytest.raises(OSError):
        bench.gate.fsync(bench.file, bench.file.file.force if own_way else None)
    assert bench.forces == 1 and bench.refused() and bench.refused()


def test_two_forces_never_run_side_by_side() -> None:
    bench = Bench()
    lock = threading.Lock()
    inside = most = 0

    def how() -> None:
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        bench.file.file.force()
        with lock:
            inside -= 1

    threads = [threading.Thread(target=bench.gate.fsync, args=(bench.file, how)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert (most, bench.forces) == (1, 8)


def test_one_that_needs_no_thread_tells_its_end() -> None:
    bench = Bench()
    assert bench.begin() and not bench.begin(), "one at a time"
    assert bench.told == [] and not bench.durable()
    bench.kernel.go()
    assert bench.told == [None] and bench.durable()
    assert bench.begin()


def test_one_that_needs_no_thread_is_waited_for_by_the_next() -> None:
    bench = Bench()
    bench.begin()
    bench.gate.fsync(bench.file, lambda: None)
    assert bench.kernel.flights[0][0].done and bench.durable() and bench.told == []


@pytest.mark.parametrize("told_first", [True, False])
def test_its_error_too_is_for_all_who_come_later(told_first: bool) -> None:
    bench = Bench()
    bench.begin()
    bench.disk.faults.fail("force")
    if told_first:
        bench.kernel.go()
        assert isinstance(bench.told[0], OSError)
    with pytest.raises(OSError):
        bench.gate.fsync(bench.file)
    if not told_first:
        bench.kernel.go()
    assert isinstance(bench.told[0], OSError) and bench.refused() and bench.forces == 1


class Interrupted(FsyncGate):
    """Another thread forces when the owner has half written down how a force ended."""

    between: Callable[[], object] | None = None

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if self.between is not None:
            between, self.__dict__["between"] = self.between, None
            thread = threading.Thread(target=between)
            thread.start()
            thread.join(10)


def test_its_error_is_known_before_it_stops_being_waited_for() -> None:
    bench = Bench()
    gate = bench.gate = Interrupted(bench.pins)
    bench.begin()
    bench.disk.faults.fail("force")
    failures: list[OSError] = []

    def force() -> None:
        try:
            gate.fsync(bench.file)
        except OSError as error:
            failures.append(error)

    gate.__dict__["between"] = force
    bench.kernel.go()
    assert failures and bench.forces == 1 and bench.refused()


def test_what_the_system_does_not_take_leaves_the_gate_as_it_was() -> None:
    bench = Bench()
    bench.kernel.refuses = True
    assert not bench.begin()
    bench.gate.fsync(bench.file)
    bench.pins.retire([bench.file])
    assert bench.told == [] and not bench.disk.open_files, "nothing is pinned"


@pytest.mark.parametrize("kernel", [True, False])
def test_a_file_is_not_closed_while_it_is_forced(kernel: bool) -> None:
    bench = Bench()

    def retire() -> None:
        bench.pins.retire([bench.file])
        assert bench.disk.open_files
        bench.file.file.force()

    if kernel:
        bench.begin()
        retire()
        bench.kernel.go()
    else:
        bench.gate.fsync(bench.file, retire)
    assert not bench.disk.open_files


def test_a_gate_that_is_shut_forces_nothing_and_calls_it_no_error() -> None:
    bench = Bench()
    bench.gate.detached = True
    bench.gate.fsync(bench.file)
    assert not bench.begin() and bench.forces == 0


def kept(gate: FsyncGate, files: list[Written], forced: int) -> list[Written]:
    """What must stay open, which has to be among what does."""
    before = len(NEVER_CLOSED)
    found = gate.keep_unsynced_open(files, forced)
    assert NEVER_CLOSED[before:] == [file.file for file in found]
    del NEVER_CLOSED[before:]
    return found


def test_what_is_not_known_to_be_forced_stays_open() -> None:
    bench = Bench()
    sealed, active = Written(bench.disk, "/sealed"), bench.file
    sealed.sealed = True
    files = [sealed, active]
    assert kept(bench.gate, files, forced=5) == []
    assert kept(bench.gate, files, forced=4) == [active]


@pytest.mark.parametrize("begin", [Bench.begin, lambda bench: bench.gate.fsync(bench.file)])
def test_behind_a_failed_force_no_mark_makes_the_written_file_safe_to_close(
    begin: Callable[[Bench], object],
) -> None:
    bench = Bench()
    bench.disk.faults.fail("force")
    try:
        begin(bench)
        bench.kernel.go()
    except OSError:
        pass
    assert kept(bench.gate, [bench.file], forced=5) == [bench.file]
