"""`tfmq dlq`: without a broker, but for sending."""

from __future__ import annotations

import errno
import json
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from click import Command

import tfmq
from tests.cli.conftest import Cli
from tests.dead_letters.helpers import Process, failure, finished, group_of, message, sql_letter_store
from tests.dead_letters.test_store import keeping
from tfmq.cli.dlq import (
    COLUMNS,
    ERROR_CHARACTERS,
    PENDING_STATES,
    STATES,
    LetterChoice,
    dlq,
    export_row,
    json_row,
    redrive_stores,
    table_row,
)
from tfmq.cli.output import Output
from tfmq.dead_letters import model
from tfmq.dead_letters import model as letters
from tfmq.dead_letters.model import Letter, RedrivePosition, letter_from_message
from tfmq.dead_letters.redrive import Report, Wish
from tfmq.dead_letters.sql_store import BlockingSqlStore
from tfmq.dead_letters.store import StoreAddress, default_path
from tfmq.errors import BadRequest, TfmqError, TimedOut, UnknownTopic
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


def test_what_waits_for_an_operator_is_listed_the_oldest_first(offline: Cli, store: str) -> None:
    rows = offline("dlq", "list", "--store", store, "--json").json
    assert [(row["ordinal"], row["state"]) for row in rows] == [(0, "dead"), (1, "dead"), (2, "dead"), (3, "waiting")]
    first = rows[0]
    assert (first["topic"], first["partition"], first["offset"], first["group"]) == ("orders", 0, 0, "billing")
    assert (first["key"], first["tag"], first["calls"], first["error"]) == ("k0", "t", 1, "ValueError: no such order")
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
    assert row["failures"][0]["traceback"].startswith("Traceback") and row["failures"][0]["at"].endswith("+00:00")


def test_times_are_shown_as_they_are_asked_for(offline: Cli, store: str, monkeypatch: pytest.MonkeyPatch) -> None:
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
    kept = group_of(sql_letter_store(Path(path)), lambda: 10.0)
    finished(kept.store_letter(message(1, b"\xff\x00", attribute=b"\xc1\x01"), [failure(0, "DecodeFailed: \x1b[31m")]))
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
    assert {"topic", "partition", "offset", "ordinal", "key", "tag", "properties", "born_at"} <= set(ran.objects[0])
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
    assert [(each.name, each.stat().st_mode & 0o777) for each in path.parent.iterdir()] == [("old.jsonl", 0o600)]


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
        (["list", "--store", "topic:a/b"], 2, "cannot be a topic"),
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
def test_what_is_wrong_is_reported_in_a_sentence(
    offline: Cli, store: str, arguments: list[str], code: int, sentence: str
) -> None:
    ran = offline("dlq", *[store if each == "STORE" else each for each in arguments])
    assert (ran.code, sentence in ran.err, "Traceback" in ran.err) == (code, True, False), ran.err
    assert len(re.findall(r"^(?:tfmq|Error): ", ran.err, re.MULTILINE)) == 1, ran.err


# Sending


def dead(broker: LiveServer, cli: Cli, topic: str, path: str, count: int = 3) -> None:
    """Messages of the topic, read and kept as dead letters."""
    cli("send", topic, *[f"{number}" for number in range(count)], "-k", "42")
    kept = group_of(sql_letter_store(Path(path)), time.time)
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


def test_where_all_wait_it_is_said_how_they_are_sent(cli: Cli, store: str, topic: str) -> None:
    cli("dlq", "drop", "--until", "1970-01-01T00:00:00.035+00:00", "--store", store)
    for options in ([], ["--dry-run"]):
        ran = cli("dlq", "redrive", "--store", store, *options)
        assert ran.code == 0 and "0 dead letters" in ran.err
        assert "1 dead letter waiting to be handled again: name an ID to send it now" in ran.err
    assert "waiting" not in cli("dlq", "redrive", "--topic", "nosuch", "--store", store).err


def test_a_topic_that_is_not_there_is_the_only_thing_said_with_the_nearest(
    cli: Cli, topic: str, broker: LiveServer, home: Path
) -> None:
    path = str(home / "dead.db")
    dead(broker, cli, topic, path, count=1)
    for options in ([], ["--dry-run"]):
        ran = cli("dlq", "redrive", "--store", path, "--to", topic[:-1], *options)
        assert (ran.code, ran.out) == (1, b"")
        assert ran.err == f"tfmq: There is no topic {topic[:-1]!r}. Did you mean {topic!r}?\n"


