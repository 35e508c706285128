"""`poll(0)` never looked at the connection, so it always returned []."""

import pytest

from tests.client.consumer.test_core import filled
from tests.client.scripted_broker import Broker, Script
from tfmq.errors import BadRequest


def test_polling_without_time_gets_what_is_there_in_the_end() -> None:
    broker = Broker()
    filled(broker, 3)
    script = Script(broker)
    found: list[object] = []
    for _ in range(50):
        operation = script.core.poll(0.0, 10)
        try:
            assert next(operation).seconds == 0.0  # one look
            script.link.serve()
            script.core.tasks.tick()
            next(operation)
        except StopIteration as end:
            found += end.value
    assert len(found) == 3


def test_a_poll_for_no_messages_makes_no_sense() -> None:
    script = Script(Broker())
    for count in (0, -1):
        with pytest.raises(BadRequest):
            script.run(script.core.poll(0.0, count))
