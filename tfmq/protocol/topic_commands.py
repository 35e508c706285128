"""The requests and replies about topics and their partitions; their codes stand with all others in `commands`."""

from typing import Annotated, NamedTuple

from tfmq import limits
from tfmq.protocol.fields import ListOf, Name, Optional, Row, Text, Whole
from tfmq.protocol.rows import Incarnation, Offset, Partition, Partitions, Plain, Topic, TopicRow, Words, Yes


class Metadata(NamedTuple):
    """Topics with their partitions. Unknown topics are left out, or made where `create` asks for it."""

    topics: Annotated[list[str] | None, Optional(ListOf(Name(), limits.TOPICS.cap))] = None
    create: Yes = False


class MetadataReply(NamedTuple):
    topics: Annotated[list[TopicRow], ListOf(Row(TopicRow), limits.TOPICS.cap)]


class CreateTopic(NamedTuple):
    """Makes a topic; nil partitions: the broker's default."""

    topic: Topic
    partitions: Annotated[int | None, Optional(Whole(1, limits.PARTITIONS_PER_TOPIC.cap))]
    settings: Plain


class CreateTopicReply(NamedTuple):
    incarnation: Incarnation
    partitions: Partitions


class GrowTopic(NamedTuple):
    """Raises the number of partitions to `partitions`."""

    topic: Topic
    partitions: Partitions


class GrowTopicReply(NamedTuple):
    partitions: Partitions


class DeleteTopic(NamedTuple):
    """Deletes the topic with all its messages; `incarnation` 0: whichever bears the name."""

    topic: Topic
    incarnation: Incarnation = 0


class DeleteTopicReply(NamedTuple):
    deleted: Yes


class DescribeTopic(NamedTuple):
    """Everything about one topic."""

    topic: Topic


class DescribeTopicReply(NamedTuple):
    description: Plain


class ResumePartition(NamedTuple):
    """Lifts the stop of a partition whose disk failed."""

    topic: Topic
    partition: Partition


class ResumePartitionReply(NamedTuple):
    state: Words


class Truncate(NamedTuple):
    """Lets go of what lies before an offset, as far as whole segments allow."""

    topic: Topic
    incarnation: Incarnation
    partition: Partition
    before_offset: Offset


class TruncateReply(NamedTuple):
    first_offset: Offset


class SetTopic(NamedTuple):
    """Changes settings of the topic's own, those of `unset` back to what the server has; effective at once.
    `incarnation` 0: whichever bears the name.
    """

    topic: Topic
    incarnation: Incarnation
    settings: Plain
    unset: Annotated[list[str], ListOf(Text(), limits.MAP_ITEMS)]


class SetTopicReply(NamedTuple):
    settings: Plain
