"""`tfmq send`: arguments, files and standard input become messages."""

import base64
import io
import json
from pathlib import Path

import pytest

from tests.cli.conftest import Cli
from tfmq.cli.send import split


def payloads(cli: Cli, topic: str) -> list[str]:
    return cli("read", topic).lines


def test_arguments_are_messages_and_the_answer_says_where(cli: Cli, topic: str) -> None:
    assert cli("send", topic, "hello").err == f"sent to {topic}, partition 0, offset 0 (synced)\n"
    assert cli("send", topic, "a", "b").err == f"sent 2 messages to {topic} (synced)\n"
    assert cli("send", topic, "c", "--quiet") == (0, b"", "")
    told = cli("send", topic, "d", "--acks", "written", "--json").json
    assert (told["topic"], told["count"], told["durability"], told["partition"]) == (topic, 1, "written", 0)
    assert payloads(cli, topic) == ["hello", "a", "b", "c", "d"]


def test_lines_of_standard_input_are_messages(cli: Cli, topic: str) -> None:
    cli("send", topic, given=b"one\n\nthree")
    assert payloads(cli, topic) == ["one", "", "three"]


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
    ],
)
def test_what_read_did_not_print_is_refused_with_its_line(cli: Cli, topic: str, line: str) -> None:
    good = json.dumps({"payload": "first"})
    ran = cli("send", "refused", "--json", given=f"{good}\n{line}\n".encode())
    assert ran.code == 2
    assert "line 2" in ran.err


def test_later_releases_things_are_refused(cli: Cli, topic: str) -> None:
    ran = cli("send", topic, "x", "--delay", "30s")
    assert ran.code == 1
    assert "later" in ran.err or "not part of this release" in ran.err
    assert cli("send", topic, "x", "--delay", "soon").code == 2


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
    assert list(split(io.BytesIO(b"a\nb\n\nc"), b"\n")) == [b"a", b"b", b"", b"c"]
    assert list(split(io.BytesIO(b"a\0b\0\0c"), b"\0")) == [b"a", b"b", b"", b"c"]
    assert list(split(io.BytesIO(b""), b"\0")) == []
