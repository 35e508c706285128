"""How a client comes to its brokers: over the network, or without one where the broker runs in this very process.

A broker that a test keeps in its own process `moves_in` under an address that nothing else has; whoever names that
address, in whatever way addresses are given, gets a driver that the broker's owner made, and that owner's time.
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
    """What a client stands on: its link, the driver that moves it, and the time of day in seconds since 1970."""

    link: Link
    driver: Driver
    wall_clock: Callable[[], float]


class Inside(Protocol):
    """A broker in this process."""

    def reach(self, servers: Sequence[Server], driver_type: Callable[[Link], Driver]) -> Reached[Driver]:
        """A link to it, and a driver that does what `driver_type` does."""
        ...

    def state_folder(self) -> str:
        """Where its clients keep what is theirs, unless they are told."""
        ...


_inside: dict[Server, Inside] = {}


def moves_in(server: Server, broker: Inside) -> None:
    """From now on `server` is the address of `broker`."""
    _inside[server] = broker


def moves_out(server: Server) -> None:
    """Nothing has that address any more."""
    _inside.pop(server, None)


def state_folder_of(link: Link) -> str | None:
    """Where a client of a broker in this process keeps what is its own; None: where programs of this user do."""
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
    """A link to `servers`, as users write them, and its driver. Touches no network. Raises as `parse_servers`.

    `client_id`: its name in lists of members and in the broker's log; None: $TFMQ_CLIENT_ID.
    `operator`: a person uses it, and the broker's log is to tell what it changes.
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
    """Raises `BadRequest` for what cannot name a client."""
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
