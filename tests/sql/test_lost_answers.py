"""Invariant: an answer that is lost, of the database or of the broker, never makes them disagree.

What was asked for may have happened, and somebody whom the broker asks may have gone on from there.
"""

from typing import Any

import pytest
from sqlalchemy.engine import Engine
from sqlalchemy.exc import OperationalError

from tests.sql.conftest import prepared_names
from tests.sql.test_course import Shop, Way, kill_sessions
from tfmq.errors import (
    NOT_DONE,
    StorageStopped,
    TfmqError,
    TimedOut,
    TransactionError,
    TransactionRolledBack,
)
from tfmq.sql import course
from tfmq.sql.decision import decide
from tfmq.sql.table import TABLE


def test_a_prepare_whose_answer_is_lost_keeps_no_locks(
    postgres_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    really = course.perform

    def lost(step: course.Step) -> Any:
        result = really(step)
        if step.name == "database prepares":
            assert len(prepared_names(postgres_engine)) == 1
            kill_sessions(postgres_engine)
            raise OperationalError("the answer is lost", None, Exception())
        return result

    monkeypatch.setattr(course, "perform", lost)
    shop = Shop(Way(postgres_engine, True, False))
    with pytest.raises(OperationalError):
        shop.sell()
    assert prepared_names(postgres_engine) == [], "at once, not when somebody looks for leftovers"
    assert not shop.sold


def test_what_was_committed_while_the_answer_of_the_broker_was_lost_stays_committed(
    postgres_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have prepared, the broker asks somebody else, and only then its answer fails."""
    really = course.perform

    def lost(step: course.Step) -> Any:
        result = really(step)
        if step.name == "broker prepares":
            with postgres_engine.connect() as connection:
                assert decide(connection, TABLE, shop.xid, "commit") == "commit"
            raise TimedOut("the answer is lost")
        return result

    monkeypatch.setattr(course, "perform", lost)
    shop = Shop(Way(postgres_engine, True, False))
    shop.sell()
    assert shop.sold


@pytest.mark.parametrize("kind", [TimedOut, KeyboardInterrupt])
def test_a_prepare_without_an_answer_is_not_taken_back_while_the_database_says_nothing(
    postgres_engine: Engine, monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]
) -> None:
    """Both have prepared, somebody who was asked has committed the database's part, and is about to tell the broker."""
    really = course.perform

    def lost(step: course.Step) -> Any:
        if step.name == "row decides":
            raise OperationalError("the database is away", None, Exception())
        result = really(step)
        if step.name == "broker prepares":
            with postgres_engine.connect() as connection:
                assert decide(connection, TABLE, shop.xid, "commit") == "commit"
            raise kind("the answer is lost")
        return result

    monkeypatch.setattr(course, "perform", lost)
    shop = Shop(Way(postgres_engine, True, False))
    with pytest.raises(TransactionError if kind is TimedOut else kind) as caught:
        shop.sell()
    if kind is TimedOut:
        assert (getattr(caught.value, "outcome", ""), "not known yet" in str(caught.value)) == (
            "unknown",
            True,
        )
    assert shop.broker.state == "prepared"
    monkeypatch.setattr(course, "perform", really)
    shop.settle()
    assert shop.sold


@pytest.mark.parametrize("refusal", [StorageStopped(outcome=NOT_DONE), TransactionRolledBack()])
def test_a_refused_prepare_is_told_as_it_is_although_the_database_says_nothing(
    postgres_engine: Engine, monkeypatch: pytest.MonkeyPatch, refusal: TfmqError
) -> None:
    """Then the broker asks nobody, so nobody can have committed the database's part."""
    really = course.perform

    def refused(step: course.Step) -> Any:
        if step.name == "broker prepares":
            raise refusal
        if step.name in ("row decides", "database rolls back"):
            raise OperationalError("the database is away", None, Exception())
        return really(step)

    monkeypatch.setattr(course, "perform", refused)
    shop = Shop(Way(postgres_engine, True, False))
    with pytest.raises(type(refusal)) as caught:
        shop.sell()
    assert caught.value is refusal
    assert shop.broker.state == "rolled_back"
    monkeypatch.setattr(course, "perform", really)
    shop.settle()
    assert not shop.sold


def test_while_the_database_says_nothing_nothing_is_decided(
    postgres_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit's answer is lost, and the database is away: the error says so, and the broker asks."""
    really = course.perform

    def lost(step: course.Step) -> Any:
        if step.name == "row decides":
            raise OperationalError("the database is away", None, Exception())
        result = really(step)
        if step.name == "database commits":
            raise OperationalError("the answer is lost", None, Exception())
        return result

    monkeypatch.setattr(course, "perform", lost)
    shop = Shop(Way(postgres_engine, False, False))
    with pytest.raises(TransactionError, match="not known yet") as caught:
        shop.sell()
    assert caught.value.outcome == "unknown"
    assert shop.broker.state == "prepared"
    monkeypatch.setattr(course, "perform", really)
    shop.settle()
    assert shop.sold
