"""Transactional streams: repeats are known, gaps refused, the idle forgotten, and the same after a restart."""

from __future__ import annotations

from typing import Any

import pytest

from tests.transaction.stores import Store
from tfmq.errors import BadRequest, SequenceGap, UnknownProducer, UnknownTransaction
from tfmq.transaction.producer_state import ProducerStates, RequestOutcome

DAY_MS = 86_400_000
NOW = 100 * DAY_MS


def make(**given: Any) -> ProducerStates:
    known = {"producers_max": 100, "idle_ms": 7 * DAY_MS, "lease_time": lambda _: NOW}
    return ProducerStates(**{**known, **given})


def send(streams: ProducerStates, producer: int, epoch: int, sequence: int, count: int, now: int = NOW) -> bool:
    """As the store does it: asked, queued, written. Whether it was a repeat."""
    if streams.is_duplicate(producer, epoch, sequence, count, now):
        return True
    streams.stage_batch(producer, epoch, sequence, count)
    assert streams.apply_batch(producer, epoch, sequence, count).messages == 0
    return False


def test_batches_come_one_after_the_other_over_all_partitions_and_transactions() -> None:
    streams = make()
    assert not send(streams, 20, 1, 0, 3)
    assert not send(streams, 20, 1, 3, 2)
    assert not send(streams, 20, 2, 5, 1)


def test_a_gap_is_refused_and_names_what_is_missing() -> None:
    streams = make()
    send(streams, 20, 1, 0, 3)
    with pytest.raises(SequenceGap) as caught:
        streams.is_duplicate(20, 1, 5, 1, NOW)
    assert caught.value.details == {"expected": 3, "found": 5}


def test_a_repeat_of_a_piece_is_recognised() -> None:
    streams = make()
    send(streams, 20, 1, 0, 3)
    send(streams, 20, 1, 3, 2)
    assert streams.is_duplicate(20, 1, 0, 3, NOW)
    assert streams.is_duplicate(20, 1, 3, 2, NOW)
    assert streams.is_duplicate(20, 1, 0, 5, NOW)


def test_a_repeat_with_something_new_in_it_is_refused() -> None:
    streams = make()
    send(streams, 20, 1, 0, 3)
    with pytest.raises(BadRequest, match="the rest is not"):
        streams.is_duplicate(20, 1, 1, 3, NOW)


def test_a_piece_of_an_earlier_transaction_is_no_repeat() -> None:
    streams = make()
    send(streams, 20, 1, 0, 3)
    send(streams, 20, 2, 3, 3)
    for sequence, count in ((0, 3), (2, 2)):
        with pytest.raises(BadRequest):
            streams.is_duplicate(20, 2, sequence, count, NOW)
    with pytest.raises(BadRequest):
        streams.is_duplicate(20, 1, 0, 3, NOW)


def test_what_is_queued_counts_for_later_requests() -> None:
    streams = make()
    assert not streams.is_duplicate(20, 1, 0, 3, NOW)
    streams.stage_batch(20, 1, 0, 3)
    assert streams.is_duplicate(20, 1, 0, 3, NOW)
    assert not streams.is_duplicate(20, 1, 3, 2, NOW)
    streams.stage_batch(20, 1, 3, 2)
    assert streams.is_duplicate(20, 1, 0, 5, NOW)
    with pytest.raises(SequenceGap):
        streams.is_duplicate(20, 1, 6, 1, NOW)
    streams.apply_batch(20, 1, 0, 3)
    assert streams.is_duplicate(20, 1, 3, 2, NOW)
    assert not streams.is_duplicate(20, 1, 5, 1, NOW)


def test_what_was_not_written_may_come_again() -> None:
    streams = make()
    send(streams, 20, 1, 0, 3)
    streams.stage_batch(20, 1, 3, 2)
    streams.discard_staged()
    assert not streams.is_duplicate(20, 1, 3, 2, NOW)
    with pytest.raises(SequenceGap):
        streams.is_duplicate(20, 1, 5, 1, NOW)


def test_an_unknown_id_begins_at_the_beginning() -> None:
    streams = make()
    with pytest.raises(UnknownProducer):
        streams.is_duplicate(20, 1, 4, 1, NOW)


@pytest.mark.parametrize("leased", [None, NOW - 8 * DAY_MS])
def test_an_unknown_id_that_was_never_leased_or_long_ago_is_refused(leased: int | None) -> None:
    streams = make(lease_time=lambda _: leased)
    with pytest.raises(UnknownProducer):
        streams.is_duplicate(20, 1, 0, 1, NOW)
    with pytest.raises(UnknownProducer):
        streams.find_request(20, 1, NOW)


def test_a_request_is_new_until_it_has_begun() -> None:
    streams = make()
    assert streams.find_request(20, 1, NOW) is None
    streams.add_begun(20, 1, 77)
    assert streams.find_request(20, 1, NOW) == RequestOutcome(77, "")
    streams.apply_outcome(20, 1, 77, "committed", NOW)
    assert streams.find_request(20, 1, NOW) == RequestOutcome(77, "committed")
    assert streams.find_request(20, 2, NOW) is None


def test_a_number_below_the_last_is_never_taken_for_a_new_one() -> None:
    streams = make()
    streams.apply_outcome(20, 5, 77, "committed", NOW)
    streams.add_begun(20, 9, 80)
    for number in (4, 6, 8):
        with pytest.raises(UnknownTransaction, match=f"Transaction {number} of this producer id has ended"):
            streams.find_request(20, number, NOW)
    assert streams.find_request(20, 5, NOW) == RequestOutcome(77, "committed")
    assert streams.find_request(20, 10, NOW) is None


