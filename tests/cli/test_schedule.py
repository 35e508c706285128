"""`tfmq schedule` on a live broker."""

import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest
from click import Context

from tests.cli.conftest import Cli
from tfmq.admin import Admin
from tfmq.cli.schedule import format_run_time, json_row, names, remove
from tfmq.client.admin.delayed import ScheduleDescription
from tools.rigs.live_server import LiveServer


@pytest.fixture(autouse=True)
def clean(broker: LiveServer) -> Iterator[None]:
    yield
    with Admin(broker.address) as admin:
        for each in admin.schedules():
            admin.remove_schedule(each.name)


def test_a_schedule_is_added_listed_paused_resumed_and_removed(cli: Cli, topic: str) -> None:
    added = cli("schedule", "add", "0 9 * * mon-fri", topic, "go", "--name", "morning", "--timezone", "Europe/Berlin")
    assert added.code == 0 and added.out == b"" and "morning is added; next run" in added.err
    assert "09:00" in added.err and "(Europe/Berlin)" in added.err
    listed = cli("schedule", "list")
    assert "morning" in listed.out.decode() and "09:00" in listed.out.decode() and "active" in listed.out.decode()
    paused = cli("schedule", "pause", "morning")
    assert "morning is paused: tfmq schedule resume morning" in paused.err
    assert cli("schedule", "list", "--json").json[0]["state"] == "paused"
    assert "goes on; next run" in cli("schedule", "resume", "morning").err
    assert "removed morning" in cli("schedule", "remove", "morning").err
    assert "no schedules yet: tfmq schedule add" in cli("schedule", "list").err


def test_everything_has_json_with_the_next_run_in_its_time_zone(cli: Cli, topic: str) -> None:
    options = ("--timezone", "America/New_York", "--misfire", "all", "-k", "k", "-t", "tag", "--property", "n=1")
    row = cli("schedule", "add", "30 2 * * *", topic, "go", "--name", "night", *options, "--json").json
    assert (row["name"], row["cron"], row["timezone"], row["topic"], row["misfire"], row["tag"]) == (
        "night",
        "30 2 * * *",
        "America/New_York",
        topic,
        "all",
        "tag",
    )
    following = datetime.fromisoformat(row["next_run"])
    assert (following.hour, following.minute) in ((2, 30), (3, 30)) and following.utcoffset() is not None
    assert row["last_run"] is None and row["size_bytes"] == 2 and row["properties"] == {"n": "1"}
    assert (row["payload"], row["key"]) == ("go", "k") and datetime.fromisoformat(row["made_at"])
    assert cli("schedule", "list", "--json").json[0] == row
    assert cli("schedule", "show", "night", "--json").json == row
    paused = cli("schedule", "pause", "night", "--json").json
    assert paused["next_run"] is None and paused.keys() == row.keys() and paused["properties"] == {"n": "1"}
    assert cli("schedule", "resume", "night", "--json").json["state"] == "active"
    assert cli("schedule", "remove", "night", "--json").json == {"name": "night", "removed": True}
    assert cli("schedule", "list", "--json").json == []


def test_the_same_words_make_no_second_one_and_the_topic_is_made(cli: Cli, topic: str) -> None:
    first = cli("schedule", "add", "@daily", topic, "go", "--json").json
    assert cli("schedule", "add", "@daily", topic, "go", "--json").json == first
    assert f"{first['name']} is there already; next run" in cli("schedule", "add", "@daily", topic, "go").err
    cli("schedule", "pause", first["name"])
    reported = cli("schedule", "add", "@daily", topic, "go").err
    assert f"is there already, paused: tfmq schedule resume {first['name']}" in reported
    assert len(cli("schedule", "list", "--json").json) == 1
    assert cli("topic", "show", topic).code == 0


