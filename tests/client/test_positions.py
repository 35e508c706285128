"""When a message counts as processed: a sentence of the contract, a test."""

import pytest

from tests.client.blocks import INCARNATION, Bytes
from tfmq.client.consumer.decoder import Decoder
from tfmq.client.consumer.message import ReceivedMessage
from tfmq.client.consumer.positions import IN_WORK, Batch, Place, Positions
from tfmq.errors import BadRequest, Fenced
from tfmq.offsets.storage import PartitionName

A, B = PartitionName("orders", 0), PartitionName("orders", 1)


def batch(name: PartitionName = A, count: int = 3) -> Batch:
    log = Bytes(name.partition)
    log.append(*[b"%d" % n for n in range(count)])
    (block,) = Decoder(name.topic, name.partition, INCARNATION).decode(log.body(), 0, 0, log.end)
    return Batch(name, block.messages, Place(block.next_offset, block.next_ordinal, block.epoch))


def positions(*names: PartitionName, manual: bool = False) -> Positions:
    made = Positions(manual=manual)
    for name in names or (A,):
        made.add(name, Place(0, 0, 1), saved=0)
    return made


def looped(made: Positions, ready: Batch, count: int) -> list[ReceivedMessage]:
    """A loop that was given `count` messages and has not asked for the next."""
    made.begin(ready)
    for message in ready.messages[:count]:
        made.current = message
    return ready.messages


def test_the_message_in_work_is_not_processed() -> None:
    made, ready = positions(), batch()
    first, second, _ = looped(made, ready, 2)
    assert made.processed(A) == Place(second.offset, 1, 1)
    assert made.unsaved()[A].offset == first.next_offset


def test_asking_for_the_next_processes_the_last_with_all_that_was_left_out_behind_it() -> None:
    made, ready = positions(), batch()
    looped(made, ready, 3)
    made.settle()
    assert made.processed(A) == ready.following


def test_leaving_in_the_middle_without_an_error_processes_what_is_out_and_no_more() -> None:
    made, ready = positions(), batch()
    _, second, third = list(looped(made, ready, 2))
    made.settle()
    assert made.processed(A).offset == second.next_offset == third.offset
    assert made.loop() == [third]


def test_a_polled_batch_is_processed_by_the_next_poll() -> None:
    made, ready = positions(), batch()
    made.begin(ready)
    third = ready.messages[2]
    assert len(made.poll(2)) == 2
    assert made.processed(A).offset == 0
    made.settle()
    assert made.processed(A).offset == third.offset
    assert made.poll(2) == [third]


def test_several_partitions_in_one_poll_wait_together() -> None:
    made = positions(A, B)
    for ready in (batch(A), batch(B)):
        made.begin(ready)
        made.poll(3)
    assert made.unsaved() == {}
    made.settle()
    assert set(made.unsaved()) == {A, B}


def test_commit_covers_all_that_is_out_and_later_saving_does_not_go_back() -> None:
    made, ready = positions(), batch()
    first = looped(made, ready, 1)[0]
    made.settle_all_out()
    assert made.unsaved()[A].offset == first.next_offset
    made.note_saved(made.unsaved())
    assert made.unsaved() == {}
    assert made.saved(A) == first.next_offset


def test_commit_of_one_message_covers_those_before_it() -> None:
    made, ready = positions(), batch()
    made.begin(ready)
    _, second, third = made.poll(3)
    made.settle_to(second)
    assert made.processed(A).offset == third.offset


def test_what_was_not_handed_out_cannot_be_committed() -> None:
    made, ready = positions(), batch()
    looped(made, ready, 1)
    with pytest.raises(BadRequest, match="not delivered"):
        made.settle_to(ready.messages[2])
    with pytest.raises(BadRequest, match="does not read"):
        made.settle_to(batch(B).messages[0])


def test_a_batch_of_which_all_was_left_out_moves_on() -> None:
    made = positions()
    made.begin(Batch(A, [], Place(500, -1, 1)))
    assert made.unsaved()[A].offset == 500


