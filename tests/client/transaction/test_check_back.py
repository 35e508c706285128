"""The check-back: questions of the broker, answers of the user's functions, and what goes wrong in between."""

import logging
from datetime import UTC, datetime
from typing import Any

import pytest

from tests.client.fake_broker import FakeBroker
from tests.client.transaction_rig import TransactionRig
from tfmq.client.operation import run_inline
from tfmq.client.transaction.check_back import InDoubt, parse_in_doubt
from tfmq.errors import BadRequest, Busy
from tfmq.protocol.commands import AwaitChecks, CommitTransaction, RollbackTransaction


class Checked(TransactionRig):
    """A producer of a group whose checks run at once, with one prepared transaction of another process."""

    def __init__(self, broker: FakeBroker | None = None) -> None:
        super().__init__(broker, group="shop")
        self.core.owner.run_in_executor = run_inline
        self.asked: list[InDoubt] = []
        other = TransactionRig(self.broker)
        tx = other.begin("order-42")
        other.send(tx, b"x")
        other.prepare(tx)

    def answering(self, answer: Any) -> Any:
        def check(transaction: InDoubt) -> Any:
            self.asked.append(transaction)
            if isinstance(answer, Exception):
                raise answer
            return answer

        self.core.transactions.add_check(check)
        return check

    def ask(self) -> None:
        self.advance(1)
        self.broker.ask("order-42", 1)
        self.advance(1)


@pytest.mark.parametrize(
    ("answer", "state"), [("commit", "committed"), ("rollback", "rolled_back"), (None, "prepared")]
)
def test_what_the_check_says_is_done(answer: str | None, state: str) -> None:
    rig = Checked()
    rig.answering(answer)
    rig.ask()
    assert rig.broker.states() == [state]
    assert rig.asked == [InDoubt("order-42", 1, datetime.fromtimestamp(1_700_000_000, UTC), ("orders",))]
    assert len(rig.requests(AwaitChecks)) == 2 and rig.requests(AwaitChecks)[0].group == "shop"


class Array:
    """Compares as an array does: to something that has no truth."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> Any:
        return self

    def __bool__(self) -> bool:
        raise ValueError("ambiguous")


@pytest.mark.parametrize("answer", [ValueError("planted"), "perhaps", True, [], Array()])
def test_what_is_no_answer_is_logged_and_means_later(answer: Any, caplog: pytest.LogCaptureFixture) -> None:
    rig = Checked()
    rig.answering(answer)
    with caplog.at_level(logging.ERROR):
        rig.ask()
    assert rig.broker.states() == ["prepared"] and "order-42" in caplog.text
    rig.ask()
    assert len(rig.asked) == 2


def test_several_are_asked_until_one_knows() -> None:
    rig = Checked()
    rig.answering(None)
    rig.answering(KeyError("not mine"))
    rig.answering("commit")
    rig.answering("rollback")
    rig.ask()
    assert len(rig.asked) == 3 and rig.broker.states() == ["committed"]


def test_an_answer_that_comes_too_late_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    rig = Checked()
    rig.answering("commit")
    rig.broker.by_hand(1, False)
    with caplog.at_level(logging.WARNING):
        rig.ask()
    assert rig.broker.states() == ["heuristic_rolled_back"] and "the check returned commit" in caplog.text
    assert len(rig.requests(CommitTransaction)) == 1 and rig.requests(RollbackTransaction) == []


def test_it_goes_on_after_refusals_and_lost_connections_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    rig = Checked()
    rig.broker.plan(AwaitChecks, Busy(), Busy(), None)
    rig.answering("commit")
    with caplog.at_level(logging.WARNING):
        rig.advance(12)
    assert caplog.text.count("The check of transactions of group shop is paused") == 1
    rig.broker.parked.clear()
    rig.cut()
    rig.ask()
    assert rig.broker.states() == ["committed"]


def test_a_broker_that_is_away_is_asked_when_it_is_back() -> None:
    rig = Checked()
    rig.reachable = False
    rig.answering("commit")
    rig.advance(20)
    rig.reachable = True
    rig.advance(10)
    rig.ask()
    assert rig.broker.states() == ["committed"]


def test_it_needs_a_group_and_a_function() -> None:
    with pytest.raises(BadRequest, match=r"needs Producer\(group=\.\.\.\)"):
        TransactionRig().core.transactions.add_check(print)
    with pytest.raises(TypeError, match="is a function"):
        Checked().core.transactions.add_check("commit")  # type: ignore[arg-type]


def test_nothing_is_asked_for_once_the_producer_is_closed() -> None:
    rig = Checked()
    rig.answering("commit")
    rig.advance(1)
    rig.run(rig.core.close(1.0))
    rig.broker.ask("order-42", 1)
    rig.advance(1)
    assert rig.asked == [] and rig.broker.states() == ["prepared"]


def test_a_forked_child_asks_once_it_begins_a_transaction() -> None:
    rig = Checked()
    rig.answering("commit")
    rig.advance(1)
    for forget in rig.on_fork:
        forget()  # type: ignore[operator]
    rig.broker.parked.clear()
    rig.advance(1)
    assert rig.broker.parked == []
    rig.core.transactions.begin()
    rig.ask()
    assert rig.broker.states() == ["committed"] and len(rig.asked) == 1


def test_a_row_of_a_newer_broker_is_understood() -> None:
    row = {"xid": "x", "epoch": 3, "later": 1}
    assert parse_in_doubt(row) == InDoubt("x", 3, datetime.fromtimestamp(0, UTC), ())


def test_a_check_for_which_no_thread_could_be_had_is_asked_again() -> None:
    rig, calls = Checked(), 0

    def run(work: Any, done: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise RuntimeError("can't start new thread")
        run_inline(work, done)

    rig.core.owner.run_in_executor = run
    rig.answering("commit")
    rig.ask()
    assert rig.broker.states() == ["prepared"]
    rig.advance(10)
    rig.ask()
    assert rig.broker.states() == ["committed"]
