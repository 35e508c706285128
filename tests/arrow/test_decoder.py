"""Columns out of control blocks: what the client's decoder gives as messages, or the same error."""

import pytest

from journal.record.format import FLAG_TOMBSTONE, FLAG_TRAILER, HEADER, make_id, make_record
from tests.arrow.rows import decoded, decoder, expected
from tests.client.blocks import PRODUCER, Bytes
from tfmq.arrow import SCHEMA, project
from tfmq.arrow import Decoder as ArrowDecoder
from tfmq.arrow.decoder import VERIFY
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
            [
                log.record(b"x" * n),
                log.record(b"", FLAG_TOMBSTONE, key=b"%d" % n),
                log.record(b"y", born_ms=n),
            ]
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
    with pytest.raises(
        DecodeFailed, match=rf"orders-0 at offset {place}: .* Without the columns key and tag"
    ):
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
def test_a_last_control_record_that_is_too_short_is_damage(before: bytes, length: int) -> None:
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
