"""A run on its way: what the broker says decides, and a slow process that wakes up later can double nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.dead_letters.helpers import Process, failure, message
from tfmq.client.send.idempotent_send import ProducerPartition, lease_producer_id
from tfmq.dead_letters import model
from tfmq.dead_letters.model import Letter, RedrivePosition, letter_from_message
from tfmq.dead_letters.redrive import RedriveResult, encode_letter, producer_of, send_run
from tfmq.errors import DecodeFailed, StorageStopped
from tfmq.testing.broker import SimulatedBroker


@pytest.fixture
def broker() -> Iterator[SimulatedBroker]:
    with SimulatedBroker({"limits.message_bytes": 100_000}) as made:
        made.admin().create_topic("again")
        yield made


class Departing:
    """Letters with places in one stream, and a process that sends them."""

    def __init__(self, broker: SimulatedBroker, count: int = 4) -> None:
        self.process = Process(broker, Path("/nowhere"))
        self.until = self.process.link.now() + 20
        incarnation = broker.admin().topic("again").incarnation
        producer_id = self.process.run(lease_producer_id(self.process.link, self.until))
        self.stream = ProducerPartition("again", incarnation, 0, producer_id)
        self.letters = [self.letter(number) for number in range(count)]

    def letter(self, number: int, payload: bytes | None = None) -> Letter:
        given = message(number, payload or f"{number}".encode(), key="42", tag="new", properties={"a": "b"})
        made = replace(letter_from_message(given, "billing"), calls=3, token="me", failures=(failure(),))
        return replace(made, journey=RedrivePosition(*self.stream, number, 0))

    def send(self, letters: Sequence[Letter], process: Process | None = None) -> RedriveResult:
        process = process or self.process
        found: RedriveResult = process.run(send_run(process.link, letters, self.until, lambda: 77))
        return found


def texts(broker: SimulatedBroker) -> list[str]:
    return [each.text for each in broker.sent("again")]


def kinds(fate: RedriveResult) -> list[type]:
    return [type(event) for _, event in fate.steps]


def test_what_arrived_is_reported_with_its_offset(broker: SimulatedBroker) -> None:
    run = Departing(broker)
    fate = run.send(run.letters)
    assert (fate.arrived, len(fate.steps), fate.unsure, fate.refused) == (4, 4, (), "")
    arrivals = [event for _, event in fate.steps if isinstance(event, model.ArriveEvent)]
    assert [each.offset for each in arrivals] == [each.offset for each in broker.sent("again")]
    assert [each.sequence for each in arrivals] == [0, 1, 2, 3]
    assert run.send(run.letters) == fate


def test_the_record_is_the_message_with_its_counts(broker: SimulatedBroker) -> None:
    run = Departing(broker, 1)
    run.send(run.letters)
    (found,) = broker.sent("again")
    assert (found.key, found.tag, found.properties, found.attempts, found.redrives) == ("42", "new", {"a": "b"}, 3, 1)
    body = run.letters[0].body
    assert body is not None
    with pytest.raises(DecodeFailed):
        encode_letter(replace(run.letters[0], body=body._replace(attribute=b"\xc1")))


def test_a_run_of_which_a_part_is_there_is_sent_one_by_one(broker: SimulatedBroker) -> None:
    run = Departing(broker)
    run.send(run.letters[:2])
    fate = run.send(run.letters)
    assert (fate.arrived, texts(broker)) == (4, ["0", "1", "2", "3"])


def test_after_a_gap_nothing_is_sent_now_or_by_another_redrive_later(broker: SimulatedBroker) -> None:
    """One process sees only the end of a run; the other one, asleep before its send, wakes up afterwards."""
    run = Departing(broker)
    early = Process(broker, Path("/nowhere"))
    fate = run.send(run.letters[2:], early)
    assert (fate.arrived, kinds(fate)) == (0, [model.ReturnEvent, model.ReturnEvent])
    fate = run.send(run.letters)
    assert (fate.arrived, len(fate.steps), texts(broker)) == (0, 4, [])


def test_a_producer_sequence_that_was_closed_after_a_part_says_which_part(broker: SimulatedBroker) -> None:
    run = Departing(broker)
    run.send(run.letters[:2])
    run.send([run.letters[3]], Process(broker, Path("/nowhere")))
    fate = run.send(run.letters)
    assert kinds(fate) == [model.ArriveEvent, model.ArriveEvent, model.ReturnEvent, model.ReturnEvent]
    assert texts(broker) == ["0", "1"]


def test_one_that_is_too_large_is_refused_and_the_place_is_closed(broker: SimulatedBroker) -> None:
    run = Departing(broker)
    large = run.letter(1, bytes(400_000))
    fate = run.send([run.letters[0], large, run.letters[2]])
    assert (fate.arrived, len(fate.steps)) == (0, 3) and "limits.message_bytes" in fate.refused
    again = run.send([run.letters[0]])
    assert (again.arrived, len(again.steps)) == (0, 1)
    assert texts(broker) == []


def test_what_the_broker_forgot_is_looked_up(broker: SimulatedBroker) -> None:
    run = Departing(broker)
    run.send(run.letters[:2])
    broker.clock.advance(days=9)
    broker.restart()
    run.until = run.process.link.now() + 20
    fate = run.send(run.letters)
    assert kinds(fate) == [model.ArriveEvent, model.ArriveEvent, model.ReturnEvent, model.ReturnEvent]
    assert [event.offset for _, event in fate.steps[:2] if isinstance(event, model.ArriveEvent)] == [
        each.offset for each in broker.sent("again")
    ]


def test_an_unknown_outcome_is_reported_for_each(broker: SimulatedBroker) -> None:
    run = Departing(broker, 2)
    broker.admin().delete_topic("again")
    fate = run.send(run.letters)
    assert (fate.steps, len(fate.unsure)) == ((), 2)
    assert all(each.id in sentence for each, sentence in zip(run.letters, fate.unsure, strict=True))
    broker.admin().create_topic("again")
    assert run.send(run.letters).unsure


def test_another_broker_is_not_the_one_that_they_are_under_way_to(broker: SimulatedBroker) -> None:
    run = Departing(broker, 2)
    away = [replace(each, journey=each.journey and each.journey._replace(node="another")) for each in run.letters]
    fate = run.send(away)
    assert (fate.steps, len(fate.unsure), texts(broker)) == ((), 2, [])
    assert "--servers" in fate.unsure[0]
    node = run.process.link.hello.node if run.process.link.hello else ""
    here = [replace(each, journey=each.journey and each.journey._replace(node=node)) for each in run.letters]
    assert run.send(here).arrived == 2


def test_what_leaves_all_as_it_was_is_raised(broker: SimulatedBroker) -> None:
    run = Departing(broker)
    broker.fail_next("send", StorageStopped)
    with pytest.raises(StorageStopped):
        run.send(run.letters)


def test_fates_are_joined_and_a_redrive_position_names_its_producer() -> None:
    one = RedriveResult((("a", model.ReturnEvent(1, "me")),), ("x",), "")
    two = RedriveResult((("b", model.ArriveEvent(1, 99, 5, 0)),), ("y",), "no")
    both = one.combine(two)
    assert both == RedriveResult((*one.steps, *two.steps), ("x", "y"), "no") and both.arrived == 1
    assert producer_of(RedrivePosition("again", 8, 3, 99, 5, 0)) == ProducerPartition("again", 8, 3, 99)
