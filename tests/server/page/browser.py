"""A broker with a page, and a real Chromium that shows it.

The browser is Debian's: nothing is downloaded. `Browser.open` shows a view and waits until it is loaded.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import playwright.sync_api as playwright
import pytest

import tfmq
from tests.server.wire import PATIENCE_SECONDS, Wire, running
from tfmq.protocol import commands

LOADED = "#body[aria-busy=false]"
REFRESH_MS = 61_000
WAIT_MS = PATIENCE_SECONDS * 1000
HTTP = ("--set", "http.listen=127.0.0.1:0")

WATCH = """
window.found = [];
window.alert = window.confirm = window.prompt = (text) => window.found.push(`dialog: ${text}`);
window.planted = (text) => window.found.push(`script: ${text}`);
document.addEventListener("securitypolicyviolation", (event) =>
  window.found.push(`policy: ${event.violatedDirective} ${event.blockedURI} ${event.sourceFile}:${event.lineNumber}`));
"""
"""Notes every script that runs although it is data, and everything that the policy of the page has stopped."""


class PageServer:
    """A real server with a page: `url` of the page, `servers` for clients."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.servers = f"{address[0]}:{address[1]}"
        wire = Wire(address)
        self.url: str = wire.ask(commands.Status())[0]["http"]
        wire.close()

    def admin(self) -> tfmq.Admin:
        return tfmq.Admin(self.servers)

    def producer(self) -> tfmq.Producer:
        return tfmq.Producer(self.servers)

    def texts(self, topic: str) -> list[str]:
        """The payloads of a topic, in all its partitions."""
        with tfmq.Consumer(self.servers, topics=topic) as consumer:
            return [each.text for each in consumer.poll(timeout=1.0)]


@contextmanager
def page_server(folder: Path, *options: str) -> Iterator[PageServer]:
    with running(folder / "data", *HTTP, *options) as (process, address):
        yield PageServer(address)
        _, _, log = process.stop()
        assert "Traceback" not in log, log


def chromium() -> str:
    """The path of the browser. Skips the test without one, which fails with CI=true."""
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("there is no chromium: apt-get install chromium")
    return path


class Browser:
    """One window that shows the page of a server. At the end nothing of what it notes may have happened."""

    def __init__(self, chrome: playwright.Browser, url: str, **options: Any) -> None:
        self.context = chrome.new_context(**{"viewport": {"width": 1200, "height": 900}, **options})
        self.context.add_init_script(WATCH)
        self.page = self.context.new_page()
        self.page.clock.install()
        self.page.set_default_timeout(WAIT_MS)
        self.problems: list[str] = []
        self.page.on("console", self._console)
        self.page.on("pageerror", lambda error: self.problems.append(f"error: {error}"))
        self.url = url
        self.page.goto(f"{url}/")
        self.page.wait_for_selector(LOADED)

    def _console(self, message: playwright.ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(f"{message.type}: {message.text}")

    def open(self, view: str) -> playwright.Page:
        """Show a view, like `topic?name=orders`, and wait until its data is there."""
        self.page.evaluate("(place) => { location.hash = place; }", f"#/{view}")
        self.page.wait_for_function(
            "(place) => document.querySelector('#body')?.dataset.place === place", arg=f"#/{view}"
        )
        self.page.wait_for_selector(LOADED)
        return self.page

    def wait_for_refresh(self) -> None:
        """Let the time until the page loads its data again pass at once."""
        self.page.clock.fast_forward(REFRESH_MS)

    @property
    def said(self) -> str:
        """What the page has announced last."""
        return self.page.locator("#status").inner_text()

    def notes(self) -> list[str]:
        """Everything that must not happen and has happened."""
        noted: list[str] = self.page.evaluate("window.found")
        return [*noted, *self.problems]

    def close(self) -> None:
        self.context.close()


@contextmanager
def launched() -> Iterator[playwright.Browser]:
    """The browser. As root it runs without its sandbox, which it refuses there."""
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with playwright.sync_playwright() as driver:
        chrome = driver.chromium.launch(executable_path=chromium(), args=arguments)
        yield chrome
        chrome.close()


def fill(server: PageServer) -> None:
    """A little of everything that the page shows."""
    with server.admin() as admin, server.producer() as producer:
        for name in ("orders", "payments", "emails"):
            admin.create_topic(name, 2)
        for number in range(120):
            order, key = {"order": number, "items": [{"sku": "a"}, {"sku": "b"}]}, f"customer-{number % 7}"
            properties, partition = {"from": "shop"}, number % 2
            producer.send("orders", json.dumps(order), key=key, tag="new", properties=properties, partition=partition)
        for minutes in (1, 5, 20, 45, 70):
            producer.send("emails", f"Reminder {minutes}", key=f"mail-{minutes}", delay=minutes * 60)
        producer.send("payments", bytes(range(256)), key=b"\x00\xff")
        producer.flush()
        admin.schedule("0 3 * * *", "emails", "report", name="nightly", timezone="Europe/Berlin")
    prepare(server, "order-4711")
    with tfmq.Consumer(server.servers, topics="orders", group="billing", commits="manual") as consumer:
        consumer.poll(timeout=5, max_messages=50)
        consumer.commit()
    fail(server, "payments")


def prepare(server: PageServer, xid: str, topic: str = "orders", payload: str = "inside") -> None:
    """A transaction in doubt."""
    with server.producer() as producer:
        transaction = producer.begin(xid=xid)
        transaction.send(topic, payload)
        transaction.prepare()


def fail(server: PageServer, topic: str, reason: str = "no such customer", store: str = "dead") -> None:
    """Make every message of the topic a dead letter of the group `mailer`."""
    with server.admin() as admin:
        left = admin.topic(topic).messages
    with tfmq.Consumer(
        server.servers, topics=topic, group="mailer", dead_letters=f"topic:{store}", retries=0
    ) as consumer:

        def reject(message: tfmq.ReceivedMessage) -> None:
            nonlocal left
            left -= 1
            if not left:
                consumer.stop()
            raise tfmq.Reject(reason)

        consumer.run(reject, signals=False)


VIEWS = (
    "",
    "topics",
    "topic?name=orders",
    "messages?topic=orders&partition=0&at=latest&limit=8",
    "message?topic=orders&partition=0&offset=0",
    "groups",
    "group?name=billing",
    "transactions",
    "transaction?xid=order-4711&epoch=0",
    "delayed",
    "schedules",
    "dead-letters",
    "dead-letters?store=dead",
)
"""One address of each view, for what `fill` makes."""
