"""Rows of the broker become values; what this release does not know is kept beside them."""

from tfmq.client.admin.models import commit_group_description, transaction_description

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
