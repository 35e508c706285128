"""The command `reconcile` against a real broker, a consumer's real letters, and what is planted between them."""

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

import tfmq
from tests.scale import scaled
from tfmq.admin import Admin
from tfmq.cli.output import Output
from tfmq.dead_letters.admin import Desk
from tfmq.dead_letters.model import Selection
from tfmq.dead_letters.redrive import Wish
from tfmq.spark.pipelines.command import Job, run_command
from tfmq.spark.pipelines.reconcile import NOTE, Balance, Fault, print_balance, reconcile
from tools.rigs.live_server import LiveServer

MESSAGES = 40 + scaled(4000)
BAD = 10
"""Every so many-th message cannot be handled."""


def work(address: str, topic: str, store: Path, until: int) -> int:
    """A consumer handles what is there and refuses every tenth; how many it refused."""
    refused = 0
    seen = 0

    consumer = tfmq.Consumer(
        address, topics=[topic], group=f"{topic}-group", start="earliest", dead_letters=store
    )

    def handle(message: Any) -> None:
        nonlocal seen, refused
        seen += 1
        if seen == until:
            consumer.stop()
        if int(message.text) % BAD == 0:
            refused += 1
            raise tfmq.Reject("no such order")

    consumer.run(handle, signals=False)
    return refused


def told(capsys: pytest.CaptureFixture[str], server: LiveServer, topic: str, store: Path) -> tuple[int, Any]:
    capsys.readouterr()
    arguments = [
        "--servers",
        server.address,
        "--group",
        f"{topic}-group",
        "--dead-letters",
        str(store),
        "--json",
    ]
    code = run_command(reconcile, "reconcile", arguments)
    return code, json.loads(capsys.readouterr().out)


def sums(found: Any) -> dict[str, int]:
    names = ("produced", "consumed", "lag", "handled", "waiting", "dead", "settled")
    return {name: sum(row[name] for row in found["rows"]) for name in names}


def change(store: Path, statement: str) -> None:
    with sqlite3.connect(store) as database:
        assert database.execute(statement).rowcount == 1
    database.close()


def table(store: Path) -> str:
    with sqlite3.connect(store) as database:
        (name,) = database.execute(
            "select name from sqlite_master where sql like '%message_offset%' limit 1"
        ).fetchone()
    database.close()
    return str(name)


@pytest.mark.long
def test_it_adds_up_until_something_is_changed(
    spark: Any, spark_server: LiveServer, topic: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "dead.db"
    with tfmq.Producer(spark_server.address) as producer:
        producer.send_many(topic, [b"%d" % n for n in range(MESSAGES)])
    refused = work(spark_server.address, topic, store, MESSAGES)
    assert refused == (MESSAGES + BAD - 1) // BAD
    code, found = told(capsys, spark_server, topic, store)
    assert (code, found["faults"]) == (0, [])
    assert sums(found) == {
        "produced": MESSAGES, "consumed": MESSAGES, "lag": 0, "handled": MESSAGES - refused, "waiting": 0,
        "dead": refused, "settled": 0,
    }  # fmt: skip

    with Desk(store, spark_server.address) as desk:
        first, second, *_ = [letter.id for letter in desk.letters()]
        desk.redrive(Wish(Selection(ids=(first,))))
    code, found = told(capsys, spark_server, topic, store)
    assert (code, found["faults"]) == (0, [])
    assert [sums(found)[name] for name in ("produced", "lag", "dead", "settled")] == [
        MESSAGES + 1,
        1,
        refused - 1,
        1,
    ]

    name = table(store)
    change(store, f"update {name} set sent_offset = sent_offset + 1 where id = '{first}'")
    change(store, f"update {name} set message_id = '0000000005000007' where id = '{second}'")
    code, found = told(capsys, spark_server, topic, store)
    faults = sorted(fault["text"] for fault in found["faults"])
    assert code == 4 and len(faults) == 2
    assert any(
        f"letter {first} was sent again to offset" in text and "no message begins there" in text
        for text in faults
    )
    assert any(
        f"letter {second} is of a message at offset" in text and "there stands message" in text
        for text in faults
    )


def test_what_retention_took_before_a_group_came_to_it_does_not_add_up(
    spark: Any, spark_server: LiveServer, topic: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    group = f"{topic}-group"
    with tfmq.Producer(spark_server.address) as producer, Admin(spark_server.address) as admin:
        producer.send_many(topic, [b"x" * 100] * 2000)
        producer.flush()
        admin.reset_group(group, topic, "earliest", create=True)
        assert run_command(reconcile, "reconcile", ["--servers", spark_server.address, "--group", group]) == 0
        printed = capsys.readouterr()
        assert "no discrepancies" in printed.err and "produced" in printed.out
        end = admin.topic(topic).partitions[0].end_offset
        admin.truncate_before(topic, 0, end)
        assert run_command(reconcile, "reconcile", ["--servers", spark_server.address, "--group", group]) == 4
    printed = capsys.readouterr()
    assert "1 discrepancy" in printed.err and "retention took" in " ".join(printed.out.split())


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["--group", "billign"], 1, "tfmq: There is no group 'billign'."),
        (["--dead-letters", "no-such.db"], 1, "tfmq: There are no dead letters at no-such.db"),
        (["--dead-letters", ""], 2, "names no store"),
        (["--servers", "127.0.0.1:1"], 3, "127.0.0.1:1"),
    ],
)
def test_wrong_input_is_told_in_a_sentence(
    spark_server: LiveServer,
    arguments: list[str],
    code: int,
    sentence: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    servers = [] if "--servers" in arguments else ["--servers", spark_server.address]
    assert run_command(reconcile, "reconcile", [*servers, *arguments, "--timeout", "2s"]) == code
    printed = capsys.readouterr().err
    assert sentence in printed and "Traceback" not in printed


def test_names_out_of_a_store_do_not_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    faults = [Fault(NOTE, "g\x1b[31m", "t\nx", 0, "letter \x1b]0;pwned\x07")]
    print_balance(Job("reconcile", Output(None, False, False)), Balance([], faults))
    said = "".join(capsys.readouterr())
    assert "g\\x1b[31m" in said and not {"\x1b", "\x07"} & set(said)
