"""Frames whole, split at every byte, too large, half; replies in one write, slow readers, ends."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from journal.buffers import Pool
from tests.server.fakes import Failed, Net
from tfmq.errors import BadFrame
from tfmq.limits import KIB, MIB
from tfmq.server.reactor import TURN_SECONDS
from tfmq.server.transport import LINGER_SECONDS, UNSENT_BYTES_PAUSE, address_text


def frame(content: bytes) -> bytes:
    return len(content).to_bytes(4, "big") + content


class Sink:
    """Keeps what it gets; holds the memory of frames if configured to."""

    frame_bytes = 16 * MIB

    def __init__(self, holding: bool = False) -> None:
        self.frames: list[bytes] = []
        self.refused: list[bytes] = []
        self.held: list[Any] = []
        self.lost = 0
        self.holding = holding
        self.transport: Any = None

    def makeConnection(self, transport: Any) -> None:
        self.transport = transport

    def connectionLost(self, reason: Any) -> None:
        self.lost += 1

    def frame_received(self, view: memoryview, hold: Any) -> None:
        self.frames.append(bytes(view[4:]))
        if self.holding:
            self.held.append((view, hold.retain()))

    def frame_refused(self, error: BadFrame, start: bytes) -> None:
        self.refused.append(start)
        self.transport.end()


def connected(net: Net, **options: Any) -> tuple[Any, Any, Sink]:
    sink = Sink(**options)
    return *net.connect(sink), sink


CONTENTS = [b"abcd", b"x" * 100, bytes(range(256)) * 40, b"last"]


def test_frames_of_one_read_arrive_one_by_one() -> None:
    net = Net()
    connection, _, sink = connected(net)
    net.bring(connection, b"".join(map(frame, CONTENTS)))
    assert sink.frames == CONTENTS


def test_frames_split_at_every_byte_arrive_whole() -> None:
    stream = b"".join(map(frame, [b"abcd", b"x" * 30, b"12345678"]))
    for cut in range(1, len(stream)):
        net = Net()
        connection, _, sink = connected(net)
        net.bring(connection, stream[:cut], stream[cut:])
        assert sink.frames == [b"abcd", b"x" * 30, b"12345678"]
        assert net.all_given_back()


@given(
    st.lists(st.integers(4, 60_000), min_size=1, max_size=5),
    st.lists(st.integers(1, 30_000), max_size=40),
    st.booleans(),
)
def test_frames_in_any_pieces_arrive_whole_and_all_memory_comes_back(
    sizes: list[int], cuts: list[int], holding: bool
) -> None:
    contents = [bytes([number + 1]) * size for number, size in enumerate(sizes)]
    stream = b"".join(map(frame, contents))
    reads = []
    for cut in cuts:
        reads.append(stream[:cut])
        stream = stream[cut:]
    net = Net()
    connection, _, sink = connected(net, holding=holding)
    net.bring(connection, *(read for read in [*reads, stream] if read))
    assert sink.frames == contents
    for (view, hold), content in zip(sink.held, contents, strict=False):
        assert view[4:] == content, "held memory is not used for others"
        hold.release()
    assert net.all_given_back()


def test_a_liar_who_announces_much_and_sends_little_costs_little() -> None:
    net = Net()
    connection, _, sink = connected(net)
    net.bring(connection, (16 * MIB).to_bytes(4, "big") + b"x" * 100)
    assert net.pool.stats().live_bytes - net.traffic.arena.buffer.size == 4 * KIB
    net.bring(connection, b"x" * 5000)
    assert net.pool.stats().live_bytes - net.traffic.arena.buffer.size <= 32 * KIB
    net.bring(connection, b"")
    assert (sink.frames, sink.lost) == ([], 1)
    assert net.all_given_back()


@pytest.mark.parametrize("size", [0, 3, 16 * MIB + 1, 0x47455420, 0xFFFFFFFF])
def test_a_size_that_no_frame_may_have_is_refused_at_its_word(size: int) -> None:
    net = Net()
    connection, _, sink = connected(net)
    net.bring(connection, frame(b"good") + size.to_bytes(4, "big") + b"rest" + frame(b"more"))
    assert sink.frames == [b"good"]
    assert sink.refused == [(size.to_bytes(4, "big") + b"rest" + frame(b"more"))[:16]]
    net.bring(connection, frame(b"and more"))
    assert sink.frames == [b"good"], "what comes behind is dropped"


def test_replies_of_a_turn_go_out_in_one_write() -> None:
    net = Net()
    connection, socket, _ = connected(net)
    connection.send([b"head", memoryview(b"body")])
    connection.send([b"second"])
    assert not socket.sent
    net.reactor.advance(0)
    assert (bytes(socket.sent), socket.writes) == (b"headbodysecond", 1)


def test_more_buffers_than_one_call_takes_go_out_in_several() -> None:
    net = Net()
    connection, socket, _ = connected(net)
    connection.send([b"%4d" % number for number in range(3000)])
    net.reactor.advance(0)
    assert bytes(socket.sent) == b"".join(b"%4d" % number for number in range(3000))
    assert socket.writes == 3


@given(st.lists(st.binary(min_size=1, max_size=50), min_size=1, max_size=20), st.lists(st.integers(1, 60), max_size=30))
def test_what_the_system_takes_in_pieces_arrives_in_order(buffers: list[bytes], rooms: list[int]) -> None:
    net = Net()
    connection, socket, _ = connected(net)
    socket.room = 0
    connection.send(buffers)
    net.reactor.advance(0)
    for room in [*rooms, 1 << 30]:
        if connection in net.reactor.writers:
            socket.room = room
            net.write(connection)
    assert bytes(socket.sent) == b"".join(buffers)
    assert (connection.unsent_bytes, net.traffic.unsent_bytes) == (0, 0)
    assert connection not in net.reactor.writers


def test_a_peer_that_reads_nothing_is_cut_off_after_its_time(caplog: pytest.LogCaptureFixture) -> None:
    net = Net({"unsent_seconds": 10})
    connection, socket, sink = connected(net)
    socket.room = 3
    connection.send([b"0123456789"])
    net.reactor.pump([1] * 8)
    assert not sink.lost
    socket.room = 1
    net.write(connection)
    net.reactor.pump([1] * 8)
    assert not sink.lost, "it made progress"
    net.reactor.pump([1] * 4)
    assert sink.lost == 1
    assert "has not read anything for" in caplog.text
    assert net.traffic.unsent_bytes == 0


def test_a_peer_with_too_much_unsent_is_cut_off_at_once(caplog: pytest.LogCaptureFixture) -> None:
    net = Net({"unsent_bytes": 1000})
    connection, socket, sink = connected(net)
    socket.room = 0
    for _ in range(11):
        connection.send([b"x" * 100])
    net.reactor.advance(0)
    assert sink.lost == 1
    assert "wait for it to read" in caplog.text


def test_with_too_much_unsent_for_all_the_worst_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tfmq.server.connection_limits.UNSENT_BYTES_ALL", 1000)
    net = Net()
    few, few_socket, few_sink = connected(net)
    many, many_socket, many_sink = connected(net)
    few_socket.room = many_socket.room = 0
    few.send([b"x" * 100])
    many.send([b"x" * 850])
    net.reactor.advance(0)
    third, _, third_sink = connected(net)
    third.send([b"x" * 200])
    net.reactor.advance(0)
    assert (few_sink.lost, many_sink.lost, third_sink.lost) == (0, 1, 0)


def test_a_peer_that_asks_faster_than_it_takes_is_not_read_for_a_while() -> None:
    net = Net()
    connection, socket, sink = connected(net)
    socket.room = 0
    connection.send([b"x" * (UNSENT_BYTES_PAUSE + 1)])
    net.reactor.advance(0)
    assert connection not in net.reactor.readers
    socket.room = 1 << 30
    net.write(connection)
    net.bring(connection, frame(b"again"))
    assert sink.frames == [b"again"]


def test_reasons_to_pause_add_up() -> None:
    net = Net()
    connection, _, _ = connected(net)
    connection.pause("one")
    connection.pause("two")
    connection.resume("one")
    assert connection not in net.reactor.readers
    connection.resume("two")
    assert connection in net.reactor.readers


def test_with_too_many_half_frames_one_goes_on_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tfmq.server.connection_limits.RECEIVING_BYTES_ALL", 100_000)
    net = Net()
    content = b"x" * 50_000
    many = [connected(net) for _ in range(8)]
    for connection, _, _ in many:
        net.bring(connection, frame(content)[:30_000])
    assert net.traffic.receiving_bytes == 8 * (len(content) + 4)
    for connection, _, _ in reversed(many):
        net.bring(connection, frame(content)[30_000:30_001])
    reading = [connection for connection, _, _ in many if connection in net.reactor.readers]
    assert reading == [many[-1][0]], "who came first in line"
    for connection, _, sink in reversed(many):
        assert connection in net.reactor.readers, "its turn has come"
        net.bring(connection, frame(content)[30_001:])
        assert sink.frames == [content]
    assert all(sink.frames == [content] for _, _, sink in many)
    assert net.traffic.receiving_bytes == 0
    assert net.all_given_back()


def test_without_memory_to_receive_a_connection_ends_with_one_line_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    net = Net()
    (connection, _, sink), (other, _, served) = connected(net), connected(net)

    def allocate(*_: object) -> None:
        raise MemoryError("no memory for another chunk")

    with monkeypatch.context() as patch:
        patch.setattr(Pool, "allocate", allocate)
        net.bring(connection, frame(b"x" * 100)[:50])
        net.bring(other, frame(b"y" * 20))
    net.reactor.pump([1])
    assert sink.lost == 1 and served.frames == [b"y" * 20]
    (reported,) = [each for each in caplog.records if each.levelname != "INFO"]
    assert "out of memory (no memory for another chunk)" in reported.getMessage() and reported.exc_info is None
    assert net.all_given_back()


def test_half_a_frame_is_not_waited_for_forever(caplog: pytest.LogCaptureFixture) -> None:
    net = Net()
    connection, _, sink = connected(net)
    net.bring(connection, frame(b"x" * 100)[:50])
    net.reactor.pump([1] * 59)
    assert not sink.lost
    net.reactor.pump([1] * 4)
    assert sink.lost == 1
    assert "in the middle of a frame" in caplog.text
    assert net.all_given_back()


def test_half_a_frame_waits_as_long_as_we_do_not_read() -> None:
    net = Net()
    connection, _, sink = connected(net)
    net.bring(connection, frame(b"x" * 100)[:50])
    connection.pause("busy")
    net.reactor.pump([1] * 100)
    connection.resume("busy")
    net.bring(connection, frame(b"x" * 100)[50:])
    assert sink.frames == [b"x" * 100]


def test_the_end_sends_what_is_queued_and_waits_for_the_peer() -> None:
    net = Net()
    connection, socket, sink = connected(net)
    connection.send([b"last words"])
    connection.end()
    net.reactor.advance(0)
    assert (bytes(socket.sent), socket.half_closed, sink.lost) == (b"last words", True, 0)
    net.bring(connection, b"ignored", b"")
    assert (sink.frames, sink.lost, socket.closed) == ([], 1, True)
    assert net.reactor.getDelayedCalls() == [], "the connection is not kept in memory by its timer"


def test_the_end_does_not_wait_for_a_peer_without_end() -> None:
    net = Net()
    connection, _, sink = connected(net)
    connection.end()
    net.reactor.advance(0)
    net.reactor.advance(LINGER_SECONDS)
    net.write(connection)
    assert sink.lost == 1


@pytest.mark.parametrize("error", [ConnectionResetError(104, "reset"), BrokenPipeError(32, "pipe")])
def test_a_broken_connection_is_lost_once(error: OSError) -> None:
    net = Net()
    connection, socket, sink = connected(net)
    net.bring(connection, frame(b"x" * 100)[:50])
    socket.broken = error
    connection.send([b"x"])
    net.reactor.advance(0)
    assert sink.lost == 1
    assert net.all_given_back()


@pytest.mark.parametrize("begun", [b"", frame(b"x" * 100_000)[:50]])
def test_a_read_that_finds_nothing_waits_and_one_that_fails_ends_the_connection(begun: bytes) -> None:
    net = Net()
    connection, socket, sink = connected(net)
    if begun:
        net.bring(connection, begun)
    net.poll(connection)
    assert sink.lost == 0, "the system said readable, and was wrong"
    socket.broken = ConnectionResetError(104, "reset")
    net.poll(connection)
    assert sink.lost == 1


def test_an_address_is_written_as_people_write_it() -> None:
    assert address_text("127.0.0.1", 1) == "127.0.0.1:1"
    assert address_text("::1", 1) == "[::1]:1"


COST_SECONDS = 0.005


class Slow(Sink):
    """Each frame takes `COST_SECONDS`."""

    def frame_received(self, view: memoryview, hold: Any) -> None:
        super().frame_received(view, hold)
        self.transport.reactor.rightNow += COST_SECONDS


def test_many_busy_connections_share_what_one_may_take_of_a_turn() -> None:
    net = Net()
    sinks = [Slow() for _ in range(30)]
    for sink in sinks:
        connection, socket = net.connect(sink)
        socket.incoming.append(frame(b"abcd") * 40)
        connection.doRead()
    begun, calls = net.reactor.seconds(), net.reactor.calls
    net.reactor.calls = []
    for call in calls:  # the next turn
        call.func(*call.args)
    assert net.reactor.seconds() - begun <= TURN_SECONDS + 2 * COST_SECONDS
    net.reactor.advance(0)
    assert [len(sink.frames) for sink in sinks] == [40] * 30 and not net.traffic.deferred


def test_one_busy_connection_takes_no_more_than_its_slice_of_a_turn() -> None:
    net = Net()
    connection, socket, sink = *net.connect(slow := Slow()), slow
    socket.incoming.append(frame(b"abcd") * 40)
    connection.doRead()
    assert len(sink.frames) * COST_SECONDS <= TURN_SECONDS + COST_SECONDS
    net.reactor.advance(0)
    assert len(sink.frames) == 40


def test_a_connection_that_is_lost_while_its_requests_are_put_off_is_forgotten() -> None:
    net = Net()
    connection, socket, sink = *net.connect(slow := Slow()), slow
    socket.incoming.append(frame(b"abcd") * 40)
    connection.doRead()
    connection.connectionLost(Failed(ConnectionResetError()))
    before = len(sink.frames)
    net.reactor.advance(0)
    assert len(sink.frames) == before and not net.traffic.deferred


def request(code: int, header_bytes: int = 0) -> bytes:
    """A request's frame, of which only the size of the header and the command are read."""
    header = bytes([0x93, code, 1]) + bytes(header_bytes)
    return frame(len(header).to_bytes(4, "big") + header)


