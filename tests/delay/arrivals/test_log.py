"""What arrived is read as it was sent, wherever chunks and blocks end; damage costs what it hit and is reported."""

from __future__ import annotations

import itertools
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from journal.errors import BeyondEnd, Corrupt
from journal.filenames import segment_name
from journal.record.block import blocks_of
from tests.delay.arrival_log_rig import FOLDER, ORDERS, START_MS, Rig, Sent, Wanted, body_of, messages, some
from tests.delay.steps import steps
from tests.scale import scaled, seeded
from tfmq.delay.arrivals import log
from tfmq.delay.arrivals.log import ARRIVALS_SUFFIX, VerifiedBlockCache, header_before, record_offsets


@pytest.fixture(scope="module")
def rig() -> Rig:
    """Batches of all sizes in several segments, with cancels and copies between them; all forced."""
    rig, generator = Rig(), seeded("arrivals")
    while rig.log.end_offset < 3 << 20:
        batches = []
        for _ in range(generator.choice((1, 1, 3))):
            count = generator.choice((1, 1, 3, 100, 1500))
            size = generator.choice((0, 40, 120))
            ragged = generator.random() < 0.3
            payloads = [bytes(size + (n % 7 if ragged else 0)) for n in range(count)]
            dues = [START_MS + generator.randrange(10**7)] * count
            if generator.random() < 0.5:
                dues = [START_MS + generator.randrange(10**7) for _ in range(count)]
            flags = bytes(generator.randrange(2) for _ in range(count))
            batches.append(Wanted(generator.randrange(20, 30), dues, payloads, ORDERS + count % 3, "orders", flags))
        rig.send(*batches)
        if generator.random() < 0.2:
            rig.cancel((rig.sent[-1].due, rig.sent[-1].number))
        if generator.random() < 0.2:
            rig.reschedule([rig.sent[-1]], [START_MS + 10**8])
    rig.log.force()
    return rig


def test_everything_is_read_once_and_in_order(rig: Rig) -> None:
    assert rig.read() == rig.sent


@pytest.mark.long
@pytest.mark.parametrize("read_bytes", [1, 5_000, 70_000])
def test_wherever_the_reads_of_the_log_end(rig: Rig, monkeypatch: pytest.MonkeyPatch, read_bytes: int) -> None:
    monkeypatch.setattr(log, "READ_BYTES", read_bytes)
    assert rig.read() == rig.sent


def test_from_the_end_of_any_append_to_the_end_of_another(rig: Rig) -> None:
    ends = append_ends(rig)
    generator = seeded("ends")
    for _ in range(scaled(100)):
        start, end = sorted(generator.sample(ends, 2))
        numbers = [each.number for each in rig.read(start, end)]
        first = rig.log.offset_of_ordinal(numbers[0])[0] if numbers else start
        assert start <= first < end
        assert rig.read(start, end) == [
            each for each in rig.sent if numbers and numbers[0] <= each.number <= numbers[-1]
        ]
    parts = [rig.read(start, end) for start, end in itertools.pairwise(ends)]
    assert [each for part in parts for each in part] == rig.sent


def append_ends(rig: Rig) -> list[int]:
    chunk, found = rig.log.read(0, 1 << 30), [0]
    while chunk.data:
        for block in blocks_of(chunk.data, chunk.start, rig.log.log_id):
            if not block.control.more_follows:
                found.append(block.next)
        chunk = rig.log.read(chunk.next, 1 << 30)
    return found


def test_offsets_are_where_the_records_lie(rig: Rig) -> None:
    generator = seeded("offsets")
    for batch in log.read_batches(rig.log, 0, rig.log.end_offset):
        for n in generator.sample(range(len(batch.sizes)), 1):
            assert rig.log.offset_of_ordinal(batch.first_number + n) == (batch.offsets[n], batch.first_number + n)


def test_what_is_not_fsynced_is_read_only_if_asked_for() -> None:
    rig = Rig()
    rig.send(some(5, 3))
    rig.log.force()
    forced = rig.log.end_offset
    rig.send(some(6, 3))
    assert rig.read(0, forced) == rig.sent[:3]
    for start in (0, forced):
        with pytest.raises(BeyondEnd):
            rig.read(start)
    found = log.read_batches(rig.log, 0, rig.log.end_offset, upto="written")
    assert [each for batch in found for each in messages(batch)] == rig.sent


