"""The JSON API: what it shows and changes, and the limits on what one call may cost."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

import tfmq
from tests.dead_letters.test_redrive import fill
from tests.server.page.helpers import ApiOnBroker
from tfmq.errors import BadRequest, NotAllowed, NotARecord, OffsetOutOfRange, UnknownTopic
from tfmq.server.local_connection import LocalSession
from tfmq.server.page import dead_letters, messages
from tfmq.server.page.api import CALLS_MAX, VIEWS
from tfmq.server.page.arguments import EXACT_NUMBER_MAX, PAGE_ROWS_MAX, to_json


def payload_of(row: dict[str, Any]) -> bytes:
    return base64.b64decode(row["payload"]["base64"])


def send(api: ApiOnBroker, topic: str, count: int, **more: Any) -> None:
    with api.broker.producer() as producer:
        for number in range(count):
            producer.send(topic, f"message {number}", **more)


def offsets_of(found: dict[str, Any]) -> list[int]:
    return [each["offset"] for each in found["messages"]]


# Topics


def test_topics_come_in_pages_that_follow_each_other(api: ApiOnBroker) -> None:
    with api.broker.admin() as admin:
        for number in range(7):
            admin.create_topic(f"topic-{number}", 1)
    pages, after = [], ""
    while after is not None:
        page = api.get("topics", after=after, limit=3, contains="TOPIC")
        pages.append([each["name"] for each in page["topics"]])
        after = page["after"]
    assert pages == [["topic-0", "topic-1", "topic-2"], ["topic-3", "topic-4", "topic-5"], ["topic-6"]]


def test_a_topic_shows_its_partitions_with_sizes_and_findings(api: ApiOnBroker) -> None:
    send(api, "orders", 5, partition=1)
    row = api.get("topics")["topics"][0]
    assert (row["name"], row["partitions"], row["messages"], row["stopped"]) == ("orders", 2, 5, 0)
    found = api.get("topic", name="orders", first=1)
    assert [(each["partition"], each["state"], each["messages"]) for each in found["partitions"]] == [(1, "open", 5)]
    assert found["settings"]["retention.seconds"]
    with pytest.raises(UnknownTopic):
        api.get("topic", name="nothing")


# Messages


def test_messages_are_read_from_every_kind_of_position(api: ApiOnBroker) -> None:
    send(api, "orders", 10, partition=0)
    api.broker.clock.advance(hours=1)
    later = api.broker.clock.wall_ms()
    send(api, "orders", 10, partition=0)
    whole = api.get("messages", topic="orders")
    assert len(whole["messages"]) == 20 and whole["at_end"] and payload_of(whole["messages"][3]) == b"message 3"
    places = {
        "offset:0": 0, f"offset:{offsets_of(whole)[7]}": 7, "ordinal:12": 12, "latest": 17, "earliest": 0,
        f"time:{later}": 10,
    }  # fmt: skip
    for place, first in places.items():
        found = api.get("messages", topic="orders", at=place, limit=3)
        assert offsets_of(found) == offsets_of(whole)[first : first + 3], place
    first_page = api.get("messages", topic="orders", limit=6)
    following = api.get("messages", topic="orders", limit=6, at=f"offset:{first_page['to']}")
    assert offsets_of(first_page) + offsets_of(following) == offsets_of(whole)[:12] and not first_page["at_end"]


def test_a_search_by_key_says_how_far_it_looked(api: ApiOnBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "FETCH_BYTES", 1)
    with api.broker.producer() as producer:
        for number in range(40):
            producer.send("orders", b"x" * 1000, key="wanted" if number in (3, 31) else f"k{number}", partition=0)
            producer.flush()
    found = api.get("messages", topic="orders", key="wanted")
    assert [each["ordinal"] for each in found["messages"]] == [3, 31] and found["at_end"]
    monkeypatch.setattr(messages, "SCAN_BYTES", 12_000)
    part = api.get("messages", topic="orders", key="wanted")
    assert [each["ordinal"] for each in part["messages"]] == [3]
    assert not part["at_end"] and 12_000 <= part["bytes_read"] < 20_000
    place, seen = part["to"], [3]
    while not part["at_end"]:
        part = api.get("messages", topic="orders", key="wanted", at=f"offset:{place}")
        assert part["to"] > place or part["at_end"]
        place = part["to"]
        seen += [each["ordinal"] for each in part["messages"]]
    assert seen == [3, 31]
    assert api.get("messages", topic="orders", key="wante")["messages"] == []


def test_a_search_ends_when_its_time_is_over(api: ApiOnBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    send(api, "orders", 30, partition=0, key="k")
    monkeypatch.setattr(messages, "SCAN_SECONDS", 0.0)
    found = api.get("messages", topic="orders", key="wanted")
    assert (found["bytes_read"], found["at_end"], found["from"]) == (0, False, found["to"])


def test_large_payloads_keys_and_properties_are_cut_off(api: ApiOnBroker) -> None:
    with api.broker.producer() as producer:
        producer.send(
            "orders",
            b"\0" * 300_000,
            key=b"k" * 10_000,
            properties={f"p{n}": "v" * 9000 for n in range(20)},
            partition=0,
        )
    (row,) = api.get("messages", topic="orders")["messages"]
    assert row["payload"]["size"] == 300_000 and len(payload_of(row)) == messages.PREVIEW_BYTES
    assert row["property_count"] == 20 and len(row["properties"]) == messages.PROPERTIES_IN_LIST
    assert row["key"]["size"] == 10_000 and len(json.dumps(row)) < 60_000
    whole = api.get("message", topic="orders", offset=row["offset"])["message"]
    assert len(payload_of(whole)) == messages.PAYLOAD_BYTES and len(whole["properties"]) == 20
    with pytest.raises(NotARecord):
        api.get("message", topic="orders", offset=row["offset"] + 1)
    with pytest.raises(OffsetOutOfRange):
        api.get("message", topic="orders", offset=10**9)


def test_a_page_of_large_messages_ends_at_its_limit_of_bytes(api: ApiOnBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "PAGE_BYTES", 200_000)
    with api.broker.producer() as producer:
        for _ in range(10):
            producer.send("orders", b"x" * 90_000, partition=0)
            producer.flush()
    found = api.get("messages", topic="orders")
    assert 2 <= len(found["messages"]) <= 6 and not found["at_end"]


# Groups


def test_a_group_shows_its_lag_and_is_reset(api: ApiOnBroker) -> None:
    send(api, "orders", 8, partition=0)
    with api.broker.consumer("orders", group="billing", commits="manual") as consumer:
        consumer.poll(timeout=1, max_messages=3)
        consumer.commit()
    (row,) = api.get("groups")["groups"]
    assert (row["group"], row["lag"], row["topics"]) == ("billing", 5, ["orders"])
    found = api.get("group", name="billing")
    assert (found["offsets"][0]["partition"], found["offsets"][0]["lag"]) == (0, 5)
    done = api.post("group/reset", group="billing", topic="orders", partition=0, to="earliest")
    assert done["offsets"] == [[0, 0]]
    assert api.get("groups")["groups"][0]["lag"] == 8
    with pytest.raises(NotAllowed, match="no group"):
        api.post("group/reset", group="biling", topic="orders", partition=0, to="earliest")


# Transactions


def prepared(api: ApiOnBroker, xid: str) -> int:
    with api.broker.producer() as producer:
        transaction = producer.begin(xid=xid)
        transaction.send("orders", "inside", partition=0)
        transaction.prepare()
    with api.broker.admin() as admin:
        return admin.transaction(xid).epoch


@pytest.mark.parametrize(
    ("end", "state", "count"), [("commit", "committed", 1), ("rollback", "heuristic_rolled_back", 0)]
)
def test_a_transaction_in_doubt_is_listed_and_ended(api: ApiOnBroker, end: str, state: str, count: int) -> None:
    epoch = prepared(api, "<b>order</b>")
    (row,) = api.get("transactions")["transactions"]
    assert (row["xid"], row["epoch"], row["state"], row["messages"]) == ("<b>order</b>", epoch, "prepared", 1)
    assert api.get("transaction", xid=row["xid"], epoch=epoch)["transaction"]["topics"] == ["orders"]
    assert api.post("transaction/end", xid=row["xid"], epoch=epoch, end=end)["state"] == state
    assert len(api.broker.sent("orders")) == count


def test_an_end_that_is_neither_commit_nor_rollback_changes_nothing(api: ApiOnBroker) -> None:
    epoch = prepared(api, "x")
    with pytest.raises(BadRequest):
        api.post("transaction/end", xid="x", epoch=epoch, end="both")
    with pytest.raises(BadRequest):
        api.post("transaction/end", xid="x", end="commit")
    assert api.get("transactions")["transactions"][0]["state"] == "prepared"


# Delayed messages


def test_delayed_messages_are_counted_listed_cancelled_and_rescheduled(api: ApiOnBroker) -> None:
    with api.broker.producer() as producer:
        for minutes in (5, 10, 90, 60 * 24 * 3):
            producer.send("later", f"{minutes}", key="k", delay=minutes * 60)
    found = api.get("delayed/histogram", span="hour")
    assert (sum(found["counts"]), found["later"], found["pending"], len(found["counts"])) == (2, 2, 4, 60)
    assert api.get("delayed/histogram")["span"] == "week"
    first = api.get("delayed", limit=3)
    rest = api.get("delayed", limit=3, after=first["after"])
    assert [len(first["delayed"]), len(rest["delayed"]), rest["after"]] == [3, 1, None]
    handle = first["delayed"][0]["handle"]
    assert api.post("delayed/cancel", handle=handle)["state"] == "cancelled"
    moved = api.post("delayed/reschedule", handle=rest["delayed"][0]["handle"], due_ms=first["now_ms"] + 1000)
    assert moved["state"] == "rescheduled"
    api.broker.clock.advance(seconds=5)
    assert [each.text for each in api.broker.sent("later")] == [str(60 * 24 * 3)]


# Schedules


def test_schedules_are_listed(api: ApiOnBroker) -> None:
    with api.broker.admin() as admin:
        admin.create_topic("ticks")
        admin.schedule("0 3 * * *", "ticks", "tick", name="nightly")
    (row,) = api.get("schedules")["schedules"]
    assert (row["name"], row["cron"], row["topic"], row["state"]) == ("nightly", "0 3 * * *", "ticks", "active")


# Dead letters


def test_dead_letters_are_listed_shown_and_redriven(api: ApiOnBroker) -> None:
    fill(api.broker, "dead", 3)
    page = api.get("dead-letters", store="dead", limit=2)
    assert page["counts"] == [["billing", "dead", 3]]
    rest = api.get("dead-letters", store="dead", after_ms=page["after"][0], after_id=page["after"][1])
    assert [len(page["letters"]), len(rest["letters"]), rest["after"]] == [2, 1, None]
    letter = api.get("dead-letter", store="dead", id=page["letters"][0]["id"])["letter"]
    assert payload_of(letter).startswith(b"orders ") and letter["failure_rows"][0]["error"]
    before = len(api.broker.sent("orders"))
    dry = api.post("dead-letters/redrive", store="dead", group="billing", dry=True)
    assert (dry["targets"], dry["sent"], len(api.broker.sent("orders"))) == ([["orders", 3]], 0, before)
    one = api.post("dead-letters/redrive", store="dead", ids=[letter["id"]])
    assert (one["sent"], len(api.broker.sent("orders"))) == (1, before + 1)
    assert api.post("dead-letters/redrive", store="dead", group="billing")["sent"] == 2
    assert api.post("dead-letters/redrive", store="dead", group="billing")["sent"] == 0
    assert api.get("dead-letters", store="dead")["counts"] == [["billing", "redriven", 3]]


def test_a_store_that_is_too_large_for_the_page_is_refused(api: ApiOnBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(api.broker, "dead", 2)
    monkeypatch.setattr(dead_letters, "STORE_BYTES_MAX", 100)
    with pytest.raises(NotAllowed, match="tfmq dlq list --store topic:dead"):
        api.get("dead-letters", store="dead")
    with pytest.raises(UnknownTopic):
        api.get("dead-letters", store="nothing")


def test_dead_letters_that_consumers_report_are_counted_by_group(api: ApiOnBroker) -> None:
    send(api, "orders", 3, partition=0)
    with api.broker.consumer("orders", group="billing", dead_letters="topic:dead", retries=0) as consumer:
        left = 3

        def reject(message: tfmq.ReceivedMessage) -> None:
            nonlocal left
            left -= 1
            if not left:
                consumer.stop()
            raise tfmq.Reject("no")

        consumer.run(reject, signals=False)
    assert api.get("dead-letters/groups") == {"groups": [{"group": "billing", "count": 3}], "count": 3}


# Rates


def test_counters_grow_with_what_is_appended_and_are_not_read_too_often(api: ApiOnBroker) -> None:
    send(api, "orders", 5)
    first = api.get("rates")["counters"]
    send(api, "orders", 5)
    api.bytes_counted = (10, 20)
    assert api.get("rates")["counters"] == first
    api.broker.clock.advance(seconds=1)
    then = api.get("rates")["counters"]
    assert then["messages_appended"] - first["messages_appended"] == 5
    assert (then["bytes_received"], then["bytes_sent"], then["clock_ms"] > first["clock_ms"]) == (10, 20, True)
    with api.broker.admin() as admin:
        admin.purge("orders")
    api.broker.clock.advance(seconds=1)
    assert api.get("rates")["counters"]["messages_appended"] == then["messages_appended"]


# The limits of a call


@pytest.mark.parametrize("view", [each for each in VIEWS if "limit" in each.arguments], ids=lambda each: each.path)
def test_no_page_is_larger_than_its_limit(api: ApiOnBroker, view: Any) -> None:
    most = {"groups": 25, "dead-letters/redrive": 500}.get(view.path, PAGE_ROWS_MAX)
    given = {"name": "orders", "topic": "orders", "store": "orders"}
    names = {key: given[key] for key in given if key in view.arguments}
    send(api, "orders", 1)
    for limit in (most + 1, 10**9, 0, -1, "x", 1.5, True):
        with pytest.raises(BadRequest, match="limit"):
            api.call(view.path, view.method, {**names, "limit": limit})


@pytest.mark.parametrize("view", VIEWS, ids=lambda each: each.path)
def test_an_argument_that_a_view_does_not_have_is_refused(api: ApiOnBroker, view: Any) -> None:
    with pytest.raises(BadRequest, match="no argument"):
        api.call(view.path, view.method, {"surprise": "1"})
    assert api.api.calls_in_progress == 0


def test_only_so_many_calls_are_in_progress(api: ApiOnBroker) -> None:
    overview = next(each for each in VIEWS if each.path == "topic")
    send(api, "orders", 1)
    runs = [
        api.api.call(overview, {"name": "orders"}, LocalSession("a test"), lambda *_: None) for _ in range(CALLS_MAX)
    ]
    with pytest.raises(tfmq.Busy):
        api.get("topic", name="orders")
    for each in runs:
        each.cancel()
    assert api.get("topic", name="orders")["name"] == "orders"


def test_numbers_that_a_browser_would_round_are_text() -> None:
    assert json.loads(to_json({"a": EXACT_NUMBER_MAX, "b": [EXACT_NUMBER_MAX + 1], "c": b"x"})) == {
        "a": EXACT_NUMBER_MAX, "b": [str(EXACT_NUMBER_MAX + 1)], "c": {"base64": "eA==", "size": 1},
    }  # fmt: skip


def test_changes_are_logged_with_the_user(api: ApiOnBroker, caplog: pytest.LogCaptureFixture) -> None:
    epoch = prepared(api, "x")
    with caplog.at_level("INFO", "tfmq.audit"):
        api.post("transaction/end", xid="x", epoch=epoch, end="rollback")
    assert "roll back transaction 'x'" in caplog.text and "asked by a test" in caplog.text
