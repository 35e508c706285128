"""Group commit: who waits, for how long, and what a failure means for whom."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from typing import Any

import pytest

from journal.disk import File, FileReferences
from journal.errors import BeyondEnd, Closed, Stopped
from journal.filenames import segment_name
from journal.fsync import (
    NEVER_CLOSED,
    PROBE_ROUNDS,
    ROUNDS_MAX,
    SLOW_ROUNDS,
    SLOW_SECONDS,
    Forcer,
    FsyncGate,
    FsyncMethod,
    WhenStored,
)
from journal.linux_aio import AioFsync, FsyncCallback
from journal.log.log import Log
from journal.record.format import make_log_id
from journal.testing import SimulatedClock, SimulatedDisk
from tests.journal.logs import make_batch


class Worker:
    """`run` whose work waits until the test lets it go."""

    def __init__(self, *, held: bool = False) -> None:
        self.held = held
        self.jobs: list[tuple[Callable[[], Any], Callable[[Any, BaseException | None], None]]] = []

    def __call__(self, fn: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        self.jobs.append((fn, done))
        if not self.held:
            self.go()

    def go(self) -> None:
        """Does the first job that waits."""
        fn, done = self.jobs.pop(0)
        done(fn(), None)

    def go_all(self) -> None:
        while self.jobs:
            self.go()


class Kernel:
    """A force that needs no worker: `begin` for a forcer; it ends when the test says so, or when a caller waits."""

    def __init__(self) -> None:
        self.running_fsyncs: list[tuple[AioFsync, File]] = []
        self.refuses = False

    def begin(self, file: File, callback: FsyncCallback) -> AioFsync | None:
        if self.refuses:
            return None
        running_fsync = AioFsync(self, file.path, callback)  # type: ignore[arg-type]
        self.running_fsyncs.append((running_fsync, file))
        return running_fsync

    def collect(self, seconds: float) -> None:
        """The first one ends without a notification."""
        running_fsync, file = next(each for each in self.running_fsyncs if not each[0].done)
        try:
            file.force()
        except OSError as error:
            running_fsync.error = error
        running_fsync.done = True

    def go(self) -> None:
        """The first one ends, if it has not, and is reported."""
        running_fsync = self.running_fsyncs[0][0]
        running_fsync.wait()
        self.running_fsyncs.pop(0)
        running_fsync.callback(running_fsync.error)


class Replicas:
    """`begin_round` for a forcer; the test says what is stored."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []
        self.is_broken = False

    def begin_round(self) -> WhenStored:
        if self.is_broken:
            raise OSError(errno.EIO, "not recorded")
        return self.waiting.append

    def store(self) -> None:
        """Everything of the oldest round is stored."""
        self.waiting.pop(0)()


class Logs:
    """Several logs on one disk, and their forcer."""

    def __init__(
        self,
        count: int = 1,
        *,
        held: bool = False,
        method: FsyncMethod = "auto",
        kernel: Kernel | None = None,
        replicas: Replicas | None = None,
    ) -> None:
        self.disk = SimulatedDisk()
        self.clock = SimulatedClock()
        self.logs = []
        self.disk.make_folder("/data")
        for n in range(count):
            self.disk.make_folder(f"/data/t-{n}")
            self.logs.append(Log.open(self.disk, f"/data/t-{n}", log_id=make_log_id(5, n), clock=self.clock))
        self.worker = Worker(held=held)
        self.forcer = Forcer(
            self.disk,
            self.worker,
            anchor_path="/data",
            method=method,
            clock=self.clock,
            begin=kernel.begin if kernel else None,
            replicate=replicas.begin_round if replicas else None,
        )
        self.answers: list[tuple[int, Exception | None]] = []
        self.sequences = [0] * count

    def send(self, number: int = 0, *, start: bool = True) -> int:
        """Appends one record and waits for its force."""
        end = self.append(number)
        self.forcer.want(self.logs[number], end, self.waiter(number), start=start)
        return end

    def append(self, number: int = 0) -> int:
        batch = make_batch(1, sequence=self.sequences[number])
        self.sequences[number] += 1
        return self.logs[number].append([batch])[0].end_offset

    def waiter(self, number: int) -> Callable[[Exception | None], None]:
        return lambda error: self.answers.append((number, error))

    def count(self, kind: str) -> int:
        return self.disk.faults.counts[kind]

    def durable(self, number: int) -> bool:
        path = f"/data/t-{number}/{segment_name(0)}"
        return self.disk.durable_file(path) == self.disk.read_file(path)


