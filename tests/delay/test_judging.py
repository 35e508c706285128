"""What can be said of one message."""

import pytest

from tests.delay.desk import ORDERS, Desk, Handle
from tfmq.delay.cancellation import FIRING
from tfmq.errors import StorageStopped


def state(desk: Desk, handle: Handle) -> str:
    return desk.queue._state_resolver.state_of(handle.key, handle.turn, desk.landing.log.end_ordinal)


def test_a_message_goes_from_pending_to_delivered_to_unknown() -> None:
    desk = Desk(outcome_seconds=60)
    (a,) = desk.send([b"a"], 100)
    assert state(desk, a) == "pending"
    desk.targets.automatic = False
    desk.advance(0.2)
    assert state(desk, a) == FIRING
    desk.targets.force()
    assert state(desk, a) == "delivered"
    desk.advance(61)
    assert state(desk, a) == "unknown"


def test_numbers_that_nobody_was_given_are_unknown() -> None:
    desk = Desk()
    (a,) = desk.send([b"a"], 100)
    assert state(desk, a._replace(number=a.number + 1)) == "unknown"
    assert state(desk, a._replace(due=1)) == "unknown"


def test_where_its_log_could_not_be_opened_nobody_can_tell() -> None:
    desk = Desk()
    (a,) = desk.send([b"a"], 100)
    desk.advance(1)
    desk.targets.stop(ORDERS)
    desk.targets.target(ORDERS).appends.clear()
    with pytest.raises(StorageStopped):
        state(desk, a)


def test_of_a_topic_that_is_gone_nothing_is_known() -> None:
    desk = Desk()
    (a,) = desk.send([b"a"], 100)
    desk.targets.delete(16)
    assert state(desk, a) == "unknown"
