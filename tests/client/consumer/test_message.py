"""What a received message says of itself."""

import copy
import pickle
import threading
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any
from unittest.mock import Mock

import pytest

from tests.client.blocks import APPEND_MS, INCARNATION, Bytes
from tfmq.client.consumer.decoder import Decoder
from tfmq.client.consumer.message import FailureHandler, Origin, ReceivedMessage, make_message
from tfmq.errors import DecodeFailed, NotAllowed
from tfmq.message import replace_counts


class Upper:
    """A codec."""

    def decode(self, payload: bytes) -> Any:
        if payload == b"fail":
            raise ValueError("no")
        return payload.decode().upper()


def received(payload: bytes, codec: Upper | None = None, raw: bytes | None = None, **attribute: Any) -> ReceivedMessage:
    log = Bytes()
    log.append(payload, **attribute)
    (block,) = Decoder("orders", 0, INCARNATION, codec).decode(log.body(), 0, 0, log.end)
    return block.messages[0] if raw is None else block.messages[0]._replace(attribute=raw)


def test_the_attribute_is_read_when_asked_for() -> None:
    message = received(b"x", born_ms=1500, key=b"\xff", tag="new", properties={"n": "1"}, attempts=2)
    assert (message.key, message.tag, message.attempts) == (b"\xff", "new", 2)
    assert message.born_at == datetime.fromtimestamp(1.5, UTC)
    assert message.appended_at == datetime.fromtimestamp(APPEND_MS / 1000, UTC)


def test_properties_are_the_callers_own_copy() -> None:
    message = received(b"x", properties={"n": "1"})
    message.properties["n"] = "2"
    assert message.properties == {"n": "1"}


def test_a_message_without_attribute_has_none_of_its_fields() -> None:
    message = received(b"x")
    assert (message.key, message.tag, message.properties, message.born_at, message.attempts) == (
        None,
        None,
        {},
        None,
        0,
    )


def test_text_json_and_value() -> None:
    assert received(b"\xc3\xa9").text == "é"
    assert received(b'{"a": 1}').json() == {"a": 1}
    assert received(b"abc").value == b"abc"
    assert received(b"abc", Upper()).value == "ABC"
    assert received(b"abc", Upper()).payload == b"abc"


@pytest.mark.parametrize("read", ["text", "json", "value"])
def test_what_cannot_be_decoded_names_its_place(read: str) -> None:
    message = received(b"fail" if read == "value" else b"\xff", Upper())
    with pytest.raises(DecodeFailed, match="orders-0 at offset 0"):
        message.json() if read == "json" else getattr(message, read)


@pytest.mark.parametrize(
    "raw", [b"\xc1", b"\x80\x80", b"\x81\x01\xa1x", b"\x81\x01\xcf\xff\xff\xff\xff\xff\xff\xff\xff"]
)
def test_an_attribute_that_cannot_be_read_fails_the_field_and_not_the_message(raw: bytes) -> None:
    message = received(b"payload", raw=raw)
    assert message.payload == b"payload"
    for _ in range(2):
        with pytest.raises(DecodeFailed):
            message.key  # noqa: B018


def test_it_shows_where_it_is_and_never_what_it_says() -> None:
    assert repr(received(b"secret")) == "<message orders-0 offset 0 ordinal 0: 6 bytes>"
    assert repr(received(b"secret", key="42", tag="new")) == (
        "<message orders-0 offset 0 ordinal 0 key '42' tag 'new': 6 bytes>"
    )
    assert len(repr(received(b"", key=b"k" * 1000))) < 120
    assert repr(received(b"secret", raw=b"\xc1")).endswith("with an attribute that cannot be read: 6 bytes>")


def test_it_can_be_sent_to_another_process() -> None:
    log = Bytes()
    log.append(b"x", b"y", key="k")
    decoder = Decoder("orders", 0, INCARNATION)
    decoder.failure_handler = threading.Lock()  # Like a consumer, it cannot be sent.
    for message in next(decoder.decode(log.body(), 0, 0, log.end)).messages:
        sent = pickle.loads(pickle.dumps(message))
        fields = ("payload", "key", "topic", "offset", "next_offset", "ordinal", "id", "appended_at")
        assert [getattr(sent, name) for name in fields] == [getattr(message, name) for name in fields]
        with pytest.raises(NotAllowed):
            sent.handling()


def test_a_copy_in_the_process_is_the_message_with_its_consumer() -> None:
    log = Bytes()
    log.append(b"x")
    decoder = Decoder("orders", 0, INCARNATION)
    decoder.failure_handler = Mock(FailureHandler)
    (block,) = decoder.decode(log.body(), 0, 0, log.end)
    for copied in (copy.copy(block.messages[0]), *copy.deepcopy(block.messages)):
        assert copied == block.messages[0]
        copied.handling()


def test_messages_are_ordered_by_topic_partition_and_offset() -> None:
    origin = Origin(INCARNATION, 0, 0, None)
    places = [(topic, partition, offset) for topic in "ab" for partition in (2, 10) for offset in (0, 50, 100)]
    ordered = [make_message(b"same", *place, place[2] + 50, 0, 1, None, origin) for place in places]
    assert sorted([*ordered[4:], *ordered[:4]]) == ordered
    for first, second in pairwise(ordered):
        assert first < second
        assert first <= second
        assert second > first
        assert second >= first
        assert not second < first
        assert not second <= first
    with pytest.raises(TypeError):
        ordered[0] < b"x"  # type: ignore[operator]  # noqa: B015


def test_a_message_is_equal_to_itself_read_again_and_to_no_other() -> None:
    def read(incarnation: int = INCARNATION, payload: bytes = b"x", offset: int = 50) -> ReceivedMessage:
        return make_message(payload, "a", 0, offset, 100, 0, 1, None, Origin(incarnation, 0, 0, None))

    assert read() == read()
    assert len({read(), read()}) == 1
    assert read() not in [read(INCARNATION + 1), read(payload=b"y"), read(offset=0), (b"x", 0, None)]


def test_it_says_how_often_it_failed_and_came_back_and_what_its_bytes_are() -> None:
    message = received(b"x", key="k")
    assert (message.attempts, message.redrives) == (0, 0)
    raw = replace_counts(message.attribute_bytes, 4, 2)
    again = received(b"x", raw=raw)
    assert (again.key, again.attempts, again.redrives, again.attribute_bytes) == ("k", 4, 2, raw)
    assert received(b"x", raw=b"\xc1").attribute_bytes == b"\xc1"
    assert message._replace(attribute=None).attribute_bytes is None