class Costly(Sink):
    """Each frame takes 60 ms; `order` has the connections in the order in which they were served."""

    def __init__(self, name: str, order: list[str], seconds: float = 0.06) -> None:
        super().__init__()
        self.name, self.order, self.seconds = name, order, seconds

    def frame_received(self, view: memoryview, hold: Any) -> None:
        super().frame_received(view, hold)
        self.order.append(self.name)
        self.transport.reactor.rightNow += self.seconds


def one_turn(net: Net) -> None:
    """What the reactor calls before the next poll."""
    calls, net.reactor.calls = net.reactor.calls, []
    for call in calls:
        call.func(*call.args)


LIST_SCHEDULES, PING, PRODUCE, METADATA = 71, 2, 21, 10


@pytest.mark.parametrize(
    "asked",
    [
        request(LIST_SCHEDULES),
        request(44, 5000),
        request(44, 300_000),
        frame((6).to_bytes(4, "big") + bytes([0x93, 0xCC, LIST_SCHEDULES, 1, 0, 0])),
        frame((4).to_bytes(4, "big") + bytes([0x93, METADATA, 1, 0x90])),
    ],
)
def test_expensive_requests_of_many_connections_wait_for_the_cheap_one_of_another(asked: bytes) -> None:
    net = Net()
    order: list[str] = []
    for number in range(40):
        connection, socket = net.connect(Costly(f"hostile {number}", order))
        socket.incoming.append(asked)
        while socket.incoming:
            connection.doRead()
    neighbour, socket = net.connect(Costly("neighbour", order, 0.0001))
    for turn in range(1, 6):
        socket.incoming.append(request(PING))
        neighbour.doRead()
        assert order.count("neighbour") == turn and len(order) == 2 * turn - 1
        one_turn(net)
    net.reactor.advance(0)
    assert len(order) == 45 and not net.traffic.deferred