def test_a_waiter_is_called_once_its_offset_is_on_the_disk() -> None:
    logs = Logs(held=True)
    logs.send()
    assert logs.answers == [] and not logs.durable(0)
    logs.worker.go()
    assert logs.answers == [(0, None)] and logs.durable(0)


def test_what_is_fsynced_already_is_answered_at_once() -> None:
    logs = Logs()
    end = logs.send()
    logs.forcer.want(logs.logs[0], end, logs.waiter(7))
    assert logs.answers[-1] == (7, None) and logs.forcer.forces == 1


def test_an_offset_beyond_the_end_is_refused() -> None:
    logs = Logs()
    with pytest.raises(BeyondEnd):
        logs.forcer.want(logs.logs[0], 1, logs.waiter(0))


def test_those_who_come_during_an_fsync_share_the_next_one() -> None:
    logs = Logs(held=True)
    for _ in range(20):
        logs.send()
    logs.worker.go()
    assert len(logs.answers) == 1
    logs.worker.go()
    assert len(logs.answers) == 20 and logs.forcer.forces == 2


def test_the_next_fsync_starts_before_the_waiters_of_the_last_are_called() -> None:
    logs = Logs(held=True)
    end = logs.append()
    seen: list[int] = []
    logs.forcer.want(logs.logs[0], end, lambda error: seen.append(len(logs.worker.jobs)))
    logs.send()
    logs.worker.go()
    assert seen == [1]


def test_a_waiter_that_waits_again_from_its_call_is_served() -> None:
    logs = Logs()
    left = 50

    def again(error: Exception | None) -> None:
        nonlocal left
        left -= 1
        if left:
            logs.forcer.want(logs.logs[0], logs.append(), again)

    logs.forcer.want(logs.logs[0], logs.append(), again)
    assert left == 0 and logs.forcer.idle


def test_one_file_is_fsynced_alone_and_many_by_one_syncfs() -> None:
    logs = Logs(64)
    logs.send(0)
    assert logs.count("sync") == 0
    forces = logs.count("force")
    for n in range(64):
        logs.send(n, start=False)
    logs.forcer.start()
    assert logs.count("sync") == 1 and logs.count("force") == forces
    assert len(logs.answers) == 65 and all(logs.durable(n) for n in range(64))


def test_fdatasync_fsyncs_each_file() -> None:
    logs = Logs(4, method="fdatasync")
    forces = logs.count("force")
    for n in range(4):
        logs.send(n, start=False)
    logs.forcer.start()
    assert logs.count("sync") == 0 and logs.count("force") == forces + 4


def test_a_failed_fsync_stops_that_log_and_is_reported_to_all_waiting_callers() -> None:
    logs = Logs(2, held=True)
    for _ in range(3):
        logs.send(0)
    logs.send(1)
    logs.disk.faults.fail("force", path="t-0/")
    logs.worker.go_all()
    assert [type(error) for number, error in logs.answers if number == 0] == [Stopped] * 3
    assert [error for number, error in logs.answers if number == 1] == [None]
    with pytest.raises(Stopped):
        logs.append(0)
    assert logs.logs[1].stopped is None
    again = Log.open(logs.disk, "/data/t-0", log_id=make_log_id(5, 0), clock=logs.clock)
    assert again.stopped is not None, "the stop is durable"


def test_after_a_failed_syncfs_each_file_says_for_itself_whose_bytes_are_gone() -> None:
    logs = Logs(5)
    logs.disk.faults.fail("sync_file", path="t-3/")
    for n in range(5):
        logs.send(n, start=False)
    logs.forcer.start()
    assert {n: error is None for n, error in logs.answers} == {0: True, 1: True, 2: True, 3: False, 4: True}
    assert [log.stopped is not None for log in logs.logs] == [False, False, False, True, False]


