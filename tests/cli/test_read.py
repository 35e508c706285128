"""`tfmq read`: up to the present end, by place, count, tag and group, in every form."""

import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from journal.filenames import segment_name
from journal.fsck.log_repair import repair
from journal.log.checkpoint import read_log_id
from journal.log.log import Log
from journal.record.batch import succession_source
from journal.record.block_trailer import TRAILER_SIZE
from tests.cli.conftest import Cli, Shown
from tfmq.broker.data_repair import repair_data
from tfmq.cli.main import run
from tfmq.cli.output import CONNECTION_CHECK_SECONDS, Output, time_text
from tfmq.cli.read import escape_controls, fill_template, make_formatter
from tfmq.client.consumer.message import Origin, make_message
from tfmq.consumer import Consumer
from tfmq.message import Ordinal, encode_attribute
from tfmq.producer import Producer
from tfmq.testing.broker import SimulatedBroker
from tools.rigs.live_server import LiveServer


def test_it_ends_at_the_present_end(cli: Cli, topic: str) -> None:
    cli("send", topic, "a", "b", "c")
    assert cli("read", topic) == (0, b"a\nb\nc\n", "")
    assert cli("read", topic, "-n", "2").out == b"a\nb\n"
    assert cli("read", topic, "--from", "latest").out == b""
    assert cli("read", topic, "--from", "-1h").out == b"a\nb\nc\n"


def test_with_standby_the_primary_serves_too_and_no_group_is_read(cli: Cli, topic: str) -> None:
    cli("send", topic, "a", "b")
    assert cli("read", topic, "--standby") == (0, b"a\nb\n", "")
    assert cli("read", topic, "--standby", "--partition", "9").code == 1
    assert "There is no topic" in cli("read", f"{topic}x", "--standby").err
    refused = cli("read", topic, "--standby", "-g", "readers")
    assert refused.code == 2 and "--standby reads without a group" in refused.err


def test_an_empty_topic_has_nothing_to_read(cli: Cli, topic: str) -> None:
    cli("topic", "create", topic, "--partitions", "3")
    assert cli("read", topic) == (0, b"", "")


def test_what_is_written_and_not_fsynced_is_fsynced_and_read(cli: Cli, topic: str) -> None:
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
    wrong = cli("read", topic, "--partition", "1", "--from", str(offset + 7))
    assert wrong.code == 1 and f"No message of {topic}-1 starts at offset {offset + 7}" in wrong.err
    assert f"the one before it starts at {offset}: --from {offset}." in wrong.err and "seek" not in wrong.err
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


def test_where_a_group_has_an_offset_it_is_said_that_from_is_not_used(cli: Cli, topic: str) -> None:
    cli("send", topic, *"ab")
    first = cli("read", topic, "-g", topic, "-n", "1", "--from", "earliest")
    assert (first.out, first.err) == (b"a\n", "")
    assert cli("read", topic, "-g", topic, "-n", "1").err == ""
    again = cli("read", topic, "-g", topic, "--from", "earliest")
    assert (again.code, again.out, again.err.count("\n")) == (0, b"", 1)
    assert f"--from is not used where the group {topic} has an offset" in again.err
    assert f"tfmq group reset {topic} {topic} --to" in again.err
    assert cli("read", topic, "-g", topic, "--from", "earliest", "-q").err == ""


@pytest.mark.parametrize("quiet", [False, True])
def test_a_lost_connection_and_its_return_are_printed_once_each(
    own_broker: LiveServer, shown: Shown, topic: str, quiet: bool
) -> None:
    address = own_broker.address
    with Producer(address) as producer:
        producer.send(topic, b"before").result()
    lost = f"tfmq: no connection to the broker at {address}, trying again; stop with Ctrl-C\n"

    def interrupt() -> None:
        shown.wait_for("before")
        own_broker.kill()
        if quiet:
            time.sleep(4 * CONNECTION_CHECK_SECONDS)
        else:
            shown.wait_for(lost)
        own_broker.start()
        with Producer(address) as producer:
            producer.send(topic, b"after").result()

    with ThreadPoolExecutor(1) as executor:
        outage = executor.submit(interrupt)
        options = ["-q"] if quiet else []
        assert run(["read", topic, "--follow", "-n", "2", "--servers", address, *options]) == 0
        outage.result()
    shown.read()
    assert shown.out == b"before\nafter\n"
    assert shown.err == ("" if quiet else f"{lost}tfmq: connected to the broker at {address} again\n")


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
    assert all(re.fullmatch(r"[-0-9]+T[:0-9]+\.\d{3}\+00:00", first[name]) for name in ("born_at", "appended_at"))
    assert (first["payload_base64"], first["key_base64"], first["key"]) == ("/wA=", "/g==", None)
    assert (second["payload"], second["key"], second["ordinal"]) == (None, "gone", 1)


