"""Which node is what: the layout of MetaMorphosis, so that tools which know it find brokers, topics, groups, offsets.

    ROOT/brokers/ids/BROKER/master                                   its address                      while it lives
    ROOT/brokers/topics/TOPIC/BROKER-m                               how many partitions it has       while it lives
    ROOT/consumers/GROUP/ids/MEMBER                                  the topics, with commas between  while it lives
    ROOT/consumers/GROUP/owners/TOPIC/BROKER-PARTITION               the member that has it           while it has it
    ROOT/consumers/GROUP/offsets/TOPIC/BROKER-PARTITION              0-OFFSET                         for good
    ROOT/consumers/GROUP/offsets/TOPIC/BROKER-PARTITION/tfmq         all of the stored offset         for good

The first number of an offset is the id of the last message at MetaMorphosis; here an offset says all, so it is 0.
"""

from __future__ import annotations

from typing import NamedTuple

from tfmq.offsets.storage import PartitionName


class Layout(NamedTuple):
    """The paths below one root, with the partitions of one broker."""

    root: str
    broker: int = 0

    def master(self) -> str:
        """The broker's address."""
        return f"{self.root}/brokers/ids/{self.broker}/master"

    def topics(self) -> str:
        """All topics of all brokers."""
        return f"{self.root}/brokers/topics"

    def topic(self, topic: str) -> str:
        """The number of partitions that the broker has of the topic."""
        return f"{self.root}/brokers/topics/{topic}/{self.broker}-m"

    def members(self, group: str) -> str:
        """The members of a group."""
        return f"{self.root}/consumers/{group}/ids"

    def member(self, group: str, member: str) -> str:
        """The topics of a member."""
        return f"{self.members(group)}/{member}"

    def owner(self, group: str, name: PartitionName) -> str:
        """The member that has the partition."""
        return f"{self.root}/consumers/{group}/owners/{name.topic}/{self.broker}-{name.partition}"

    def offset(self, group: str, name: PartitionName) -> str:
        """Where the group goes on in the partition, for everybody."""
        return f"{self.root}/consumers/{group}/offsets/{name.topic}/{self.broker}-{name.partition}"

    def row(self, group: str, name: PartitionName) -> str:
        """The same, with all that a stored offset has."""
        return f"{self.offset(group, name)}/tfmq"
