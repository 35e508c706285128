"""What tests of the simulation's parts share: a world with a broker in it, and clients by hand."""

from typing import Any

from tfmq.client.connection.addresses import Server as Address
from tfmq.client.connection.connection import Link
from tfmq.config import load
from tfmq.testing.clock import VirtualClock
from tfmq.testing.drivers import InsideBlockingDriver
from tfmq.testing.server import Server
from tfmq.testing.simulation import World


def new_world(**flags: Any) -> World:
    """A world whose broker runs."""
    clock = VirtualClock()
    server = Server(load(flags={"server.data": "/data", **flags}), clock, address="here:1")
    server.start()
    return World(clock, server)


def new_link(world: World) -> Link:
    return Link([Address("here", 1)], world.clock.monotonic, jitter=lambda: 0.5)


def new_driver(world: World) -> InsideBlockingDriver:
    return InsideBlockingDriver(new_link(world), world)
