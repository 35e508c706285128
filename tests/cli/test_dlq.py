"""`tfmq dlq`: without a broker, but for sending."""

from __future__ import annotations

import errno
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tfmq
from tests.cli.conftest import Cli
from tests.dead_letters.helpers import Process, failure, finished, group_of, message, sql_shelf
from tests.dead_letters.test_shelf import keeping
from tfmq.cli.dlq import export_row
from tfmq.dead_letters import model
from tfmq.dead_letters.model import Letter
from tfmq.dead_letters.sql_store import BlockingSqlStore
from tfmq.dead_letters.store import StoreAddress, default_path
from tools.rigs.live_server import LiveServer


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state folder of the test's own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path


@pytest.fixture
def store(home: Path) -> str:
    """A store with dead letters 0 to 2, and one that waits."""
    path = str(home / "dead.db")
    made = BlockingSqlStore(StoreAddress("path", path))
    made.apply([keeping(0, 10), keeping(1, 20), keeping(2, 30), keeping(3, 40, next_ms=10**13)])
    made.close()
    return path


def ids(offline: Cli, *arguments: str) -> list[str]:
    return [row["id"] for row in offline("dlq", "list", *arguments, "--json").json]


# Looking


def test_what_waits_for_somebody_is_listed_the_oldest_first(offline: Cli, store: str) -> None:
    rows = offline("dlq", "list", "--store", store, "--json").json
    assert [(row["ordinal"], row["state"]) for row in rows] == [
        (0, "dead"),
        (1, "dead"),
        (2, "dead"),
        (3, "waiting"),
    ]
    first = rows[0]
    assert (first["topic"], first["partition"], first["offset"], first["group"]) == (
        "orders",
        0,
        0,
        "billing",
    )
    assert (first["key"], first["tag"], first["calls"], first["error"]) == (
        "k0",
        "t",
        1,
        "ValueError: no such order",
    )
    assert first["kept_at"].startswith("1970-01-01T00:00:00.010") and first["next_at"] is None
    shown = offline("dlq", "list", "--store", store).out.decode()
    assert first["id"] in shown and "no such order" in shown and "waiting" in shown


@pytest.mark.parametrize(
    ("arguments", "numbers"),
    [
        (["--state", "waiting"], [3]),
        (["--topic", "bills"], []),
        (["--topic", "orders", "--partition", "0", "--key", "k1"], [1, 3]),
        (["--tag", "t", "--error", "SUCH"], [0, 1, 2, 3]),
        (["--group", "shipping"], []),
        (["--since", "1970-01-01T00:00:00.020+00:00", "--until", "1970-01-01T00:00:00.030+00:00"], [1]),
        (["-n", "2"], [0, 1]),
    ],
)
def test_a_list_is_narrowed(offline: Cli, store: str, arguments: list[str], numbers: list[int]) -> None:
    rows = offline("dlq", "list", "--store", store, "--json", *arguments).json
    assert [row["ordinal"] for row in rows] == numbers


def test_one_is_shown_with_its_traceback_and_payload(offline: Cli, store: str) -> None:
    id = ids(offline, "--store", store)[1]
    shown = offline("dlq", "show", id[:6], "--store", store).out.decode()
    assert "failure 1 of 1" in shown and "Traceback" in shown and "payload 1" in shown
    row = offline("dlq", "show", id, "--store", store, "--json").json
    assert (row["id"], row["payload"], row["properties"]) == (id, "payload 1", {})
    assert row["failures"][0]["traceback"].startswith("Traceback") and row["failures"][0]["at"].endswith(
        "+00:00"
    )


