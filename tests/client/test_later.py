"""What a later release will do says so, in words and with one class of error."""

import pytest

from tests.client.blocks import INCARNATION
from tfmq.client.later import later
from tfmq.client.received import Origin, ReceivedMessage
from tfmq.errors import NotSupported


def test_it_names_what_to_do_instead() -> None:
    with pytest.raises(NotSupported, match="that needs a later release; do this"):
        later("that", "do this")


def test_a_message_refuses_to_be_handled() -> None:
    origin = Origin(INCARNATION, 0, 0, None)
    message = ReceivedMessage(b"x", "orders", 0, 0, 21, 0, 1, None, origin)
    with pytest.raises(NotSupported, match="later release"):
        message.handling()
