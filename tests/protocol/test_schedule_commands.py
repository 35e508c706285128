"""Requests about schedules: names, bounds, defaults, and a list that always fits one header."""

from typing import Any

import pytest

from tfmq import limits
from tfmq.bounded_msgpack import pack
from tfmq.errors import BadRequest
from tfmq.protocol import commands
from tfmq.protocol.commands import BY_REQUEST
from tfmq.protocol.frames import Decoder, encode

ADD = commands.AddSchedule("daily", "0 9 * * *", "Europe/Berlin", "reports")


def read(request: Any, count: int | None = None) -> Any:
    """The request as it comes out of a frame at the other end; `count`: only so many of its fields are sent."""
    command = BY_REQUEST[type(request)]
    (frame,) = Decoder().feed(b"".join(map(bytes, encode((command.code, 1, *request[:count])))))
    return command.request.decode(frame.header, command.name, 2)


def test_what_is_left_out_has_its_default() -> None:
    assert read(ADD, 4) == ADD
    assert (ADD.partition, ADD.misfire, ADD.attribute, ADD.tombstone) == (None, "one", b"", False)
    assert read(commands.ListSchedules(), 0) == ("", "", limits.SCHEDULES_PER_PAGE)
    assert read(commands.RemoveSchedule("daily"), 1).id == 0


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
        read(ADD._replace(**{field: wrong}))


@pytest.mark.parametrize(
    "request_type", [commands.PauseSchedule, commands.ResumeSchedule, commands.RemoveSchedule]
)
def test_a_schedule_is_named_as_topics_are(request_type: Any) -> None:
    assert read(request_type("a.b-c_9")).name == "a.b-c_9"
    for wrong in ("", "a b", "..", None, 7):
        with pytest.raises(BadRequest, match="field name "):
            read(request_type(wrong))


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
