"""Columns out of control blocks: what the client's decoder gives as messages, or the same error."""

from __future__ import annotations

import random
from typing import Any
from zlib import crc32

import numpy as np
import pytest

from journal.record import block_trailer
from journal.record.batch import BLOCK_SIZE_MAX
from journal.record.block_trailer import TRAILER_SIZE, decode_trailer, encode_trailer
from journal.record.format import FLAG_TOMBSTONE, FLAG_TRAILER, HEADER, header_positions, make_id, make_record
from tests.arrow.rows import decoded, decoder, expected
from tests.client.blocks import PRODUCER, Bytes
from tfmq.arrow import SCHEMA, project
from tfmq.arrow import Decoder as ArrowDecoder
from tfmq.arrow.decoder import (
    RUN_COUNT_MIN,
    TRAILER,
    VERIFY,
    BlockTrailers,
    BrokenChain,
    DamageLocator,
    record_positions,
)
from tfmq.errors import BadRequest, Damaged, DecodeFailed


def test_records_of_one_size_have_every_column() -> None:
    log = Bytes(partition=3, first_offset=1000)
    for begin in range(0, 400, 100):
        log.append(*[b"%04d" % n for n in range(begin, begin + 100)], born_ms=1, key="k", tag="t")
    batch = decoded(log)
    assert batch.schema == SCHEMA
    assert batch.to_pylist() == expected(log)
    assert [row["value"] for row in batch.to_pylist()] == [b"%04d" % n for n in range(400)]


def test_mixed_sizes_tombstones_and_records_without_attribute() -> None:
    log = Bytes()
    for n in range(50):
        log.append_records(
            [log.record(b"x" * n), log.record(b"", FLAG_TOMBSTONE, key=b"%d" % n), log.record(b"y", born_ms=n)]
        )
    assert decoded(log).to_pylist() == expected(log)


def test_only_the_rows_of_the_range() -> None:
    log = Bytes(first_offset=77)
    log.append(b"a", b"b", b"c")
    log.append(b"d", b"e")
    rows = expected(log)
    offsets = [row["offset"] for row in rows]
    batch = decoder(log).decode(log.body(), log.first, offsets[1], offsets[4])
    assert batch.to_pylist() == rows[1:4]
    assert decoder(log).decode(log.body(), log.first, offsets[1] + 1, offsets[1] + 2).num_rows == 0


def test_a_projection_has_its_columns_in_its_order() -> None:
    log = Bytes()
    log.append(b"a", key="k", tag="t")
    assert decoded(log, schema=project(["tag", "value"])).to_pylist() == [{"tag": "t", "value": b"a"}]


def test_no_bytes_are_no_rows() -> None:
    assert decoder(Bytes()).decode(b"", 0).num_rows == 0


def test_damage_names_the_block_and_the_record() -> None:
    log = Bytes(partition=2)
    log.append(b"first")
    piece = log.append(b"second", b"third")
    log.append(b"fourth")
    body = bytearray(log.body())
    body[piece.offset + 20] ^= 1
    with pytest.raises(Damaged, match=rf"orders-2 at offset {piece.offset} .* the record at offset") as found:
        decoder(log).decode(body, 0)
    assert (found.value.first, found.value.next) == (piece.offset, piece.offset + len(piece.data))


def test_verify_is_one_of_three() -> None:
    with pytest.raises(BadRequest, match="chunk, message, none"):
        decoder(Bytes(), verify="all")


def test_an_attribute_that_is_none_is_named_and_can_be_read_as_bytes() -> None:
    log = Bytes(first_offset=40)
    log.append(b"a", key="k")
    log.append_records([log.record(b"x"), log.record(b"\0\0\0\x01\xc1y", 0x1)])
    place = log.pieces[1].offset + 21
    with pytest.raises(DecodeFailed, match=rf"orders-0 at offset {place}: .* Without the columns key and tag"):
        decoded(log)
    found = decoded(log, schema=project(["value", "attributes"])).to_pylist()
    assert found[2] == {"value": b"y", "attributes": b"\xc1"}


