"""What a hook is. What producers do with hooks is in tests/test_producer.py, spans are in tests/test_tracing.py."""

from typing import Any

import pytest

import tfmq.aio
from tests.client.handling_rig import TOPIC
from tfmq.hooks import Hook
from tfmq.message import Message


def test_a_hook_changes_nothing_by_itself() -> None:
    message = Message(b"x")
    hook = Hook()
    assert hook.before_send("orders", message) is message
    hook.after_send("orders", message, None, None)
    hook.before_handle(message)
    hook.after_handle(message, None)


@pytest.mark.parametrize("hooks", [5, [5], [Hook], Hook, "ab", [None]])
@pytest.mark.parametrize("face", [tfmq.Consumer, tfmq.Producer, tfmq.aio.Consumer, tfmq.aio.Producer])
def test_what_is_no_hook_is_refused_when_it_is_given(face: Any, hooks: Any) -> None:
    topics = {} if face in (tfmq.Producer, tfmq.aio.Producer) else {"topics": TOPIC}
    with pytest.raises(tfmq.BadRequest, match="hooks="):
        face("127.0.0.1:1", hooks=hooks, **topics)
    face("127.0.0.1:1", hooks=(Hook(),), **topics)
