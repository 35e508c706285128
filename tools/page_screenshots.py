"""Takes the screenshots of docs/page.md: python -m tools.page_screenshots. Starts a broker and Debian's Chromium.

The broker has made-up orders, and runs in a temporary folder. Run it again after a change of the page.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any, Final

import playwright.sync_api as playwright
from PIL import Image

import tfmq

DOCS: Final = Path(__file__).resolve().parent.parent / "docs"
CHROMIUM: Final = "/usr/bin/chromium"
COLOURS: Final = 160
"""Colours of a picture: the page has few, and the files stay small."""
RATE_SECONDS: Final = 24
SCREEN: Final = {"width": 960, "height": 640}
TELEPHONE: Final = {"width": 360, "height": 720}


@contextmanager
def broker() -> Iterator[tuple[str, str]]:
    """A broker with a page; yields the address for clients and that of the page."""
    with tempfile.TemporaryDirectory(prefix="tfmq-page-") as folder:
        command = [sys.executable, "-m", "tfmq.server.main", "--data", f"{folder}/data", "--listen", "127.0.0.1:0"]
        with subprocess.Popen(
            [*command, "--set", "http.listen=127.0.0.1:0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as process:
            assert process.stdout is not None
            servers = process.stdout.readline().split()[1]
            try:
                with tfmq.Admin(servers) as admin:
                    yield servers, str(admin.status()["http"])
            finally:
                process.terminate()


def fill(servers: str) -> None:
    """Make topics, messages, a group with lag, transactions in doubt, delayed messages, a schedule and dead letters."""
    with tfmq.Admin(servers) as admin, tfmq.Producer(servers) as producer:
        for topic, partitions in (("orders", 4), ("payments", 2), ("emails", 2), ("invoices", 1)):
            admin.create_topic(topic, partitions)
        for number in range(2_000):
            order = {
                "order": number,
                "total": round(7.5 + number * 3.1 % 90, 2),
                "items": [{"sku": f"A-{number % 40}"}],
            }
            producer.send(
                "orders", json.dumps(order), key=f"customer-{number % 211}", tag="new", properties={"shop": "north"}
            )
        for number in range(6_000):
            minutes = 3 + (number * number) % 900 + 240 * (number % 5)
            producer.send("emails", f"Reminder {number}", key=f"customer-{number % 211}", delay=minutes * 60)
        producer.send("invoices", '{"order": 17, "customer": null}', key="customer-17")
        admin.schedule("0 3 * * *", "emails", "report", name="nightly", timezone="Europe/Berlin")
        for number in (4711, 4712):
            transaction = producer.begin(xid=f"order-{number}")
            transaction.send("orders", json.dumps({"order": number}))
            transaction.send("payments", json.dumps({"order": number}))
            transaction.prepare()
    with tfmq.Consumer(servers, topics="orders", group="billing", commits="manual") as consumer:
        consumer.poll(timeout=5, max_messages=1_400)
        consumer.commit()


def send_for(servers: str, page: playwright.Page, seconds: float) -> None:
    """Send at a changing rate for a while, so that the chart has a line."""
    with tfmq.Producer(servers) as producer:
        end, turn = time.monotonic() + seconds, 0
        while time.monotonic() < end:
            turn += 1
            producer.send_many("payments", [f'{{"payment": {turn}}}'] * (40 + turn * 17 % 60))
            page.wait_for_timeout(250)


def save(page: playwright.Page, name: str, **options: Any) -> None:
    picture = Image.open(BytesIO(page.screenshot(**options))).convert("RGB")
    picture.quantize(COLOURS, dither=Image.Dither.NONE).save(DOCS / f"page-{name}.png", optimize=True)


def take(servers: str, url: str) -> None:
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with playwright.sync_playwright() as driver:
        chrome = driver.chromium.launch(executable_path=CHROMIUM, args=arguments)

        def window(scheme: Any, **options: Any) -> playwright.Page:
            page = chrome.new_context(color_scheme=scheme, **options).new_page()
            page.goto(f"{url}/")
            page.wait_for_selector("#body[aria-busy=false]")
            return page

        def show(page: playwright.Page, view: str) -> None:
            page.evaluate("(place) => { location.hash = place; }", f"#/{view}")
            page.wait_for_timeout(1500)

        page = window("light", viewport=SCREEN)
        send_for(servers, page, RATE_SECONDS)
        save(page, "overview")
        show(page, "transaction?xid=order-4711&epoch=0")
        page.get_by_role("button", name="Roll back…").click()
        page.wait_for_timeout(300)
        save(page, "question")
        page = window("dark", viewport=SCREEN)
        show(page, "delayed")
        save(page, "delayed")
        page = window("light", viewport=TELEPHONE, is_mobile=True, has_touch=True)
        show(page, "group?name=billing")
        save(page, "telephone")
        chrome.close()


def main() -> None:
    with broker() as (servers, url):
        fill(servers)
        take(servers, url)


if __name__ == "__main__":
    main()
