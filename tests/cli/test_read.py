"""`tfmq read`: up to the present end, by place, count, tag and group, in every form."""

import pytest

from tests.cli.conftest import Cli
from tfmq.cli.output import time_text
from tfmq.cli.read import filled
from tfmq.client.received import Origin, ReceivedMessage
from tfmq.consumer import Consumer
from tfmq.message import encode_attribute
from tfmq.producer import Producer
from tools.rigs.live_server import LiveServer


def test_it_ends_at_the_present_end(cli: Cli, topic: str) -> None:
    cli("send", topic, "a", "b", "c")
    assert cli("read", topic) == (0, b"a\nb\nc\n", "")
    assert cli("read", topic, "-n", "2").out == b"a\nb\n"
    assert cli("read", topic, "--from", "latest").out == b""
    assert cli("read", topic, "--from", "-1h").out == b"a\nb\nc\n"


def test_an_empty_topic_has_nothing_to_read(cli: Cli, topic: str) -> None:
    cli("topic", "create", topic, "--partitions", "3")
    assert cli("read", topic) == (0, b"", "")


def test_what_is_written_and_not_forced_is_forced_and_read(cli: Cli, topic: str) -> None:
    cli("send", topic, "a", "--acks", "written")
    assert cli("read", topic).out == b"a\n"


def test_partitions_offsets_and_places_that_are_not_there(cli: Cli, topic: str) -> None:
    cli("topic", "create", topic, "--partitions", "2")
    for partition in ("0", "1"):
        cli("send", topic, f"in {partition}", "--partition", partition)
    assert cli("read", topic, "--partition", "1").out == b"in 1\n"
    offset = cli("read", topic, "--partition", "1", "--json").objects[0]["offset"]
    assert cli("read", topic, "--partition", "1", "--from", str(offset)).out == b"in 1\n"
    assert cli("read", topic, "--partition", "2").code == 1
    assert cli("read", topic, "--partition", "1", "--from", "7").code == 1
    assert cli("read", topic, "--partition", "1", "--from", "99999").code == 1
    assert cli("read", topic, "--from", "0").code == 2
    assert cli("read", topic, "--from", "yesterday").code == 2


def test_a_missing_topic_is_not_made_and_gets_a_hint(cli: Cli, topic: str) -> None:
    cli("send", "greetings", "hello")
    for follow in ([], ["--follow"]):
        ran = cli("read", "greeting", *follow)
        assert (ran.code, ran.out) == (1, b"")
        assert ran.err == "tfmq: There is no topic 'greeting'. Did you mean 'greetings'?\n"


def test_a_group_goes_on_where_it_was_and_loses_nothing(cli: Cli, topic: str, broker: LiveServer) -> None:
    cli("send", topic, *"abcdef")
    assert cli("read", topic, "-g", topic, "-n", "2").out == b"a\nb\n"
    assert cli("read", topic, "-g", topic, "-n", "3").out == b"c\nd\ne\n"
    with Consumer(broker.address, topics=topic, group=topic):
        assert cli("read", topic, "-g", topic, "-n", "1").code == 0
    assert cli("read", topic, "-g", topic).out == b""


def test_tags_choose(cli: Cli, topic: str) -> None:
    cli("send", topic, "a", "-t", "old")
    cli("send", topic, "b", "-t", "new")
    assert cli("read", topic, "-t", "new").out == b"b\n"
    assert cli("read", topic, "-t", "none").out == b""


def test_json_has_the_words_of_the_page(cli: Cli, topic: str, broker: LiveServer) -> None:
    with Producer(broker.address) as producer:
        producer.send(topic, b"\xff\x00", key=b"\xfe", tag="t", properties={"p": "v"})
        producer.send(topic, None, key="gone")
    first, second = cli("read", topic, "--json").objects
    assert list(first) == [
        *("topic", "partition", "offset", "ordinal", "id", "key", "tag", "properties", "born_at"),
        *("appended_at", "key_base64", "payload_base64"),
    ]
    assert (first["payload_base64"], first["key_base64"], first["key"]) == ("/wA=", "/g==", None)
    assert (second["payload"], second["key"], second["ordinal"]) == (None, "gone", 1)


MESSAGE = ReceivedMessage(
    b"pay\xffload",
    "orders",
    3,
    10,
    20,
    7,
    0x1000001,
    encode_attribute(0, "k", "t", {"a": "1"}),
    Origin(1, 0, 1, None),
)


@pytest.mark.parametrize(
    ("template", "line"),
    [
        ("%s", b"pay\xffload"),
        ("%k %t %o %O %p %P", b"k t 10 7 3 a=1"),
        ("%i", b"0000000001000001"),
        ("%T", time_text(0, exact=True).encode()),
        ("100%% %x", b"100% %x"),
        ("\udcff%", b"\xff%"),
        ("", b""),
    ],
)
def test_a_template_is_filled_in(template: str, line: bytes) -> None:
    assert filled(template, MESSAGE) == line


def test_a_template_is_a_line_a_message(cli: Cli, topic: str) -> None:
    cli("send", topic, "a", "b", "-k", "7")
    assert cli("read", topic, "--format", "%k:%s").out == b"7:a\n7:b\n"
