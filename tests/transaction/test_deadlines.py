"""Deadlines: never early, once, and only the last one that was set."""

from journal.testing import SimulatedClock
from tests.scale import seeded
from tfmq.broker.timers import Timers
from tfmq.transaction.deadlines import STALE_ENTRIES_MIN, Deadlines


class Watch:
    """Deadlines on a clock that tests move."""

    def __init__(self) -> None:
        self.clock = SimulatedClock()
        self.timers = Timers(self.clock)
        self.over: list[tuple[int, float]] = []
        self.deadlines = Deadlines(self.timers, lambda epoch: self.over.append((epoch, self.clock.monotonic())))
        self.begin = self.clock.monotonic()

    def advance(self, seconds: float) -> None:
        end = self.clock.monotonic() + seconds
        while (due := self.timers.next_due()) is not None and due <= end:
            self.clock.advance(max(0.0, due - self.clock.monotonic()))
            self.timers.tick(self.clock.monotonic())
        self.clock.advance(max(0.0, end - self.clock.monotonic()))

    @property
    def epochs(self) -> list[int]:
        return [epoch for epoch, _ in self.over]


def test_nothing_is_called_before_its_time_and_each_once_after_it() -> None:
    watch = Watch()
    watch.deadlines.set_deadline(1, 60)
    watch.deadlines.set_deadline(2, 30)
    watch.advance(29.9)
    assert watch.epochs == []
    watch.advance(0.2)
    assert watch.epochs == [2]
    watch.advance(100)
    assert watch.epochs == [2, 1]
    assert [round(at - watch.begin) for _, at in watch.over] == [30, 60]
    assert len(watch.deadlines) == 0


def test_a_later_setting_replaces_the_earlier() -> None:
    watch = Watch()
    watch.deadlines.set_deadline(1, 10)
    watch.deadlines.set_deadline(1, 40)
    watch.advance(39)
    assert watch.epochs == []
    watch.advance(2)
    assert watch.epochs == [1]


def test_what_was_cleared_is_not_called() -> None:
    watch = Watch()
    watch.deadlines.set_deadline(1, 10)
    watch.deadlines.remove(1)
    watch.deadlines.remove(2)
    watch.advance(100)
    assert watch.epochs == []
    assert 1 not in watch.deadlines


def test_closed_deadlines_call_nothing() -> None:
    watch = Watch()
    watch.deadlines.set_deadline(1, 10)
    watch.deadlines.close()
    watch.advance(100)
    assert watch.epochs == []
    assert watch.timers.next_due() is None


def test_one_that_is_called_may_set_another() -> None:
    watch = Watch()

    def over(epoch: int) -> None:
        if epoch < 3:
            again.set_deadline(epoch + 1, 5)

    again = Deadlines(watch.timers, over)
    again.set_deadline(1, 5)
    watch.advance(11)
    assert 3 in again
    watch.advance(5)
    assert len(again) == 0


def test_settings_that_are_over_do_not_pile_up() -> None:
    watch = Watch()
    for round_number in range(20):
        for epoch in range(STALE_ENTRIES_MIN):
            watch.deadlines.set_deadline(epoch, 1000 - round_number)
        for epoch in range(STALE_ENTRIES_MIN):
            watch.deadlines.remove(epoch)
    assert len(watch.deadlines._heap) <= 3 * STALE_ENTRIES_MIN


def test_many_come_in_the_order_of_their_times() -> None:
    generator = seeded("deadlines")
    watch = Watch()
    wanted = {}
    for epoch in range(300):
        seconds = generator.uniform(0, 100)
        wanted[epoch] = seconds
        watch.deadlines.set_deadline(epoch, seconds)
    for epoch in generator.sample(range(300), 100):
        watch.deadlines.remove(epoch)
        del wanted[epoch]
    watch.advance(101)
    assert sorted(watch.epochs) == sorted(wanted)
    times = [wanted[epoch] for epoch in watch.epochs]
    assert times == sorted(times)
