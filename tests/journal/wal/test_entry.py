"""Entries of the transaction journal: what is written is read, and nothing else passes for an entry."""

from __future__ import annotations

import tracemalloc
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from journal.errors import TooLarge
from journal.record.format import BadRecord, Incomplete
from journal.wal import entry as entry_module
from journal.wal.entry import (
    ENTRY_SIZE_MAX,
    HEADER,
    HEADER_SIZE,
    MESSAGES,
    OPERATION_NAMES,
    AppendMsg,
    Content,
    JournalEntry,
    LostEntries,
    Operation,
    checksum_seed,
    claimed_size,
    decode_entry,
    encode_entries,
    encode_filler,
    entries_of,
    possible_entries,
)
from tests.journal.journals import entry_size
from tests.scale import scaled, seeded

SEED = checksum_seed(5, 123456789)
PLACE = 5_000_000_000
FORCED = PLACE - 300

U64 = st.integers(0, 2**64 - 1)
U32 = st.integers(0, 2**32 - 1)
MESSAGE = st.builds(
    AppendMsg, U64, U64, U64, U32, U32, st.lists(st.tuples(U32, U32, U32), max_size=3).map(tuple),
    st.binary(max_size=60), U64,
)  # fmt: skip
OPERATION = st.builds(Operation, st.integers(0, 2**16 - 1), U64, st.binary(max_size=60))

PIECE = AppendMsg(12, 9 << 24 | 3, 70, 5, 2, ((10, 1, 77), (11, 1, 78)), b"first.....second.....", 4096)
DECISION = Operation(entry_module.LOCAL_COMMIT, 12, b"payload")


def encoded(*contents: Content, place: int = PLACE, forced: int = FORCED) -> bytes:
    return b"".join(encode_entries(contents, place, forced, SEED)[0])


def plain(content: AppendMsg | Operation | LostEntries) -> object:
    return content._replace(data=bytes(content.data)) if isinstance(content, AppendMsg) else content


def sealed(data: bytearray, seed: int = SEED) -> bytes:
    """The same bytes with the checksum that they should have."""
    data[4:8] = crc32(bytes(data[8:]), crc32(bytes(data[:4]), seed)).to_bytes(4, "big")
    return bytes(data)


def changed(at: int, value: bytes, content: Content = PIECE) -> bytes:
    """An entry with other bytes at a position, and the right checksum for them."""
    data = bytearray(encoded(content))
    data[at : at + len(value)] = value
    return sealed(data)


@given(st.lists(st.one_of(MESSAGE, OPERATION), max_size=5), st.integers(0, 2**63))
def test_what_is_written_is_read_and_sizes_are_known_before(contents: list[Content], place: int) -> None:
    buffers, places, end = encode_entries(contents, place, place, SEED)
    data = b"".join(buffers)
    assert end - place == len(data) == sum(map(entry_size, contents))
    found = list(entries_of(data, place, SEED))
    assert [plain(entry.content) for entry in found] == contents
    assert [entry.lsn for entry in found] == places
    assert [entry.next for entry in found] == [*places[1:], end][: len(places)]
    assert {entry.durable_lsn for entry in found} <= {place}


def test_records_are_not_copied() -> None:
    data = bytearray(b"x" * 1000)
    buffers, _, _ = encode_entries([PIECE._replace(data=data)], PLACE, 0, SEED)
    assert any(buffer is data for buffer in buffers)


