"""Requests about delayed messages: due times of two kinds, handles, pages and edges with their ends."""

from __future__ import annotations

from typing import Any

import pytest

from tfmq import limits
from tfmq.bounded_msgpack import pack, unpack
from tfmq.errors import BadRequest
from tfmq.protocol import commands
from tfmq.protocol.commands import (
    BY_REQUEST,
    DUE_MAX,
    DUE_RELATIVE,
    CommitMember,
    GroupOffset,
    TransactionName,
    TransactionOffsets,
)
from tfmq.protocol.delayed_handle import Handle, format_handle
from tfmq.protocol.frames import Decoder, encode

HANDLE = format_handle(Handle(7, 9, 1000, 1))
PRODUCE = commands.Produce("orders", 1, 0, 9, 0, 2, 2, [])


def read(request: Any) -> Any:
    """The request as it comes out of a frame at the other end."""
    command = BY_REQUEST[type(request)]
    (frame,) = Decoder().feed(b"".join(map(bytes, encode((command.code, 1, *request)))))
    return command.request.decode(frame.header, command.name, 2)


def u64s(*dues: int) -> bytes:
    return b"".join(due.to_bytes(8, "big") for due in dues)


def test_a_send_may_carry_a_due_time_for_each_record() -> None:
    assert read(PRODUCE).due is None
    dues = u64s(DUE_RELATIVE | 30_000, 1_763_700_000_000)
    assert read(PRODUCE._replace(due=dues)).due == dues


@pytest.mark.parametrize("wrong", [b"", bytes(7), bytes(12), "text", 5, [1, 2]])
def test_due_times_are_whole_numbers_of_eight_bytes(wrong: Any) -> None:
    with pytest.raises(BadRequest, match="field due "):
        read(PRODUCE._replace(due=wrong))


def test_the_due_times_of_the_largest_batch_fit_in_both_headers() -> None:
    dues = bytes(8 * limits.BATCH_RECORDS_DELAYED)
    blocks = [commands.Block((1 << 32) - 1, 1 << 20, (1 << 32) - 1)] * 4096
    assert len(read(PRODUCE._replace(due=dues, blocks=blocks)).due) == len(dues)
    with pytest.raises(BadRequest, match="field due "):
        read(PRODUCE._replace(due=dues + bytes(8)))


def test_the_reply_contains_the_parts_of_a_handle() -> None:
    row = BY_REQUEST[commands.Produce].reply
    assert row.decode([[], 2, False, 5, -1], "PRODUCE").delayed is None
    reported = row.decode([[], 2, False, 5, -1, [7, 9, 100, u64s(50, 60)]], "PRODUCE").delayed
    assert reported == commands.DelayedBatch(7, 9, 100, u64s(50, 60))


def test_a_batch_of_a_local_transaction_may_be_delayed() -> None:
    block = commands.Block(120, 1, 77)
    plain = commands.TransactionBatch("orders", 1, 0, 0, 1, 120, [block])
    delayed = plain._replace(due=u64s(DUE_RELATIVE | 1))
    batches = read(commands.Transact(7, 1, [plain, delayed], [])).batches
    assert [each.due for each in batches] == [None, u64s(DUE_RELATIVE | 1)]
    older = read(commands.Transact(7, 1, [plain[:7]], []))  # type: ignore[list-item]
    assert older.batches == [plain]


def test_an_id_for_delayed_messages_is_closed_without_a_topic() -> None:
    assert read(commands.SucceedProducer("", 0, 0, 9)).topic == ""


@pytest.mark.parametrize(
    "request_",
    [
        commands.CancelDelayed(HANDLE),
        commands.DescribeDelayed(HANDLE),
        commands.RescheduleDelayed(HANDLE, DUE_RELATIVE),
    ],
)
def test_a_handle_is_a_short_text(request_: Any) -> None:
    assert read(request_) == request_
    for wrong in ("", "d" * 65, 7, None):
        with pytest.raises(BadRequest, match="field handle "):
            read(request_._replace(handle=wrong))


