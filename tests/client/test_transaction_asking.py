"""A request that is asked again while the broker is busy."""

import pytest

from tests.client.fake_broker import LOSE, SWALLOW
from tests.client.rig import Rig
from tfmq.client.connection.requests import request_until_not_busy
from tfmq.errors import Busy, ConnectionFailed, DiskFull, TimedOut
from tfmq.protocol.commands import Ping


def test_a_busy_broker_is_left_alone_longer_and_longer() -> None:
    rig = Rig()
    rig.broker.plan(Ping, *[Busy()] * 5)
    begun = rig.time
    call = rig.run(request_until_not_busy(rig.link, Ping(), until=rig.time + 10))
    assert call.error is None and 0.3 < rig.time - begun < 1


def test_other_errors_come_back_at_once() -> None:
    rig = Rig()
    rig.broker.plan(Ping, DiskFull())
    call = rig.run(request_until_not_busy(rig.link, Ping(), until=rig.time + 10))
    assert isinstance(call.error, DiskFull) and len(rig.broker.requests) == 2


def test_the_end_of_the_time_is_the_end() -> None:
    rig = Rig()
    rig.broker.plan(Ping, *[Busy()] * 100)
    assert isinstance(rig.run(request_until_not_busy(rig.link, Ping(), until=rig.time + 1)).error, Busy)
    rig.broker.plans.clear()
    rig.broker.plan(Ping, SWALLOW)
    assert isinstance(rig.run(request_until_not_busy(rig.link, Ping(), until=rig.time + 1)).error, TimedOut)


@pytest.mark.parametrize(("repeat", "error"), [(True, type(None)), (False, ConnectionFailed)])
def test_what_must_not_be_repeated_is_not(repeat: bool, error: type) -> None:
    rig = Rig()
    rig.broker.plan(Ping, LOSE)
    call = rig.run(request_until_not_busy(rig.link, Ping(), until=rig.time + 1, repeat=repeat))
    assert isinstance(call.error, error)


def test_whoever_leaves_early_gives_the_call_up() -> None:
    rig = Rig()
    rig.broker.plan(Ping, SWALLOW)
    asking = request_until_not_busy(rig.link, Ping(), until=rig.time + 10)
    next(asking)
    rig.exchange()
    asking.close()
    assert not rig.link.has_pending_requests
