"""A delayed batch from its request to the log where it is stored: whole, after its note, under the stream's rule."""

from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from journal.record.batch import Batch, Source, split_blocks
from journal.record.block_trailer import SOURCE_TRANSACTION, TRAILER, contains_trailer_header
from journal.record.format import FLAG_TRAILER, HEADER_SIZE, make_log_id
from tests.broker.helpers import Answer, Broker, Session, after, at, batch, handles
from tfmq.apply_target import ARRIVALS_KEY, AppendDelayed, AppendResult
from tfmq.broker.delayed_produce import effective_due_times_at, unwrap_batch, wrap_batch
from tfmq.delay.arrivals.log import read_batches
from tfmq.delay.due_time import ABSOLUTE_FLAG, DUE_MAX, RELATIVE_FLAG, due_times_of
from tfmq.protocol.commands import ACKS_NONE, ACKS_SYNCED, ACKS_WRITTEN, Block, Produce
from tfmq.protocol.delayed_handle import decode_due_times, parse_handle

ORDERS = make_log_id(20, 3)
PRODUCER = 1 << 30


@pytest.fixture
def broker() -> Broker:
    made = Broker()
    made.create()
    return made


def dues(answer: Answer) -> list[int]:
    return list(decode_due_times(answer.delayed.dues))


def queued(**values: Any) -> Broker:
    made = Broker(queued=True, **values)
    made.create()
    made.delay(made.lease(), 0, [b"first"])
    made.work()
    return made


# From the request to the answer


def test_a_delayed_send_is_stored_whole_after_its_arrival_header(broker: Broker) -> None:
    now = broker.clock.wall_ms()
    answer = broker.delay(broker.lease(), 0, [b"one", b"two"], due=after(5000) + at(now + 9000))
    assert answer.positions == [] and answer.first_ordinal == -1 and answer.durability == ACKS_SYNCED
    assert dues(answer) == [now + 5000, now + 9000]
    (stored,) = read_batches(broker.arrivals, 0, broker.arrivals.end_offset)
    assert stored.log_id == broker.log().log_id and stored.topic == "orders"
    assert stored.first_number == answer.delayed.first_number
    assert list(stored.dues) == dues(answer) and stored.absolute == RELATIVE_FLAG + ABSOLUTE_FLAG
    assert broker.payloads() == []
    handle = parse_handle(handles(answer)[1])
    assert handle == (answer.delayed.store_id, stored.log_id, now + 9000, stored.first_number + 1)


def test_a_synced_one_waits_for_the_fsync_and_a_written_one_says_that_it_is_only_written() -> None:
    broker = queued()
    producer = broker.lease()
    broker.work()
    written = broker.delay(producer, 0, acks=ACKS_WRITTEN)
    assert written.durability == ACKS_WRITTEN and written.delayed is not None
    synced = broker.delay(producer, 1)
    assert synced.code == "waiting" and synced.released
    broker.work()
    assert synced.durability == ACKS_SYNCED
    assert broker.arrivals.forced_offset == broker.arrivals.end_offset


def test_one_sequence_goes_over_all_topics_and_partitions(broker: Broker) -> None:
    broker.create("bills", 2)
    producer = broker.lease()
    answers = [
        broker.delay(producer, 0),
        broker.delay(producer, 1, topic="bills", partition=1),
        broker.delay(producer, 2, topic="bills"),
    ]
    assert [answer.code for answer in answers] == ["ok"] * 3
    gap = broker.delay(producer, 4)
    assert gap.code == "sequence_gap" and gap.failure is not None and gap.failure.outcome == "not done"
    assert broker.delay(producer, 9, acks=ACKS_NONE).code == "ok", "which skips the check of gaps"
    assert broker.delay(7 << 20, 0).code == "unknown_producer"