def test_times_are_shown_as_they_are_asked_for(
    offline: Cli, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    try:
        made = BlockingSqlStore(StoreAddress("path", store))
        made.apply([keeping(7, 1_795_000_000_123)])
        made.close()
        shown = offline("dlq", "list", "--store", store, "--since", "2026-11-18 06:06:40").out.decode()
        assert "2026-11-18 06:06:40 -05:00" in shown, "local time with its zone, and read back without one"
        since = ("--since", "2026-11-18 06:06:40 -05:00")
        (row,) = offline("dlq", "list", "--store", store, *since, "--json").json
        assert row["kept_at"] == "2026-11-18T11:06:40.123+00:00"
        assert offline("dlq", "list", "--store", store, "--since", "2026-11-18 06:06:41", "--json").json == []
        whole = offline("dlq", "show", row["id"], "--store", store).out.decode()
        assert "kept at" in whole and "2026-11-18 06:06:40 -05:00" in whole and "T11:06" not in whole
        assert re.search(r"failure 1 of 1, at \d{4}-\d\d-\d\d \d\d:\d\d:\d\d -0[45]:00\n", whole)
    finally:
        monkeypatch.undo()
        time.tzset()


def test_a_message_that_cannot_be_read_is_shown_as_far_as_it_can(offline: Cli, home: Path) -> None:
    path = str(home / "odd.db")
    kept = group_of(sql_shelf(Path(path)), lambda: 10.0)
    finished(
        kept.store_letter(
            message(1, b"\xff\x00", attribute=b"\xc1\x01"), [failure(0, "DecodeFailed: \x1b[31m")]
        )
    )
    (row,) = offline("dlq", "list", "--store", path, "--json").json
    row = offline("dlq", "show", row["id"], "--store", path, "--json").json
    assert (row["payload_base64"], row["attribute_hex"]) == ("/wA=", "c101")
    shown = offline("dlq", "show", row["id"], "--store", path).out.decode()
    assert "\x1b" not in shown and "/wA=" in shown


def test_without_a_store_all_of_this_user_are_looked_at(offline: Cli) -> None:
    assert offline("dlq", "list", "--json").json == []
    said = offline("dlq", "list")
    assert said.code == 0 and "--store" in said.err
    for group in ("billing", "shipping"):
        BlockingSqlStore(StoreAddress("path", default_path(group))).apply([keeping(1, group=group)])
    assert [row["group"] for row in offline("dlq", "list", "--json").json] == ["billing", "shipping"]
    (row,) = offline("dlq", "list", "--group", "shipping", "--json").json
    assert row["group"] == "shipping"
    assert offline("dlq", "show", row["id"], "--json").json["group"] == "shipping"
    assert offline("dlq", "drop", row["id"]).code == 0
    assert len(offline("dlq", "list", "--json").json) == 1


def test_the_broker_of_each_is_shown(offline: Cli, store: str) -> None:
    (first, *_) = ids(offline, "--store", store)
    BlockingSqlStore(StoreAddress("path", store)).apply([(first, model.AdoptEvent(50, "0b1c2d3e4f5a6b7c"))])
    rows = offline("dlq", "list", "--store", store, "--json").json
    assert [row["broker"] for row in rows] == ["0b1c2d3e4f5a6b7c", None, None, None]
    listed = offline("dlq", "list", "--store", store).out.decode()
    assert "0b1c2d3e" in listed and "0b1c2d3e4" not in listed
    assert "0b1c2d3e4f5a6b7c" in offline("dlq", "show", first, "--store", store).out.decode()


# Changing


def test_one_is_retried_and_one_dropped(offline: Cli, store: str) -> None:
    first, second, third, _ = ids(offline, "--store", store)
    assert offline("dlq", "retry", first, "--calls", "2", "--store", store, "--json").json == {
        "retried": [first],
        "left": [],
    }
    ran = offline("dlq", "drop", second, third[:8], "--store", store)
    assert (ran.code, "2 dead letters: dropped" in ran.err) == (0, True)
    rows = {row["id"]: row for row in offline("dlq", "list", "--store", store, "--json").json}
    assert (rows[first]["state"], rows[first]["calls_left"]) == ("waiting", 2)
    assert second not in rows
    again = offline("dlq", "drop", second, "--store", store)
    assert (again.code, "its state was dropped" in again.err) == (1, True)
    assert offline("dlq", "retry", second, "--store", store).code == 0


def test_many_are_chosen_by_filters(offline: Cli, store: str) -> None:
    assert offline("dlq", "retry", "--key", "k1", "--store", store, "--json").json["left"] == []
    rows = offline("dlq", "list", "--store", store, "--state", "dead", "--json").json
    assert [row["ordinal"] for row in rows] == [0, 2]
    assert len(offline("dlq", "drop", "--all", "--store", store, "--json").json["dropped"]) == 4
    assert offline("dlq", "list", "--store", store, "--json").json == []


def test_everything_is_exported_as_send_reads_it(offline: Cli, store: str, home: Path) -> None:
    ran = offline("dlq", "export", "--store", store, "--state", "dead")
    assert [row["payload"] for row in ran.objects] == ["payload 0", "payload 1", "payload 2"]
    assert {"topic", "partition", "offset", "ordinal", "key", "tag", "properties", "born_at"} <= set(
        ran.objects[0]
    )
    assert ran.objects[0]["failures"][0]["error"] == "ValueError: no such order"
    assert len(offline("dlq", "export", "--store", store, "--json").json) == 4
    path = home / "out.jsonl"
    ran = offline("dlq", "export", "--store", store, "--key", "k0", "-o", str(path))
    assert (ran.out, "2 dead letters exported" in ran.err) == (b"", True)
    assert [json.loads(line)["ordinal"] for line in path.read_text().splitlines()] == [0, 2]


def test_an_export_takes_the_place_of_a_file_as_a_whole_and_leaves_it_where_nothing_matches(
    offline: Cli, store: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = home / "out" / "old.jsonl"
    path.parent.mkdir()
    path.write_text("what was exported before\n")
    path.chmod(0o600)
    ran = offline("dlq", "export", "--store", store, "--topic", "bills", "-o", str(path))
    assert (ran.code, "old.jsonl was not written" in ran.err) == (0, True)
    assert path.read_text() == "what was exported before\n"
    with monkeypatch.context() as broken:
        broken.setattr("tfmq.cli.dlq.export_row", fails_at(3))
        assert offline("dlq", "export", "--store", store, "-o", str(path)).code == 1
    assert path.read_text() == "what was exported before\n"
    assert offline("dlq", "export", "--store", store, "--json", "-o", str(path)).code == 0
    assert [row["ordinal"] for row in json.loads(path.read_text())] == [0, 1, 2, 3]
    assert [(each.name, each.stat().st_mode & 0o777) for each in path.parent.iterdir()] == [
        ("old.jsonl", 0o600)
    ]


def test_an_export_goes_through_a_link_and_into_a_pipe(offline: Cli, store: str, home: Path) -> None:
    (home / "real.jsonl").write_text("old\n")
    (home / "link.jsonl").symlink_to("real.jsonl")
    offline("dlq", "export", "--store", store, "-o", str(home / "link.jsonl"))
    assert (home / "link.jsonl").is_symlink() and len((home / "real.jsonl").read_text().splitlines()) == 4
    assert offline("dlq", "export", "--store", store, "-o", "/dev/null").code == 0
    assert len(offline("dlq", "export", "--store", store, "-o", "-").objects) == 4


def fails_at(number: int) -> Callable[[Letter], dict[str, Any]]:
    """A disk that is full in the middle."""
    rows = iter(range(1, 100))

    def row(letter: Letter) -> dict[str, Any]:
        if next(rows) == number:
            raise OSError(errno.ENOSPC, "No space left on device")
        return export_row(letter)

    return row


# Wrong input, each in one sentence


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["list", "--store", "none.db"], 1, "There are no dead letters at none.db"),
        (["list", "--store", "nosuch://x"], 2, "names no database"),
        (["list", "--store", "topic:a/b"], 2, "is not a topic's name"),
        (["list", "--store", "sqlite://"], 2, "in memory"),
        (["export", "--store", "STORE", "-o", "/nonexist/f"], 1, "/nonexist/f cannot be written: No such"),
        (["list", "--store", "STORE", "--state", "asleep"], 2, "asleep"),
        (["list", "--store", "STORE", "--since", "soon"], 2, "is no time"),
        (["list", "--store", "/"], 1, "No dead letters can be stored at"),
        (["list", "--store", "topic:dead"], 3, ""),
        (["show", "zz", "--store", "STORE"], 1, "There is no dead letter 'zz'"),
        (["show", "", "--store", "STORE"], 1, "Several dead letters begin with"),
        (["drop", "--store", "STORE"], 2, "give IDs, filters or --all"),
        (["drop", "aa", "--key", "k", "--store", "STORE"], 2, "either IDs or filters"),
        (["retry", "--all", "--calls", "0", "--store", "STORE"], 2, "calls"),
        (["redrive", "zz", "--store", "STORE"], 1, "There is no dead letter"),
        *(
            (
                ["redrive", f"--rate={rate}", "--store", "STORE"],
                2,
                f"{rate!r} is no rate: write a number of messages per second above 0",
            )
            for rate in ("0", "-1", "nan", "inf", "-inf", "1e999", "fast")
        ),
        (["redrive", "--store", "STORE"], 3, ""),
        (["bury"], 2, "bury"),
    ],
)
def test_what_is_wrong_is_told_in_a_sentence(
    offline: Cli, store: str, arguments: list[str], code: int, sentence: str
) -> None:
    ran = offline("dlq", *[store if each == "STORE" else each for each in arguments])
    assert (ran.code, sentence in ran.err, "Traceback" in ran.err) == (code, True, False), ran.err
    assert len(re.findall(r"^(?:tfmq|Error): ", ran.err, re.MULTILINE)) == 1, ran.err


