"""The lowest unfinished offset: whatever the order in which handlers end, no place goes beyond one that has not."""

import random

import pytest

from tests.client.blocks import INCARNATION, Bytes
from tests.scale import seeded
from tfmq.client.consumer.decoder import Decoder
from tfmq.client.consumer.positions import AckTracker, AckTrackers, Batch, ReadPosition, position_after
from tfmq.offsets.storage import PartitionName

A = PartitionName("orders", 0)


def batch(count: int) -> Batch:
    log = Bytes(0)
    log.append(*[b"%d" % number for number in range(count)])
    (block,) = Decoder("orders", 0, INCARNATION).decode(log.body(), 0, 0, log.end)
    return Batch(A, block.messages, ReadPosition(block.next_offset, block.next_ordinal, block.epoch))


@pytest.fixture
def ledger() -> AckTracker:
    return AckTracker(A, ReadPosition(0, 0, 1))


def test_the_place_is_the_lowest_unfinished_whatever_ends_first(ledger: AckTracker) -> None:
    taken = batch(4)
    first, second, third, fourth = taken.messages
    ledger.add_batch(taken)
    ledger.ack(second)
    ledger.ack(fourth)
    assert ledger.position == ReadPosition(0, 0, 1)
    ledger.ack(first)
    assert ledger.position == position_after(second)
    ledger.ack(third)
    assert ledger.position == taken.end_position, "with all that was left out behind the last"


def test_in_any_order_no_place_passes_an_unfinished_one_and_all_ends_at_the_end() -> None:
    chance: random.Random = seeded("ledger")
    for _ in range(50):
        made, taken = AckTracker(A, ReadPosition(0, 0, 1)), batch(12)
        made.add_batch(taken)
        left = list(taken.messages)
        while left:
            made.ack(left.pop(chance.randrange(len(left))))
            lowest = min((each.offset for each in left), default=taken.end_position.offset)
            assert taken.messages[0].offset <= made.position.offset <= lowest
            assert made.unacked_bytes == (taken.end_position.offset - made.position.offset if left else 0)
        assert made.position == taken.end_position


def test_a_message_finished_twice_or_of_elsewhere_changes_nothing(ledger: AckTracker) -> None:
    taken = batch(3)
    ledger.ack(taken.messages[0])
    ledger.add_batch(taken._replace(messages=taken.messages[:2]))
    ledger.ack(taken.messages[1])
    ledger.ack(taken.messages[1])
    ledger.ack(taken.messages[2])
    assert (ledger.position.offset, ledger.acked_count) == (0, 1)


def test_what_is_left_out_moves_the_place_behind_what_is_finished(ledger: AckTracker) -> None:
    ledger.add_batch(Batch(A, [], ReadPosition(50, 1, 1)))
    assert ledger.position.offset == 50
    taken = batch(1)
    waiting = AckTracker(A, ReadPosition(0, 0, 1))
    waiting.add_batch(taken)
    waiting.add_batch(Batch(A, [], ReadPosition(900, 9, 1)))
    assert waiting.position.offset == 0
    waiting.ack(taken.messages[0])
    assert waiting.position == ReadPosition(900, 9, 1)


def test_the_place_with_the_message_in_work_is_where_its_handler_may_commit(ledger: AckTracker) -> None:
    taken = batch(3)
    first, second, third = taken.messages
    ledger.add_batch(taken)
    ledger.ack(second)
    assert ledger.position_if_acked(first) == position_after(second)
    assert ledger.position_if_acked(third) == ledger.position_if_acked(None) == ReadPosition(0, 0, 1)
    assert ledger.position == ReadPosition(0, 0, 1), "asking finishes nothing"


def test_a_partition_that_is_leaving_says_when_no_handler_is_at_work_on_it() -> None:
    ledgers, freed = AckTrackers(), []
    ledgers.on_handlers_idle = lambda: freed.append(True)
    ledger = ledgers.add_batch(batch(2), ReadPosition(0, 0, 1))
    ledger.active_handlers = 1
    assert ledgers.has_active_handlers(A)
    ledgers.revoke(A)
    assert ledger.revoked and not ledger.invalid and not freed
    ledgers.handler_ended(ledger)
    assert freed and not ledgers.has_active_handlers(A)


def test_one_that_stays_after_all_goes_on_and_a_void_one_never_does() -> None:
    ledgers, stayed = AckTrackers(), []
    ledgers.on_unrevoked = lambda: stayed.append(True)
    ledger = ledgers.add_batch(batch(2), ReadPosition(0, 0, 1))
    ledgers.unrevoke(A)
    assert not stayed
    ledgers.revoke(A)
    ledgers.unrevoke(A)
    assert stayed and not ledger.revoked
    ledgers.invalidate(A)
    assert ledger.invalid and ledger.revoked and ledgers.get(A) is None and ledgers.names() == []
