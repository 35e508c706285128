"""Every command in a real terminal of 80, 100 and 120 columns: no line has a progress bar and anything else, and the
lists break no word.
"""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Iterator, Mapping
from datetime import datetime
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import click
import pytest

import tfmq
from journal import Log, RealDisk, SystemClock
from journal.record.format import make_log_id
from tests.cli.terminal import Shown, in_terminal
from tests.dead_letters.test_store import keeping
from tests.replication.objects import HookedStore, Primary, copy_to_folder
from tfmq.access.rights import Rights
from tfmq.access.scram import make_keys
from tfmq.access.users import User, save_users
from tfmq.cli.main import commands
from tfmq.cli.output import time_text
from tfmq.dead_letters.sql_store import BlockingSqlStore
from tfmq.dead_letters.store import StoreAddress
from tools.rigs.live_server import LiveServer

ISO = re.compile(r"\d{4}-\d\d-\d\dT.*")
WIDTHS = (80, 100, 120)
NUMBERS = count(1)
"""Each test has names of its own, on one broker."""
WORKER = """
import tfmq
consumer = tfmq.Consumer(topics="{topic}", group="worker-{own}", dead_letters=None)
@consumer.on("{topic}")
def handle(message):
    print("worked")
    consumer.stop()
"""

CASES: Mapping[str, str] = {
    "send": "send {topic} hello goodbye",
    "read": "read {topic}",
    "run": "run worker_{own}:consumer",
    "trace": "trace {topic}/0/0",
    "topic list": "topic list",
    "topic create": "topic create spare-{own}",
    "topic show": "topic show {topic}",
    "topic grow": "topic grow spare-{own} 2",
    "topic resume": "topic resume {topic}",
    "topic set": "topic set spare-{own} retention.seconds=7d",
    "topic purge": "topic purge spare-{own} --yes",
    "topic delete": "topic delete spare-{own} --yes",
    "group list": "group list",
    "group show": "group show {group}",
    "group reset": "group reset {group} {topic} --to earliest",
    "group delete": "group delete {group} --yes",
    "tx list": "tx list",
    "tx show": "tx show commit-{own}",
    "tx commit": "tx commit commit-{own} --yes",
    "tx rollback": "tx rollback rollback-{own} --yes",
    "tx forget": "tx forget commit-{own}",
    "tx groups": "tx groups",
    "tx forget-group": "tx forget-group nobody --yes",
    "delay list": "delay list",
    "delay show": "delay show {handle}",
    "delay histogram": "delay histogram",
    "delay reschedule": "delay reschedule {handle} --delay 2h",
    "delay cancel": "delay cancel {other_handle}",
    "schedule add": "schedule add @daily {topic} go --name daily-{own} --timezone America/New_York",
    "schedule list": "schedule list",
    "schedule show": "schedule show daily-{own}",
    "schedule run": "schedule run daily-{own}",
    "schedule pause": "schedule pause daily-{own}",
    "schedule resume": "schedule resume daily-{own}",
    "schedule remove": "schedule remove daily-{own}",
    "dlq list": "dlq list --store {store}",
    "dlq show": "dlq show {letter} --store {store}",
    "dlq export": "dlq export --store {store}",
    "dlq retry": "dlq retry {letter} --store {store}",
    "dlq redrive": "dlq redrive --store {store} --to {topic}",
    "dlq drop": "dlq drop --all --store {store}",
    "user list": "user list --file {users}",
    "user grant": "user grant shop read:orders --file {users}",
    "user revoke": "user revoke shop read:orders --file {users}",
    "user quota": "user quota shop --connections 5 --file {users}",
    "user remove": "user remove shop --file {users}",
    "log dump": "log dump {partition}",
    "log verify": "log verify {partition}",
    "log repair": "log repair {partition}",
    "replica status": "replica status",
    "replica promote": "replica promote",
    "replica verify": "replica verify {replica}",
    "replica snapshot": "replica snapshot {replica}",
    "replica restore": "replica restore {replica} restored-{own}",
    "status": "status",
    "bench": "bench --messages 1000 --topic bench-{own} --acks written",
    "completion": "completion bash",
}
"""Each command, in an order in which each finds what it needs."""
ASKING = {"user add", "user password"}
"""They ask for a password (tests/cli/test_user.py)."""
REFUSED = ("tx forget-group", "replica promote", "replica status")
"""Their errors are output too. The server of these tests has no replicas, so that `replica status` ends with 1."""
WITH_BAR = ("dlq redrive", "log verify", "replica verify", "replica snapshot", "replica restore", "bench")
"""They show a bar, which is gone before they print anything, if they take longer than `bar_after`."""


