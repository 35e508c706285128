"""Promises that no other test holds alone: found by planting bugs (tools/mutants) that nothing saw."""

from __future__ import annotations

from tests.server.test_session import Client
from tfmq import errors
from tfmq.bounded_msgpack import pack


def test_a_header_that_claims_more_than_its_frame_has_is_refused() -> None:
    header = pack([2, 7])
    client = Client()
    frame = (len(header) + 5).to_bytes(4, "big") + header
    client.net.bring(client.connection, len(frame).to_bytes(4, "big") + frame)
    (reply,) = client.replies()
    assert reply[:3] == [-errors.BadFrame.number, 0, "bad_frame"]
    assert client.ended and not client.engine.requests
