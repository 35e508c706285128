"""Operations beside: stepped by what they wait for, by time, and ended without a trace."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tfmq.client.connection.addresses import parse_servers
from tfmq.client.connection.connection import ClientConnection
from tfmq.client.drivers.blocking import BlockingDriver
from tfmq.client.operation import BackgroundTasks, Event, Operation, Wait, run_inline, run_work


class Rig:
    def __init__(self) -> None:
        self.now = 0.0
        self.steps: list[str] = []
        self.errors: list[Exception] = []
        self.tasks = BackgroundTasks(lambda: self.now)
        self.flag = Event()

    def waits_for_flag(self) -> Operation[None]:
        self.steps.append("begun")
        yield Wait((self.flag,))
        self.steps.append("flag")

    def waits_for_time(self) -> Operation[None]:
        while True:
            yield Wait((), 2.0)
            self.steps.append(f"{self.now:g}")

    def fails(self) -> Operation[None]:
        yield Wait((), 1.0)
        raise ValueError("planted")


def test_a_task_begins_at_once_and_goes_on_with_its_target() -> None:
    rig = Rig()
    task = rig.tasks.start(rig.waits_for_flag(), rig.errors.append)
    assert rig.steps == ["begun"]
    rig.flag.complete()
    assert rig.steps == ["begun", "flag"]
    assert task.done


def test_ended_tasks_are_forgotten_though_no_time_limit_passes() -> None:
    rig = Rig()
    rig.flag.complete()
    for _ in range(100):
        rig.tasks.start(rig.waits_for_flag(), rig.errors.append)
    assert len(rig.tasks._tasks) == 1


def test_a_task_that_is_thrown_away_is_not_stepped_by_what_it_gives_up() -> None:
    rig = Rig()

    def gives_up() -> Operation[None]:
        try:
            yield Wait((rig.flag,))
        finally:
            rig.flag.complete()

    operation = gives_up()
    task = rig.tasks.start(operation, rig.errors.append)
    operation.close()  # as the garbage collector does
    assert rig.errors == [] and not task.done


def test_a_target_that_is_done_already_is_not_waited_for() -> None:
    rig = Rig()
    rig.flag.complete()
    assert rig.tasks.start(rig.waits_for_flag(), rig.errors.append).done


def test_time_moves_tasks_on_only_when_it_has_come() -> None:
    rig = Rig()
    rig.tasks.start(rig.waits_for_time(), rig.errors.append)
    for rig.now in (1.0, 2.0, 3.0, 4.5):
        rig.tasks.tick()
    assert rig.steps == ["2", "4.5"]
    assert rig.tasks.next_time() == 6.5


def test_an_error_goes_to_its_owner_and_ends_only_its_task() -> None:
    rig = Rig()
    rig.tasks.start(rig.fails(), rig.errors.append)
    rig.tasks.start(rig.waits_for_time(), rig.errors.append)
    rig.now = 2.0
    rig.tasks.tick()
    assert [str(error) for error in rig.errors] == ["planted"]
    assert rig.steps == ["2"]


def test_a_cancelled_task_leaves_nothing() -> None:
    rig = Rig()
    task = rig.tasks.start(rig.waits_for_flag(), rig.errors.append)
    rig.tasks.cancel()
    assert task.done
    assert rig.flag.callbacks == []
    rig.flag.complete()
    assert rig.steps == ["begun"]
    assert rig.tasks.next_time() == float("inf")


def test_a_task_that_is_cancelled_from_inside_ends_at_its_next_wait() -> None:
    rig = Rig()
    ended: list[str] = []

    def cancels() -> Operation[None]:
        try:
            yield Wait((rig.flag,))
            rig.tasks.cancel()
            yield Wait((), 1.0)
        finally:
            ended.append("yes")

    task = rig.tasks.start(cancels(), rig.errors.append)
    rig.flag.complete()
    assert (task.done, ended, rig.errors) == (True, ["yes"], [])


def test_one_that_ctrl_c_ends_has_ended_so_that_it_can_be_begun_anew() -> None:
    tasks = BackgroundTasks(lambda: 0.0)

    def interrupted() -> Operation[None]:
        yield Wait((), 0.0)
        raise KeyboardInterrupt

    task = tasks.start(interrupted(), lambda error: None)
    with pytest.raises(KeyboardInterrupt):
        tasks.tick()
    assert task.done


# Things to wait for: done once, reported once.


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


# Work inside an operation: its result and its error are raised or returned, whichever thread runs it and whenever.


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
    run = partial(BlockingDriver.run_in_thread, driver)  # type: ignore[arg-type]
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
            target=lambda n=number: found.append(driver.run(run_work(driver.run_in_thread, partial(slowly, n))))  # type: ignore[misc]
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
