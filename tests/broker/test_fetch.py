"""Fetches: what is there at once, what is not when it is appended, and no reader sees what a power cut can undo."""

from __future__ import annotations

import logging
from typing import Any
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from journal.log.log import Log
from journal.log.segment import Segment
from journal.record.block import blocks_of
from journal.record.block_trailer import TRAILER_SIZE, BlockTrailer, encode_trailer
from journal.record.format import make_id, make_record, tag_flag, tag_hash
from tests.broker.helpers import Answer, Broker, Session, payloads_of
from tfmq.broker.fetch import (
    LARGE_BLOCK_BYTES,
    LARGE_BLOCKS_CREDIT_SECONDS,
    LARGE_BLOCKS_PAUSE_SECONDS,
    LARGE_BLOCKS_SHARE,
    blocks_with,
)
from tfmq.limits import FETCH_BYTES_FIRST
from tfmq.protocol.commands import (
    ACKS_SYNCED,
    ACKS_WRITTEN,
    EPOCH_UNKNOWN,
    READ_FORCED,
    READ_WRITTEN,
    Cancel,
    Fetch,
    GrowTopic,
)


@pytest.fixture
def broker() -> Broker:
    made = Broker()
    made.create()
    return made


def queued(**values: Any) -> Broker:
    made = Broker(queued=True, **values)
    made.create()
    return made


def test_a_fetch_gives_whole_blocks_and_where_to_go_on(broker: Broker) -> None:
    producer = broker.lease()
    broker.produce(producer, 0, [b"a"])
    broker.produce(producer, 1, [b"b"])
    answer = broker.fetch(0, max_bytes=1)
    assert payloads_of(answer) == [b"a"]
    assert (answer.start, answer.skip_to, answer.next) == (0, 0, 121)
    assert (answer.first, answer.end, answer.forced) == (0, 242, 242)
    assert answer.log_id == broker.incarnation() << 24
    assert payloads_of(broker.fetch(answer.next)) == [b"b"]


def test_an_offset_inside_a_block_is_answered_from_its_start(broker: Broker) -> None:
    broker.produce(broker.lease(), 0, [b"a", b"b"])
    answer = broker.fetch(21)
    assert (answer.start, answer.skip_to) == (0, 21)
    assert payloads_of(answer, 21) == [b"b"]


def test_at_the_end_without_waiting_it_is_empty(broker: Broker) -> None:
    answer = broker.fetch(0)
    assert (answer.body, answer.next) == (b"", 0)


def test_a_waiting_fetch_is_answered_when_something_comes() -> None:
    broker = queued()
    producer = broker.lease()
    fetch = broker.fetch(0, wait_ms=5000)
    assert fetch.code == "waiting"
    broker.produce(producer, 0, [b"a"])
    broker.work()
    assert payloads_of(fetch) == [b"a"]
    assert broker.engine.broker.fetches.parked_count == 0


def test_a_waiting_fetch_ends_empty_when_its_time_is_up_not_before(broker: Broker) -> None:
    fetch = broker.fetch(0, wait_ms=5000)
    broker.advance(4.999)
    assert fetch.code == "waiting"
    broker.advance(0.002)
    assert fetch.body == b"" and fetch.next == 0


def test_an_item_39_reads_never_pass_the_durable_offset() -> None:
    broker = queued()
    producer = broker.lease()
    broker.produce(producer, 0, [b"forced"])
    broker.work()
    forced = broker.log().forced_offset
    broker.produce(producer, 1, [b"only written"], acks=ACKS_WRITTEN)
    assert payloads_of(broker.fetch(0)) == [b"forced"]
    assert payloads_of(broker.fetch(0, read=READ_WRITTEN)) == [b"forced", b"only written"]
    assert broker.fetch(forced, read=READ_FORCED).next == forced


def test_a_fetch_that_waits_at_the_durable_offset_asks_for_an_fsync() -> None:
    broker = queued()
    producer = broker.lease()
    broker.produce(producer, 0, [b"a"])
    broker.work()
    broker.produce(producer, 1, [b"b"], acks=ACKS_WRITTEN)
    assert not broker.jobs
    fetch = broker.fetch(broker.log().forced_offset, wait_ms=5000)
    broker.work()
    assert payloads_of(fetch) == [b"b"]


