"""A link's channel over a wire."""

import pytest

from tests.testing.inside import new_link, new_world
from tfmq.errors import ConnectionFailed
from tfmq.protocol.commands import Ping
from tfmq.testing.drivers import SimulatedChannel


def test_it_connects_when_the_link_wants_to() -> None:
    world = new_world()
    link = new_link(world)
    channel = SimulatedChannel(link, world.server)
    channel.dial()
    assert channel.socket is None, "nobody asked for anything"
    call = link.send_request(Ping())
    channel.dial()
    while channel.exchange() or world.server.run_turn():
        pass
    assert call.result().time_ms == world.clock.wall_ms()
    assert link.connection_count == 1


def test_where_nothing_listens_the_link_is_told_as_by_a_network() -> None:
    world = new_world()
    world.server.stop()
    link = new_link(world)
    channel = SimulatedChannel(link, world.server)
    call = link.send_request(Ping(), seconds=1)
    while not call.done:
        channel.dial()
        world.clock.move(max(link.next_time(), world.clock.monotonic()))
        channel.tick()
    with pytest.raises(ConnectionFailed, match="Nothing listens at here:1: start tfmq-server"):
        call.result()


def test_a_cut_wire_breaks_the_connection() -> None:
    world = new_world()
    link = new_link(world)
    channel = SimulatedChannel(link, world.server)
    call = link.send_request(Ping(), repeat=False)
    channel.dial()
    channel.exchange()
    world.server.disconnect()
    channel.exchange()
    assert link.state == "down" and channel.socket is None
    assert not call.done, "it had not gone out yet, so it waits for the next connection"
