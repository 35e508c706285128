"""Control blocks in a stretch of bytes: sound ones are given, spoiled ones refused, forged ones never seen.

Invariants: of a log with one flipped bit, one truncation or random bytes, `blocks_of` gives only blocks that were
written, then raises BadRecord and nothing else; a payload that imitates a block trailer, even a perfect one, is a
payload.
"""

from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from journal.record import block as block_module
from journal.record.block import ProducerRun, blocks_of, producer_runs
from journal.record.block_trailer import TRAILER_SIZE, BlockTrailer, encode_trailer, find_next_trailer, trailers_in
from journal.record.format import SEQUENCE_COUNT, BadRecord, Incomplete, make_filler, make_id, make_record, split_id
from tests.journal.blocks import LOG_ID, PRODUCER, closed, controls_of, flipped, log_bytes, mixed, records
from tests.scale import scaled, seeded

OFFSET = 5000


def groups_of(rng_name: object) -> list[list[bytes]]:
    """Blocks of every kind: one record, equal sizes, mixed sizes, none at all, larger than 64 KiB."""
    rng = seeded("blocks", rng_name)
    return [
        records(1),
        records(100, sequence=1),
        [],
        mixed(70, rng, sequence=101),
        records(40, sequence=171, size=80),
        [*records(50, sequence=211), *mixed(30, rng, sequence=261), *records(50, sequence=291, size=33)],
        [make_record(rng.randbytes(70_000), make_id(PRODUCER, 341))],
        records(2, sequence=342),
    ]


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_blocks_come_out_as_they_went_in(kind: type, verify: bool) -> None:
    groups = groups_of("round")
    data, starts = log_bytes(groups, OFFSET, 7)
    found = list(blocks_of(kind(data), OFFSET, LOG_ID, verify=verify))
    assert [block.offset - OFFSET for block in found] == starts
    assert [bytes(block.data) for block in found] == [b"".join(group) for group in groups]
    assert [block.control.records for block in found] == [len(group) for group in groups]
    assert found[0].control.first_ordinal == 7
    assert [block.next for block in found[:-1]] == [block.offset for block in found[1:]]


@pytest.mark.parametrize("group", [1, 3, 40])
def test_every_flipped_bit_of_a_block_is_seen(group: int) -> None:
    data, starts = log_bytes([records(group, size=4), records(group, size=4, sequence=group)], OFFSET)
    for bit in range(starts[1] * 8):
        with pytest.raises(BadRecord) as caught:
            list(blocks_of(flipped(data, bit), OFFSET, LOG_ID))
        assert caught.value.position == 0


@pytest.mark.parametrize("count", [1, 40])
def test_every_truncation_is_seen(count: int) -> None:
    data, starts = log_bytes([records(count), records(count, sequence=count)])
    for size in range(1, len(data)):
        if size in starts:
            continue
        with pytest.raises(Incomplete) as caught:
            list(blocks_of(data[:size], 0, LOG_ID))
        assert caught.value.position == max(start for start in starts if start < size)


@given(st.binary(max_size=300))
def test_random_bytes_raise_bad_record_only(data: bytes) -> None:
    for verify in (True, False):
        try:
            assert not list(blocks_of(data, 0, LOG_ID, verify=verify)) or not data
        except BadRecord:
            continue
    assert find_next_trailer(data, 0, offset=0, log_id=LOG_ID) is None


def test_spoiled_bytes_give_written_blocks_then_bad_record_only() -> None:
    rng = seeded("spoiled")
    data, starts = log_bytes(groups_of("spoiled"))
    for _ in range(scaled(2000)):
        spoiled = bytearray(data)
        at = rng.randrange(len(data))
        spoiled[at : at + rng.choice([1, 4, 30])] = rng.randbytes(rng.choice([1, 4, 30]))
        given_blocks = []
        try:
            for block in blocks_of(spoiled, 0, LOG_ID):
                given_blocks.append(block.offset)
        except BadRecord:
            assert given_blocks == starts[: len(given_blocks)]
        else:
            assert bytes(spoiled) == data


@pytest.mark.parametrize(
    ("field", "value"), [("offset", 1), ("size", 1), ("records", 3), ("crc", 5), ("first_ordinal", 9)]
)
def test_a_block_trailer_that_disagrees_with_its_block_is_refused(field: str, value: int) -> None:
    first, second = records(2), b"".join(records(2, sequence=2))
    control = BlockTrailer(2, len(second), crc32(second), 1000, 1, 0, 2, OFFSET + len(b"".join(first)) + TRAILER_SIZE)
    bad = control._replace(**{field: value})
    data = closed(first, OFFSET, 0) + second + encode_trailer(LOG_ID, bad)
    if field == "records":
        # How many ordinals a block has, only a count of its records can show; the next block's first ordinal does too.
        data += closed(records(1, sequence=4), OFFSET + len(data), 4)
    with pytest.raises(BadRecord):
        list(blocks_of(data, OFFSET, LOG_ID))


def test_a_block_that_was_moved_or_is_of_another_log_is_refused() -> None:
    data, starts = log_bytes([records(3), records(3, sequence=3)], OFFSET)
    with pytest.raises(BadRecord):
        list(blocks_of(data[starts[1] :], OFFSET, LOG_ID))
    with pytest.raises(BadRecord):
        list(blocks_of(data, OFFSET, LOG_ID + 1))


