"""Topic requests: names are names, numbers of partitions have their limits, nil means the broker's default."""

from typing import Any

import pytest

from tfmq import limits
from tfmq.errors import BadRequest
from tfmq.protocol import commands
from tfmq.protocol.commands import BY_REQUEST


def read(request: Any) -> Any:
    command = BY_REQUEST[type(request)]
    return command.request.decode([command.code, 1, *request], command.name, 2)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a b", "x" * 250])
def test_what_cannot_name_a_folder_names_no_topic(name: str) -> None:
    for request in (
        commands.CreateTopic(name, 1, {}),
        commands.GrowTopic(name, 2),
        commands.DeleteTopic(name),
        commands.DescribeTopic(name),
        commands.ResumePartition(name, 0),
        commands.Truncate(name, 1, 0, 0),
        commands.Metadata([name]),
    ):
        with pytest.raises(BadRequest, match="topic"):
            read(request)


def test_a_topic_has_at_least_one_partition_and_not_more_than_the_cap() -> None:
    assert read(commands.CreateTopic("t", None, {})).partitions is None
    for wrong in (0, -1, limits.PARTITIONS_PER_TOPIC.cap + 1):
        for request in (commands.CreateTopic("t", wrong, {}), commands.GrowTopic("t", wrong)):
            with pytest.raises(BadRequest, match="partitions"):
                read(request)


def test_nil_asks_for_all_topics_and_an_empty_list_for_none() -> None:
    assert read(commands.Metadata(None)).topics is None
    assert read(commands.Metadata([])).topics == []