def test_equal_sizes_come_as_one_piece_a_block() -> None:
    rig = Rig()
    rig.send(some(5, 1000, size=100))
    rig.log.force()
    pieces = list(log.read_batches(rig.log, 0, rig.log.end_offset))
    assert len(pieces) == 2 and sum(len(piece.sizes) for piece in pieces) == 1000
    assert {piece.sizes.typecode for piece in pieces} == {"I"} and {piece.offsets.typecode for piece in pieces} == {"Q"}


# Where records lie, without reading


@given(
    st.lists(st.integers(0, 300), min_size=1, max_size=60) | st.tuples(st.integers(0, 300), st.integers(1, 900)).map(
        lambda both: [both[0]] * both[1])
)  # fmt: skip
def test_the_offsets_of_what_was_appended_are_reported_at_once(sizes: list[int]) -> None:
    rig = Rig()
    (answer,) = rig.send(Wanted(5, [START_MS] * len(sizes), [bytes(size) for size in sizes]))
    rig.log.force()
    body = b"".join(each.record for each in rig.sent)
    found = record_offsets(body, answer.positions)
    assert found == record_offsets(memoryview(body), answer.positions)
    read = [offset for batch in log.read_batches(rig.log, 0, rig.log.end_offset) for offset in batch.offsets]
    assert list(found) == read and isinstance(found, array)


def test_no_step_of_python_returns_the_offset_of_a_message() -> None:
    """Where all of a batch have one size: those of one that is due soon are reported when it is accepted."""
    taken = []
    for count in (100, 500):
        body = body_of([bytes(100)] * count, 5, 0)
        taken.append(steps(lambda body=body: record_offsets(body, [(0, 4096)])))  # type: ignore[misc]
    assert taken[0] == taken[1] < 30


# Damage


def damaged(closed: Rig, offset: int, data: bytes) -> Rig:
    """The same folder in another life, with these bytes changed without the log."""
    disk = closed.disk.crash()
    disk.damage(f"{FOLDER}/{segment_name(0, ARRIVALS_SUFFIX)}", offset, data)
    rig = Rig(disk)
    rig.sent = closed.sent
    return rig


def read_around(rig: Rig) -> tuple[list[Sent], list[Corrupt]]:
    reported: list[Corrupt] = []
    found = log.read_batches(rig.log, 0, rig.log.end_offset, on_damage=reported.append)
    return [each for batch in found for each in messages(batch)], reported


def test_no_changed_byte_is_read_as_if_it_were_right() -> None:
    """Whatever byte of the file: what is read is what was sent, what is missing was reported, all else is there."""
    generator, made = seeded("flips"), Rig()
    for producer in range(20, 26):
        made.send(some(producer, 3), some(producer + 10, 40, size=30))
        made.send(some(producer, 1, size=5))
    made.log.close()
    data = made.disk.read_file(f"{FOLDER}/{segment_name(0, ARRIVALS_SUFFIX)}")
    for _ in range(scaled(400)):
        offset = generator.randrange(len(data))
        found, reported = read_around(damaged(made, offset, bytes((data[offset] ^ 1 << generator.randrange(8),))))
        assert reported, f"byte {offset}: nothing was told"
        assert set(found) < set(made.sent) and sorted(found) == found, f"byte {offset}"
        assert len(found) >= len(made.sent) - 43, f"byte {offset}: only {len(found)} are left"


def test_damage_ends_a_reading_that_does_not_ask_for_it() -> None:
    made = Rig()
    made.send(some(5, 2))
    made.log.close()
    with pytest.raises(Corrupt) as caught:
        damaged(made, 40, b"\xee").read()
    assert (caught.value.first, caught.value.next) == (0, made.log.end_offset)


