"""Protection against requests that another site's page makes in the name of the person at the browser (CSRF).

A change needs all of this: a POST of JSON, which no form of another site can send; an Origin header that names this
server; a cookie that the browser sends only to pages of this site; and a header with the token of that cookie, which
only a page of this site can read.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Callable, Mapping
from http.cookies import CookieError, SimpleCookie
from typing import Final
from urllib.parse import urlsplit

TOKEN_HEADER: Final = "x-tfmq-token"
SECRET_BYTES: Final = 32
COOKIE_BYTES: Final = 16
_COOKIE: Final = re.compile(f"[0-9a-f]{{{2 * COOKIE_BYTES}}}")
WRONG_SITE: Final = "The request does not come from a page of this server."
STALE_PAGE: Final = "The page is older than the server's start: load it again."


class PageTokens:
    """Cookies of pages, and the token of each. The secret is new at each start.

    `port` is in the name of the cookie, because browsers send a cookie to all ports of a host.
    """

    def __init__(self, randomness: Callable[[int], bytes], port: int) -> None:
        self._randomness = randomness
        self._secret = randomness(SECRET_BYTES)
        self.cookie_name = f"tfmq-page-{port}"

    def cookie_of(self, headers: Mapping[str, str]) -> str | None:
        """Return the value of the page's cookie in the headers of a request; None without a valid one."""
        value = read_cookie(headers, self.cookie_name)
        return value if value is not None and _COOKIE.fullmatch(value) else None

    def new_cookie(self) -> str:
        return self._randomness(COOKIE_BYTES).hex()

    def token_of(self, cookie: str) -> str:
        return hmac.digest(self._secret, cookie.encode("utf-8", "replace"), "sha256").hex()

    def header(self, cookie: str, *, is_tls: bool) -> str:
        """Return the Set-Cookie header of a cookie. Scripts cannot read it, other sites' pages do not send it."""
        return f"{self.cookie_name}={cookie}; Path=/; HttpOnly; SameSite=Strict" + ("; Secure" if is_tls else "")

    def refusal(self, headers: Mapping[str, str]) -> str | None:
        """Return why a POST with these headers is refused, WRONG_SITE or STALE_PAGE; None if it is accepted."""
        if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            return WRONG_SITE
        if _host_of(headers.get("origin", "")) != headers.get("host", "").lower():
            return WRONG_SITE
        if headers.get("sec-fetch-site", "same-origin") != "same-origin":
            return WRONG_SITE
        cookie, token = self.cookie_of(headers), headers.get(TOKEN_HEADER, "")
        if cookie is None or not hmac.compare_digest(self.token_of(cookie).encode(), token.encode("utf-8", "replace")):
            return STALE_PAGE
        return None


def _host_of(origin: str) -> str:
    """Return host and port of an Origin header; "" if it is not valid."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


def read_cookie(headers: Mapping[str, str], name: str) -> str | None:
    """Return the value of one cookie in the headers of a request; None if it is not there, or they are not valid."""
    try:
        found = SimpleCookie(headers.get("cookie", "")).get(name)
    except CookieError:
        return None
    return None if found is None else found.value