def test_what_arrives_in_one_turn_is_one_append(broker: Broker) -> None:
    producers = [broker.lease() for _ in range(5)]
    before = broker.arrivals.end_offset
    answers = [broker.delay(producer, 0, [b"%d" % n], turn=False) for n, producer in enumerate(producers)]
    broker.engine.broker.end_turn()
    assert len({answer.append_time for answer in answers}) == 1
    stored = list(read_batches(broker.arrivals, before, broker.arrivals.end_offset))
    numbers = [answer.delayed.first_number for answer in answers]
    assert [each.first_number for each in stored] == numbers == sorted(set(numbers))


def test_a_repeat_has_the_same_number_and_the_same_dues(broker: Broker) -> None:
    producer = broker.lease()
    first = broker.delay(producer, 0, [b"a", b"b"], due=after(5000))
    broker.delay(producer, 2)
    broker.advance(1)
    again = broker.delay(producer, 0, [b"a", b"b"], due=after(5000))
    assert again.repeated and again.delayed == first.delayed
    later = broker.restart()
    later.advance(1)
    again = later.delay(producer, 0, [b"a", b"b"], due=after(5000))
    assert again.repeated and again.delayed == first.delayed
    assert later.arrivals.end_ordinal == 5, "two notes, three messages"


def test_a_repeat_in_the_same_turn_has_the_first_answer(broker: Broker) -> None:
    producer = broker.lease()
    first = broker.delay(producer, 0, turn=False)
    second = broker.delay(producer, 0, session=Session("another"), turn=False)
    broker.engine.broker.end_turn()
    assert (first.repeated, second.repeated) == (False, True)
    assert first.delayed == second.delayed


def test_a_repeat_of_what_is_given_up_is_answered_without_its_dues(broker: Broker) -> None:
    producer = broker.lease()
    broker.delay(producer, 0)
    partition = broker.engine.broker.delay_commands.partition
    partition.run_exclusively(lambda: partition.log.truncate_before(partition.log.end_offset), lambda *_: None)
    again = broker.delay(producer, 0)
    assert again.code == "ok" and again.repeated and again.delayed is None


def test_a_repeat_without_a_result_of_the_disk_may_have_happened(broker: Broker) -> None:
    producer = broker.lease()
    broker.delay(producer, 0)
    broker.disk.faults.fail("read", path="arrivals/")
    again = broker.delay(producer, 0)
    assert again.failure is not None and again.failure.outcome == "unknown"


def test_a_successor_closes_a_delayed_sequence_and_no_other(broker: Broker) -> None:
    producer = broker.lease()
    broker.delay(producer, 0, [b"a", b"b"])
    closed = broker.succeed(producer, topic="")
    assert closed.last_sequence == 1 and closed.durability == ACKS_SYNCED
    assert broker.succeed(producer, topic="").successor_id == closed.successor_id
    assert broker.delay(producer, 2).code == "stale_producer"
    assert broker.delay(closed.successor_id, 0).code == "ok"
    again = broker.restart()
    assert again.delay(producer, 2).code == "stale_producer"
    assert again.delay(closed.successor_id, 1).code == "ok"


# What is refused


def test_as_many_dues_as_messages(broker: Broker) -> None:
    producer = broker.lease()
    for wire in (after(1) * 2, after(1) * 4):
        refused = broker.delay(producer, 0, [b"a", b"b", b"c"], due=wire)
        assert refused.code == "bad_request" and "3 messages" in str(refused.failure)
    assert broker.delay(producer, 0, [b"a", b"b", b"c"], due=after(1) * 3).code == "ok"


def test_what_its_partition_would_refuse_is_refused_at_once(broker: Broker) -> None:
    producer = broker.lease()
    assert broker.delay(producer, 0, incarnation=9999).code == "unknown_topic"
    assert broker.delay(producer, 0, partition=7).code == "unknown_partition"
    assert broker.delay(producer, 0, [bytes(9 << 20)]).code == "message_too_large"
    broker.create("small", log__segment_bytes=1 << 16)
    assert broker.delay(producer, 0, [bytes(1 << 16)], topic="small").code == "ok"
    forged = control_header(broker.log().log_id)
    assert broker.delay(producer, 0, [b"x" + forged]).code == "bad_request"
    assert broker.delay(producer, 1, [b"x" + control_header(ARRIVALS_KEY)]).code == "bad_request"
    assert broker.delay(producer, 1).code == "ok", "nothing else took a sequence"
    assert broker.arrivals.end_ordinal == 4