def test_a_failed_syncfs_casts_doubt_on_logs_that_were_not_part_of_it() -> None:
    """Log 2 was written but not named; its bytes go, the error is reported once, and the next syncfs says ok."""
    logs = Logs(3)
    end = logs.append(2)
    logs.disk.faults.fail("sync_file", path="t-2/")
    for n in range(2):
        logs.send(n, start=False)
    logs.forcer.start()
    assert [error for _, error in logs.answers] == [None, None]
    logs.forcer.want(logs.logs[2], end, logs.waiter(2), start=False)
    logs.send(0, start=False)
    logs.forcer.start()
    assert logs.logs[2].stopped is not None and logs.logs[0].stopped is None


def test_a_failed_fsync_is_never_retried() -> None:
    logs = Logs()
    logs.disk.faults.fail("force", path=".zxQueue")
    logs.send()
    forces = logs.count("force")
    logs.forcer.want(logs.logs[0], logs.logs[0].end_offset, logs.waiter(0))
    logs.forcer.dirty(logs.logs[0])
    logs.forcer.start()
    assert logs.count("force") == forces and not logs.durable(0)


def test_a_stop_that_cannot_be_written_says_so() -> None:
    logs = Logs()
    logs.disk.faults.fail("force", times=None)
    logs.send()
    assert "log.mark could not be written" in (logs.logs[0].stopped or "")


def test_flush_all_fsyncs_what_is_dirty_and_answers_once() -> None:
    logs = Logs(3, held=True)
    for n in range(3):
        logs.append(n)
        logs.forcer.dirty(logs.logs[n])
    logs.forcer.flush_all(logs.waiter(9))
    logs.worker.go_all()
    assert logs.answers == [(9, None)] and all(logs.durable(n) for n in range(3))
    logs.forcer.flush_all(logs.waiter(9))
    assert logs.answers == [(9, None)] * 2


def test_flush_all_waits_for_what_is_in_flight_and_names_a_failure() -> None:
    logs = Logs(2, held=True)
    logs.send(0)
    logs.append(1)
    logs.forcer.dirty(logs.logs[1])
    logs.disk.faults.fail("force", path="t-1/")
    logs.forcer.flush_all(logs.waiter(9))
    logs.worker.go_all()
    assert logs.answers[0] == (0, None) and isinstance(logs.answers[1][1], Stopped)


def test_waiters_of_a_log_that_is_let_go_are_answered() -> None:
    logs = Logs(held=True)
    logs.send()
    logs.send()
    logs.logs[0].abandon("topic deleted")
    logs.worker.go_all()
    assert [type(error) for _, error in logs.answers] == [Stopped, Stopped]


def test_waiters_of_a_log_that_was_closed_are_answered() -> None:
    logs = Logs(held=True)
    logs.send()
    end = logs.append()
    logs.forcer.want(logs.logs[0], end, logs.waiter(1))
    logs.logs[0].close()
    logs.worker.go_all()
    assert {n: error is None or isinstance(error, Closed) for n, error in logs.answers} == {0: True, 1: True}


@pytest.mark.parametrize("kernel", [None, Kernel()])
def test_where_logs_are_replicated_a_round_ends_when_it_is_stored_and_does_not_keep_the_next_from_beginning(
    kernel: Kernel | None,
) -> None:
    replicas = Replicas()
    logs = Logs(held=True, kernel=kernel, replicas=replicas)
    fsync = logs.worker.go if kernel is None else kernel.go
    end = logs.send()
    logs.send()
    fsync()
    assert logs.durable(0) and logs.answers == [] and logs.logs[0].forced_offset == 0
    fsync()
    assert logs.answers == [] and not logs.forcer.idle
    replicas.store()
    assert logs.answers == [(0, None)] and logs.logs[0].forced_offset == end
    replicas.store()
    assert logs.answers == [(0, None)] * 2 and logs.forcer.idle


