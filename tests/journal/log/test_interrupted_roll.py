"""A roll that ends between the new segment and the force of its name: the name is forced before it is used."""

import errno

import pytest

from journal.errors import Stopped
from journal.testing import Moment
from tests.journal.logs import FOLDER, Bench

SEGMENT_BYTES = 4096


class Killed(BaseException):
    """The process ends here; the system lives on."""


def rolled_until_its_end() -> Bench:
    """A log of some segments, whose next roll is cut short in one way or another."""
    bench = Bench(segment_bytes=SEGMENT_BYTES)
    bench.open()
    while bench.log.segment_count < 3:
        bench.send(1, 500)
        bench.log.force()
    return bench


def segments(bench: Bench) -> list[str]:
    return [name for name in bench.disk.list(FOLDER) if name.endswith(".zxQueue")]


def send_until_it_rolls(bench: Bench) -> None:
    while True:
        bench.send(1, 500)
        bench.log.force()


def require_everything_after_a_power_cut(bench: Bench) -> None:
    bench.send(3, 100)
    bench.log.force()
    end, there = bench.log.end_offset, bench.read_all()
    assert bench.crash(keep="nothing").end_offset == end
    assert bench.read_all() == there
    assert bench.log.damage == []


def killed_in_a_roll() -> Bench:
    """A log whose process ended between the creation of its last segment and the fsync of the folder."""
    bench = rolled_until_its_end()
    known = len(segments(bench))

    def before(kind: str, path: str) -> None:
        if kind == "force_folder" and len(segments(bench)) > known:
            raise Killed

    bench.disk.faults.before = before
    with pytest.raises(Killed):
        send_until_it_rolls(bench)
    bench.disk.faults.before = None
    return bench


def test_a_kill_in_a_roll_and_a_power_cut_later_lose_nothing_that_was_fsynced() -> None:
    bench = killed_in_a_roll()
    bench.kill()
    require_everything_after_a_power_cut(bench)


@pytest.mark.parametrize("full_at", [None, 1, 2], ids=["space", "full at the first slot", "full at the second slot"])
def test_a_power_cut_at_any_step_after_a_kill_in_a_roll_loses_nothing_that_was_fsynced(full_at: int | None) -> None:
    """Also if the disk is full when the start writes the checkpoint: the log is made durable by the first append."""
    bench = killed_in_a_roll()
    assert bench.disk.size(bench.path(segments(bench)[-1])) == 0
    before = Bench(bench.disk.crash(keep="nothing"))
    before.open()
    durable = before.read_all()
    steps: list[tuple[Moment, int]] = []
    bench.disk.after = lambda kind, path: steps.append((Moment(bench.disk), len(durable)))
    if full_at is not None:
        bench.disk.faults.fail("write", path="log.mark", nth=full_at, error=errno.ENOSPC)
    bench.open()
    assert any("waits for space" in warning for warning in bench.log.recovery.warnings) == (full_at is not None)
    for _ in range(2):
        bench.send(2, 100)
        bench.log.force()
        durable = bench.read_all("forced")
    bench.disk.after = None
    assert len(steps) >= 10
    for moment, count in steps:
        for keep in ("nothing", "everything"):
            found = Bench(moment.crash(None, keep), segment_bytes=SEGMENT_BYTES)
            found.open()
            assert found.log.damage == []
            assert found.read_all()[:count] == durable[:count]


@pytest.mark.parametrize("restarted", [False, True])
def test_a_roll_that_failed_and_a_power_cut_after_the_resumption_lose_nothing(restarted: bool) -> None:
    bench = rolled_until_its_end()
    bench.disk.faults.fail("force_folder", nth=2)  # the first is that of the snapshot
    with pytest.raises(Stopped):
        send_until_it_rolls(bench)
    assert len(segments(bench)) > bench.log.segment_count, "its file is there, and the log does not know it"
    if restarted:
        bench.kill()
    bench.log.resume()
    require_everything_after_a_power_cut(bench)
