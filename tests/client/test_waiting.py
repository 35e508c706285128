"""Things to wait for: done once, told once."""

from tfmq.client.operation import Event, Wait


def test_callbacks_come_once() -> None:
    heard: list[Event] = []
    flag = Event()
    flag.add_done_callback(heard.append)
    flag.complete()
    flag.complete()
    assert heard == [flag] and flag.done


def test_a_late_one_comes_at_once() -> None:
    heard: list[Event] = []
    flag = Event()
    flag.complete()
    flag.add_done_callback(heard.append)
    assert heard == [flag]


def test_a_forgotten_one_does_not_come() -> None:
    heard: list[Event] = []
    flag = Event()
    flag.add_done_callback(heard.append)
    flag.remove_done_callback(heard.append)
    flag.remove_done_callback(heard.append)
    flag.complete()
    assert heard == []


def test_a_wait_without_time_has_no_limit() -> None:
    assert Wait(()).seconds is None
