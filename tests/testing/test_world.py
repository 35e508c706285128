"""Who does what next, and when time goes on."""

import threading
from typing import Any

import pytest

from tests.testing.inside import new_driver, new_world
from tfmq.client.connection.requests import request, sleep
from tfmq.client.operation import Event, Operation, Wait
from tfmq.errors import NotAllowed, TimedOut
from tfmq.protocol.commands import CreateTopic, Fetch, Ping
from tfmq.testing.simulation import WAIT_SECONDS_MAX, NothingComes


def test_a_round_trip_takes_no_time() -> None:
    world = new_world()
    before = world.clock.now
    assert new_driver(world).run(request(new_driver(world).link, Ping(), seconds=5)).time_ms
    assert world.clock.now == before


def test_a_wait_with_an_end_lets_time_go_on_to_it_and_no_further() -> None:
    world = new_world()
    driver = new_driver(world)
    before = world.clock.monotonic()
    assert not driver.wait((Event(),), 2.5)
    assert world.clock.monotonic() == pytest.approx(before + 2.5, abs=2e-6)


def test_it_ends_at_what_it_waits_for_not_at_its_own_end() -> None:
    world = new_world()
    driver = new_driver(world)
    flag, before = Event(), world.clock.monotonic()
    driver.call_later(1.0, flag.complete)
    assert driver.wait((flag,), 60)
    assert world.clock.monotonic() == pytest.approx(before + 1, abs=2e-6)


def test_what_is_due_on_the_way_happens_in_order_each_at_its_time() -> None:
    world = new_world()
    first, second = new_driver(world), new_driver(world)
    start, seen = world.clock.monotonic(), []

    def note(word: str) -> Any:
        return lambda: seen.append((word, round(world.clock.monotonic() - start, 3)))

    second.call_later(30, note("half a minute"))
    first.call_later(10, note("ten"))
    second.call_later(3600, note("an hour"))
    first.call_later(3600.5, note("too late"))

    def again() -> None:
        first.timers.add(5, note("five after ten"))

    first.call_later(10, again)
    world.clock.advance(hours=1)
    assert seen == [("ten", 10.0), ("five after ten", 15.0), ("half a minute", 30.0), ("an hour", 3600.0)]


def test_a_wait_that_nothing_can_end_is_told_so_and_moves_nothing() -> None:
    world = new_world()
    driver = new_driver(world)
    driver.call_later(10, Event().complete)
    before = world.clock.now
    with pytest.raises(NothingComes, match=r"wait for ever.*09:00:00 UTC.*clock\.advance"):
        driver.wait((Event(),))
    assert world.clock.now == before


def test_a_request_ends_by_itself_so_time_may_go_on_for_it() -> None:
    """A fetch that finds nothing is answered when its time is up; a call nobody answers fails at its deadline."""
    world = new_world()
    driver = new_driver(world)
    driver.run(request(driver.link, CreateTopic("orders", 1, {})))
    assert world.server.engine is not None
    incarnation = world.server.engine.broker.topics.topic("orders").incarnation
    before = world.clock.monotonic()
    reply = driver.run(request(driver.link, Fetch("orders", incarnation, 0, 0, wait_ms=4000), seconds=30))
    assert reply.next == 0
    assert world.clock.monotonic() - before == pytest.approx(4, abs=1e-5)

    (end,) = world.server._ends
    end.pause("a test")
    with pytest.raises(TimedOut, match="did not reply to PING in time"):
        driver.run(request(driver.link, Ping(), seconds=30))
    assert world.clock.monotonic() - before == pytest.approx(34, abs=1e-5)


def test_an_operation_that_waits_again_and_again_for_ever_is_ended() -> None:
    world = new_world()
    driver = new_driver(world)

    def tries_for_ever() -> Operation[None]:
        while True:
            yield Wait((), 5.0)

    before = world.clock.monotonic()
    with pytest.raises(NothingComes):
        driver.run(tries_for_ever())
    assert world.clock.monotonic() - before < WAIT_SECONDS_MAX + 10


def test_an_operation_may_wait_as_long_as_it_asked_to() -> None:
    world = new_world()
    new_driver(world).run(sleep(100 * 86_400))
    assert world.clock.now.isoformat().startswith("2026-04-15T09:00:00")


def test_time_cannot_be_moved_from_within_what_happens() -> None:
    world = new_world()
    driver = new_driver(world)
    caught: list[Exception] = []

    def moves() -> None:
        try:
            world.clock.advance(1)
        except NotAllowed as error:
            caught.append(error)

    driver.call_later(1, moves)
    world.clock.advance(2)
    assert "Time cannot be moved" in str(caught[0])


def test_work_beside_may_wait_itself() -> None:
    world = new_world()
    driver = new_driver(world)
    answers: list[Any] = []
    driver.run_in_thread(
        lambda: driver.run(request(driver.link, Ping())), lambda result, error: answers.append(result)
    )
    world.settle()
    assert answers[0].time_ms == world.clock.wall_ms()


def test_another_thread_is_refused_with_the_way_out() -> None:
    world = new_world()
    driver = new_driver(world)
    caught: list[Exception] = []

    def elsewhere() -> None:
        try:
            driver.run(request(driver.link, Ping()))
        except NotAllowed as error:
            caught.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join(10)
    assert "tfmq.local_server" in str(caught[0])


def test_the_end_of_the_world_closes_every_client() -> None:
    world = new_world()
    driver = new_driver(world)
    driver.run(request(driver.link, Ping()))
    world.close_clients()
    assert driver.closed and world.clients == []
    world.close_clients()