def test_what_was_given_up_may_be_asked_again() -> None:
    streams = make()
    streams.add_begun(20, 1, 77)
    streams.discard_begun(20, 1)
    assert streams.find_request(20, 1, NOW) is None


def test_a_late_end_does_not_hide_a_later_number() -> None:
    streams = make()
    streams.add_begun(20, 2, 78)
    streams.apply_outcome(20, 1, 77, "rolled_back", NOW)
    assert streams.find_request(20, 2, NOW) == RequestOutcome(78, "")
    streams.apply_outcome(20, 2, 78, "committed", NOW)
    streams.apply_outcome(20, 1, 77, "committed", NOW)
    assert streams.find_request(20, 2, NOW) == RequestOutcome(78, "committed")


def test_the_idle_are_forgotten_and_leave_a_floor() -> None:
    streams = make()
    for producer in (20, 21, 22):
        streams.apply_batch(producer, 1, 0, 1)
        streams.expire(NOW + producer * DAY_MS)
    streams.expire(NOW + 28 * DAY_MS + 1)
    assert len(streams) == 1 and streams.expired_id == 21
    with pytest.raises(UnknownProducer):
        streams.is_duplicate(21, 2, 0, 1, NOW)
    with pytest.raises(UnknownProducer):
        streams.is_duplicate(19, 2, 0, 1, NOW)
    assert not streams.is_duplicate(23, 2, 0, 1, NOW)


def test_who_sends_is_not_idle() -> None:
    streams = make(producers_max=2)
    send(streams, 20, 1, 0, 1)
    send(streams, 21, 1, 0, 1)
    send(streams, 20, 1, 1, 1)
    send(streams, 22, 1, 0, 1)
    assert len(streams) == 2 and streams.expired_id == 21
    assert not send(streams, 20, 1, 2, 1)


def test_what_a_repair_lost_is_counted() -> None:
    streams = make()
    assert streams.apply_batch(20, 1, 4, 2) == (4, False)
    assert streams.apply_batch(20, 1, 6, 2) == (0, True)
    assert streams.apply_batch(20, 1, 9, 1) == (1, True)
    assert streams.apply_batch(20, 2, 12, 1) == (2, False)


def test_a_dump_comes_back() -> None:
    streams, other = make(), make()
    send(streams, 20, 1, 0, 3)
    send(streams, 21, 2, 0, 3)
    streams.apply_outcome(20, 4, 1, "prepared", NOW)
    streams.add_begun(22, 1, 9)
    streams.stage_batch(21, 2, 3, 1)
    streams.expire(NOW)
    other.load(streams.dump())
    assert other.dump() == streams.dump()
    assert other.find_request(20, 4, NOW) == RequestOutcome(1, "prepared")
    assert other.is_duplicate(21, 2, 0, 3, NOW) and not other.is_duplicate(21, 2, 3, 1, NOW)
    assert other.find_request(22, 1, NOW) is None, "what has no record is not in a dump"


# With the journal


def test_a_repeated_frame_is_known_before_it_is_written_after_it_and_after_a_crash() -> None:
    """A TRANSACT whose answer was lost gets the first outcome."""
    store = Store()
    transaction = store.begin()
    origin = transaction.origin
    now = store.clock.wall_ms()

    def found(life: Store) -> RequestOutcome | None:
        return life.store.producer_states.find_request(origin.producer_id, origin.number, now)

    assert found(store) == RequestOutcome(transaction.epoch, "")
    store.store.commit(transaction, lambda *_: None, batches=[store.piece(transaction, [b"m"])])
    assert found(store) == RequestOutcome(transaction.epoch, "")
    store.turn()
    assert found(store) == RequestOutcome(transaction.epoch, "committed")
    store.force()
    for life in (store.power_cut(), store.killed(), store.closed()):
        assert found(life) == RequestOutcome(transaction.epoch, "committed")
        with pytest.raises(BadRequest):
            life.store.producer_states.is_duplicate(origin.producer_id, 0, 0, 1, now)
        assert not life.store.producer_states.is_duplicate(origin.producer_id, 0, 1, 1, now)


def test_a_frame_that_a_power_cut_took_back_is_new_again() -> None:
    store = Store()
    transaction = store.transact()
    origin = transaction.origin
    life = store.power_cut()
    assert life.store.producer_states.find_request(origin.producer_id, origin.number, store.clock.wall_ms()) is None
    assert not life.store.producer_states.is_duplicate(origin.producer_id, 0, 0, 1, store.clock.wall_ms())


def test_a_prepared_one_is_found_again_by_the_request_that_began_it() -> None:
    store = Store()
    transaction = store.prepared("x")
    origin = transaction.origin
    life = store.power_cut()
    now = store.clock.wall_ms()
    assert life.store.producer_states.find_request(origin.producer_id, origin.number, now) == RequestOutcome(
        transaction.epoch, "prepared"
    )
    life.rollback(life.store.by_xid["x"])
    assert life.store.producer_states.find_request(origin.producer_id, origin.number, now) == RequestOutcome(
        transaction.epoch, "rolled_back"
    )


def test_the_highest_id_is_known_also_of_what_is_forgotten() -> None:
    streams = make(producers_max=2)
    assert streams.highest_id == 0
    for producer in (30, 20, 21):
        send(streams, producer, 1, 0, 1)
    assert streams.highest_id == 30 == streams.expired_id
    send(streams, 31, 1, 0, 1)
    assert streams.highest_id == 31