def test_the_new_time_may_be_any_of_both_kinds() -> None:
    for due in (0, DUE_MAX, DUE_RELATIVE, (1 << 64) - 1):
        assert read(commands.RescheduleDelayed(HANDLE, due)).due == due
    for wrong in (-1, 1.5, "30s"):
        with pytest.raises(BadRequest, match="field due "):
            read(commands.RescheduleDelayed(HANDLE, wrong))  # type: ignore[arg-type]


def test_a_list_is_asked_for_in_pages_of_everything_that_waits() -> None:
    everything = read(commands.ListDelayed())
    assert (everything.topic, everything.partition, everything.key) == ("", None, None)
    assert (everything.first_due, everything.end_due) == (0, DUE_MAX)
    assert (everything.after, everything.limit) == ("", limits.DELAYED_PER_PAGE)
    one = commands.ListDelayed("orders", 3, b"\xff", 5, 6, HANDLE, 1)
    assert read(one) == one
    for field, wrong in (("limit", 0), ("limit", 1001), ("key", "text"), ("partition", -1)):
        with pytest.raises(BadRequest, match=f"field {field} "):
            read(commands.ListDelayed()._replace(**{field: wrong}))  # type: ignore[arg-type]


def test_the_longest_page_fits_in_a_header() -> None:
    row = {
        "handle": HANDLE, "state": "pending", "due_ms": DUE_MAX, "topic": "t" * 249, "partition": 1 << 23,
        "key": b"k" * 1024, "tag": "t" * 255, "size": 1 << 30, "born_ms": 1 << 50,
    }  # fmt: skip
    reply = commands.ListDelayedReply([row] * limits.DELAYED_PER_PAGE, True, HANDLE)
    (frame,) = Decoder().feed(b"".join(map(bytes, encode((0, 1, *reply)))))
    assert BY_REQUEST[commands.ListDelayed].reply.decode(frame.header, "reply", 2) == reply


def test_edges_of_a_histogram_ascend() -> None:
    request = commands.DelayedHistogram("", [0, 10, DUE_MAX])
    assert read(request) == request
    for wrong in ([], [5], [5, 5], [6, 5], [-1, 5], [0, DUE_MAX + 1], list(range(limits.DELAYED_HISTOGRAM_EDGES + 1))):
        with pytest.raises(BadRequest, match="edges"):
            read(request._replace(edges=wrong))


# Group requests: names are names, a first join has no member, ranges hold.


def read_of_group_commands(request: object) -> object:
    command = BY_REQUEST[type(request)]
    return command.request.decode([command.code, 1, *request], command.name, 2)  # type: ignore[misc]


def test_a_first_join_has_no_member_id() -> None:
    join = commands.JoinGroup("billing", "", ["orders"], 10_000)
    assert read_of_group_commands(join) == join


def test_a_session_time_lies_within_its_limits() -> None:
    for wrong in (0, limits.SESSION_MS_MIN - 1, limits.SESSION_MS.cap + 1):
        with pytest.raises(BadRequest, match="session_ms"):
            read_of_group_commands(commands.JoinGroup("billing", "", [], wrong))


def test_only_a_member_leaves_or_beats() -> None:
    for request in (commands.Heartbeat("g", "", 1, []), commands.LeaveGroup("g", "", 1)):
        with pytest.raises(BadRequest, match="member"):
            read_of_group_commands(request)


def test_no_group_name_is_a_path() -> None:
    for name in ("", "..", "a/b", "a\0"):
        with pytest.raises(BadRequest, match="group"):
            read_of_group_commands(commands.DescribeGroup(name))


def test_an_offset_is_not_negative() -> None:
    with pytest.raises(BadRequest, match="offset"):
        read_of_group_commands(commands.CommitOffsets("g", "m", 1, [commands.GroupOffset("t", 1, 0, -1)]))