def control_header(log_id: int) -> bytes:
    """The header of a block trailer of that log."""
    return TRAILER.pack(80, 5, log_id, FLAG_TRAILER, *[0] * 14)[:HEADER_SIZE]


def test_a_broken_block_is_refused(broker: Broker) -> None:
    producer = broker.lease()
    data = batch(producer, 0, [b"payload"])
    request = Produce(
        "orders", broker.incarnation(), 0, producer, 0, 1, ACKS_SYNCED, [Block(len(data), 1, 12345)], after(1000)
    )
    assert broker.ask(request, data).code == "bad_request"
    (block,) = split_blocks(data)
    assert broker.ask(request._replace(blocks=[Block(*block)]), data).code == "ok"


@pytest.mark.parametrize("kept", [0, 1, 39])
@pytest.mark.parametrize("acks", [ACKS_NONE, ACKS_SYNCED])
def test_a_body_that_cannot_hold_what_is_announced_is_the_sender_s_mistake(
    broker: Broker, kept: int, acks: int
) -> None:
    producer = broker.lease()
    data = batch(producer, 0, [b"a", b"b"])
    due = after(1000) * 2
    request = Produce("orders", broker.incarnation(), 0, producer, 0, 2, acks, [], due)
    assert broker.ask(request, data[:kept]).code == "bad_request"
    assert broker.ask(request._replace(acks=ACKS_SYNCED), data).code == "ok"


def test_too_many_are_busy_until_some_are_delivered() -> None:
    broker = Broker(limits__delayed=3)
    broker.create()
    producer = broker.lease()
    broker.delay(producer, 0, [b"a", b"b"], due=after(1000))
    refused = broker.delay(producer, 2, [b"c", b"d"])
    assert refused.code == "busy" and "limits.delayed" in str(refused.failure)
    broker.advance(2)
    assert broker.delay(producer, 2, [b"c", b"d"]).code == "ok"


def test_too_many_bytes_are_busy_too() -> None:
    broker = Broker(limits__delayed_bytes=10_000)
    broker.create()
    producer = broker.lease()
    assert broker.delay(producer, 0, [bytes(9000)]).code == "ok"
    refused = broker.delay(producer, 1, [bytes(2000)])
    assert refused.code == "busy" and "limits.delayed_bytes" in str(refused.failure)


def test_what_waits_for_the_disk_counts_against_the_session_s_quota() -> None:
    broker = queued(limits__pending_bytes=100_000)
    producer = broker.lease()
    broker.work()
    first = broker.delay(producer, 0, [bytes(60_000)])
    assert broker.delay(producer, 1, [bytes(60_000)]).code == "busy"
    broker.work()
    assert first.code == "ok"
    assert broker.engine.broker.backpressure.pending_bytes == 0
    second = broker.delay(producer, 1, [bytes(60_000)])
    broker.work()
    assert second.code == "ok"


def test_a_full_disk_is_an_error_and_the_next_try_takes_the_same_sequence(broker: Broker) -> None:
    producer = broker.lease()
    broker.delay(producer, 0)
    broker.disk.space_bytes = broker.disk.used_bytes()
    refused = broker.delay(producer, 1, [bytes(10_000)])
    assert refused.code == "disk_full" and refused.failure is not None
    broker.disk.space_bytes = None
    assert broker.delay(producer, 1, [bytes(10_000)]).code == "ok"
    broker.advance(3)
    assert len(broker.payloads()) == 2, "nothing waits for the one that was refused"


