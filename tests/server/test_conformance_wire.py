"""The checklist's items that are about the wire."""

from __future__ import annotations

import pytest

from tests.server.test_session import Client
from tfmq import errors
from tfmq.bounded_msgpack import pack
from tfmq.protocol import commands, frames
from tfmq.protocol.commands import BY_REQUEST


def test_item_11_half_a_frame_waits_for_its_other_half_at_every_byte() -> None:
    ping = b"".join(frames.encode([BY_REQUEST[commands.Ping].code, 7]))
    for cut in range(1, len(ping)):
        client = Client()
        client.net.bring(client.connection, ping[:cut])
        assert not client.engine.requests and not client.ended, f"cut at {cut}"
        client.net.bring(client.connection, ping[cut:] + ping)
        assert len(client.engine.requests) == 2, f"cut at {cut}"


@pytest.mark.parametrize("code", [9, 99, 1000, 1 << 31])
def test_item_12_an_unknown_command_is_refused_by_its_number_and_the_next_one_served(code: int) -> None:
    client = Client()
    client.net.bring(client.connection, b"".join(frames.encode([code, 7, "what"])))
    (reply,) = client.replies()
    assert reply[:3] == [-errors.UnknownCommand.number, 7, "unknown_command"]
    assert str(code) in reply[4] and not client.ended
    client.say(commands.Ping(), 8)
    assert len(client.engine.requests) == 1


def test_a_header_of_another_shape_is_no_command() -> None:
    client = Client()
    header = pack({"command": 2})
    frame = len(header).to_bytes(4, "big") + header
    client.net.bring(client.connection, len(frame).to_bytes(4, "big") + frame)
    (reply,) = client.replies()
    assert reply[2] == "bad_frame" and client.ended
