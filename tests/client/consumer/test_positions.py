"""When a message counts as processed: a sentence of the contract, a test."""

from __future__ import annotations

import random

import pytest

from tests.client.blocks import INCARNATION, Bytes
from tests.scale import seeded
from tfmq.client.consumer.ack_tracker import AckTracker, AckTrackers
from tfmq.client.consumer.decoder import Decoder
from tfmq.client.consumer.message import (
    CURRENT_MESSAGE,
    UNKNOWN,
    Batch,
    ReadPosition,
    ReceivedMessage,
    partition_of,
    position_after,
)
from tfmq.client.consumer.positions import Positions
from tfmq.errors import BadRequest, Fenced
from tfmq.offsets.storage import PartitionName

A, B = PartitionName("orders", 0), PartitionName("orders", 1)


def batch(name: PartitionName = A, count: int = 3) -> Batch:
    log = Bytes(name.partition)
    log.append(*[b"%d" % n for n in range(count)])
    (block,) = Decoder(name.topic, name.partition, INCARNATION).decode(log.body(), 0, 0, log.end)
    return Batch(name, block.messages, ReadPosition(block.next_offset, block.next_ordinal, block.epoch))


def positions(*names: PartitionName, manual: bool = False) -> Positions:
    made = Positions(manual=manual)
    for name in names or (A,):
        made.add(name, ReadPosition(0, 0, 1), saved=0)
    return made


def looped(made: Positions, ready: Batch, count: int) -> list[ReceivedMessage]:
    """A loop that was given `count` messages and has not asked for the next."""
    made.set_ready_batch(ready)
    for message in ready.messages[:count]:
        made.current = message
    return ready.messages


def test_the_message_in_work_is_not_acked() -> None:
    made, ready = positions(), batch()
    first, second, _ = looped(made, ready, 2)
    assert made.acked_position(A) == ReadPosition(second.offset, 1, 1)
    assert made.uncommitted_positions()[A].offset == first.next_offset


def test_asking_for_the_next_acks_the_last_with_all_that_was_left_out_after_it() -> None:
    made, ready = positions(), batch()
    looped(made, ready, 3)
    made.ack_delivered()
    assert made.acked_position(A) == ready.end_position


def test_leaving_in_the_middle_without_an_error_acks_what_is_out_and_no_more() -> None:
    made, ready = positions(), batch()
    _, second, third = list(looped(made, ready, 2))
    made.ack_delivered()
    assert made.acked_position(A).offset == second.next_offset == third.offset
    assert made.ready_messages() == [third]


def test_a_polled_batch_is_acked_by_the_next_poll() -> None:
    made, ready = positions(), batch()
    made.set_ready_batch(ready)
    third = ready.messages[2]
    assert len(made.take_ready_messages(2)) == 2
    assert made.acked_position(A).offset == 0
    made.ack_delivered()
    assert made.acked_position(A).offset == third.offset
    assert made.take_ready_messages(2) == [third]


def test_several_partitions_in_one_poll_wait_together() -> None:
    made = positions(A, B)
    for ready in (batch(A), batch(B)):
        made.set_ready_batch(ready)
        made.take_ready_messages(3)
    assert made.uncommitted_positions() == {}
    made.ack_delivered()
    assert set(made.uncommitted_positions()) == {A, B}


def test_commit_covers_all_that_is_out_and_later_saving_does_not_go_back() -> None:
    made, ready = positions(), batch()
    first = looped(made, ready, 1)[0]
    made.ack_all()
    assert made.uncommitted_positions()[A].offset == first.next_offset
    made.mark_committed(made.uncommitted_positions())
    assert made.uncommitted_positions() == {}
    assert made.committed[A] == first.next_offset


def test_commit_of_one_message_covers_those_before_it() -> None:
    made, ready = positions(), batch()
    made.set_ready_batch(ready)
    _, second, third = made.take_ready_messages(3)
    made.ack_through(second)
    assert made.acked_position(A).offset == third.offset


def test_what_was_not_handed_out_cannot_be_committed() -> None:
    made, ready = positions(), batch()
    looped(made, ready, 1)
    with pytest.raises(BadRequest, match="not delivered"):
        made.ack_through(ready.messages[2])
    with pytest.raises(BadRequest, match="does not read"):
        made.ack_through(batch(B).messages[0])


def test_a_batch_of_which_all_was_left_out_moves_on() -> None:
    made = positions()
    made.set_ready_batch(Batch(A, [], ReadPosition(500, -1, 1)))
    assert made.uncommitted_positions()[A].offset == 500


def test_a_batch_of_which_all_was_left_out_waits_for_what_was_polled_before_it() -> None:
    made, ready = positions(), batch()
    made.set_ready_batch(ready)
    made.take_ready_messages(3)
    made.set_ready_batch(Batch(A, [], ReadPosition(5000, -1, 1)))
    assert made.uncommitted_positions() == {}
    made.ack_delivered()
    assert made.acked_position(A).offset == 5000


