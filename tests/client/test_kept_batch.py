"""What handles say of messages that are kept."""

from typing import Any

import pytest

from tfmq.client.producer.store_and_forward import StorableBatch
from tfmq.errors import Busy
from tfmq.message import SendResult
from tfmq.protocol.commands import ACKS_NONE, ACKS_SYNCED


def batch() -> StorableBatch:
    owner: Any = None
    made = StorableBatch(owner, "orders", 1, 1000, 0, 0.0)
    made.add(b"x", None, None)
    made.add(b"y", None, None)
    made.seal()
    return made


def test_a_kept_one_says_so_and_has_no_offset_yet() -> None:
    made = batch()
    made.assign_sequence(7, 3)
    made.is_in_outbox = True
    made.set_stored((), ACKS_NONE)
    assert made.result_of(1) == SendResult("orders", 1, None, 0, "kept", 1)


def test_a_sent_one_is_as_any_other() -> None:
    made = batch()
    made.assign_sequence(7, 3)
    made.set_stored([(0, 100)], ACKS_SYNCED)
    result = made.result_of(0, 2)
    assert (result.offset, result.durability, result.message_id) == (100, "synced", (7 << 24) + 3)


def test_a_failed_one_raises() -> None:
    made = batch()
    made.set_failed(Busy("full"))
    with pytest.raises(Busy, match="full"):
        made.result_of(0)


def test_the_sender_takes_none_for_open() -> None:
    owner: Any = None
    made = StorableBatch(owner, "orders", 1, 1000, 0, 0.0)
    assert (made.is_open, made.is_gathering) == (False, True)


def test_one_that_leaves_counts_its_messages_once() -> None:
    made = batch()
    made.assign_sequence(7, 3)
    made.seal()
    assert (made.count, made.is_gathering) == (2, False)