def forgery(start: int, before: bytes, log_id: int = LOG_ID) -> bytes:
    """A payload whose end is a block trailer that fits the bytes of its block before it perfectly.

    The record's header and the payload's first bytes are covered too: its sender knows them beforehand.
    """
    filling = b"payload "
    size = len(before) + 20 + len(filling)
    header = make_record(filling + bytes(TRAILER_SIZE), make_id(PRODUCER, 1))[:20]
    covered = before + header + filling
    forged = BlockTrailer(2, size, crc32(covered), 1000, 1, 0, 0, start)
    return filling + encode_trailer(log_id, forged)


@pytest.mark.parametrize("count", [1, 60])
def test_a_forged_block_trailer_inside_a_payload_is_a_payload(count: int) -> None:
    before = records(count)
    payload = forgery(OFFSET, b"".join(before))
    forged = make_record(payload, make_id(PRODUCER, count))
    data = closed([*before, forged], OFFSET, 0) + closed(records(3, sequence=90), OFFSET, count + 1)
    rest, _ = log_bytes([[*before, forged], records(3, sequence=90)], OFFSET)
    found = list(blocks_of(rest, OFFSET, LOG_ID))
    assert [block.control.records for block in found] == [count + 1, 3]
    assert data[: len(rest) - 10] != rest  # the second copy says another offset, and is not what was read


def test_a_payload_full_of_forgeries_hides_nothing() -> None:
    forged = b"".join(
        encode_trailer(LOG_ID, BlockTrailer(1, n, 0, 0, 0, 0, 0, OFFSET + 20 + n * TRAILER_SIZE - n)) for n in range(50)
    )
    data, _ = log_bytes([[make_record(forged, make_id(PRODUCER, 0))], records(2, sequence=1)], OFFSET)
    assert [len(block.data) for block in blocks_of(data, OFFSET, LOG_ID)] == [20 + len(forged), 60]
    # Damage before them: every forgery claims bytes inside the block that the true block trailer claims.
    spoiled = flipped(data, 3)
    claim = find_next_trailer(spoiled, 0, offset=OFFSET, log_id=LOG_ID)
    assert claim is not None
    assert claim.position == 20 + len(forged)


def test_lengths_that_are_never_true_stop_the_walk() -> None:
    data = bytearray(closed(records(2), 0, 0))
    data[30:34] = b"\xff\xff\xff\xff"
    with pytest.raises(BadRecord, match="length"):
        list(blocks_of(data, 0, LOG_ID))


def test_more_bytes_than_any_block_has_are_no_unfinished_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_module, "BLOCK_SPAN_MAX", 1000)
    with pytest.raises(Incomplete):
        list(blocks_of(b"".join(records(30)), 0, LOG_ID))
    with pytest.raises(BadRecord) as caught:
        list(blocks_of(b"".join(records(40)), 0, LOG_ID))
    assert not isinstance(caught.value, Incomplete)


def test_after_damage_the_next_block_trailer_is_found_from_everywhere() -> None:
    data, starts = log_bytes([records(3), records(1, sequence=3), mixed(9, seeded("next"), sequence=4)], OFFSET)
    ends = controls_of(data, starts)
    for number, start in enumerate(starts):
        claim = find_next_trailer(data, start, offset=OFFSET, log_id=LOG_ID)
        assert claim is not None
        assert claim.position == ends[number]
        assert claim.trailer.offset == OFFSET + start
    assert find_next_trailer(data, ends[-1] + 1, offset=OFFSET, log_id=LOG_ID) is None
    assert [claim.position for claim in trailers_in(data, 0, offset=OFFSET, log_id=LOG_ID)] == ends


def test_a_spoiled_or_displaced_block_trailer_is_passed_over() -> None:
    data, starts = log_bytes([records(3), records(1, sequence=3), records(2, sequence=4)], OFFSET)
    ends = controls_of(data, starts)
    for bit in range(ends[0] * 8, starts[1] * 8):
        claim = find_next_trailer(flipped(data, bit), 0, offset=OFFSET, log_id=LOG_ID)
        assert claim is not None
        assert claim.position == ends[1]
    displaced = b"x" * 7 + data
    assert find_next_trailer(displaced, 0, offset=OFFSET, log_id=LOG_ID) is None


def test_runs_are_what_a_loop_over_the_ids_finds() -> None:
    rng = seeded("runs")
    for _ in range(scaled(300)):
        group: list[bytes] = []
        for _ in range(rng.randrange(1, 5)):
            first = rng.choice([0, 5, SEQUENCE_COUNT - 50])
            count = rng.randrange(1, 50)
            producer = rng.choice([7, 8])
            make = rng.choice([records, lambda n, **k: mixed(n, rng, **k)])
            group += make(count, sequence=first, producer=producer)
            if rng.random() < 0.3:
                group.append(make_filler(LOG_ID, 40, 3))
        (block,) = blocks_of(closed(group, OFFSET, 0), OFFSET, LOG_ID)
        assert producer_runs(block) == slow_runs(group)


def slow_runs(group: list[bytes]) -> list[ProducerRun]:
    found: list[ProducerRun] = []
    offset, fresh = OFFSET, True
    for record in group:
        producer, sequence = split_id(int.from_bytes(record[8:16], "big"))
        last = found[-1] if found else None
        if record[19] & 0x20:
            fresh = True
        elif (
            not fresh
            and last is not None
            and (last.producer_id, last.first_sequence + last.count) == (producer, sequence)
        ):
            found[-1] = last._replace(count=last.count + 1)
        else:
            found.append(ProducerRun(producer, sequence, 1, offset))
            fresh = False
        offset += len(record)
    return found


def test_a_block_without_records_has_no_runs() -> None:
    (block,) = blocks_of(closed([], 0, 0), 0, LOG_ID)
    assert producer_runs(block) == []
