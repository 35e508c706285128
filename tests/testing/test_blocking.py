"""The blocking driver without threads and sockets."""

import threading

import pytest

from tests.testing.inside import new_driver, new_world
from tfmq.client.connection.requests import request
from tfmq.client.operation import Event
from tfmq.errors import Closed, NotAllowed
from tfmq.protocol.commands import Ping


def test_it_runs_operations_as_the_real_one_and_starts_no_thread() -> None:
    world = new_world()
    driver = new_driver(world)
    before = threading.active_count()
    for _ in range(3):
        assert driver.run(request(driver.link, Ping())).time_ms == world.clock.wall_ms()
    driver.wake(at_once=True)
    assert threading.active_count() == before
    assert driver.link.connection_count == 1


def test_what_is_done_already_is_not_waited_for() -> None:
    driver = new_driver(new_world())
    flag = Event()
    flag.complete()
    assert driver.wait((flag, Event()), 0)


def test_a_raised_flag_ends_a_wait() -> None:
    world = new_world()
    driver = new_driver(world)
    flag = Event()
    driver.call_later(3, lambda: driver.set_event(flag))
    assert driver.wait((flag,), 10)


def test_callbacks_run_outside_of_the_lock_and_must_not_wait() -> None:
    world = new_world()
    driver = new_driver(world)
    seen: list[object] = []

    def callback() -> None:
        seen.append(driver.lock._is_owned())  # type: ignore[attr-defined]
        try:
            driver.run(request(driver.link, Ping()))
        except NotAllowed as error:
            seen.append(str(error))

    driver.callbacks.add(callback)
    world.settle()
    assert seen[0] is False and "A callback must not wait" in str(seen[1])


def test_whoever_holds_the_lock_must_not_wait() -> None:
    driver = new_driver(new_world())
    with driver.lock, pytest.raises(NotAllowed, match="Selectors, codecs and hooks"):
        driver.wait((Event(),), 1)


def test_a_close_ends_the_wait_of_whoever_waits() -> None:
    world = new_world()
    driver = new_driver(world)
    driver.call_later(1, lambda: driver.callbacks.add(driver.close))
    with pytest.raises(Closed):
        driver.wait((Event(),), 10)
    assert world.clients == []


def test_the_broker_sees_a_close_at_once() -> None:
    world = new_world()
    driver = new_driver(world)
    driver.run(request(driver.link, Ping()))
    assert len(world.server._ends) == 1
    driver.close()
    assert world.server._ends == []
