"""What is wrong with a block is named: the block's range, the record, and what to do where a release is too old."""

from typing import Any
from zlib import crc32

import pytest

from journal.record.block_trailer import TRAILER_SIZE
from tests.arrow.rows import decoder
from tests.client.blocks import Bytes
from tfmq.arrow.decoder import DamageLocator
from tfmq.errors import Damaged, DecodeFailed


def find(
    log: Bytes, body: bytes | bytearray | None = None, verify: str = "chunk"
) -> Damaged | DecodeFailed | None:
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
    [
        (0x2, "a compressed batch"),
        (0x1000, "format version 1"),
        (0x80, "bits that this release does not know"),
    ],
)
def test_what_a_later_release_writes_is_named_with_its_place(flag: int, words: str) -> None:
    log = Bytes(first_offset=50)
    log.append(b"fine")
    log.append_records([log.record(b"fine"), log.record(b"new", flag)])
    error = raised(log)
    assert isinstance(error, DecodeFailed) and words in str(error) and "use a newer client" in str(error)
    assert f"orders-0 at offset {log.pieces[1].offset + 24}" in str(error)


def test_a_control_record_with_other_bits_is_no_record() -> None:
    log = Bytes()
    log.append_records([log.record(b"x", 0x40 | 0x1)])
    assert "a control record stands inside a block" in str(raised(log))


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


def test_a_control_record_of_a_later_version_is_no_damage() -> None:
    log = Bytes()
    log.append(b"x")
    body = bytearray(log.body())
    at = len(body) - TRAILER_SIZE
    body[at + 21] = 2
    body[at + 4 : at + 8] = crc32(body[at + 20 :]).to_bytes(4, "big")
    with pytest.raises(DecodeFailed, match="block trailer version 2, 1 is known; use a newer client"):
        decoder(log).decode(body, 0)
