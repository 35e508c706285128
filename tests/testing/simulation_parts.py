"""What tests of the simulation's parts share: a world with a broker in it, and clients by hand."""

from typing import Any

from tfmq.client.connection.addresses import BrokerAddress as Address
from tfmq.client.connection.connection import ClientConnection
from tfmq.config import load
from tfmq.testing.clock import VirtualClock
from tfmq.testing.drivers import SimulatedBlockingDriver
from tfmq.testing.server import SimulatedServer
from tfmq.testing.simulation import Simulation


def new_world(**flags: Any) -> Simulation:
    """A world whose broker runs."""
    clock = VirtualClock()
    server = SimulatedServer(load(flags={"server.data": "/data", **flags}), clock, address="here:1")
    server.start()
    return Simulation(clock, server)


def new_link(world: Simulation) -> ClientConnection:
    return ClientConnection([Address("here", 1)], world.clock.monotonic, jitter=lambda: 0.5)


def new_driver(world: Simulation) -> SimulatedBlockingDriver:
    return SimulatedBlockingDriver(new_link(world), world)
