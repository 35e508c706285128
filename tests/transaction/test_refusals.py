"""What sessions are told: the right class, and an outcome that is true."""

import logging

import pytest

from journal import errors as journal
from tfmq import errors
from tfmq.errors import NOT_DONE, UNKNOWN
from tfmq.transaction import rejections, states
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
    before, after = rejections.of_journal(error), rejections.not_forced(error)
    assert type(before) is type(after) is kind
    assert before.outcome == NOT_DONE, "nothing was written"
    assert after.outcome == UNKNOWN, "it is written, and may be on the disk"
    assert before.__cause__ is error


def test_an_error_of_ours_stays_what_it_is() -> None:
    error = errors.Fenced()
    assert rejections.of_journal(error) is rejections.of_step(error) is error


def test_a_wrong_step_names_the_state() -> None:
    told = rejections.of_step(states.WrongStep(states.OPEN, "x"))
    assert isinstance(told, errors.TransactionState)
    assert told.details["state"] == "open"


def test_what_nobody_expected_stands_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "tfmq.transaction"):
        told = rejections.of_step(ZeroDivisionError())
    assert isinstance(told, errors.ServerError)
    assert "ZeroDivisionError" in caplog.text


def test_sentences_name_what_they_are_about() -> None:
    assert "12" in str(rejections.not_open(12))
    assert rejections.not_open(12).outcome == NOT_DONE
    assert "order-1" in str(rejections.wrong_state("order-1", "open", "it needs more"))
    assert "order-1" in str(rejections.incomplete("order-1"))
    assert rejections.by_hand("heuristic_committed").state == "heuristic_committed"
    assert "spark" in str(rejections.group_done(Member("spark", 3, "run")))
    assert "mended" not in str(rejections.stopped("its disk failed"))
    assert "its disk failed" in str(rejections.stopped("its disk failed"))
