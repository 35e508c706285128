"""Single messages on the disk by their turns."""

from tests.delay.desk import BILLS, Desk
from tfmq.delay.requests import Turn


def test_it_is_found_in_the_arrivals_and_later_in_its_bucket() -> None:
    desk = Desk()
    a, b = desk.send([b"a", b"b"], [3_600_000, 3_600_000])
    desk.landing.log.force()
    finder = desk.queue._record_finder
    for _ in range(2):
        for handle in (a, b):
            record = finder.find(handle.key, handle.turn)
            assert record is not None and record.endswith(handle.payload)
        desk.advance(120)
    assert sum(each.count for each in desk.buckets.live_buckets) == 2


def test_what_is_nowhere_is_not_found() -> None:
    desk = Desk()
    (a,) = desk.send([b"a"], 3_600_000)
    desk.landing.log.force()
    finder = desk.queue._record_finder
    assert finder.find(a.key, Turn(a.due, a.number - 1)) is None, "that is the note"
    assert finder.find(a.key, Turn(a.due, 999)) is None
    desk.advance(120)
    assert finder.find(BILLS, a.turn) is None
    assert finder.find(a.key, Turn(a.due + 1, a.number)) is None
