"""The JSON API of the page: its table of views, and how one call is executed.

Each call is made of commands of the protocol, which are executed with the rights of the call's user. There is no other
way from here to the broker. The API belongs to the page of the same release; programs use the client.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, NamedTuple

from tfmq.client.operation import Operation
from tfmq.errors import BadRequest, Busy
from tfmq.server.local_connection import LocalConnection, LocalSession, OperationRun
from tfmq.server.page import dead_letters, messages, views
from tfmq.server.page.arguments import Arguments
from tfmq.server.page.call import Call, Source, View
from tfmq.server.page.cross_site import PageTokens
from tfmq.server.session import SessionContext

CALL_SECONDS: Final = 30.0
"""Timeout of one call. What it has requested may still be executed, like after a lost connection."""
CALLS_MAX: Final = 16
"""Maximum number of calls in progress, because each may have some MiB of messages in memory; more get Busy."""


class ApiView(NamedTuple):
    """One view: its path below /api, its method, the names of its arguments, and the operation that executes it.

    A view with the method POST changes something.
    """

    path: str
    method: str
    arguments: tuple[str, ...]
    view: View


def _list(*names: str) -> tuple[str, ...]:
    return (*names, "limit")


LETTERS: Final = ("store", "group", "topic", "states", "ids")

VIEWS: Final[tuple[ApiView, ...]] = (
    ApiView("overview", "GET", (), views.overview),
    ApiView("rates", "GET", (), views.rates),
    ApiView("topics", "GET", _list("after", "contains"), views.topics),
    ApiView("topic", "GET", _list("name", "first"), views.topic),
    ApiView("messages", "GET", _list("topic", "partition", "at", "key", "key_base64"), messages.browse),
    ApiView("message", "GET", ("topic", "partition", "offset"), messages.one_message),
    ApiView("groups", "GET", _list("after", "contains"), views.groups),
    ApiView("group", "GET", _list("name", "first"), views.group),
    ApiView("group/reset", "POST", ("group", "topic", "partition", "to"), views.reset_group),
    ApiView("transactions", "GET", _list("after", "states"), views.transactions),
    ApiView("transaction", "GET", ("xid", "epoch"), views.transaction),
    ApiView("transaction/end", "POST", ("xid", "epoch", "end"), views.end_transaction),
    ApiView("delayed", "GET", _list("after", "topic", "from_ms", "key", "key_base64"), views.delayed),
    ApiView("delayed/histogram", "GET", ("span", "topic"), views.delayed_histogram),
    ApiView("delayed/cancel", "POST", ("handle",), views.cancel_delayed),
    ApiView("delayed/reschedule", "POST", ("handle", "due_ms"), views.reschedule_delayed),
    ApiView("schedules", "GET", _list("after", "name"), views.schedules),
    ApiView("dead-letters/groups", "GET", (), views.reported_dead_letters),
    ApiView("dead-letters", "GET", _list(*LETTERS, "after_ms", "after_id"), dead_letters.dead_letters),
    ApiView("dead-letter", "GET", ("store", "id"), dead_letters.dead_letter),
    ApiView("dead-letters/redrive", "POST", _list(*LETTERS, "to_topic", "dry"), dead_letters.redrive),
)
"""Every view of the API."""

Done = Callable[[dict[str, Any] | None, BaseException | None], None]


class Api:
    """Executes calls of the API in the server's thread.

    `context()` returns what the sessions of the server share: the handler of requests, and the limits. `clock` returns
    monotonic seconds, `wall_ms` ms since 1970.
    """

    def __init__(
        self,
        context: Callable[[], SessionContext],
        source: Source,
        clock: Callable[[], float],
        wall_ms: Callable[[], int],
    ) -> None:
        self._context, self._source = context, source
        self._clock, self._wall_ms = clock, wall_ms
        self.calls_in_progress = 0

    def call(self, view: ApiView, given: Mapping[str, Any], session: LocalSession, done: Done) -> OperationRun:
        """Execute a view under `session`, which is closed at the end; then call `done(result, error)` once.

        Raises BadRequest for an argument that the view does not have, Busy above CALLS_MAX.
        """
        if self.calls_in_progress >= CALLS_MAX:
            raise Busy("Too many requests of pages are in progress. Wait a little and try again.")
        context = self._context()
        link = LocalConnection(context, session, self._clock)
        operation = self._operation(view, Call(link, Arguments(given, view.arguments), self._source, self._wall_ms))
        self.calls_in_progress += 1
        return OperationRun(link, operation, partial(self._ended, link, done), CALL_SECONDS)

    @staticmethod
    def _operation(view: ApiView, call: Call) -> Operation[dict[str, Any]]:
        return (yield from view.view(call))

    def _ended(
        self, link: LocalConnection, done: Done, result: dict[str, Any] | None, error: BaseException | None
    ) -> None:
        self.calls_in_progress -= 1
        link.close()
        link.session.end()
        done(result, error)


class PageContext(NamedTuple):
    """What the handlers of the page share."""

    api: Api
    tokens: PageTokens
    is_tls: Callable[[], bool]
    """Returns whether the page is reached over TLS."""


def object_of_body(body: bytes) -> dict[str, Any]:
    """Return the JSON object of a POST. Raises `BadRequest`."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        raise BadRequest("The body of the request must be a JSON object.") from None
    if not isinstance(found, dict):
        raise BadRequest("The body of the request must be a JSON object.")
    return found
