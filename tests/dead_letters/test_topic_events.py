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
from tfmq.dead_letters.model import START, Journey, Letter, Selection, letter_of, moment_text
from tfmq.dead_letters.sql_store import TABLE
from tfmq.dead_letters.topic_store import KINDS, ROOM_BYTES, VERSION, Fold, content_of, event_of
from tfmq.message import BORN_MS_MAX

LARGE = 1 << 23
LETTER = replace(
    letter_of(message(1, b"\x00x", key=b"\xff", tag="new"), "billing", "node-1"),
    calls=3,
    failures=(failure(),),
)
EVENTS: list[model.Event] = [
    model.Keep(10, LETTER, 50),
    model.Keep(10, LETTER, 50, True),
    model.Begin(10, replace(LETTER, calls_left=3, failures=())),
    model.Note(10, replace(LETTER, calls_left=3), True),
    model.Pass(10),
    model.Take(11, "me", 60),
    model.Renew(12, "me", 70),
    model.Handled(13, "me"),
    model.Failed(14, "me", failure(1), 80),
    model.PutOff(15, "me", failure(2), 90),
    model.GiveBack(16, "me"),
    model.Retry(17, 6),
    model.Drop(18, True),
    model.Adopt(18, "node-1", True),
    model.Claim(19, "me", True),
    model.Depart(20, "me", Journey("again", 8, 3, 99, 5, 1 << 40, "node-1")),
    model.Arrive(21, 99, 5, -1),
    model.Return(22, "me", 99, 5),
]


def record(payload: bytes | None, attribute: bytes | None = None) -> ReceivedMessage[Any]:
    return message(0, payload, topic="dead", attribute=attribute)


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: KINDS[type(event)])
def test_an_event_comes_back_as_it_was(event: model.Event) -> None:
    content = content_of("0123456789abcdef", event, LARGE)
    given = record(content.payload, content.attribute)
    id, found = event_of(given) or ("", None)
    assert id == given.key == "0123456789abcdef"
    assert given.tag == content.tag == KINDS[type(event)]
    if isinstance(event, model.Keep | model.Begin | model.Note):
        assert type(found) is type(event)
        assert found == event._replace(letter=replace(event.letter, id=id))
    else:
        assert found == event and type(found) is type(event)


def test_every_kind_is_tried() -> None:
    assert {type(each) for each in EVENTS} == set(KINDS)


def test_a_body_without_room_stays_where_the_message_stands() -> None:
    body = replace(LETTER, body=LETTER.body and LETTER.body._replace(payload=bytes(1000)))
    small = content_of(LETTER.id, model.Keep(10, body), 900 + ROOM_BYTES)
    assert len(small.payload or b"") < 900
    found = event_of(record(small.payload))
    assert found is not None and isinstance(found[1], model.Keep)
    assert found[1].letter.body is None and found[1].letter.failures == LETTER.failures
    assert len(content_of(LETTER.id, model.Keep(10, body), LARGE).payload or b"") > 1000


def test_a_newer_releases_fields_are_passed_over_and_its_kinds_too() -> None:
    content = content_of(LETTER.id, EVENTS[7], LARGE)
    fields = unpack(content.payload or b"")
    assert event_of(record(pack([*fields, "more"]))) == (LETTER.id, EVENTS[7])
    assert event_of(record(pack([VERSION, "sleep", LETTER.id, 10]))) is None
    assert event_of(record(pack([VERSION + 1, *fields[1:]]))) is None


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
    assert event_of(record(payload)) is None


@given(st.binary(max_size=200))
def test_any_bytes_are_an_event_or_none(payload: bytes) -> None:
    found = event_of(record(payload))
    assert found is None or type(found[1]) in KINDS


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=5),
    max_leaves=12,
)


@given(st.sampled_from(sorted(KINDS.values())), st.lists(values, max_size=8))
def test_any_fields_are_an_event_or_none(kind: str, fields: list[Any]) -> None:
    found = event_of(record(pack([VERSION, kind, "id", 10, *fields])))
    assert found is None or type(found[1]) in KINDS


def test_the_letter_of_a_keeping_needs_no_more_than_what_it_says() -> None:
    content = content_of(LETTER.id, EVENTS[0], LARGE)
    found = event_of(record(content.payload))
    assert found is not None and isinstance(found[1], model.Keep)
    assert isinstance(found[1].letter, Letter) and found[1].letter.body == LETTER.body


def test_the_example_of_the_page_is_what_is_written() -> None:
    page = (paths.ROOT / "docs" / "dead-letters.md").read_text()
    example = page.split("A `take` of letter `0123456789abcdef`:\n\n")[1].split("\n\n")[0]
    taken = model.Take(1_763_700_000_000, "me", 1_763_700_060_000)
    assert bytes.fromhex(example) == content_of("0123456789abcdef", taken, LARGE).payload
    assert event_of(record(bytes.fromhex(example))) == ("0123456789abcdef", taken)


def test_the_page_has_every_kind_and_every_column() -> None:
    page = (paths.ROOT / "docs" / "dead-letters.md").read_text()
    assert [kind for kind in KINDS.values() if f"| `{kind}` |" not in page] == []
    assert [column.name for column in TABLE.c if f"`{column.name}`" not in page] == []


def test_whatever_stands_in_a_record_stops_nobody_who_reads_the_topic() -> None:
    """Anybody who may send to the topic may have written it."""
    chance = seeded("topic events")
    for _ in range(scaled(30_000)):
        fold = Fold()
        for event in chance.choices(EVENTS, k=4):
            content = content_of("0123456789abcdef", event, LARGE)
            fields = unpack(content.payload or b"")
            payload = pack(changed(chance, fields) if chance.random() < 0.5 else fields)
            fold.take(record(payload, content.attribute))
            fold.due("billing", BORN_MS_MAX)
            fold.next_due_ms("billing")
        for letter in fold.find(Selection(), START, 10):
            assert moment_text(letter.next_ms) + moment_text(letter.changed_ms)
            json.dumps([letter.error, letter.state, letter.calls])


def changed(chance: Any, value: Any) -> Any:
    """The same, with something else somewhere."""
    if isinstance(value, list) and value and chance.random() < 0.7:
        number = chance.randrange(len(value))
        return [*value[:number], changed(chance, value[number]), *value[number + 1 :]]
    return chance.choice([None, "x", b"x", -2, 1 << 63, [], {}, 1.5, True, [1], "", 1 << 40])
