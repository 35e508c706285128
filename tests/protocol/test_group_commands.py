"""Group requests: names are names, a first join has no member, ranges hold."""

import pytest

from tfmq import limits
from tfmq.bounded_msgpack import pack, unpack
from tfmq.errors import BadRequest
from tfmq.protocol import commands
from tfmq.protocol.commands import BY_REQUEST


def read(request: object) -> object:
    command = BY_REQUEST[type(request)]
    return command.request.decode([command.code, 1, *request], command.name, 2)  # type: ignore[misc]


def test_a_first_join_has_no_member_id() -> None:
    join = commands.JoinGroup("billing", "", ["orders"], 10_000)
    assert read(join) == join


def test_a_session_time_lies_within_its_limits() -> None:
    for wrong in (0, limits.SESSION_MS_MIN - 1, limits.SESSION_MS.cap + 1):
        with pytest.raises(BadRequest, match="session_ms"):
            read(commands.JoinGroup("billing", "", [], wrong))


def test_only_a_member_leaves_or_beats() -> None:
    for request in (commands.Heartbeat("g", "", 1, []), commands.LeaveGroup("g", "", 1)):
        with pytest.raises(BadRequest, match="member"):
            read(request)


def test_no_group_name_is_a_path() -> None:
    for name in ("", "..", "a/b", "a\0"):
        with pytest.raises(BadRequest, match="group"):
            read(commands.DescribeGroup(name))


def test_an_offset_is_not_negative() -> None:
    with pytest.raises(BadRequest, match="offset"):
        read(commands.CommitOffsets("g", "m", 1, [commands.GroupOffset("t", 1, 0, -1)]))


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
