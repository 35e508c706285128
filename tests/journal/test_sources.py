"""How far each source has come, and what of that is on the disk."""

import pytest

from journal.log.segments import AppliedPositions
from journal.record.batch import Source
from journal.record.block_trailer import SOURCE_DELAY
from tests.journal.logs import Bench, make_batch

ONE, OTHER = (1, 7), (2, 7)


def test_what_was_appended_is_sure_once_the_log_is_forced_so_far() -> None:
    sources = AppliedPositions({ONE: (5, 0)})
    sources.record(ONE, (6, 1), 100, 0)
    sources.record(OTHER, (1, 1), 200, 0)
    sources.record(ONE, (7, 0), 300, 0)
    assert sources.applied == {ONE: (7, 0), OTHER: (1, 1)}
    assert (sources.durable(ONE, 99), sources.durable(OTHER, 99)) == ((5, 0), None)
    assert (sources.durable(ONE, 200), sources.durable(OTHER, 200)) == ((6, 1), (1, 1))
    assert sources.durable(ONE, 300) == (7, 0)


def test_a_lower_place_that_comes_later_takes_nothing_back() -> None:
    sources = AppliedPositions()
    sources.record(ONE, (6, 1), 100, 0)
    sources.record(ONE, (5, 9), 200, 150)
    assert sources.applied[ONE] == sources.durable(ONE, 150) == sources.durable(ONE, 200) == (6, 1)


def append(bench: Bench, number: int) -> None:
    bench.log.append([make_batch(1, sequence=number)], Source(SOURCE_DELAY, 4, number, 0))


@pytest.mark.parametrize("snapshot", [False, True])
def test_of_a_log_that_stopped_the_end_that_was_not_forced_is_not_sure_over_restarts(snapshot: bool) -> None:
    bench = Bench()
    bench.open()
    append(bench, 1)
    if snapshot:
        bench.log.close()
        bench.open()
    append(bench, 2)
    assert bench.log.settled(SOURCE_DELAY, 4) == ((1, 0) if snapshot else None)
    bench.log.force()
    append(bench, 3)
    assert (bench.log.applied(SOURCE_DELAY, 4), bench.log.settled(SOURCE_DELAY, 4)) == ((3, 0), (2, 0))
    bench.log.stop("to see")
    for _ in range(2):
        bench.kill()
        assert bench.log.stopped == "to see"
        assert (bench.log.applied(SOURCE_DELAY, 4), bench.log.settled(SOURCE_DELAY, 4)) == ((3, 0), (2, 0))
    bench.log.resume()
    assert bench.log.settled(SOURCE_DELAY, 4) == (3, 0)
    bench.log.close()
    assert bench.open().settled(SOURCE_DELAY, 4) == (3, 0)
