"""The page over HTTP: its files, and the calls of its API, each with the rights of the user of the request."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

from twisted.internet.defer import Deferred

from journal.clock import Clock
from journal.log.log import Log
from tfmq.broker.broker import Broker
from tfmq.errors import BadRequest
from tfmq.server.http_message import JSON, LOGIN, PUBLIC, HttpAnswer, HttpRequest, json_answer
from tfmq.server.local_connection import LocalSession
from tfmq.server.page.api import VIEWS, Api, ApiView, PageContext, object_of_body
from tfmq.server.page.arguments import to_json
from tfmq.server.page.call import Source
from tfmq.server.page.counters import Counters
from tfmq.server.page.cross_site import STALE_PAGE, PageTokens
from tfmq.server.page.files import INDEX, NAMES, static_file
from tfmq.server.session import SessionContext

POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'none';"
    " base-uri 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
"""What the page may do: load its own files, and call its own API. With trusted types the browser refuses every
statement that would read markup or script from a text."""

Handler = Callable[[HttpRequest], "HttpAnswer | Deferred[HttpAnswer]"]


def _file(name: str, request: HttpRequest) -> HttpAnswer:
    """Return a file of the page; 304 without it if the browser has this version."""
    found = static_file(name)
    headers = (("ETag", found.etag), ("Cache-Control", "no-cache"), ("Content-Security-Policy", POLICY))
    if found.etag in request.headers.get("if-none-match", ""):
        return HttpAnswer(304, b"", found.content_type, headers)
    return HttpAnswer(200, found.body, found.content_type, headers)


def _session(request: HttpRequest) -> HttpAnswer:
    """Return who uses the page, and the token for its changes. Sets the cookie to which the token belongs."""
    tokens = request.context.page.tokens
    cookie = tokens.cookie_of(request.headers) or tokens.new_cookie()
    header = ("Set-Cookie", tokens.header(cookie, is_tls=request.context.page.is_tls()))
    user = "" if request.account is None else request.account.name
    return json_answer({"user": user, "token": tokens.token_of(cookie)})._replace(headers=(header,))


def _identity(request: HttpRequest) -> str:
    user = "" if request.account is None else f" of user {request.account.name}"
    return f"the page{user} at {request.peer}"


def _call(view: ApiView, request: HttpRequest) -> HttpAnswer | Deferred[HttpAnswer]:
    """Execute one call of the API."""
    given: dict[str, Any]
    if view.method == "POST":
        refusal = request.context.page.tokens.refusal(request.headers)
        if refusal is not None:
            error = "stale_page" if refusal is STALE_PAGE else "forbidden"
            return json_answer({"error": error, "message": refusal}, 403)
        if request.query_text:
            raise BadRequest("The arguments of a change are in the body of the request.")
        given = object_of_body(request.body)
    else:
        given = dict(request.query())
    answer: Deferred[HttpAnswer] = Deferred()

    def done(result: dict[str, Any] | None, error: BaseException | None) -> None:
        if error is not None:
            answer.errback(error)
        else:
            answer.callback(HttpAnswer(200, to_json(result) + b"\n", JSON))

    request.context.page.api.call(view, given, LocalSession(_identity(request), request.account), done)
    return answer


def make_page(
    context: Callable[[], SessionContext],
    broker: Callable[[], Broker],
    bytes_counted: Callable[[], tuple[int, int]],
    clock: Clock,
    randomness: Callable[[int], bytes],
    port: int,
    is_tls: Callable[[], bool],
) -> PageContext:
    """Return what the handlers of the page share. `port`: that of the HTTP server."""

    def logs() -> Iterator[Log]:
        return (each.log for each in broker().topics.partitions())

    source = Source(
        lambda: broker().topics,
        lambda: broker().catalog.state.groups,
        Counters(logs, bytes_counted, clock.monotonic).read,
        lambda: broker().group_coordinator.dead_letters,
    )
    api = Api(context, source, clock.monotonic, clock.wall_ms)
    return PageContext(api, PageTokens(randomness, port), is_tls)


PAGE_ROUTES: Final[tuple[tuple[str, tuple[str, ...], str, Handler], ...]] = (
    ("/", ("GET",), LOGIN, partial(_file, INDEX)),
    *((f"/{name}", ("GET",), PUBLIC, partial(_file, name)) for name in NAMES if name != INDEX),
    ("/api/session", ("GET",), LOGIN, _session),
    *((f"/api/{view.path}", (view.method,), LOGIN, partial(_call, view)) for view in VIEWS),
)
"""Path, methods, right and handler of each route of the page."""
