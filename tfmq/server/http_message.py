"""Requests and answers of the HTTP server, as its handlers have them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import parse_qs

from twisted.internet.defer import Deferred

from tfmq import limits
from tfmq.config import Config
from tfmq.errors import BadRequest

if TYPE_CHECKING:
    from tfmq.server.access_control import AccessControl, Account
    from tfmq.server.page.api import PageContext  # loads the client, which a server without HTTP does not need

PUBLIC: Final = ""
LOGIN: Final = "login"
"""Values of `Route.right` beside the actions of `tfmq.access.rights`."""

TEXT: Final = "text/plain; charset=utf-8"
JSON: Final = "application/json"

HEADERS: Final = (
    ("Cache-Control", "no-store"),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    (
        "Content-Security-Policy",
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self';"
        " form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    ),
    ("Cross-Origin-Resource-Policy", "same-origin"),
)
"""Headers of every answer: nothing is cached, guessed, sent to other sites, shown in their frames, or loaded from
them."""


class HttpContext(NamedTuple):
    """What the handlers may use of the server. All of it in the reactor's thread."""

    config: Callable[[], Config]
    status: Callable[[], dict[str, Any]]
    """Returns the fields of the reply to STATUS."""
    turn_wanted: Callable[[], None]
    """Requests that the broker's work of this turn is done. Call it before `handle`."""
    not_ready: Callable[[], list[dict[str, str]]]
    """Returns why the broker does not do its whole work now; [] if it does."""
    access: AccessControl | None
    """The users and their rights; None: everybody who can connect may do everything."""
    absence: Callable[[], str]
    """Returns a sentence for all requests but health and metrics while there is no broker here; "" if there is one."""
    page: PageContext
    scrape: Callable[[], Deferred[HttpAnswer]]
    """Returns the answer with all metrics, later."""


class HttpRequest(NamedTuple):
    """One request. `parameters` has the parts of the path that are in braces in the route's path."""

    method: str
    path: str
    query_text: str
    parameters: Mapping[str, str]
    headers: Mapping[str, str]
    """Name in lower case -> value; of a repeated header, the last value."""
    body: bytes
    peer: str
    """HOST:PORT of the client."""
    context: HttpContext
    account: Account | None = None
    """The user of the request; None without a login."""

    def query(self) -> dict[str, str]:
        """Return the values after the question mark; of a repeated name, the last. Raises `BadRequest`."""
        try:
            values = parse_qs(
                self.query_text, keep_blank_values=True, errors="strict", max_num_fields=limits.HTTP_QUERY_VALUES
            )
        except ValueError:
            raise BadRequest("The part of the address after the question mark is not valid.") from None
        return {name: each[-1] for name, each in values.items()}


class HttpAnswer(NamedTuple):
    """One answer. `headers`: those that this answer has beside HEADERS, or in place of those with the same name."""

    status: int
    body: bytes
    content_type: str = TEXT
    headers: tuple[tuple[str, str], ...] = ()

    def all_headers(self) -> list[tuple[str, str]]:
        own = [("Content-Type", self.content_type), ("Content-Length", str(len(self.body)))]
        replaced = {name for name, _ in self.headers}
        return [*own, *(each for each in HEADERS if each[0] not in replaced), *self.headers]


def text_answer(status: int, sentence: str, *headers: tuple[str, str]) -> HttpAnswer:
    """Return an answer of one sentence in plain text."""
    return HttpAnswer(status, f"{sentence}\n".encode(), TEXT, headers)


def json_answer(value: Any, status: int = 200) -> HttpAnswer:
    """Return `value` as JSON."""
    return HttpAnswer(status, json.dumps(value, ensure_ascii=False).encode() + b"\n", JSON)