def test_a_heartbeat_says_what_is_held_and_perhaps_what_is_asked_for() -> None:
    held = [commands.HeldPartition("orders", 5, 0), commands.HeldPartition("orders", 5, 1, True)]
    wishes = commands.Subscription(["orders"], 10_000, "range", [commands.PartitionName("orders", 1)])
    for beat in (
        commands.Heartbeat("g", "m", 7, held, 3000, wishes),
        commands.Heartbeat("g", "m", 7, [], 0, wishes._replace(only=None)),
    ):
        command = BY_REQUEST[commands.Heartbeat]
        assert command.request.decode([command.code, 1, *unpack(pack(list(beat)))], command.name, 2) == beat


def test_a_heartbeat_that_does_not_say_what_is_held_is_none() -> None:
    """It would give up everything."""
    command = BY_REQUEST[commands.Heartbeat]
    with pytest.raises(BadRequest, match="held"):
        command.request.decode([command.code, 1, "g", "m", 7], command.name, 2)


def test_a_join_of_four_fields_is_a_whole_one() -> None:
    command = BY_REQUEST[commands.JoinGroup]
    join = command.request.decode([command.code, 1, "g", "", ["orders"], 10_000], command.name, 2)
    assert (join.strategy, join.only) == ("sticky", None)


# Requests about schedules: names, bounds, defaults, and a list that always fits one header.

ADD = commands.AddSchedule("daily", "0 9 * * *", "Europe/Berlin", "reports")


def read_of_schedule_commands(request: Any, count: int | None = None) -> Any:
    """The request as it comes out of a frame at the other end; `count`: only so many of its fields are sent."""
    command = BY_REQUEST[type(request)]
    (frame,) = Decoder().feed(b"".join(map(bytes, encode((command.code, 1, *request[:count])))))
    return command.request.decode(frame.header, command.name, 2)


def test_what_is_left_out_has_its_default() -> None:
    assert read_of_schedule_commands(ADD, 4) == ADD
    assert (ADD.partition, ADD.misfire, ADD.attribute, ADD.tombstone) == (None, "one", b"", False)
    assert read_of_schedule_commands(commands.ListSchedules(), 0) == ("", "", limits.SCHEDULES_PER_PAGE)
    assert read_of_schedule_commands(commands.RemoveSchedule("daily"), 1).id == 0


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("name", ""),
        ("name", "../daily"),
        ("name", "x" * 250),
        ("cron", ""),
        ("cron", "*" * 257),
        ("timezone", ""),
        ("timezone", "Z" * 257),
        ("topic", ".."),
        ("partition", -1),
        ("misfire", None),
        ("attribute", "text"),
        ("attribute", bytes(limits.ATTRIBUTE_BYTES + 1)),
        ("tombstone", 1),
    ],
)
def test_what_is_no_schedule_is_refused_by_its_field(field: str, wrong: Any) -> None:
    with pytest.raises(BadRequest, match=f"field {field} "):
        read_of_schedule_commands(ADD._replace(**{field: wrong}))


@pytest.mark.parametrize("request_type", [commands.PauseSchedule, commands.ResumeSchedule, commands.RemoveSchedule])
def test_a_schedule_is_named_as_topics_are(request_type: Any) -> None:
    assert read_of_schedule_commands(request_type("a.b-c_9")).name == "a.b-c_9"
    for wrong in ("", "a b", "..", None, 7):
        with pytest.raises(BadRequest, match="field name "):
            read_of_schedule_commands(request_type(wrong))


def test_a_page_of_the_longest_rows_fits_one_header() -> None:
    """Names, expression and zone at their limits, and a sentence about its trouble."""
    row = {
        "name": "n" * limits.NAME_LENGTH,
        "id": (1 << 40) - 1,
        "cron": "*" * limits.CRON_BYTES,
        "timezone": "z" * limits.CRON_BYTES,
        "topic": "t" * limits.NAME_LENGTH,
        "partition": 1 << 20,
        "misfire": "skip",
        "state": "waiting",
        "trouble": "e" * 2_000,
        "next_ms": 1 << 60,
        "last_ms": 1 << 60,
        "made_ms": 1 << 60,
        "size": 1 << 20,
        "tag": "t" * limits.TAG_BYTES,
        "properties": 254,
    }
    assert len(pack([row] * int(limits.SCHEDULES_PER_PAGE))) < limits.HEADER_BYTES


