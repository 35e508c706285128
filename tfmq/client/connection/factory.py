"""Creation of a client's connection and driver.

The broker may run in this process: tests register a broker under an address with `register_in_process_broker`. A client
for that address gets a driver and a clock from that broker instead of a network connection.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from tfmq.client.connection.addresses import PATIENCE_SECONDS, Folder, Server, folder_of, parse_servers
from tfmq.client.connection.connection import Link
from tfmq.errors import BadRequest
from tfmq.limits import CLIENT_ID_LENGTH, valid_name

CLIENT_ID_VARIABLE = "TFMQ_CLIENT_ID"

Driver = TypeVar("Driver")


class Reached(NamedTuple, Generic[Driver]):
    """A connection, the driver that runs it, and the wall clock in seconds since 1970."""

    link: Link
    driver: Driver
    wall_clock: Callable[[], float]


class Inside(Protocol):
    """A broker in this process."""

    def reach(self, servers: Sequence[Server], driver_type: Callable[[Link], Driver]) -> Reached[Driver]:
        """Return a connection to it and a driver equivalent to `driver_type`."""
        ...

    def state_folder(self) -> str:
        """Return the default folder for the local files of its clients."""
        ...


_inside: dict[Server, Inside] = {}


def moves_in(server: Server, broker: Inside) -> None:
    """Register `broker` under the address `server`."""
    _inside[server] = broker


def moves_out(server: Server) -> None:
    """Remove the registration of `server`."""
    _inside.pop(server, None)


def state_folder_of(link: Link) -> str | None:
    """Return the folder for local files of a client of an in-process broker.

    None for other brokers: the default folder of this user's programs is used.
    """
    server = link.servers[0]
    broker = _inside.get(server) if isinstance(server, Server) else None
    return None if broker is None else broker.state_folder()


def reach(
    servers: str | Sequence[str] | None,
    driver_type: Callable[[Link], Driver],
    *,
    client_id: str | None = None,
    operator: bool = False,
) -> Reached[Driver]:
    """Create the connection to `servers` and its driver. Does no network I/O.

    `client_id`: the client's name in member lists and in the broker's log; None: $TFMQ_CLIENT_ID. `operator`: a person
    uses the client, so the broker logs the changes that it requests. Raises as `parse_servers`, and `BadRequest` for an
    invalid client id.
    """
    name = os.environ.get(CLIENT_ID_VARIABLE) or None if client_id is None else client_id
    if name is not None:
        check_client_id(name)
    found = _reached(servers, driver_type)
    if name is not None:
        found.link.client = name
    found.link.operator = operator
    return found


def check_client_id(name: object) -> None:
    """Raises `BadRequest` if `name` is not a valid client id."""
    if not valid_name(name) or len(str(name)) > CLIENT_ID_LENGTH:
        raise BadRequest(
            f"client_id must be 1 to {CLIENT_ID_LENGTH} letters, digits, '.', '_' or '-', not {str(name)[:120]!r}."
        )


def _reached(servers: str | Sequence[str] | None, driver_type: Callable[[Link], Driver]) -> Reached[Driver]:
    path = folder_of(servers)
    if path is not None:
        link = Link((Folder(path),), time.monotonic, patience_seconds=PATIENCE_SECONDS)
        return Reached(link, driver_type(link), time.time)
    found = parse_servers(servers)
    broker = _inside.get(found[0])
    if broker is not None:
        return broker.reach(found, driver_type)
    link = Link(found, time.monotonic)
    return Reached(link, driver_type(link), time.time)
