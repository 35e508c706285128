"""Fields: each kind takes what it says, and refuses the rest in a sentence that names the field."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import pytest

from tfmq.errors import BadRequest
from tfmq.protocol import commands
from tfmq.protocol.schema import ByteString, Flag, Integer, Kind, ListOf, Map, Name, Optional, Record, Text


class Pair(NamedTuple):
    first: Annotated[int, Integer(0, 9)]
    second: Annotated[str, Text(4)] = "x"


TAKEN: list[tuple[Kind, Any, Any]] = [
    (Integer(0, 9), 9, 9),
    (Flag(), True, True),
    (Text(4), "ä€"[:1], "ä"),
    (Name(), "a-b", "a-b"),
    (Name(empty=True), "", ""),
    (Map(), {"a": [1]}, {"a": [1]}),
    (Optional(Flag()), None, None),
    (Optional(Flag()), False, False),
    (ListOf(Integer(0, 1), 2), [0, 1], [0, 1]),
    (ByteString(4), b"", b""),
    (ByteString(4), b"abcd", b"abcd"),
    (ByteString(16, 8), bytes(16), bytes(16)),
    (Record(Pair), [1], Pair(1, "x")),
    (Record(Pair), [1, "y", "new"], Pair(1, "y")),
]


def test_bytes_that_are_too_many_are_reported_in_one_sentence() -> None:
    with pytest.raises(BadRequest) as caught:
        ByteString(4).check(b"abcde", "key")
    assert str(caught.value) == "The field key has 5 bytes, 4 at most are allowed."


@pytest.mark.parametrize(("kind", "value", "read"), TAKEN)
def test_a_kind_takes_what_it_says(kind: Kind, value: Any, read: Any) -> None:
    assert kind.check(value, "f") == read
    assert kind.text


REFUSED: list[tuple[Kind, Any]] = [
    (Integer(0, 9), 10),
    (Integer(0, 9), -1),
    (Integer(0, 9), True),
    (Integer(0, 9), 1.0),
    (Integer(0, 9), "1"),
    (Integer(0, 9), None),
    (Flag(), 1),
    (Text(4), "€€"),
    (Text(4), b"a"),
    (Name(), ""),
    (Name(), ".."),
    (Name(), "a/b"),
    (Name(), b"a"),
    (Map(), []),
    (Map(), {b"a": 1}),
    (Map(), {str(number): 0 for number in range(5000)}),
    (Map(), {"a": [[[[[[[[[]]]]]]]]]}),
    (ListOf(Integer(0, 1), 2), [0, 1, 0]),
    (ListOf(Integer(0, 1), 2), [2]),
    (ListOf(Integer(0, 1), 2), {}),
    (ByteString(4), b"abcde"),
    (ByteString(4), "abcd"),
    (ByteString(16, 8), b""),
    (ByteString(16, 8), bytes(7)),
    (ByteString(16, 8), bytes(24)),
    (Record(Pair), []),
    (Record(Pair), [10]),
    (Record(Pair), 5),
]


@pytest.mark.parametrize(("kind", "value"), REFUSED)
def test_a_kind_refuses_the_rest(kind: Kind, value: Any) -> None:
    with pytest.raises(BadRequest) as caught:
        kind.check(value, "the_field")
    assert len(str(caught.value)) < 400


def test_the_sentence_names_the_field_and_what_it_takes() -> None:
    with pytest.raises(BadRequest, match="The field offset must be a whole number from 0 to 9, not 12"):
        Integer(0, 9).check(12, "offset")
    with pytest.raises(BadRequest, match="PRODUCE lacks its field first"):
        Record(Pair).decode([], "PRODUCE")


def test_a_row_is_read_after_command_and_correlation() -> None:
    assert Record(Pair).decode([21, 5, 3, "y", 9], "PRODUCE", 2) == Pair(3, "y")
    assert Record(Pair).decode([21, 5, 3], "PRODUCE", 2) == Pair(3)


# The rows inside requests and replies: their places are on the wire, so they stay where they are.

PLACES = {
    commands.Block: ("size", "count", "crc"),
    commands.Position: ("first_record", "offset"),
    commands.PartitionRow: ("partition", "state"),
    commands.TopicRow: ("name", "incarnation", "partitions", "settings"),
    commands.PartitionName: ("topic", "partition"),
    commands.GroupOffset: ("topic", "incarnation", "partition", "offset", "index", "epoch"),
    commands.SavedOffset: ("topic", "incarnation", "partition", "offset", "index", "epoch", "generation"),
}


@pytest.mark.parametrize("shape", PLACES, ids=lambda shape: shape.__name__)
def test_fields_stay_in_their_places(shape: type) -> None:
    assert Record(shape).names == PLACES[shape]


def test_a_block_holds_at_least_one_record() -> None:
    for wrong in ([0, 1, 0], [1, 0, 0], [1, 1, 1 << 32], [1, 1]):
        with pytest.raises(BadRequest):
            Record(commands.Block).check(wrong, "blocks")


def test_an_offset_without_index_and_epoch_is_whole() -> None:
    assert Record(commands.GroupOffset).check(["t", 1, 0, 100], "offsets") == ("t", 1, 0, 100, 0, -1)
