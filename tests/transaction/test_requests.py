"""Requests and answers are values; what may be left out has the meaning that the page gives it."""

from tfmq.transaction.requests import BeginRequest, CommitResult, TransactRequest


def test_a_transaction_without_a_name_is_local_and_checks_back_with_no_client() -> None:
    request = BeginRequest(7, 1)
    assert (request.xid, request.timeout_ms, request.group, request.member) == ("", None, "", None)


def test_an_end_without_more_dropped_nothing_and_is_the_first_answer() -> None:
    assert CommitResult("committed", 5) == ("committed", 5, 0, (), False, {}, 0)


def test_a_whole_transaction_may_be_without_offsets() -> None:
    assert TransactRequest(7, 1, []).offsets == ()
