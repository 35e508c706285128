"""The blocking driver without threads and sockets."""

from __future__ import annotations

import threading

import pytest

from tests.testing.simulation_parts import new_driver, new_link, new_world
from tfmq.client.connection.requests import request
from tfmq.client.operation import Event
from tfmq.errors import Closed, ConnectionFailed, NotAllowed
from tfmq.protocol.commands import Ping
from tfmq.testing.drivers import SimulatedChannel


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

    driver.callbacks.append(callback)
    world.settle()
    assert seen[0] is False and "A callback must not wait" in str(seen[1])


def test_the_owner_of_the_lock_must_not_wait() -> None:
    driver = new_driver(new_world())
    with driver.lock, pytest.raises(NotAllowed, match="Selectors, codecs and hooks"):
        driver.wait((Event(),), 1)


def test_a_close_ends_every_wait() -> None:
    world = new_world()
    driver = new_driver(world)
    driver.call_later(1, lambda: driver.callbacks.append(driver.close))
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


# A link's channel over a wire.


def test_it_connects_when_the_link_wants_to() -> None:
    world = new_world()
    link = new_link(world)
    channel = SimulatedChannel(link, world.server)
    channel.dial()
    assert channel.socket is None, "nobody asked for anything"
    call = link.send_request(Ping())
    channel.dial()
    while channel.exchange() or world.server.run_turn():
        pass
    assert call.result().time_ms == world.clock.wall_ms()
    assert link.connection_count == 1


def test_where_nothing_listens_the_link_fails_as_by_a_network() -> None:
    world = new_world()
    world.server.stop()
    link = new_link(world)
    channel = SimulatedChannel(link, world.server)
    call = link.send_request(Ping(), seconds=1)
    while not call.done:
        channel.dial()
        world.clock.move(max(link.next_time(), world.clock.monotonic()))
        channel.tick()
    with pytest.raises(ConnectionFailed, match="Nothing listens at here:1: start tfmq-server"):
        call.result()


def test_a_cut_wire_breaks_the_connection() -> None:
    world = new_world()
    link = new_link(world)
    channel = SimulatedChannel(link, world.server)
    call = link.send_request(Ping(), repeat=False)
    channel.dial()
    channel.exchange()
    world.server.disconnect()
    channel.exchange()
    assert link.state == "down" and channel.socket is None
    assert not call.done, "it had not gone out yet, so it waits for the next connection"
