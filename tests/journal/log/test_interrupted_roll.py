"""A roll that ends between the new segment and the force of its name: the name is forced before it is used."""

import pytest

from journal.errors import Stopped
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


def test_a_kill_in_a_roll_and_a_power_cut_later_lose_nothing_that_was_fsynced() -> None:
    bench = rolled_until_its_end()

    known = len(segments(bench))

    def before(kind: str, path: str) -> None:
        if kind == "force_folder" and len(segments(bench)) > known:
            raise Killed

    bench.disk.faults.before = before
    with pytest.raises(Killed):
        send_until_it_rolls(bench)
    bench.disk.faults.before = None
    bench.kill()
    require_everything_after_a_power_cut(bench)


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
