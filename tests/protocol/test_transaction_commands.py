"""Requests of transactions: xids and epochs name something, times are not zero, every list has its end."""

from typing import Any

import pytest

from tfmq import limits
from tfmq.errors import BadRequest
from tfmq.protocol import commands
from tfmq.protocol.commands import BY_REQUEST, CommitMember, GroupOffset, TransactionName, TransactionOffsets
from tfmq.protocol.frames import Decoder, encode

BEGIN = commands.BeginTransaction(7, 1, "order-42", 60_000, "shop", CommitMember("query", 3, "run-1"))
PREPARE = commands.PrepareTransaction("order-42", 9, None, [])
COMMIT = commands.CommitTransaction("order-42", 9, False, False, [])
GROUP = commands.CommitGroup("query", 3, "run-1", [TransactionName("order-42", 9)], 100)
BATCH = commands.TransactionBatch("orders", 1, 0, 0, 1, 120, [commands.Block(120, 1, 77)])


def read(request: Any) -> Any:
    """The request as it comes out of a frame at the other end."""
    command = BY_REQUEST[type(request)]
    (frame,) = Decoder().feed(b"".join(map(bytes, encode((command.code, 1, *request)))))
    return command.request.decode(frame.header, command.name, 2)


def test_requests_are_read_with_their_rows() -> None:
    assert read(BEGIN).member.run == "run-1"
    assert read(GROUP).transactions[0].epoch == 9
    transact = read(
        commands.Transact(7, 1, [BATCH], [TransactionOffsets("g", "m", 2, [GroupOffset("t", 1, 0, 5)])])
    )
    assert transact.batches[0].blocks[0].crc == 77 and transact.offsets[0].offsets[0].offset == 5


def test_a_local_transaction_has_no_xid_and_its_own_timeout() -> None:
    local = read(commands.BeginTransaction(7, 1, "", None, ""))
    assert (local.xid, local.timeout_ms, local.member) == ("", None, None)


def test_a_timeout_of_zero_is_refused() -> None:
    for wrong in (0, -1, 1 << 32):
        with pytest.raises(BadRequest, match="timeout_ms"):
            read(BEGIN._replace(timeout_ms=wrong))
    with pytest.raises(BadRequest, match="ttl_ms"):
        read(PREPARE._replace(ttl_ms=0))


@pytest.mark.parametrize(
    "request_", [PREPARE, COMMIT, commands.RollbackTransaction("x", 9), commands.ForgetTransaction("x", 9)]
)
def test_who_ends_a_transaction_names_it_whole(request_: Any) -> None:
    for field, wrong in (("xid", ""), ("xid", "x" * 250), ("xid", "ä" * 125), ("epoch", 0), ("epoch", -1)):
        with pytest.raises(BadRequest, match=f"field {field} "):
            read(request_._replace(**{field: wrong}))
    assert read(request_._replace(xid="ä" * 124)).xid == "ä" * 124


def test_a_description_may_ask_for_the_latest_epoch() -> None:
    assert read(commands.DescribeTransaction("x")).epoch == 0
    with pytest.raises(BadRequest, match="xid"):
        read(commands.DescribeTransaction(""))


def test_a_page_of_the_list_has_a_size() -> None:
    assert read(commands.ListTransactions()).limit == limits.TRANSACTIONS_PER_PAGE
    for wrong in (0, limits.TRANSACTIONS_PER_PAGE + 1):
        with pytest.raises(BadRequest, match="limit"):
            read(commands.ListTransactions(limit=wrong))
        with pytest.raises(BadRequest, match="limit"):
            read(commands.ListCommitGroups(limit=wrong))
    with pytest.raises(BadRequest, match="states"):
        read(commands.ListTransactions(["open"] * 17))


def test_lists_that_are_too_long_are_refused_before_they_are_read() -> None:
    with pytest.raises(BadRequest, match="transactions"):
        read(GROUP._replace(transactions=[TransactionName("x", 1)] * (limits.COMMIT_GROUP_MEMBERS + 1)))
    with pytest.raises(BadRequest, match="batches"):
        read(commands.Transact(7, 1, [BATCH] * (limits.TRANSACT_BATCHES + 1), []))
    offsets = [TransactionOffsets("g", "m", 1, [])] * (limits.TRANSACTION_OFFSET_GROUPS + 1)
    with pytest.raises(BadRequest, match="offsets"):
        read(COMMIT._replace(offsets=offsets))


def test_a_member_of_a_commit_group_names_its_run() -> None:
    for wrong in (CommitMember("", 3, "run"), CommitMember("query", -1, "run"), CommitMember("query", 3, "")):
        with pytest.raises(BadRequest):
            read(BEGIN._replace(member=wrong))


def test_what_a_send_inside_a_transaction_names_is_an_epoch() -> None:
    produce = commands.Produce("t", 1, 0, 9, 0, 1, 2, [])
    assert read(produce).transaction is None
    assert read(produce._replace(transaction=9)).transaction == 9
    wrongs: list[Any] = [0, -1, "order-42", [1]]
    for wrong in wrongs:
        with pytest.raises(BadRequest, match="transaction"):
            read(produce._replace(transaction=wrong))


def test_the_longest_page_fits_in_a_header() -> None:
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