def test_a_batch_of_which_all_was_left_out_waits_for_what_was_polled_before_it() -> None:
    made, ready = positions(), batch()
    made.begin(ready)
    made.poll(3)
    made.begin(Batch(A, [], Place(5000, -1, 1)))
    assert made.unsaved() == {}
    made.settle()
    assert made.processed(A).offset == 5000


def test_a_seek_voids_what_is_out_and_may_go_back() -> None:
    made, ready = positions(), batch()
    looped(made, ready, 3)
    made.settle()
    made.note_saved(made.unsaved())
    looped(made, batch(), 1)
    made.seek(A, Place(0, 0, 1))
    made.settle()
    assert made.processed(A).offset == 0
    assert made.unsaved()[A].offset == 0


def test_a_seek_ends_the_loop_over_what_was_ready() -> None:
    made, ready = positions(), batch()
    seen = []
    made.begin(ready)
    for message in ready.messages:
        made.current = message
        seen.append(message.payload)
        made.seek(A, Place(0, 0, 1))
    assert seen == [b"0"]


def test_a_seek_elsewhere_leaves_the_message_in_work_alone() -> None:
    made, ready = positions(A, B), batch()
    looped(made, ready, 1)
    made.seek(B, Place(9, 1, 1))
    assert made.current is ready.messages[0]


def test_what_the_store_never_had_is_saved_even_untouched() -> None:
    made = Positions()
    made.add(A, Place(700, 7, 1))
    assert made.unsaved() == {A: Place(700, 7, 1)}
    made.note_saved(made.unsaved())
    assert made.unsaved() == {}


def test_dropping_what_is_ready_keeps_what_is_out() -> None:
    made, ready = positions(), batch()
    first, second, _ = list(looped(made, ready, 1))
    made.drop_ready()
    assert made.handed_out(A).offset == second.offset
    made.settle()
    assert made.processed(A).offset == first.next_offset


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
    for message in made.loop():
        made.current = message
        seen.append(message.payload)
        made.settle()
        seen += [each.payload for each in made.poll(5)]
    assert seen == [b"0", b"1", b"2"]


def test_with_manual_commits_nothing_is_processed_until_it_is_said() -> None:
    made, ready = positions(manual=True), batch()
    first, second, third = list(looped(made, ready, 3))
    made.settle()
    assert made.unsaved() == {}
    made.settle_to(second)
    assert made.unsaved()[A].offset == third.offset
    made.settle_to(first)
    assert made.unsaved()[A].offset == third.offset
    made.settle_all_out()
    assert made.unsaved()[A] == ready.following


def test_a_manual_commit_covers_the_message_in_work() -> None:
    made, ready = positions(manual=True), batch()
    first, second, _ = list(looped(made, ready, 1))
    made.settle_all_out()
    assert made.unsaved()[A].offset == second.offset == first.next_offset


def handed_to_handlers(manual: bool = False) -> tuple[Positions, list[ReceivedMessage]]:
    made, ready = positions(manual=manual), batch()
    messages = list(ready.messages)
    made.begin(ready)
    assert made.take() is not None
    return made, messages


def test_what_is_out_to_handlers_is_processed_up_to_the_lowest_unfinished() -> None:
    made, (first, second, third) = handed_to_handlers()
    ledger = made.ledgers.get(A)
    assert ledger is not None
    ledger.finish(second)
    assert made.processed(A) == Place(0, 0, 1)
    assert made.handed_out(A).offset >= third.next_offset
    ledger.finish(first)
    assert made.processed(A).offset == second.next_offset


def test_commit_of_a_handler_saves_no_further_than_what_others_are_at_work_on() -> None:
    made, (first, second, _) = handed_to_handlers(manual=True)
    assert made.settle_to(second) == A
    assert made.unsaved() == {}
    made.settle_to(first)
    assert made.unsaved()[A].offset == second.next_offset


def test_an_offset_that_goes_into_a_transaction_covers_its_message_or_is_refused() -> None:
    made, (first, second, _) = handed_to_handlers(manual=True)
    assert made.through(first)[1].offset == first.next_offset
    with pytest.raises(BadRequest, match="partition"):
        made.through(second)
    token = IN_WORK.set(second)
    try:
        with pytest.raises(BadRequest, match="partition"):
            made.unsaved_out()
    finally:
        IN_WORK.reset(token)