LISTS: Mapping[str, tuple[str, ...]] = {
    "topic list": ("topic", "state"),
    "topic show {topic}": ("partition", "state", "end_offset"),
    "group list": ("group",),
    "group show {group}": ("topic", "end_offset"),
    "tx list": ("xid", "state", "owner", "topics"),
    "delay list": ("handle", "topic", "key", "due"),
    "schedule list": ("name", "cron", "timezone", "topic", "next_run"),
    "dlq list --store {store}": ("id", "state", "group", "key", "error", "kept_at"),
}
"""Each list, and the keys of its JSON whose values a person should find in it, whole or at least word by word."""


def leaves(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[str]:
    """The commands of the tree that do something."""
    if not isinstance(command, click.Group):
        yield " ".join(path)
        return
    context = click.Context(command)
    for name in command.list_commands(context):
        found = command.get_command(context, name)
        assert found is not None
        if not found.hidden:
            yield from leaves(found, (*path, name))


def test_every_command_has_a_case() -> None:
    assert set(CASES) | ASKING == set(leaves(commands)), "a new command wants a line in CASES"


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """One of their own: what they leave there would be in the lists of other tests."""
    server = LiveServer(tmp_path_factory.mktemp("terminal") / "data")
    server.start()
    yield server
    server.stop()


@pytest.fixture
def names(broker: LiveServer, tmp_path: Path, request: pytest.FixtureRequest) -> dict[str, Any]:
    """What the commands need: messages, a group, transactions, delayed messages, dead letters, a partition on disk."""
    width, own = request.param, f"{request.param}x{next(NUMBERS)}"
    topic, group = f"orders-{own}", f"billing-of-the-northern-warehouse-{own}"
    with tfmq.Producer(broker.address) as producer:
        producer.send_many(topic, [b"message %d" % number for number in range(200)])
        producer.flush()
        for xid in (f"commit-{own}", f"rollback-{own}"):
            transaction = producer.begin(xid)
            transaction.send(topic, "in doubt")
            transaction.prepare()
        waiting = [producer.send(topic, "later", key="customer-42", delay=3600) for _ in range(2)]
        handles = [each.result().delayed for each in waiting]
    with tfmq.Admin(broker.address) as admin:
        node = admin.status()["node"]
        admin.reset_group(group, topic, "earliest", create=True)
    store = BlockingSqlStore(StoreAddress("path", str(tmp_path / "dead.db")))
    letters = [keeping(number, 1_795_000_000_000 + number, broker=node) for number in range(3)]
    store.apply(letters)
    store.close()
    partition = tmp_path / "orders-0"
    partition.mkdir()
    log = Log.open(RealDisk(), str(partition), log_id=make_log_id(1, 0), clock=SystemClock())
    log.append_payloads([b"message %03d" % number for number in range(9)])
    log.force()
    log.close()
    primary = Primary(HookedStore())
    primary.begin()
    primary.write_file("segment", b"bytes" * 1000)
    primary.snapshot()
    primary.write_file("segment", b"more", 5000)
    shop = User("shop", make_keys("a password", bytes), Rights([]))
    save_users(str(tmp_path / "users.json"), {"shop": shop})
    (tmp_path / f"worker_{own}.py").write_text(WORKER.format(topic=topic, own=own))
    return {
        "width": width,
        "own": own,
        "topic": topic,
        "group": group,
        "handle": handles[0],
        "other_handle": handles[1],
        "store": tmp_path / "dead.db",
        "letter": letters[0][0],
        "partition": partition,
        "users": tmp_path / "users.json",
        "replica": copy_to_folder(primary.store, tmp_path / "replica"),
    }


@pytest.fixture
def environment(broker: LiveServer, tmp_path: Path) -> dict[str, str]:
    found = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    return found | {
        "TFMQ_SERVERS": broker.address,
        "TERM": "xterm",
        "XDG_STATE_HOME": str(tmp_path),
        "PWD": str(tmp_path),
    }


@pytest.mark.long
@pytest.mark.timeout(600)  # some fifty processes, in order
@pytest.mark.parametrize("names", WIDTHS, indirect=True)
def test_no_command_shows_a_bar_and_its_output_on_one_line(names: dict[str, Any], environment: dict[str, str]) -> None:
    terminal = partial(in_terminal, columns=names["width"], environment=environment)
    shown: dict[str, Shown] = {}
    for command, line in CASES.items():
        shown[command] = terminal(line.format(**names).split())
    assert {name: each.screen for name, each in shown.items() if each.code and name not in REFUSED} == {}
    assert {name: each.mixed for name, each in shown.items() if each.mixed} == {}
    assert tuple(name for name, each in shown.items() if each.bars) == WITH_BAR
    for name, each in shown.items():
        assert each.sent.strip(), f"{name} said nothing"
        assert not any("━" in line for line in each.screen), f"{name} left its bar"
    assert "message 0" in shown["read"].seen and "message 199" in shown["read"].seen


@pytest.mark.parametrize("names", [80], indirect=True)
def test_no_list_breaks_a_word_a_number_or_a_time_at_80_columns(
    names: dict[str, Any], environment: dict[str, str]
) -> None:
    with tfmq.Admin(environment["TFMQ_SERVERS"]) as admin:
        admin.schedule("0 9 * * mon-fri", names["topic"], "go", name="report", timezone="America/New_York")
    missing = {}
    for line, keys in LISTS.items():
        command = line.format(**names).split()
        rows = json.loads(printed([*command, "--json"], environment))
        rows = rows if isinstance(rows, list) else rows.get("partitions") or rows["offsets"]
        shown = in_terminal(command, 80, environment)
        assert shown.code == 0 and rows, line
        words = {word.rstrip(",") for text in shown.seen for word in text.split()}
        wanted = {word for row in rows for key in keys for word in texts(row[key])}
        missing[line] = wanted - words
    assert {line: found for line, found in missing.items() if found} == {}


def printed(arguments: list[str], environment: dict[str, str]) -> str:
    """What it prints into a file."""
    path = Path(environment["PWD"]) / "printed"
    path.unlink(missing_ok=True)
    shown = in_terminal(arguments, 80, environment, output=str(path))
    assert shown.code == 0, shown.screen
    return path.read_text()


def texts(value: Any) -> list[str]:
    """A value of JSON as a list shows it, word by word."""
    if isinstance(value, list):
        return [word for each in value for word in texts(each)]
    if isinstance(value, int):
        return [f"{value:,}"]
    if ISO.fullmatch(value):
        moment = datetime.fromisoformat(value)  # in UTC, or that of a schedule, which is shown in its own zone
        return time_text(moment if moment.utcoffset() else round(moment.timestamp() * 1000)).split()
    return str(value).split()


@pytest.mark.parametrize("names", [80], indirect=True)
def test_what_goes_into_a_file_has_a_bar_on_the_terminal_and_only_messages_in_the_file(
    names: dict[str, Any], environment: dict[str, str]
) -> None:
    path = Path(environment["PWD"]) / "messages"
    shown = in_terminal(["read", names["topic"]], 80, environment, output=str(path))
    assert shown.bars and not shown.mixed
    assert path.read_text().splitlines() == [f"message {number}" for number in range(200)]
    followed = in_terminal(["read", names["topic"], "--follow", "-n", "3"], 80, environment, output=str(path))
    assert followed.code == 0 and not followed.bars, "it may wait for hours"


@pytest.mark.parametrize("names", [80], indirect=True)
def test_short_work_shows_no_bar(names: dict[str, Any], environment: dict[str, str]) -> None:
    lines = Path(environment["PWD"]) / "lines"
    lines.write_text("one\ntwo\n")
    for line in (f"send {names['topic']} --lines {lines}", f"log verify {names['partition']}"):
        shown = in_terminal(line.split(), 80, environment, bar_after=60)
        assert shown.code == 0 and not shown.bars
    shown = in_terminal(["send", names["topic"], "one"], 80, environment)
    assert shown.code == 0 and not shown.bars, "one message"


def test_who_types_messages_gets_a_hint_and_sees_them_alone(environment: dict[str, str]) -> None:
    topic = "typed"
    typed = (("Ctrl-D", "first line\n"), ("first line", "second\n"), ("second", "\x04"))
    shown = in_terminal(["send", topic], 80, environment, typed)
    assert shown.code == 0 and not shown.bars
    created = f"created topic {topic} (1 partition)"
    assert created in shown.screen, "before or after the second line is typed"
    assert [line for line in shown.screen if line and line != created] == [
        "type the messages, one per line; Ctrl-D at the start of a line ends",
        "first line",
        "second",
        f"sent 2 messages to {topic} (synced)",
    ]
    assert printed(["read", topic], environment) == "first line\nsecond\n"


def test_what_is_said_meanwhile_stands_above_the_bar(environment: dict[str, str], tmp_path: Path) -> None:
    """Nothing listens there: the client logs that it waits, while the bar is there."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        servers = f"127.0.0.1:{free.getsockname()[1]}"
    (tmp_path / "lines").write_text("one\n")
    line = f"send nowhere --lines lines --servers {servers}"
    shown = in_terminal(line.split(), 80, environment)
    assert shown.code == 3 and shown.bars and not shown.mixed
    assert any(text.startswith(f"tfmq: Nothing listens at {servers} yet") for text in shown.seen)
