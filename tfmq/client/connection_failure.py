"""What a user is told of a connection that could not be made or broke."""

from __future__ import annotations

from collections.abc import Sequence

from tfmq.client.folders import Folder
from tfmq.client.servers import Server
from tfmq.errors import BadFrame, ConnectionFailed, TfmqError

Address = Server | Folder


def failure_of(
    error: BaseException | None, server: Address, servers: Sequence[Address], was_connected: bool
) -> TfmqError:
    """The sentence for `error` of the connection to `server`, one of `servers`."""
    if isinstance(error, BadFrame):
        failure: TfmqError = ConnectionFailed(f"{server}: {error.sentence}")
    elif isinstance(error, TfmqError):
        return error
    elif isinstance(error, ConnectionRefusedError):
        failure = ConnectionFailed(
            f"Nothing listens at {names(servers)}: start tfmq-server, or correct the address."
        )
    else:
        reason = f": {error}" if error is not None and str(error) else ""
        what = "was lost" if was_connected else "could not be made"
        failure = ConnectionFailed(f"The connection to the broker at {server} {what}{reason}.")
    failure.__cause__ = error
    return failure


def names(servers: Sequence[Address]) -> str:
    return " or ".join(map(str, servers))
