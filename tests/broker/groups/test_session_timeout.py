"""Who is alive: silence, lost connections, and who comes back."""

import pytest

from tests.broker.group_member import Seat, seats, settle
from tests.broker.helpers import Broker, Session
from tfmq.protocol.commands import DescribeGroup


@pytest.fixture
def broker() -> Broker:
    made = Broker()
    made.create(partitions=10)
    return made


def described(broker: Broker, group: str = "billing") -> dict[str, dict[str, object]]:
    """The members by name."""
    found = broker.ask(DescribeGroup(group)).description["members"]
    return {each["member"]: each for each in found}


def test_a_silent_member_is_dead_after_its_session_time(broker: Broker) -> None:
    first, second = seats(broker, "ada bob", session_ms=5000)
    for _ in range(3):
        broker.advance(1.5)
        second.beat()
    assert len(second.numbers) == 5
    broker.advance(0.6)
    second.beat()
    assert second.numbers == list(range(10))
    assert first.ask_beat().code == "fenced"


def test_a_member_whose_connection_is_gone_has_a_tenth_of_its_session_to_come_back(broker: Broker) -> None:
    first, second = seats(broker, "ada bob")
    first.disconnect()
    broker.advance(2.9)
    first.connect()
    assert first.beat().code == "ok" and len(first.numbers) == 5
    first.disconnect()
    waiting = second.ask_beat(10_000)
    broker.advance(3.1)
    assert len(waiting.assigned) == 10


def test_a_dead_member_may_return_to_partitions_without_an_owner(broker: Broker) -> None:
    first = Seat(broker, "ada")
    first.join()
    first.disconnect()
    broker.advance(1000)
    assert described(broker) == {}
    first.connect()
    assert first.beat().forgotten and len(first.numbers) == 10
    assert first.commit(10).committed == 10
    first.disconnect()
    broker.advance(1000)
    first.connect()
    assert first.commit(20).committed == 10 and list(described(broker)) == ["ada"]


def test_a_second_connection_of_a_member_is_its_connection_from_then_on(broker: Broker) -> None:
    (first,) = seats(broker, "ada")
    old = first.session
    first.session = Session("ada again")
    first.beat()
    old.close()
    broker.advance(5)
    assert described(broker)["ada"]["client"] == "ada again"


def test_a_member_that_was_taken_for_dead_is_asked_what_it_wants(broker: Broker) -> None:
    """Its connection stands, so that it noticed nothing: until it says so it keeps what it has, and gets no more."""
    broker.create("bills")
    first = Seat(broker, "ada", topics="orders bills")
    first.join()
    broker.advance(31)
    second = Seat(broker, "bob")
    second.join()
    first.beat()
    assert first.forgotten and first.share == [("bills", 0)]
    waiting = first.ask_beat(10_000)
    assert waiting.code == "waiting"
    second.leave()
    first.take(waiting)
    assert len(first.share) == 11 and not first.forgotten


def test_a_broker_that_was_started_anew_asks_what_its_members_want(broker: Broker) -> None:
    (first,) = seats(broker, "ada")
    again = broker.restart()
    first.connect(again)
    assert first.beat(10_000).forgotten and first.numbers == list(range(10))
    assert first.ask_beat(10_000).code == "waiting"
    assert described(again)["ada"]["topics"] == ["orders"]


def test_a_broker_that_was_suspended_declares_no_member_dead(broker: Broker) -> None:
    """Its process was stopped, or its machine asleep: what the members said waits to be read."""
    first, second = seats(broker, "ada bob")
    first.disconnect()
    broker.clock.advance(1000)
    broker.engine.broker.timers.tick(broker.clock.monotonic())
    broker.engine.broker.end_turn()
    settle(second)
    assert len(second.numbers) == 5, "nobody else was taken for dead, either"
    first.connect()
    settle(first, second)
    assert len(first.numbers) == 5
    broker.advance(31)
    assert described(broker) == {}
