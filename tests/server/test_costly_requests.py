"""A read that holds thousands of costly requests: others are served in between, and nothing of it is lost."""

from typing import Any

from tests.server.fakes import Net
from tests.server.test_transport import Sink, connected, frame


class Slow(Sink):
    """Each frame takes 0.03 s."""

    net: Net

    def frame_received(self, view: memoryview, hold: Any) -> None:
        super().frame_received(view, hold)
        self.net.reactor.rightNow += 0.03


def slow(net: Net, **options: Any) -> tuple[Any, Any, Slow]:
    sink = Slow(**options)
    sink.net = net
    return *net.connect(sink), sink


def test_others_come_between_the_slices_of_a_read() -> None:
    net = Net()
    connection, socket, sink = slow(net)
    other, other_socket, others = connected(net)
    contents = [b"frame %d" % number for number in range(20)]
    socket.incoming.append(b"".join(map(frame, contents)) + frame(b"x" * 100)[:50])
    connection.doRead()
    assert len(sink.frames) == 2 and connection not in net.reactor.readers
    other_socket.incoming.append(frame(b"mine"))
    other.doRead()
    assert others.frames == [b"mine"] and len(sink.frames) == 2
    net.reactor.pump([0] * 20)
    assert sink.frames == contents
    net.bring(connection, frame(b"x" * 100)[50:])
    assert sink.frames[-1] == b"x" * 100
    assert net.all_given_back()


def test_what_was_put_off_is_dropped_with_its_connection() -> None:
    net = Net()
    connection, socket, sink = slow(net)
    socket.incoming.append(b"".join(map(frame, [b"frame"] * 20)))
    connection.doRead()
    connection.cut_off("the test says so")
    net.reactor.pump([0] * 20)
    assert len(sink.frames) == 2 and sink.lost == 1
    assert net.all_given_back()


def test_memory_of_a_slice_is_held_as_long_as_it_is_referenced() -> None:
    net = Net()
    connection, socket, sink = slow(net, holding=True)
    socket.incoming.append(b"".join(frame(b"frame %d" % number) for number in range(10)))
    connection.doRead()
    net.reactor.pump([0] * 20)
    assert [bytes(view[4:]) for view, _ in sink.held] == [b"frame %d" % number for number in range(10)]
    for _, hold in sink.held:
        hold.release()
    assert net.all_given_back()
