"""What the arrivals teach is the same whether it was applied live or recovered from the log, from any snapshot on."""

from __future__ import annotations

import logging
import random
import sys
import tracemalloc
from threading import Thread
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from journal.errors import NewerFormat
from journal.filenames import segment_name
from journal.fsck.log_repair import repair
from journal.record.batch import Batch, Source
from journal.record.block import blocks_of
from journal.record.block_trailer import SOURCE_TRANSACTION
from journal.record.format import make_record
from tests.delay.arrival_log_rig import FOLDER, START_MS, Rig, Sent, Wanted, some
from tests.delay.steps import steps
from tests.memory_bombs import NESTED_LISTS, refused_in_little_memory
from tests.scale import scaled, seeded
from tfmq.delay.arrivals import header
from tfmq.delay.arrivals import state as arrival_state
from tfmq.delay.arrivals.header import HEADER_ID
from tfmq.delay.arrivals.log import ARRIVALS_SUFFIX
from tfmq.delay.arrivals.state import (
    CHAIN_STEPS_MIN,
    RECENT_MIN,
    SPAN_BITS,
    SPANS_CHECKED_MAX,
    CancelledMessages,
    RescheduledMessages,
)
from tfmq.errors import StaleProducer

SPAN = 1 << SPAN_BITS


def check(rig: Rig, producer: int, sequence: int, records: int) -> Any:
    return rig.producers.check(producer, sequence, records, gaps=False, now_ms=lambda: 0)


# Fold live = fold by recovery


def random_step(rig: Rig, generator: random.Random) -> None:
    """Something that a broker does with its arrivals."""
    kind = generator.choice(("send", "send", "send", "joined", "applied", "cancel", "reschedule", "close"))
    pending = [e for e in rig.sent[-200:] if (e.due, e.number) not in rig.state.cancelled]
    if kind == "cancel" and pending:
        found = generator.sample(pending, min(len(pending), generator.randrange(1, 9)))
        rig.cancel(*((each.due, each.number) for each in found))
    elif kind == "reschedule" and pending:
        alike = [each for each in pending if each.log_id == pending[0].log_id]
        found = generator.sample(alike, min(len(alike), generator.randrange(1, 4)))
        rig.reschedule(found, [START_MS + generator.randrange(9 * SPAN) for _ in found])
    elif kind == "close" and rig.sequences:
        rig.close_stream(generator.choice(sorted(rig.sequences)), 1000 + rig.log.end_ordinal)
    else:
        batches = [random_batch(rig, generator) for _ in range(generator.randrange(1, 5) if kind == "joined" else 1)]
        place = Source(SOURCE_TRANSACTION, 77, rig.log.end_offset, 1)
        rig.send(*batches, **({"source": place} if kind == "applied" else {}))


def random_batch(rig: Rig, generator: random.Random) -> Wanted:
    count = generator.choice((1, 1, 2, 5, 40, 300))
    sizes = [generator.randrange(300)] * count if generator.random() < 0.5 else [
        generator.choice((0, 10, 70, 2000)) for _ in range(count)]  # fmt: skip
    dues = [START_MS + generator.randrange(9 * SPAN) for _ in range(count)]
    flags = bytes(generator.randrange(2) for _ in range(count))
    producer = generator.randrange(100, 105) if generator.random() < 0.9 else 100_000 + rig.log.end_ordinal
    while rig.producers.closed_id(producer):
        producer += 1000
    return Wanted(producer, dues, [bytes(size) for size in sizes], 0x1000_0000 + generator.randrange(3), "t", flags)


def said(rig: Rig) -> list[Any]:
    """The whole state, without where the append of an answer ends: after a recovery all of it is forced.

    Also without the number up to which handles have no epoch, which only a snapshot contains.
    """
    version, producers, *rest, epochs = msgpack.unpackb(rig.state.dump())
    rest.append(epochs[8:])
    streams = msgpack.unpackb(producers)
    for *_, answers in streams[2]:
        for answer in answers:
            answer[4] = min(answer[4], 0)
    return [version, streams, *rest]


@pytest.mark.parametrize("round", range(scaled(60)))
def test_live_and_recovered_are_the_same(round: int) -> None:
    """After a kill, after a clean stop, from a snapshot in the middle, and once more on top of a recovery."""
    generator = seeded("arrival state", round)
    rig = Rig(segment_bytes=generator.choice((3 << 19, 1 << 22)))
    for _ in range(3):
        for _ in range(generator.randrange(1, 25)):
            random_step(rig, generator)
        reported = said(rig)
        rig = rig.reopened(clean=generator.random() < 0.5)
        assert said(rig) == reported
        assert rig.read() == rig.sent


