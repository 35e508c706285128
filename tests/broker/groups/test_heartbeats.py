"""Heartbeats that wait: they end with a change, with their time, with their connection, never in between."""

import gc
import tracemalloc

import pytest

from tests.broker.group_member import Seat, seats
from tests.broker.helpers import Broker
from tfmq.protocol.commands import Cancel


@pytest.fixture
def broker() -> Broker:
    made = Broker()
    made.create(partitions=10)
    return made


def test_heartbeats_wait_for_a_change_and_end_with_their_time(broker: Broker) -> None:
    first, second = seats(broker, "ada bob")
    waiting = first.ask_beat(60_000)
    assert waiting.code == "waiting"
    broker.advance(9.9)
    assert waiting.code == "waiting"
    broker.advance(0.2)
    assert waiting.assigned is None and waiting.generation == first.generation
    waiting = first.ask_beat(10_000)
    second.leave()
    assert [row[2] for row in waiting.assigned] == list(range(10))
    first.take(waiting)
    assert first.numbers == list(range(10))


def test_of_two_heartbeats_of_a_member_the_older_ends_and_cancel_ends_one_too(broker: Broker) -> None:
    (first,) = seats(broker, "ada")
    older, newer = first.ask_beat(10_000), first.ask_beat(10_000)
    assert older.assigned is None and newer.code == "waiting"
    assert broker.ask(Cancel(newer.correlation)).cancelled is False
    assert first.ask(Cancel(newer.correlation)).cancelled is True
    assert newer.assigned is None
    gone = first.ask_beat(10_000)
    first.disconnect()
    assert gone.done


def test_a_lost_reply_is_given_again(broker: Broker) -> None:
    """The broker does not store what it has sent: a member that does not know it is notified."""
    first, second = Seat(broker, "ada"), Seat(broker, "bob")
    first.join()
    second.join()
    lost = first.ask_beat()
    assert lost.assigned is not None
    first.connect()
    first.beat(10_000)
    assert len(first.leaving) == 5
    first.finish()
    second.ask_beat()
    second.connect()
    second.beat(10_000)
    assert second.numbers == [5, 6, 7, 8, 9]


def test_a_member_that_knows_waits_although_it_has_not_given_up_yet(broker: Broker) -> None:
    first, second = Seat(broker, "ada"), Seat(broker, "bob")
    first.join()
    second.join()
    first.beat()
    assert first.ask_beat(5000).code == "waiting"


def test_waiting_heartbeats_end_when_the_broker_stops(broker: Broker) -> None:
    (first,) = seats(broker, "ada")
    waiting = first.ask_beat(10_000)
    broker.stop()
    assert waiting.code == "busy"


@pytest.mark.long
def test_what_a_waiting_member_claims_to_give_up_costs_nothing_where_it_has_not_got_it(broker: Broker) -> None:
    (first,) = seats(broker, "ada")
    for number in range(20_000):
        name = ("orders", 77, number)
        first.held[name] = 1
        first.leaving.add(name)
    gc.collect()
    tracemalloc.start()
    try:
        waiting = first.ask_beat(10_000)
        gc.collect()
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert waiting.code == "waiting"
    assert kept < 200_000, "bytes, for as long as it waits"
    second = Seat(broker, "bob")
    second.join()
    assert len(waiting.assigned) == 5, "of its own partitions it is told as ever"
