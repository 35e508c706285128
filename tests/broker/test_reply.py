"""What the broker asks of its callers is what the server and the tests offer."""

from __future__ import annotations

import errno
import inspect

import pytest

from journal import errors as journal
from tests.broker import helpers
from tfmq import errors
from tfmq.broker.reply import (
    ARRIVALS_STOPPED,
    STOPPING,
    Reply,
    Session,
    arrival_log_error,
    client_error,
    not_done_error,
)
from tfmq.server import session as server


def methods(shape: type) -> set[str]:
    return {name for name, _ in inspect.getmembers(shape) if not name.startswith("_")}


ATTRIBUTES = {"identity", "is_closed", "number", "operator", "sent_bytes", "synced_durability", "user"}
"""Of a session; its other members are methods."""


def test_both_implement_replies_and_sessions() -> None:
    assert methods(Reply) <= methods(helpers.Answer) | {"correlation"}
    assert methods(Session) <= methods(helpers.Session) | ATTRIBUTES
    assert methods(Reply) <= methods(server.Reply)
    assert methods(Session) <= methods(server.Session) | ATTRIBUTES


# Every journal error has a client's name, at one border.

CASES = [
    (journal.BelowStart(5, 10), "offset_out_of_range"),
    (journal.BeyondEnd(50, 10), "offset_out_of_range"),
    (journal.NotARecord(7), "not_a_record"),
    (journal.CutAway(50, 40), "log_truncated"),
    (journal.Corrupt("/secret/path", 5, 10, "a bad checksum"), "damaged"),
    (journal.Lost("/secret/path", 5, 10, "given up by a repair"), "damaged"),
    (journal.BadBatch("it is empty"), "bad_request"),
    (journal.TooLarge("the batch", 10, 5), "message_too_large"),
    (journal.Full("/secret/path"), "disk_full"),
    (journal.Stopped("a force failed"), "storage_stopped"),
    (journal.Closed(), "busy"),
    (journal.NewerFormat("/secret/path", 2, 1), "internal_error"),
    (journal.Locked("/secret/path"), "internal_error"),
    (OSError(5, "Input/output error", "/secret/path"), "internal_error"),
    (OSError(24, "Too many open files", "/secret/path"), "busy"),
    (ZeroDivisionError(), "internal_error"),
]


@pytest.mark.parametrize("error, code", CASES, ids=lambda case: type(case).__name__)
def test_each_error_has_a_code_and_shows_no_paths(error: Exception, code: str) -> None:
    known = client_error(error)
    assert known.code == code
    assert "/secret" not in str(known) and "/secret" not in repr(known.details)


def test_no_journal_error_is_left_out() -> None:
    leaves = {
        each
        for _, each in inspect.getmembers(journal, inspect.isclass)
        if issubclass(each, journal.JournalError) and not each.__subclasses__()
    }
    assert leaves <= {type(error) for error, _ in CASES}


def test_the_numbers_travel() -> None:
    damaged = client_error(journal.Corrupt("p", 5, 10, "r"))
    assert isinstance(damaged, errors.Damaged) and (damaged.first, damaged.next) == (5, 10)
    cut = client_error(journal.CutAway(50, 40))
    assert isinstance(cut, errors.LogTruncated) and cut.cut == 40


def test_the_place_that_knows_decides_the_outcome() -> None:
    assert not_done_error(journal.Stopped("x")).outcome == "not done"
    assert client_error(journal.Stopped("x")).outcome == "unknown"
    fenced = errors.Fenced()
    assert client_error(fenced) is fenced
    assert str(client_error(journal.Closed())) == STOPPING


def test_a_lack_of_descriptors_is_not_called_a_full_disk() -> None:
    error = journal.Full("a/b: Too many open files")
    error.__cause__ = OSError(errno.EMFILE, "Too many open files")
    known = client_error(error)
    assert (known.code, "ulimit -n" in str(known)) == ("busy", True)
    assert client_error(journal.Full("a/b")).code == "disk_full"


def test_a_stop_of_the_arrivals_names_the_way_that_lifts_it_and_keeps_what_is_known() -> None:
    reported = arrival_log_error(not_done_error(journal.Stopped("a force failed")))
    assert (reported.code, reported.outcome, str(reported)) == ("storage_stopped", "not done", ARRIVALS_STOPPED)
    assert reported.details == {"reason": "a force failed"}
    assert arrival_log_error(journal.Stopped("a force failed")).outcome == "unknown"
    full = errors.DiskFull()
    assert arrival_log_error(full) is full
