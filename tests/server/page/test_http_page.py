"""The page over HTTP: its files and their versions, and which requests of other sites' pages are refused."""

from __future__ import annotations

import http.client
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.server.page.browser import PageServer, page_server, prepare
from tests.server.wire import PATIENCE_SECONDS
from tfmq.server.http import ROUTES
from tfmq.server.http_page import POLICY
from tfmq.server.page.api import VIEWS
from tfmq.server.page.files import FOLDER, INDEX, NAMES


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageServer]:
    with page_server(tmp_path_factory.mktemp("page")) as made:
        yield made


class Answer:
    """The answer to one request."""

    def __init__(self, server: PageServer, path: str, method: str = "GET", body: bytes = b"", **headers: str) -> None:
        where = urlsplit(server.url)
        connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=PATIENCE_SECONDS)
        connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        response = connection.getresponse()
        self.status, self.headers, self.body = response.status, response.headers, response.read()
        connection.close()

    @property
    def json(self) -> Any:
        return json.loads(self.body)


# Files


def test_every_file_of_the_page_is_served_and_no_other(server: PageServer) -> None:
    assert sorted(each.name for each in FOLDER.iterdir()) == sorted(NAMES)
    for name in NAMES:
        answer = Answer(server, "/" if name == INDEX else f"/{name}")
        assert (answer.status, answer.body) == (200, (FOLDER / name).read_bytes()), name
    for path in ("/index.html", "/page.css/", "/static/page.css", "/../page.css", "/%2e%2e/api.py", "/api.py", "/api/"):
        assert Answer(server, path).status == 404, path


def test_a_browser_that_has_a_file_does_not_load_it_again(server: PageServer) -> None:
    first = Answer(server, "/main.js")
    again = Answer(server, "/main.js", if_none_match=first.headers["ETag"])
    assert (again.status, again.body, first.headers["Cache-Control"]) == (304, b"", "no-cache")
    assert Answer(server, "/main.js", if_none_match='"another"').status == 200
    assert Answer(server, "/api/overview").headers["Cache-Control"] == "no-store"


