"""The table of commands: codes stay, every request and reply travels, whatever comes is read or refused."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.scale import scaled
from tfmq.errors import BadRequest
from tfmq.protocol import commands
from tfmq.protocol.commands import BY_CODE, BY_REQUEST, COMMANDS, Command, Edges, reserved_for
from tfmq.protocol.frames import Decoder, encode
from tfmq.protocol.schema import ByteString, Flag, Integer, Kind, ListOf, Map, Name, Optional, Record, Text

# A code that was published once never means another command: this list only grows.
PUBLISHED = {
    "HELLO": 1,
    "PING": 2,
    "STATUS": 3,
    "CANCEL": 4,
    "AUTHENTICATE": 5,
    "PROMOTE_REPLICA": 6,
    "METADATA": 10,
    "CREATE_TOPIC": 11,
    "GROW_TOPIC": 12,
    "DELETE_TOPIC": 13,
    "DESCRIBE_TOPIC": 14,
    "RESUME_PARTITION": 15,
    "TRUNCATE": 16,
    "SET_TOPIC": 17,
    "LEASE_PRODUCER_IDS": 20,
    "PRODUCE": 21,
    "SUCCEED_PRODUCER": 22,
    "FETCH": 30,
    "LOCATE": 31,
    "JOIN_GROUP": 40,
    "HEARTBEAT": 41,
    "LEAVE_GROUP": 42,
    "COMMIT_OFFSETS": 43,
    "READ_OFFSETS": 44,
    "LIST_GROUPS": 45,
    "DESCRIBE_GROUP": 46,
    "RESET_GROUP": 47,
    "DELETE_GROUP": 48,
    "BEGIN_TRANSACTION": 50,
    "PREPARE_TRANSACTION": 51,
    "COMMIT_TRANSACTION": 52,
    "ROLLBACK_TRANSACTION": 53,
    "FORGET_TRANSACTION": 54,
    "LIST_TRANSACTIONS": 55,
    "DESCRIBE_TRANSACTION": 56,
    "TRANSACT": 57,
    "AWAIT_CHECKS": 58,
    "CANCEL_DELAYED": 60,
    "RESCHEDULE_DELAYED": 61,
    "LIST_DELAYED": 62,
    "DESCRIBE_DELAYED": 63,
    "DELAYED_HISTOGRAM": 64,
    "ADD_SCHEDULE": 70,
    "LIST_SCHEDULES": 71,
    "PAUSE_SCHEDULE": 72,
    "RESUME_SCHEDULE": 73,
    "REMOVE_SCHEDULE": 74,
    "COMMIT_GROUP": 80,
    "ABORT_COMMIT_GROUP": 81,
    "LIST_COMMIT_GROUPS": 82,
    "FORGET_COMMIT_GROUP": 83,
}

every_command = pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)


def test_names_and_codes_are_as_published() -> None:
    assert {command.name: command.code for command in COMMANDS} == PUBLISHED
    assert len(BY_CODE) == len(BY_REQUEST) == len(COMMANDS)


@every_command
def test_no_code_is_reserved_for_something_else(command: Command) -> None:
    assert reserved_for(command.code) is None
    assert command.description.endswith(".")


def test_codes_of_later_releases_are_known_as_such() -> None:
    assert reserved_for(79) == "more commands about schedules" and reserved_for(69) is None


def values(kind: Kind) -> st.SearchStrategy[Any]:
    """What `kind` takes."""
    match kind:
        case Integer():
            return st.integers(kind.low, kind.high)
        case Flag():
            return st.booleans()
        case Text():
            return st.text(min_size=0 if kind.empty else 1, max_size=kind.size // 4)
        case Name():
            names = st.from_regex(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,20}", fullmatch=True)
            return names | st.just("") if kind.empty else names
        case Map():
            return st.dictionaries(st.text(max_size=5), st.integers(0, 9) | st.text(max_size=5), max_size=4)
        case Optional():
            return st.none() | values(kind.kind)
        case ByteString():
            return st.binary(min_size=0 if kind.piece == 1 else kind.piece, max_size=3 * kind.piece).map(
                lambda data: data[: len(data) // kind.piece * kind.piece]
            )
        case Edges():
            return st.lists(st.integers(0, 1 << 50), min_size=2, max_size=4, unique=True).map(sorted)
        case ListOf():
            return st.lists(values(kind.kind), max_size=4)
        case Record():
            return rows(kind)
    raise ValueError(kind)


def rows(row: Record[Any]) -> st.SearchStrategy[Any]:
    return st.tuples(*map(values, row.kinds)).map(row.shape._make)


@pytest.mark.long
@every_command
@settings(max_examples=scaled(200))
@given(data=st.data())
def test_requests_and_replies_travel(command: Command, data: st.DataObject) -> None:
    for row in (command.request, command.reply):
        sent = data.draw(rows(row))
        (frame,) = Decoder().feed(b"".join(map(bytes, encode((command.code, 5, *sent)))))
        assert row.decode(frame.header, command.name, 2) == sent


wild = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.long
@every_command
@settings(max_examples=scaled(300))
@given(fields=st.lists(wild, max_size=14))
def test_whatever_comes_is_read_or_refused_in_a_sentence(command: Command, fields: list[Any]) -> None:
    try:
        command.request.decode([command.code, 0, *fields], command.name, 2)
    except BadRequest as error:
        assert 10 < len(str(error)) < 500 and not error.closes


@every_command
def test_missing_trailing_fields_take_their_defaults(command: Command) -> None:
    row = command.request
    known = [name for name in row.names if name not in row.defaults]
    assert list(row.names[: len(known)]) == known, "fields with a default stand last"
    with_default = row.names[len(known) :]
    for name in with_default:
        kind = row.kinds[row.names.index(name)]
        assert kind.check(row.defaults[name], name) == row.defaults[name]


def test_fields_of_a_newer_client_are_passed_over() -> None:
    fetch = commands.Fetch("orders", 1, 0, 100)
    assert BY_CODE[30].request.decode([30, 9, *fetch, "new", [1]], "FETCH", 2) == fetch


def test_rows_inside_lists_are_read_as_rows() -> None:
    produce = BY_CODE[21].request.decode([21, 1, "t", 1, 0, 9, 0, 1, 2, [[120, 1, 77]]], "PRODUCE", 2)
    assert produce.blocks == [commands.Block(120, 1, 77)] and produce.blocks[0].size == 120
    metadata = BY_CODE[10].reply.decode([0, 1, [["t", 5, [[0, "open"]], {}]]], "METADATA", 2)
    assert metadata.topics[0].partitions[0].state == "open"


@pytest.mark.parametrize(
    ("field", "value"),
    [("topic", "a/../b"), ("partition", -1), ("producer_id", 0), ("sequence", 1 << 24), ("count", 0), ("acks", 3)],
)
def test_a_produce_that_makes_no_sense_is_refused(field: str, value: Any) -> None:
    produce = commands.Produce("t", 1, 0, 9, 0, 1, 2, [])._replace(**{field: value})
    with pytest.raises(BadRequest, match=f"field {field} "):
        BY_CODE[21].request.decode([21, 1, *produce], "PRODUCE", 2)
