"""`tfmq topic` on a live broker."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.cli.conftest import Cli
from tfmq.admin import Admin
from tfmq.cli.output import Output
from tfmq.cli.topic import find_topic, print_problem
from tfmq.errors import UnknownTopic
from tfmq.limits import NAME_RULE
from tfmq.producer import Producer
from tools.rigs.live_server import LiveServer


def test_a_topic_is_made_shown_grown_and_deleted(cli: Cli, topic: str) -> None:
    made = cli("topic", "create", topic, "--partitions", "2", "--set", "retention.seconds=7d")
    assert (made.code, made.out) == (0, b"")
    assert made.err == f"created {topic} with 2 partitions\n"
    assert cli("topic", "create", topic).code == 1
    cli("send", topic, "a", "b", "--partition", "1")
    shown = cli("topic", "show", topic, "--json").json
    assert (shown["topic"], shown["messages"], shown["state"]) == (topic, 2, "open")
    assert shown["settings"] == {"retention.seconds": 604_800}
    assert [p["messages"] for p in shown["partitions"]] == [0, 2]
    assert cli("topic", "grow", topic, "3", "--json").json == {"topic": topic, "partitions": 3}
    assert cli("topic", "grow", topic, "1").code == 1
    row = next(row for row in cli("topic", "list", "--json").json if row["topic"] == topic)
    assert row.pop("states") == {"open": 3}
    assert row.pop("size_bytes") in (172, 272)  # in one block, or in two on a busy machine
    assert row == {"topic": topic, "partitions": 3, "messages": 2, "state": "open"}
    assert cli("topic", "delete", topic, "--yes", "--json").json == {"topic": topic, "deleted": True}
    assert cli("topic", "show", topic).code == 1


def test_tables_are_for_people(cli: Cli, topic: str) -> None:
    cli("topic", "create", topic)
    listed = cli("topic", "list").out.decode()
    assert "partitions" in listed
    assert topic in listed
    shown = cli("topic", "show", topic).out.decode()
    assert "forced offset" in shown


def test_nothing_is_deleted_without_a_yes(cli: Cli, topic: str) -> None:
    cli("send", topic, "precious")
    refused = cli("topic", "delete", topic)
    assert refused.code == 2
    assert "Add --yes to delete" in refused.err
    assert cli("read", topic).out == b"precious\n"


def test_what_waits_for_its_time_is_named_before_it_goes_too(cli: Cli, topic: str) -> None:
    cli("send", topic, "a")
    cli("send", topic, "b", "c", "--delay", "1h")
    assert (
        f"Add --yes to delete {topic} with 1 message and 2 that wait for their time.\n"
        in cli("topic", "delete", topic).err
    )


def test_a_wrong_setting_is_refused_with_the_likely_one(cli: Cli, topic: str) -> None:
    ran = cli("topic", "create", topic, "--set", "flush.mesages=5")
    assert ran.code == 2
    assert "flush.messages" in ran.err
    assert cli("topic", "show", topic).code == 1


def test_settings_are_shown_as_they_can_be_typed(cli: Cli, topic: str) -> None:
    given = ("retention.seconds=7d", "log.segment_bytes=64MiB")
    assert cli("topic", "create", topic, *(word for each in given for word in ("--set", each))).code == 0
    shown = cli("topic", "show", topic).out.decode()
    pairs = re.findall(r"[\w.]+=[^ ,]+", next(line for line in shown.splitlines() if "=" in line))
    assert sorted(pairs) == ["log.segment_bytes=67108864", "retention.seconds=604800"]
    again = cli("topic", "create", f"{topic}-2", *(word for each in pairs for word in ("--set", each)))
    assert again.code == 0, again.err
    settings = [cli("topic", "show", name, "--json").json["settings"] for name in (topic, f"{topic}-2")]
    assert settings[0] == settings[1]


def test_a_section_alone_means_its_time(cli: Cli, topic: str) -> None:
    ran = cli("topic", "create", topic, "--set", "retention=7d")
    assert ran.code == 2 and 'did you mean "retention.seconds"?' in ran.err


@pytest.mark.parametrize("count", ["abc", "0", "-1", "1.5", "\u00b2"])
def test_a_wrong_number_of_partitions_is_said_in_plain_words(cli: Cli, topic: str, count: str) -> None:
    for words in (("grow", topic, "--", count), ("create", topic, f"--partitions={count}")):
        ran = cli("topic", *words)
        assert ran.code == 2 and f"{count!r} is no number of partitions: write a whole number" in ran.err


@pytest.mark.parametrize("name", ["ord*", "orders?", "[a-z]", "bad topic!", "", ".", ".."])
def test_what_cannot_be_a_topic_is_said_in_one_sentence_by_all(offline: Cli, name: str) -> None:
    said = set()
    for words in (("send", name, "x"), ("read", name), ("topic", "show", name), ("topic", "create", name)):
        ran = offline(*words)
        assert ran.code == 2, "and no broker is asked"
        said.add(ran.err.splitlines()[-1])
    (sentence,) = said
    assert f"{name!r} cannot be a topic: {NAME_RULE}." in sentence
    assert ("There are no wildcards here" in sentence) == bool(set(name) & set("*?["))


def test_resume_where_nothing_is_stopped(cli: Cli, topic: str) -> None:
    cli("topic", "create", topic)
    assert cli("topic", "resume", topic).err == f"no partition of {topic} is stopped\n"
    assert cli("topic", "resume", topic, "--partition", "0", "--json").json[0]["state"] == "open"
    ran = cli("topic", "resume", topic, "--partition", "7")
    assert ran.code == 1 and "has 1 partition, no number 7: its number is 0" in ran.err
    cli("topic", "grow", topic, "3")
    assert "no number 7: their numbers are 0 to 2" in cli("topic", "resume", topic, "--partition", "7").err


def test_trouble_is_reported_with_what_to_type(capsys: object) -> None:
    row = {
        "partition": 3,
        "state": "stopped",
        "reason": "a force failed",
        "damage": [{"first": 10, "next": 20, "reason": "a flipped bit"}],
        "findings": [],
    }
    print_problem(Output(None, json=False, quiet=False), "orders", row)
    said = capsys.readouterr().err  # type: ignore[attr-defined]
    assert "tfmq topic resume orders --partition 3" in said
    assert "damaged from 10 to 20: a flipped bit" in said


def test_settings_are_changed_while_the_server_runs_and_shown_with_their_origin(cli: Cli, topic: str) -> None:
    cli("topic", "create", topic, "--set", "flush.messages=7")
    ran = cli("topic", "set", topic, "retention.seconds=7d", "flush.messages=")
    assert (ran.code, ran.err) == (
        0,
        f"{topic}: retention.seconds = 604800 (its own)\n{topic}: flush.messages = 1000 (default)\n",
    )
    shown = cli("topic", "show", topic, "--json").json
    assert shown["settings"] == {"retention.seconds": 604_800}
    assert shown["effective"]["retention.seconds"] == {"value": 604_800, "from": "topic"}
    assert shown["effective"]["flush.messages"] == {"value": 1000, "from": "default"}
    assert "604800" in cli("topic", "show", topic).out.decode()
    assert cli("topic", "set", topic, "--unset", "retention.seconds", "--json").json["settings"] == {}
    assert cli("topic", "set", topic).code == 2
    both = cli("topic", "set", topic, "flush.messages=5", "--unset", "flush.messages")
    assert both.code == 2 and "flush.messages=5 and --unset flush.messages contradict each other" in both.err
    assert "tfmq topic grow" in cli("topic", "set", topic, "topics.partitions=3").err
    assert 'did you mean "flush.messages"?' in cli("topic", "set", topic, "--unset", "flush.mesages").err


def test_a_purge_removes_what_is_older_and_moves_groups_to_what_is_left(cli: Cli, topic: str) -> None:
    for payload in ("a", "b", "c"):
        cli("send", topic, payload)
    cli("read", topic, "-g", topic, "-n", "1")
    third = cli("read", topic, "--json", "-n", "3").objects[2]["offset"]
    assert (
        f"Add --yes to remove the messages of {topic}; they cannot be restored.\n" in cli("topic", "purge", topic).err
    )
    beyond = cli("topic", "purge", topic, "--before", "999999", "--yes")
    assert beyond.code == 1 and "ends at offset" in beyond.err and "nothing was removed" in beyond.err
    ran = cli("topic", "purge", topic, "--before", str(third), "--yes")
    assert (ran.code, ran.err) == (0, f"removed 2 messages of {topic}\nmoved to the first remaining message: {topic}\n")
    assert cli("read", topic, "-g", topic).out == b"c\n"
    assert cli("topic", "purge", topic, "--yes", "--json").json["moved"] == []
    assert cli("read", topic).out == b""


def test_what_is_sent_while_a_purge_runs_does_not_change_its_count(
    cli: Cli, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli("send", topic, "a", "b", "c")
    purge = Admin.purge

    def purge_and_send(admin: Admin, *arguments: Any) -> Any:
        purged = purge(admin, *arguments)
        with Producer() as producer:
            producer.send(topic, "later").result()
        return purged

    monkeypatch.setattr(Admin, "purge", purge_and_send)
    assert cli("topic", "purge", topic, "--yes").err == f"removed 3 messages of {topic}\n"


def test_an_offset_of_several_partitions_is_none_to_purge_before(cli: Cli, topic: str) -> None:
    cli("topic", "create", topic, "--partitions", "2")
    ran = cli("topic", "purge", topic, "--before", "10", "--yes")
    assert ran.code == 2 and "an offset needs --partition" in ran.err


# A topic by the name that a person typed.


def test_the_nearest_name_is_offered(cli: Cli, broker: LiveServer) -> None:
    cli("topic", "create", "invoices")
    with Admin(broker.address) as admin:
        assert find_topic(admin, "invoices").name == "invoices"
        with pytest.raises(UnknownTopic, match=r"no topic 'invoice'\. Did you mean 'invoices'\?"):
            find_topic(admin, "invoice")
        with pytest.raises(UnknownTopic, match=r"no topic 'zzzzzzzzz'\. `tfmq topic list` has all\.$"):
            find_topic(admin, "zzzzzzzzz")