def test_what_is_written_while_a_fetch_waits_is_fsynced_for_it() -> None:
    broker = queued()
    producer = broker.lease()
    fetch = broker.fetch(0, wait_ms=5000)
    broker.produce(producer, 0, [b"a"], acks=ACKS_WRITTEN)
    broker.work()
    assert payloads_of(fetch) == [b"a"]


def test_who_reads_what_is_written_does_not_wait_for_an_fsync() -> None:
    broker = queued()
    producer = broker.lease()
    broker.produce(producer, 0, [b"a"])
    broker.work()
    fetch = broker.fetch(broker.log().end_offset, wait_ms=5000, read=READ_WRITTEN)
    broker.produce(producer, 1, [b"b"], acks=ACKS_WRITTEN)
    assert payloads_of(fetch) == [b"b"]


def test_a_reader_ahead_of_the_durable_offset_waits() -> None:
    broker = queued()
    producer = broker.lease()
    broker.produce(producer, 0, [b"a"])
    broker.work()
    broker.produce(producer, 1, [b"b"], acks=ACKS_WRITTEN)
    ahead = broker.fetch(broker.log().end_offset, wait_ms=1000)
    assert ahead.code == "waiting"


@pytest.mark.parametrize(
    "offset, code", [(1, "not_a_record"), (243, "offset_out_of_range"), (10**9, "offset_out_of_range")]
)
def test_item_13_an_offset_that_is_none_is_refused_with_what_there_is(broker: Broker, offset: int, code: str) -> None:
    producer = broker.lease()
    broker.produce(producer, 0, [b"a"])
    broker.produce(producer, 1, [b"b"])
    answer = broker.fetch(offset, wait_ms=1000)
    assert answer.code == code
    if code == "offset_out_of_range":
        assert answer.failure is not None
        assert (answer.failure.details["first"], answer.failure.details["end"]) == (0, 242)


def test_cold_data_is_read_in_a_worker() -> None:
    broker = queued()
    producer = broker.lease()
    broker.produce(producer, 0, [b"a"])
    broker.work()
    broker.disk.is_cached = False
    fetch = broker.fetch(0)
    assert fetch.code == "waiting" and len(broker.jobs) == 1
    broker.work()
    assert payloads_of(fetch) == [b"a"]


def test_a_client_gets_in_one_fetch_as_much_as_it_has_received_and_a_little_at_first(broker: Broker) -> None:
    producer = broker.lease()
    for sequence in range(30):
        broker.produce(producer, sequence, [bytes(10_000)])
    session = Session()
    request = Fetch("orders", broker.incarnation(), 0, 0, EPOCH_UNKNOWN, 1 << 20)
    for received, least, most in ((0, 1, FETCH_BYTES_FIRST), (200_000, FETCH_BYTES_FIRST + 1, 200_000)):
        session.sent_bytes = received
        assert least <= len(broker.ask(request, session=session).body) <= most


def large_block(made: Broker, count: int) -> tuple[list[Session], list[Answer]]:
    """A message of 1 MiB, and that many new clients that fetch it."""
    made.produce(made.lease(), 0, [bytes(1 << 20)])
    made.work()
    sessions = [Session() for _ in range(count)]
    for session in sessions:
        session.sent_bytes = 0
    return sessions, [new_fetch(made, session) for session in sessions]


def new_fetch(made: Broker, session: Session, offset: int = 0, wait_ms: int = 0) -> Answer:
    return made.ask(Fetch("orders", made.incarnation(), 0, offset, EPOCH_UNKNOWN, 1 << 20, wait_ms), session=session)


