"""From an address as a link has it to one as a socket takes it: names are looked up, and brokers on folders found."""

from __future__ import annotations

import socket
from typing import Any

from tfmq.client.folders import Folder
from tfmq.client.servers import Server
from tfmq.errors import TfmqError

Found = list[tuple[Any, ...]]
"""What `getaddrinfo` gives."""


def look_up(server: Server | Folder) -> Found | OSError | TfmqError:
    """The addresses, or why there are none. May wait, for a name server or a disk."""
    try:
        place = server.find() if isinstance(server, Folder) else server
    except TfmqError as error:
        return error
    try:
        return list(socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM))
    except OSError as error:
        return OSError(f"the name {place.host} cannot be looked up ({error.strerror})")