def test_of_a_batch_over_blocks_the_sound_ones_stay_after_a_sound_arrival_header(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A block in the middle costs its own records; the first one costs all, since it has the note."""
    made = Rig()
    (answer,) = made.send(some(5, 2000, size=100))
    made.send(some(6, 1))
    made.log.close()
    starts = [index for index, _ in answer.positions]
    assert len(starts) == 4
    found, reported = read_around(damaged(made, answer.positions[1][1] + 30, b"\xee\xee"))
    assert len(reported) == 1
    assert found == [*made.sent[: starts[1]], made.sent[-1]]
    assert "546 delayed messages have no due time" in caplog.text
    found, reported = read_around(damaged(made, 30, b"\xee\xee"))
    assert len(reported) == 1 and found == made.sent[-1:]


def test_damage_before_the_place_from_which_is_read_does_not_matter() -> None:
    """The way to that place leads through it, since all lie in one run of the index."""
    made = Rig()
    ends = [made.send(some(producer, 3))[0].end_offset for producer in (20, 21, 22, 23)]
    made.log.close()
    for offset in (ends[0] + 3, ends[1] - 90):  # the length of a note, the head of a block trailer
        rig = damaged(made, offset, b"\xee")
        assert rig.read(ends[1], ends[3]) == made.sent[6:]
        found, reported = read_around(damaged(made, offset, b"\xee"))
        assert (found, [(each.first, each.next) for each in reported]) == (
            made.sent[:3] + made.sent[6:],
            [(ends[0], ends[1])],
        )


def test_damage_that_keeps_the_way_shut_ends_the_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    ends = [rig.send(some(producer, 3))[0].end_offset for producer in (20, 21)]
    rig.log.force()
    calls = []

    def read(offset: int, *_: object, **__: object) -> None:
        calls.append(offset)
        assert len(calls) < 9, "it never ends"
        raise Corrupt("a segment", 0, ends[0], "as before")

    monkeypatch.setattr(rig.log, "read", read)
    with pytest.raises(Corrupt):
        list(log.read_batches(rig.log, ends[0], ends[1], on_damage=lambda _: None))
    assert calls == [ends[0]] * 2


# The note of a batch that is sent again


def test_the_arrival_header_of_a_batch_is_found_by_its_first_number(rig: Rig) -> None:
    generator = seeded("notes")
    pieces = list(log.read_batches(rig.log, 0, rig.log.end_offset))
    for piece in generator.sample(pieces, scaled(50)):
        found = header_before(rig.log, piece.first_number)
        if found is None:  # not its batch's first piece
            assert header_before(rig.log, piece.first_number - 1) is None
        else:
            assert (found.log_id, found.topic) == (piece.log_id, piece.topic)
            assert found.dues.times[: len(piece.dues)] == piece.dues


def test_no_other_number_has_an_arrival_header_before_it() -> None:
    rig = Rig()
    rig.send(some(5, 3))
    assert header_before(rig.log, 1) is not None  # also before it is forced
    assert [header_before(rig.log, number) for number in (0, 2, 3, 4, 5, 100)] == [None] * 6


def test_an_arrival_header_that_was_given_up_is_not_found() -> None:
    rig = Rig()
    (first,) = rig.send(some(5, 3))
    (second,) = rig.send(some(5, 3))
    rig.log.force()
    rig.log.truncate_before(first.end_offset)
    assert header_before(rig.log, first.first_ordinal) is None
    assert header_before(rig.log, second.first_ordinal) is not None


# Which blocks are proven: exactly those that were added, from any place inside, and a bounded number of them.


def test_each_byte_of_a_proven_block_and_no_other() -> None:
    generator, found = seeded("proven blocks"), VerifiedBlockCache()
    blocks = [(start, start + generator.randrange(1, 90)) for start in range(100, 100 * scaled(300), 100)]
    generator.shuffle(blocks)
    known: dict[int, int] = {}
    for start, end in blocks:
        assert found.end_of(start) == 0
        found.add(start, end)
        found.add(start, end)
        known[start] = end
        some = generator.randrange(0, 30_000)
        in_block = next((end for start, end in known.items() if start <= some < end), 0)
        assert found.end_of(some) == in_block
    for start, end in blocks:
        assert found.end_of(start) == found.end_of(end - 1) == end
        assert found.end_of(start - 1) == found.end_of(end) == 0


def test_with_too_many_all_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "VERIFIED_BLOCKS_MAX", 3)
    found = VerifiedBlockCache()
    for start in (30, 10, 20):
        found.add(start, start + 5)
    assert [found.end_of(start) for start in (10, 20, 30, 40)] == [15, 25, 35, 0]
    found.add(40, 45)
    assert [found.end_of(start) for start in (10, 20, 30, 40)] == [0, 0, 0, 45]