def test_the_page_loads_nothing_from_elsewhere_and_has_no_script_in_its_markup(server: PageServer) -> None:
    answer = Answer(server, "/")
    assert answer.headers.get_all("Content-Security-Policy") == [POLICY]
    assert "unsafe" not in POLICY and "*" not in POLICY and "http" not in POLICY
    for name in NAMES:
        text = (FOLDER / name).read_text().replace("http://www.w3.org/2000/svg", "")
        assert "http:" not in text and "https:" not in text and "//cdn" not in text, name
        assert not any(
            sink in text for sink in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(")
        ), name


# Damage


def test_damage_is_shown_and_the_messages_after_it_are_reached(tmp_path: Path) -> None:
    settings = ("log.segment_bytes=64KiB", "verification.interval_seconds=1s", "verification.bytes_per_second=1GiB")
    options = [option for each in settings for option in ("--set", each)]
    with page_server(tmp_path, *options) as server:
        with server.producer() as producer:
            for number in range(8):
                producer.send("orders", bytes([number]) * 30_000).result()
        segment = min((tmp_path / "data" / "orders-0").glob("*.zxQueue"))
        with segment.open("r+b") as file:
            file.seek(200)
            file.write(b"\xff")
        topic: Any = {}
        until = time.monotonic() + PATIENCE_SECONDS
        while not topic or not topic["partitions"][0]["findings"]:
            assert time.monotonic() < until
            topic = Answer(server, "/api/topic?name=orders").json
        (finding,) = topic["partitions"][0]["findings"]
        assert (finding["file"], finding["kind"]) == (segment.name, "damaged")
        assert Answer(server, "/api/topics").json["topics"][0]["findings"] == 1
        assert Answer(server, "/api/overview").json["damaged"]["count"] == 1
        page = Answer(server, "/api/messages?topic=orders").json
        assert page["messages"] == [] and page["damage"]["first"] == 0
        page = Answer(server, f"/api/messages?topic=orders&at=offset:{page['damage']['next']}").json
        assert [each["ordinal"] for each in page["messages"]] == list(range(1, 8))


# Requests of other sites' pages

CHANGE = "/api/transaction/end"


class Visitor:
    """A page of this server: its cookie and token. `end` asks to end a transaction, with some headers changed."""

    def __init__(self, server: PageServer) -> None:
        self.server = server
        session = Answer(server, "/api/session")
        self.cookie = session.headers["Set-Cookie"]
        self.headers = {
            "content_type": "application/json",
            "origin": server.url,
            "cookie": self.cookie.partition(";")[0],
            "x_tfmq_token": session.json["token"],
        }

    def end(self, values: Any, path: str = CHANGE, **changed: str | None) -> Answer:
        headers = {name: value for name, value in {**self.headers, **changed}.items() if value is not None}
        return Answer(self.server, path, "POST", json.dumps(values).encode(), **headers)


def state_of(server: PageServer, xid: str) -> str:
    with server.admin() as admin:
        return admin.transaction(xid).state


REFUSED: dict[str, dict[str, str | None]] = {
    "no token": {"x_tfmq_token": None},
    "another token": {"x_tfmq_token": "0" * 64},
    "no cookie": {"cookie": None},
    "the token of another cookie": {"cookie": "%s=" + "ab" * 16},
    "no origin": {"origin": None},
    "an unknown origin": {"origin": "null"},
    "no valid origin": {"origin": "http://["},
    "another site": {"origin": "http://evil.example"},
    "another port": {"origin": "http://127.0.0.1:1"},
    "a form": {"content_type": "application/x-www-form-urlencoded"},
    "text": {"content_type": "text/plain; application/json"},
    "what the browser says is another site": {"sec_fetch_site": "cross-site"},
}


@pytest.mark.parametrize("changed", REFUSED.values(), ids=REFUSED)
def test_a_change_that_another_site_could_send_is_refused(server: PageServer, changed: dict[str, str | None]) -> None:
    prepare(server, "kept")
    with server.admin() as admin:
        epoch = admin.transaction("kept").epoch
    visitor = Visitor(server)
    name = visitor.headers["cookie"].partition("=")[0]
    changed = {key: value and value.replace("%s", name) for key, value in changed.items()}
    wish = {"xid": "kept", "epoch": epoch, "end": "rollback"}
    refused = visitor.end(wish, **changed)
    is_stale = bool({"cookie", "x_tfmq_token"} & changed.keys())
    assert (refused.status, refused.json["error"]) == (403, "stale_page" if is_stale else "forbidden")
    assert state_of(server, "kept") == "prepared"
    assert visitor.end(wish).json["state"] == "heuristic_rolled_back"
    with server.admin() as admin:
        admin.forget_transaction("kept")


def test_the_cookie_is_not_for_scripts_nor_for_other_sites(server: PageServer) -> None:
    visitor = Visitor(server)
    assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= {each.strip() for each in visitor.cookie.split(";")}
    again = Answer(server, "/api/session", cookie=visitor.headers["cookie"])
    assert again.json["token"] == visitor.headers["x_tfmq_token"]


def test_a_cookie_with_other_characters_is_not_taken_over(server: PageServer) -> None:
    name = Visitor(server).headers["cookie"].partition("=")[0]
    answer = Answer(server, "/api/session", cookie=f'{name}="{"x" * 17}; Domain=a.b; \\054"')
    assert re.fullmatch(rf"{name}=[0-9a-f]{{32}}; Path=/; HttpOnly; SameSite=Strict", answer.headers["Set-Cookie"])


@pytest.mark.parametrize("view", [each for each in VIEWS if each.method == "POST"], ids=lambda each: each.path)
def test_no_change_is_made_by_a_get_or_without_the_token(server: PageServer, view: Any) -> None:
    assert Answer(server, f"/api/{view.path}").status == 405
    visitor = Visitor(server)
    assert visitor.end({}, f"/api/{view.path}", x_tfmq_token=None).status == 403
    assert visitor.end({}, f"/api/{view.path}?store=x").status == 400
    bodies: tuple[Any, ...] = ([], "text", None, 1)
    for body in bodies:
        assert visitor.end(body, f"/api/{view.path}").status == 400


def test_every_view_is_in_the_table_of_routes() -> None:
    routes = {(route.path, method) for route in ROUTES for method in route.methods}
    assert {(f"/api/{view.path}", view.method) for view in VIEWS} <= routes


def test_the_docs_list_every_view_with_its_arguments() -> None:
    table = (FOLDER.parents[3] / "docs" / "page.md").read_text()
    for view in VIEWS:
        names = " ".join(f"`{name}`" for name in view.arguments)
        assert f"| `/api/{view.path}` | {view.method} | {names} |".replace("|  |", "| |") in table, view.path


def test_an_error_of_the_broker_is_its_code_and_sentence(server: PageServer) -> None:
    for path, status, code in (
        ("/api/topic?name=nothing", 404, "unknown_topic"),
        ("/api/topic", 400, "bad_request"),
        ("/api/topics?limit=100000", 400, "bad_request"),
        ("/api/topics?surprise=1", 400, "bad_request"),
        ("/api/transaction?xid=x&epoch=-1", 400, "bad_request"),
        ("/api/delayed?after=nonsense", 400, "bad_request"),
        ("/api/dead-letter?store=nothing&id=x", 404, "unknown_topic"),
    ):
        answer = Answer(server, path)
        assert (answer.status, answer.json["error"]) == (status, code), path
        assert answer.json["message"].endswith(".") and answer.headers["Content-Type"] == "application/json"