@pytest.mark.parametrize(
    "asked",
    [
        request(PING),
        frame((7).to_bytes(4, "big") + bytes([0x93, PRODUCE, 1, 0, 0, 0, 0]) + bytes(100_000)),
        frame((6).to_bytes(4, "big") + bytes([0x93, METADATA, 1, 0x91, 0xA1, 0x74])),
    ],
)
def test_a_cheap_request_is_handled_with_its_read(asked: bytes) -> None:
    net = Net()
    connection, socket, sink = connected(net)
    socket.incoming.append(asked)
    connection.doRead()
    assert len(sink.frames) == 1


def test_of_deferred_connections_the_one_that_was_served_least_is_the_next() -> None:
    net = Net()
    order: list[str] = []
    many, one = Costly("many", order), Costly("one", order)
    for sink, count in ((many, 3), (one, 1)):
        connection, socket = net.connect(sink)
        socket.incoming.append(request(LIST_SCHEDULES) * count)
        connection.doRead()
    for _ in range(4):
        one_turn(net)
    assert order == ["many", "one", "many", "many"]


def test_a_connection_with_cheap_requests_left_is_served_before_idle_ones_with_an_expensive_one() -> None:
    net = Net()
    order: list[str] = []
    for number in range(10):
        connection, socket = net.connect(Costly(f"idle {number}", order))
        socket.incoming.append(request(LIST_SCHEDULES))
        connection.doRead()
    neighbour, socket = net.connect(Costly("neighbour", order, 0.01))
    socket.incoming.append(request(PING) * 2)
    neighbour.doRead()
    one_turn(net)
    assert order[:3] == ["neighbour", "neighbour", "idle 0"]


def test_a_connection_without_memory_for_its_deferred_request_is_cut_off_and_the_others_are_served() -> None:
    net = Net()
    order: list[str] = []
    sinks = [Costly(f"{number}", order) for number in range(3)]
    connections = [net.connect(sink) for sink in sinks]
    for connection, socket in connections:
        socket.incoming.append(request(LIST_SCHEDULES))
        connection.doRead()
    sinks[0].frame_received = lambda *_: (_ for _ in ()).throw(MemoryError())  # type: ignore[method-assign]
    sinks[1].frame_received = lambda *_: 1 // 0  # type: ignore[method-assign]
    net.reactor.advance(0)
    assert order == ["2"] and not net.traffic.deferred
    assert [sink.lost for sink in sinks] == [1, 1, 0]