def test_a_seek_voids_what_is_out_and_may_go_back() -> None:
    made, ready = positions(), batch()
    looped(made, ready, 3)
    made.ack_delivered()
    made.mark_committed(made.uncommitted_positions())
    looped(made, batch(), 1)
    made.seek(A, ReadPosition(0, 0, 1))
    made.ack_delivered()
    assert made.acked_position(A).offset == 0
    assert made.uncommitted_positions()[A].offset == 0


def test_a_seek_ends_the_loop_over_what_was_ready() -> None:
    made, ready = positions(), batch()
    seen = []
    made.set_ready_batch(ready)
    for message in ready.messages:
        made.current = message
        seen.append(message.payload)
        made.seek(A, ReadPosition(0, 0, 1))
    assert seen == [b"0"]


def test_a_seek_elsewhere_leaves_the_message_in_work_alone() -> None:
    made, ready = positions(A, B), batch()
    looped(made, ready, 1)
    made.seek(B, ReadPosition(9, 1, 1))
    assert made.current is ready.messages[0]


def test_what_the_store_never_had_is_saved_even_untouched() -> None:
    made = Positions()
    made.add(A, ReadPosition(700, 7, 1))
    assert made.uncommitted_positions() == {A: ReadPosition(700, 7, 1)}
    made.mark_committed(made.uncommitted_positions())
    assert made.uncommitted_positions() == {}


def test_dropping_what_is_ready_keeps_what_is_out() -> None:
    made, ready = positions(), batch()
    first, second, _ = list(looped(made, ready, 1))
    made.drop_ready_batch()
    assert made.delivered_position(A).offset == second.offset
    made.ack_delivered()
    assert made.acked_position(A).offset == first.next_offset


def test_a_partition_that_is_given_away_is_forgotten() -> None:
    made = positions(A, B)
    looped(made, batch(), 1)
    made.remove(A)
    assert A not in made
    assert made.current is None
    assert list(made.names()) == [B]


def test_a_poll_inside_a_loop_takes_the_rest_and_ends_the_loop() -> None:
    made, ready = positions(), batch()
    looped(made, ready, 0)
    seen: list[bytes | None] = []
    for message in made.ready_messages():
        made.current = message
        seen.append(message.payload)
        made.ack_delivered()
        seen += [each.payload for each in made.take_ready_messages(5)]
    assert seen == [b"0", b"1", b"2"]


def test_with_manual_commits_nothing_is_acked_until_it_is_said() -> None:
    made, ready = positions(manual=True), batch()
    first, second, third = list(looped(made, ready, 3))
    made.ack_delivered()
    assert made.uncommitted_positions() == {}
    made.ack_through(second)
    assert made.uncommitted_positions()[A].offset == third.offset
    made.ack_through(first)
    assert made.uncommitted_positions()[A].offset == third.offset
    made.ack_all()
    assert made.uncommitted_positions()[A] == ready.end_position


def test_a_manual_commit_covers_the_message_in_work() -> None:
    made, ready = positions(manual=True), batch()
    first, second, _ = list(looped(made, ready, 1))
    made.ack_all()
    assert made.uncommitted_positions()[A].offset == second.offset == first.next_offset


def handed_to_handlers(manual: bool = False) -> tuple[Positions, list[ReceivedMessage]]:
    made, ready = positions(manual=manual), batch()
    messages = list(ready.messages)
    made.set_ready_batch(ready)
    assert made.dispatch_ready_batch() is not None
    return made, messages


def test_what_is_out_to_handlers_is_acked_up_to_the_lowest_unfinished() -> None:
    made, (first, second, third) = handed_to_handlers()
    ledger = made.ack_trackers.get(A)
    assert ledger is not None
    ledger.ack(second)
    assert made.acked_position(A) == ReadPosition(0, 0, 1)
    assert made.delivered_position(A).offset >= third.next_offset
    ledger.ack(first)
    assert made.acked_position(A).offset == second.next_offset


def test_commit_of_a_handler_saves_no_further_than_what_others_are_at_work_on() -> None:
    made, (first, second, _) = handed_to_handlers(manual=True)
    assert made.ack_through(second) == A
    assert made.uncommitted_positions() == {}
    made.ack_through(first)
    assert made.uncommitted_positions()[A].offset == second.next_offset


def test_an_offset_that_goes_into_a_transaction_covers_its_message_or_is_refused() -> None:
    made, (first, second, _) = handed_to_handlers(manual=True)
    assert made.position_after(first)[1].offset == first.next_offset
    with pytest.raises(BadRequest, match="partition"):
        made.position_after(second)
    token = CURRENT_MESSAGE.set(second)
    try:
        with pytest.raises(BadRequest, match="partition"):
            made.transaction_positions()
    finally:
        CURRENT_MESSAGE.reset(token)


