"""The rows inside requests and replies: their places are on the wire, so they stay where they are."""

import pytest

from tfmq.errors import BadRequest
from tfmq.protocol import schema
from tfmq.protocol.schema import Record

PLACES = {
    schema.Block: ("size", "count", "crc"),
    schema.Position: ("first_record", "offset"),
    schema.PartitionRow: ("partition", "state"),
    schema.TopicRow: ("name", "incarnation", "partitions", "settings"),
    schema.PartitionName: ("topic", "partition"),
    schema.GroupOffset: ("topic", "incarnation", "partition", "offset", "index", "epoch"),
    schema.SavedOffset: ("topic", "incarnation", "partition", "offset", "index", "epoch", "generation"),
}


@pytest.mark.parametrize("shape", PLACES, ids=lambda shape: shape.__name__)
def test_fields_stay_in_their_places(shape: type) -> None:
    assert Record(shape).names == PLACES[shape]


def test_a_block_holds_at_least_one_record() -> None:
    for wrong in ([0, 1, 0], [1, 0, 0], [1, 1, 1 << 32], [1, 1]):
        with pytest.raises(BadRequest):
            Record(schema.Block).check(wrong, "blocks")


def test_an_offset_without_index_and_epoch_is_whole() -> None:
    assert Record(schema.GroupOffset).check(["t", 1, 0, 100], "offsets") == ("t", 1, 0, 100, 0, -1)
