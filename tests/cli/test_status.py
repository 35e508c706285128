"""`tfmq status` on a live broker."""

import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests import paths
from tests.cli.conftest import Cli
from tests.cli.delayed_broker import NOW_MS, DelayedBroker, Waiting
from tests.client.fake_broker import listening
from tests.client.in_doubt_broker import InDoubtBroker, row
from tfmq.cli.status import delay_rows, format_value, schedule_rows, transaction_rows


def test_the_status_is_an_object_or_a_table(cli: Cli) -> None:
    found = cli("status", "--json").json
    assert found["stopped"] == []
    assert found["settings"]["flush.messages"] == 1000
    table = cli("status").out.decode()
    assert "uptime" in table
    assert "flush.messages" not in table


@pytest.mark.parametrize("words", ["status", "topic list", "group list", "read orders", "topic delete x --yes"])
def test_a_look_at_a_folder_that_is_not_there_makes_none(offline: Cli, tmp_path: Path, words: str) -> None:
    folder = tmp_path / "a" / "b"
    ran = offline(*words.split(), "--servers", f"file:{folder}")
    assert ran.code == 3 and f"no data folder of a broker at {folder}" in ran.err
    assert not folder.parent.exists()


def test_every_figure_is_explained_on_the_page(cli: Cli) -> None:
    def keys(found: dict[str, Any], before: str = "") -> Iterator[str]:
        for key, value in found.items():
            yield before + key
            if isinstance(value, dict):
                yield from keys(value, f"{before}{key}.")

    found = cli("status", "--json").json
    del found["settings"]  # the table of docs/configuration.md
    page = (paths.ROOT / "docs" / "cli.md").read_text()
    explained = page[page.index("## What `tfmq status` shows") :]
    explained = explained[: explained.index("\n## ", 3)]
    rows = [line.split("|")[1] for line in explained.splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`([\w.]+)`", row)}
    assert set(keys(found)) - {"transactions", "delay", "schedules", "verification"} == named


def test_times_of_delayed_messages_are_iso_too(cli: Cli) -> None:
    found = cli("status", "--json").json["delay"]
    now = datetime.fromisoformat(found["now_at"])
    assert round(now.timestamp() * 1000) == found["now_ms"]
    assert (found["next_due_at"] is None) == (found["next_due_ms"] is None)


def test_sizes_and_times_read_well() -> None:
    assert format_value("bytes", 1536) == "1.5 KiB"
    assert format_value("uptime_seconds", 3725) == "1:02:05"
    assert format_value("topics", 7) == 7


def test_transactions_have_their_lines_and_an_alarm(offline: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    broker = InDoubtBroker(row("a", 1), row("b", 2, "open"), row("c", 3, "applying"))
    with listening(broker) as servers:
        monkeypatch.setenv("TFMQ_SERVERS", servers)
        calm = offline("status")
        table = calm.out.decode()
        assert "1 open, 1 prepared (the oldest for 1 min 30 s), 1 applying, 0 heuristic" in table
        assert "transaction journal" in table and "open, 4.0 KiB" in table
        assert "tfmq tx list" not in calm.err
        broker.rows += [row("d", 4, age_seconds=7200.0), row("e", 5, "heuristic_committed")]
        alarmed = offline("status")
        assert "prepared for longer than 1 h and wait for their owners: tfmq tx list" in alarmed.err
        assert "ended by an operator" in alarmed.err
        assert offline("status", "--json").json["transactions"]["alarm"] is True


def test_a_broker_that_says_nothing_of_transactions_has_no_such_line() -> None:
    assert transaction_rows({}) == {}


def test_delayed_messages_have_their_lines_and_say_what_is_wrong(offline: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    broker = DelayedBroker(Waiting(NOW_MS + 90_000), Waiting(NOW_MS + 7_200_000))
    broker.delay = {
        "size_bytes": 4_096,
        "next_due_ms": NOW_MS + 90_000,
        "lateness": {"p50_ms": 4, "p99_ms": 11.5, "max_ms": 2_000},
        "arrivals": "open",
        "held": 0,
        "ahead_ms": 12,
    }
    with listening(broker) as servers:
        monkeypatch.setenv("TFMQ_SERVERS", servers)
        calm = offline("status")
        table = calm.out.decode()
        assert "2, 4.0 KiB, the next in 1 min 30 s at the earliest" in table
        assert "half of them within 4 ms, 99 % within 11.5 ms, all within 2 s" in table
        assert "blocked by" not in calm.err and "the clock" not in calm.err
        broker.delay |= {
            "arrivals": "I/O error",
            "held": 1_200,
            "waits_for": [["orders-3", "storage_stopped"]],
            "damaged": 1,
            "ahead_ms": -3_600_000,
        }
        alarmed = offline("status").err
        assert "delayed messages are rejected, their log is stopped: I/O error" in alarmed
        assert "1,200 delayed messages blocked by" in alarmed and "  orders-3: storage_stopped\n" in alarmed
        assert "1 delayed message lost by damage" in alarmed
        assert "broker time is 1 h behind the clock" in alarmed
        assert offline("status", "--json").json["delay"]["held"] == 1_200
        assert offline("status", "--quiet").err == ""
        broker.delay["waits_for"] = [[f"t-{number}", "no"] for number in range(1_000)]
        reported = offline("status").err
        assert "  t-9: no\n  and 990 more" in reported and "t-10:" not in reported


def test_a_broker_that_says_nothing_of_delays_has_no_such_line() -> None:
    assert delay_rows({}) == {}
    assert delay_rows({"pending": 1, "next_due_ms": 5, "now_ms": 5}) == {"delayed messages": "1, some due now"}
    assert delay_rows({"pending": 0}) == {"delayed messages": "0"}


def test_schedules_have_a_line_where_there_are_some() -> None:
    assert schedule_rows({}) == schedule_rows({"schedules": 0, "paused": 0, "waiting": 0}) == {}
    assert schedule_rows({"schedules": 1200, "paused": 0, "waiting": 0}) == {"schedules": "1,200"}
    assert schedule_rows({"schedules": 3, "paused": 1, "waiting": 2}) == {"schedules": "3, 1 paused, 2 waiting"}


def test_a_live_broker_says_how_many_schedules_wait(cli: Cli, topic: str) -> None:
    cli("schedule", "add", "@daily", topic, "go", "--name", "counted")
    try:
        cli("topic", "delete", topic, "--yes")
        assert "1, 1 waiting" in cli("status").out.decode()
    finally:
        cli("schedule", "remove", "counted")
