"""Producer ids: each taker one of its own, few round trips."""

import pytest

from tests.client.rig import Rig
from tfmq.client.send.partition_sender import LEASE_COUNT, ProducerIds
from tfmq.errors import Busy, TfmqError
from tfmq.protocol.commands import LeaseProducerIds


class Taken:
    def __init__(self) -> None:
        self.ids: list[int] = []
        self.errors: list[TfmqError] = []

    def __call__(self, producer_id: int, error: TfmqError | None) -> None:
        if error is None:
            self.ids.append(producer_id)
        else:
            self.errors.append(error)


@pytest.fixture
def rig() -> Rig:
    return Rig()


def leases(rig: Rig) -> list[int]:
    return [each.count for each in rig.broker.requests if isinstance(each, LeaseProducerIds)]


def test_no_id_is_given_twice(rig: Rig) -> None:
    identities, taken = ProducerIds(rig.link), Taken()
    for _ in range(100):
        identities.acquire(taken)
        rig.exchange()
    assert len(set(taken.ids)) == 100
    assert len(leases(rig)) == -(-100 // LEASE_COUNT)


def test_many_waiters_share_a_round_trip(rig: Rig) -> None:
    identities, taken = ProducerIds(rig.link), Taken()
    for _ in range(60):
        identities.acquire(taken)
    rig.exchange()
    assert len(set(taken.ids)) == 60 and len(leases(rig)) <= 2


def test_a_refusal_reaches_all_that_wait_and_no_one_later(rig: Rig) -> None:
    rig.broker.plan(LeaseProducerIds, Busy())
    identities, taken = ProducerIds(rig.link), Taken()
    identities.acquire(taken)
    identities.acquire(taken)
    rig.exchange()
    assert len(taken.errors) == 2
    identities.acquire(taken)
    rig.exchange()
    assert len(taken.ids) == 1
