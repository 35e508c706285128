"""Letters out of a topic's events, in memory."""

from __future__ import annotations

from dataclasses import replace

from tests.dead_letters.helpers import failure, message
from tfmq.client.consumer.message import ReceivedMessage
from tfmq.dead_letters import model
from tfmq.dead_letters.model import DEAD, RETRYING, START, Selection, letter_of
from tfmq.dead_letters.topic_store import Fold, content_of, slim

LETTER = replace(letter_of(message(1, b"large"), "billing"), calls_left=3, failures=(failure(),))


def at(offset: int, event: model.Event) -> ReceivedMessage[object]:
    content = content_of(LETTER.id, event, 1 << 23)
    return message(offset, content.payload, topic="dead", attribute=content.attribute)


def test_events_add_up_and_their_places_are_known() -> None:
    fold = Fold()
    assert fold.take(at(1, model.Take(5, "early", 9))) is None
    kept = fold.take(at(2, model.Keep(10, LETTER, 20)))
    assert kept is not None and kept.body == LETTER.body
    assert fold.take(at(3, model.Take(20, "me", 80))) is not None
    assert fold.take(at(4, model.Take(21, "you", 81))) is None
    assert fold.letters[LETTER.id].token == "me"
    assert fold.places[LETTER.id] == [200, 300]


def test_what_is_in_memory_is_small() -> None:
    fold = Fold()
    fold.take(at(1, model.Keep(10, LETTER, 20)))
    held = fold.letters[LETTER.id]
    assert held.body is None and held.failures[0].traceback == "" and held.error == LETTER.error
    assert slim(held) == held


def test_who_waits_is_known_without_a_look_at_all() -> None:
    fold = Fold()
    fold.take(at(1, model.Keep(10, LETTER, 20)))
    assert (fold.due("billing", 19), fold.due("billing", 20), fold.due("shipping", 20)) == (
        None,
        LETTER.id,
        None,
    )
    fold.take(at(2, model.Take(20, "me", 80)))
    assert (fold.letters[LETTER.id].state, fold.next_due_ms("billing")) == (RETRYING, 80)
    fold.take(at(3, model.Failed(30, "me", failure(), 0)))
    assert (fold.letters[LETTER.id].state, fold.next_due_ms("billing")) == (DEAD, None)
    assert fold._coming == {}
    assert [each.id for each in fold.find(Selection(), START, 5)] == [LETTER.id]


def test_other_records_of_the_topic_are_passed_over() -> None:
    fold = Fold()
    assert fold.take(message(1, b"hello", topic="dead")) is None
    assert fold.letters == {} and fold.places == {}


def test_what_retention_took_is_forgotten_and_what_goes_on_is_not() -> None:
    fold, other = Fold(), "f" * 16
    fold.take(at(1, model.Keep(10, LETTER, 20)))
    content = content_of(other, model.Keep(11, LETTER), 1 << 23)
    fold.take(message(2, content.payload, topic="dead", attribute=content.attribute))
    fold.take(at(3, model.Take(20, "me", 80)))
    fold.forget(200)
    assert fold.letters.keys() == {LETTER.id, other}
    fold.forget(300)
    assert fold.letters.keys() == fold.places.keys() == {LETTER.id}
    fold.forget(301)
    assert not fold.letters and not fold.places and fold.next_due_ms("billing") is None