def test_a_batch_over_several_blocks_is_one_answer_after_a_recovery_too() -> None:
    rig = Rig()
    rig.send(some(5, 3000, size=90))
    first = check(rig, 5, 0, 3000).stored
    assert len(first.positions) > 1
    again = rig.reopened(clean=False)
    found = check(again, 5, 0, 3000)
    assert found.first_offset_walk is None and found.stored.first_ordinal == first.first_ordinal == 1
    assert list(found.stored.positions) == list(first.positions)


def test_batches_of_one_append_stay_apart() -> None:
    """The notes lie between them: a repeat gets its own first number."""
    rig = Rig()
    rig.send(some(5, 2), some(5, 3), some(6, 1), some(5, 1))
    again = rig.reopened(clean=False)
    for sequence, records, first in ((0, 2, 1), (2, 3, 4), (5, 1, 10)):
        found = check(again, 5, sequence, records)
        assert (found.stored.first_ordinal, found.first_offset_walk) == (first, None)


def test_arrival_headers_and_copies_have_no_sequence() -> None:
    rig = Rig()
    rig.send(some(5, 4))
    rig.reschedule(rig.sent[1:3], [START_MS + 500, START_MS + 600])
    rig.cancel((START_MS, 1))
    again = rig.reopened(clean=False)
    assert again.producers.last_sequence(5) == rig.producers.last_sequence(5) == 3
    assert len(again.producers) == 1
    assert check(again, 5, 4, 1) is None


def test_copies_over_several_blocks_have_no_sequence() -> None:
    rig = Rig()
    rig.send(some(5, 3, size=40_000))
    rig.reschedule(rig.sent[:3], [START_MS + 500] * 3)
    rig.send(some(6, 2))
    again = rig.reopened(clean=False)
    assert [again.producers.last_sequence(each) for each in (5, 6)] == [2, 1]
    assert said(again) == said(rig)


def test_damage_among_copies_hides_nothing_that_comes_after() -> None:
    """The last of them and the next note cannot be read: what is left after those is a sender's, and no copy."""
    rig = Rig()
    rig.send(some(5, 3, size=40_000))
    start = rig.log.end_offset
    rig.reschedule(rig.sent[:3], [START_MS + 500] * 3)
    rig.send(some(6, 2, size=40_000))
    rig.log.force()
    rig.send(some(7, 1))  # and says that what comes before was forced
    chunk = rig.log.read(start, 1 << 20)
    last_copy, note_of_6, record_of_6 = list(blocks_of(chunk.data, start, rig.log.log_id))[-3:]
    assert (note_of_6.control.records, record_of_6.control.records) == (2, 1)
    for block in (last_copy, note_of_6):
        rig.disk.damage(f"{FOLDER}/{segment_name(0, ARRIVALS_SUFFIX)}", block.control.end + 3, b"\xee" * 5)
    again = Rig(rig.disk)
    assert again.log.damage
    assert [again.producers.last_sequence(each) for each in (5, 6, 7)] == [2, 1, 0]


def test_a_succession_closes_the_sequence_over_all_topics() -> None:
    rig = Rig()
    rig.send(some(5, 2), some(5, 2)._replace(log_id=0x1100_0002, topic="bills"))
    rig.close_stream(5, 50)
    again = rig.reopened(clean=False)
    assert again.producers.closed_id(5) == (50, 3)
    with pytest.raises(StaleProducer):
        check(again, 5, 4, 1)


# Power cuts and stops


@pytest.mark.parametrize("round", range(scaled(100)))
def test_after_a_power_cut_state_and_messages_are_those_of_one_moment(round: int) -> None:
    """Never a note without its records, nor a cancel without what came before; what was forced is there."""
    generator = seeded("power cut", round)
    rig = Rig(segment_bytes=3 << 19)
    moments = {0: (said(rig), 0)}
    for _ in range(generator.randrange(2, 20)):
        random_step(rig, generator)
        moments[rig.log.end_offset] = (said(rig), len(rig.sent))
        if generator.random() < 0.2:
            rig.log.force()
    forced = rig.log.forced_offset
    again = Rig(rig.disk.crash(generator), rig.segment_bytes)
    assert forced <= again.log.end_offset
    state, count = moments[again.log.end_offset]
    assert again.read() == rig.sent[:count]
    assert said(again) == state


