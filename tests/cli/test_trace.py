"""`tfmq trace`: the timeline and the JSON object of one message, its dead letters, and refusals."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Cli, Ran
from tests.dead_letters.helpers import failure
from tfmq.dead_letters import model
from tfmq.dead_letters.sql_store import BlockingSqlStore
from tfmq.dead_letters.store import FILE_SUFFIX, StoreAddress
from tfmq.testing.broker import SimulatedBroker


@pytest.fixture
def broker(offline: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedBroker]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with SimulatedBroker({"topics.partitions": 1}) as broker:
        monkeypatch.setenv("TFMQ_SERVERS", broker.servers)
        yield broker


@pytest.fixture
def trace(offline: Cli, broker: SimulatedBroker) -> Any:
    def call(*arguments: str) -> Ran:
        return offline("trace", *arguments)

    return call


def events(ran: Ran) -> dict[str, str]:
    """The details of each event, by its name. Fails for an event that is printed twice."""
    rows = [re.split(r"  +", line.strip()) for line in ran.lines[1:]]
    found: dict[str, str] = {}
    for row in rows:
        if re.match(r"\d{4}-", row[0]):
            row = [row[1], f"{row[0]} {' '.join(row[2:])}"]
        name, text = row[0], " ".join(row[1:])
        if name != "not known":
            assert name not in found, name
            found[name] = text
    return found


def keep_letter(store: str, broker: SimulatedBroker, offset: int, group: str = "billing") -> str:
    (message,) = (each for each in broker.sent("orders") if each.offset == offset)
    letter = replace(model.letter_from_message(message, group), calls=6, failures=(failure(0, "no\x1b such order"),))
    os.makedirs(os.path.dirname(store), exist_ok=True)
    made = BlockingSqlStore(StoreAddress("path", store))
    made.apply([(letter.id, model.KeepEvent(1_700_000_000_000, letter))])
    made.close()
    return letter.id


def test_the_timeline_names_each_event_of_a_message(broker: SimulatedBroker, trace: Any) -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    broker.producer().send("orders", "hello", key="42", tag="paid", properties={"traceparent": parent}).result(5)
    broker.producer().send("orders", "more").result(5)
    consumer = broker.consumer("orders", group="billing")
    assert consumer.poll(timeout=0, max_messages=1)
    consumer.commit()
    ran = trace("orders/0/0")
    found = events(ran)
    assert ran.code == 0 and ran.lines[0] == "orders-0, offset 0, ordinal 0, 5 B"
    assert list(found) == ["born", "appended", "synced", "group billing", "dead letter"]
    assert re.search(r"producer \d+, sequence 0, id [0-9a-f]{16}, key 42, tag paid, trace " + parent, found["born"])
    assert found["appended"].endswith("0 ms after it was born")
    assert "has passed it" in found["group billing"] and found["dead letter"].startswith("none in ")
    second = trace(f"orders/0/{broker.sent('orders')[1].offset}")
    assert "has not passed it, 1 message behind" in events(second)["group billing"]
    assert "not known" in second.out.decode() and "name of the client" in second.out.decode()


def test_a_transaction_and_a_delay_are_events_of_their_own(broker: SimulatedBroker, trace: Any) -> None:
    producer = broker.producer()
    transaction = producer.begin("order-17")
    transaction.send("orders", "x")
    transaction.commit()
    handle = producer.send("orders", "later", delay=10).result(5).delayed
    found = events(trace("orders/0/0"))
    assert re.search(r"order-17, epoch \d+, committed", found["transaction"])
    assert "by the commit of its transaction" in found["appended"]
    pending = trace(handle)
    assert pending.lines[0] == "delayed message of orders-0: pending" and handle in events(pending)["due"]
    broker.clock.advance(20)
    delivered = trace(handle)
    found = events(delivered)
    assert delivered.code == 0 and handle in found["due"] and re.search(r"late|on time", found["delivered"])
    assert found["groups"] == "no group reads the topic"


def test_dead_letters_of_the_message_are_found_in_the_default_stores_and_in_a_named_one(
    broker: SimulatedBroker, trace: Any, tmp_path: Path
) -> None:
    for _ in range(2):
        broker.producer().send("orders", "x").result(5)
    second = broker.sent("orders")[1].offset
    id = keep_letter(str(tmp_path / "state" / "tfmq" / f"billing{FILE_SUFFIX}"), broker, 0)
    other = keep_letter(str(tmp_path / "other.db"), broker, second, "audit")
    ran = trace("orders/0/0")
    text = events(ran)[f"dead letter {id}"]
    assert "dead in group billing: 6 calls, the last failed with" in text and "no\\x1b such order" in text
    assert "\x1b" not in ran.out.decode()
    (row,) = trace("orders/0/0", "--json").json["dead_letters"]
    assert (row["id"], row["state"], row["calls"]) == (id, "dead", 6)
    assert trace(f"orders/0/{second}", "--json").json["dead_letters"] == []
    (row,) = trace(f"orders/0/{second}", "--store", str(tmp_path / "other.db"), "--json").json["dead_letters"]
    assert row["id"] == other
    missing = trace("orders/0/0", "--store", str(tmp_path / "none.db"))
    assert missing.code == 1 and "There are no dead letters at" in missing.err


def test_a_removed_message_still_has_its_dead_letter_and_the_exit_code_is_1(
    broker: SimulatedBroker, trace: Any, tmp_path: Path
) -> None:
    broker.producer().send("orders", "x").result(5)
    id = keep_letter(str(tmp_path / "dead.db"), broker, 0)
    broker.admin().purge("orders")
    ran = trace("orders/0/0", "--store", str(tmp_path / "dead.db"))
    assert ran.code == 1 and ran.lines[0] == "orders-0, offset 0: removed"
    assert f"dead letter {id}" in ran.out.decode() and "retention or a purge" in ran.out.decode()


def test_json_has_every_fact_and_null_for_what_is_unknown(broker: SimulatedBroker, trace: Any) -> None:
    sent = broker.producer().send("orders", "hello", key=b"\xff").result(5)
    row = trace("orders/0/0", "--json").json
    assert (row["topic"], row["partition"], row["offset"], row["ordinal"]) == ("orders", 0, 0, 0)
    assert (row["message_id"], row["sequence"], row["key"]) == (f"{sent.message_id:016x}", 0, "/w==")
    assert row["born_at"] == row["appended_at"] and row["born_at"].endswith("+00:00")
    assert (row["durable"], row["transaction"], row["delay"], row["groups"]) == (True, None, None, [])
    handle = broker.producer().send("orders", "later", delay=10).result(5).delayed
    row = trace(handle, "--json").json
    assert (row["state"], row["offset"], row["appended_at"], row["durable_offset"]) == ("pending", None, None, None)
    assert (row["delay"]["handle"], row["delay"]["late_ms"]) == (handle, None)


def test_the_newest_message_with_a_key_is_traced_or_it_says_how_far_it_looked(
    broker: SimulatedBroker, trace: Any
) -> None:
    for key in ("a", "b", "a"):
        broker.producer().send("orders", "x", key=key).result(5)
    assert trace("orders", "--key", "a").lines[0].startswith("orders-0, offset")
    assert "ordinal 2" in trace("orders", "--key", "a").lines[0]
    none = trace("orders", "--key", "\x1b")
    assert (none.code, none.err) == (1, "no message of orders has the key '\\\\x1b': all 3 messages searched\n")
    few = trace("orders", "--key", "b", "--last", "1")
    assert few.code == 1 and "the newest 1 message searched; --last searches more" in few.err
    row = trace("orders", "--key", "z", "--json").json
    assert (row["offset"], row["searched"], row["complete"]) == (None, 3, True)


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["order/0/0"], 1, "There is no topic 'order'. Did you mean 'orders'?"),
        (["order", "--key", "1"], 1, "Did you mean 'orders'?"),
        (["orders/7/0"], 1, "orders has 1 partition, numbered from 0; there is no 7"),
        (["orders", "--key", "1", "--partition", "7"], 1, "there is no 7"),
        (["orders/0/999999"], 1, "Partition 0 of orders ends at offset"),
        (["orders/0/1"], 1, "No message of orders-0 starts at offset 1; the one before it starts at 0"),
        (["orders"], 2, "'orders' alone names no message"),
        (["orders/0"], 2, "write TOPIC/PARTITION/OFFSET"),
        (["orders/0/-1"], 2, "write TOPIC/PARTITION/OFFSET"),
        (["orders/0/9223372036854775808"], 2, "number that is too large"),
        (["or*/0/1"], 2, "cannot be a topic"),
        (["orders/0/0", "--key", "1"], 2, "either TOPIC/PARTITION/OFFSET, or TOPIC and --key"),
        (["orders/0/0", "--partition", "0"], 2, "--partition needs --key"),
        (["d" * 59], 2, "This is no handle"),
    ],
)
def test_what_names_no_message_is_refused_in_a_sentence(
    broker: SimulatedBroker, trace: Any, arguments: list[str], code: int, sentence: str
) -> None:
    broker.producer().send("orders", "x").result(5)
    ran = trace(*arguments)
    assert (ran.code, ran.out) == (code, b"") and sentence in ran.err and "Traceback" not in ran.err


def test_a_handle_of_another_broker_is_unknown_and_the_exit_code_is_1(broker: SimulatedBroker, trace: Any) -> None:
    with SimulatedBroker(seed=2) as other:
        handle = other.producer().send("orders", "x", delay=10).result(5).delayed
    ran = trace(handle)
    assert ran.code == 1 and ran.lines[0] == "delayed message: unknown"
    assert "never gave this handle" in ran.out.decode()
