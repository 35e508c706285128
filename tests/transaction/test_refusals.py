"""What sessions are told: the right class, and an outcome that is true."""

import logging

import pytest

from journal import errors as journal
from tfmq import errors
from tfmq.errors import NOT_DONE, UNKNOWN
from tfmq.transaction import refusals, states
from tfmq.transaction.requests import Member


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (journal.Full("no space"), errors.DiskFull),
        (journal.Stopped("its disk failed"), errors.StorageStopped),
        (journal.Closed(), errors.Busy),
        (OSError(5, "EIO"), errors.ServerError),
        (RuntimeError("ours"), errors.ServerError),
    ],
)
def test_an_error_of_the_journal_says_whether_it_happened(
    error: Exception, kind: type[errors.TfmqError]
) -> None:
    before, after = refusals.of_journal(error), refusals.not_forced(error)
    assert type(before) is type(after) is kind
    assert before.outcome == NOT_DONE, "nothing was written"
    assert after.outcome == UNKNOWN, "it is written, and may be on the disk"
    assert before.__cause__ is error


def test_an_error_of_ours_stays_what_it_is() -> None:
    error = errors.Fenced()
    assert refusals.of_journal(error) is refusals.of_step(error) is error


def test_a_wrong_step_names_the_state() -> None:
    told = refusals.of_step(states.WrongStep(states.OPEN, "x"))
    assert isinstance(told, errors.TransactionState)
    assert told.details["state"] == "open"


def test_what_nobody_expected_stands_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "tfmq.transaction"):
        told = refusals.of_step(ZeroDivisionError())
    assert isinstance(told, errors.ServerError)
    assert "ZeroDivisionError" in caplog.text


def test_sentences_name_what_they_are_about() -> None:
    assert "12" in str(refusals.not_open(12))
    assert refusals.not_open(12).outcome == NOT_DONE
    assert "order-1" in str(refusals.wrong_state("order-1", "open", "it needs more"))
    assert "order-1" in str(refusals.incomplete("order-1"))
    assert refusals.by_hand("heuristic_committed").state == "heuristic_committed"
    assert "spark" in str(refusals.group_done(Member("spark", 3, "run")))
    assert "mended" not in str(refusals.stopped("its disk failed"))
    assert "its disk failed" in str(refusals.stopped("its disk failed"))
