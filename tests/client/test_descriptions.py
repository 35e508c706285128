"""What the broker tells, as values; what a newer one tells besides is passed over."""

from tfmq.client.admin.models import (
    group_description,
    group_summary,
    partition_description,
    topic_description,
)

PARTITION = {
    "partition": 1,
    "state": "damaged",
    "first_offset": 10,
    "end_offset": 500,
    "first_ordinal": 3,
    "end_ordinal": 10,
    "size_bytes": 490,
    "oldest_ms": None,
    "damage": [[20, 30, "rot"]],
    "something_new": 5,
}


def test_a_partition() -> None:
    found = partition_description(PARTITION)
    assert (found.messages, found.oldest_ms, found.damage) == (7, -1, ((20, 30, "rot"),))


def test_a_partition_that_could_not_be_opened_has_a_reason_only() -> None:
    found = partition_description({"partition": 0, "state": "stopped", "reason": "EIO"})
    assert (found.state, found.reason, found.messages) == ("stopped", "EIO", 0)


def test_a_topic() -> None:
    found = topic_description(
        {"name": "a", "incarnation": 5, "partitions": [PARTITION, PARTITION], "settings": {}}
    )
    assert (found.messages, found.size_bytes, len(found.partitions)) == (14, 980, 2)


def test_groups() -> None:
    row = {"group": "g", "generation": 3, "members": 2, "live": True, "partitions": 2, "new": 1}
    assert (group_summary(row).live, group_summary(row).members) == (True, 2)
    offsets = [{"topic": "a", "partition": 0, "lag": 5}, {"topic": "a", "partition": 1, "lag": -1}]
    found = group_description({**row, "members": [{"member": "m"}], "offsets": offsets, "strategy": "range"})
    assert found.lag == 5 and found.strategy == "range" and found.members[0]["member"] == "m"
