"""The command `reconcile` against a real broker, a consumer's real letters, and what is planted between them."""

from __future__ import annotations

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
from tfmq.dead_letters.model import DEAD, HANDLED, REDRIVEN, WAITING, Selection
from tfmq.dead_letters.redrive import Wish
from tfmq.spark.log_reader import SourceAddress
from tfmq.spark.pipelines.command import Job, run_command
from tfmq.spark.pipelines.reconcile import (
    CLAIMS_PER_TASK,
    NOTE,
    WRONG,
    Balance,
    Fault,
    GroupPosition,
    LetterSummary,
    Row,
    make_balance,
    plan_claim_checks,
    print_balance,
    reconcile,
)
from tfmq.spark.ranges import PartitionLog
from tools.rigs.live_server import LiveServer

MESSAGES = 40 + scaled(4000)
BAD = 10
"""Every so many-th message cannot be handled."""


def work(address: str, topic: str, store: Path, until: int) -> int:
    """A consumer handles what is there and refuses every tenth; how many it refused."""
    refused = 0
    seen = 0

    consumer = tfmq.Consumer(address, topics=[topic], group=f"{topic}-group", start="earliest", dead_letters=store)

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


def reported(capsys: pytest.CaptureFixture[str], server: LiveServer, topic: str, store: Path) -> tuple[int, Any]:
    capsys.readouterr()
    arguments = ["--servers", server.address, "--group", f"{topic}-group", "--dead-letters", str(store), "--json"]
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
    code, found = reported(capsys, spark_server, topic, store)
    assert (code, found["faults"]) == (0, [])
    assert sums(found) == {
        "produced": MESSAGES, "consumed": MESSAGES, "lag": 0, "handled": MESSAGES - refused, "waiting": 0,
        "dead": refused, "settled": 0,
    }  # fmt: skip

    with Desk(store, spark_server.address) as desk:
        first, second, *_ = [letter.id for letter in desk.letters()]
        desk.redrive(Wish(Selection(ids=(first,))))
    code, found = reported(capsys, spark_server, topic, store)
    assert (code, found["faults"]) == (0, [])
    assert [sums(found)[name] for name in ("produced", "lag", "dead", "settled")] == [MESSAGES + 1, 1, refused - 1, 1]

    name = table(store)
    change(store, f"update {name} set sent_offset = sent_offset + 1 where id = '{first}'")
    change(store, f"update {name} set message_id = '0000000005000007' where id = '{second}'")
    code, found = reported(capsys, spark_server, topic, store)
    faults = sorted(fault["text"] for fault in found["faults"])
    assert code == 4 and len(faults) == 2
    assert any(
        f"letter {first} was sent again to offset" in text and "no message begins there" in text for text in faults
    )
    assert any(
        f"letter {second} is of a message at offset" in text and "there stands message" in text for text in faults
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
def test_wrong_input_is_reported_in_a_sentence(
    spark_server: LiveServer, arguments: list[str], code: int, sentence: str, capsys: pytest.CaptureFixture[str]
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


# Claims of letters, sorted by partition; what stands where they point is asked in test_reconcile.py.

ADDRESS = SourceAddress("127.0.0.1:1")
LOG, OTHER = PartitionLog("orders", 0, 20, 20 << 24), PartitionLog("again", 3, 30, 30 << 24 | 3)


def test_a_dead_letter_claims_its_own_place_and_that_where_it_was_sent_again() -> None:
    sent = letter(9, sent=("again", 30, 3, 700, 55))
    asked = {each.log: each.claims for each in plan_claim_checks(ADDRESS, [LOG, OTHER], [sent, letter(3)])}
    assert [(claim.offset, claim.id, claim.resent) for claim in asked[LOG]] == [(30, 7, False), (90, 7, False)]
    assert [(claim.offset, claim.id, claim.resent) for claim in asked[OTHER]] == [(700, 55, True)]


def test_of_partitions_that_are_gone_nothing_is_asked() -> None:
    assert plan_claim_checks(ADDRESS, [OTHER], [letter(3)]) == []


def test_of_another_brokers_topic_with_the_same_number_nothing_is_asked() -> None:
    namesake = LOG._replace(topic="payments")
    assert (
        plan_claim_checks(
            ADDRESS, [namesake, OTHER._replace(topic="else")], [letter(9, sent=("again", 30, 3, 700, 55))]
        )
        == []
    )


def test_many_dead_letters_are_many_tasks() -> None:
    asked = plan_claim_checks(ADDRESS, [LOG], [letter(n) for n in range(CLAIMS_PER_TASK + 1)])
    assert [len(each.claims) for each in asked] == [CLAIMS_PER_TASK, 1]
    assert asked[1].claims[0].offset == 10 * CLAIMS_PER_TASK


# Whether produced, consumed and dead-lettered add up, without a broker: every way in which they do not.

TOPICS = {20: "orders"}


def standing(consumed: int = 60, *, first: int = 0, end: int = 100, **changed: int) -> GroupPosition:
    """Of a partition with 10 bytes a message."""
    made = GroupPosition(
        "broker", "billing", "orders", 20, 0, 10 * first, 10 * end, first, end, 10 * consumed, end - consumed
    )
    return made._replace(**changed)


def letter(ordinal: int, state: str = DEAD, **changed: object) -> LetterSummary:
    made = LetterSummary("dead.db", f"letter{ordinal}", "billing", "orders", 20, 0, 10 * ordinal, ordinal, 7, state)
    return made._replace(**changed)


def only(found: Balance) -> tuple[str, str]:
    (fault,) = found.faults
    return fault.weight, fault.text


def test_a_row_has_what_was_produced_consumed_and_kept() -> None:
    states = (DEAD, WAITING, HANDLED, REDRIVEN, DEAD)
    found = make_balance([standing(first=10)], [letter(n, state) for n, state in enumerate(states)], TOPICS)
    assert found.rows == [Row("broker", "billing", "orders", 0, 100, 90, 60, 40, 55, 1, 2, 2)]
    assert found.faults == []


def test_a_group_that_saved_nothing_has_consumed_nothing() -> None:
    (row,) = make_balance([standing(offset=-1, lag=100)], [], TOPICS).rows
    assert (row.consumed, row.lag, row.handled) == (0, 100, 0)


def test_what_is_unknown_is_no_number() -> None:
    (row,) = make_balance([standing(lag=-1)], [], TOPICS).rows
    assert (row.consumed, row.handled) == (-1, -1)


@pytest.mark.parametrize(
    ("place", "letters", "weight", "text"),
    [
        (standing(offset=1001), [], WRONG, "goes on at offset 1001, and the partition ends at 1000"),
        (standing(offset=90, first=10), [], WRONG, "retention took messages that it had not handled"),
        (standing(), [letter(100)], WRONG, "of messages after the partition's end"),
        (standing(), [letter(60)], NOTE, "of messages that the group has not saved as done"),
        (standing(), [letter(3, partition=1)], WRONG, "the broker knows of no such group here"),
        (standing(), [letter(3, group="other")], WRONG, "the broker knows of no such group here"),
        (standing(), [letter(3, incarnation=21)], NOTE, "of a topic that is not there any more"),
        (standing(), [letter(3), letter(3, store="b.db")], WRONG, "letter letter3 is in dead.db (dead) and in b.db"),
    ],
)
def test_each_thing_that_does_not_add_up_is_reported_alone(
    place: GroupPosition, letters: list[LetterSummary], weight: str, text: str
) -> None:
    found = only(make_balance([place], letters, TOPICS))
    assert found[0] == weight and text in found[1]


def test_the_last_message_consumed_and_the_first_one_not() -> None:
    assert make_balance([standing()], [letter(59)], TOPICS).faults == []
    assert make_balance([standing(100)], [letter(99)], TOPICS).faults == []
    assert make_balance([standing(offset=1000, lag=0)], [], TOPICS).faults == []


def test_json_has_all_rows_and_faults(capsys: pytest.CaptureFixture[str]) -> None:
    job = Job("reconcile", Output(None, json=True, quiet=False))
    print_balance(job, make_balance([standing()], [letter(60)], TOPICS))
    found = json.loads(capsys.readouterr().out)
    assert found["rows"][0]["produced"] == 100 and found["faults"][0]["weight"] == NOTE
