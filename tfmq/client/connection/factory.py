"""Creation of a client's connection and driver.

In tests the broker may run in this process: tests register it under an address in `in_process_brokers`. A client for
that address gets its connection, driver and clock from this broker, and uses no network.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from tfmq.client.connection.addresses import (
    START_TIMEOUT_SECONDS,
    BrokerAddress,
    LocalBrokerAddress,
    data_folder_of,
    parse_servers,
)
from tfmq.client.connection.connection import ClientConnection
from tfmq.errors import BadRequest
from tfmq.limits import CLIENT_ID_LENGTH, is_valid_name

CLIENT_ID_VARIABLE = "TFMQ_CLIENT_ID"

Driver = TypeVar("Driver")


class ClientParts(NamedTuple, Generic[Driver]):
    """A client's connection, the driver that does its I/O, and the wall clock, in seconds since 1970."""

    link: ClientConnection
    driver: Driver
    wall_clock: Callable[[], float]


class InProcessBroker(Protocol):
    def make_client_parts(
        self, servers: Sequence[BrokerAddress], driver_type: Callable[[ClientConnection], Driver]
    ) -> ClientParts[Driver]:
        """Return a connection to this broker, with a simulated driver in place of a driver of type `driver_type`."""

    def state_folder(self) -> str:
        """Return the default folder for the dead letters of this broker's consumers."""


in_process_brokers: dict[BrokerAddress, InProcessBroker] = {}


def in_process_state_folder(link: ClientConnection) -> str | None:
    """Return the default folder for a consumer's dead letters if its broker is in this process, else None."""
    server = link.servers[0]
    broker = in_process_brokers.get(server) if isinstance(server, BrokerAddress) else None
    return None if broker is None else broker.state_folder()


def make_client_parts(
    servers: str | Sequence[str] | None,
    driver_type: Callable[[ClientConnection], Driver],
    *,
    client_id: str | None = None,
    operator: bool = False,
) -> ClientParts[Driver]:
    """Create the connection to `servers` and its driver. Does no network I/O.

    `client_id`: the client's name in member lists and in the broker's log; None: $TFMQ_CLIENT_ID. `operator`: whether a
    person uses the client, so that the broker logs the changes that it requests. Raises the errors of `parse_servers`,
    and `BadRequest` for an invalid client id.
    """
    name = os.environ.get(CLIENT_ID_VARIABLE) or None if client_id is None else client_id
    if name is not None:
        check_client_id(name)
    path = data_folder_of(servers)
    found = parse_servers(servers) if path is None else ()
    broker = in_process_brokers.get(found[0]) if found else None
    if broker is not None:
        parts = broker.make_client_parts(found, driver_type)
    else:
        if path is None:
            link = ClientConnection(found, time.monotonic)
        else:
            local = LocalBrokerAddress(path)
            link = ClientConnection((local,), time.monotonic, first_connect_timeout=START_TIMEOUT_SECONDS)
        parts = ClientParts(link, driver_type(link), time.time)
    if name is not None:
        parts.link.client = name
    parts.link.operator = operator
    return parts


def check_client_id(name: object) -> None:
    if not is_valid_name(name) or len(str(name)) > CLIENT_ID_LENGTH:
        raise BadRequest(
            f"client_id must be 1 to {CLIENT_ID_LENGTH} letters, digits, '.', '_' or '-', not {str(name)[:120]!r}."
        )