OUTPUT = Output(None, False, False)
MESSAGE = make_message(
    b"pay\xffload", "orders", 3, 10, 20, 7, 0x1000001, encode_attribute(0, "k", "t", {"a": "1"}), Origin(1, 0, 1, None)
)


@pytest.mark.parametrize(
    ("template", "line"),
    [
        ("%s", b"pay\xffload"),
        ("%k %t %o %O %p %P", b"k t 10 7 3 a=1"),
        ("%i", b"0000000001000001"),
        ("%T", time_text(0, exact=True).encode()),
        ("100%% %k", b"100% k"),
        ("\udcff%%", b"\xff%"),
        ("", b""),
    ],
)
def test_a_template_is_filled_in(template: str, line: bytes) -> None:
    assert fill_template(template, MESSAGE) == line


def test_no_message_steers_a_terminal() -> None:
    message = MESSAGE._replace(payload=b"\x1b[2J\a\r\x7f\xc2\x9b\tp\xc3\xa9\n")
    shown = rb"\x1b[2J\x07\x0d\x7f\x9b" + b"\tp\xc3\xa9\n"
    assert make_formatter(OUTPUT, None, escape_controls)(message) == shown + b"\n"
    assert make_formatter(OUTPUT, "\x1b[1m%k %s", escape_controls)(message) == b"\x1b[1m" + b"k " + shown + b"\n"
    assert make_formatter(OUTPUT, None)(message) == b"\x1b[2J\a\r\x7f\xc2\x9b\tp\xc3\xa9\n\n", (
        "in a pipe every byte is as it is"
    )


def test_a_template_is_a_line_a_message(cli: Cli, topic: str) -> None:
    cli("send", topic, "a", "b", "-k", "7")
    assert cli("read", topic, "--format", "%k:%s").out == b"7:a\n7:b\n"


# Partitions whose last messages cannot be read, or that end in what is no message


