"""Messages out of a fetch's bytes: all of them, once, unless the bytes are wrong, and then it is said where."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from typing import Any
from zlib import crc32

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from journal.record.block_trailer import TRAILER_SIZE, BlockTrailer, encode_trailer
from journal.record.format import FLAG_TOMBSTONE, HEADER, HEADER_SIZE, make_filler, make_id, make_record
from tests.client.blocks import APPEND_MS, INCARNATION, PRODUCER, Bytes, Piece
from tests.scale import scaled, seeded
from tfmq.client.consumer.decoder import LAYOUTS_MAX, DecodedBlock, Decoder, _field_layout
from tfmq.client.consumer.message import ATTRIBUTES, CACHED_BYTES_MAX, CACHED_MAX, ReceivedMessage
from tfmq.errors import Damaged, DecodeFailed, TfmqError


def decoder() -> Decoder:
    return Decoder("orders", 0, INCARNATION)


def blocks(log: Bytes, body: bytes | None = None, **options: int) -> list[DecodedBlock]:
    body = log.body() if body is None else body
    fields = {"start": log.first, "skip_to": log.first, "next_offset": log.first + len(body), **options}
    gaps = bool(fields.pop("gaps", 0))
    return list(decoder().decode(body, fields["start"], fields["skip_to"], fields["next_offset"], gaps=gaps))


def messages(log: Bytes, body: bytes | None = None, **options: int) -> list[ReceivedMessage]:
    return [message for block in blocks(log, body, **options) for message in block.messages]


def until_error(log: Bytes, body: bytes) -> tuple[list[ReceivedMessage], TfmqError | None]:
    """What came before the error, and the error."""
    found: list[ReceivedMessage] = []
    try:
        for block in decoder().decode(body, log.first, log.first, log.first + len(body)):
            found += block.messages
    except TfmqError as error:
        return found, error
    return found, None


def flipped(data: bytes, position: int, mask: int = 1) -> bytes:
    return data[:position] + bytes([data[position] ^ mask]) + data[position + 1 :]


def test_messages_of_one_size_have_every_field() -> None:
    log = Bytes(first_offset=1000)
    log.append(*[b"%04d" % n for n in range(50)], born_ms=1, key="k", tag="t", properties={"a": "b"})
    found = messages(log)
    assert [m.payload for m in found] == [b"%04d" % n for n in range(50)]
    assert [m.ordinal for m in found] == list(range(50))
    assert [m.id for m in found] == [(PRODUCER << 24) + n for n in range(50)]
    assert [m.next_offset for m in found] == [*[m.offset for m in found[1:]], log.end]
    assert found[0].offset == 1000
    first = found[0]
    assert (first.topic, first.partition, first.key, first.tag) == ("orders", 0, "k", "t")
    assert first.properties == {"a": "b"}
    assert (first.origin.append_ms, first.origin.epoch) == (APPEND_MS, 1)


def test_messages_of_mixed_sizes_and_keys_come_in_order() -> None:
    log, random = Bytes(), seeded("mixed")
    payloads = [random.randbytes(random.randrange(150)) for _ in range(200)]
    for begin in range(0, 200, 40):
        log.append_records([log.record(p, key=str(n)) for n, p in enumerate(payloads[begin : begin + 40])])
    found = messages(log)
    assert [m.payload for m in found] == payloads
    assert [m.ordinal for m in found] == list(range(200))
    assert [m.key for m in found] == [str(n) for n in range(40)] * 5
    assert found[-1].next_offset == log.end


def test_a_shared_attribute_is_one_object_and_different_ones_are_not() -> None:
    log = Bytes()
    log.append(b"a", b"b", b"c", b"d", key="same")
    log.append_records([log.record(b"x", key=str(n)) for n in range(4)])
    found = messages(log)
    assert found[0].attribute is found[3].attribute
    assert [m.key for m in found] == ["same"] * 4 + ["0", "1", "2", "3"]


@pytest.mark.parametrize("payloads", [[b"x"] * 40, [b"x" * n for n in range(40)]], ids=["one size", "mixed sizes"])
@pytest.mark.parametrize("trace", ["", "f" * 40, "f" * 2000], ids=["short", "long", "longest"])
@pytest.mark.parametrize("keys", ["a", "abc"], ids=["one key", "alternating keys"])
def test_equal_attributes_are_decoded_once(payloads: list[bytes], trace: str, keys: str) -> None:
    """In one block, in the next one, and in blocks of one record each."""
    log = Bytes()
    attributes: list[dict[str, Any]]
    attributes = [{"key": keys[n % len(keys)], "properties": {"trace": trace} if trace else {}} for n in range(40)]
    for _ in range(2):
        log.append_records([log.record(each, **own) for each, own in zip(payloads, attributes, strict=True)])
    for own in attributes:
        log.append(b"x", **own)
    decoded: dict[str, set[int]] = {}
    for message in messages(log):
        assert message.properties.get("trace", "") == trace
        decoded.setdefault(str(message.key), set()).add(id(message.attribute))
    assert {key: len(objects) for key, objects in decoded.items()} == dict.fromkeys(keys, 1)


def test_a_sender_that_uses_every_key_does_not_fill_the_memory_with_attributes() -> None:
    log = Bytes()
    for size in (0, CACHED_BYTES_MAX):
        log.append_records([log.record(b"x", key="k" * size + str(n)) for n in range(CACHED_MAX + 50)])
    keys = [str(m.key) for m in messages(log)]
    assert len(set(keys)) == 2 * (CACHED_MAX + 50)
    assert len(ATTRIBUTES) <= CACHED_MAX
    assert not any(data and len(data) > CACHED_BYTES_MAX for data in ATTRIBUTES)


def test_a_kept_message_does_not_keep_a_large_attribute_of_a_block_beside_it() -> None:
    log = Bytes()
    for key in ("k" * 60_000, "short"):
        log.append_records([log.record(b"x", key=key)])
    large, small = messages(log)
    assert large.origin is not small.origin


@pytest.mark.parametrize("kind", ["one size", "one attribute", "mixed sizes", "single blocks"])
@pytest.mark.parametrize("key_size", [10, 2000])
def test_a_kept_message_keeps_few_others_in_memory(kind: str, key_size: int) -> None:
    log = Bytes()
    count = 1000
    payloads = [b"x" * (n % 7 if kind == "mixed sizes" else 1) for n in range(count)]
    keys = ["k" * key_size if kind == "one attribute" else "k" * (key_size - 4) + f"{n:04}" for n in range(count)]
    records = [log.record(payload, key=key) for payload, key in zip(payloads, keys, strict=True)]
    for appended in [[each] for each in records] if kind == "single blocks" else [records]:
        log.append_records(appended)
    body = log.body()
    reader = decoder()
    list(reader.decode(body, 0, 0, log.end))  # What is created once is there before the measurement.
    tracemalloc.start()
    try:
        decoded = [each for block in reader.decode(body, 0, 0, log.end) for each in block.messages]
        assert [each.key for each in decoded] == keys
        kept = decoded[:1]
        ATTRIBUTES.clear()
        del decoded
        gc.collect()
        size = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert kept[0].key == keys[0]
    assert size < 32_000


def test_records_without_an_attribute_are_read() -> None:
    log = Bytes()
    log.append(*[b"12345"] * 10)
    log.append(b"1", b"22", b"")
    assert [m.payload for m in messages(log)] == [b"12345"] * 10 + [b"1", b"22", b""]
    assert messages(log)[0].key is None


def test_tombstones_have_no_payload_and_fillers_only_take_ordinals() -> None:
    log = Bytes()
    filler = make_filler(log.log_id, 64, 3)
    log.append_records([log.record(b"a"), filler, log.record(b"", FLAG_TOMBSTONE, key="k")], count=5)
    log.append_records([filler], count=3)
    log.append(b"z")
    found = messages(log)
    assert [(m.payload, m.ordinal) for m in found] == [(b"a", 0), (None, 4), (b"z", 8)]
    assert found[1].key == "k"
    assert found[1].next_offset == log.pieces[1].offset


def test_a_block_trailer_without_records_gives_nothing_and_moves_on() -> None:
    log = Bytes()
    log.append_records([], source_kind=4)
    log.append(b"a")
    found = blocks(log)
    assert [len(block.messages) for block in found] == [0, 1]
    assert found[0].next_offset == TRAILER_SIZE


def test_records_before_the_wanted_offset_are_left_out() -> None:
    log = Bytes()
    log.append(*[b"%02d" % n for n in range(20)])
    every = messages(log)
    assert [m.ordinal for m in messages(log, skip_to=every[7].offset)] == list(range(7, 20))
    assert messages(log, skip_to=log.end - TRAILER_SIZE) == []


def test_a_payload_that_is_a_block_trailer_is_a_payload() -> None:
    log = Bytes()
    forged = encode_trailer(log.log_id, BlockTrailer(1, 20, 0, 0, 0, 0, 0, 0))
    log.append(b"before", forged, b"behind")
    log.append(forged, forged, forged, forged, forged)
    assert [m.payload for m in messages(log)] == [b"before", forged, b"behind", *[forged] * 5]


def test_records_as_long_as_a_block_trailer_are_distinguished() -> None:
    log = Bytes()
    log.append(*[b"x" * 80] * 30)
    log.append(*[b"y" * 80] * 30)
    assert len(messages(log)) == 60


def test_one_record_larger_than_a_block_comes_whole() -> None:
    log = Bytes()
    log.append(b"x" * 300_000)
    log.append(b"a")
    assert [len(m.payload or b"") for m in messages(log)] == [300_000, 1]


def test_every_flipped_bit_is_found_and_named_and_the_rest_is_read() -> None:
    log = Bytes()
    log.append(b"first", b"second")
    bad = log.append(b"third", b"4th")
    log.append(b"fifth")
    body, random = log.body(), seeded("flips")
    positions = range(bad.offset, bad.offset + len(bad.data))
    for position in random.sample(positions, min(len(positions), scaled(len(positions)))):
        found, error = until_error(log, flipped(body, position, 1 << random.randrange(8)))
        assert [m.payload for m in found] == [b"first", b"second"], position
        assert isinstance(error, Damaged | DecodeFailed), position
        if isinstance(error, Damaged):
            assert (error.first, error.next) == (bad.offset, bad.offset + len(bad.data)), position
            assert str(bad.offset) in str(error)


def test_the_bad_record_is_named_by_its_own_checksum() -> None:
    log = Bytes()
    log.append(*[b"%06d" % n for n in range(8)])
    third = messages(log)[2]
    _, error = until_error(log, flipped(log.body(), third.offset + HEADER_SIZE))
    assert f"the record at offset {third.offset} is wrong" in str(error)
    _, error = until_error(log, flipped(log.body(), third.offset + 15))
    assert "every record's own checksum holds" in str(error)


def test_a_displaced_or_foreign_block_does_not_pass() -> None:
    log = Bytes()
    first, second = log.append(b"a"), log.append(b"b")
    for body in (second.data + first.data, first.data + first.data):
        _, error = until_error(log, body)
        assert isinstance(error, Damaged)
    other = Bytes(partition=1)
    other.append(b"a")
    found, error = until_error(log, other.body())
    assert found == []
    assert isinstance(error, Damaged)


def test_bytes_that_end_early_or_late_are_damage_up_to_where_the_answer_claims_to_reach() -> None:
    log = Bytes()
    log.append(b"a", b"b")
    body = log.body()
    for end in range(1, len(body)):
        with pytest.raises(Damaged) as caught:
            blocks(log, body[:end], next_offset=len(body))
        assert (caught.value.first, caught.value.next) == (0, len(body)), end
    with pytest.raises(Damaged):
        blocks(log, body, next_offset=len(body) - 1)
    with pytest.raises(Damaged):
        blocks(log, body, next_offset=len(body) + 1)


def test_left_out_blocks_are_allowed_only_under_a_filter() -> None:
    log = Bytes()
    pieces = [log.append(b"%d" % n) for n in range(4)]
    body = pieces[1].data + pieces[3].data
    found = list(decoder().decode(body, 0, 0, log.end, gaps=True))
    assert [(b.messages[0].payload, b.messages[0].ordinal, b.offset) for b in found] == [
        (b"1", 1, pieces[1].offset),
        (b"3", 3, pieces[3].offset),
    ]
    assert list(decoder().decode(b"", 0, 0, log.end, gaps=True)) == []
    with pytest.raises(Damaged):
        list(decoder().decode(body, 0, 0, log.end))


@pytest.mark.parametrize(
    ("flag", "sentence"),
    [(0x02, "compressed"), (0x1000, "format version 1"), (0x80, "does not know"), (0x0400, "does not know")],
)
def test_what_a_newer_release_wrote_is_refused_clearly(flag: int, sentence: str) -> None:
    log = Bytes()
    log.append(b"fine")
    piece = log.append_records([log.record(b"new", flag)] * 6)
    found, error = until_error(log, log.body())
    assert [m.payload for m in found] == [b"fine"]
    assert isinstance(error, DecodeFailed)
    assert sentence in str(error)
    assert str(piece.offset) in str(error)


def test_a_newer_block_trailer_is_refused_clearly() -> None:
    log = Bytes()
    piece = log.append(b"a")
    control = bytearray(piece.data[-TRAILER_SIZE:])
    control[HEADER_SIZE : HEADER_SIZE + 2] = b"\0\2"
    control[4:8] = crc32(control[HEADER_SIZE:]).to_bytes(4, "big")
    _, error = until_error(log, piece.data[:-TRAILER_SIZE] + bytes(control))
    assert isinstance(error, DecodeFailed)
    assert "newer client" in str(error)


def zero_id(log: Bytes) -> Piece:
    return log.append_records([make_record(b"x", 0)])


def wrong_count(log: Bytes) -> Piece:
    return log.append_records([log.record(b"x"), log.record(b"y")], count=3)


def long_attribute(log: Bytes) -> Piece:
    body = (1000).to_bytes(4, "big") + b"abc"
    return log.append_records([HEADER.pack(len(body), crc32(body), PRODUCER << 24, 1) + body])


def no_room_for_an_attribute(log: Bytes) -> Piece:
    return log.append_records([HEADER.pack(2, crc32(b"ab"), PRODUCER << 24, 1) + b"ab"])


@pytest.mark.parametrize("write", [zero_id, wrong_count, long_attribute, no_room_for_an_attribute])
def test_what_no_broker_should_have_written_is_damage(write: Callable[[Bytes], Piece]) -> None:
    log = Bytes()
    log.append(b"a")
    piece = write(log)
    log.append(b"b")
    found, error = until_error(log, log.body())
    assert [m.payload for m in found] == [b"a"]
    assert isinstance(error, Damaged)
    assert (error.first, error.next) == (piece.offset, piece.offset + len(piece.data))


@given(st.binary(max_size=400), st.integers(0, 400))
def test_any_bytes_give_messages_or_one_of_two_errors(body: bytes, cut: int) -> None:
    log = Bytes()
    log.append(b"a" * 30, b"b")
    log.append(b"c")
    whole = log.body()
    for candidate in (body, whole[:cut] + body, body + whole[cut:]):
        until_error(log, candidate)


@given(st.lists(st.lists(st.binary(max_size=40), max_size=12), max_size=6))
def test_whatever_was_appended_is_read_once_and_in_order(appends: list[list[bytes]]) -> None:
    log = Bytes()
    for payloads in appends:
        log.append(*payloads, born_ms=1)
    assert [m.payload for m in messages(log)] == [payload for payloads in appends for payload in payloads]


@given(
    st.integers(1, 100),
    st.integers(0, 2**24 - 1),
    st.lists(st.integers(0, 99), max_size=3),
    st.lists(st.integers(0, 99), max_size=3),
    st.sampled_from([None, 0, 3, 8, 40]),
)
@example(100, 2**24 - 50, [], [], 3)
def test_records_of_one_size_are_read_as_records_of_mixed_sizes_are(
    count: int, sequence: int, other_ids: list[int], other_keys: list[int], key_size: int | None
) -> None:
    """Whatever differs between records of one size: their ids, their attributes, how many follow full layouts."""
    log = Bytes()
    attributes = [None if key_size is None else b"k" * key_size] * count
    ids = [make_id(PRODUCER, 0) + sequence + number for number in range(count)]
    for number in other_ids:
        ids[number % count] += 1 << 40
    for number in other_keys:
        if key_size:
            attributes[number % count] = b"j" + b"k" * (key_size - 1)
    payloads = [b"%05d" % number for number in range(count)]
    records = [make_record(*each) for each in zip(payloads, ids, [0] * count, attributes, strict=True)]
    log.append_records(records)
    log.append_records([*records, make_record(b"of another size", 1)])
    first, second = blocks(log)
    begin = log.end
    for record in records:
        log.append_records([record])
    alone = messages(log, log.body()[begin:], start=begin, skip_to=begin, next_offset=log.end)

    def fields(message: ReceivedMessage) -> tuple[object, ...]:
        return message.payload, message.id, message.attribute_bytes

    expected = list(zip(payloads, ids, attributes, strict=True))
    assert list(map(fields, first.messages)) == list(map(fields, second.messages[:-1])) == expected
    assert list(map(fields, alone)) == expected
    assert [each.next_offset for each in alone] == [*[each.offset for each in alone[1:]], log.end]
    for block in (first, second):
        begins = [message.offset for message in block.messages]
        assert begins == [block.offset + number * len(records[0]) for number in range(len(begins))]
        assert [message.next_offset for message in block.messages] == [*begins[1:], block.next_offset]
        assert [each.ordinal for each in block.messages] == list(range(block.next_ordinal))[-len(begins) :]


def test_a_sender_that_uses_every_size_does_not_fill_the_memory() -> None:
    log = Bytes()
    for size in range(LAYOUTS_MAX + 50):
        log.append(*[b"x" * size] * 4)
    assert len(messages(log)) == 4 * (LAYOUTS_MAX + 50)
    assert _field_layout.cache_info().currsize <= LAYOUTS_MAX


# The fast way through blocks of one record gives what the slow way gives, wherever a bit is wrong.

FIELDS: dict[str, dict[str, Any]] = {
    "plain": {"born_ms": 5},
    "bare": {},
    "tombstone": {"key": "k"},
    "tag": {"tag": "t"},
}


class SlowDecoder(Decoder):
    """A decoder whose fast way takes nothing."""

    def _decode_single_blocks(self, body: bytes, position: int, place: int, limit: int) -> tuple[DecodedBlock, int]:
        return DecodedBlock([], place, place, 0, 0), position


def decoder_of_single_blocks(fast: bool) -> Decoder:
    return (Decoder if fast else SlowDecoder)("orders", 0, INCARNATION)


def outcome(
    body: bytes, *, fast: bool, start: int = 0, skip_to: int = 0, end: int | None = None, gaps: bool = False
) -> list[Any]:
    """Every field of every message, where reading goes on after them, and the error."""
    found: list[Any] = []
    end_state: tuple[int, ...] = ()
    try:
        end = start + len(body) if end is None else end
        for decoded in decoder_of_single_blocks(fast).decode(body, start, skip_to, end, gaps=gaps):
            for each in decoded.messages:
                place = (each.topic, each.partition, each.offset, each.next_offset, each.ordinal, each.id)
                attribute = (each.key, each.tag, each.properties, each.born_at)
                found.append((each.payload, *place, *attribute, each.appended_at, each.origin.epoch))
            end_state = (decoded.next_offset, decoded.next_ordinal, decoded.epoch)
    except TfmqError as error:
        found.append((type(error), str(error), getattr(error, "first", None), getattr(error, "next", None)))
    return [*found, end_state]


def singles(count: int, **attribute: Any) -> Bytes:
    log = Bytes()
    for number in range(count):
        log.append(b"payload %d" % number, born_ms=1000 + number, **attribute)
    return log


def test_a_run_is_taken_at_once_and_every_field_is_there() -> None:
    body = singles(20, key="k", tag="t", properties={"a": "b"}).body()
    assert len(list(decoder_of_single_blocks(fast=True).decode(body, 0, 0, len(body)))) == 1
    assert outcome(body, fast=True) == outcome(body, fast=False)


def test_messages_of_blocks_that_were_written_together_share_their_origin() -> None:
    log = Bytes()
    for number in range(4):
        record = log.record(b"x", born_ms=1)
        log.append_records([record], append_time=number // 2, epoch=number // 3)
    origins = [
        each.origin
        for block in decoder_of_single_blocks(True).decode(log.body(), 0, 0, log.end)
        for each in block.messages
    ]
    assert origins[0] is origins[1] and len(set(map(id, origins))) == 3
    assert outcome(log.body(), fast=True) == outcome(log.body(), fast=False)


@pytest.mark.parametrize("mask", [0x01, 0x80])
def test_a_flipped_bit_anywhere_is_reported_as_in_the_slow_way(mask: int) -> None:
    body = singles(3).body()
    for position in range(len(body)):
        bad = body[:position] + bytes([body[position] ^ mask]) + body[position + 1 :]
        assert outcome(bad, fast=True) == outcome(bad, fast=False), f"byte {position}"


def test_bytes_that_end_anywhere_are_reported_as_in_the_slow_way() -> None:
    body = singles(3).body()
    for size in range(len(body)):
        cut = body[:size]
        assert outcome(cut, fast=True, end=len(body)) == outcome(cut, fast=False, end=len(body)), f"{size} bytes"
        assert outcome(cut, fast=True) == outcome(cut, fast=False), f"{size} bytes, all that was announced"


def test_a_block_after_the_answers_end_or_from_another_place_is_refused_alike() -> None:
    log = singles(3)
    for place in ({"end": log.end - 1}, {"start": 7, "skip_to": 7}, {"gaps": True, "end": log.end + 5}):
        assert outcome(log.body(), fast=True, **place) == outcome(log.body(), fast=False, **place)  # type: ignore[arg-type]


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(sorted(FIELDS))), max_size=12), st.data())
def test_blocks_of_all_kinds_one_after_the_other(kinds: list[tuple[int, str]], data: st.DataObject) -> None:
    log = Bytes()
    for count, kind in kinds:
        fields = FIELDS[kind]
        flag = 0x10 if kind == "tombstone" else 0
        payload = b"" if kind == "tombstone" else b"payload"
        log.append_records([log.record(payload, flag, **fields) for _ in range(count)])
    places = [0, *(piece.offset for piece in log.pieces)]
    skip_to = data.draw(st.sampled_from(places))
    assert outcome(log.body(), fast=True, skip_to=skip_to) == outcome(log.body(), fast=False, skip_to=skip_to)


def test_a_record_id_of_0_is_refused_as_in_the_slow_way() -> None:
    log = Bytes()
    record = bytearray(log.record(b"x", born_ms=1))
    record[8:16] = bytes(8)
    log.append_records([bytes(record)])
    assert outcome(log.body(), fast=True) == outcome(log.body(), fast=False)