def test_every_flipped_bit_of_an_entry_is_found() -> None:
    for content in (PIECE, DECISION):
        data = encoded(content)
        for bit in range(len(data) * 8):
            bad = bytearray(data)
            bad[bit // 8] ^= 1 << bit % 8
            with pytest.raises(BadRecord):
                decode_entry(bad, PLACE, SEED)


def test_an_entry_cut_at_any_byte_is_incomplete() -> None:
    data = encoded(PIECE)
    for size in range(len(data)):
        with pytest.raises(Incomplete) as error:
            decode_entry(data[:size], PLACE, SEED)
        assert error.value.position == 0
    whole = encoded(DECISION, PIECE)
    found: list[JournalEntry] = []
    with pytest.raises(Incomplete) as error:
        for entry in entries_of(whole[:-1], PLACE, SEED):
            found.append(entry)
    assert [plain(entry.content) for entry in found] == [DECISION]
    assert error.value.position == len(whole) - len(data)


def test_item_38_zeros_are_no_entry() -> None:
    with pytest.raises(BadRecord):
        decode_entry(bytes(4096), 0, SEED)
    assert list(possible_entries(bytes(1 << 20), 0)) == []


def test_hazard_05_no_length_is_believed_before_it_is_compared_with_what_is_there() -> None:
    """An unchecked length sized an allocation, a negative one ended the start."""
    large = bytes(2 * HEADER_SIZE)
    tracemalloc.start()
    for size in (0, 1, HEADER_SIZE - 1, ENTRY_SIZE_MAX, ENTRY_SIZE_MAX + 1, 2**31, 2**32 - 1):
        header = HEADER.pack(size, 0, 1 << 24, PLACE, FORCED)
        with pytest.raises(BadRecord):
            decode_entry(header + large, PLACE, SEED)
        assert claimed_size(header) in (0, size)
        assert claimed_size(header) <= ENTRY_SIZE_MAX
    blocks_at = HEADER_SIZE + 32
    for blocks in (4, 1000, 2**31, 2**32 - 1):
        with pytest.raises(BadRecord, match="blocks do not fit"):
            decode_entry(changed(blocks_at, blocks.to_bytes(4, "big")), PLACE, SEED)
    assert tracemalloc.get_traced_memory()[1] < 100_000
    tracemalloc.stop()


def test_an_entry_too_short_for_its_kind_is_refused_by_its_size_even_with_the_right_checksum() -> None:
    for kind, least in ((1, MESSAGES.size), (2, 12)):
        for size in range(least):
            data = bytearray(HEADER.pack(HEADER_SIZE + size, 0, kind << 24, PLACE, FORCED) + bytes(size))
            with pytest.raises(BadRecord, match="too short"):
                decode_entry(sealed(data), PLACE, SEED)


def test_an_entry_of_another_journal_or_another_place_is_refused() -> None:
    data = encoded(PIECE)
    with pytest.raises(BadRecord, match="checksum"):
        decode_entry(data, PLACE, checksum_seed(6, 123456789))
    with pytest.raises(BadRecord, match="checksum"):
        decode_entry(data, PLACE, checksum_seed(5, 123456788))
    with pytest.raises(BadRecord, match=f"LSN is {PLACE}"):
        decode_entry(data, PLACE + 1, SEED)


@pytest.mark.parametrize("at", [8, 9, 10, 11], ids=["kind", "flags", "zero", "zero"])
def test_what_a_later_version_may_set_is_refused(at: int) -> None:
    with pytest.raises(BadRecord, match="kind and flags"):
        decode_entry(changed(at, b"\x7f"), PLACE, SEED)


def test_an_operation_of_a_later_version_is_refused_and_one_with_a_new_number_kept() -> None:
    with pytest.raises(BadRecord, match="later version"):
        decode_entry(changed(HEADER_SIZE + 2, b"\0\1", DECISION), PLACE, SEED)
    found = decode_entry(encoded(Operation(999, 1, b"?")), PLACE, SEED).content
    assert found == Operation(999, 1, b"?")


def test_more_fsynced_than_written_is_refused() -> None:
    with pytest.raises(BadRecord, match="durable LSN is above"):
        decode_entry(changed(20, (PLACE + 1).to_bytes(8, "big")), PLACE, SEED)


def test_an_entry_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry_module, "ENTRY_SIZE_MAX", entry_size(PIECE))
    assert encoded(PIECE)
    with pytest.raises(TooLarge):
        encoded(PIECE._replace(data=bytes(PIECE.data) + b"?"))


def test_a_filler_stands_for_so_many_bytes() -> None:
    for size in (HEADER_SIZE, HEADER_SIZE + 1, 5000):
        data = encode_filler(size, PLACE, 0, SEED)
        found = decode_entry(data, PLACE, SEED)
        assert len(data) == found.size == size
        assert found.content == LostEntries(size)


def test_entries_are_found_again_after_damage_at_any_byte() -> None:
    contents: list[Content] = [PIECE, DECISION, PIECE._replace(data=b"x" * 3000), DECISION]
    buffers, places, _ = encode_entries(contents, PLACE, FORCED, SEED)
    data = b"".join(buffers)
    for at in range(0, len(data), 7):
        found = [PLACE + at + position for position in possible_entries(data[at:], PLACE + at)]
        assert found == [place for place in places if place >= PLACE + at]


def test_entries_are_found_on_both_sides_of_four_gibibytes() -> None:
    place = (1 << 32) - 200
    buffers, places, _ = encode_entries([PIECE] * 5, place, 0, SEED)
    data = b"".join(buffers)
    assert [place + position for position in possible_entries(data, place)] == places


def test_a_message_that_imitates_an_entry_does_not_pass_for_one() -> None:
    """Its sender may guess the place, not the seed of the checksums."""
    inner = PLACE + HEADER_SIZE + MESSAGES.size + 12
    forged = b"".join(encode_entries([DECISION], inner, inner, checksum_seed(5, 0))[0])
    data = encoded(PIECE._replace(data=forged, blocks=((len(forged), 1, 0),)))
    assert list(possible_entries(data, PLACE)) == [0, inner - PLACE]
    with pytest.raises(BadRecord, match="checksum"):
        decode_entry(data[inner - PLACE :], inner, SEED)


def test_any_bytes_are_entries_or_the_one_error() -> None:
    generator = seeded("entries")
    for _ in range(scaled(20_000)):
        data = bytearray(encoded(PIECE, DECISION, PIECE))
        for _ in range(generator.randint(1, 4)):
            at = generator.randrange(len(data))
            data[at : at + generator.choice((0, 1, 4))] = generator.randbytes(generator.choice((1, 4)))
        try:
            for entry in entries_of(data, PLACE, SEED):
                assert entry.size >= HEADER_SIZE
        except BadRecord as error:
            assert 0 <= error.position <= len(data)
        assert all(0 <= position <= len(data) - HEADER_SIZE for position in possible_entries(data, PLACE))


def test_every_operation_has_a_name() -> None:
    numbers = [
        value
        for name, value in vars(entry_module).items()
        if name.isupper() and isinstance(value, int) and "_".join(name.split("_")).replace("_", " ").lower()
        in OPERATION_NAMES.values()
    ]  # fmt: skip
    assert sorted(numbers) == sorted(OPERATION_NAMES) == list(range(1, 13))