@pytest.mark.parametrize("cached", [True, False], ids=["cached", "cold"])
def test_large_blocks_for_new_clients_are_read_in_their_turn_in_slices_with_pauses(
    cached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = queued()
    broker.disk.is_cached = cached
    slice_seconds = [0.02]
    read_slice = Segment.pread_into

    def slowly(segment: Segment, buffer: memoryview, position: int) -> int:
        assert len(buffer) <= LARGE_BLOCK_BYTES
        broker.clock.advance(slice_seconds[0])
        return read_slice(segment, buffer, position)

    monkeypatch.setattr(Segment, "pread_into", slowly)
    sessions, fetches = large_block(broker, 5)
    while cached is False and len(broker.jobs) > 1:
        broker.step(0)  # each finds that its block is large
    assert len(broker.jobs) == 1
    sessions[1].close()
    broker.step()
    broker.advance(0)
    assert [answer.code for answer in fetches] == ["ok", "abandoned", "waiting", "waiting", "waiting"]
    assert broker.pauses == [] and len(fetches[0].body) > 1 << 20
    broker.step()
    broker.advance(0)
    assert fetches[2].body == fetches[0].body
    due = 0.02 / LARGE_BLOCKS_SHARE
    pauses = [pause for pause in broker.pauses if pause > 1e-6]  # the clock's values are rounded
    assert pauses == pytest.approx([6 * due - LARGE_BLOCKS_CREDIT_SECONDS - 6 * 0.02] + 4 * [due - 0.02])
    slice_seconds[0], broker.pauses[:] = 60.0, []
    broker.work()
    assert [pause for pause in broker.pauses if pause > 1e-6] == 5 * [LARGE_BLOCKS_PAUSE_SECONDS]
    broker.stop()
    assert fetches[4].code == "busy"


def test_after_a_large_block_that_was_read_at_once_there_is_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = queued()
    read = Log.read

    def at_once(log: Log, *arguments: Any, pause: Any = None, **options: Any) -> Any:
        broker.clock.advance(1.0)
        return read(log, *arguments, **options)

    monkeypatch.setattr(Log, "read", at_once)
    broker.engine.broker.fetches.close()  # as a standby does whose folder was made again
    _, (fetch,) = large_block(broker, 1)
    broker.work()
    assert len(fetch.body) > 1 << 20 and broker.pauses == [LARGE_BLOCKS_PAUSE_SECONDS]


@pytest.mark.parametrize(("ends", "code"), [("session", "abandoned"), ("broker", "busy")])
def test_the_read_of_a_large_block_ends_with_its_client_or_the_broker(ends: str, code: str) -> None:
    broker = queued()
    (session,), (fetch,) = large_block(broker, 1)
    work, done = broker.jobs.popleft()
    read_slice, slices = Segment.pread_into, list[int]()

    def once(segment: Segment, buffer: memoryview, position: int) -> int:
        if not slices:
            session.close() if ends == "session" else broker.engine.broker.stop(lambda: None)
        slices.append(len(buffer))
        return read_slice(segment, buffer, position)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Segment, "pread_into", once)
        broker.do(work, done)
    assert len(slices) == 1 and fetch.code == code


def test_a_client_that_has_received_as_much_does_not_wait_for_its_turn() -> None:
    broker = queued()
    large_block(broker, 2)
    answer = broker.fetch(0)
    assert len(answer.body) > 1 << 20


def test_a_waiting_fetch_keeps_its_turn_for_a_large_block() -> None:
    broker = queued()
    producer = broker.lease()
    _, first = large_block(broker, 1)
    session = Session()
    session.sent_bytes = 0
    waiting = new_fetch(broker, session, broker.log().end_offset, wait_ms=1000)
    broker.produce(producer, 0, [bytes(1 << 20)])
    while len(broker.jobs) > 1:
        broker.step(1)  # the fsync, and what follows
    broker.advance(2.0)
    assert not first[0].done and not waiting.done
    broker.work()
    broker.advance(60.0)
    broker.work()
    assert len(waiting.body) > 1 << 20


