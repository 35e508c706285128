"""Keeps what ZooKeeper says about this server, its address and its topics, at what is so."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

from tfmq.config import split_address

LOOK_SECONDS: Final = 1.0
"""How soon a topic that was made, grown or deleted is there; a look is one pass over the names of topics."""
END_SECONDS: Final = 5.0
"""Somewhat more than the registration itself takes at most."""
EVERYWHERE: Final = ("", "0.0.0.0", "::")
"""Hosts to listen on that are no place to connect to."""


class Registration(Protocol):
    """See `tfmq.zookeeper.registration`, which is loaded only where it is wanted."""

    def wants(self, topics: Mapping[str, int]) -> None: ...
    def close(self) -> None: ...


class Registering:
    """`topics()`: the partitions of each topic now · `call_later` as a reactor has it. One thread."""

    def __init__(
        self,
        call_later: Callable[[float, Callable[[], None]], Any],
        topics: Callable[[], Mapping[str, int]],
        registration: Registration,
    ) -> None:
        self._call_later, self._topics, self._registration = call_later, topics, registration
        self._call: Any = None
        self._closing: threading.Thread | None = None

    def start(self) -> None:
        """Register what there is, and look from now on."""
        self._registration.wants(dict(self._topics()))
        self._call = self._call_later(LOOK_SECONDS, self.start)

    def stop(self) -> None:
        """Begin to take it back, beside what else there is to end."""
        if self._call is not None and self._call.active():
            self._call.cancel()
        self._closing = threading.Thread(target=self._registration.close, name="tfmq-unregister", daemon=True)
        self._closing.start()

    def end(self) -> None:
        """Wait until it is taken back; what a ZooKeeper that is away did not hear ends with the session."""
        if self._closing is not None:
            self._closing.join(END_SECONDS)


def reachable(address: str) -> str:
    """Where others reach a server that listens at `address`: by this machine's name if it listens everywhere."""
    host, port = split_address(address)
    return f"{socket.gethostname()}:{port}" if host in EVERYWHERE else address


def registering(
    zookeeper: str,
    address: str,
    call_later: Callable[[float, Callable[[], None]], Any],
    topics: Callable[[], Mapping[str, int]],
) -> Registering | None:
    """Registers the server at `address`; None where the setting `zookeeper` is empty.

    Raises BadRequest for what is no address of a ZooKeeper, NotSupported without kazoo.
    """
    if not zookeeper:
        return None
    from tfmq.zookeeper.registration import Registration as InZooKeeper

    return Registering(call_later, topics, InZooKeeper(zookeeper, reachable(address)))
