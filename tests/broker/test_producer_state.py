"""The stream rule: contiguous, repeats recognised, closed for good, and the same after a restart."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from journal.log.log import Log
from journal.record.batch import Batch, succession_source
from journal.testing import SimulatedClock, SimulatedDisk
from tests.broker.helpers import batch
from tests.memory_bombs import NESTED_LISTS, refused_in_little_memory
from tfmq.broker.log_offsets import record_offset
from tfmq.broker.producer_state import ProducerState
from tfmq.errors import BadRequest, SequenceGap, StaleProducer, UnknownProducer

DAY_MS = 86_400_000
LOG_ID = 50 << 24


def make(**given: Any) -> ProducerState:
    known = {"remembered": 4, "entries_max": 100, "idle_ms": 7 * DAY_MS, "leased_ms": lambda _: 0}
    return ProducerState(**{**known, **given})


class Store:
    """A log with its producers; sends go straight into both."""

    def __init__(self, disk: SimulatedDisk | None = None, **given: Any) -> None:
        self.disk = disk or SimulatedDisk()
        self.given = given
        if disk is None:
            self.disk.make_folder("log")
        self.producers = make(**given)
        self.clock = SimulatedClock()
        self.log = Log.open(self.disk, "log", log_id=LOG_ID, clock=self.clock, state=self.producers)

    def send(self, *batches: tuple[int, int, int], size: int = 10) -> list[Any]:
        """(producer, sequence, records) each, in one append."""
        made = [Batch(batch(p, s, [bytes(size)] * n), (), p, s, n) for p, s, n in batches]
        answers = self.log.append(made)
        for (producer, sequence, records), answer in zip(batches, answers, strict=True):
            self.producers.record_batch(producer, sequence, records, answer)
        return answers

    def close(self, producer: int, successor: int) -> None:
        last = self.producers.last_sequence(producer)
        answer = self.log.append_control(succession_source(producer, successor, last))
        self.producers.close(producer, successor, last, answer.append_time)

    def reopened(self, *, clean: bool) -> "Store":
        if clean:
            self.log.close()
        else:
            self.log.force()
        return Store(self.disk, **self.given)


def check(producers: ProducerState, producer: int, sequence: int, records: int = 1, gaps: bool = False) -> Any:
    return producers.check(producer, sequence, records, gaps=gaps, now_ms=lambda: DAY_MS)


def test_the_next_batch_of_a_producer_sequence_is_new() -> None:
    store = Store()
    assert check(store.producers, 20, 0) is None
    store.send((20, 0, 3))
    assert check(store.producers, 20, 3) is None


def test_a_gap_is_an_error_that_names_what_is_missing_unless_acks_are_none() -> None:
    store = Store()
    store.send((20, 0, 3))
    with pytest.raises(SequenceGap) as caught:
        check(store.producers, 20, 5)
    assert caught.value.details == {"expected": 3, "found": 5}
    assert check(store.producers, 20, 5, gaps=True) is None


def test_a_repeat_gets_its_first_answer() -> None:
    store = Store()
    first, _ = store.send((20, 0, 3)), store.send((20, 3, 2))
    repeat = check(store.producers, 20, 0, 3)
    assert repeat.first_offset_walk is None
    assert list(repeat.stored.positions) == first[0].positions
    assert repeat.stored.end_offset == first[0].end_offset
    assert repeat.stored.append_time == first[0].append_time


def test_a_repeat_of_two_batches_as_one_is_recognised_by_its_range() -> None:
    store = Store()
    (first,), (second,) = store.send((20, 0, 3)), store.send((20, 3, 2))
    repeat = check(store.producers, 20, 0, 5)
    assert repeat.stored.positions == [(0, first.positions[0][1]), (3, second.positions[0][1])]
    assert repeat.stored.end_offset == second.end_offset


def test_a_partly_known_batch_is_refused() -> None:
    store = Store()
    store.send((20, 0, 3))
    with pytest.raises(BadRequest, match="Sequences 1"):
        check(store.producers, 20, 1, 5)


def test_a_repeat_that_is_forgotten_is_not_stored_again() -> None:
    store = Store()
    for sequence in range(6):
        store.send((20, sequence, 1))
    with pytest.raises(UnknownProducer) as caught:
        check(store.producers, 20, 0)
    assert caught.value.outcome == "unknown"


def test_what_acks_none_skipped_is_never_taken_for_known() -> None:
    store = Store()
    store.send((20, 0, 1), (20, 5, 1))
    with pytest.raises(UnknownProducer):
        check(store.producers, 20, 1, 2)


def test_a_closed_id_names_its_successor_without_end() -> None:
    store = Store()
    store.send((20, 0, 3))
    store.close(20, 21)
    for sequence in (0, 3):
        with pytest.raises(StaleProducer) as caught:
            check(store.producers, 20, sequence)
        assert caught.value.successor == 21
    assert store.producers.closed_id(20) == (21, 2)
    assert store.producers.closed_id(21) is None


@pytest.mark.parametrize("leased_ms, accepted", [(None, False), (0, True), (-7 * DAY_MS, False)])
def test_an_unknown_id_is_new_only_if_it_was_leased_lately(leased_ms: int | None, accepted: bool) -> None:
    producers = make(leased_ms=lambda _: leased_ms)
    if accepted:
        assert check(producers, 20, 0) is None
    else:
        with pytest.raises(UnknownProducer):
            check(producers, 20, 0)


def test_an_unknown_id_begins_at_sequence_0_unless_acks_are_none() -> None:
    with pytest.raises(UnknownProducer):
        check(make(), 20, 4)
    assert check(make(), 20, 4, gaps=True) is None


def test_idle_ids_expire_and_are_never_taken_for_new() -> None:
    store = Store()
    store.send((20, 0, 1))
    now_ms = store.clock.wall_ms() + 7 * DAY_MS + 1
    assert store.producers.expire(now_ms) == 1
    with pytest.raises(UnknownProducer):
        check(store.producers, 20, 0)
    assert check(store.producers, 21, 0) is None


def test_the_longest_idle_go_first_when_there_are_too_many() -> None:
    store = Store(entries_max=2)
    store.send((20, 0, 1), (21, 0, 1), (22, 0, 1), (20, 1, 1))
    assert store.producers.expire(store.clock.wall_ms()) == 1
    assert store.producers.last_sequence(20) == 1
    assert store.producers.last_sequence(21) == -1
    with pytest.raises(UnknownProducer):
        check(store.producers, 21, 0)


@pytest.mark.parametrize("clean", [True, False])
def test_all_of_it_survives_a_restart(clean: bool) -> None:
    store = Store()
    store.send((20, 0, 3), (21, 0, 1))
    store.send((20, 3, 2))
    store.send((22, 0, 1))
    store.close(22, 23)
    again = store.reopened(clean=clean)
    assert check(again.producers, 20, 5) is None
    assert check(again.producers, 20, 3, 2).stored.positions == check(store.producers, 20, 3, 2).stored.positions
    assert again.producers.closed_id(22) == (23, 0)
    with pytest.raises(SequenceGap):
        check(again.producers, 21, 2)


def test_a_large_batch_of_many_blocks_is_one_answer_after_a_restart() -> None:
    store = Store()
    (first,) = store.send((20, 0, 400), size=1000)
    assert len(first.positions) > 3
    again = store.reopened(clean=False)
    repeat = check(again.producers, 20, 0, 400)
    assert repeat.first_offset_walk is None
    assert list(repeat.stored.positions) == first.positions


def test_small_batches_that_were_joined_keep_their_offsets_after_a_restart() -> None:
    store = Store()
    answers = store.send((20, 0, 2), (21, 0, 1), (20, 2, 3))
    again = store.reopened(clean=False)
    repeat = check(again.producers, 20, 2, 3)
    offset = repeat.stored.positions[0][1]
    if repeat.first_offset_walk is not None:
        offset = record_offset(again.log, *repeat.first_offset_walk)
    assert offset == answers[2].positions[0][1]
    assert repeat.stored.first_ordinal == answers[2].first_ordinal


@given(st.lists(st.lists(st.tuples(st.integers(20, 22), st.integers(1, 4)), min_size=1, max_size=4), max_size=6))
def test_every_batch_is_answered_alike_before_and_after_a_crash(plan: list[list[tuple[int, int]]]) -> None:
    store = Store(remembered=64)
    nexts: dict[int, int] = {}
    sent = []
    for append in plan:
        batches = []
        for producer, records in append:
            batches.append((producer, nexts.get(producer, 0), records))
            nexts[producer] = nexts.get(producer, 0) + records
        sent += list(zip(batches, store.send(*batches), strict=True))
        store.clock.advance(1)
    again = store.reopened(clean=False)
    for (producer, sequence, records), answer in sent:
        repeat = check(again.producers, producer, sequence, records)
        walked = repeat.first_offset_walk and record_offset(again.log, *repeat.first_offset_walk)
        assert (walked or repeat.stored.positions[0][1]) == answer.positions[0][1]
        assert repeat.stored.first_ordinal == answer.first_ordinal
        assert repeat.stored.end_offset >= answer.end_offset
        assert repeat.stored.append_time == answer.append_time


def test_a_snapshot_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="decode"):
        make().load(b"\xc1")


def test_a_snapshot_that_announces_too_much_takes_no_memory() -> None:
    with refused_in_little_memory("producers' snapshot does not decode"):
        make().load(NESTED_LISTS)
