"""Letters: who is who, what comes back as it was, what is bounded."""

from dataclasses import replace

import pytest

from tests.dead_letters.helpers import failure, message
from tfmq import codecs
from tfmq.client.consumer.message import Origin
from tfmq.dead_letters.model import (
    FAILURES_MAX,
    TRACEBACKS_MAX,
    bound_failures,
    iso_time,
    letter_from_message,
    letter_id,
)
from tfmq.errors import DecodeFailed


def test_the_message_comes_back_as_it_was() -> None:
    given = message(3, b'{"n": 1}', born_ms=1_763_000_000_000, key="42", tag="new", properties={"a": "b"})
    back = letter_from_message(given, "billing").message(codecs.json)
    for name in (
        *(
            "payload topic partition offset next_offset ordinal id key tag properties born_at appended_at".split()
        ),
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


def test_the_id_is_the_messages_and_nobody_elses() -> None:
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


def test_another_brokers_message_at_the_same_place_is_another_letter() -> None:
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
    assert [each.error for each in kept[1:]] == [
        f"E{number}: x" for number in range(500 - FAILURES_MAX + 1, 500)
    ]
    assert sum(bool(each.traceback) for each in kept) <= TRACEBACKS_MAX
    assert bound_failures(history)[-1] == history[-1]
    assert letter.error == "E499: x" and replace(letter, failures=()).error == ""


def test_times_are_printed_in_utc() -> None:
    assert iso_time(1_763_700_000_123) == "2025-11-21T04:40:00.123+00:00"
    assert iso_time(0) == ""
