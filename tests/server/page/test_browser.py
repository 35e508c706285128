"""The page in a real Chromium: what people see and change with it, by mouse, keyboard and screen reader.

In every test the browser notes scripts that run although they are data, what the page's policy has stopped, and errors
of the page; none of it may happen.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator

import playwright.sync_api as playwright
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect

import tfmq
from tests.server.page.browser import LOADED, VIEWS, Browser, PageServer, fail, fill, launched, page_server, prepare

NARROW = {"width": 360, "height": 740}
BrowserFor = Callable[..., Browser]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageServer]:
    with page_server(tmp_path_factory.mktemp("page")) as made:
        fill(made)
        yield made


@pytest.fixture(scope="module")
def chrome() -> Iterator[playwright.Browser]:
    with launched() as made:
        yield made


@pytest.fixture
def browser(chrome: playwright.Browser, server: PageServer) -> Iterator[BrowserFor]:
    """Opens windows, and closes them at the end; nothing that must not happen has happened in them."""
    opened: list[Browser] = []

    def new(**options: object) -> Browser:
        opened.append(Browser(chrome, server.url, **options))
        return opened[-1]

    yield new
    for each in opened:
        assert each.notes() == []
        each.close()


# What it shows

SHOWN = {
    "": ["all partitions accept messages", "Prepared transactions\n1", "Delayed messages\n5"],
    "topics": ["emails", "orders", "payments", "120"],
    "topic?name=orders": ["Messages\n120", "● open", "Settings"],
    "messages?topic=orders&partition=0&at=earliest": ['{"order": ', "customer-", "new"],
    "message?topic=orders&partition=0&offset=0": ['"sku": "a"', "from", "shop", "Messages with this key"],
    "groups": ["billing", "70", "mailer"],
    "group?name=billing": ["70", "no live member", "orders-0", "orders-1"],
    "transactions": ["order-4711", "▲ prepared"],
    "transaction?xid=order-4711&epoch=0": ["▲ prepared", "orders", "Commit…", "Roll back…"],
    "delayed": ["Pending\n5", "emails-", "mail-45"],
    "schedules": ["nightly", "0 3 * * *", "Europe/Berlin", "● active"],
    "dead-letters?store=dead": ["mailer", "no such customer", "Redrive 1 dead letter…"],
}


def test_every_view_shows_what_the_broker_has(browser: BrowserFor) -> None:
    window = browser()
    for view, texts in SHOWN.items():
        body = window.open(view).locator("main").inner_text()
        assert [text for text in texts if text not in body] == [], (view, body)


@pytest.mark.parametrize(
    ("form", "text"), [("JSON", '  "order": 0,'), ("Text", '{"order": 0, '), ("Hexadecimal", "000000  7b 22 6f")]
)
def test_a_payload_is_shown_as_json_text_and_hexadecimal_digits(browser: BrowserFor, form: str, text: str) -> None:
    page = browser().open("messages?topic=orders&partition=0&at=earliest&key=customer-0")
    page.locator("tbody a").first.click()
    page.get_by_label(form, exact=True).check()
    expect(page.get_by_role("region", name="Payload")).to_contain_text(text)


def test_messages_are_found_by_their_key(browser: BrowserFor) -> None:
    page = browser().open("messages?topic=orders&at=latest")
    page.get_by_label("Partition").fill("1")
    page.get_by_label("From").select_option("earliest")
    page.get_by_label("Key").fill("customer-3")
    page.get_by_role("button", name="Find messages").click()
    expect(page.get_by_text("9 messages with this key up to the end")).to_be_visible()
    expect(page.locator("tbody tr")).to_have_count(9)


def test_a_name_that_does_not_exist_is_one_sentence(browser: BrowserFor) -> None:
    window = browser()
    body = window.open("topic?name=nothing")
    expect(body.locator("#body .problem")).to_have_text(re.compile("There is no topic nothing"))
    assert "no topic nothing" in window.said
    window.problems.clear()  # the browser reports the status 404


def test_the_rates_are_drawn_and_told(browser: BrowserFor, server: PageServer) -> None:
    page = browser().page
    chart = page.get_by_role("img", name=re.compile("^Messages, a second"))
    expect(chart).to_be_visible()
    line, until = "", time.monotonic() + 20
    with server.producer() as producer:
        while "L" not in line and time.monotonic() < until:
            producer.send_many("rates", ["x"] * 100)
            page.wait_for_timeout(300)
            line = chart.locator("path.line").get_attribute("d") or ""
    assert len({point.split()[1] for point in re.split("[ML]", line)[1:]}) > 1
    assert re.search(r"Highest: [1-9]", chart.get_attribute("aria-label") or "")
    page.get_by_text("Messages as a table").click()
    expect(page.get_by_role("table", name="Messages, a second")).to_be_visible()


def test_a_refresh_keeps_focus_and_what_is_open(browser: BrowserFor, server: PageServer) -> None:
    window = browser()
    page = window.open("topic?name=orders")
    page.get_by_text("Settings", exact=True).click()
    expect(page.get_by_role("table", name="Settings of this topic")).to_contain_text("retention.seconds")
    link = page.get_by_role("link", name="Delayed", exact=True).nth(1)
    link.focus()
    before = page.evaluate("(window.shown = document.querySelector('#body dl'), document.activeElement.textContent)")
    window.wait_for_refresh()
    page.wait_for_function("() => document.querySelector('#body dl') !== window.shown")
    assert page.evaluate("document.activeElement.textContent") == before == "Delayed"
    assert page.locator("details").evaluate("(each) => each.open")


# What it changes


def ask(page: playwright.Page, button: str) -> playwright.Locator:
    page.get_by_role("button", name=button).first.click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_be_visible()
    return dialog


@pytest.mark.parametrize(
    ("button", "question", "sent"),
    [("Commit…", "Commit the transaction", 1), ("Roll back…", "Roll back the transaction", 0)],
)
def test_a_transaction_is_ended_after_a_question_that_names_it(
    browser: BrowserFor, server: PageServer, button: str, question: str, sent: int
) -> None:
    xid, topic = f"end-{sent}", f"ended-{sent}"
    prepare(server, xid, topic)
    window = browser()
    page = window.open(f"transaction?xid={xid}&epoch=0")
    dialog = ask(page, button)
    expect(dialog).to_contain_text(f"{question} {xid}?")
    page.keyboard.press("Escape")
    expect(dialog).not_to_be_visible()
    with server.admin() as admin:
        assert admin.transaction(xid).state == "prepared"
    ask(page, button).locator("button.change").click()
    expect(page.locator("#status")).to_contain_text(xid)
    assert len(server.texts(topic)) == sent


def test_a_delayed_message_is_cancelled_and_another_rescheduled(browser: BrowserFor, server: PageServer) -> None:
    with server.producer() as producer:
        first = producer.send("wait", "first", delay=3600).result().delayed
        second = producer.send("wait", "second", delay=7200).result().delayed
    page = browser().open("delayed?topic=wait")
    dialog = ask(page, f"Cancel the message {first}")
    expect(dialog).to_contain_text(first)
    dialog.get_by_role("button", name="Cancel the message").click()
    expect(page.locator("#status")).to_contain_text("cancelled")
    dialog = ask(page, f"Reschedule the message {second}")
    dialog.get_by_label("New time").fill("2020-01-01T00:00:00")
    dialog.get_by_role("button", name="Reschedule the message").click()
    expect(page.locator("#status")).to_contain_text("rescheduled")
    assert server.texts("wait") == ["second"]


def test_a_group_is_reset(browser: BrowserFor, server: PageServer) -> None:
    with server.producer() as producer:
        for text in "abc":
            producer.send("read", text)
    with tfmq.Consumer(server.servers, topics="read", group="reader") as consumer:
        assert len(consumer.poll(timeout=5)) == 3
        consumer.commit()
    page = browser().open("group?name=reader")
    dialog = ask(page, "Reset…")
    expect(dialog).to_contain_text("Reset the group reader?")
    dialog.get_by_role("button", name="Reset the group").click()
    expect(page.locator("#status")).to_contain_text("reader was reset")
    with server.admin() as admin:
        assert admin.group("reader").lag == 3


def test_dead_letters_are_redriven(browser: BrowserFor, server: PageServer) -> None:
    with server.producer() as producer:
        for text in ("one", "two"):
            producer.send("mails", text)
    fail(server, "mails", store="mails-dead")
    page = browser().open("dead-letters?store=mails-dead")
    dialog = ask(page, "Redrive 2 dead letters…")
    expect(dialog).to_contain_text("2 messages to mails")
    dialog.get_by_role("button", name="Redrive").click()
    expect(page.locator("#status")).to_contain_text("2 messages sent")
    assert sorted(server.texts("mails")) == ["one", "one", "two", "two"]


def test_a_change_that_the_broker_refuses_stays_in_the_dialog(browser: BrowserFor, server: PageServer) -> None:
    prepare(server, "gone")
    window = browser()
    page = window.open("transaction?xid=gone&epoch=0")
    with server.admin() as admin:
        admin.rollback_transaction("gone")
    dialog = ask(page, "Commit…")
    dialog.locator("button.change").click()
    expect(dialog.get_by_role("alert")).to_contain_text("An operator ended")
    window.problems.clear()  # the browser reports the status


# Data that looks like markup or script

HOSTILE = (
    "<script>planted('tag')</script>",
    "<img src=x onerror=planted('image')>",
    "<svg onload=planted('svg')>",
    '"><iframe srcdoc="<script>parent.planted(\'frame\')</script>">',
    "'-planted('quote')-'",
    "javascript:planted('address')",
    "</title></textarea></style><script>planted('closing')</script>",
    "<a href=javascript:planted('link') autofocus onfocus=planted('focus')>x</a>",
    "<math><mtext><style><img src=x onerror=planted('mutation')>",
    "{{constructor.constructor('planted(1)')()}}${planted('template')}",
    "<body onpageshow=planted('body')><base href=//evil.example/><meta http-equiv=refresh content=0>",
    "\u202e\u0000\u2028\ufeff<script>planted('control')</script>",
)


def test_no_text_of_the_broker_runs_as_script(browser: BrowserFor, server: PageServer) -> None:
    """Payloads, keys, tags, properties, names of transactions, clients and schedules, errors, and parameters."""
    with server.producer() as producer, server.admin() as admin:
        for number, text in enumerate(HOSTILE):
            producer.send("hostile", text, key=text, tag=text[:60], properties={text: text}, partition=0)
            producer.send("hostile", "later", key=text, tag=text[:60], delay=3600 + number, partition=0)
            if text.isprintable():
                prepare(server, text, "hostile", text)
        producer.flush()
        admin.schedule("0 3 * * *", "hostile", HOSTILE[0], name="hostile", key=HOSTILE[1])
        offsets = [each.offset for each in hostile_messages(server)]
    fail(server, "hostile", " ".join(HOSTILE), "hostile-dead")
    window = browser()
    marks = 0
    for number, text in enumerate(HOSTILE):
        name = "".join(f"%{byte:02x}" for byte in text.encode())
        views = [f"message?topic=hostile&partition=0&offset={offsets[number]}"]
        if text.isprintable() and not number % 3:
            views.append(f"transaction?xid={name}&epoch=0")
        for view in views:
            marks += planted_elements(window.open(view))
        if not number % 4:
            page = window.open(f"messages?topic={name}&partition={name}&at={name}&key={name}")
            marks += planted_elements(page)
            expect(page.locator("#body .problem")).to_be_visible()
    for view in (
        "messages?topic=hostile&partition=0&at=earliest",
        "transactions",
        "delayed?topic=hostile",
        "schedules",
        "dead-letters?store=hostile-dead",
        "groups?contains=%3Cb%3E",
        "topics?contains=%3Cb%3E&after=%3Cb%3E",
    ):
        marks += planted_elements(window.open(view))
    page = window.open("dead-letters?store=hostile-dead")
    page.locator("tbody a").last.click()
    page.wait_for_selector("details pre")
    marks += planted_elements(page)
    assert marks == 0
    text = window.open(f"message?topic=hostile&partition=0&offset={offsets[-1]}").locator("main").inner_text()
    assert "\\u202e" in text and "<script>planted('control')</script>" in text and "\u202e" not in text
    window.problems = [each for each in window.problems if "Failed to load resource" not in each]


def hostile_messages(server: PageServer) -> list[tfmq.ReceivedMessage]:
    with tfmq.Consumer(server.servers, topics="hostile") as consumer:
        return consumer.poll(timeout=5)


def planted_elements(page: playwright.Page) -> int:
    """How many elements there are in the view that only markup in data can have made."""
    return int(
        page.locator(
            "main :is(script, img, iframe, style, base, meta, math, body, svg:not(.chart, .key), [href^=javascript])"
        ).count()
    )


def test_the_policy_stops_script_even_if_it_gets_into_the_page(browser: BrowserFor) -> None:
    window = browser()
    page = window.page
    refused = page.evaluate(
        """() => {
          const tried = [];
          for (const attempt of [
            () => { document.body.innerHTML = "<img src=x onerror=planted('sink')>"; },
            () => document.body.insertAdjacentHTML("beforeend", "<b>x</b>"),
            () => { document.createElement("script").text = "planted('script')"; },
          ]) {
            try { attempt(); tried.push("done"); } catch (error) { tried.push(error.name); }
          }
          return tried;
        }"""
    )
    assert refused == ["TypeError"] * 3
    assert not [each for each in window.notes() if each.startswith("script")]
    page.evaluate("window.found = []")
    window.problems.clear()


# For everybody


COLOURFUL = ("", "transaction?xid=order-4711&epoch=0", "delayed")


@pytest.mark.parametrize(
    ("scheme", "views", "rules"),
    [("light", VIEWS, {}), ("dark", COLOURFUL, {"runOnly": ["color-contrast"]})],
    ids=["light", "dark"],
)
def test_no_view_breaks_a_rule_of_accessibility(
    browser: BrowserFor, scheme: str, views: tuple[str, ...], rules: dict[str, list[str]]
) -> None:
    """Axe checks names, roles, contrast, landmarks, tables and more, also in an open dialog; in the dark, contrast."""
    window = browser(color_scheme=scheme)
    broken = []
    for view in views:
        window.open(view)
        broken += [f"{view}: {each}" for each in violations(window.page, rules)]
    page = window.open("group?name=billing")
    ask(page, "Reset…")
    broken += [f"dialog: {each}" for each in violations(page, rules)]
    assert broken == []


def violations(page: playwright.Page, rules: dict[str, list[str]]) -> list[str]:
    found = Axe().run(page, options={"resultTypes": ["violations"], **rules}).response["violations"]
    return [f"{rule['id']} {[node['target'] for node in rule['nodes']][:3]}" for rule in found]


def test_a_telephone_shows_every_view_without_scrolling_sideways(browser: BrowserFor, server: PageServer) -> None:
    with server.admin() as admin, server.producer() as producer:
        admin.create_topic("a-very-long-name-" + "x" * 200, 1)
        producer.send("orders", "y" * 500, key="k" * 300)
    window = browser(viewport=NARROW, has_touch=True, is_mobile=True, device_scale_factor=2)
    for view in VIEWS:
        page = window.open(view)
        assert page.evaluate("document.documentElement.scrollWidth") <= NARROW["width"], view


def test_everything_can_be_done_with_the_keyboard(browser: BrowserFor, server: PageServer) -> None:
    prepare(server, "by-hand", "by-hand")
    window = browser()
    page = window.open("transactions")
    page.reload()
    page.wait_for_selector(LOADED)
    page.keyboard.press("Tab")
    assert focused(page) == "Skip to the content"
    expect(page.get_by_text("Skip to the content")).to_be_in_viewport()
    page.keyboard.press("Enter")
    seen = walk(page, "by-hand")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    assert not {"Topics", "Groups"} & set(seen)
    page.keyboard.press("Enter")
    page.wait_for_selector("h1:focus")
    walk(page, "Roll back…")
    page.keyboard.press("Enter")
    assert focused(page) == "Do nothing"
    assert "Roll back the transaction" in walk(page, "Roll back the transaction")
    page.keyboard.press("Enter")
    expect(page.locator("#status")).to_contain_text("by-hand")
    assert server.texts("by-hand") == []


def focused(page: playwright.Page) -> str:
    return str(page.evaluate("document.activeElement.innerText ?? ''")).strip()


def walk(page: playwright.Page, target: str) -> list[str]:
    """Press Tab until the element with the text `target` has the focus; the texts on the way."""
    seen = []
    for _ in range(60):
        page.keyboard.press("Tab")
        seen.append(focused(page))
        if seen[-1] == target:
            return seen
    raise AssertionError(f"{target} is not reached: {seen}")


def test_a_view_has_landmarks_and_announces_what_changes(browser: BrowserFor) -> None:
    page = browser().open("topics")
    for role in ("banner", "navigation", "main", "contentinfo"):
        expect(page.get_by_role(role).first).to_be_visible()  # type: ignore[arg-type]
    expect(page.get_by_role("status")).to_have_attribute("aria-live", "polite")
    expect(page.get_by_role("link", name="Topics", exact=True)).to_have_attribute("aria-current", "page")
    assert page.title() == "Topics · tfmq"
    page.get_by_role("link", name="orders", exact=True).click()
    expect(page.locator("h1")).to_be_focused()
    expect(page.locator("h1")).to_have_text("Topic orders")


def test_the_page_says_when_the_server_is_gone_and_when_it_is_back(browser: BrowserFor) -> None:
    window = browser()
    page = window.open("topics")
    page.route("**/api/**", lambda route: route.abort())
    window.wait_for_refresh()
    expect(page.locator("#status")).to_contain_text("The server does not answer")
    expect(page.locator("tbody tr").first).to_be_visible()
    page.unroute("**/api/**")
    window.wait_for_refresh()
    expect(page.locator("#status")).to_contain_text("The server answers again")
    window.problems.clear()  # the browser reports the requests that failed
