"""What waits for the disk is bounded, for one session and for all."""

import pytest

from tests.broker.helpers import Session
from tfmq.broker.admission import Quotas
from tfmq.errors import Busy

LIMITS = {"pending_bytes": 100, "pending_bytes_per_session": 40, "pending_requests": 5}


def test_what_passes_the_broker_s_share_is_busy_and_leaves_no_trace() -> None:
    quotas, sessions = Quotas(LIMITS), [Session() for _ in range(4)]
    for session in sessions[:3]:
        quotas.take(session, 30)
    with pytest.raises(Busy) as caught:
        quotas.take(sessions[3], 11)
    assert caught.value.retriable and caught.value.outcome == "not done"
    assert quotas.bytes == 90
    quotas.take(sessions[3], 10)


def test_one_batch_larger_than_the_share_passes_when_nothing_else_waits() -> None:
    quotas = Quotas(LIMITS)
    quotas.take(Session(), 1000)
    with pytest.raises(Busy):
        quotas.take(Session(), 1)


def test_too_many_small_requests_are_busy() -> None:
    quotas, session = Quotas(LIMITS), Session()
    for _ in range(5):
        quotas.take(session, 1)
    with pytest.raises(Busy):
        quotas.take(session, 1)


def test_a_session_above_its_share_is_paused_until_half_is_done() -> None:
    quotas, session = Quotas(LIMITS), Session()
    quotas.take(session, 20)
    assert not session.paused
    quotas.take(session, 21)
    assert session.paused
    quotas.give(session, 20)
    assert session.paused
    quotas.give(session, 21)
    assert not session.paused
    assert quotas.bytes == quotas.requests == 0
