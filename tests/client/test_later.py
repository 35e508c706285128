"""What a later release will do says so on every face, in words and with one class of error."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.client.blocks import INCARNATION
from tfmq import aio
from tfmq.client.received import Origin, ReceivedMessage
from tfmq.consumer import Consumer
from tfmq.errors import NotSupported

CONSUMING: list[Callable[[Any], Any]] = [
    lambda consumer: consumer.run(print, workers=4, order="key", signals=False),
    lambda consumer: consumer.on("orders"),
]


@pytest.mark.parametrize("face", [Consumer, aio.Consumer])
@pytest.mark.parametrize("call", CONSUMING)
def test_consumers_refuse_what_comes_later(face: Any, call: Callable[[Any], Any]) -> None:
    with pytest.raises(NotSupported, match="later release"):
        call(face("127.0.0.1:1", topics="orders"))


def test_a_message_refuses_to_be_handled() -> None:
    origin = Origin(INCARNATION, 0, 0, None)
    message = ReceivedMessage(b"x", "orders", 0, 0, 21, 0, 1, None, origin)
    with pytest.raises(NotSupported, match="later release"):
        message.handling()
