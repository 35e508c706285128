"""Work inside an operation: its result and its error come out, whoever does it and whenever."""

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tfmq.client.connection.addresses import parse_servers
from tfmq.client.connection.connection import ClientConnection
from tfmq.client.drivers.blocking import BlockingDriver
from tfmq.client.operation import Event, run_inline, run_work, thread_executor


def test_inline_work_needs_no_waiting() -> None:
    operation = run_work(run_inline, lambda: 42)
    with pytest.raises(StopIteration) as end:
        next(operation)
    assert end.value.value == 42


def test_what_the_work_raises_is_raised() -> None:
    def fail() -> None:
        raise OSError("planted")

    with pytest.raises(OSError, match="planted"):
        next(run_work(run_inline, fail))


def test_work_in_a_thread_brings_its_result_under_the_lock() -> None:
    class Driver:
        """As far as a thread needs it."""

        def __init__(self) -> None:
            self.closed = False
            self.lock = threading.Lock()
            self.done = threading.Event()
            self.glances = 0

        def poll_nonblocking(self) -> None:
            assert self.lock.locked()
            self.glances += 1

        def wake(self) -> None:
            assert not self.lock.locked()

        def set_event(self, event: Event) -> None:
            self.done.set()

    driver = Driver()
    results: list[Any] = []
    run = thread_executor(driver)
    for call in (threading.get_ident, lambda: 1 // 0):
        driver.done.clear()
        run(call, lambda result, error: results.append((result, error, driver.lock.locked())))
        assert driver.done.wait(10)
    assert results[0][0] != threading.get_ident() and results[0][1:] == (None, True)
    assert isinstance(results[1][1], ZeroDivisionError) and driver.glances == 2


@pytest.mark.timeout(20)
def test_a_thread_that_waits_for_nothing_but_such_work_is_woken() -> None:
    driver = BlockingDriver(ClientConnection(parse_servers("127.0.0.1:1"), time.monotonic))
    found: list[int] = []
    threads = [
        threading.Thread(
            target=lambda n=number: found.append(
                driver.run(run_work(driver.run_in_thread, partial(slowly, n)))
            )  # type: ignore[misc]
        )
        for number in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert sorted(found) == [0, 1, 2, 3]
    driver.close()


def slowly(number: int) -> int:
    time.sleep(0.05 * number)
    return number


def test_work_elsewhere_is_waited_for() -> None:
    kept: list[Callable[[Any, BaseException | None], None]] = []
    operation = run_work(lambda _, done: kept.append(done), lambda: 0)
    wait = next(operation)
    assert not any(target.done for target in wait.futures)
    kept[0](7, None)
    with pytest.raises(StopIteration) as end:
        next(operation)
    assert end.value.value == 7