def test_a_log_that_is_resumed_is_learned_again() -> None:
    rig = Rig()
    rig.send(some(5, 3))
    rig.cancel((START_MS, 1))
    rig.log.force()
    reported = said(rig)
    rig.log.stop("the disk")
    rig.state.cancelled.add(START_MS + 1, 2)
    rig.log.resume()
    assert said(rig) == reported


# What was cancelled, and given another turn


def test_cancelled_ones_are_known_and_their_repeats_too() -> None:
    rig = Rig()
    rig.send(some(5, 3))
    rig.cancel((START_MS, 1), (START_MS + 2, 3))
    rig.cancel((START_MS, 1))
    for each in (rig, rig.reopened(clean=False)):
        assert each.state.cancelled.count == 2
        assert [(START_MS + n, n + 1) in each.state.cancelled for n in range(3)] == [True, False, True]


def test_a_rescheduled_one_is_cancelled_and_leads_to_its_copy() -> None:
    rig = Rig()
    rig.send(some(5, 3))
    rig.reschedule(rig.sent[:2], [START_MS + 100, START_MS + 50])
    for each in (rig, rig.reopened(clean=False)):
        assert each.state.rescheduled.get(START_MS, 1) == (START_MS + 100, 5)
        assert each.state.rescheduled.latest(START_MS + 1, 2) == (START_MS + 50, 6)
        assert (START_MS, 1) in each.state.cancelled and (START_MS + 100, 5) not in each.state.cancelled


def test_what_was_cancelled_before_does_not_come_back_by_a_reschedule() -> None:
    """Two that raced: the one that was written first counts, live and in a replay."""
    rig = Rig()
    rig.send(some(5, 1))
    rig.cancel((START_MS, 1))
    rig.reschedule(rig.sent[:1], [START_MS + 100])
    for each in (rig, rig.reopened(clean=False)):
        assert each.state.rescheduled.get(START_MS, 1) is None


def test_both_forget_by_spans() -> None:
    rig = Rig()
    rig.send(some(5, 2, due=3 * SPAN), some(6, 1, due=4 * SPAN))
    rig.cancel((3 * SPAN, 1))
    rig.reschedule(rig.sent[1:2], [9 * SPAN])
    rig.cancel((4 * SPAN, 4))
    assert rig.state.expire_before(5 * SPAN) == 1
    assert (rig.state.cancelled.count, rig.state.rescheduled.count) == (2, 1)
    assert rig.state.expire_before(10 * SPAN) == 2
    assert (rig.state.cancelled.count, rig.state.rescheduled.count) == (0, 0)


def test_an_old_handle_is_known_as_long_as_its_message_waits() -> None:
    """Given another turn, and then another one, far away: the way there is not forgotten on the way."""
    rig = Rig()
    rig.send(some(5, 1, due=3 * SPAN), some(6, 1, due=3 * SPAN))
    rig.reschedule(rig.sent[:1], [4 * SPAN])
    rig.reschedule(rig.sent[-1:], [900 * SPAN])
    rig.cancel((5 * SPAN, 99))
    assert rig.state.expire_before(100 * SPAN) == 1
    assert rig.state.rescheduled.latest(3 * SPAN, 1)[0] == 900 * SPAN
    assert rig.state.expire_before(901 * SPAN) == 2
    assert rig.state.rescheduled.latest(3 * SPAN, 1) == (3 * SPAN, 1)


def test_there_is_an_end_to_what_can_be_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrival_state, "CANCELLED_MAX", 2)
    rig = Rig()
    rig.send(some(5, 3))
    rig.cancel((START_MS, 1))
    assert not rig.state.is_full
    rig.cancel((START_MS + 1, 2))
    assert rig.state.is_full


def test_what_lies_far_apart_in_time_counts_by_the_memory_that_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrival_state, "BYTES_MAX", 100_000)
    near, far = Rig(), Rig()
    for n in range(1000):
        near.state.cancelled.add(START_MS, n)
        far.state.cancelled.add(START_MS + n * SPAN, n)
    assert far.state.is_full and not near.state.is_full


