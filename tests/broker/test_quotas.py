"""What waits for the disk is bounded, for one session and for all."""

import pytest

from tests.broker.helpers import Session
from tfmq.broker.admission import Backpressure
from tfmq.errors import Busy

LIMITS = {"pending_bytes": 100, "pending_bytes_per_session": 40, "pending_requests": 5}


def test_what_passes_the_broker_s_share_is_busy_and_leaves_no_trace() -> None:
    quotas, sessions = Backpressure(LIMITS), [Session() for _ in range(4)]
    for session in sessions[:3]:
        quotas.acquire(session, 30)
    with pytest.raises(Busy) as caught:
        quotas.acquire(sessions[3], 11)
    assert caught.value.retriable and caught.value.outcome == "not done"
    assert quotas.pending_bytes == 90
    quotas.acquire(sessions[3], 10)


def test_one_batch_larger_than_the_share_passes_when_nothing_else_waits() -> None:
    quotas = Backpressure(LIMITS)
    quotas.acquire(Session(), 1000)
    with pytest.raises(Busy):
        quotas.acquire(Session(), 1)


def test_too_many_small_requests_are_busy() -> None:
    quotas, session = Backpressure(LIMITS), Session()
    for _ in range(5):
        quotas.acquire(session, 1)
    with pytest.raises(Busy):
        quotas.acquire(session, 1)


def test_a_session_above_its_share_is_paused_until_half_is_done() -> None:
    quotas, session = Backpressure(LIMITS), Session()
    quotas.acquire(session, 20)
    assert not session.paused
    quotas.acquire(session, 21)
    assert session.paused
    quotas.release(session, 20)
    assert session.paused
    quotas.release(session, 21)
    assert not session.paused
    assert quotas.pending_bytes == quotas.pending_requests == 0
