"""A payload that is a block trailer: after a torn end it looks like a true one, so it is never accepted."""

from __future__ import annotations

import os
from zlib import crc32

import pytest

from journal.errors import BadBatch
from journal.log.segment import Segment
from journal.record.batch import Batch
from journal.record.block_trailer import TRAILER_BODY, BlockTrailer, encode_trailer
from journal.record.format import FLAG_TRAILER, HEADER, make_id, make_log_id, make_record
from tests.broker.helpers import Broker
from tests.journal.logs import FOLDER, LOG_ID, Bench
from tfmq.protocol.commands import Produce


def forged_block(offset: int, ordinal: int, log_id: int, forced: int) -> bytes:
    """One record of another producer, and the block trailer that closes it at `offset`."""
    record = make_record(b"forged", make_id(999, 0))
    control = BlockTrailer(1, len(record), crc32(record), 10**13, 7, forced, ordinal, offset)
    return record + encode_trailer(log_id, control)


def forging_batch(offset: int, log_id: int, forced: int) -> Batch:
    """A batch for the offset, whose one payload has such a block in it."""
    block = forged_block(offset + 20 + 1000, 3, log_id, forced)
    payload = os.urandom(1000) + block + os.urandom(200_000)
    data = make_record(payload, make_id(9, 3))
    return Batch(data, ((len(data), 1, crc32(data)),), 9, 3, 1)


def torn(bench: Bench, batch: Batch) -> None:
    """The batch was being written when the power went: only half of it is there."""
    (name,) = bench.names(".zxQueue")
    segment = Segment.open(bench.disk, FOLDER, 0, LOG_ID, writable=True)
    assert segment.path.endswith(name)
    segment.file.pwritev([batch.data[:100_000]], segment.size)
    segment.file.force()
    segment.close()


@pytest.mark.parametrize("forced", [1 << 40, 1 << 62])
def test_a_block_trailer_that_claims_more_than_came_before_it_moves_no_end(forced: int) -> None:
    bench = Bench()
    log = bench.open()
    bench.send(3)
    log.force()
    end = log.end_offset
    torn(bench, forging_batch(end, LOG_ID, forced))
    log = bench.open()
    assert (log.end_offset, log.end_ordinal, log.damage) == (end, 3, [])
    assert bench.read_all() == bench.expected(0, 3)


def test_a_log_refuses_a_batch_with_a_block_trailer_of_its_own() -> None:
    bench = Bench()
    log = bench.open()
    bench.send(3)
    with pytest.raises(BadBatch, match="block trailer"):
        log.append([forging_batch(log.end_offset, LOG_ID, log.end_offset + 1000)])
    assert log.end_ordinal == 3
    bench.send(1)
    other = forging_batch(log.end_offset, make_log_id(78, 3), 0)
    with pytest.raises(BadBatch, match="id"):
        log.append([other._replace(sequence=4)])
    log.append([Batch(make_record(bytes(5000), make_id(9, 4)), (), 9, 4, 1)])


def seam_batch(log_id: int) -> Batch:
    """A sound batch whose first header is the end of a block trailer's."""
    producer = FLAG_TRAILER << 8
    record = HEADER.pack(log_id >> 32, log_id & 0xFFFF_FFFF, make_id(producer, 0), 0)
    return Batch(record, (), producer, 0, 1)


def test_two_batches_of_one_append_make_no_block_trailer_at_their_seam() -> None:
    log = Bench().open()
    log.check(seam_batch(LOG_ID))
    log.check(seam_batch(LOG_ID), b"something else")
    with pytest.raises(BadBatch, match="block trailer"):
        log.check(seam_batch(LOG_ID), b"xx" + TRAILER_BODY.size.to_bytes(4, "big") + b"abcd")


def test_the_seam_is_looked_at_where_batches_meet() -> None:
    broker = Broker()
    broker.create()
    log, producer = broker.log(), broker.lease()
    end = TRAILER_BODY.size.to_bytes(4, "big") + b"abcd"
    broker.engine.broker.catalog.state.next_id = (FLAG_TRAILER << 8) + 1
    first = broker.produce(producer, 0, [b"x" * 50 + end], turn=False)
    batch = seam_batch(log.log_id)
    request = Produce("orders", broker.incarnation(), 0, batch.producer_id, 0, 1, 1, [])
    second = broker.ask(request, bytes(batch.data), turn=False)
    broker.engine.broker.end_turn()
    assert (first.code, second.code) == ("ok", "bad_request")


def test_the_error_is_raised_and_others_of_the_turn_are_written() -> None:
    broker = Broker()
    broker.create()
    log, producer, other = broker.log(), broker.lease(), broker.lease()
    refused = broker.produce(producer, 0, [forged_block(5, 0, log.log_id, 0)], turn=False)
    taken = broker.produce(other, 0, [bytes(3000), b"@" * 3000], turn=False)
    broker.engine.broker.end_turn()
    assert (refused.code, taken.code) == ("bad_request", "ok")
    assert broker.produce(producer, 0, [b"@" * 3000 + bytes(100)]).code == "ok"