def test_the_payload_may_be_a_file_and_one_of_both_is_wanted(cli: Cli, topic: str, tmp_path: Path) -> None:
    path = tmp_path / "request"
    path.write_bytes(b"\xff" * 10)
    assert cli("schedule", "add", "@daily", topic, "-f", str(path), "--json").json["size_bytes"] == 10
    assert cli("schedule", "add", "@daily", topic).code == 2
    assert cli("schedule", "add", "@daily", topic, "x", "-f", str(path)).code == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("0 25 * * *", "mistaken", "go"), "no hour: write 0 to 23"),
        (("0 9 * *", "mistaken", "go"), "write five fields"),
        (("0 0 30 2 *", "mistaken", "go"), "never come"),
        (("@daily", "mistaken", "go", "--timezone", "Europe/Atlantis"), "write its name as in Europe/Berlin"),
        (("@daily", "mistaken", "go", "--name", "no/name"), "letters A-Z a-z, digits"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(cli: Cli, arguments: tuple[str, ...], words: str) -> None:
    ran = cli("schedule", "add", *arguments)
    assert ran.code == 2 and words in ran.err and ran.err.count("\n") == 1
    assert "mistaken" not in [each["topic"] for each in cli("topic", "list", "--json").json]


def test_a_name_that_is_not_there_is_reported_with_the_nearest(cli: Cli, topic: str) -> None:
    assert "There are no schedules yet" in cli("schedule", "pause", "morning").err
    cli("schedule", "add", "@daily", topic, "go", "--name", "morning")
    for verb in ("pause", "resume", "remove"):
        ran = cli("schedule", verb, "mornin")
        assert ran.code == 1 and "Did you mean 'morning'?" in ran.err
    other = cli("schedule", "add", "@hourly", topic, "go", "--name", "morning")
    assert other.code == 1 and "tfmq schedule remove morning" in other.err


def test_one_that_waits_says_why(cli: Cli, topic: str) -> None:
    cli("schedule", "add", "@daily", topic, "go", "--name", "waiting")
    cli("topic", "delete", topic, "--yes")
    listed = cli("schedule", "list")
    assert f"waiting waits: There is no topic {topic}" in listed.err and "waiting" in listed.out.decode()
    assert "it waits: There is no topic" in cli("schedule", "resume", "waiting").err


def test_one_is_shown_with_what_it_sends_and_can_be_sent_now(cli: Cli, topic: str, tmp_path: Path) -> None:
    words = ("-k", "42", "-t", "new", "--property", "n=1", "--timezone", "Europe/Berlin", "--misfire", "skip")
    cli("schedule", "add", "0 9 * * *", topic, "make the report", "--name", "shown", *words)
    whole = cli("schedule", "show", "shown", "--json").json
    assert (whole["payload"], whole["key"], whole["properties"]) == ("make the report", "42", {"n": "1"})
    assert cli("schedule", "list", "--json").json == [whole]
    shown = cli("schedule", "show", "shown").out.decode()
    for word in ("make the report", "42", "n=1", "skip", "new", "(Europe/Berlin)"):
        assert word in shown, word
    assert cli("schedule", "pause", "shown").code == 0
    assert cli("schedule", "run", "shown").err == f"sent to {topic}, partition 0, offset 0 (synced)\n"
    reported = cli("schedule", "run", "shown", "--json").json
    assert (reported["topic"], reported["partition"]) == (topic, 0) and reported["offset"] > 0
    first, _ = cli("read", topic, "--json").objects
    assert (first["payload"], first["key"], first["tag"]) == ("make the report", "42", "new")
    assert first["properties"].pop("scheduled_for")[:2] == "20"
    assert first["properties"] == {"n": "1", "schedule": "shown"}
    path = tmp_path / "bytes"
    path.write_bytes(b"\xff")
    cli("schedule", "add", "0 9 * * *", topic, "-f", str(path), "--name", "bytes")
    assert cli("schedule", "show", "bytes", "--json").json["payload_base64"] == "/w=="
    for command in ("show", "run"):
        assert cli("schedule", command, "shwn").err == "tfmq: There is no schedule 'shwn'. Did you mean 'shown'?\n"


@pytest.mark.parametrize("width", [20, 60, 80, 200])
def test_times_and_expressions_stay_in_one_piece_however_narrow_the_terminal_is(
    width: int, cli: Cli, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli("schedule", "add", "0 9 * * mon-fri", topic, "go", "--timezone", "America/New_York").code == 0
    following = cli("schedule", "list", "--json").json[0]["next_run"]
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    shown = cli("schedule", "list").out.decode()
    for word in (topic, "active", "0 9 * * mon-fri", "America/New_York", f"{following[:10]} 09:00"):
        assert any(word in line for line in shown.splitlines()), word


def test_the_shell_completes_names(cli: Cli, topic: str, broker: LiveServer) -> None:
    cli("schedule", "add", "@daily", topic, "go", "--name", "morning")
    context = Context(remove)
    context.params["servers"] = broker.address
    assert [each.value for each in names(context, remove.params[0], "mo")] == ["morning"]
    assert names(context, remove.params[0], "x") == []
    context.params["servers"] = "127.0.0.1:1"
    assert names(context, remove.params[0], "") == []


def test_rows_and_times_for_people() -> None:
    found = ScheduleDescription("a", timezone="Europe/Berlin", next_ms=1_795_424_400_000, details={"news": 1})
    assert found.next_at is not None
    assert format_run_time(found.next_at, "Europe/Berlin") == "2026-11-23 10:00:00 +01:00 (Europe/Berlin)"
    assert json_row(found)["next_run"] == "2026-11-23T10:00:00+01:00" and json_row(found)["news"] == 1