def test_a_transaction_of_a_handler_has_no_offset_of_another_partition_whose_own_may_be_committed_first() -> None:
    made, (first, *_) = handed_to_handlers(manual=True)
    made.add(B, ReadPosition(0, 0, 1), saved=0)
    made.set_ready_batch(batch(B))
    ledger = made.dispatch_ready_batch()
    assert ledger is not None
    ledger.ack(batch(B).messages[0])
    token = CURRENT_MESSAGE.set(first)
    try:
        assert made.transaction_positions() == {A: ReadPosition(first.next_offset, first.ordinal + 1, 1)}
    finally:
        CURRENT_MESSAGE.reset(token)


def test_a_transaction_has_no_offset_of_a_partition_of_which_nothing_was_handed_out() -> None:
    """It may go to another member before the commit, which would refuse all of it for nothing."""
    made = Positions(manual=True)
    for name in (A, B):
        made.add(name, ReadPosition(0, 0, 1))
    ready = batch()
    looped(made, ready, 1)
    assert made.transaction_positions().keys() == {A}
    made.seek(B, ReadPosition(700, 7, 1))
    assert made.transaction_positions()[B] == ReadPosition(700, 7, 1)


def test_a_seek_makes_what_is_out_to_handlers_void() -> None:
    made, (first, *_) = handed_to_handlers()
    ledger = made.ack_trackers.get(A)
    assert ledger is not None
    made.seek(A, ReadPosition(7, 0, 1))
    ledger.ack(first)
    assert ledger.invalid and made.acked_position(A).offset == 7


# Partitions that go


def test_a_batch_that_a_loop_goes_through_is_in_work_until_more_is_asked_for() -> None:
    made, ready = positions(A, B), batch()
    made.set_ready_batch(ready)
    made.hand_out()
    assert made.is_in_progress(A) and not made.is_in_progress(B), "also before the loop has set its first message"
    made.ack_delivered()
    assert not made.is_in_progress(A)


def test_a_polled_batch_is_in_work_until_more_is_asked_for() -> None:
    made = positions()
    made.set_ready_batch(batch())
    made.take_ready_messages(2)
    assert made.is_in_progress(A)
    made.ack_delivered()
    assert not made.is_in_progress(A)


def test_a_transaction_of_another_client_is_not_waited_for() -> None:
    made = positions(manual=True)
    made.set_ready_batch(batch())
    made.take_ready_messages(3)
    made.delegate_to_transaction(made.transaction_positions())
    made.ack_delivered()
    assert A not in made.uncommitted
    made.remove_lost(A)
    made.raise_if_lost()
    made = positions(manual=True)
    made.set_ready_batch(batch())
    made.take_ready_messages(3)
    made.ack_delivered()
    made.delegate_to_transaction({A: ReadPosition(0, -1, -1)})
    assert A in made.uncommitted, "it was of less"


def test_with_manual_what_was_handed_out_waits_for_the_commit() -> None:
    made = positions(manual=True)
    made.set_ready_batch(batch())
    made.take_ready_messages(3)
    made.ack_delivered()
    assert not made.is_in_progress(A) and A in made.uncommitted
    made.ack_all()
    made.mark_committed(made.uncommitted_positions())
    assert A not in made.uncommitted


def test_a_loss_with_something_in_work_is_reported_once() -> None:
    made = positions(manual=True)
    made.set_ready_batch(batch())
    message = made.take_ready_messages(1)[0]
    assert made.remove_lost(A)
    with pytest.raises(Fenced, match="orders-0") as caught:
        made.raise_if_lost()
    assert caught.value.details["partitions"] == [["orders", 0]]
    made.raise_if_lost()
    with pytest.raises(Fenced):
        made.position_after(message)


def test_a_loss_of_committed_partitions_is_not_reported() -> None:
    made = positions()
    assert not made.remove_lost(A)
    made.raise_if_lost()


def test_what_a_loop_takes_in_the_moment_of_the_loss_does_not_count() -> None:
    """The loop sets `current` without a lock: perhaps after the loss of its partition."""
    made, ready = positions(A), batch()
    messages = list(ready.messages)
    made.set_ready_batch(ready)
    made.hand_out()
    made.remove_lost(A)
    made.add(A, ReadPosition(0, 0, 1), saved=0)  # and it is this one's again
    made.current = messages[2]
    made.ack_delivered()
    assert made.acked_position(A) == ReadPosition(0, 0, 1)
    assert made.delivered_position(A) == ReadPosition(0, 0, 1)