def test_a_stopped_log_of_arrivals_refuses_and_a_start_lifts_it(broker: Broker) -> None:
    producer = broker.lease()
    broker.delay(producer, 0)
    broker.disk.faults.fail("force", path="arrivals")
    lost = broker.delay(producer, 1)
    broker.disk.faults.clear()
    assert lost.code == "storage_stopped" and lost.failure is not None and lost.failure.outcome == "unknown"
    refused = broker.delay(producer, 1)
    assert refused.code == "storage_stopped"
    for answer in (lost, refused):
        assert "start the broker again" in str(answer.failure) and "topic resume" not in str(answer.failure)
    assert broker.engine.broker.status()["delay"]["arrivals"] != "open"
    again = broker.restart()
    assert again.delay(producer, 1).code == "ok"


def test_a_batch_that_waits_for_a_roll_keeps_its_bytes_and_nothing_due_after_it_fires_first() -> None:
    broker = queued()
    producer = broker.lease()
    broker.work()
    partition = broker.engine.broker.delay_commands.partition
    partition.run_exclusively(lambda: None, lambda result, error: None)
    body = bytearray(batch(producer, 0, [b"kept"]))
    request = Produce("orders", broker.incarnation(), 0, producer, 0, 1, ACKS_WRITTEN, [], after(1000))
    answer = broker.ask(request, bytes(body))
    assert answer.code == "waiting" and answer.released
    broker.work()
    assert answer.code == "ok"
    *_, stored = read_batches(broker.arrivals, 0, broker.arrivals.end_offset, upto="written")
    assert bytes(stored.data[0]).endswith(b"kept")