def test_a_message_that_is_moved_on_without_end_does_not_keep_all_others_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrival_state, "CANCELLED_MAX", 100)
    state = Rig().state
    state.cancelled.add(SPAN, 0)
    state.rescheduled.add(SPAN, 0, (1000 * SPAN, 500))
    for n in range(1, 50):
        assert state.expire_before(20 * SPAN + n * SPAN) == 0
        state.cancelled.add(SPAN, n)
    assert state.expire_before(100 * SPAN) == 50 and not state.is_full


def test_with_many_it_is_looked_only_now_and_then_what_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrival_state, "EXPIRY_SPANS_MAX", 10)
    state = Rig().state
    for n in range(100):
        state.cancelled.add(n * SPAN, n)
    assert state.expire_before(64 * SPAN) == 64
    assert state.expire_before(100 * SPAN) == 0
    assert state.expire_before(128 * SPAN) == 36


# Damage


def repaired(rig: Rig, *offsets: int) -> Rig:
    """Damaged at these places, mended by the operator's word, without a snapshot to lean on, and opened again."""
    rig.log.close()
    for offset in offsets:
        rig.disk.damage(f"{FOLDER}/{segment_name(0, ARRIVALS_SUFFIX)}", offset, b"\xee" * 5)
    assert repair(rig.disk, FOLDER, suffix=ARRIVALS_SUFFIX)
    for name in rig.disk.list(FOLDER):
        if name.endswith(".state"):
            rig.disk.unlink(f"{FOLDER}/{name}")
    again = Rig(rig.disk)
    again.sent = rig.sent
    return again


def test_an_arrival_header_that_a_repair_lost_costs_its_batch_alone(caplog: pytest.LogCaptureFixture) -> None:
    """Its records are in the streams still; their due times are unknown. The others have their numbers."""
    rig = Rig()
    rig.send(some(5, 2), some(6, 3))
    rig.send(some(7, 2))
    rig.log.force()
    lost = rig.sent[:2]
    again = repaired(rig, 25)  # in the first note
    assert [again.producers.last_sequence(each) for each in (5, 6, 7)] == [1, 2, 1]
    assert check(again, 6, 0, 3).stored.first_ordinal == 4
    with caplog.at_level(logging.ERROR):
        assert again.read() == [each for each in rig.sent if each not in lost]
    assert "2 delayed messages have no due time" in caplog.text


@pytest.mark.parametrize("lost", [1, 3])
def test_a_record_that_a_repair_lost_costs_itself_alone(lost: int) -> None:
    rig = Rig()
    (answer,) = rig.send(some(5, 40, size=50))
    rig.send(some(6, 2))
    places = [answer.positions[0][1] + n * 70 + 30 for n in range(7, 7 + lost)]
    again = repaired(rig, *places)
    assert again.read() == rig.sent[:7] + rig.sent[7 + lost :]
    assert check(again, 6, 0, 2).stored.first_ordinal == 42


def test_an_arrival_header_that_says_nothing_is_named_and_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig()
    rig.send(some(5, 2))
    bad = make_record(b"\x01no note at all, but of the house's id", HEADER_ID)
    rig.append([Batch(bad, (), header.PRODUCER_ID, 0, 1)])
    rig.send(some(6, 2))
    with caplog.at_level(logging.ERROR):
        again = rig.reopened(clean=False)
        assert again.read() == rig.sent
    assert "invalid arrival header" in caplog.text
    assert again.producers.last_sequence(6) == 1


# Snapshots


def test_an_empty_snapshot_is_an_empty_state() -> None:
    rig = Rig()
    rig.send(some(5, 2))
    rig.cancel((START_MS, 1))
    rig.state.load(b"")
    assert (len(rig.producers), rig.state.cancelled.count) == (0, 0)


def test_a_later_snapshot_is_refused_by_name() -> None:
    with pytest.raises(NewerFormat, match="the snapshot of the arrival log"):
        Rig().state.load(msgpack.packb((2, b"", b"", b"")))


def test_what_a_later_version_adds_after_is_left_out() -> None:
    rig = Rig()
    rig.send(some(5, 2))
    version, *parts = msgpack.unpackb(rig.state.dump(), use_list=False)
    other = Rig().state
    other.load(msgpack.packb((version, *parts, "more")))
    assert other.dump() == rig.state.dump()


@pytest.mark.parametrize("data", [b"\xc1", b"\x90", b"\x05", b"\x93\x01\xc4\x00\xc4\x00", b"\x94\x01\x01\x02\x03"])
def test_what_is_no_snapshot_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="snapshot of the arrival log"):
        Rig().state.load(data)


