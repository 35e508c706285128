"""`tfmq send`: arguments, files and standard input become messages."""

import base64
import io
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import pytest

from tests.cli.conftest import Cli, Shown
from tfmq.admin import Admin
from tfmq.cli.main import run
from tfmq.cli.output import Output
from tfmq.cli.send import SharedOptions, message_of, print_result, split_stream
from tfmq.consumer import Consumer
from tfmq.message import SendResult
from tfmq.producer import Producer
from tfmq.protocol.delayed_handle import Handle, format_handle
from tools.rigs.live_server import LiveServer

SHORT_TIMEOUT = 1.0


def payloads(cli: Cli, topic: str) -> list[str]:
    return cli("read", topic).lines


def test_arguments_are_messages_and_the_answer_says_where(cli: Cli, topic: str) -> None:
    created = f"created topic {topic} (1 partition)\n"
    assert cli("send", topic, "hello").err == f"{created}sent to {topic}, partition 0, offset 0 (synced)\n"
    assert cli("send", topic, "a", "b").err == f"sent 2 messages to {topic} (synced)\n"
    assert cli("send", topic, "c", "--quiet") == (0, b"", "")
    reported = cli("send", topic, "d", "--acks", "written", "--json").json
    assert (reported["topic"], reported["count"], reported["durability"], reported["partition"]) == (
        topic,
        1,
        "written",
        0,
    )
    assert payloads(cli, topic) == ["hello", "a", "b", "c", "d"]


def test_the_first_message_creates_a_missing_topic_and_its_partitions_are_counted(
    cli: Cli, broker: LiveServer, topic: str
) -> None:
    assert cli("send", topic, given=b"").err == f"sent 0 messages to {topic}\n"
    for options in (["--quiet"], ["--json"], ["--delay", "1h"]):
        name = topic + options[0]
        said = cli("send", name, "late", *options).err
        assert said.startswith(f"created topic {name} (1 partition)\n") if "--delay" in options else said == ""
    with Admin(broker.address) as admin:
        assert topic not in {each.name for each in admin.topics()}
        admin.create_topic(topic, partitions=2)
    assert cli("send", topic, "there").err.startswith(f"sent to {topic}, partition ")


def test_a_missing_topic_is_an_error_where_the_setting_is_off(offline: Cli, tmp_path: Path) -> None:
    server = LiveServer(tmp_path / "data", "topics.auto_create=false")
    server.start()
    ran = offline("send", "orders", "1", "--servers", server.address)
    server.stop()
    assert ran.code == 1 and ran.err.startswith("tfmq: There is no topic orders, and topics.auto_create is off.")


@pytest.mark.parametrize("payload", [(), ("-",)])
def test_lines_of_standard_input_are_messages(cli: Cli, topic: str, payload: tuple[str, ...]) -> None:
    cli("send", topic, *payload, given=b"one\n\nthree")
    assert payloads(cli, topic) == ["one", "", "three"]


class InterruptedStream(io.BytesIO):
    """Ctrl-C while the third line is waited for."""

    def __iter__(self) -> Iterator[bytes]:
        yield b"a\n"
        yield b"b\n"
        raise KeyboardInterrupt


def test_ctrl_c_says_how_many_messages_were_delivered(
    cli: Cli, topic: str, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(InterruptedStream()))
    assert run(["send", topic]) == 130
    created, said = f"created topic {topic} (1 partition)\n", f"interrupted: 2 messages were delivered to {topic}\n\n"
    assert capsysbinary.readouterr().err.decode() == created + said
    assert payloads(cli, topic) == ["a", "b"]


def test_ctrl_c_says_how_many_messages_may_not_be_delivered(
    cli: Cli, topic: str, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(InterruptedStream()))
    monkeypatch.setattr(Producer, "stats", lambda producer: {"messages": 0})
    assert run(["send", topic]) == 130
    created = f"created topic {topic} (1 partition)\n"
    said = f"interrupted: 0 messages were delivered to {topic}; 2 more may not be delivered\n\n"
    assert capsysbinary.readouterr().err.decode() == created + said


class StreamOverAnOutage(io.BytesIO):
    """Three lines; the broker is away when the second one is sent, until `after` was written."""

    def __init__(self, broker: LiveServer, shown: Shown, topic: str, after: str) -> None:
        super().__init__()
        self.broker, self.shown, self.topic, self.after = broker, shown, topic, after

    def __iter__(self) -> Iterator[bytes]:
        yield b"a\n"
        with Consumer(self.broker.address, topics=self.topic) as consumer:
            assert next(iter(consumer)).payload == b"a"
        self.broker.kill()
        yield b"b\n"
        self.wait()
        self.broker.start()
        yield b"c\n"

    def wait(self) -> None:
        self.shown.wait_for(self.after)


