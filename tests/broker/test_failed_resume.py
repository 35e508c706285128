"""A resumption that fails half-way has forgotten what was sent: a resend gets "unknown", and is safe afterwards."""

import pytest

from tests.broker.helpers import Broker
from tfmq.protocol.commands import ResumePartition


@pytest.mark.parametrize("nth", [1, 2])
def test_a_resend_after_a_failed_resumption_is_unknown(nth: int) -> None:
    broker = Broker()
    broker.create()
    producer = broker.lease()
    for sequence in range(5):
        broker.produce(producer, sequence, [b"%d" % sequence])
    broker.log().stop("the test says so")
    broker.disk.faults.fail("read", nth=nth, path="orders-0/")
    assert broker.ask(ResumePartition("orders", 0)).code == "internal_error"
    for sequence in (4, 5):
        again = broker.produce(producer, sequence, [b"%d" % sequence])
        assert (again.code, again.failure.outcome) == ("storage_stopped", "unknown")
    assert broker.ask(ResumePartition("orders", 0)).state == "open"
    assert broker.produce(producer, 4, [b"4"]).repeated
    assert not broker.produce(producer, 5, [b"5"]).repeated
    assert broker.payloads() == [b"%d" % sequence for sequence in range(6)]