def test_a_topic_as_the_store(cli: Cli, topic: str, broker: LiveServer) -> None:
    cli("send", topic, "0")
    missing = cli("dlq", "list", "--store", f"topic:{topic}-dead")
    assert (missing.code, "no consumer stored any there" in missing.err) == (1, True)
    with tfmq.Consumer(broker.address, topics=topic) as consumer:
        (read,) = consumer.poll(10)
    process = Process(broker.address, f"{topic}-dead")
    kept = group_of(process.letter_store, process.wall_clock)
    process.run(kept.store_letter(read, [failure()]))
    (row,) = cli("dlq", "list", "--store", f"topic:{topic}-dead", "--json").json
    assert cli("dlq", "redrive", "--store", f"topic:{topic}-dead", "--json").json["sent"] == 1
    assert cli("dlq", "show", row["id"], "--store", f"topic:{topic}-dead", "--json").json["state"] == "redriven"
    process.kill()


# How letters are chosen and shown.

LETTER = replace(
    letter_from_message(message(1, b"x", key=b"\xff", born_ms=1_763_000_000_000), "billing"),
    failures=(failure(0, f"E: {'long ' * 100}\x1b"),),
    kept_ms=1_763_700_000_000,
)


def test_the_words_of_states_are_the_stores() -> None:
    assert STATES == letters.STATES
    assert set(PENDING_STATES) == set(letters.STATES) - set(letters.FINAL_STATES)


def test_a_choice_becomes_a_selection() -> None:
    moment = datetime(2026, 1, 1, tzinfo=UTC)
    choice = LetterChoice(None, "billing", {"topic": "orders", "key": None, "since": moment, "states": ()})
    found = choice.selection(("dead",), ("3f",))
    assert (found.states, found.group, found.topic, found.ids) == (("dead",), "billing", "orders", ("3f",))
    assert found.since_ms == round(moment.timestamp() * 1000) and found.until_ms is None
    assert LetterChoice(None, None, {"states": ("waiting",)}).selection(("dead",)).states == ("waiting",)


def test_a_choice_narrows_or_does_not() -> None:
    assert not LetterChoice("dead.db", None, {"topic": None, "states": ()}).has_filters
    assert LetterChoice(None, "billing", {}).has_filters and LetterChoice(None, None, {"partition": 0}).has_filters


def test_a_row_has_plain_values_and_none_for_what_is_not() -> None:
    row = json_row(LETTER)
    assert (row["key"], row["next_at"], row["sent_to"], row["sent_offset"]) == ("\ufffd", None, None, None)
    assert row["kept_at"] == "2025-11-21T04:40:00.000+00:00"
    sent = json_row(replace(LETTER, journey=RedrivePosition("again", 8, 3, 99, 5, 0), sent_offset=0, next_ms=1))
    assert (sent["sent_to"], sent["sent_offset"], bool(sent["next_at"])) == ("again-3", 0, True)


def test_a_table_is_narrow_and_steers_no_terminal() -> None:
    found = table_row(LETTER)
    assert set(found) == set(COLUMNS)
    assert len(found["error"]) == ERROR_CHARACTERS and "\x1b" not in found["error"]
    assert table_row(replace(LETTER, key=None))["key"] == "-"
    strange = table_row(replace(LETTER, id="\x1b[2J", group="\x1b[2J", topic="\x1b[2J", broker="\x1b[2J"))
    assert not any("\x1b" in each for each in strange.values()), "who may write to the topic may write anything"


def test_whole_it_is_what_send_reads() -> None:
    row = export_row(LETTER)
    assert export_row(replace(LETTER, body=None)).keys() < row.keys(), "its body is gone: the rest is shown"
    assert (row["id"], row["payload"], row["key"], row["key_base64"]) == (LETTER.id, "x", None, "/w==")
    assert row["born_at"].startswith("2025-11-13") and "at_ms" not in row["failures"][0]


def test_an_error_that_is_cut_shows_it() -> None:
    whole, longer = "x" * ERROR_CHARACTERS, "y" * (ERROR_CHARACTERS + 1)
    for error, shown in ((whole, whole), (longer, longer[: ERROR_CHARACTERS - 3] + "...")):
        row = table_row(replace(LETTER, failures=(failure(0, error),)))
        assert row["error"] == shown and len(shown) == ERROR_CHARACTERS


@pytest.mark.parametrize("name", ["list", "show", "retry", "drop", "export", "redrive"])
def test_every_command_has_store_group_and_json(name: str) -> None:
    command: Command = dlq.commands[name]
    options = {option for parameter in command.params for option in parameter.opts}
    assert {"--store", "--group", "--json", "--quiet", "--servers"} <= options
    assert command.epilog and "Example" in command.epilog


# What is said of a redrive over several stores, and its exit codes.


