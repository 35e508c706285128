"""Things to wait for: done once, told once."""

from tfmq.client.operation import Flag, Wait


def test_callbacks_come_once() -> None:
    heard: list[Flag] = []
    flag = Flag()
    flag.when_done(heard.append)
    flag.settle()
    flag.settle()
    assert heard == [flag] and flag.done


def test_a_late_one_comes_at_once() -> None:
    heard: list[Flag] = []
    flag = Flag()
    flag.settle()
    flag.when_done(heard.append)
    assert heard == [flag]


def test_a_forgotten_one_does_not_come() -> None:
    heard: list[Flag] = []
    flag = Flag()
    flag.when_done(heard.append)
    flag.forget(heard.append)
    flag.forget(heard.append)
    flag.settle()
    assert heard == []


def test_a_wait_without_time_has_no_limit() -> None:
    assert Wait(()).seconds is None