# The lowest unfinished offset: whatever the order in which handlers end, no place goes beyond one that has not.

A_LEDGER = PartitionName("orders", 0)


def batch_of_ledger(count: int) -> Batch:
    log = Bytes(0)
    log.append(*[b"%d" % number for number in range(count)])
    (block,) = Decoder("orders", 0, INCARNATION).decode(log.body(), 0, 0, log.end)
    return Batch(A_LEDGER, block.messages, ReadPosition(block.next_offset, block.next_ordinal, block.epoch))


@pytest.fixture
def ledger() -> AckTracker:
    return AckTracker(A_LEDGER, ReadPosition(0, 0, 1))


def test_the_place_is_the_lowest_unfinished_whatever_ends_first(ledger: AckTracker) -> None:
    taken = batch_of_ledger(4)
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
        made, taken = AckTracker(A_LEDGER, ReadPosition(0, 0, 1)), batch_of_ledger(12)
        made.add_batch(taken)
        left = list(taken.messages)
        while left:
            made.ack(left.pop(chance.randrange(len(left))))
            lowest = min((each.offset for each in left), default=taken.end_position.offset)
            assert taken.messages[0].offset <= made.position.offset <= lowest
            assert made.unacked_bytes == (taken.end_position.offset - made.position.offset if left else 0)
        assert made.position == taken.end_position


def test_a_message_finished_twice_or_of_elsewhere_changes_nothing(ledger: AckTracker) -> None:
    taken = batch_of_ledger(3)
    ledger.ack(taken.messages[0])
    ledger.add_batch(taken._replace(messages=taken.messages[:2]))
    ledger.ack(taken.messages[1])
    ledger.ack(taken.messages[1])
    ledger.ack(taken.messages[2])
    assert (ledger.position.offset, ledger.acked_count) == (0, 1)


def test_what_is_left_out_moves_the_place_after_what_is_finished(ledger: AckTracker) -> None:
    ledger.add_batch(Batch(A_LEDGER, [], ReadPosition(50, 1, 1)))
    assert ledger.position.offset == 50
    taken = batch_of_ledger(1)
    waiting = AckTracker(A_LEDGER, ReadPosition(0, 0, 1))
    waiting.add_batch(taken)
    waiting.add_batch(Batch(A_LEDGER, [], ReadPosition(900, 9, 1)))
    assert waiting.position.offset == 0
    waiting.ack(taken.messages[0])
    assert waiting.position == ReadPosition(900, 9, 1)


def test_the_place_with_the_message_in_work_is_where_its_handler_may_commit(ledger: AckTracker) -> None:
    taken = batch_of_ledger(3)
    first, second, third = taken.messages
    ledger.add_batch(taken)
    ledger.ack(second)
    assert ledger.position_if_acked(first) == position_after(second)
    assert ledger.position_if_acked(third) == ledger.position_if_acked(None) == ReadPosition(0, 0, 1)
    assert ledger.position == ReadPosition(0, 0, 1), "asking finishes nothing"


def test_a_partition_that_is_leaving_says_when_no_handler_is_at_work_on_it() -> None:
    ledgers, freed = AckTrackers(), []
    ledgers.on_handlers_idle = lambda: freed.append(True)
    ledger = ledgers.add_batch(batch_of_ledger(2), ReadPosition(0, 0, 1))
    ledger.active_handlers = 1
    ledgers.revoke(A_LEDGER)
    assert ledger.revoked and not ledger.invalid and not freed
    ledgers.handler_ended(ledger)
    assert freed and not ledger.active_handlers


def test_one_that_stays_after_all_goes_on_and_a_void_one_never_does() -> None:
    ledgers, stayed = AckTrackers(), []
    ledgers.on_unrevoked = lambda: stayed.append(True)
    ledger = ledgers.add_batch(batch_of_ledger(2), ReadPosition(0, 0, 1))
    ledgers.unrevoke(A_LEDGER)
    assert not stayed
    ledgers.revoke(A_LEDGER)
    ledgers.unrevoke(A_LEDGER)
    assert stayed and not ledger.revoked
    ledgers.invalidate(A_LEDGER)
    assert ledger.invalid and ledger.revoked and ledgers.get(A_LEDGER) is None and not ledgers


# Positions, and what follows a message.


def test_a_place_knows_its_offset_and_may_not_know_the_rest() -> None:
    assert ReadPosition(5) == (5, UNKNOWN, UNKNOWN)
    assert max(ReadPosition(5), ReadPosition(7, 1, 1)).offset == 7


def test_after_a_message_the_next_one_begins() -> None:
    first, second = batch_of_ledger(2).messages
    assert position_after(first) == ReadPosition(second.offset, second.ordinal, first.origin.epoch)
    assert partition_of(first) == PartitionName("orders", 0)