@pytest.mark.parametrize("options", [[], ["--json", "--lines", "-"]], ids=["people", "programs"])
def test_a_lost_connection_and_its_return_are_printed_once_each(
    own_broker: LiveServer, shown: Shown, topic: str, options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = f"tfmq: no connection to the broker at {own_broker.address}, trying again; stop with Ctrl-C\n"
    with Admin(own_broker.address) as admin:
        admin.create_topic(topic)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(StreamOverAnOutage(own_broker, shown, topic, lost)))
    assert run(["send", topic, *options, "--servers", own_broker.address]) == 0
    shown.read()
    lines = shown.err.splitlines(keepends=True)
    assert lines[:2] == [lost, f"tfmq: connected to the broker at {own_broker.address} again\n"]
    if options:
        assert lines[2:] == [] and json.loads(shown.out)["count"] == 3
    else:
        assert lines[2:] == [f"sent 3 messages to {topic} (synced)\n"] and shown.out == b""


class StreamAfterAnOutage(StreamOverAnOutage):
    """The line after the outage comes when the message before has failed."""

    def __iter__(self) -> Iterator[bytes]:
        yield from super().__iter__()
        raise AssertionError("no more is read")

    def wait(self) -> None:
        time.sleep(3 * SHORT_TIMEOUT)


