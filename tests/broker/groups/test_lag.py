"""The lag of a group at the broker: messages after a committed offset, of each partition."""

import pytest

from tests.broker.helpers import Broker
from tfmq.broker.catalog_state import CommittedOffset
from tfmq.broker.groups.lag import lag


@pytest.fixture
def broker() -> Broker:
    made = Broker()
    made.create()
    return made


def test_lag_is_counted_in_messages(broker: Broker) -> None:
    producer = broker.lease()
    answer = broker.produce(producer, 0, [b"x"] * 10)
    partition = broker.engine.broker.topics.partition("orders", broker.incarnation(), 0)
    first = answer.positions[0][1]
    assert lag(partition, CommittedOffset(first + 3 * 21, 0, 1, 1)) == 7
    assert lag(partition, CommittedOffset(broker.log().end_offset, 0, 1, 1)) == 0
    assert lag(partition, CommittedOffset(10**9, 0, 1, 1)) == -1
