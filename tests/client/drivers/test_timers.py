"""Timers: when they are due, in order, once, or not at all."""

from tfmq.client.drivers.callbacks import Timers


class Watch:
    def __init__(self) -> None:
        self.time = 0.0
        self.rung: list[str] = []
        self.timers = Timers(lambda: self.time)

    def set(self, seconds: float, name: str):  # type: ignore[no-untyped-def]
        return self.timers.add(seconds, lambda: self.rung.append(name))

    def at(self, time: float) -> list[str]:
        self.time = time
        self.timers.tick()
        return self.rung


def test_each_rings_once_at_its_time() -> None:
    watch = Watch()
    watch.set(2, "b")
    watch.set(1, "a")
    assert watch.timers.next_time() == 1
    assert watch.at(0.9) == []
    assert watch.at(1) == ["a"]
    assert watch.at(5) == ["a", "b"]
    assert watch.timers.next_time() == float("inf")


def test_a_cancelled_one_does_not() -> None:
    watch = Watch()
    watch.set(1, "a").cancel()
    assert watch.timers.next_time() == float("inf")
    assert watch.at(2) == []


def test_one_may_set_another() -> None:
    watch = Watch()
    watch.timers.add(1, lambda: watch.set(1, "later"))
    assert watch.at(1) == []
    assert watch.at(2) == ["later"]


def test_clear_forgets_all() -> None:
    watch = Watch()
    watch.set(1, "a")
    watch.timers.clear()
    assert watch.at(2) == []
