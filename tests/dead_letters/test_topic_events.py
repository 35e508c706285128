"""Events as records, and back: every kind, strangers' bytes, a newer release's."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import paths
from tests.dead_letters.helpers import failure, message
from tests.scale import scaled, seeded
from tfmq.bounded_msgpack import pack, unpack
from tfmq.client.consumer.message import ReceivedMessage
from tfmq.dead_letters import model
from tfmq.dead_letters.model import (
    FIRST_PAGE,
    Letter,
    RedrivePosition,
    Selection,
    iso_time,
    letter_from_message,
)
from tfmq.dead_letters.sql_store import TABLE
from tfmq.dead_letters.topic_store import (
    EVENT_KINDS,
    HISTORY_BYTES,
    VERSION,
    LetterIndex,
    decode_event,
    encode_event,
)
from tfmq.message import BORN_MS_MAX

LARGE = 1 << 23
LETTER = replace(
    letter_from_message(message(1, b"\x00x", key=b"\xff", tag="new"), "billing", "node-1"),
    calls=3,
    failures=(failure(),),
)
EVENTS: list[model.Event] = [
    model.KeepEvent(10, LETTER, 50),
    model.KeepEvent(10, LETTER, 50, True),
    model.BeginEvent(10, replace(LETTER, calls_left=3, failures=())),
    model.NoteEvent(10, replace(LETTER, calls_left=3), True),
    model.PassEvent(10),
    model.TakeEvent(11, "me", 60),
    model.RenewEvent(12, "me", 70),
    model.HandledEvent(13, "me"),
    model.FailedEvent(14, "me", failure(1), 80),
    model.PutOffEvent(15, "me", failure(2), 90),
    model.GiveBackEvent(16, "me"),
    model.RetryEvent(17, 6),
    model.DropEvent(18, True),
    model.AdoptEvent(18, "node-1", True),
    model.ClaimEvent(19, "me", True),
    model.DepartEvent(20, "me", RedrivePosition("again", 8, 3, 99, 5, 1 << 40, "node-1")),
    model.ArriveEvent(21, 99, 5, -1),
    model.ReturnEvent(22, "me", 99, 5),
]


def record(payload: bytes | None, attribute: bytes | None = None) -> ReceivedMessage[Any]:
    return message(0, payload, topic="dead", attribute=attribute)


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: EVENT_KINDS[type(event)])
def test_an_event_comes_back_as_it_was(event: model.Event) -> None:
    content = encode_event("0123456789abcdef", event, LARGE)
    given = record(content.payload, content.attribute)
    id, found = decode_event(given) or ("", None)
    assert id == given.key == "0123456789abcdef"
    assert given.tag == content.tag == EVENT_KINDS[type(event)]
    if isinstance(event, model.KeepEvent | model.BeginEvent | model.NoteEvent):
        assert type(found) is type(event)
        assert found == event._replace(letter=replace(event.letter, id=id))
    else:
        assert found == event and type(found) is type(event)


def test_every_kind_is_tried() -> None:
    assert {type(each) for each in EVENTS} == set(EVENT_KINDS)


def test_a_body_without_room_stays_where_the_message_stands() -> None:
    body = replace(LETTER, body=LETTER.body and LETTER.body._replace(payload=bytes(1000)))
    small = encode_event(LETTER.id, model.KeepEvent(10, body), 900 + HISTORY_BYTES)
    assert len(small.payload or b"") < 900
    found = decode_event(record(small.payload))
    assert found is not None and isinstance(found[1], model.KeepEvent)
    assert found[1].letter.body is None and found[1].letter.failures == LETTER.failures
    assert len(encode_event(LETTER.id, model.KeepEvent(10, body), LARGE).payload or b"") > 1000


def test_a_newer_releases_fields_are_passed_over_and_its_kinds_too() -> None:
    content = encode_event(LETTER.id, EVENTS[7], LARGE)
    fields = unpack(content.payload or b"")
    assert decode_event(record(pack([*fields, "more"]))) == (LETTER.id, EVENTS[7])
    assert decode_event(record(pack([VERSION, "sleep", LETTER.id, 10]))) is None
    assert decode_event(record(pack([VERSION + 1, *fields[1:]]))) is None


@pytest.mark.parametrize(
    "payload",
    [
        None,
        b"",
        b"hello",
        b"\xc1",
        pack(7),
        pack([]),
        pack([1, "keep"]),
        pack([1, "keep", "id", 10]),
        pack([1, "keep", "id", 10, 0, [], [], None]),
        pack([1, "failed", "id", 10, "me", 5, 7]),
        pack([1, "depart", "id", 10, "me", [1]]),
        pack([1, ["keep"], "id", 10]),
        pack([1, "take", "id", "soon", "me", 7]),
        pack({"a": 1}),
    ],
)
def test_what_is_no_event_is_none(payload: bytes | None) -> None:
    assert decode_event(record(payload)) is None


@given(st.binary(max_size=200))
def test_any_bytes_are_an_event_or_none(payload: bytes) -> None:
    found = decode_event(record(payload))
    assert found is None or type(found[1]) in EVENT_KINDS


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=5),
    max_leaves=12,
)


@given(st.sampled_from(sorted(EVENT_KINDS.values())), st.lists(values, max_size=8))
def test_any_fields_are_an_event_or_none(kind: str, fields: list[Any]) -> None:
    found = decode_event(record(pack([VERSION, kind, "id", 10, *fields])))
    assert found is None or type(found[1]) in EVENT_KINDS


def test_the_letter_of_a_keeping_needs_no_more_than_what_it_says() -> None:
    content = encode_event(LETTER.id, EVENTS[0], LARGE)
    found = decode_event(record(content.payload))
    assert found is not None and isinstance(found[1], model.KeepEvent)
    assert isinstance(found[1].letter, Letter) and found[1].letter.body == LETTER.body


def test_the_example_of_the_page_is_what_is_written() -> None:
    page = (paths.ROOT / "docs" / "dead-letters.md").read_text()
    example = page.split("A `take` of letter `0123456789abcdef`:\n\n")[1].split("\n\n")[0]
    taken = model.TakeEvent(1_763_700_000_000, "me", 1_763_700_060_000)
    assert bytes.fromhex(example) == encode_event("0123456789abcdef", taken, LARGE).payload
    assert decode_event(record(bytes.fromhex(example))) == ("0123456789abcdef", taken)


def test_the_page_has_every_kind_and_every_column() -> None:
    page = (paths.ROOT / "docs" / "dead-letters.md").read_text()
    assert [kind for kind in EVENT_KINDS.values() if f"| `{kind}` |" not in page] == []
    assert [column.name for column in TABLE.c if f"`{column.name}`" not in page] == []


def test_whatever_stands_in_a_record_stops_nobody_who_reads_the_topic() -> None:
    """Anybody who may send to the topic may have written it."""
    chance = seeded("topic events")
    for _ in range(scaled(30_000)):
        fold = LetterIndex()
        for event in chance.choices(EVENTS, k=4):
            content = encode_event("0123456789abcdef", event, LARGE)
            fields = unpack(content.payload or b"")
            payload = pack(changed(chance, fields) if chance.random() < 0.5 else fields)
            fold.apply(record(payload, content.attribute))
            fold.next_due_id("billing", BORN_MS_MAX)
            fold.next_due_ms("billing")
        for letter in fold.find(Selection(), FIRST_PAGE, 10):
            assert iso_time(letter.next_ms) + iso_time(letter.changed_ms)
            json.dumps([letter.error, letter.state, letter.calls])


def changed(chance: Any, value: Any) -> Any:
    """The same, with something else somewhere."""
    if isinstance(value, list) and value and chance.random() < 0.7:
        number = chance.randrange(len(value))
        return [*value[:number], changed(chance, value[number]), *value[number + 1 :]]
    return chance.choice([None, "x", b"x", -2, 1 << 63, [], {}, 1.5, True, [1], "", 1 << 40])
