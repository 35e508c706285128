"""The page of a large broker: 10,000 topics, and 1,000,000 delayed messages that are pending.

Held here: every list is shown in pages, each within a generous time, and views, however often, do not make the memory
of the server grow. The figures are printed.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.scale import scaled
from tests.server.page.browser import HTTP, LOADED, Browser, PageServer, launched
from tests.server.page.test_http_page import Answer
from tests.server.wire import Process, Wire, running
from tfmq.protocol import commands

TOPICS, DELAYED = scaled(10_000), scaled(1_000_000)
IN_FLIGHT = 200
DAY_SECONDS = 86_400
ROUNDS = 10
GROWTH_BYTES_MAX = 24 << 20
"""Memory may grow by this much over the rounds: caches and the allocator. A page of everything would take hundreds."""
SECONDS_MAX = 30.0
VIEWS = (
    "overview",
    "rates",
    "topics",
    "topics?after=topic-05000&contains=7",
    "topic?name=topic-00003",
    "messages?topic=topic-00003&at=latest",
    "delayed",
    "delayed?topic=later&limit=100",
    "delayed/histogram",
    "delayed/histogram?span=month&topic=later",
)


def create_topics(address: tuple[str, int]) -> None:
    wire = Wire(address)
    for first in range(0, TOPICS, IN_FLIGHT):
        numbers = range(first, min(first + IN_FLIGHT, TOPICS))
        for number in numbers:
            wire.send(commands.CreateTopic(f"topic-{number:05}", 1, {}))
        for _ in numbers:
            assert wire.receive().header[0] == 0
    wire.close()


def send_delayed(server: PageServer) -> None:
    with server.admin() as admin, server.producer() as producer:
        admin.create_topic("later", 4)
        days = 60
        for day in range(days):
            payloads = [b"x" * 20] * (DELAYED // days + (day < DELAYED % days))
            producer.send_many("later", payloads, delay=(day + 1) * DAY_SECONDS)
        producer.flush()


def resident_bytes(process: Process) -> int:
    status = Path(f"/proc/{process.process.pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) << 10


def seconds_of(server: PageServer, view: str) -> tuple[float, Any]:
    begun = time.monotonic()
    answer = Answer(server, f"/api/{view}")
    assert answer.status == 200, answer.body
    return time.monotonic() - begun, answer.json


@pytest.mark.long
def test_the_page_stays_usable_with_many_topics_and_delayed_messages(tmp_path: Path) -> None:
    # Each new topic is a line of the log, which nobody reads: the pipe would be full.
    with running(tmp_path / "data", *HTTP, "--log-level", "warning") as (process, address):
        server = PageServer(address)
        create_topics(address)
        send_delayed(server)
        slowest = {view: seconds_of(server, view)[0] for view in VIEWS}
        before = resident_bytes(process)
        for _ in range(ROUNDS):
            for view in VIEWS:
                seconds, found = seconds_of(server, view)
                slowest[view] = max(slowest[view], seconds)
                assert len(str(found)) < 200_000
        growth = resident_bytes(process) - before
        assert seconds_of(server, "delayed/histogram")[1]["pending"] == DELAYED
        assert len(all_pages(server)) == TOPICS + 1
        shown = in_browser(server)
        print(f"{TOPICS} topics, {DELAYED} delayed: {before / 1e6:.0f} MB, growth {growth / 1e6:.1f} MB")
        print(*(f"{view}: {seconds * 1000:.0f} ms" for view, seconds in slowest.items()), *shown, sep="\n")
        assert growth < GROWTH_BYTES_MAX
        assert max(slowest.values()) < SECONDS_MAX


def all_pages(server: PageServer) -> list[str]:
    """The names of all topics, page by page."""
    names: list[str] = []
    after = ""
    while after is not None:
        page = seconds_of(server, f"topics?limit=100&after={after}")[1]
        names += [each["name"] for each in page["topics"]]
        after = page["after"]
    return names


def in_browser(server: PageServer) -> list[str]:
    """Show the two largest lists, and go to their second pages; how long that took."""
    shown = []
    with launched() as chrome:
        window = Browser(chrome, server.url)
        for view in ("topics", "delayed"):
            begun = time.monotonic()
            page = window.open(view)
            shown.append(f"{view} in the browser: {(time.monotonic() - begun) * 1000:.0f} ms")
            page.get_by_role("link", name="Next page").click()
            page.wait_for_url("**after=*")
            page.wait_for_selector(LOADED)
            assert page.locator("table").last.locator("tbody tr").count() == 50
        assert window.notes() == []
        window.close()
    return shown
