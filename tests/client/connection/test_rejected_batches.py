"""A batch larger than the frames that a broker takes made it end the connection, whereupon the client connected and
sent it again, a thousand times a second until the batch's time was over, and then blamed the time. And what a broker
says in hello about its limits was believed, whatever it was.
"""

import pytest

from tests.client.fake_broker import CUT, FakeBroker
from tests.client.rig import Rig
from tfmq.client.connection.requests import request
from tfmq.errors import BadFrame, BadRequest, ConnectionFailed, TfmqError
from tfmq.limits import FRAME_BYTES
from tfmq.producer import Producer
from tfmq.protocol.commands import Hello, HelloReply, Ping


def test_a_connection_that_brings_nothing_is_not_made_again_at_once() -> None:
    rig = Rig()
    rig.broker.plan(Ping, *[CUT] * 1000)
    with pytest.raises(TfmqError):
        rig.run(request(rig.link, Ping(), seconds=5))
    assert len(rig.dialled) < 20


def test_one_that_worked_is_made_again_at_once() -> None:
    rig = Rig()
    for _ in range(5):
        rig.run(request(rig.link, Ping()))
        rig.cut()
        before = rig.time
        rig.run(request(rig.link, Ping()))
        assert rig.time == before


def test_one_that_broke_in_the_middle_of_an_answer_is_made_again_at_once() -> None:
    rig = Rig()
    rig.run(request(rig.link, Ping()))
    for _ in range(20):
        rig.link.send_request(Ping())
        rig.link.received(b"\0\0\0\x10\0")
        rig.cut()
        assert rig.link.wants_connection()
        before = rig.time
        rig.exchange()
        assert rig.time == before


def test_what_the_broker_has_against_the_connection_is_reported_at_once() -> None:
    rig = Rig()
    call = rig.link.send_request(Ping(), seconds=30)
    rig.broker.plan(Ping, CUT)
    rig.link.connected()
    session_reply = HelloReply(1, "fake", "fake-1", {}, 2, [])
    rig.link._process_hello([0, 0, *session_reply])
    from tfmq.protocol.frames import encode

    error = BadFrame("A frame of 9 bytes is larger than the 8 that are allowed here.")
    frame = b"".join(bytes(part) for part in encode([-error.number, 0, error.code, "unknown", str(error), {}]))
    try:
        rig.link.received(frame)
    except BadFrame as raised:
        rig.link.disconnected(raised)
    assert isinstance(call.error, ConnectionFailed) and "A frame of 9 bytes" in str(call.error)


@pytest.mark.parametrize("limits", [{"frame_bytes": "many"}, {"batches_remembered": -1}, {"fetch_bytes": None}])
def test_limits_that_are_none_are_an_answer_that_makes_no_sense(limits: dict[str, object]) -> None:
    class Liar(FakeBroker):
        def hello(self, asked: Hello) -> HelloReply:
            return HelloReply(1, "fake", "fake-1", limits, 2, [])

    rig = Rig(Liar())
    call = rig.link.send_request(Ping(), seconds=5)
    with pytest.raises(BadFrame):
        rig.exchange()
    assert not call.done and rig.link.state != "ready"


def test_no_broker_makes_a_client_take_frames_above_the_cap() -> None:
    rig = Rig(FakeBroker(limits={"frame_bytes": 1 << 60}))
    rig.run(request(rig.link, Ping()))
    assert rig.link._decoder.frame_bytes == FRAME_BYTES.cap


def test_a_batch_that_no_broker_takes_is_refused_when_it_is_asked_for() -> None:
    with pytest.raises(BadRequest, match="at most"):
        Producer(batch_bytes=300 << 20)
