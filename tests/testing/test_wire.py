"""A connection in memory, from both ends."""

import struct

import pytest

from journal.buffers import Pool
from tfmq.errors import BadFrame
from tfmq.testing.wire import BrokerEnd, ClientEnd, Wire


class Session:
    """What sits on the broker's end, as `tfmq.server.session.Session` does."""

    frame_bytes = 1000

    def __init__(self) -> None:
        self.frames: list[bytes] = []
        self.refused: list[tuple[BadFrame, bytes]] = []
        self.lost: list[object] = []
        self.pause_after = 0

    def makeConnection(self, transport: BrokerEnd) -> None:
        self.transport = transport
        transport.setTcpNoDelay(True)
        transport.setTcpKeepAlive(True)

    def connectionLost(self, reason: object) -> None:
        self.lost.append(reason)

    def frame_received(self, frame: memoryview, hold: object) -> None:
        self.frames.append(bytes(frame[4:]))
        if len(self.frames) == self.pause_after:
            self.transport.pause("requests")

    def frame_refused(self, error: BadFrame, start: bytes) -> None:
        self.refused.append((error, start))
        self.transport.end()


class Line:
    """A wire with both of its ends."""

    def __init__(self) -> None:
        self.wire, self.session, self.pool = Wire(), Session(), Pool()
        self.broker = BrokerEnd(self.wire, self.session, self.pool, 7)  # type: ignore[arg-type]
        self.client = ClientEnd(self.wire)

    def send(self, *bodies: bytes) -> None:
        self.client.sendmsg([part for body in bodies for part in (struct.pack(">I", len(body)), body)])


def test_whole_frames_are_handed_over_in_order() -> None:
    line = Line()
    line.send(b"first", b"second")
    assert line.session.frames == []
    assert line.broker.deliver()
    assert line.session.frames == [b"first", b"second"]
    assert not line.broker.deliver()
    assert line.pool.stats().live_count == 0


def test_half_a_frame_waits_for_its_rest() -> None:
    line = Line()
    whole = struct.pack(">I", 5) + b"hello"
    for index in range(len(whole) - 1):
        line.client.sendmsg([whole[index : index + 1]])
        assert not line.broker.deliver()
    line.client.sendmsg([whole[-1:]])
    assert line.broker.deliver()
    assert line.session.frames == [b"hello"]


def test_what_is_no_frame_is_refused() -> None:
    line = Line()
    line.client.sendmsg([b"GET / HTTP/1.1\r\n\r\n"])
    assert line.broker.deliver()
    ((error, start),) = line.session.refused
    assert "HTTP" in str(error) and start.startswith(b"GET /")


def test_a_paused_session_gets_nothing_more_until_it_goes_on() -> None:
    line = Line()
    line.session.pause_after = 1
    line.send(b"first", b"second")
    line.broker.deliver()
    assert line.session.frames == [b"first"]
    line.broker.resume("requests")
    assert line.broker.deliver()
    assert line.session.frames == [b"first", b"second"]


def test_the_client_reads_what_was_sent_as_from_a_socket() -> None:
    line = Line()
    with pytest.raises(BlockingIOError):
        line.client.recv(10)
    line.broker.send([b"abc", memoryview(b"def")])
    assert (line.client.recv(4), line.client.recv(10)) == (b"abcd", b"ef")
    line.broker.end()
    assert line.client.recv(10) == b""
    with pytest.raises(ConnectionResetError):
        line.client.sendmsg([b"x"])


def test_the_broker_sees_the_end_after_what_was_sent() -> None:
    line = Line()
    line.send(b"last words")
    line.client.close()
    assert line.broker.deliver()
    assert line.session.frames == [b"last words"]
    assert line.session.lost and line.broker.is_lost
    line.broker.send([b"nobody reads this"])
    assert not line.wire.to_client
    assert not line.broker.deliver()


@pytest.mark.parametrize("how", ["network", "broker"])
def test_a_cut_loses_what_was_under_way(how: str) -> None:
    line = Line()
    line.send(b"lost")
    line.broker.send([b"lost too"])
    line.wire.break_connection() if how == "network" else line.broker.cut_off("a test")
    assert line.broker.deliver()
    assert line.session.frames == [] and len(line.session.lost) == 1
    with pytest.raises(ConnectionResetError):
        line.client.recv(1)
    with pytest.raises(ConnectionResetError):
        line.client.sendmsg([b"x"])


def test_it_has_a_name_and_no_descriptor() -> None:
    line = Line()
    assert line.broker.peer == "client-7"
    assert line.client.fileno() == -1