def test_a_request_for_what_a_round_covers_begins_no_other_round() -> None:
    replicas = Replicas()
    logs = Logs(replicas=replicas)
    end = logs.send()
    logs.forcer.want(logs.logs[0], end, logs.waiter(1))
    logs.forcer.flush_all(logs.waiter(2))
    assert logs.answers == [] and logs.forcer.forces == 1
    replicas.store()
    assert logs.answers == [(0, None), (1, None), (2, None)] and logs.forcer.forces == 1


def test_of_the_rounds_that_wait_for_the_store_there_is_a_maximum() -> None:
    replicas = Replicas()
    logs = Logs(replicas=replicas)
    for _ in range(ROUNDS_MAX + 7):
        logs.send()
    assert logs.forcer.forces == len(replicas.waiting) == ROUNDS_MAX
    replicas.store()
    assert logs.answers == [(0, None)] and logs.forcer.forces == ROUNDS_MAX + 1
    while replicas.waiting:
        replicas.store()
    assert logs.answers == [(0, None)] * (ROUNDS_MAX + 7) and logs.forcer.forces == ROUNDS_MAX + 1


def test_a_failed_fsync_does_not_fail_the_rounds_before_it_that_wait_for_the_store() -> None:
    replicas = Replicas()
    logs = Logs(replicas=replicas)
    logs.send()
    logs.disk.faults.fail("force", path="t-0/")
    for _ in range(2):
        logs.send()
    while replicas.waiting:
        replicas.store()
    assert logs.answers[0] == (0, None)
    assert [type(error) for _, error in logs.answers[1:]] == [Stopped] * 2
    assert logs.forcer.idle


def test_what_the_replicas_cannot_get_is_an_error_to_all_waiting_callers() -> None:
    replicas = Replicas()
    logs = Logs(replicas=replicas)
    replicas.is_broken = True
    logs.send()
    assert [type(error) for _, error in logs.answers] == [Stopped] and logs.forcer.idle


def test_auto_fsyncs_one_by_one_for_a_while_where_strangers_slow_syncfs_down() -> None:
    logs = Logs(2)
    logs.disk.faults.before = lambda kind, path: logs.clock.advance(SLOW_SECONDS * 2) if kind == "sync" else None
    for _ in range(SLOW_ROUNDS + 2):
        for n in range(2):
            logs.send(n, start=False)
        logs.forcer.start()
    assert logs.count("sync") == SLOW_ROUNDS
    logs.clock.advance(100)
    for n in range(2):
        logs.send(n, start=False)
    logs.forcer.start()
    assert logs.count("sync") == SLOW_ROUNDS + 1


def test_where_there_is_no_syncfs_each_file_is_fsynced() -> None:
    logs = Logs(2, method="syncfs")
    logs.disk.faults.fail("sync", times=None, error=errno.ENOSYS)
    for n in range(2):
        logs.send(n, start=False)
    logs.forcer.start()
    assert [error for _, error in logs.answers] == [None, None] and logs.durable(0) and logs.durable(1)


def test_the_durable_offset_is_rewritten_at_most_once_a_second() -> None:
    logs = Logs()
    mark = "/data/t-0/log.mark"
    before = logs.disk.read_file(mark)
    logs.send()
    assert logs.disk.read_file(mark) == before
    logs.clock.advance(1)
    logs.send()
    after = logs.disk.read_file(mark)
    assert after != before
    logs.send()
    assert logs.disk.read_file(mark) == after


def test_one_file_is_fsynced_without_a_worker_where_the_system_can() -> None:
    kernel = Kernel()
    logs = Logs(kernel=kernel)
    logs.send()
    assert logs.answers == [] and not logs.durable(0), "nobody is told before the force has ended"
    kernel.go()
    assert logs.answers == [(0, None)] and logs.durable(0) and logs.worker.jobs == []


