"""The option `servers`: one broker, because a position, an incarnation and a decision are one broker's."""

from __future__ import annotations

from tfmq.client.connection.addresses import parse_servers
from tfmq.errors import BadRequest


def require_one_broker(servers: str) -> None:
    """Raises BadRequest for what is no address, and for several."""
    if len(parse_servers(servers)) > 1:
        raise BadRequest(
            f"servers must be one broker, HOST:PORT, not {servers!r}: offsets and exactly once hold within one."
        )
