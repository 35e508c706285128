"""Calls, and the errors of error replies."""

import pytest

from tfmq.client.connection.connection import PendingRequest, error_from_reply
from tfmq.errors import NOT_DONE, UNKNOWN, Damaged, TfmqError, to_error_reply
from tfmq.protocol.commands import Ping


def test_a_call_says_what_it_is() -> None:
    call = PendingRequest(Ping(), (), correlation_id=7)
    assert repr(call) == "<PendingRequest PING 7 open>" and not call.done
    call.complete()
    assert "answered" in repr(call)
    call.error = TfmqError("no")
    with pytest.raises(TfmqError, match="no"):
        call.result()


def test_an_error_reply_becomes_its_error() -> None:
    sent = Damaged("a range is gone", first=10, next=20)
    got = error_from_reply([-sent.number, 7, *to_error_reply(sent)[1:]])
    assert isinstance(got, Damaged) and (got.first, got.next) == (10, 20)
    assert got.sentence == "a range is gone" and got.outcome == "not done"


@pytest.mark.parametrize(
    "header", [[-999, 1], [-4, 1, 5, 5, 5, 5], [-999, 1, "new_code", "odd", "words", {}]]
)
def test_one_that_is_not_well_formed_is_told_as_it_came(header: list[object]) -> None:
    error = error_from_reply(header)
    assert error.outcome == "unknown" and error.number == -header[0]  # type: ignore[operator]


def test_one_that_is_late_may_have_happened_only_if_it_was_sent() -> None:
    call = PendingRequest(Ping(), (), correlation_id=1)
    assert call.timeout_error("broker:1").outcome == NOT_DONE
    call.sent = True
    late = call.timeout_error("broker:1")
    assert late.outcome == UNKNOWN and "broker:1 did not reply to PING in time" in str(late)
