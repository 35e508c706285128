"""Places in partitions, and messages of one partition with the place behind them."""

from typing import NamedTuple

from tfmq.client.received import ReceivedMessage
from tfmq.offsets.storage import PartitionName

UNKNOWN = -1


class Place(NamedTuple):
    """A place in a partition: the offset where reading goes on, how many messages lie before it, and the log's
    epoch when that was read (both -1 where not known)."""

    offset: int
    ordinal: int = UNKNOWN
    epoch: int = UNKNOWN


class Batch(NamedTuple):
    """Messages of one partition in order, and the place behind them and behind what was left out there.

    `messages` may be empty: then all that was read was left out, and `following` still moves on.
    """

    name: PartitionName
    messages: list[ReceivedMessage]
    following: Place

    def ends_with(self, message: ReceivedMessage) -> bool:
        """Whether `message` is its last one. The list may become empty at any moment."""
        last = self.messages[-1:]
        return bool(last) and last[0] is message


def partition_of(message: ReceivedMessage) -> PartitionName:
    """The partition that `message` stands in."""
    return PartitionName(message.topic, message.partition)


def behind(message: ReceivedMessage) -> Place:
    """The place behind `message`."""
    return Place(message.next_offset, message.ordinal + 1, message.origin.epoch)
