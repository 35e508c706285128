"""A question that is asked again for a passing failure, and never for another."""

from typing import Any

import pytest

from tests.client.scripted import Broker, Script
from tfmq.client.connection.requests import request_with_retries
from tfmq.errors import BadRequest, Busy, ConnectionFailed
from tfmq.protocol.commands import Metadata, MetadataReply


def asked(broker: Broker, seconds: float = 10.0, **options: Any) -> Any:
    script = Script(broker)
    script.link.connection_count = 0 if broker.down else 1
    return script.run(
        request_with_retries(script.link, Metadata(None), script.link.now() + seconds, **options)
    )


def test_a_passing_failure_is_asked_again() -> None:
    broker = Broker()
    broker.fail[Metadata] = [Busy(), ConnectionFailed(), Busy()]
    assert asked(broker) == MetadataReply([])
    assert len(broker.requests) == 4


def test_busy_may_be_told_at_once_too() -> None:
    broker = Broker()
    broker.fail[Metadata] = [ConnectionFailed(), Busy()]
    with pytest.raises(Busy):
        asked(broker, while_busy=False)
    assert len(broker.requests) == 2


def test_any_other_failure_is_told_at_once() -> None:
    broker = Broker()
    broker.fail[Metadata] = [BadRequest(), Busy()]
    with pytest.raises(BadRequest):
        asked(broker)
    assert len(broker.requests) == 1


def test_a_failure_that_does_not_pass_is_told_when_the_time_is_over() -> None:
    broker = Broker()
    broker.fail[Metadata] = [Busy() for _ in range(1000)]
    with pytest.raises(Busy):
        asked(broker)
    assert 5 < len(broker.requests) < 20


def test_a_broker_that_was_never_reached_is_told_at_once() -> None:
    broker = Broker()
    broker.down = True
    with pytest.raises(ConnectionFailed):
        asked(broker)
    assert len(broker.requests) == 1