def test_a_transaction_of_a_handler_has_no_offset_of_another_partition_whose_own_may_be_committed_first() -> (
    None
):
    made, (first, *_) = handed_to_handlers(manual=True)
    made.add(B, Place(0, 0, 1), saved=0)
    made.begin(batch(B))
    ledger = made.take()
    assert ledger is not None
    ledger.finish(batch(B).messages[0])
    token = IN_WORK.set(first)
    try:
        assert made.unsaved_out() == {A: Place(first.next_offset, first.ordinal + 1, 1)}
    finally:
        IN_WORK.reset(token)


def test_a_transaction_has_no_offset_of_a_partition_of_which_nothing_was_handed_out() -> None:
    """It may go to another member before the commit, which would refuse all of it for nothing."""
    made = Positions(manual=True)
    for name in (A, B):
        made.add(name, Place(0, 0, 1))
    ready = batch()
    looped(made, ready, 1)
    assert made.unsaved_out().keys() == {A}
    made.seek(B, Place(700, 7, 1))
    assert made.unsaved_out()[B] == Place(700, 7, 1)


def test_a_seek_makes_what_is_out_to_handlers_void() -> None:
    made, (first, *_) = handed_to_handlers()
    ledger = made.ledgers.get(A)
    assert ledger is not None
    made.seek(A, Place(7, 0, 1))
    ledger.finish(first)
    assert ledger.void and made.processed(A).offset == 7


# Partitions that go


def test_a_batch_that_a_loop_goes_through_is_in_work_until_more_is_asked_for() -> None:
    made, ready = positions(A, B), batch()
    made.begin(ready)
    made.lend()
    assert made.in_work(A) and not made.in_work(B), "also before the loop has set its first message"
    made.settle()
    assert not made.in_work(A)


def test_a_polled_batch_is_in_work_until_more_is_asked_for() -> None:
    made = positions()
    made.begin(batch())
    made.poll(2)
    assert made.in_work(A)
    made.settle()
    assert not made.in_work(A)


def test_what_a_transaction_of_somebody_else_has_is_not_waited_for() -> None:
    made = positions(manual=True)
    made.begin(batch())
    made.poll(3)
    made.entrusted(made.unsaved_out())
    made.settle()
    assert not made.uncommitted(A)
    made.lose(A)
    made.check_lost()
    made = positions(manual=True)
    made.begin(batch())
    made.poll(3)
    made.settle()
    made.entrusted({A: Place(0, -1, -1)})
    assert made.uncommitted(A), "it was of less"


def test_with_manual_what_was_handed_out_waits_for_the_commit() -> None:
    made = positions(manual=True)
    made.begin(batch())
    made.poll(3)
    made.settle()
    assert not made.in_work(A) and made.uncommitted(A)
    made.settle_all_out()
    made.note_saved(made.unsaved())
    assert not made.uncommitted(A)


def test_a_loss_with_something_in_work_is_told_once() -> None:
    made = positions(manual=True)
    made.begin(batch())
    message = made.poll(1)[0]
    assert made.lose(A)
    with pytest.raises(Fenced, match="orders-0") as caught:
        made.check_lost()
    assert caught.value.details["partitions"] == [["orders", 0]]
    made.check_lost()
    with pytest.raises(Fenced):
        made.through(message)


def test_a_loss_of_what_is_saved_is_nothing_to_tell() -> None:
    made = positions()
    assert not made.lose(A)
    made.check_lost()


def test_what_a_loop_takes_in_the_moment_of_the_loss_does_not_count() -> None:
    """The loop sets `current` without a lock: perhaps behind the loss of its partition."""
    made, ready = positions(A), batch()
    messages = list(ready.messages)
    made.begin(ready)
    made.lend()
    made.lose(A)
    made.add(A, Place(0, 0, 1), saved=0)  # and it is this one's again
    made.current = messages[2]
    made.settle()
    assert made.processed(A) == Place(0, 0, 1)
    assert made.handed_out(A) == Place(0, 0, 1)
