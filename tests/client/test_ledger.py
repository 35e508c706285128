"""The lowest unfinished offset: whatever the order in which handlers end, no place goes beyond one that has not."""

import random

import pytest

from tests.client.blocks import INCARNATION, Bytes
from tests.scale import seeded
from tfmq.client.consumer.decoder import Decoder
from tfmq.client.consumer.positions import Batch, Ledger, Ledgers, Place, behind
from tfmq.offsets.storage import PartitionName

A = PartitionName("orders", 0)


def batch(count: int) -> Batch:
    log = Bytes(0)
    log.append(*[b"%d" % number for number in range(count)])
    (block,) = Decoder("orders", 0, INCARNATION).decode(log.body(), 0, 0, log.end)
    return Batch(A, block.messages, Place(block.next_offset, block.next_ordinal, block.epoch))


@pytest.fixture
def ledger() -> Ledger:
    return Ledger(A, Place(0, 0, 1))


def test_the_place_is_the_lowest_unfinished_whatever_ends_first(ledger: Ledger) -> None:
    taken = batch(4)
    first, second, third, fourth = taken.messages
    ledger.take(taken)
    ledger.finish(second)
    ledger.finish(fourth)
    assert ledger.place == Place(0, 0, 1)
    ledger.finish(first)
    assert ledger.place == behind(second)
    ledger.finish(third)
    assert ledger.place == taken.following, "with all that was left out behind the last"


def test_in_any_order_no_place_passes_an_unfinished_one_and_all_ends_at_the_end() -> None:
    chance: random.Random = seeded("ledger")
    for _ in range(50):
        made, taken = Ledger(A, Place(0, 0, 1)), batch(12)
        made.take(taken)
        left = list(taken.messages)
        while left:
            made.finish(left.pop(chance.randrange(len(left))))
            lowest = min((each.offset for each in left), default=taken.following.offset)
            assert taken.messages[0].offset <= made.place.offset <= lowest
            assert made.span == (taken.following.offset - made.place.offset if left else 0)
        assert made.place == taken.following


def test_a_message_finished_twice_or_of_elsewhere_changes_nothing(ledger: Ledger) -> None:
    taken = batch(3)
    ledger.finish(taken.messages[0])
    ledger.take(taken._replace(messages=taken.messages[:2]))
    ledger.finish(taken.messages[1])
    ledger.finish(taken.messages[1])
    ledger.finish(taken.messages[2])
    assert (ledger.place.offset, ledger.done) == (0, 1)


def test_what_is_left_out_moves_the_place_behind_what_is_finished(ledger: Ledger) -> None:
    ledger.take(Batch(A, [], Place(50, 1, 1)))
    assert ledger.place.offset == 50
    taken = batch(1)
    waiting = Ledger(A, Place(0, 0, 1))
    waiting.take(taken)
    waiting.take(Batch(A, [], Place(900, 9, 1)))
    assert waiting.place.offset == 0
    waiting.finish(taken.messages[0])
    assert waiting.place == Place(900, 9, 1)


def test_the_place_with_the_message_in_work_is_where_its_handler_may_commit(ledger: Ledger) -> None:
    taken = batch(3)
    first, second, third = taken.messages
    ledger.take(taken)
    ledger.finish(second)
    assert ledger.place_with(first) == behind(second)
    assert ledger.place_with(third) == ledger.place_with(None) == Place(0, 0, 1)
    assert ledger.place == Place(0, 0, 1), "asking finishes nothing"


def test_a_partition_that_is_leaving_says_when_no_handler_is_at_work_on_it() -> None:
    ledgers, freed = Ledgers(), []
    ledgers.freed = lambda: freed.append(True)
    ledger = ledgers.take(batch(2), Place(0, 0, 1))
    ledger.in_work = 1
    assert ledgers.in_work(A)
    ledgers.leave(A)
    assert ledger.leaving and not ledger.void and not freed
    ledgers.rested(ledger)
    assert freed and not ledgers.in_work(A)


def test_one_that_stays_after_all_goes_on_and_a_void_one_never_does() -> None:
    ledgers, stayed = Ledgers(), []
    ledgers.stayed = lambda: stayed.append(True)
    ledger = ledgers.take(batch(2), Place(0, 0, 1))
    ledgers.stay(A)
    assert not stayed
    ledgers.leave(A)
    ledgers.stay(A)
    assert stayed and not ledger.leaving
    ledgers.void(A)
    assert ledger.void and ledger.leaving and ledgers.get(A) is None and ledgers.names() == []
