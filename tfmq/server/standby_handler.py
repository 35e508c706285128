"""The request handler of a standby: it refers clients to the primary, and can be asked to become primary.

A standby answers HELLO and AUTHENTICATE (by `tfmq.server.session`), STATUS, PING and PROMOTE_REPLICA, and with
`replicate.read` the commands that read messages. Every other request is answered with NotPrimary and the address of the
primary, so that clients connect there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from tfmq.broker.reply import Body, Reply, client_error
from tfmq.broker.request_handler import LOGGED_COMMANDS, LoggingReply
from tfmq.errors import NotPrimary, StoreFailed, TfmqError
from tfmq.protocol import commands
from tfmq.protocol.commands import ROLE_STANDBY
from tfmq.replication.errors import ReplicationError
from tfmq.server.standby_reads import READS

if TYPE_CHECKING:
    from tfmq.server.access_control import AccessControl
    from tfmq.server.standby_reads import StandbyReads

Promote = Callable[[Callable[[BaseException | None], None]], None]
"""Requests the hand-over to this standby, and calls its argument once: with None when the request is stored, or with
the error."""

REQUESTED: Final = "requested"
"""The state in the reply to PROMOTE_REPLICA."""


class StandbyHandler:
    """Replies to the requests that a standby gets. `handle` has the arguments of `RequestHandler.handle`.

    `primary()` returns HOST:PORT of the present primary, "" if it is not known. `wall_ms`: the wall clock, in ms since
    1970. `access`: the users of the server and their rights, which passes reads on to `reads`; None without users.
    `reads`: what reads the data folder; None without `replicate.read`.
    """

    def __init__(
        self,
        primary: Callable[[], str],
        promote: Promote,
        wall_ms: Callable[[], int],
        access: AccessControl | None = None,
        reads: StandbyReads | None = None,
    ) -> None:
        self._primary, self._promote, self._wall_ms, self._access, self._reads = (
            primary,
            promote,
            wall_ms,
            access,
            reads,
        )

    def hello_properties(self) -> dict[str, Any]:
        """Return the properties of a standby's reply to HELLO."""
        more = {} if self._reads is None else {"reads": True}
        return {"role": ROLE_STANDBY, "primary": self._primary(), **more}

    def handle(self, request: Any, body: Body, reply: Reply, session: Any) -> None:
        kind = type(request)
        if kind is commands.Ping:
            reply.ok(self._wall_ms())
        elif self._reads is not None and kind in READS:
            (self._reads if self._access is None else self._access).handle(request, body, reply, session)
        elif kind is not commands.PromoteReplica:
            reply.error(self._not_primary())
        elif self._access is None or self._access.check(request, reply, session):
            self._request_promotion(request, LoggingReply(reply, session, LOGGED_COMMANDS[kind], request))

    def _request_promotion(self, request: commands.PromoteReplica, reply: Reply) -> None:
        def requested(error: BaseException | None) -> None:
            if error is None:
                reply.ok(REQUESTED)
            else:
                reply.error(_promotion_error(error))

        try:
            self._promote(requested)
        except Exception as error:
            reply.error(_promotion_error(error))

    def _not_primary(self) -> NotPrimary:
        primary = self._primary()
        where = f"The primary is {primary}" if primary else "No server is known to be primary at present"
        return NotPrimary(f"This server is a standby. {where}. {NotPrimary.advice}", primary=primary)


def _promotion_error(error: BaseException) -> TfmqError:
    if isinstance(error, ReplicationError):
        return StoreFailed(
            f"The hand-over could not be requested in the store of the replicas: {str(error).rstrip('.')}."
        )
    return client_error(error)
