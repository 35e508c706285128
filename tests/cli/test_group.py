"""`tfmq group` on a live broker."""

import pytest

from tests.cli.conftest import Cli
from tfmq.cli.group import format_partitions, known_value
from tfmq.consumer import Consumer
from tools.rigs.live_server import LiveServer


def test_a_group_is_listed_shown_and_set_back(cli: Cli, topic: str) -> None:
    cli("send", topic, "a", "b", "c")
    third = cli("read", topic, "--json").objects[2]["offset"]  # depends on how many blocks the three were stored in
    assert cli("read", topic, "-g", topic, "-n", "2").out == b"a\nb\n"
    row = next(row for row in cli("group", "list", "--json").json if row["group"] == topic)
    assert (row["live"], row["partitions"], row["lag"]) == (False, 1, 1)
    assert "lag (messages)" in cli("group", "list").out.decode()
    shown = cli("group", "show", topic, "--json").json
    assert (shown["lag"], shown["members"]) == (1, [])
    assert [(o["topic"], o["partition"], o["lag"]) for o in shown["offsets"]] == [(topic, 0, 1)]
    shown = cli("group", "show", topic).out.decode()
    assert "end offset (bytes)" in shown and "lag (messages)" in shown
    back = cli("group", "reset", topic, topic, "--to", "earliest", "--json")
    assert back.json == [{"topic": topic, "partition": 0, "before": third, "offset": 0}]
    assert cli("read", topic, "-g", topic).out == b"a\nb\nc\n"
    assert cli("read", topic, "-g", topic).out == b""
    cli("group", "reset", topic, topic, "--to", "-1h", "--partition", "0")
    assert cli("read", topic, "-g", topic).out == b"a\nb\nc\n"


@pytest.mark.long
def test_members_are_shown_with_what_each_has(cli: Cli, topic: str, broker: LiveServer) -> None:
    cli("topic", "create", topic, "--partitions", "2")
    with Consumer(broker.address, topics=topic, group=topic) as consumer:
        consumer.poll(5)
        (row,) = [row for row in cli("group", "list", "--json").json if row["group"] == topic]
        assert (row["members"], row["live"]) == (1, True)
        (member,) = cli("group", "show", topic, "--json").json["members"]
        assert (member["partitions"], member["leaving"], member["note"]) == ({topic: [0, 1]}, {}, "")
        shown = cli("group", "show", topic).out.decode()
        assert f"{topic} 0-1" in shown and " ago" in shown and "silent" not in shown


def test_a_reset_shows_the_old_offsets_too_and_can_be_tried(cli: Cli, topic: str) -> None:
    cli("topic", "create", topic, "--partitions", "2")
    cli("send", topic, "a", "b", "--partition", "1")
    fresh = cli("group", "reset", topic, topic, "--to", "latest", "--create", "--dry-run")
    fresh_end = cli("topic", "show", topic, "--json").json["partitions"][1]["end_offset"]
    assert fresh.code == 0 and "nothing was changed: this was a dry run" in fresh.err
    assert topic not in [row["group"] for row in cli("group", "list", "--json").json]
    cli("group", "reset", topic, topic, "--to", "latest", "--create", "--partition", "1")
    (saved,) = cli("group", "show", topic, "--json").json["offsets"]
    end = saved["offset"]
    assert end == fresh_end > 0
    tried = cli("group", "reset", topic, topic, "--to", "earliest", "--dry-run", "--json").json
    assert tried == [
        {"topic": topic, "partition": 0, "before": None, "offset": 0},
        {"topic": topic, "partition": 1, "before": end, "offset": 0},
    ]
    assert cli("group", "reset", topic, topic, "--to", "earliest", "--json").json == tried


def test_where_nothing_is_saved_there_is_no_offset_and_not_minus_one(cli: Cli, topic: str, broker: LiveServer) -> None:
    cli("topic", "create", topic)
    with Consumer(broker.address, topics=topic, group=topic) as consumer:
        consumer.poll(0.1)
        (row,) = cli("group", "show", topic, "--json").json["offsets"]
        assert (row["partition"], row["offset"]) == (0, None)
        assert "-1" not in cli("group", "show", topic).out.decode().replace(topic, "")
    assert known_value(-1) is None and known_value(0) == 0


def test_partitions_are_written_as_runs() -> None:
    assert format_partitions({"orders": [2, 0, 1, 7], "bills": [3]}) == "bills 3, orders 0-2 7"
    assert format_partitions({}) == ""


def test_a_group_that_is_not_there_is_said_so(cli: Cli, topic: str) -> None:
    cli("send", topic, "a")
    cli("read", topic, "-g", "warehouse")
    ran = cli("group", "show", "warehose")
    assert ran.code == 1
    assert "Did you mean 'warehouse'?" in ran.err
    assert cli("group", "show", "zzz").err == "tfmq: There is no group 'zzz'. `tfmq group list` has all.\n"


