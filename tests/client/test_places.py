"""Places, and what lies behind a message."""

from tests.client.test_ledger import batch
from tfmq.client.consumer.positions import UNKNOWN, ReadPosition, partition_of, position_after
from tfmq.offsets.storage import PartitionName


def test_a_place_knows_its_offset_and_may_not_know_the_rest() -> None:
    assert ReadPosition(5) == (5, UNKNOWN, UNKNOWN)
    assert max(ReadPosition(5), ReadPosition(7, 1, 1)).offset == 7


def test_behind_a_message_the_next_one_begins() -> None:
    first, second = batch(2).messages
    assert position_after(first) == ReadPosition(second.offset, second.ordinal, first.origin.epoch)
    assert partition_of(first) == PartitionName("orders", 0)