# Topic requests: names are names, numbers of partitions have their limits, nil means the broker's default.


def read_of_topic_commands(request: Any) -> Any:
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
            read_of_topic_commands(request)


def test_a_topic_has_at_least_one_partition_and_not_more_than_the_cap() -> None:
    assert read_of_topic_commands(commands.CreateTopic("t", None, {})).partitions is None
    for wrong in (0, -1, limits.PARTITIONS_PER_TOPIC.cap + 1):
        for request in (commands.CreateTopic("t", wrong, {}), commands.GrowTopic("t", wrong)):
            with pytest.raises(BadRequest, match="partitions"):
                read_of_topic_commands(request)


def test_nil_asks_for_all_topics_and_an_empty_list_for_none() -> None:
    assert read_of_topic_commands(commands.Metadata(None)).topics is None
    assert read_of_topic_commands(commands.Metadata([])).topics == []


# Requests of transactions: xids and epochs name something, times are not zero, every list has its end.

BEGIN = commands.BeginTransaction(7, 1, "order-42", 60_000, "shop", CommitMember("query", 3, "run-1"))
PREPARE = commands.PrepareTransaction("order-42", 9, None, [])
COMMIT = commands.CommitTransaction("order-42", 9, False, False, [])
GROUP = commands.CommitGroup("query", 3, "run-1", [TransactionName("order-42", 9)], 100)
BATCH = commands.TransactionBatch("orders", 1, 0, 0, 1, 120, [commands.Block(120, 1, 77)])


def read_of_transaction_commands(request: Any) -> Any:
    """The request as it comes out of a frame at the other end."""
    command = BY_REQUEST[type(request)]
    (frame,) = Decoder().feed(b"".join(map(bytes, encode((command.code, 1, *request)))))
    return command.request.decode(frame.header, command.name, 2)


def test_requests_are_read_with_their_rows() -> None:
    assert read_of_transaction_commands(BEGIN).member.run == "run-1"
    assert read_of_transaction_commands(GROUP).transactions[0].epoch == 9
    transact = read_of_transaction_commands(
        commands.Transact(7, 1, [BATCH], [TransactionOffsets("g", "m", 2, [GroupOffset("t", 1, 0, 5)])])
    )
    assert transact.batches[0].blocks[0].crc == 77 and transact.offsets[0].offsets[0].offset == 5


def test_a_local_transaction_has_no_xid_and_its_own_timeout() -> None:
    local = read_of_transaction_commands(commands.BeginTransaction(7, 1, "", None, ""))
    assert (local.xid, local.timeout_ms, local.member) == ("", None, None)


def test_a_timeout_of_zero_is_refused() -> None:
    for wrong in (0, -1, 1 << 32):
        with pytest.raises(BadRequest, match="timeout_ms"):
            read_of_transaction_commands(BEGIN._replace(timeout_ms=wrong))
    with pytest.raises(BadRequest, match="ttl_ms"):
        read_of_transaction_commands(PREPARE._replace(ttl_ms=0))


@pytest.mark.parametrize(
    "request_", [PREPARE, COMMIT, commands.RollbackTransaction("x", 9), commands.ForgetTransaction("x", 9)]
)
def test_who_ends_a_transaction_names_it_whole(request_: Any) -> None:
    for field, wrong in (("xid", ""), ("xid", "x" * 250), ("xid", "ä" * 125), ("epoch", 0), ("epoch", -1)):
        with pytest.raises(BadRequest, match=f"field {field} "):
            read_of_transaction_commands(request_._replace(**{field: wrong}))
    assert read_of_transaction_commands(request_._replace(xid="ä" * 124)).xid == "ä" * 124