def test_a_group_with_a_live_member_is_not_moved_under_it(cli: Cli, topic: str, broker: LiveServer) -> None:
    cli("send", topic, "a")
    with Consumer(broker.address, topics=topic, group=topic) as consumer:
        consumer.poll(5)
        ran = cli("group", "reset", topic, topic, "--to", "earliest")
        assert ran.code == 1
        assert "live member" in ran.err
        tried = cli("group", "reset", topic, topic, "--to", "earliest", "--dry-run")
        assert "a member of it is running, so the reset would be rejected" in tried.err
        shown = cli("group", "show", topic, "--json").json
        assert [m["live"] for m in shown["members"]] == [True]


def test_a_reset_of_a_topic_that_is_not_there_changes_nothing(cli: Cli) -> None:
    assert cli("group", "reset", "g", "no-such-topic", "--to", "latest").code == 1
    assert cli("group", "reset", "g", "no-such-topic", "--to", "someday").code == 2


def test_a_group_that_is_not_there_is_set_only_where_that_is_meant(cli: Cli, topic: str) -> None:
    cli("send", topic, "a", "b")
    cli("read", topic, "-g", "delivery")
    ran = cli("group", "reset", "delivry", topic, "--to", "earliest")
    assert (ran.code, ran.out) == (1, b"")
    assert "Did you mean 'delivery'?" in ran.err and "--create" in ran.err
    assert "delivry" not in [row["group"] for row in cli("group", "list", "--json").json]
    assert cli("group", "reset", "delivry", topic, "--to", "latest", "--create").code == 0
    assert cli("read", topic, "-g", "delivry").out == b""


def test_a_place_that_lies_inside_of_a_message_is_said(cli: Cli, topic: str) -> None:
    cli("send", topic, "a", "b")
    cli("read", topic, "-g", topic)
    assert "no message begins" not in cli("group", "reset", topic, topic, "--to", "0").err
    ran = cli("group", "reset", topic, topic, "--to", "1")
    assert ran.code == 0
    assert "partition 0: no message begins at 1; the group continues at 0" in ran.err


def test_an_offset_after_the_end_is_none_to_set_a_group_to(cli: Cli, topic: str) -> None:
    cli("send", topic, "a")
    cli("read", topic, "-g", topic)
    for more in ((), ("--dry-run",)):
        ran = cli("group", "reset", topic, topic, "--to", "99999999", *more)
        assert ran.code == 1 and "99999999 is not there, and no offset was changed" in ran.err
    assert cli("group", "reset", topic, topic, "--to", "latest", "--dry-run").code == 0


def test_an_offset_of_several_partitions_is_none_to_set_a_group_to(cli: Cli, topic: str) -> None:
    cli("topic", "create", topic, "--partitions", "2")
    for more in ((), ("--dry-run",)):
        ran = cli("group", "reset", topic, topic, "--to", "72", "--create", *more)
        assert ran.code == 2 and "has 2 partitions, an offset needs --partition" in ran.err
    assert topic not in [row["group"] for row in cli("group", "list", "--json").json]


def test_a_number_with_a_sign_and_no_unit_is_no_place(cli: Cli, topic: str) -> None:
    cli("send", topic, "a")
    cli("read", topic, "-g", topic)
    for text in ("-5", "+5", "-1.5"):
        ran = cli("group", "reset", topic, topic, "--to", text)
        assert (ran.code, "has no unit" in ran.err) == (2, True), text
    assert cli("group", "reset", topic, topic, "--to", "-5s").code == 0


def test_a_group_is_deleted_unless_a_member_is_alive(cli: Cli, topic: str, broker: LiveServer) -> None:
    cli("send", topic, "a")
    with Consumer(broker.address, topics=topic, group=topic, client_id="ada") as consumer:
        consumer.poll(5)
        assert cli("group", "show", topic, "--json").json["members"][0]["client"].startswith("ada at ")
        ran = cli("group", "delete", topic, "--yes")
        assert (ran.code, "live member" in ran.err) == (1, True)
    refused = cli("group", "delete", topic)
    assert refused.code == 2 and f"Add --yes to delete the group {topic} with 1 saved offset.\n" in refused.err
    assert cli("group", "delete", topic, "--yes").err == f"deleted the group {topic}\n"
    assert topic not in [row["group"] for row in cli("group", "list", "--json").json]
    assert cli("group", "delete", topic, "--yes").code == 1
    assert cli("read", topic, "-g", topic).out == b"a\n"


def test_a_client_has_the_name_that_it_is_given(cli: Cli, topic: str) -> None:
    assert cli("send", topic, "a", "--client-id", "web-1").code == 0
    ran = cli("read", topic, "--client-id", "no spaces")
    assert ran.code == 2 and "1 to 100 letters" in ran.err