def test_accepting_costs_no_parse_of_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither of ten messages nor of ten thousand is one looked at: the steps are the same."""
    broker = Broker()
    broker.create()
    steps = []
    for count in (10, 10_000):
        producer = broker.lease()
        data = batch(producer, 0, [b"payload!"] * count)
        blocks = [Block(*each) for each in split_blocks(data)]
        request = Produce(
            "orders",
            broker.incarnation(),
            0,
            producer,
            0,
            count,
            ACKS_WRITTEN,
            blocks,
            b"".join(after(3_600_000 + n) for n in range(count)),
        )
        steps.append(calls_of(broker, request, data))
    few, many = steps
    assert many < few + 1000, f"{few} calls for ten messages, {many} for ten thousand in five blocks"


def calls_of(broker: Broker, request: Produce, data: bytes) -> int:
    """How many functions, of Python or not, run for one request; no garbage is collected meanwhile."""
    import gc
    import sys

    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    gc.disable()
    sys.setprofile(note)
    try:
        broker.ask(request, data)
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


# Inside of transactions


@given(st.lists(st.tuples(st.booleans(), st.integers(0, DUE_MAX)), min_size=1, max_size=6), st.booleans())
def test_what_is_wrapped_comes_out_as_it_went_in(asked: list[tuple[bool, int]], blocked: bool) -> None:
    wire = b"".join(at(time) if absolute else after(time) for absolute, time in asked)
    data = batch(PRODUCER, 7, [b"%d" % n for n in range(len(asked))])
    whole = Batch(data, split_blocks(data) if blocked else [], PRODUCER, 7, len(asked))
    wrapped = wrap_batch(ORDERS, "orders", wire, whole)
    assert wrapped.count == len(asked) and sum(each[0] for each in wrapped.blocks) in (0, len(wrapped.data))
    note, records = unwrap_batch(wrapped._replace(data=memoryview(wrapped.data)))
    assert (note.log_id, note.topic, note.size_bytes) == (ORDERS, "orders", len(data))
    assert bytes(records.data) == data and list(records.blocks) == list(whole.blocks)
    assert list(note.dues.times) == [time for _, time in asked]
    assert list(note.dues.absolute) == [absolute for absolute, _ in asked]


def test_a_delay_counts_from_the_decision_and_a_time_stays() -> None:
    def at_10_000(asked: list[tuple[int, bytes]], ahead_ms: int = 0, decided_ms: int = 8_000) -> list[int]:
        times = due_times_of(array("Q", [time for time, _ in asked]), b"".join(flag for _, flag in asked))
        return list(effective_due_times_at(times, decided_ms, 10_000, ahead_ms).times)

    relative, absolute = RELATIVE_FLAG, ABSOLUTE_FLAG
    assert at_10_000([(5000, relative)]) == [13_000]
    assert at_10_000([(5000, relative), (15_000, absolute)]) == [13_000, 15_000]
    assert at_10_000([(15_000, absolute)], 1_000) == [16_000], "broker time is 1 s ahead"
    assert at_10_000([(15_000, absolute)], -1_000) == [14_000], "broker time is 1 s behind"
    assert at_10_000([(15_000, absolute), (500, absolute)], -6_000) == [10_001, 10_001]
    assert at_10_000([(1_999, relative), (2_001, relative)]) == [10_001, 10_001], "never before the next ms"
    assert at_10_000([(0, absolute), (0, relative)]) == [10_001, 10_001]
    assert at_10_000([(DUE_MAX, relative), (DUE_MAX, absolute)]) == [DUE_MAX, DUE_MAX]


def schedule(broker: Broker, *pieces: Batch, high: int = 1) -> list[tuple[AppendResult | None, BaseException | None]]:
    reported: list[tuple[AppendResult | None, BaseException | None]] = []
    times = [broker.clock.wall_ms()] * len(pieces)
    effect = AppendDelayed(pieces, times, Source(SOURCE_TRANSACTION, 5, high, 1))
    broker.engine.broker.apply_target.apply(effect, lambda mark, error: reported.append((mark, error)))
    broker.engine.broker.end_turn()
    return reported


def piece(broker: Broker, sequence: int, payload: bytes, wire: bytes = after(1000)) -> Batch:
    data = batch(PRODUCER, sequence, [payload])
    return wrap_batch(broker.log().log_id, "orders", wire, Batch(data, split_blocks(data), PRODUCER, sequence, 1))


def test_a_schedule_lands_once_by_its_source_s_position(broker: Broker) -> None:
    pieces = [piece(broker, 0, b"one"), piece(broker, 1, b"two")]
    for _ in range(2):
        ((mark, error),) = schedule(broker, *pieces)
        assert error is None and mark is not None and mark.offsets == ()
    assert len(list(read_batches(broker.arrivals, 0, broker.arrivals.end_offset, upto="written"))) == 2
    assert broker.engine.broker.apply_target.last_applied(ARRIVALS_KEY, (SOURCE_TRANSACTION, 5)) == (1, 1)
    broker.advance(2)
    assert broker.payloads() == [b"one", b"two"]


def test_producers_learn_nothing_from_what_a_transaction_brings(broker: Broker) -> None:
    schedule(broker, piece(broker, 3, b"inside"))
    for each in (broker, broker.restart()):
        assert len(each.engine.broker.delay_commands.partition.producers) == 0


@pytest.mark.parametrize("cut", range(1, HEADER_SIZE))
def test_a_batch_that_ends_like_half_a_block_trailer_meets_no_other_half(broker: Broker, cut: int) -> None:
    """Its sender chose the first bytes of a header; no note, whatever its topic is called, begins like the rest."""
    first = piece(broker, 0, b"x" + control_header(ARRIVALS_KEY)[:cut])
    data = batch(PRODUCER, 1, [b"second"])
    second = Batch(data, split_blocks(data), PRODUCER, 1, 1)
    for size in range(1, 100):
        seam = bytes(first.data[-HEADER_SIZE:]) + bytes(wrap_batch(ORDERS, "t" * size, after(1), second).data)
        assert not contains_trailer_header(seam, ARRIVALS_KEY)
    ((_, error),) = schedule(broker, first, wrap_batch(broker.log().log_id, "orders", after(1), second))
    assert error is None
