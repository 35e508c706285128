"""Replies of the broker, as values; additional fields of a newer one are ignored."""

from __future__ import annotations

from tfmq.client.admin.models import (
    commit_group_description,
    group_description,
    group_summary,
    partition_description,
    topic_description,
    transaction_description,
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
    found = topic_description({"name": "a", "incarnation": 5, "partitions": [PARTITION, PARTITION], "settings": {}})
    assert (found.messages, found.size_bytes, len(found.partitions)) == (14, 980, 2)


def test_groups() -> None:
    row = {"group": "g", "generation": 3, "members": 2, "live": True, "partitions": 2, "new": 1}
    assert (group_summary(row).live, group_summary(row).members) == (True, 2)
    offsets = [{"topic": "a", "partition": 0, "lag": 5}, {"topic": "a", "partition": 1, "lag": -1}]
    found = group_description({**row, "members": [{"member": "m"}], "offsets": offsets, "strategy": "range"})
    assert found.lag is None, "a sum without an unknown part would say too little"
    assert found._replace(offsets=found.offsets[:1]).lag == 5 and found._replace(offsets=()).lag == 0
    assert found.strategy == "range" and found.members[0]["member"] == "m"


# Rows of the broker become values; what this release does not know is kept beside them.

ROW = {
    "xid": "order-42",
    "epoch": 7,
    "state": "prepared",
    "group": "shop",
    "owner": "page at 127.0.0.1:5",
    "began_ms": 1,
    "prepared_ms": 2,
    "age_seconds": 3.5,
    "bytes": 4,
    "messages": 5,
    "topics": ["orders"],
    "expires_ms": 0,
    "commit_group": "",
}


def test_a_row_of_the_list_becomes_a_value() -> None:
    found = transaction_description({**ROW, "news": 1})
    assert (found.xid, found.epoch, found.state, found.size_bytes) == ("order-42", 7, "prepared", 4)
    assert (found.age_seconds, found.messages, found.topics) == (3.5, 5, ("orders",))
    assert found.details == {"news": 1}


def test_what_is_missing_or_nil_has_its_default() -> None:
    found = transaction_description({"xid": "x", "group": None, "topics": []})
    assert (found.epoch, found.state, found.group, found.topics) == (0, "unknown", "", ())


def test_no_row_can_pass_as_the_details() -> None:
    assert transaction_description({"xid": "x", "details": 1}).details == {"details": 1}


def test_a_commit_group_that_committed_nothing_yet() -> None:
    found = commit_group_description({"group": "query", "members": 2})
    assert (found.group, found.sequence, found.rows, found.details) == ("query", -1, 0, {"members": 2})