def test_a_snapshot_that_announces_too_much_takes_no_memory() -> None:
    with refused_in_little_memory("snapshot of the arrival log does not decode"):
        Rig().state.load(b"\x95" + NESTED_LISTS)


def test_sent_says_what_was_sent() -> None:
    """The yardstick of these tests."""
    rig = Rig()
    rig.send(some(5, 1, size=3))
    (found,) = rig.sent
    assert found == Sent(1, START_MS, False, 0x1000_0001, "orders", found.record)
    assert found.record[20:] == b"5/0"


# Cancelled messages are found, counted, forgotten by their spans, and come back from a dump.

turns = st.tuples(st.integers(0, 5 * SPAN), st.integers(0, 1 << 48))


def of(*some: tuple[int, int]) -> CancelledMessages:
    cancelled = CancelledMessages()
    for turn in some:
        cancelled.add(*turn)
    return cancelled


@given(st.lists(turns), st.lists(turns))
def test_it_holds_what_was_added_and_nothing_else(some: list[tuple[int, int]], others: list[tuple[int, int]]) -> None:
    cancelled = of(*some)
    spans = {(due >> SPAN_BITS, number) for due, number in some}
    assert cancelled.count == len(spans)
    for due, number in [*some, *others]:
        assert ((due, number) in cancelled) == ((due >> SPAN_BITS, number) in spans)


@given(st.lists(turns), turns, turns)
def test_a_quick_no_is_never_wrong(some: list[tuple[int, int]], one: tuple[int, int], other: tuple[int, int]) -> None:
    low, high = sorted((one[0], other[0]))
    found = of(*some).any_between(low, high)
    assert found == any(low >> SPAN_BITS <= due >> SPAN_BITS <= high >> SPAN_BITS for due, _ in some)


