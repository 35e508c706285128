"""The rows inside requests and replies: their places are on the wire, so they stay where they are."""

import pytest

from tfmq.errors import BadRequest
from tfmq.protocol import rows
from tfmq.protocol.fields import Row

PLACES = {
    rows.Block: ("size", "count", "crc"),
    rows.Position: ("first_record", "offset"),
    rows.PartitionRow: ("partition", "state"),
    rows.TopicRow: ("name", "incarnation", "partitions", "settings"),
    rows.PartitionName: ("topic", "partition"),
    rows.GroupOffset: ("topic", "incarnation", "partition", "offset", "index", "epoch"),
    rows.SavedOffset: ("topic", "incarnation", "partition", "offset", "index", "epoch", "generation"),
}


@pytest.mark.parametrize("shape", PLACES, ids=lambda shape: shape.__name__)
def test_fields_stay_in_their_places(shape: type) -> None:
    assert Row(shape).names == PLACES[shape]


def test_a_block_holds_at_least_one_record() -> None:
    for wrong in ([0, 1, 0], [1, 0, 0], [1, 1, 1 << 32], [1, 1]):
        with pytest.raises(BadRequest):
            Row(rows.Block).check(wrong, "blocks")


def test_an_offset_without_index_and_epoch_is_whole() -> None:
    assert Row(rows.GroupOffset).check(["t", 1, 0, 100], "offsets") == ("t", 1, 0, 100, 0, -1)