def test_who_must_have_every_message_gets_those_with_an_unreadable_attribute_without_key_and_tag() -> None:
    log = Bytes()
    broken = make_record(b"x", make_id(PRODUCER, 1), 0, b"\xc1")
    log.append_records([log.record(b"a", key="k", tag="t"), broken, log.record(b"b", key=b"k2")])
    found = ArrowDecoder("orders", 0, log.log_id, lenient=True).decode(log.body(), log.first)
    assert found.column("key").to_pylist() == [b"k", None, b"k2"]
    assert found.column("tag").to_pylist() == ["t", None, None]
    assert found.column("attributes").to_pylist()[1] == b"\xc1"


@pytest.mark.parametrize("before", [b"", b"r" * 120])
@pytest.mark.parametrize("length", [0, 10, 71])
def test_a_last_block_trailer_that_is_too_short_is_damage(before: bytes, length: int) -> None:
    log = Bytes()
    data = make_record(before, make_id(PRODUCER, 1)) if before else b""
    data += HEADER.pack(length, 0, log.log_id, FLAG_TRAILER) + bytes(length)
    for verify in VERIFY:
        with pytest.raises(Damaged):
            decoder(log, verify=verify).decode(data, 0)


def test_what_is_not_in_the_range_may_have_unreadable_attributes() -> None:
    log = Bytes()
    log.append(b"a", key="k")
    log.append_records([log.record(b"\0\0\0\x01\xc1y", 0x1)])
    batch = decoder(log).decode(log.body(), 0, 0, log.pieces[1].offset)
    assert batch.column("key").to_pylist() == [b"k"]


def test_every_kind_of_buffer_is_decoded() -> None:
    log = Bytes()
    log.append(b"a", b"b", key="k", tag="t")
    body = log.body()
    for data in (body, bytearray(body), memoryview(body), memoryview(b"x" + body)[1:]):
        assert decoder(log).decode(data, 0).to_pylist() == expected(log)


# Positions of records by columns and by walking are those that the journal walks to.


def log_of(*sizes: list[int]) -> bytes:
    log = Bytes()
    for block in sizes:
        log.append(*[b"x" * size for size in block])
    return log.body()


def test_rows_of_one_size_and_mixed_blocks_in_any_order() -> None:
    rng = random.Random(3)
    equal = [[n] * count for n, count in ((0, 40), (5, RUN_COUNT_MIN), (5, RUN_COUNT_MIN - 1), (80, 500), (80, 500))]
    mixed = [[rng.randrange(60) for _ in range(rng.randrange(1, 400))] for _ in range(10)]
    nearly = [[7] * 100 + [8], [8] + [7] * 100, [7] * 100 + [8] + [7] * 100]
    blocks = equal + mixed + nearly
    rng.shuffle(blocks)
    body = log_of(*blocks)
    assert record_positions(body).tolist() == header_positions(body)
    assert record_positions(memoryview(body)).tolist() == header_positions(body)


def test_records_of_the_size_of_a_block_trailer_are_distinguished_from_it() -> None:
    body = log_of([80] * 50, [80] * 50, [80])
    assert record_positions(body).tolist() == header_positions(body)