@pytest.mark.parametrize("stretch", [0, SPANS_CHECKED_MAX // 2 * SPAN, 1 << 40], ids=["a moment", "short", "long"])
def test_a_quick_answer_costs_the_same_however_many_are_cancelled(stretch: int) -> None:
    few, many = (of(*((n * SPAN, n) for n in range(count))) for count in (1000, 20_000))
    high = 1 << 50
    counts = [steps(lambda each=each: each.any_between(high - stretch, high)) for each in (few, many)]  # type: ignore[misc]
    assert counts[0] == counts[1] < 4 * SPANS_CHECKED_MAX


@pytest.mark.long
def test_what_lies_far_apart_takes_no_more_memory_than_is_said() -> None:
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        far = of(*((n * SPAN, n) for n in range(20_000)))
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (after - before) / 2 < far.size_bytes < 2 * (after - before)


def test_adding_twice_is_reported() -> None:
    cancelled = CancelledMessages()
    assert cancelled.add(5, 7) and not cancelled.add(5, 7)
    assert cancelled.count == 1


def test_many_in_one_span_are_sorted_in_and_still_found() -> None:
    generator = seeded("cancelled")
    numbers = generator.sample(range(1 << 40), RECENT_MIN * 4 + scaled(100_000))
    cancelled = of(*((SPAN, number) for number in numbers))
    assert cancelled.count == len(numbers)
    assert all((SPAN + 1, number) in cancelled for number in numbers)
    known = set(numbers)
    assert not any((SPAN, number + 1) in cancelled for number in numbers if number + 1 not in known)
    assert not any(cancelled.add(SPAN, number) for number in numbers[:1000])


def test_spans_are_forgotten_one_by_one() -> None:
    cancelled = of((10, 1), (SPAN + 10, 2), (SPAN + 11, 3), (9 * SPAN, 4))
    assert sorted(cancelled.spans_ended_by(10 * SPAN)) == [0, SPAN, 9 * SPAN]
    assert sorted(cancelled.spans_ended_by(10 * SPAN - 1)) == [0, SPAN]
    assert cancelled.expire_spans([SPAN, 3 * SPAN]) == 2
    assert cancelled.count == 2
    assert (SPAN + 10, 2) not in cancelled and (10, 1) in cancelled and (9 * SPAN, 4) in cancelled
    assert not cancelled.any_between(SPAN, 9 * SPAN - 1)


@given(st.lists(turns))
def test_a_dump_says_all_whatever_the_order_in_which_they_came(some: list[tuple[int, int]]) -> None:
    cancelled, again = of(*some), CancelledMessages()
    again.add(1, 1)
    again.load(cancelled.dump())
    assert again.count == cancelled.count
    assert all(turn in again for turn in some)
    assert again.dump() == cancelled.dump() == of(*reversed(some)).dump()


def test_an_empty_dump_is_empty() -> None:
    cancelled = of((1, 2))
    cancelled.load(b"")
    assert cancelled.count == 0 and cancelled.dump() == b""


def test_a_dump_that_was_cut_is_refused() -> None:
    data = of((10, 1), (10, 2), (SPAN, 3)).dump()
    for size in set(range(1, len(data))) - {32}:  # after the first span's numbers a shorter dump ends
        with pytest.raises(ValueError, match="cancelled"):
            CancelledMessages().load(data[:size])
    with pytest.raises(ValueError, match="span 0"):
        CancelledMessages().load(data[:32] * 2)


def test_another_thread_never_misses_one_that_is_there() -> None:
    """A worker asks while the owner adds, and sorts in."""
    cancelled = CancelledMessages()
    cancelled.add(0, 0)
    newest, missed = [0], list[int]()

    def ask() -> None:
        while newest[-1] >= 0:
            missed.extend(n for n in (0, newest[-1] // 2, newest[-1]) if n >= 0 and (0, n) not in cancelled)
            cancelled.any_between(0, 1 << 40)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread = Thread(target=ask)
    try:
        thread.start()
        for number in range(1, scaled(100_000) + 5_000):
            cancelled.add(0, number)
            newest[0] = number
            cancelled.add((1 + number % 64) << 20, number)
    finally:
        newest.append(-1)
        thread.join(60)
        sys.setswitchinterval(interval)
    assert missed == []


# Where a message waits now that was given another turn: every step of its way is known, the first answer stays.

turns_of_rescheduled = st.tuples(st.integers(0, 5 * SPAN), st.integers(0, 1 << 40))
moves = st.dictionaries(turns_of_rescheduled, turns_of_rescheduled)


def of_of_rescheduled(some: dict[tuple[int, int], tuple[int, int]]) -> RescheduledMessages:
    rescheduled = RescheduledMessages()
    for old, new in some.items():
        rescheduled.add(*old, new)
    return rescheduled


def by_span(some: dict[tuple[int, int], tuple[int, int]]) -> dict[tuple[int, int], tuple[int, int]]:
    """A number stands once in its span; the first answer stays."""
    found: dict[tuple[int, int], tuple[int, int]] = {}
    for (due, number), new in some.items():
        found.setdefault((due >> SPAN_BITS, number), new)
    return found


@given(moves, turns_of_rescheduled)
def test_each_has_its_new_turn_and_no_other_has_one(
    some: dict[tuple[int, int], tuple[int, int]], other: tuple[int, int]
) -> None:
    rescheduled, known = of_of_rescheduled(some), by_span(some)
    assert rescheduled.count == len(known)
    for due, number in [*some, other]:
        assert rescheduled.get(due, number) == known.get((due >> SPAN_BITS, number))


def test_a_repeat_changes_nothing() -> None:
    rescheduled = RescheduledMessages()
    assert rescheduled.add(5, 7, (50, 70)) and not rescheduled.add(5, 7, (60, 80))
    assert rescheduled.get(5, 7) == (50, 70) and rescheduled.count == 1


def test_an_old_handle_leads_to_where_the_message_is_now() -> None:
    rescheduled = of_of_rescheduled({(5, 7): (SPAN, 70), (SPAN, 70): (9, 71), (100, 8): (200, 9)})
    assert rescheduled.latest(5, 7) == rescheduled.latest(SPAN, 70) == rescheduled.latest(9, 71) == (9, 71)
    assert rescheduled.latest(100, 8) == (200, 9)


def test_many_in_one_span_are_sorted_in_and_still_found_of_rescheduled() -> None:
    generator = seeded("rescheduled")
    numbers = generator.sample(range(1 << 40), RECENT_MIN * 4 + scaled(50_000))
    rescheduled = of_of_rescheduled({(SPAN, number): (number, number + 1) for number in numbers})
    assert rescheduled.count == len(numbers)
    assert all(rescheduled.get(SPAN, number) == (number, number + 1) for number in numbers)


@given(moves)
def test_a_dump_says_all(some: dict[tuple[int, int], tuple[int, int]]) -> None:
    rescheduled, again = of_of_rescheduled(some), of_of_rescheduled({(1, 1): (2, 2)})
    again.load(rescheduled.dump())
    assert again.count == rescheduled.count
    assert all(again.get(*old) == rescheduled.get(*old) for old in some)
    assert again.dump() == rescheduled.dump()


def test_spans_are_forgotten_one_by_one_of_rescheduled() -> None:
    rescheduled = of_of_rescheduled({(10, 1): (2 * SPAN, 5), (SPAN, 2): (2 * SPAN, 6), (2 * SPAN, 5): (3 * SPAN, 7)})
    assert rescheduled.expire_spans([0, 7 * SPAN]) == 1
    assert rescheduled.count == 2
    assert rescheduled.get(10, 1) is None and rescheduled.latest(2 * SPAN, 5) == (3 * SPAN, 7)


def test_a_dump_that_was_cut_is_refused_of_rescheduled() -> None:
    data = of_of_rescheduled({(10, 1): (11, 2), (SPAN, 3): (SPAN, 4)}).dump()
    for size in set(range(1, len(data))) - {40}:  # after the first span's columns a shorter dump ends
        with pytest.raises(ValueError, match="rescheduled"):
            RescheduledMessages().load(data[:size])
    with pytest.raises(ValueError, match="span 0"):
        RescheduledMessages().load(data[:40] * 2)


def test_a_span_is_over_when_no_handle_of_it_leads_beyond() -> None:
    rescheduled = of_of_rescheduled(
        {(SPAN, 1): (2 * SPAN, 5), (2 * SPAN, 5): (50 * SPAN, 6), (3 * SPAN, 2): (4 * SPAN, 7)}
    )
    starts = [0, SPAN, 2 * SPAN, 3 * SPAN]
    assert rescheduled.expirable_spans(starts, 10 * SPAN) == [0, 3 * SPAN]
    assert rescheduled.expirable_spans(starts, 51 * SPAN) == starts
    assert rescheduled.expirable_spans(starts[:2], 51 * SPAN) == [0]  # the step in between is still known
    assert rescheduled.expirable_spans(starts, 5 * SPAN - 1) == [0]
    again = RescheduledMessages()
    again.load(rescheduled.dump())
    assert again.expirable_spans(starts, 10 * SPAN) == [0, 3 * SPAN]


def moved_on(count: int) -> RescheduledMessages:
    """One message that was moved by a minute again and again, from the turn (0, 0) on."""
    return of_of_rescheduled({(n * SPAN, n): ((n + 1) * SPAN, n + 1) for n in range(count)})


def test_what_is_moved_on_again_and_again_is_forgotten_in_one_pass() -> None:
    counts = []
    for count in (200, 2000):
        rescheduled, starts = moved_on(count), [n * SPAN for n in range(count)]
        assert rescheduled.expirable_spans(starts, count * SPAN) == []
        counts.append(steps(lambda: rescheduled.expirable_spans(starts, count * SPAN)))  # noqa: B023
        assert rescheduled.expirable_spans(starts, (count + 1) * SPAN) == starts
    assert counts[1] < 12 * counts[0]


def test_a_long_way_is_walked_once() -> None:
    rescheduled = moved_on(5000)
    assert rescheduled.latest(0, 0) == (5000 * SPAN, 5000)
    assert steps(lambda: rescheduled.latest(0, 0)) < 30
    for n in range(5000, 5000 + 3 * CHAIN_STEPS_MIN):
        rescheduled.add(n * SPAN, n, ((n + 1) * SPAN, n + 1))
        assert rescheduled.latest(0, 0) == ((n + 1) * SPAN, n + 1)
        assert steps(lambda: rescheduled.latest(7 * SPAN, 7)) < 12 * CHAIN_STEPS_MIN
    rescheduled.expire_spans([1000 * SPAN])
    assert rescheduled.latest(0, 0) == (1000 * SPAN, 1000), "nothing leads over what is forgotten"


def test_ways_that_are_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tfmq.delay.arrivals.state.SHORTCUTS_MAX", 10)
    rescheduled = moved_on(40 * CHAIN_STEPS_MIN)
    for n in range(0, 20 * CHAIN_STEPS_MIN, 7):
        assert rescheduled.latest(n * SPAN, n) == (40 * CHAIN_STEPS_MIN * SPAN, 40 * CHAIN_STEPS_MIN)
        assert len(rescheduled._shortcuts) <= 10