# Sending


def dead(broker: LiveServer, cli: Cli, topic: str, path: str, count: int = 3) -> None:
    """Messages of the topic, read and kept as dead letters."""
    cli("send", topic, *[f"{number}" for number in range(count)], "-k", "42")
    kept = group_of(sql_shelf(Path(path)), time.time)
    with tfmq.Consumer(broker.address, topics=topic) as consumer:
        read: list[Any] = []
        while len(read) < count:
            read += consumer.poll(5)
    for each in read:
        finished(kept.store_letter(each, [failure()]))


def test_dead_letters_are_sent_again(cli: Cli, topic: str, broker: LiveServer, home: Path) -> None:
    path = str(home / "dead.db")
    dead(broker, cli, topic, path)
    planned = cli("dlq", "redrive", "--store", path, "--dry-run")
    assert (planned.code, f"3 dead letters would be sent: 3 to {topic}" in planned.err) == (0, True)
    assert len(cli("read", topic).lines) == 3
    first = ids(cli, "--store", path)[0]
    row = cli("dlq", "redrive", first, "--store", path, "--json").json
    assert (row["sent"], row["targets"], row["dry_run"]) == (1, {topic: 1}, False)
    ran = cli("dlq", "redrive", "--store", path, "-n", "1", "--rate", "100")
    assert f"1 dead letter sent: 1 to {topic}" in ran.err
    assert cli("dlq", "redrive", "--store", path, "--json").json["sent"] == 1
    assert sorted(cli("read", topic).lines) == ["0", "0", "1", "1", "2", "2"]
    refused = cli("dlq", "redrive", first, "--store", path)
    assert (refused.code, "is redriven" in refused.err) == (1, True)
    shown = cli("dlq", "show", first, "--store", path, "--json").json
    assert (shown["state"], shown["sent_to"]) == ("redriven", f"{topic}-0")
    assert isinstance(shown["sent_offset"], int)


def test_a_topic_as_the_store(cli: Cli, topic: str, broker: LiveServer) -> None:
    cli("send", topic, "0")
    missing = cli("dlq", "list", "--store", f"topic:{topic}-dead")
    assert (missing.code, "no consumer stored any there" in missing.err) == (1, True)
    with tfmq.Consumer(broker.address, topics=topic) as consumer:
        (read,) = consumer.poll(10)
    process = Process(broker.address, f"{topic}-dead")
    kept = group_of(process.shelf, process.wall_clock)
    process.run(kept.store_letter(read, [failure()]))
    (row,) = cli("dlq", "list", "--store", f"topic:{topic}-dead", "--json").json
    assert cli("dlq", "redrive", "--store", f"topic:{topic}-dead", "--json").json["sent"] == 1
    assert (
        cli("dlq", "show", row["id"], "--store", f"topic:{topic}-dead", "--json").json["state"] == "redriven"
    )
    process.kill()
