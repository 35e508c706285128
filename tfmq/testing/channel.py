"""The client's channel over a wire instead of a socket; everything but the connecting is the real one's."""

from __future__ import annotations

from typing import Any, cast

from tfmq.client.connection.connection import Link
from tfmq.client.drivers.socket import Channel
from tfmq.testing.server import Server


class InsideChannel(Channel):
    """Bytes between `link` and the broker `server` in this process."""

    def __init__(self, link: Link, server: Server) -> None:
        super().__init__(link)
        self._server = server

    def dial(self) -> None:
        """Connect, if the link wants to. Where nothing listens it is told so, as a real network would."""
        if self.socket is None and self.link.wants_connection():
            end = self._server.connect()
            if end is None:
                self.broke(ConnectionRefusedError("nothing listens"))
            else:
                self.socket = cast(Any, end)
                self.link.connected()

    def exchange(self) -> bool:
        """Write what the link has to say, read what has come; whether anything had."""
        self.flush()
        came = False
        while (data := self.receive()) is not None:
            came = True
            self.take(data)
            self.flush()
        return came
