"""Errors of sessions: the right class, and an outcome that is true."""

import logging

import pytest

from journal import errors as journal
from tfmq import errors
from tfmq.errors import NOT_DONE, UNKNOWN
from tfmq.transaction import rejections, states
from tfmq.transaction.requests import CommitGroupMember


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
def test_an_error_of_the_journal_says_whether_it_happened(error: Exception, kind: type[errors.TfmqError]) -> None:
    before, after = rejections.from_journal_error(error), rejections.durability_unknown(error)
    assert type(before) is type(after) is kind
    assert before.outcome == NOT_DONE, "nothing was written"
    assert after.outcome == UNKNOWN, "it is written, and may be on the disk"
    assert before.__cause__ is error


def test_an_error_of_ours_stays_what_it_is() -> None:
    error = errors.Fenced()
    assert rejections.from_journal_error(error) is rejections.from_command_error(error) is error


def test_a_wrong_step_names_the_state() -> None:
    reported = rejections.from_command_error(states.InvalidTransition(states.OPEN, "x"))
    assert isinstance(reported, errors.TransactionState)
    assert reported.details["state"] == "open"


def test_an_unexpected_error_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "tfmq.transaction"):
        reported = rejections.from_command_error(ZeroDivisionError())
    assert isinstance(reported, errors.ServerError)
    assert "ZeroDivisionError" in caplog.text


def test_sentences_name_what_they_are_about() -> None:
    assert "12" in str(rejections.not_open(12))
    assert rejections.not_open(12).outcome == NOT_DONE
    assert "order-1" in str(rejections.wrong_state("order-1", "open", "it needs more"))
    assert "order-1" in str(rejections.missing_batch("order-1"))
    assert rejections.heuristic_outcome("heuristic_committed").state == "heuristic_committed"
    assert "spark" in str(rejections.group_committed(CommitGroupMember("spark", 3, "run")))
    assert "mended" not in str(rejections.journal_stopped("its disk failed"))
    assert "its disk failed" in str(rejections.journal_stopped("its disk failed"))
