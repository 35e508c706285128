"""Letters out of a topic's events, in memory."""

from __future__ import annotations

from dataclasses import replace

from tests.dead_letters.helpers import failure, message
from tfmq.client.consumer.message import ReceivedMessage
from tfmq.dead_letters import model
from tfmq.dead_letters.model import DEAD, FIRST_PAGE, RETRYING, Selection, letter_from_message
from tfmq.dead_letters.topic_store import LetterIndex, encode_event, without_body

LETTER = replace(letter_from_message(message(1, b"large"), "billing"), calls_left=3, failures=(failure(),))


def at(offset: int, event: model.Event) -> ReceivedMessage[object]:
    content = encode_event(LETTER.id, event, 1 << 23)
    return message(offset, content.payload, topic="dead", attribute=content.attribute)


def test_events_add_up_and_their_places_are_known() -> None:
    fold = LetterIndex()
    assert fold.apply(at(1, model.TakeEvent(5, "early", 9))) is None
    kept = fold.apply(at(2, model.KeepEvent(10, LETTER, 20)))
    assert kept is not None and kept.body == LETTER.body
    assert fold.apply(at(3, model.TakeEvent(20, "me", 80))) is not None
    assert fold.apply(at(4, model.TakeEvent(21, "you", 81))) is None
    assert fold.letters[LETTER.id].token == "me"
    assert fold.event_offsets[LETTER.id] == [200, 300]


def test_what_is_in_memory_is_small() -> None:
    fold = LetterIndex()
    fold.apply(at(1, model.KeepEvent(10, LETTER, 20)))
    held = fold.letters[LETTER.id]
    assert held.body is None and held.failures[0].traceback == "" and held.error == LETTER.error
    assert without_body(held) == held


def test_who_waits_is_known_without_a_look_at_all() -> None:
    fold = LetterIndex()
    fold.apply(at(1, model.KeepEvent(10, LETTER, 20)))
    assert (
        fold.next_due_id("billing", 19),
        fold.next_due_id("billing", 20),
        fold.next_due_id("shipping", 20),
    ) == (
        None,
        LETTER.id,
        None,
    )
    fold.apply(at(2, model.TakeEvent(20, "me", 80)))
    assert (fold.letters[LETTER.id].state, fold.next_due_ms("billing")) == (RETRYING, 80)
    fold.apply(at(3, model.FailedEvent(30, "me", failure(), 0)))
    assert (fold.letters[LETTER.id].state, fold.next_due_ms("billing")) == (DEAD, None)
    assert fold._waiting == {}
    assert [each.id for each in fold.find(Selection(), FIRST_PAGE, 5)] == [LETTER.id]


def test_other_records_of_the_topic_are_passed_over() -> None:
    fold = LetterIndex()
    assert fold.apply(message(1, b"hello", topic="dead")) is None
    assert fold.letters == {} and fold.event_offsets == {}


def test_what_retention_took_is_forgotten_and_what_goes_on_is_not() -> None:
    fold, other = LetterIndex(), "f" * 16
    fold.apply(at(1, model.KeepEvent(10, LETTER, 20)))
    content = encode_event(other, model.KeepEvent(11, LETTER), 1 << 23)
    fold.apply(message(2, content.payload, topic="dead", attribute=content.attribute))
    fold.apply(at(3, model.TakeEvent(20, "me", 80)))
    fold.delete_before(200)
    assert fold.letters.keys() == {LETTER.id, other}
    fold.delete_before(300)
    assert fold.letters.keys() == fold.event_offsets.keys() == {LETTER.id}
    fold.delete_before(301)
    assert not fold.letters and not fold.event_offsets and fold.next_due_ms("billing") is None