def test_a_description_may_ask_for_the_latest_epoch() -> None:
    assert read_of_transaction_commands(commands.DescribeTransaction("x")).epoch == 0
    assert read_of_transaction_commands(commands.DescribeTransaction("", 0, 17)).commit_lsn == 17


def test_a_page_of_the_list_has_a_size() -> None:
    assert read_of_transaction_commands(commands.ListTransactions()).limit == limits.TRANSACTIONS_PER_PAGE
    for wrong in (0, limits.TRANSACTIONS_PER_PAGE + 1):
        with pytest.raises(BadRequest, match="limit"):
            read_of_transaction_commands(commands.ListTransactions(limit=wrong))
        with pytest.raises(BadRequest, match="limit"):
            read_of_transaction_commands(commands.ListCommitGroups(limit=wrong))
    with pytest.raises(BadRequest, match="states"):
        read_of_transaction_commands(commands.ListTransactions(["open"] * 17))


def test_lists_that_are_too_long_are_refused_before_they_are_read() -> None:
    with pytest.raises(BadRequest, match="transactions"):
        read_of_transaction_commands(
            GROUP._replace(transactions=[TransactionName("x", 1)] * (limits.COMMIT_GROUP_MEMBERS + 1))
        )
    with pytest.raises(BadRequest, match="batches"):
        read_of_transaction_commands(commands.Transact(7, 1, [BATCH] * (limits.TRANSACT_BATCHES + 1), []))
    offsets = [TransactionOffsets("g", "m", 1, [])] * (limits.TRANSACTION_OFFSET_GROUPS + 1)
    with pytest.raises(BadRequest, match="offsets"):
        read_of_transaction_commands(COMMIT._replace(offsets=offsets))


def test_a_member_of_a_commit_group_names_its_run() -> None:
    for wrong in (CommitMember("", 3, "run"), CommitMember("query", -1, "run"), CommitMember("query", 3, "")):
        with pytest.raises(BadRequest):
            read_of_transaction_commands(BEGIN._replace(member=wrong))


def test_what_a_send_inside_a_transaction_names_is_an_epoch() -> None:
    produce = commands.Produce("t", 1, 0, 9, 0, 1, 2, [])
    assert read_of_transaction_commands(produce).transaction is None
    assert read_of_transaction_commands(produce._replace(transaction=9)).transaction == 9
    wrongs: list[Any] = [0, -1, "order-42", [1]]
    for wrong in wrongs:
        with pytest.raises(BadRequest, match="transaction"):
            read_of_transaction_commands(produce._replace(transaction=wrong))


def test_the_longest_page_fits_in_a_header_of_transaction_commands() -> None:
    row = {
        "xid": "x" * limits.XID_BYTES, "epoch": 1 << 62, "state": "heuristic_rolled_back", "group": "g" * 249,
        "owner": "127.0.0.1:65535 " + "c" * 249, "began_ms": 1 << 50, "prepared_ms": 1 << 50,
        "age_seconds": 1e9, "bytes": 1 << 50, "messages": 1 << 50,
        "topics": ["t" * 249] * limits.TRANSACTION_TOPICS_LISTED, "expires_ms": 1 << 50,
        "commit_group": "q" * 249,
    }  # fmt: skip
    reply = commands.ListTransactionsReply([row] * limits.TRANSACTIONS_PER_PAGE, True)
    (frame,) = Decoder().feed(b"".join(map(bytes, encode((0, 1, *reply)))))
    assert len(frame.header[2]) == limits.TRANSACTIONS_PER_PAGE


def test_the_offsets_of_the_largest_transaction_fit_in_a_header() -> None:
    reply = commands.CommitTransactionReply("committed", 0, [1 << 62] * limits.TRANSACTION_PIECES.cap)
    (frame,) = Decoder().feed(b"".join(map(bytes, encode((0, 1, *reply)))))
    assert BY_REQUEST[commands.CommitTransaction].reply.decode(frame.header, "reply", 2) == reply
