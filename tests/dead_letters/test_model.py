"""The words of events: each kind is known to the course and to the topic's format."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from tests.dead_letters.helpers import failure, message
from tfmq import codecs
from tfmq.client.consumer.message import Origin
from tfmq.dead_letters import model
from tfmq.dead_letters.admin import Desk
from tfmq.dead_letters.model import (
    DEAD,
    FAILURES_MAX,
    FIRST_PAGE,
    TRACEBACKS_MAX,
    WAITING,
    PagePosition,
    Selection,
    bound_failures,
    iso_time,
    key_text,
    letter_from_message,
    letter_id,
)
from tfmq.dead_letters.state_machine import TRANSITIONS
from tfmq.dead_letters.topic_store import EVENT_KINDS
from tfmq.errors import BadRequest, DecodeFailed


def test_every_kind_has_a_course_and_a_name_in_the_format() -> None:
    kinds = set(get_args(model.Event))
    assert kinds == set(EVENT_KINDS) == {kind for row in TRANSITIONS.values() for kind in row}
    assert len(set(EVENT_KINDS.values())) == len(kinds)


def test_each_says_when_it_happened_first() -> None:
    assert all(kind._fields[0] == "at_ms" for kind in EVENT_KINDS)


# Letters: who is who, what comes back as it was, what is bounded.


def test_the_message_comes_back_as_it_was() -> None:
    given = message(3, b'{"n": 1}', born_ms=1_763_000_000_000, key="42", tag="new", properties={"a": "b"})
    back = letter_from_message(given, "billing").message(codecs.json)
    for name in (
        *("payload topic partition offset next_offset ordinal id key tag properties born_at appended_at".split()),
        *("attempts redrives text attribute_bytes".split()),
    ):
        assert getattr(back, name) == getattr(given, name), name
    assert back.origin.incarnation == given.origin.incarnation
    assert back.value == {"n": 1}


@pytest.mark.parametrize("payload", [None, b"", b"\xff\x00"])
def test_a_tombstone_and_an_empty_payload_are_two_things(payload: bytes | None) -> None:
    letter = letter_from_message(message(payload=payload), "billing")
    assert letter.message().payload == payload
    assert letter.payload_bytes == (-1 if payload is None else len(payload))


def test_the_id_is_the_one_of_the_message() -> None:
    first = letter_from_message(message(1), "billing").id
    assert first == letter_from_message(message(1, b"whatever"), "billing").id
    others = {
        letter_from_message(message(2), "billing").id,
        letter_from_message(message(1, partition=1), "billing").id,
        letter_from_message(message(1), "shipping").id,
        letter_id("billing", 8, 0, 100, 1_763_600_000_001),
        letter_id("billing", 7, 0, 100, 1_763_600_000_002),
    }
    assert len(others) == 5 and first not in others


def test_another_brokers_message_at_the_same_place_is_another_dead_letter() -> None:
    here = message(1)
    there = here._replace(origin=Origin(here.origin.incarnation, here.origin.append_ms + 5, 1, None))
    assert letter_from_message(here, "billing").id != letter_from_message(there, "billing").id


def test_an_attribute_that_cannot_be_read_is_kept_as_it_is() -> None:
    letter = letter_from_message(message(attribute=b"\xc1 broken"), "billing")
    assert (letter.key, letter.tag, letter.redrives) == (None, None, 0)
    assert letter.message().attribute_bytes == b"\xc1 broken"
    with pytest.raises(DecodeFailed):
        letter.attribute()


def test_the_history_is_bounded_and_keeps_the_first_and_the_latest() -> None:
    history = [failure(number, f"E{number}: x") for number in range(500)]
    letter = letter_from_message(message(), "billing")
    for each in history:
        letter = letter.with_failures([each])
    kept = letter.failures
    assert len(kept) == FAILURES_MAX
    assert kept[0] == history[0] and kept[-1] == history[-1]
    assert [each.error for each in kept[1:]] == [f"E{number}: x" for number in range(500 - FAILURES_MAX + 1, 500)]
    assert sum(bool(each.traceback) for each in kept) <= TRACEBACKS_MAX
    assert bound_failures(history)[-1] == history[-1]
    assert letter.error == "E499: x" and replace(letter, failures=()).error == ""


def test_times_are_printed_in_utc() -> None:
    assert iso_time(1_763_700_000_123) == "2025-11-21T04:40:00.123+00:00"
    assert iso_time(0) == ""


# Which letters a selection means; that databases mean the same is in test_store.py.

LETTER = replace(
    letter_from_message(message(1, key=b"42", tag="new"), "billing"),
    failures=(failure(), failure(1, "KeyError: X")),
    kept_ms=10,
)


def test_everything_that_is_given_must_hold() -> None:
    assert Selection().holds(LETTER)
    whole = Selection((DEAD,), "billing", "orders", 0, "42", "new", "keyerror", 10, 11, (LETTER.id,))
    assert whole.holds(LETTER)
    others = [
        {"states": (WAITING,)},
        {"group": "shipping"},
        {"topic": "bills"},
        {"partition": 1},
        {"key": "4"},
        {"tag": "old"},
        {"error": "no such"},
        {"since_ms": 11},
        {"until_ms": 10},
        {"ids": ("zz",)},
    ]
    for other in others:
        assert not whole._replace(**other).holds(LETTER), other


def test_a_key_is_text_where_it_can_be() -> None:
    assert (key_text(None), key_text("a"), key_text(b"a")) == (None, "a", "a")
    assert key_text(b"\xff") == "\ufffd"


def test_the_first_page_is_before_every_dead_letter() -> None:
    assert PagePosition(0, "") > FIRST_PAGE


@pytest.mark.parametrize("wrong", [{"states": "dead"}, {"states": ("ded",)}, {"states": ["dead", 5]}, {"ids": "ab"}])
def test_states_and_ids_are_several(wrong: dict[str, Any], tmp_path: Path) -> None:
    with Desk(tmp_path / "dead.db") as desk, pytest.raises(BadRequest, match=next(iter(wrong))):
        list(desk.letters(Selection(**wrong)))