def test_nothing_is_read_or_sent_after_a_message_that_could_not_be_delivered(
    own_broker: LiveServer, shown: Shown, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tfmq.producer.Producer", partial(Producer, timeout=SHORT_TIMEOUT))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(StreamAfterAnOutage(own_broker, shown, topic, "")))
    assert run(["send", topic, "--servers", own_broker.address]) in (1, 3)  # the last error of "b" may be its timeout
    assert run(["read", topic, "--servers", own_broker.address]) == 0
    shown.read()
    assert "tfmq: reading stopped after 2 messages, because some could not be delivered\n" in shown.err
    assert shown.out == b"a\n"


def test_nul_may_end_messages(cli: Cli, topic: str) -> None:
    cli("send", topic, "-0", given=b"one\ntwo\0three\0")
    assert [row["payload"] for row in cli("read", topic, "--json").objects] == ["one\ntwo", "three"]


def test_a_file_is_one_message_or_many_lines(cli: Cli, topic: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"a\nb\n\xff\n")
    cli("send", topic, "-f", str(file))
    cli("send", topic, "--lines", str(file))
    rows = cli("read", topic, "--json").objects
    assert base64.b64decode(rows[0]["payload_base64"]) == b"a\nb\n\xff\n"
    assert [row.get("payload") for row in rows[1:]] == ["a", "b", None]
    assert cli("send", topic, "x", "-f", str(file)).code == 2
    assert cli("send", topic, "-f", str(tmp_path / "none")).code == 2


def test_key_tag_and_properties_travel(cli: Cli, topic: str) -> None:
    cli("send", topic, "x", "-k", "42", "-t", "new", "--property", "a=1", "--property", "b=2=3")
    (row,) = cli("read", topic, "--json").objects
    assert (row["key"], row["tag"], row["properties"]) == ("42", "new", {"a": "1", "b": "2=3"})


@pytest.mark.parametrize(
    "line",
    [
        "no json",
        "[]",
        "7",
        "{}",
        '{"payload": 7}',
        '{"payload": "\\ud800"}',
        '{"payload": "x", "properties": {"n": 1}}',
        '{"payload": "x", "properties": [1]}',
        '{"payload": "x", "tag": 3}',
        '{"payload": "x", "key": 3}',
        '{"payload_base64": "***"}',
        '{"payload": "x", "delay": 5}',
        '{"payload": "x", "partition": 5}',
        '{"payload": "x", "propertis": {}}',
        '{"payload": "x", "offset": 5, "delay": 5}',
    ],
)
def test_what_read_did_not_print_is_refused_with_its_line(cli: Cli, topic: str, line: str) -> None:
    good = json.dumps({"payload": "first"})
    ran = cli("send", "refused", "--json", given=f"{good}\n{line}\n".encode())
    assert ran.code == 2
    assert "line 2" in ran.err and "1 message sent before it" in ran.err


def test_a_field_that_is_not_used_names_the_option() -> None:
    with pytest.raises(TypeError, match="'partition' is not used: say --partition, which is for all messages"):
        message_of({"payload": "x", "partition": 1}, SharedOptions(None, None, {}, None, None, None))
    printed = {"payload": "x", "partition": 1, "offset": 0, "ordinal": 0, "appended_at": "2026-11-22T15:05:54Z"}
    assert message_of(printed, SharedOptions(None, None, {}, None, None, None)).partition is None


def test_a_delay_or_a_time_goes_with_every_message() -> None:
    later = SharedOptions("k", None, {}, None, 30.0, None)
    assert later.make_message(b"x").delay == 30.0 and later.make_message(b"x").deliver_at is None
    assert message_of({"payload": "x"}, later).delay == 30.0
    at = datetime(2027, 1, 1, tzinfo=UTC)
    assert message_of({"payload": "x"}, SharedOptions(None, None, {}, None, None, at)).deliver_at == at


def test_what_was_sent_for_later_is_reported_with_its_time_and_handle(capsys: pytest.CaptureFixture[str]) -> None:
    handle = format_handle(Handle(7, 8, 1_900_000_000_000, 9))
    result = SendResult("orders", 2, None, 5, "synced", delayed=handle)
    print_result(Output(None, json=False, quiet=False), "orders", 1, result)
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("sent to orders, partition 2, due 2030-03-1") and "(synced)" in first
    assert second.endswith(handle)
    print_result(Output(None, json=True, quiet=False), "orders", 1, result)
    row = json.loads(capsys.readouterr().out)
    assert (row["delayed"], row["due_ms"], row["offset"]) == (handle, 1_900_000_000_000, None)
    print_result(Output(None, json=False, quiet=False), "orders", 3, result)
    assert "tfmq delay list --topic orders" in capsys.readouterr().err
    print_result(Output(None, json=False, quiet=False), "orders", 1, result._replace(delayed=None), True)
    assert "no handle" in (reported := capsys.readouterr().err) and "None" not in reported


def test_a_time_that_is_over_is_reported(cli: Cli, topic: str) -> None:
    ran = cli("send", topic, "x", "--at", "2021-01-01")
    assert ran.code == 0 and "2021-01-01 00:00:00 " in ran.err and " is in the past" in ran.err
    assert "is over" not in cli("send", topic, "x", "--at", "+1h").err


def test_programs_get_the_handles_of_several_that_wait(cli: Cli, topic: str) -> None:
    row = cli("send", topic, "a", "b", "c", "--delay", "1h", "--json").json
    assert row["count"] == 3 and len(set(row["delayed"])) == 3
    assert cli("delay", "cancel", *row["delayed"], "--json").json == [
        {"handle": handle, "state": "cancelled"} for handle in row["delayed"]
    ]
    assert "delayed" not in cli("send", topic, "a", "b", "--json").json


@pytest.mark.parametrize(
    "when",
    [
        ["--delay", "soon"],
        ["--delay", "-3s"],
        ["--delay", "36526d"],
        ["--delay", "99999999d"],
        ["--at", "tomorrow"],
        ["--at", ""],
        ["--delay", "3s", "--at", "2027-01-01T00:00Z"],
    ],
)
def test_a_time_that_is_none_is_wrong_usage(offline: Cli, when: list[str]) -> None:
    ran = offline("send", "orders", "x", *when)
    assert (ran.code, ran.out) == (2, b"")
    assert "deliver_at" not in ran.err
    assert ("for a later time say --at" in ran.err) == ("d" in when[1])


def test_wrong_words_are_wrong_usage(cli: Cli, topic: str) -> None:
    for arguments in (
        ["send"],
        ["send", "a/b", "x"],
        ["send", topic, "x", "--property", "novalue"],
        ["send", topic, "x", "--acks", "perhaps"],
        ["send", topic, "x", "--partition", "-1"],
        ["send", topic, "x", "--servers", "nonsense:port"],
        ["send", topic, "x", "-k", "\udcff"],
    ):
        ran = cli(*arguments)
        assert (ran.code, ran.out) == (2, b""), arguments
        assert "Traceback" not in ran.err
    assert cli("send", topic, "x", "--partition", "9").code == 1


def test_pieces_come_as_they_arrive() -> None:
    assert list(split_stream(io.BytesIO(b"a\nb\n\nc"), b"\n")) == [b"a", b"b", b"", b"c"]
    assert list(split_stream(io.BytesIO(b"a\0b\0\0c"), b"\0")) == [b"a", b"b", b"", b"c"]
    assert list(split_stream(io.BytesIO(b""), b"\0")) == []


def test_lines_without_a_key_go_to_all_partitions_and_those_of_a_key_to_one(cli: Cli, topic: str) -> None:
    cli("topic", "create", topic, "--partitions", "3")
    cli("send", topic, given=b"".join(b"%d\n" % number for number in range(30)))
    rows = cli("read", topic, "--json").objects
    assert Counter(row["partition"] for row in rows) == {0: 10, 1: 10, 2: 10}
    cli("send", topic, "-k", "42", "-t", "keyed", given=b"a\nb\nc\n")
    rows = cli("read", topic, "--json", "--tag", "keyed").objects
    assert [row["payload"] for row in rows] == ["a", "b", "c"]
    assert len({row["partition"] for row in rows}) == 1


def test_lines_of_standard_input_can_be_sent_with_json_as_output(cli: Cli, topic: str) -> None:
    ran = cli("send", topic, "--json", "--lines", "-", given=b"one\ntwo\n")
    assert (ran.code, ran.json["count"]) == (0, 2)
    assert cli("read", topic).out == b"one\ntwo\n"
    refused = cli("send", topic, "--json", given=b"one\n")
    assert refused.code == 2 and "for plain lines, and JSON as output, say --lines -" in refused.err