@pytest.fixture
def simulated(offline: Cli, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedBroker]:
    """A broker in this process, which `offline` reaches, with blocks of one message in two partitions."""
    with SimulatedBroker() as broker:
        monkeypatch.setenv("TFMQ_SERVERS", broker.servers)
        broker.admin().create_topic("orders", partitions=2)
        with broker.producer() as producer:
            for n in range(8):
                producer.send("orders", f"{n}", partition=n // 4, tag=f"t{n}")
        yield broker


def folder_of(partition: int) -> str:
    return f"/data/orders-{partition}"


def damage_last_block(broker: SimulatedBroker, partition: int, spot: str) -> None:
    """Of a stopped broker."""
    path = f"{folder_of(partition)}/{segment_name(0)}"
    size = broker.disk.size(path)
    with_one = Log.open(broker.disk, folder_of(partition), log_id=log_id_of(broker, partition), clock=broker.clock)
    start = with_one.offset_of_ordinal(with_one.end_ordinal - 1)[0]
    with_one.close()
    place = {"header": start + 2, "payload": start + 25, "trailer": size - TRAILER_SIZE + 40}[spot]
    broker.disk.damage(path, place, bytes([broker.disk.read_file(path)[place] ^ 0x10]))


def log_id_of(broker: SimulatedBroker, partition: int) -> int:
    found = read_log_id(broker.disk, folder_of(partition))
    assert found is not None
    return found


WAYS = {
    "all": ([], "0 1 2 4 5 6 7"),
    "one partition": (["--partition", "0"], "0 1 2"),
    "more than there is": (["-n", "100"], "0 1 2 4 5 6 7"),
    "a group": (["-g", "billing"], "0 1 2 4 5 6 7"),
    "a tag": (["--tag", "t1"], "1"),
    "a tag of what is damaged": (["--tag", "t3"], ""),
    "a tag of nothing": (["--tag", "none"], ""),
    "a time": (["--from", "2000-01-01T00:00:00Z"], "0 1 2 4 5 6 7"),
    "JSON": (["--json", "--partition", "0"], None),
}


@pytest.mark.timeout(30)
@pytest.mark.parametrize("spot", ["header", "payload", "trailer"])
@pytest.mark.parametrize("way", WAYS)
def test_it_ends_where_the_last_block_is_damaged(
    offline: Cli, simulated: SimulatedBroker, way: str, spot: str, caplog: pytest.LogCaptureFixture
) -> None:
    options, expected = WAYS[way]
    simulated.stop()
    damage_last_block(simulated, 0, spot)
    simulated.start()
    ran = offline("read", "orders", *options)
    assert ran.code == 4
    assert caplog.text.count("Skipped offsets") == 1
    if expected is not None:
        assert sorted(ran.lines) == expected.split()
    if way == "a group":
        assert offline("read", "orders", *options) == (0, b"", ""), "the group is past the damage"


@pytest.mark.timeout(30)
@pytest.mark.parametrize("options", [[], ["-g", "billing"], ["--tag", "none"]])
def test_it_ends_where_every_partition_ends_in_damage(
    offline: Cli, simulated: SimulatedBroker, options: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    simulated.stop()
    damage_last_block(simulated, 0, "payload")
    damage_last_block(simulated, 1, "trailer")
    simulated.start()
    ran = offline("read", "orders", *options)
    assert (ran.code, caplog.text.count("Skipped offsets")) == (4, 2)


def close_a_producer(broker: SimulatedBroker) -> None:
    """The partition ends in a block trailer without records."""
    log = Log.open(broker.disk, folder_of(0), log_id=log_id_of(broker, 0), clock=broker.clock)
    log.append_control(succession_source(77, 78, -1))
    log.close()


def mend(broker: SimulatedBroker) -> None:
    """The partition ends in a filler."""
    damage_last_block(broker, 0, "payload")
    (repaired,) = repair(broker.disk, folder_of(0))
    assert (repaired.kept, repaired.lost) == (0, 1)


@pytest.mark.timeout(30)
@pytest.mark.parametrize(("change", "rest"), [(close_a_producer, "3 "), (mend, "")])
@pytest.mark.parametrize("options", [[], ["-n", "100"], ["-g", "billing"]])
def test_it_ends_where_no_message_is_last(
    offline: Cli, simulated: SimulatedBroker, change: Callable[[SimulatedBroker], None], rest: str, options: list[str]
) -> None:
    simulated.stop()
    change(simulated)
    simulated.start()
    ran = offline("read", "orders", *options)
    assert (ran.code, sorted(ran.lines)) == (0, f"0 1 2 {rest}4 5 6 7".split())
    assert offline("read", "orders", "--tag", "none") == (0, b"", "")


def shown_lags(offline: Cli) -> tuple[object, object, list[object]]:
    """The lag of the only group: in the list, in the summary, and of its partitions."""
    (row,) = offline("group", "list", "--json").json
    found = offline("group", "show", "billing", "--json").json
    return row["lag"], found["lag"], [each["lag"] for each in found["offsets"]]


@pytest.mark.timeout(30)
@pytest.mark.parametrize("options", [[], ["--tag", "red"], "stop", "skip"])
def test_a_group_inside_a_lost_file_has_no_known_lag_and_continues_after_the_repaired_range(
    offline: Cli, simulated: SimulatedBroker, options: list[str] | str
) -> None:
    admin, folder = simulated.admin(), "/data/bills-0"
    admin.create_topic("bills", partitions=2, settings={"log.segment_bytes": 1 << 16})
    with simulated.producer() as producer:
        for n in range(15):
            producer.send("bills", f"{n}".ljust(15000, "."), partition=0, tag="red").result()
        producer.send("bills", "other", partition=1, tag="red").result()
    bases = sorted(int(n.split(".")[0]) for n in simulated.disk.list(folder) if n.endswith(".zxQueue"))
    saved = admin.reset_group("billing", "bills", Ordinal(6), 0, create=True)[0]
    admin.reset_group("billing", "bills", "earliest", 1)
    assert bases[1] < saved < bases[2] and len(bases) > 2
    assert shown_lags(offline) == (10, 10, [9, 1])
    simulated.stop()
    simulated.disk.unlink(f"{folder}/{segment_name(bases[1])}")
    simulated.start()
    assert shown_lags(offline) == (None, None, [None, 1])
    assert offline("group", "list").out.split()[-1] == b"-"
    assert offline("group", "show", "billing").out.split(b"lag")[1].split()[0] == b"-"
    simulated.stop()
    (repaired,) = (each for each in repair_data(simulated.disk, "/data").logs if each.lost)
    simulated.start()
    rest = 15 - 4 - repaired.lost
    assert shown_lags(offline) == (rest + 1, rest + 1, [rest, 1])
    if isinstance(options, str):
        with simulated.consumer("bills", group="billing", on_damage=options) as consumer:
            lines = [each.text for each in simulated.drain(consumer)]
            assert consumer.lag() == 0 and not consumer.stats()["skipped"]
    else:
        ran = offline("read", "bills", "-g", "billing", *options)
        lines = ran.lines
        assert (ran.code, ran.err) == (0, "")
    assert {line.strip(".") for line in lines} == {*map(str, range(15 - rest, 15)), "other"}
    assert shown_lags(offline) == (0, 0, [0, 0])


@pytest.mark.timeout(30)
def test_a_lag_after_damage_at_the_end_is_none(simulated: SimulatedBroker) -> None:
    simulated.stop()
    damage_last_block(simulated, 0, "payload")
    simulated.start()
    with simulated.consumer("orders", on_damage="skip") as consumer:
        assert len(simulated.drain(consumer)) == 7
        assert consumer.lag() == 0


def lose_the_folder(broker: SimulatedBroker) -> None:
    broker.disk.rename(folder_of(0), "/elsewhere")


def put_a_file_there(broker: SimulatedBroker) -> None:
    lose_the_folder(broker)
    broker.disk.write_file(folder_of(0), b"")


@pytest.mark.timeout(30)
@pytest.mark.parametrize("options", [[], ["-g", "billing"]])
@pytest.mark.parametrize(
    ("change", "reason"), [(lose_the_folder, "its folder was gone"), (put_a_file_there, "a folder belongs there")]
)
def test_a_partition_that_cannot_be_read_is_named_after_the_rest_and_is_exit_code_1(
    offline: Cli, simulated: SimulatedBroker, change: Callable[[SimulatedBroker], None], reason: str, options: list[str]
) -> None:
    simulated.stop()
    change(simulated)
    simulated.start()
    ran = offline("read", "orders", *options)
    assert (ran.code, sorted(ran.lines)) == (1, "4 5 6 7".split())
    assert ran.err.startswith("tfmq: orders-0 is ") and reason in ran.err
    assert offline("read", "orders", "--partition", "1").code == 0
    alone = offline("read", "orders", "--partition", "0")
    assert (alone.code, alone.out) == (1, b"") and reason in alone.err


@pytest.mark.parametrize("change", [lose_the_folder, put_a_file_there])
def test_a_resumption_says_what_it_gives_up_or_why_nothing_was_resumed(
    offline: Cli, simulated: SimulatedBroker, change: Callable[[SimulatedBroker], None]
) -> None:
    simulated.stop()
    change(simulated)
    simulated.start()
    (listed,) = offline("topic", "list", "--json").json
    assert (listed["state"], listed["states"]) == ("stopped, open", {"stopped": 1, "open": 1})
    ran = offline("topic", "resume", "orders")
    if change is lose_the_folder:
        assert ran.code == 0 and "orders-0 is empty now" in ran.err
        assert offline("read", "orders").code == 0
    else:
        assert ran.code == 1 and "orders-0 is still stopped" in ran.err and "a folder belongs there" in ran.err


@pytest.mark.parametrize(("template", "letter"), [("%z", "%z"), ("%k%", "%"), ("%%%y", "%y"), ("a % b", "% ")])
def test_an_unknown_letter_of_a_template_is_wrong_usage_before_anything_is_read(
    offline: Cli, template: str, letter: str
) -> None:
    ran = offline("read", "orders", "--format", template)
    assert ran.code == 2 and f"--format has no {letter}: it has %s %k" in ran.err and ran.out == b""