def test_those_who_come_during_an_fsync_without_a_worker_share_the_next_which_starts_before_the_answers() -> None:
    kernel = Kernel()
    logs = Logs(kernel=kernel)
    flying: list[int] = []
    end = logs.append()
    logs.forcer.want(logs.logs[0], end, lambda error: flying.append(len(kernel.running_fsyncs)))
    for _ in range(20):
        logs.send()
    kernel.go()
    assert flying == [1] and logs.answers == []
    kernel.go()
    assert len(logs.answers) == 20 and logs.forcer.forces == 2


def test_a_failed_fsync_without_a_worker_stops_the_log_and_is_never_tried_again() -> None:
    kernel = Kernel()
    logs = Logs(kernel=kernel)
    logs.disk.faults.fail("force", path=".zxQueue")
    logs.send()
    end = logs.append()
    logs.forcer.want(logs.logs[0], end, logs.waiter(1))
    kernel.go()
    assert logs.logs[0].stopped is not None and logs.logs[0].forced_offset == 0
    assert [type(error) for _, error in logs.answers] == [Stopped, Stopped]
    assert kernel.running_fsyncs == [] and logs.forcer.idle
    with pytest.raises(Stopped):
        logs.append()


def test_several_files_go_to_the_worker() -> None:
    kernel = Kernel()
    logs = Logs(count=3, kernel=kernel)
    for number in range(3):
        logs.send(number, start=False)
    logs.forcer.start()
    assert kernel.running_fsyncs == [] and len(logs.answers) == 3 and logs.forcer.joint_forces == 1


def test_what_the_system_does_not_take_goes_to_the_worker() -> None:
    kernel = Kernel()
    kernel.refuses = True
    logs = Logs(kernel=kernel)
    logs.send()
    assert logs.answers == [(0, None)] and logs.durable(0)
    logs.logs[0].close()


def test_a_close_waits_for_the_running_fsync_and_gets_its_failure() -> None:
    kernel = Kernel()
    logs = Logs(kernel=kernel)
    logs.disk.faults.fail("force", path=".zxQueue")
    logs.send()
    with pytest.raises(Stopped):
        logs.logs[0].close()
    assert logs.disk.faults.counts["force"] and logs.logs[0].stopped is not None
    kernel.go()
    assert [type(error) for _, error in logs.answers] == [Stopped]


def test_a_roll_during_an_fsync_waits_for_it() -> None:
    kernel = Kernel()
    logs = Logs(kernel=kernel)
    logs.send()
    logs.logs[0].force()
    assert kernel.running_fsyncs[0][0].done, "somebody waited for it"
    assert logs.answers == []
    kernel.go()
    assert logs.answers == [(0, None)]


def test_a_file_under_way_is_not_closed() -> None:
    kernel = Kernel()
    logs = Logs(kernel=kernel)
    logs.send()
    file = kernel.running_fsyncs[0][1]
    logs.logs[0].abandon("the topic is gone")
    file.size()
    kernel.go()
    assert [type(error) for _, error in logs.answers] == [Stopped]
    with pytest.raises(OSError):
        file.size()


def timed(logs: Logs, kernel: Kernel, kernel_seconds: float, worker_seconds: float, rounds: int) -> list[str]:
    """Forces one after the other that take so long; who did each."""
    found = []
    for _ in range(rounds):
        logs.send()
        found.append("kernel" if kernel.running_fsyncs else "worker")
        logs.clock.advance(kernel_seconds if kernel.running_fsyncs else worker_seconds)
        (kernel if kernel.running_fsyncs else logs.worker).go()
    return found


def test_the_faster_way_is_taken_and_the_other_one_tried_now_and_then() -> None:
    kernel = Kernel()
    logs = Logs(held=True, kernel=kernel)
    assert timed(logs, kernel, 0.0001, 0.0002, 2 * PROBE_ROUNDS)[8:].count("worker") == 2
    busy = timed(logs, kernel, 0.003, 0.0003, 2 * PROBE_ROUNDS)
    assert busy[40:].count("kernel") <= 4, "the kernel's thread waits for its turn: ours does it"
    idle = timed(logs, kernel, 0.0001, 0.0002, 40 * PROBE_ROUNDS)
    assert idle[-PROBE_ROUNDS:].count("kernel") >= PROBE_ROUNDS - 1, "it is found out when that is over"