@pytest.mark.parametrize("cached", [True, False], ids=["at once", "in a worker"])
def test_a_fetch_without_memory_is_busy_and_one_line_in_the_log(
    cached: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broker = queued()
    broker.produce(broker.lease(), 0, [b"a"])
    broker.work()
    broker.disk.is_cached = cached

    def bytearray_of_too_much(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(Segment, "pread", bytearray_of_too_much)
        patch.setattr(Segment, "pread_cached", bytearray_of_too_much if cached else lambda *_: None)
        fetches = [broker.fetch(0) for _ in range(3)]
        broker.work()
    assert [(each.code, each.failure.outcome) for each in fetches] == [("busy", "not done")] * 3
    reported = [each.getMessage() for each in caplog.records if each.levelno >= logging.ERROR]
    assert reported == [f"out of memory, a fetch of orders-0 was refused; {count} so far" for count in (1, 2)]
    assert all(each.exc_info is None for each in caplog.records)
    again = broker.fetch(0)
    broker.work()
    assert payloads_of(again) == [b"a"]


def test_a_cancelled_fetch_ends_empty_and_another_session_s_does_not(broker: Broker) -> None:
    mine, other = broker.fetch(0, wait_ms=5000), Session()
    assert not broker.ask(Cancel(mine.correlation), session=other).cancelled
    assert broker.ask(Cancel(mine.correlation)).cancelled
    assert mine.body == b"" and mine.next == 0
    assert not broker.ask(Cancel(mine.correlation)).cancelled


def test_fetches_of_a_closed_session_are_forgotten(broker: Broker) -> None:
    session = Session()
    fetch = broker.fetch(0, wait_ms=5000, session=session)
    session.close()
    assert fetch.code == "abandoned"
    assert broker.engine.broker.fetches.parked_count == 0
    late = broker.fetch(0, wait_ms=5000, session=session)
    assert late.code == "abandoned"


def test_a_cold_read_that_ends_after_its_session_answers_once() -> None:
    broker = queued()
    producer, session = broker.lease(), Session()
    broker.produce(producer, 0, [b"a"])
    broker.work()
    end = broker.log().end_offset
    fetch = broker.fetch(end, wait_ms=50, session=session)
    broker.disk.is_cached = False
    broker.produce(producer, 1, [b"b"])
    broker.step()
    session.close()
    broker.work()
    assert fetch.code == "abandoned" and fetch.calls == 1


def test_too_many_waiting_fetches_are_busy() -> None:
    broker = Broker(limits__parked_fetches=3, limits__parked_fetches_per_session=2)
    broker.create()
    answers = [broker.fetch(0, wait_ms=5000) for _ in range(3)]
    assert [answer.code for answer in answers] == ["waiting", "waiting", "busy"]
    others = [broker.fetch(0, wait_ms=5000, session=Session()) for _ in range(2)]
    assert [answer.code for answer in others] == ["waiting", "busy"]


def test_another_incarnation_is_an_unknown_topic(broker: Broker) -> None:
    assert broker.fetch(0, incarnation=999).code == "unknown_topic"
    missing = broker.ask(Fetch("orders", broker.incarnation(), 7, 0))
    assert missing.code == "unknown_partition"


# Tags


def test_blocks_without_a_wanted_tag_are_left_out(broker: Broker) -> None:
    producer = broker.lease()
    for number, tag in enumerate(["red", "blue", "red", ""]):
        broker.produce(producer, number, [tag.encode() or b"none"], tag=tag)
    answer = broker.fetch(0, tags=[tag_hash("red")])
    assert payloads_of(answer) == [b"red", b"red"]
    assert answer.next == broker.log().end_offset


def test_item_14_a_filter_that_rejects_all_still_advances(broker: Broker) -> None:
    producer = broker.lease()
    for number in range(3):
        broker.produce(producer, number, [b"x"], tag="blue")
    answer = broker.fetch(0, tags=[tag_hash("red")])
    assert answer.body == b"" and answer.next == broker.log().end_offset
    first = broker.fetch(0, tags=[tag_hash("red")], max_bytes=1)
    assert first.body == b"" and 0 < first.next < answer.next


def test_item_14_a_waiting_fetch_whose_filter_rejects_new_messages_waits_on_and_advances(broker: Broker) -> None:
    producer = broker.lease()
    fetch = broker.fetch(0, tags=[tag_hash("red")], wait_ms=1000)
    broker.produce(producer, 0, [b"x"], tag="blue")
    assert fetch.code == "waiting"
    broker.advance(2)
    assert fetch.body == b"" and fetch.next == broker.log().end_offset


@pytest.mark.parametrize("read", [READ_WRITTEN, READ_FORCED])
def test_who_waits_for_a_message_is_answered_before_its_sender(read: int, monkeypatch: pytest.MonkeyPatch) -> None:
    broker = queued()
    producer = broker.lease()
    order: list[Answer] = []
    ok = Answer.ok

    def noted(self: Answer, *fields: Any, body: Any = b"") -> None:
        order.append(self)
        ok(self, *fields, body=body)

    monkeypatch.setattr(Answer, "ok", noted)
    fetch = broker.fetch(0, wait_ms=5000, read=read)
    sent = broker.produce(producer, 0, [b"a"], acks=ACKS_WRITTEN if read == READ_WRITTEN else ACKS_SYNCED)
    broker.work()
    assert [each is fetch for each in order if each in (fetch, sent)] == [True, False]


def test_each_answer_says_how_many_partitions_there_are_and_growth_is_reported_at_once() -> None:
    """To one fetch of a connection: it has one a partition, and knows by that one."""
    broker = queued()
    two = Session()
    first, other = broker.fetch(0, wait_ms=5000), broker.fetch(0, wait_ms=5000)
    second = broker.fetch(0, wait_ms=5000, session=two)
    broker.ask(GrowTopic("orders", 3))
    broker.work()
    assert [first.code, other.code, second.code] == ["ok", "waiting", "ok"]
    assert (first.partitions, second.partitions, first.next, first.body) == (3, 3, 0, b"")
    broker.create("bills")
    broker.work()
    assert other.code == "waiting"


# The filter keeps exactly the blocks that hold a wanted tag, and never hides damage.

LOG_ID = 7 << 24


def chunk(blocks: list[list[str]]) -> bytes:
    """Control blocks whose records have the tags named."""
    data, ordinal = b"", 0
    for tags in blocks:
        records = b"".join(make_record(b"x", make_id(9, n), tag_flag(tag)) for n, tag in enumerate(tags))
        control = BlockTrailer(len(tags), len(records), crc32(records), 1, 0, 0, ordinal, len(data))
        data += records + encode_trailer(LOG_ID, control)
        ordinal += len(tags)
    return data


@given(
    st.lists(st.lists(st.sampled_from(["", "a", "b", "c"]), max_size=4), max_size=6), st.sets(st.sampled_from("abc"))
)
def test_exactly_the_blocks_with_a_wanted_tag_are_kept(blocks: list[list[str]], wanted: set[str]) -> None:
    data = chunk(blocks)
    kept = b"".join(blocks_with(data, {tag_hash(tag) for tag in wanted}, 0, LOG_ID))
    offsets = [block.offset for block in blocks_of(data, 0, LOG_ID)]
    sizes = [len(block.data) + TRAILER_SIZE for block in blocks_of(data, 0, LOG_ID)]
    expected = b"".join(
        data[offset : offset + size]
        for offset, size, tags in zip(offsets, sizes, blocks, strict=True)
        if wanted & set(tags)
    )
    assert kept == expected


def test_neighbours_come_as_one_stretch() -> None:
    data = chunk([["a"], ["a"], ["b"], ["a"]])
    assert len(blocks_with(data, {tag_hash("a")}, 0, LOG_ID)) == 2


def test_a_block_whose_lengths_do_not_add_up_is_left_to_the_reader() -> None:
    data = bytearray(chunk([["b"], ["b"]]))
    data[0:4] = b"\xff\xff\xff\xff"
    assert b"".join(blocks_with(bytes(data), {tag_hash("a")}, 0, LOG_ID)) == data


def test_a_wrong_byte_anywhere_hides_no_block() -> None:
    """Blocks of a size that is a power of two: one wrong bit of a length leads from a block's start to another's."""
    records = [make_record(b"." * (1024 - TRAILER_SIZE - 20), make_id(9, n)) for n in range(8)]
    blocks = []
    for n, record in enumerate(records):
        control = BlockTrailer(1, len(record), crc32(record), 1, 0, 0, n, 1024 * n)
        blocks.append(record + encode_trailer(LOG_ID, control))
    data = b"".join(blocks)
    assert blocks_with(data, {tag_hash("a")}, 0, LOG_ID) == []
    for place in (*range(2048, 2048 + 24), *range(3072 - TRAILER_SIZE, 3072)):
        for bit in range(8):
            spoiled = bytearray(data)
            spoiled[place] ^= 1 << bit
            kept = b"".join(blocks_with(spoiled, {tag_hash("a")}, 0, LOG_ID))
            assert kept == spoiled[2048:], (place, bit)
