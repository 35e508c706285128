"""Requests about delayed messages: due times of two kinds, handles, pages and edges with their ends."""

from typing import Any

import pytest

from tfmq import limits
from tfmq.errors import BadRequest
from tfmq.protocol import commands
from tfmq.protocol.commands import BY_REQUEST, DUE_MAX, DUE_RELATIVE
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


def test_the_reply_tells_what_a_handle_is_made_of() -> None:
    row = BY_REQUEST[commands.Produce].reply
    assert row.decode([[], 2, False, 5, -1], "PRODUCE").delayed is None
    told = row.decode([[], 2, False, 5, -1, [7, 9, 100, u64s(50, 60)]], "PRODUCE").delayed
    assert told == commands.DelayedBatch(7, 9, 100, u64s(50, 60))


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
    for wrong in (
        [],
        [5],
        [5, 5],
        [6, 5],
        [-1, 5],
        [0, DUE_MAX + 1],
        list(range(limits.DELAYED_HISTOGRAM_EDGES + 1)),
    ):
        with pytest.raises(BadRequest, match="edges"):
            read(request._replace(edges=wrong))
