"""In which order things become durable."""

from __future__ import annotations

import pytest

from journal.errors import Stopped
from journal.log.checkpoint import LogCheckpointFile
from tests.journal.logs import FOLDER, LOG_ID, Bench


def calls(bench: Bench) -> list[tuple[str, str]]:
    """What changes the disk from now on: (kind, end of the path)."""
    found: list[tuple[str, str]] = []
    bench.disk.after = lambda kind, path: found.append((kind, path.rsplit(".", 1)[-1]))
    return found


def test_a_roll_fsyncs_the_old_file_then_makes_the_new_and_fsyncs_its_name_then_writes() -> None:
    bench = Bench(segment_bytes=1000)
    bench.open()
    for _ in range(5):
        bench.send()
    found = calls(bench)
    bench.send()
    order = [found.index(step) for step in (("force", "zxQueue"), ("create", "zxQueue"))]
    order.append(max(n for n, (kind, _) in enumerate(found) if kind == "force_folder"))
    order.append(max(n for n, step in enumerate(found) if step == ("write", "zxQueue")))
    assert order == sorted(order)
    assert found.index(("rename", "state")) > order[0], "a snapshot never describes more than is forced"


def test_a_segment_goes_only_after_the_marks_say_so() -> None:
    bench = Bench(segment_bytes=1000)
    bench.open()
    for _ in range(12):
        bench.send()
    found = calls(bench)
    bench.log.truncate_before(1000)
    assert ("unlink", "zxQueue") in found
    assert found.index(("force", "mark")) < found.index(("unlink", "zxQueue"))


def test_a_segment_stays_as_long_as_no_snapshot_knows_what_it_taught() -> None:
    bench = Bench(segment_bytes=1000)
    bench.open()
    bench.disk.faults.fail("create", times=None, error=28, path=".state")
    for _ in range(12):
        bench.send()
    before = bench.names(".zxQueue")
    bench.log.truncate_before(1000)
    assert bench.names(".zxQueue") == before and bench.log.first_offset > 0
    assert bench.log._writer.warnings
    bench.disk.faults.clear()
    bench.kill()
    assert len(bench.state.runs) == 12
    for _ in range(6):
        bench.send()
    bench.log.retain(0)
    assert bench.names(".zxQueue")[0] > before[0]


def test_clean_is_set_last_and_taken_back_first() -> None:
    bench = Bench()
    bench.open()
    bench.send()
    found = calls(bench)
    bench.log.close()
    assert found[-1] in (("force", "mark"), ("write", "mark"))
    bench.open()
    found = calls(bench)
    bench.send()
    assert found.index(("force", "mark")) < found.index(("write", "zxQueue"))


def test_a_stop_is_on_the_disk_before_the_error_is_raised() -> None:
    bench = Bench()
    bench.open()
    bench.send()
    bench.disk.faults.fail("force", path=".zxQueue")
    with pytest.raises(Stopped):
        bench.log.force()
    marks = LogCheckpointFile(bench.disk.crash(keep="nothing"), FOLDER, LOG_ID).read()
    assert marks is not None and marks.stopped


def test_after_one_failed_fsync_no_other_one_says_ok() -> None:
    bench = Bench()
    log = bench.open()
    bench.send()
    plan = log.force_plan()
    assert plan is not None
    bench.disk.faults.fail("force", path=".zxQueue")
    for _ in range(3):
        with pytest.raises(OSError):
            plan.gate.fsync(plan.file)


def test_snapshots_are_written_every_so_many_bytes_and_never_beyond_the_durable_offset() -> None:
    bench = Bench(state_bytes=1000)
    log = bench.open()
    for _ in range(30):
        bench.send()
        plan = log.force_plan()
        assert plan is not None
        plan.gate.fsync(plan.file)
        bench.send()
        work = log.force_done(plan, None)
        if work is not None:
            work()
        assert all(int(name[:32]) <= log.forced_offset for name in bench.names(".state"))
    assert len(bench.names(".state")) == 2
    assert int(bench.names(".state")[-1][:32]) > log.end_offset - 1500


def test_on_a_replicated_disk_only_the_end_of_an_announced_fsync_shows_what_is_durable() -> None:
    bench = Bench(segment_bytes=1000)
    bench.open()
    bench.send()
    bench.log.force()
    seen = bench.log.forced_offset
    bench.disk.is_replicated = True
    for _ in range(12):
        bench.send()  # rolls, which fsync what is before them
    bench.log.force()
    bench.log.truncate_before(0)
    assert bench.log.forced_offset == seen and bench.log.dirty is not None
    assert len(bench.read_all(upto="forced")) == 1, "readers see no more"
    assert bench.log.flush_due(bench.clock.monotonic() + 1e6) is not None
    plan = bench.log.force_plan()
    assert plan is not None and plan.end == bench.log.end_offset
    bench.log.force_done(plan, None)
    assert bench.log.forced_offset == bench.log.end_offset and len(bench.read_all(upto="forced")) == 13
    assert bench.log.force_plan() is None and bench.log.dirty is None


def test_after_a_start_everything_that_recovery_has_found_is_durable_on_a_replicated_disk_too() -> None:
    bench = Bench(segment_bytes=1000)
    bench.open()
    for _ in range(12):
        bench.send()
    bench.log.force()
    bench.disk.is_replicated = True
    assert bench.kill().forced_offset == bench.log.end_offset
