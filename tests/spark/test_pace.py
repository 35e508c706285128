"""When an idle query asks again."""

from tfmq.spark.stream_reader import IDLE_FACTOR, IDLE_SECONDS_MAX, IdleBackoff


class Time:
    """A clock that sleeping and asking move."""

    def __init__(self) -> None:
        self.now, self.slept = 0.0, 0.0

    def sleep(self, seconds: float) -> None:
        self.slept += seconds
        self.now += seconds


def test_an_idle_query_rests_for_longer_than_it_asks() -> None:
    time = Time()
    pace = IdleBackoff(lambda: time.now, time.sleep)
    for _ in range(100):
        with pace.measured_request():
            time.now += 0.01
    assert time.slept / time.now > 0.7
    assert time.slept < 100 * 0.01 * IDLE_FACTOR


def test_a_busy_query_never_rests() -> None:
    time = Time()
    pace = IdleBackoff(lambda: time.now, time.sleep)
    for _ in range(10):
        with pace.measured_request():
            time.now += 0.01
        pace.reset()
    assert time.slept == 0.0


def test_nobody_rests_for_long() -> None:
    time = Time()
    pace = IdleBackoff(lambda: time.now, time.sleep)
    for _ in range(2):
        with pace.measured_request():
            time.now += 60.0
    assert time.slept == IDLE_SECONDS_MAX
