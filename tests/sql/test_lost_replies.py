"""Invariant: an answer that is lost, of the database or of the broker, never makes them disagree.

What was asked for may have happened, and a client that the broker asks may have gone on from there.
"""

from random import Random
from typing import Any

import pytest
from sqlalchemy import delete
from sqlalchemy.engine import Engine
from sqlalchemy.exc import OperationalError, SQLAlchemyError

from tests.scale import scaled, seeded
from tests.sql.conftest import prepared_names
from tests.sql.shop import Order
from tests.sql.test_commit_protocol import STEPS, Shop, Way, kill_sessions
from tfmq.errors import NOT_DONE, StorageStopped, TfmqError, TimedOut, TransactionError, TransactionRolledBack
from tfmq.sql import commit_protocol, in_doubt
from tfmq.sql.database import TABLE
from tfmq.sql.in_doubt import decide


def test_a_prepare_whose_answer_is_lost_keeps_no_locks(
    postgres_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    really = commit_protocol.run_step

    def lost(step: commit_protocol.Step) -> Any:
        result = really(step)
        if step.name == "database prepares":
            assert len(prepared_names(postgres_engine)) == 1
            kill_sessions(postgres_engine)
            raise OperationalError("the answer is lost", None, Exception())
        return result

    monkeypatch.setattr(commit_protocol, "run_step", lost)
    shop = Shop(Way(postgres_engine, True, False))
    with pytest.raises(OperationalError):
        shop.sell()
    assert prepared_names(postgres_engine) == [], "at once, not when somebody looks for leftovers"
    assert not shop.sold


def test_what_was_committed_while_the_answer_of_the_broker_was_lost_stays_committed(
    postgres_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have prepared, the broker asks another client, and only then its answer fails."""
    really = commit_protocol.run_step

    def lost(step: commit_protocol.Step) -> Any:
        result = really(step)
        if step.name == "broker prepares":
            with postgres_engine.connect() as connection:
                assert decide(connection, TABLE, shop.xid, "commit") == "commit"
            raise TimedOut("the answer is lost")
        return result

    monkeypatch.setattr(commit_protocol, "run_step", lost)
    shop = Shop(Way(postgres_engine, True, False))
    shop.sell()
    assert shop.sold


@pytest.mark.parametrize("kind", [TimedOut, KeyboardInterrupt])
def test_a_prepare_without_an_answer_is_not_taken_back_while_the_database_says_nothing(
    postgres_engine: Engine, monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]
) -> None:
    """Both have prepared, a client that was asked has committed the database's part, and will reply to the broker."""
    really = commit_protocol.run_step

    def lost(step: commit_protocol.Step) -> Any:
        if step.name == "row decides":
            raise OperationalError("the database is away", None, Exception())
        result = really(step)
        if step.name == "broker prepares":
            with postgres_engine.connect() as connection:
                assert decide(connection, TABLE, shop.xid, "commit") == "commit"
            raise kind("the answer is lost")
        return result

    monkeypatch.setattr(commit_protocol, "run_step", lost)
    shop = Shop(Way(postgres_engine, True, False))
    with pytest.raises(TransactionError if kind is TimedOut else kind) as caught:
        shop.sell()
    if kind is TimedOut:
        assert (getattr(caught.value, "outcome", ""), "not known yet" in str(caught.value)) == ("unknown", True)
    assert shop.broker.state == "prepared"
    monkeypatch.setattr(commit_protocol, "run_step", really)
    shop.settle()
    assert shop.sold


@pytest.mark.parametrize("refusal", [StorageStopped(outcome=NOT_DONE), TransactionRolledBack()])
def test_a_refused_prepare_is_reported_as_it_is_although_the_database_says_nothing(
    postgres_engine: Engine, monkeypatch: pytest.MonkeyPatch, refusal: TfmqError
) -> None:
    """Then the broker asks no client, so none can have committed the database's part."""
    really = commit_protocol.run_step

    def refused(step: commit_protocol.Step) -> Any:
        if step.name == "broker prepares":
            raise refusal
        if step.name in ("row decides", "database rolls back"):
            raise OperationalError("the database is away", None, Exception())
        return really(step)

    monkeypatch.setattr(commit_protocol, "run_step", refused)
    shop = Shop(Way(postgres_engine, True, False))
    with pytest.raises(type(refusal)) as caught:
        shop.sell()
    assert caught.value is refusal
    assert shop.broker.state == "rolled_back"
    monkeypatch.setattr(commit_protocol, "run_step", really)
    shop.settle()
    assert not shop.sold


def test_while_the_database_says_nothing_nothing_is_decided(
    postgres_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit's answer is lost, and the database is away: the error says so, and the broker asks."""
    really = commit_protocol.run_step

    def lost(step: commit_protocol.Step) -> Any:
        if step.name == "row decides":
            raise OperationalError("the database is away", None, Exception())
        result = really(step)
        if step.name == "database commits":
            raise OperationalError("the answer is lost", None, Exception())
        return result

    monkeypatch.setattr(commit_protocol, "run_step", lost)
    shop = Shop(Way(postgres_engine, False, False))
    with pytest.raises(TransactionError, match="not known yet") as caught:
        shop.sell()
    assert caught.value.outcome == "unknown"
    assert shop.broker.state == "prepared"
    monkeypatch.setattr(commit_protocol, "run_step", really)
    shop.settle()
    assert shop.sold


Fault = tuple[str, bool]
"""A step that fails, and whether after what it does."""
FAULTS = [(name, after) for name in (*STEPS[3:], "row decides", "broker rolls back") for after in (False, True)]
FAULTS.append(("database rolls back", True))
"""From the first step on that leaves something. A rollback that is not even tried is no lost answer."""


class Trouble:
    """Stands for `course.perform`: some steps fail, and before the `question`-th one the broker asks a client, whose
    answer reaches it at once, or with `late`, when all is over. The first fault may be the user's Ctrl-C.
    """

    def __init__(self, shop: Shop, random: Random) -> None:
        self._shop = shop
        self._faults = random.sample(FAULTS, random.randint(0, 3))
        self._question = random.randint(3, 9)
        self._late = random.random() < 0.5
        self._kind = random.choice([KeyboardInterrupt, None])
        self.answers: list[str] = []
        self.seen: list[str] = []

    def __call__(self, step: commit_protocol.Step) -> Any:
        if len(self.seen) == self._question and self._shop.broker.state == "prepared":
            self._ask()
        self.seen.append(step.name)
        self._fail((step.name, False))
        result = step.do()
        self._fail((step.name, True))
        return result

    def _ask(self) -> None:
        with self._shop.way.engine.connect() as connection:
            answer = decide(connection, TABLE, self._shop.xid, "commit")
        if answer is not None:
            self.answers.append(answer)
        if not self._late:
            self.tell()

    def tell(self) -> None:
        """The broker, what was answered. Raises, if it is too late for that."""
        while self.answers:
            getattr(self._shop.broker, self.answers.pop())()

    def _fail(self, fault: Fault) -> None:
        if fault not in self._faults:
            return
        self._faults.remove(fault)
        kind, self._kind = self._kind, None
        if kind is not None:
            raise kind
        if fault[0].startswith("broker"):
            raise TimedOut("by the test")
        raise OperationalError("by the test", None, Exception())

    def __repr__(self) -> str:
        return f"question before {self._question}, late {self._late}, {self.seen}, still to fail {self._faults}"


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("two_phase", [False, True], ids=["one phase", "two phases"])
def test_whatever_fails_during_a_check_back_leaves_both_or_neither(
    postgres_engine: Engine, monkeypatch: pytest.MonkeyPatch, two_phase: bool
) -> None:
    monkeypatch.setattr(in_doubt, "LOCK_SECONDS", 0.05)
    monkeypatch.setattr(in_doubt, "BUSY_SECONDS", 0.01)
    really, random = commit_protocol.run_step, seeded("trouble", two_phase)
    for number in range(scaled(2000)):
        shop = Shop(Way(postgres_engine, two_phase, False))
        trouble = Trouble(shop, random)
        reported = f"case {number}: {trouble}"
        monkeypatch.setattr(commit_protocol, "run_step", trouble)
        raised: BaseException | None = None
        try:
            shop.sell()
        except (TfmqError, SQLAlchemyError, KeyboardInterrupt) as error:
            raised = error
        monkeypatch.setattr(commit_protocol, "run_step", really)
        trouble.tell()
        shop.settle()
        sold = shop.sold
        assert sold or raised is not None, f"{reported}, {trouble}"
        notes = "".join(getattr(raised, "__notes__", []))
        known = isinstance(raised, TfmqError | SQLAlchemyError) and "not known yet" not in str(raised)
        assert not sold or not known or "committed nevertheless" in notes, f"{reported}, {trouble}, {raised!r}"
        with postgres_engine.begin() as connection:
            connection.execute(delete(Order))
