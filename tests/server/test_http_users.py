"""HTTP on a server with users: each route and each view needs a login, and shows and changes only what the user may."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import tfmq
from tests.server.test_access_control import logged_in, user
from tests.server.test_http import HTTP, Page
from tests.server.wire import PATIENCE_SECONDS, running
from tfmq.access.users import save_users
from tfmq.protocol import commands
from tfmq.server.health import ready
from tfmq.server.http import ROUTES, Route
from tfmq.server.page.api import VIEWS, ApiView
from tfmq.server.page.files import INDEX, NAMES

PUBLIC = {"/live", "/ready", *(f"/{name}" for name in NAMES if name != INDEX)}
SECRET = "not-for-everybody"

ARGUMENTS: dict[str, Any] = {
    **dict.fromkeys(("topic", "name", "group", "to_topic", "id", "ids"), "secret"),
    **{"partition": 0, "offset": 0, "at": "earliest", "to": "latest", "store": "topic:secret"},
    **{"xid": "x", "epoch": 1, "end": "commit", "span": "hour", "due_ms": 1, "handle": "d123"},
}


class Asked(Page):
    """An answer that is not the one to too many passwords in one second."""

    def __init__(self, *arguments: Any, **headers: str) -> None:
        self.status, self.body, until = 503, b"logins", time.monotonic() + PATIENCE_SECONDS
        while self.status == 503 and b"logins" in self.body:
            assert time.monotonic() < until
            super().__init__(*arguments, **headers)


def basic(name: str, password: str = "right") -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(f"{name}:{password}".encode()).decode()}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server with the users admin, watcher, reader (of orders) and nobody, and messages in `orders` and `secret`."""
    folder = tmp_path_factory.mktemp("users")
    users = [user("admin", "admin"), user("watcher", "monitor"), user("reader", "read:orders"), user("nobody")]
    users.append(user("metered", "read:orders", bytes_per_second=1 << 20))
    save_users(str(folder / "users"), {each.name: each for each in users})
    with running(folder / "data", *HTTP, "--set", f"server.users={folder / 'users'}") as (process, address):
        with tfmq.Producer(f"tfmq://admin:right@{address[0]}:{address[1]}") as producer:
            producer.send("orders", "for the reader").result()
            producer.send("secret", SECRET, key="k").result()
        with tfmq.Consumer(
            f"tfmq://admin:right@{address[0]}:{address[1]}", topics="secret", group="secret"
        ) as consumer:
            consumer.poll(timeout=0.5)
        wire = logged_in(address, "admin")
        yield wire.ask(commands.Status())[0]["http"]
        _, _, log = process.stop()
        assert "Traceback" not in log and "right" not in log.replace("rights", "").replace("the right", "")


@pytest.mark.parametrize("route", ROUTES, ids=lambda each: each.path)
def test_every_route_but_the_public_ones_needs_a_login(url: str, route: Route) -> None:
    method, path = route.methods[0], route.path.replace("{", "").replace("}", "")
    body = b"{}" if method == "POST" else None
    for headers in ({}, basic("admin", "wrong"), {"Authorization": "Bearer x"}, {"Authorization": "Basic ?"}):
        page = Asked(url, path, method, body, **headers)
        if path not in PUBLIC:
            assert page.status == 401 and page.headers["WWW-Authenticate"].startswith("Basic ")
            assert json.loads(page.body)["error"] == "login_failed"
        else:
            assert page.status == 200


def test_metrics_need_the_right_to_monitor(url: str) -> None:
    found = [Asked(url, "/metrics", **basic(name)).status for name in ("watcher", "admin", "reader", "nobody")]
    assert found == [200, 200, 403, 403]


def test_the_session_names_its_user(url: str) -> None:
    assert json.loads(Asked(url, "/api/session", **basic("reader")).body)["user"] == "reader"


def call(url: str, view: ApiView, name: str) -> Page:
    given = {key: ARGUMENTS[key] for key in view.arguments if key in ARGUMENTS}
    if view.method == "GET":
        query = "&".join(f"{key}={value}" for key, value in given.items())
        return Asked(url, f"/api/{view.path}?{query}", **basic(name))
    session = Asked(url, "/api/session", **basic(name))
    headers = {
        "Content-Type": "application/json",
        "Origin": url,
        "Cookie": session.headers["Set-Cookie"].partition(";")[0],
        "x-tfmq-token": json.loads(session.body)["token"],
    }
    return Asked(url, f"/api/{view.path}", "POST", json.dumps(given).encode(), **headers, **basic(name))


@pytest.mark.parametrize("view", VIEWS, ids=lambda each: each.path)
def test_no_view_shows_or_changes_what_the_user_may_not(url: str, view: ApiView) -> None:
    for name in ("nobody", "reader"):
        page = call(url, view, name)
        assert page.status in (200, 400, 403, 404), page.body
        if page.status == 200:
            assert view.method == "GET" and SECRET.encode() not in page.body
            assert b'"secret"' not in page.body.replace(b'"topic": "secret"', b"")
        elif page.status == 403:
            assert b"needs the right" in page.body


@pytest.mark.parametrize("path", ["overview", "rates"])
def test_the_state_of_the_broker_needs_the_right_to_monitor(url: str, path: str) -> None:
    assert [Asked(url, f"/api/{path}", **basic(name)).status for name in ("reader", "watcher")] == [403, 200]


def test_a_user_with_quotas_can_read_messages(url: str) -> None:
    page = Asked(url, "/api/messages?topic=orders", **basic("metered"))
    assert page.status == 200 and len(json.loads(page.body)["messages"]) == 1


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        ("message?topic=orders&partition=0&offset=999999", 404, "offset_out_of_range"),
        ("message?topic=orders&partition=99&offset=0", 404, "unknown_partition"),
        ("message?topic=orders&partition=0&offset=1", 400, "not_a_record"),
    ],
)
def test_an_error_of_the_user_is_not_answered_as_one_of_the_server(url: str, path: str, status: int, code: str) -> None:
    page = Asked(url, f"/api/{path}", **basic("admin"))
    assert (page.status, json.loads(page.body)["error"]) == (status, code)


def test_a_list_of_topics_and_groups_has_those_of_the_user(url: str) -> None:
    def names(view: str, key: str, name: str) -> list[str]:
        found = json.loads(Asked(url, f"/api/{view}", **basic(name)).body)[view]
        return [each[key] for each in found]

    assert names("topics", "name", "reader") == ["orders"]
    assert names("topics", "name", "nobody") == names("groups", "group", "reader") == []
    assert names("topics", "name", "watcher") == ["orders", "secret"]
    assert names("groups", "group", "watcher") == ["secret"]


@pytest.mark.parametrize(("account", "shown"), [(None, False), ("reader", False), ("watcher", True)])
def test_why_the_broker_is_not_ready_is_told_to_those_who_may_monitor(account: str | None, shown: bool) -> None:
    known = {"reader": user("reader", "read:orders"), "watcher": user("watcher", "monitor")}
    who = None if account is None else SimpleNamespace(allow=known[account].rights.allow)
    context = SimpleNamespace(access=object(), not_ready=lambda: [{"reason": "log_stopped", "detail": "secret-0"}])
    request: Any = SimpleNamespace(account=who, context=context)
    answer = ready(request)
    assert answer.status == 503 and (b"secret-0" in answer.body) is shown


def test_only_health_and_files_of_the_page_are_public() -> None:
    assert {each.path for each in ROUTES if each.right == ""} == PUBLIC
