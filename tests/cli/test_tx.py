"""`tfmq tx` against a broker of the test's own; tests/e2e/test_tx_cli.py has the same on a real one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import click
import pytest

from tests.cli.conftest import Cli, Ran
from tests.client.fake_broker import LOSE, FakeBroker, listening
from tests.client.in_doubt_broker import InDoubtBroker, row
from tfmq.cli import tx
from tfmq.cli.output import Output
from tfmq.cli.tx import describe_transaction, detail_row, json_row, table_row, xids
from tfmq.client.admin.models import STATES, transaction_description
from tfmq.errors import ConnectionFailed, NotSupported, StorageStopped
from tfmq.protocol import commands


class Rig:
    """A broker with transactions, and the command line connected to it."""

    def __init__(self, broker: InDoubtBroker, offline: Cli) -> None:
        self.broker = broker
        self._offline = offline

    def __call__(self, *arguments: str) -> Ran:
        return self._offline("tx", *arguments)

    def put(self, *rows: dict[str, Any]) -> None:
        self.broker.rows += rows


@pytest.fixture
def rig(offline: Cli, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    broker = InDoubtBroker()
    with listening(broker) as servers:
        monkeypatch.setenv("TFMQ_SERVERS", servers)
        yield Rig(broker, offline)


def test_the_list_has_age_size_owner_and_topics(rig: Rig) -> None:
    rig.put(row("order-42", 7, age_seconds=7500.0, topics=["orders", "reminders"]), row("busy", 8, "open"))
    ran = rig("list")
    table = ran.out.decode()
    assert ran.code == 0
    for words in ("order-42", "2 h 5 min", "2.0 KiB", "orders, reminders", "a client at 127.0.0.1:5", "shop"):
        assert words in table
    assert "busy" not in table, "an open one waits for nobody"
    (found,) = rig("list", "--json").json
    assert found["xid"] == "order-42" and found["size_bytes"] == 2048 and found["epoch"] == 7
    assert [each["xid"] for each in rig("list", "--state", "open", "--json").json] == ["busy"]
    assert rig("list", "--group", "nobody", "--json").json == []


def test_an_empty_list_is_said_in_words_or_an_empty_array(rig: Rig) -> None:
    ran = rig("list")
    assert (ran.code, ran.out, ran.err) == (0, b"", "no unfinished transactions\n")
    assert rig("list", "--json").out == b"[]\n"
    assert rig("list", "--quiet") == (0, b"", "")


@pytest.mark.long
def test_a_table_ends_after_a_page_and_says_how_to_go_on(rig: Rig) -> None:
    rig.put(*(row(f"x-{number}", number) for number in range(1, 2501)))
    first = rig("list")
    assert "x-100" in first.out.decode() and "x-101" not in first.out.decode()
    assert "there are more: tfmq tx list --after 100\n" in first.err
    assert "x-101" in rig("list", "--after", "100", "-n", "1").out.decode()
    everything = rig("list", "--json").json
    assert [each["epoch"] for each in everything] == list(range(1, 2501)), "a program gets all"
    assert len(rig("list", "--json", "-n", "3").json) == 3
    assert "there are more" not in rig("list", "-n", "2500").err


def test_those_that_are_prepared_for_too_long_are_pointed_out(rig: Rig) -> None:
    rig.put(row("young", 1), row("old", 2, age_seconds=7200.0), row("ended", 3, "heuristic_committed"))
    assert "1 of these is prepared for longer than 1 h" in rig("list").err
    rig.put(row("older", 4, age_seconds=9e6))
    assert "2 of these are prepared for longer than 1 h" in rig("list").err
    assert rig("list", "--quiet").err == ""


def test_members_of_a_commit_group_name_it_and_raise_no_alarm(rig: Rig) -> None:
    member = {"commit_group": "spark-stream-7", "group": "", "expires_ms": 1_700_000_900_000}
    rig.put(row("local:5-1", 7, age_seconds=90_000.0, **member))
    ran = rig("list")
    assert "spark-stream-7" in ran.out.decode() and ran.err == ""
    ran = rig("commit", "local:5-1")
    assert ran.code == 2 and "of the commit group spark-stream-7, whose members are committed together" in ran.err


def test_one_is_shown_with_its_times(rig: Rig) -> None:
    rig.put(row("order-42", 7, details_of_ours=5, expires_ms=1_900_000_000_000))
    shown = rig("show", "order-42").out.decode()
    for words in ("order-42", "prepared", "2023-11-1", "2030-03-1", "details of ours"):
        assert words in shown
    assert rig("show", "order-42", "--json").json["expires_ms"] == 1_900_000_000_000
    assert rig("show", "order-42", "--json").json["details_of_ours"] == 5


def test_a_wrong_name_gets_the_likely_one(rig: Rig) -> None:
    assert "There are no unfinished ones" in rig("show", "order-42").err
    rig.put(row("order-42", 7))
    for command in (("show",), ("commit", "--yes"), ("rollback", "--yes"), ("forget",)):
        ran = rig(command[0], "order-24", *command[1:])
        assert (ran.code, ran.out) == (1, b"")
        assert "There is no transaction 'order-24'" in ran.err
        assert "Did you mean 'order-42'?" in ran.err
        assert len(ran.err.splitlines()) == 1
    assert rig.broker.decided == []
    other = rig("show", "order-42", "--epoch", "6")
    assert other.code == 1 and "the latest has 7" in other.err
    assert "`tfmq tx list` has all" in rig("show", "zzz").err


def test_a_wrong_name_among_several_keeps_all_of_them_as_they_are(rig: Rig) -> None:
    rig.put(row("a", 1), row("b", 2))
    ran = rig("commit", "a", "b", "nope", "--yes")
    assert ran.code == 1 and "no transaction 'nope'" in ran.err and "Nothing was done with the others." in ran.err
    assert {each["state"] for each in rig.broker.rows} == {"prepared"}
    assert "the others" not in rig("commit", "nope", "--yes").err


def test_the_states_of_the_option_are_those_that_can_be_listed() -> None:
    assert tx.STATES == STATES


def test_nothing_is_decided_by_a_script_without_a_yes(rig: Rig) -> None:
    rig.put(row("order-42", 7))
    for command, words in (("commit", "Add --yes to commit order-42"), ("rollback", "Add --yes to roll back order-42")):
        refused = rig(command, "order-42")
        assert refused.code == 2
        for part in (words, "by hand", "; this cannot be undone.", "3 messages for orders", "1 min 30 s"):
            assert part in refused.err
    assert rig.broker.decided == []


def test_a_person_is_asked(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    rig.put(row("order-42", 7))
    found = [Reader(rig.broker).transaction("order-42")]
    asked: list[str] = []

    def answer(question: str, err: bool) -> bool:
        asked.append(question)
        return False

    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr(click, "confirm", answer)
    for what, several, refused in (("commit", 1, "not committed"), ("rollback", 3, "not rolled back")):
        with pytest.raises(click.exceptions.Exit) as caught:
            tx.confirm_end(what, found * several, as_owner=what == "commit")
        assert caught.value.exit_code == 1
        assert capsysbinary.readouterr().err.decode() == f"{refused}\n"
    assert asked[0].startswith("Commit order-42 (prepared, 1 min 30 s old, by a client")
    assert "in its owner's name" in asked[0] and asked[0].endswith("? This cannot be undone.")
    assert asked[1].startswith("Roll back 3 transactions (6.0 KiB; the first is order-42")


class Terminal:
    def isatty(self) -> bool:
        return True


class Reader:
    """Gives transactions without a connection."""

    def __init__(self, broker: InDoubtBroker) -> None:
        self._broker = broker

    def transaction(self, xid: str, epoch: int = 0) -> Any:
        reply = self._broker.describe_transaction(commands.DescribeTransaction(xid, epoch))
        return transaction_description(reply.description)


def test_an_operator_commits_rolls_back_and_forgets(rig: Rig) -> None:
    rig.put(row("a", 1), row("b", 2), row("c", 3, dropped=2))
    ran = rig("commit", "a", "c", "--yes")
    assert (ran.code, ran.out) == (0, b"")
    assert "a: committed by hand\n  after its owner has the outcome: tfmq tx forget a\n" in ran.err
    assert "2 messages dropped: the topic was deleted" in ran.err
    assert rig("rollback", "b", "--yes", "--json").json == [
        {"xid": "b", "epoch": 2, "state": "heuristic_rolled_back", "dropped": 0, "lost": 0, "by_hand": True}
    ]
    assert rig("forget", "a", "b", "--json").json == [
        {"xid": "a", "epoch": 1, "state": "forgotten"},
        {"xid": "b", "epoch": 2, "state": "forgotten"},
    ]
    assert [each["xid"] for each in rig.broker.rows] == ["c"]


def test_what_is_done_in_the_owners_name_leaves_nothing_to_forget(rig: Rig) -> None:
    rig.put(row("a", 1))
    ran = rig("commit", "a", "--yes", "--as-owner")
    assert ran.err == "a: committed\n"
    assert rig.broker.decided == [commands.CommitTransaction("a", 1, False, False, [])]
    refused = rig("forget", "a")
    assert refused.code == 1 and "was not ended by hand, but is committed" in refused.err


def test_who_agrees_with_what_is_done_has_nothing_to_forget(rig: Rig) -> None:
    rig.put(row("a", 1, "committed"), row("b", 2, "rolled_back"), row("c", 3, "heuristic_committed"))
    assert rig("commit", "a", "--yes").err == "a: committed\n"
    assert rig("rollback", "b", "--yes", "--json").json[0]["by_hand"] is False
    assert "tfmq tx forget c" in rig("commit", "c", "--yes").err


def test_the_transaction_that_was_looked_at_is_the_one_that_is_decided(rig: Rig) -> None:
    rig.put(row("a", 1, "heuristic_committed"), row("a", 9))
    assert rig("rollback", "a", "--yes").code == 0
    assert rig("forget", "a", "--epoch", "1").code == 0
    assert rig.broker.decided == [commands.RollbackTransaction("a", 9, True), commands.ForgetTransaction("a", 1)]
    assert rig("commit", "a", "b", "--epoch", "9", "--yes").code == 2


def test_one_that_cannot_be_decided_does_not_keep_the_others(rig: Rig) -> None:
    rig.put(row("a", 1, "rolled_back"), row("b", 2), row("c", 3, "open"))
    ran = rig("commit", "a", "b", "c", "--yes", "--json")
    assert ran.code == 1
    assert [each["xid"] for each in ran.json] == ["b"]
    assert "tfmq: a: The transaction was rolled back" in ran.err
    assert "tfmq: c: The transaction is in the wrong state" in ran.err
    rig.broker.plan(commands.RollbackTransaction, StorageStopped("The journal of transactions has stopped."))
    ran = rig("rollback", "c", "--yes")
    assert (ran.code, ran.err) == (1, "tfmq: c: The journal of transactions has stopped.\n")


def test_a_decision_whose_answer_was_lost_is_asked_for_again(rig: Rig) -> None:
    rig.put(row("a", 1))
    rig.broker.plan(commands.CommitTransaction, LOSE)
    assert rig("commit", "a", "--yes", "--json").json[0]["state"] == "committed"
    assert rig.broker.decided == [commands.CommitTransaction("a", 1, False, True, [])] * 2


def test_what_was_done_before_the_broker_went_away_is_reported(
    rig: Rig, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    done: list[str] = []

    def end(xid: str, epoch: int) -> dict[str, Any]:
        if done:
            raise ConnectionFailed("gone")
        done.append(xid)
        return {"xid": xid, "epoch": epoch, "state": "committed", "dropped": 0}

    rig.put(row("a", 1), row("b", 2), row("c", 3))
    found = [Reader(rig.broker).transaction(xid) for xid in ("a", "b", "c")]
    with pytest.raises(ConnectionFailed):
        tx.end_each(Output(None, json=True, quiet=False), found, end)
    assert done == ["a"] and '"xid": "a"' in capsysbinary.readouterr().out.decode()


def test_a_decision_that_a_full_disk_holds_up_is_reported_as_such(rig: Rig) -> None:
    rig.put(row("a", 1))
    rig.broker.plan(commands.CommitTransaction, None)

    def applying(request: commands.CommitTransaction) -> Any:
        return commands.CommitTransactionReply("applying", 0, [])

    rig.broker.commit_transaction = applying  # type: ignore[method-assign]
    ran = rig("commit", "a", "--yes")
    assert ran.code == 0
    assert "a: applying by hand\n  committed; not applied to every partition yet: tfmq tx show a\n" in ran.err


def test_a_decision_that_the_journal_s_damage_holds_up_says_so(rig: Rig) -> None:
    damage = "the transaction journal is damaged: 1.journal: stop the broker, mend it with `tfmq log repair`"
    rig.put(row("a", 1, "applying", damage=damage, waits_for={"orders-0": damage}))

    def applying(request: commands.CommitTransaction) -> Any:
        return commands.CommitTransactionReply("applying", 0, [])

    rig.broker.commit_transaction = applying  # type: ignore[method-assign]
    assert f"  committed; not applied to orders-0 yet: {damage}\n" in rig("commit", "a", "--yes").err
    listed = rig("list")
    assert "applying, journal damaged" in listed.out.decode()
    assert "the transaction journal is damaged: stop the broker, run `tfmq log repair`" in listed.err
    assert "applying, journal damaged" in rig("show", "a").out.decode()
    assert rig("list", "--json").json[0]["state"] == "applying", "for programs it is the state of the wire"


def test_a_loss_is_in_the_list_and_never_reported_as_a_plain_success(rig: Rig) -> None:
    rig.put(row("a", 1, lost=2), row("b", 2, lost=0), row("c", 3, "committed", lost=1))
    listed = rig("list")
    assert "3, 2 lost" in listed.out.decode()
    assert "1 of these lost messages with damage in the transaction journal and is not committed" in listed.err
    assert rig("list", "--json").json[0]["lost"] == 2
    assert "3, 2 lost" in rig("show", "a").out.decode()
    assert "2 messages of it lost to damage" in rig("commit", "a").err, "the question says it"
    ran = rig("commit", "a", "b", "--yes")
    assert ran.code == 4 and "tfmq: a: a was not committed: 2 of its messages were lost." in ran.err
    assert "b: committed by hand" in ran.err
    ran = rig("commit", "c", "--yes")
    assert ran.code == 4 and "1 message of it lost to damage in the transaction journal" in ran.err
    assert rig("commit", "a", "--yes", "--force", "--as-owner").code == 2
    ran = rig("commit", "a", "--yes", "--force", "--json")
    assert ran.code == 0 and ran.json[0]["lost"] == 2
    assert rig.broker.decided[-1] == commands.CommitTransaction("a", 1, False, True, [], True)


@pytest.mark.parametrize(
    "arguments",
    [
        ["show"],
        ["show", ""],
        ["show", "a", "--epoch", "0"],
        ["commit"],
        ["commit", "a", "--epoch", "x"],
        ["forget", ""],
        ["list", "--state", "lost"],
        ["list", "--after", "-1"],
        ["list", "-n", "0"],
        ["end", "a"],
    ],
)
def test_wrong_usage_is_code_2_and_asks_nothing(rig: Rig, arguments: list[str]) -> None:
    assert rig(*arguments).code == 2
    assert [each for each in rig.broker.requests if not isinstance(each, commands.Hello)] == []


def test_an_xid_that_is_too_long_or_no_text_is_code_2(rig: Rig) -> None:
    assert rig("show", "x" * 250).code == 2
    assert rig("show", "\udcff").code == 2


def test_an_xid_cannot_steer_the_terminal(rig: Rig) -> None:
    rig.put(row("a\x1b[2Jb\n", 1, owner="x\x07"))
    for ran in (rig("list"), rig("show", "a\x1b[2Jb\n"), rig("commit", "a\x1b[2Jb\n", "--yes")):
        assert ran.code == 0
        assert "\x1b" not in ran.out.decode() + ran.err and "\x07" not in ran.out.decode()
    assert "a\\x1b[2Jb\\n" in rig("list").out.decode()


@pytest.mark.parametrize("command", ["list", "show", "commit", "rollback", "forget"])
def test_every_command_has_help_with_an_example(offline: Cli, command: str) -> None:
    ran = offline("tx", command, "--help")
    assert ran.code == 0 and "Example" in ran.out.decode()
    assert "--json" in ran.out.decode() and "--quiet" in ran.out.decode()


def test_no_broker_is_code_3(offline: Cli) -> None:
    assert offline("tx", "list").code == 3


def test_a_broker_of_an_earlier_release_is_reported_as_such(offline: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    broker = FakeBroker()
    broker.plan(commands.ListTransactions, NotSupported("This release of the broker has no transactions yet."))
    with listening(broker) as servers:
        ran = offline("tx", "list", "--servers", servers)
    assert (ran.code, ran.err) == (1, "tfmq: This release of the broker has no transactions yet.\n")


# Transactions as rows, lines and names that a shell completes.


@pytest.fixture
def servers() -> Iterator[str]:
    rows = [row("order-1", 1), row("order-2", 2), row("bill-3", 3), row("order-\n", 4)]
    with listening(InDoubtBroker(*rows)) as servers:
        yield servers


def completed(servers: str, start: str) -> list[str]:
    context = click.Context(click.Command("show"))
    context.params["servers"] = servers
    return [each.value for each in xids(context, click.Argument(["xid"]), start)]


def test_the_shell_offers_the_xids_that_wait_for_an_operator(servers: str) -> None:
    assert completed(servers, "ord") == ["order-1", "order-2"]
    assert completed(servers, "") == ["order-1", "order-2", "bill-3"]
    assert completed(servers, "x") == []


def test_without_a_broker_the_shell_offers_nothing() -> None:
    assert completed("127.0.0.1:1", "") == []


def test_a_row_for_programs_has_everything_and_one_for_people_what_fits() -> None:
    found = transaction_description(row("order-1", 1, targets=2))
    assert json_row(found)["targets"] == 2 and json_row(found)["topics"] == ["orders"]
    assert "details" not in json_row(found)
    assert table_row(found)["age"] == "1 min 30 s" and table_row(found)["size"] == "2.0 KiB"


def test_all_of_one_leaves_out_what_says_nothing() -> None:
    found = transaction_description(row("order-1", 1, asked=0, local=False, sequence=-1, run="", batches=2))
    shown = detail_row(found)
    assert shown["batches"] == 2 and shown["messages"] == 3 and str(shown["began"]).startswith("2023-11-1")
    assert not {"asked", "local", "sequence", "run", "commit_group", "ends_by_itself"} & set(shown)
    over = transaction_description({"xid": "x", "epoch": 7, "state": "committed", "decided_ms": 1_700_000_000_000})
    assert set(detail_row(over)) == {"xid", "epoch", "state", "decided"}


def test_one_in_a_line() -> None:
    found = transaction_description(row("order-1", 1))
    assert describe_transaction(found) == (
        "order-1 (prepared, 1 min 30 s old, by a client at 127.0.0.1:5, 3 messages for orders)"
    )
    bare = transaction_description({"xid": "x", "state": "open"})
    assert describe_transaction(bare) == "x (open, 0 s old, 0 messages)"


def test_a_program_gets_each_time_as_ms_and_as_iso() -> None:
    found = json_row(transaction_description({"xid": "x", "began_ms": 1_795_000_000_123, "decided_ms": 0}))
    assert (found["began_ms"], found["began_at"]) == (1_795_000_000_123, "2026-11-18T11:06:40.123+00:00")
    assert (found["prepared_at"], found["expires_at"], found["decided_at"]) == (None, None, None)