class Scripted:
    """A stand-in for `Desk` whose redrive has a given result and end."""

    def __init__(self, report: Report, error: Exception | None = None) -> None:
        self.report = report
        self.error = error
        self.wishes: list[Wish] = []

    def redrive(self, wish: Wish, reported: Any, report: Report) -> Report:
        self.wishes.append(wish)
        for name in ("sent", "resumed", "looping", "unsendable", "unsure"):
            setattr(report, name, getattr(report, name) + getattr(self.report, name))
        for name in ("targets", "foreign"):
            setattr(report, name, dict(Counter(getattr(report, name)) + Counter(getattr(self.report, name))))
        report.broker = self.report.broker or report.broker
        if self.error is not None:
            raise self.error
        return report


OUTPUT = Output(None, False, False)


def test_stores_are_summed_up(capsys: pytest.CaptureFixture[str]) -> None:
    desks: Any = [Scripted(Report(3, 1, 2, targets={"a": 3})), Scripted(Report(2, targets={"a": 1, "b": 1}))]
    assert redrive_stores(desks, Wish(), OUTPUT) == 0
    said = capsys.readouterr().err
    assert "5 dead letters sent: 4 to a, 1 to b" in said
    assert "1 of these had been sent by an interrupted redrive" in said and "2 dead letters skipped" in said


def test_dead_letters_of_another_broker_are_named_with_both_brokers(capsys: pytest.CaptureFixture[str]) -> None:
    desks: Any = [
        Scripted(Report(1, targets={"a": 1}, foreign={"0b1c": 2}, broker="2d3e")),
        Scripted(Report(foreign={"0b1c": 1, "": 1}, broker="2d3e")),
    ]
    assert redrive_stores(desks, Wish(), OUTPUT) == 1
    said = capsys.readouterr().err
    assert "3 dead letters left, of the broker 0b1c: --servers is the broker 2d3e;" in said and "--force" in said
    assert "1 dead letter left, of an unknown broker" in said
    assert redrive_stores(desks, Wish(), Output(None, True, False)) == 1
    assert '"foreign": {"0b1c": 3, "": 1}' in capsys.readouterr().out


def test_what_strangers_wrote_steers_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    clear = "\x1b[2J"
    report = Report(targets={clear: 1}, foreign={clear: 1}, broker="2d3e", unsure=[clear], unsendable=[clear])
    desks: Any = [Scripted(report)]
    assert redrive_stores(desks, Wish(), OUTPUT) == 1
    said = capsys.readouterr()
    assert "\x1b" not in said.err + said.out and said.err.count("[2J") == 4


def test_a_limit_counts_over_all_stores() -> None:
    desks: Any = [Scripted(Report(3, 1, targets={"a": 3})), Scripted(Report(3, targets={"a": 3})), Scripted(Report())]
    redrive_stores(desks, Wish(limit=5), OUTPUT)
    assert [[wish.limit for wish in each.wishes] for each in desks] == [[5], [5], []]


def test_an_unknown_outcome_is_reported_and_is_no_success(capsys: pytest.CaptureFixture[str]) -> None:
    desks: Any = [Scripted(Report(unsure=["x may be there"], unsendable=["y cannot be sent"]))]
    assert redrive_stores(desks, Wish(), OUTPUT) == 1
    said = capsys.readouterr().err
    assert "x may be there" in said and "y cannot be sent" in said
    for report in (Report(unsure=["x may be there"]), Report(unsendable=["y cannot be sent"])):
        alone: Any = [Scripted(report)]
        assert redrive_stores(alone, Wish(), OUTPUT) == 1


def test_one_that_is_cut_short_says_how_far_it_came(capsys: pytest.CaptureFixture[str]) -> None:
    cut = Scripted(Report(7, targets={"a": 7}), TimedOut("no answer"))
    desks: Any = [cut, Scripted(Report(9))]
    with pytest.raises(TimedOut):
        redrive_stores(desks, Wish(), OUTPUT)
    said = capsys.readouterr().err
    assert "7 dead letters sent" in said and "run the same command again" in said
    assert desks[1].wishes == []


@pytest.mark.parametrize(
    ("sent", "error", "dry", "reported"),
    [
        (0, BadRequest("no topic name"), False, ""),
        (0, UnknownTopic("no topic nosuch"), True, ""),
        (0, UnknownTopic("no topic nosuch"), False, ""),
        (1, UnknownTopic("no topic nosuch"), False, "correct the cause and run the same command again"),
    ],
)
def test_what_cannot_succeed_is_not_to_be_run_again(
    capsys: pytest.CaptureFixture[str], sent: int, error: TfmqError, dry: bool, reported: str
) -> None:
    desks: Any = [Scripted(Report(sent, targets={"a": sent} if sent else {}), error)]
    with pytest.raises(TfmqError):
        redrive_stores(desks, Wish(dry=dry), OUTPUT)
    said = capsys.readouterr().err
    assert reported in said and ("the same command again" in said) == bool(reported)