def test_blocks_as_large_as_they_get() -> None:
    body = log_of([180] * (BLOCK_SIZE_MAX // 200), [0] * (BLOCK_SIZE_MAX // 20), [300_000], [180] * 20)
    assert record_positions(body).tolist() == header_positions(body)


@pytest.mark.parametrize("size", [1, 19, 20, 24, 501, 515])
def test_bytes_that_end_inside_a_record_have_no_chain(size: int) -> None:
    with pytest.raises(BrokenChain):
        record_positions((make_record(b"x" * 5, 1 << 24) * 100)[:size])


def test_nothing_has_no_records() -> None:
    assert record_positions(b"").tolist() == []


# Control records as columns: each of their fields is read, and each that can be wrong is looked at.

FIRST = 500


def log() -> Bytes:
    made = Bytes(first_offset=FIRST)
    made.append(b"a", b"b")
    made.append(b"c")
    return made


def controls(body: bytes) -> BlockTrailers:
    return BlockTrailers(body, np.array([42, 42 + TRAILER_SIZE + 21]))


def changed(name: str, value: Any, log_id: int | None = None) -> bool:
    """Whether all hold after the second block trailer says something else."""
    made = log()
    at = 42 + TRAILER_SIZE + 21
    control = decode_trailer(made.body(), at, made.log_id)
    body = made.body()[:at] + encode_trailer(log_id or made.log_id, control._replace(**{name: value}))
    return controls(body).match(FIRST, made.log_id, [2, 1])


def test_the_fields_are_those_of_the_format() -> None:
    assert TRAILER.itemsize == block_trailer.TRAILER.size == TRAILER_SIZE
    values = tuple(range(1, 19))
    row = np.frombuffer(block_trailer.TRAILER.pack(*values), TRAILER)[0]
    assert tuple(int(each) for each in row) == values


def test_right_ones_hold_and_cover_their_blocks() -> None:
    made = log()
    found = controls(made.body())
    assert found.match(FIRST, made.log_id, [2, 1]) and found.checksums_match()
    assert found.column("append_time").tolist() == [1_700_000_000_000] * 2
    assert found.starts.tolist() == [0, 142]


@pytest.mark.parametrize(("name", "value"), [("records", 2), ("size", 20), ("offset", 500), ("first_ordinal", 3)])
def test_what_contradicts_the_bytes_does_not_hold(name: str, value: int) -> None:
    assert not changed(name, value)


def test_what_says_nothing_of_the_bytes_holds() -> None:
    assert changed("epoch", 7) and changed("durable_offset", 9) and changed("more_follows", True)


def test_another_logs_does_not_hold() -> None:
    made = log()
    assert changed("epoch", 1, made.log_id) and not changed("epoch", 1, made.log_id + 1)


@pytest.mark.parametrize("field", ["version", "bits", "length"])
def test_another_version_unknown_bits_and_another_length_do_not_hold(field: str) -> None:
    made = log()
    body = bytearray(made.body())
    rows = np.frombuffer(body, TRAILER, 1, 42)
    changed_row = rows.copy()
    changed_row[field] = 2
    raw = bytearray(changed_row.tobytes())

    raw[4:8] = crc32(raw[20:]).to_bytes(4, "big")
    body[42 : 42 + TRAILER_SIZE] = raw
    assert not controls(bytes(body)).match(FIRST, made.log_id, [2, 1])


def test_a_wrong_checksum_does_not_hold() -> None:
    made = log()
    body = bytearray(made.body())
    body[-1] ^= 1
    assert not controls(bytes(body)).match(FIRST, made.log_id, [2, 1])


def test_other_bytes_are_not_covered() -> None:
    made = log()
    body = bytearray(made.body())
    body[20] ^= 1
    assert not controls(bytes(body)).checksums_match()


def test_ordinals_of_blocks_must_be_those_that_are_there() -> None:
    made = log()
    assert not controls(made.body()).match(FIRST, made.log_id, [2, 2])


# What is wrong with a block is named: the block's range, the record, and what to do where a release is too old.


def find(log: Bytes, body: bytes | bytearray | None = None, verify: str = "chunk") -> Damaged | DecodeFailed | None:
    inspector = DamageLocator("orders", log.log_id & 0xFFFFFF, log.log_id, verify)
    return inspector.find_error(bytes(log.body() if body is None else body), log.first)


def raised(log: Bytes, verify: str = "chunk") -> Any:
    """The decoder's error, which is the inspector's."""
    with pytest.raises((Damaged, DecodeFailed)) as found:
        decoder(log, verify=verify).decode(log.body(), log.first)
    assert str(found.value) == str(find(log, verify=verify))
    return found.value


def test_nothing_is_wrong_with_what_is_right() -> None:
    log = Bytes()
    log.append(b"a", b"b", key="k")
    assert find(log) is find(log, verify="message") is find(log, verify="none") is None


def test_a_flipped_payload_names_the_record() -> None:
    log = Bytes(partition=4, first_offset=1000)
    log.append(b"first")
    log.append(b"second", b"third")
    body = bytearray(log.body())
    place = log.pieces[1].offset + 26
    body[place - 1000 + 20] ^= 1
    error = find(log, body)
    assert isinstance(error, Damaged)
    assert (error.first, error.next) == (log.pieces[1].offset, log.end)
    assert f"orders-4 at offset {log.pieces[1].offset} is damaged up to offset {log.end}" in str(error)
    assert f"the record at offset {place} is wrong" in str(error)


def test_a_flipped_header_says_that_it_is_one() -> None:
    log = Bytes()
    log.append(b"first", b"second")
    body = bytearray(log.body())
    body[15] ^= 1
    assert "every record's own checksum holds, so a header is wrong" in str(find(log, body))


def test_a_wrong_length_leads_to_the_next_block() -> None:
    log = Bytes()
    log.append(b"first", b"second")
    log.append(b"third")
    body = bytearray(log.body())
    body[3] ^= 0x40
    error = find(log, body)
    assert isinstance(error, Damaged) and (error.first, error.next) == (0, log.pieces[1].offset)
    assert "no records can be told apart" in str(error)


def test_many_bad_records_are_not_all_named() -> None:
    log = Bytes()
    log.append(*[b"payload"] * 9)
    body = bytearray(log.body())
    for record in range(9):
        body[record * 27 + 20] ^= 1
    assert "the record at offset 0, 27, 54, 81, 108 and more is wrong" in str(find(log, body))


@pytest.mark.parametrize(
    ("flag", "words"),
    [(0x2, "a compressed batch"), (0x1000, "format version 1"), (0x80, "bits that this release does not know")],
)
def test_what_a_later_release_writes_is_named_with_its_place(flag: int, words: str) -> None:
    log = Bytes(first_offset=50)
    log.append(b"fine")
    log.append_records([log.record(b"fine"), log.record(b"new", flag)])
    error = raised(log)
    assert isinstance(error, DecodeFailed) and words in str(error) and "use a newer client" in str(error)
    assert f"orders-0 at offset {log.pieces[1].offset + 24}" in str(error)


def test_a_block_trailer_with_other_bits_is_no_record() -> None:
    log = Bytes()
    log.append_records([log.record(b"x", 0x40 | 0x1)])
    assert "a block trailer stands inside a block" in str(raised(log))


def test_a_tombstone_with_a_payload_is_refused() -> None:
    log = Bytes()
    log.append_records([log.record(b"x", 0x10)])
    assert "a tombstone has a payload" in str(raised(log))


def test_an_attribute_longer_than_its_record_is_named() -> None:
    log = Bytes()
    log.append_records([log.record(b"x"), log.record(b"\0\0\0\x09abc", 0x1)])
    assert "the record at offset 21: the attribute ends at 13 of a body of 7 bytes" in str(raised(log))
    short = Bytes()
    short.append_records([short.record(b"abc", 0x1)])
    assert "ends inside the size of the attribute" in str(raised(short))


def test_a_record_with_the_id_0_is_damage() -> None:
    log = Bytes()
    log.append_records([log.record(b"x"), bytes(20)])
    assert "the record at offset 21 has the id 0" in str(raised(log))


def test_records_that_are_not_counted_are_damage() -> None:
    log = Bytes()
    log.append_records([log.record(b"x"), log.record(b"y")], 3)
    assert "2 records where 3 are announced" in str(raised(log))


def test_a_wrong_checksum_of_a_record_is_found_only_by_messages() -> None:
    log = Bytes()
    record = bytearray(log.record(b"xyz"))
    record[4] ^= 1
    log.append_records([log.record(b"fine"), bytes(record)])
    assert find(log) is None
    assert decoder(log).decode(log.body(), 0).num_rows == 2
    error = raised(log, "message")
    assert "the record at offset 24 fails its own checksum" in str(error)
    assert (error.first, error.next) == (0, log.end)


def test_blocks_of_another_place_and_another_log_are_damage() -> None:
    log = Bytes(first_offset=100)
    log.append(b"x")
    with pytest.raises(Damaged, match="is of offset 100, but is at 200"):
        decoder(log).decode(log.body(), 200)
    with pytest.raises(Damaged, match="the block trailer is of log"):
        decoder(Bytes(partition=1)).decode(log.body(), 100)


def test_ordinals_that_do_not_go_on_are_damage() -> None:
    log = Bytes()
    log.append(b"x")
    log.ordinal += 1
    log.append(b"y")
    error = raised(log)
    assert (error.first, error.next) == (log.pieces[1].offset, log.end)
    assert "first ordinal is 2, 1 was expected" in str(error)


def test_a_block_trailer_of_a_later_version_is_no_damage() -> None:
    log = Bytes()
    log.append(b"x")
    body = bytearray(log.body())
    at = len(body) - TRAILER_SIZE
    body[at + 21] = 2
    body[at + 4 : at + 8] = crc32(body[at + 20 :]).to_bytes(4, "big")
    with pytest.raises(DecodeFailed, match="block trailer version 2, 1 is known; use a newer client"):
        decoder(log).decode(body, 0)