def test_one_stall_does_not_change_the_way() -> None:
    kernel = Kernel()
    logs = Logs(held=True, kernel=kernel)
    timed(logs, kernel, 0.0001, 0.0002, 16)
    timed(logs, kernel, 0.5, 0.0002, 1)
    assert timed(logs, kernel, 0.0001, 0.0002, 50) == ["kernel"] * 50


# One force at a time, and none after one that failed, whichever way each was made.

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
        self.reported: list[OSError | None] = []

    @property
    def forces(self) -> int:
        return self.disk.faults.counts["force"]

    def begin(self) -> bool:
        return self.gate.start(self.file, self.kernel.begin, self.reported.append)

    def durable(self) -> bool:
        return self.disk.durable_file(PATH) == b"bytes"

    def refused(self) -> bool:
        """Whether each way to force says no, and asks the disk for nothing."""
        before = self.forces
        with pytest.raises(OSError):
            self.gate.fsync(self.file)
        return not self.begin() and self.forces == before


def test_an_fsync_makes_the_bytes_durable() -> None:
    bench = Bench()
    bench.gate.fsync(bench.file)
    assert bench.durable() and bench.forces == 1


def test_an_fsync_may_be_done_in_another_way_without_interruption() -> None:
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
def test_after_an_fsync_that_failed_every_one_fails_and_none_is_tried(own_way: bool) -> None:
    bench = Bench()
    bench.disk.faults.fail("force")
    with pytest.raises(OSError):
        bench.gate.fsync(bench.file, bench.file.file.force if own_way else None)
    assert bench.forces == 1 and bench.refused() and bench.refused()


def test_two_fsyncs_never_run_side_by_side() -> None:
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


def test_one_that_needs_no_thread_reports_its_end() -> None:
    bench = Bench()
    assert bench.begin() and not bench.begin(), "one at a time"
    assert bench.reported == [] and not bench.durable()
    bench.kernel.go()
    assert bench.reported == [None] and bench.durable()
    assert bench.begin()


def test_one_that_needs_no_thread_is_waited_for_by_the_next() -> None:
    bench = Bench()
    bench.begin()
    bench.gate.fsync(bench.file, lambda: None)
    assert bench.kernel.running_fsyncs[0][0].done and bench.durable() and bench.reported == []


@pytest.mark.parametrize("reported_first", [True, False])
def test_its_error_too_is_for_all_who_come_later(reported_first: bool) -> None:
    bench = Bench()
    bench.begin()
    bench.disk.faults.fail("force")
    if reported_first:
        bench.kernel.go()
        assert isinstance(bench.reported[0], OSError)
    with pytest.raises(OSError):
        bench.gate.fsync(bench.file)
    if not reported_first:
        bench.kernel.go()
    assert isinstance(bench.reported[0], OSError) and bench.refused() and bench.forces == 1


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
    assert bench.reported == [] and not bench.disk.open_files, "nothing is pinned"


@pytest.mark.parametrize("kernel", [True, False])
def test_a_file_is_not_closed_while_it_is_fsynced(kernel: bool) -> None:
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


def test_a_gate_that_is_shut_fsyncs_nothing_and_calls_it_no_error() -> None:
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


def test_what_is_not_known_to_be_fsynced_stays_open() -> None:
    bench = Bench()
    sealed, active = Written(bench.disk, "/sealed"), bench.file
    sealed.sealed = True
    files = [sealed, active]
    assert kept(bench.gate, files, forced=5) == []
    assert kept(bench.gate, files, forced=4) == [active]


@pytest.mark.parametrize("begin", [Bench.begin, lambda bench: bench.gate.fsync(bench.file)])
def test_after_a_failed_fsync_no_mark_makes_the_written_file_safe_to_close(begin: Callable[[Bench], object]) -> None:
    bench = Bench()
    bench.disk.faults.fail("force")
    try:
        begin(bench)
        bench.kernel.go()
    except OSError:
        pass
    assert kept(bench.gate, [bench.file], forced=5) == [bench.file]
