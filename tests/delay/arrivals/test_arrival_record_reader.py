"""Single records by their offsets: the right one or none, proven by its block, each block read once."""

import logging
from typing import Any

import pytest

from journal.errors import BelowStart, BeyondEnd, NotARecord
from journal.filenames import segment_name
from tests.delay.arrival_log_rig import FOLDER, START_MS, Rig, Wanted, some
from tests.scale import scaled, seeded
from tfmq.delay.arrivals import log
from tfmq.delay.arrivals.log import ARRIVALS_SUFFIX, ArrivalRecordReader, VerifiedBlockCache


@pytest.fixture(scope="module")
def rig() -> Rig:
    rig, generator = Rig(), seeded("records")
    while rig.log.end_offset < 2 << 20:
        count = generator.choice((1, 1, 1, 3, 900))
        payloads = [bytes(generator.choice((0, 50, 50, 50, 3000))) for _ in range(count)]
        rig.send(Wanted(generator.randrange(20, 30), [START_MS] * count, payloads))
    rig.send(some(40, 1, size=200_000))
    rig.log.force()
    return rig


def offsets_of(rig: Rig) -> list[int]:
    found = log.read_batches(rig.log, 0, rig.log.end_offset, upto="written")
    return [offset for batch in found for offset in batch.offsets]


def test_each_offset_gives_its_record(rig: Rig) -> None:
    generator, records = seeded("any order"), ArrivalRecordReader(rig.log)
    wanted = list(zip(offsets_of(rig), (each.record for each in rig.sent), strict=True))
    for sample in (wanted, generator.sample(wanted, scaled(2000)), wanted[::-7]):
        offsets = [offset for offset, _ in sample]
        assert records.read(offsets) == [record for _, record in sample]
        assert records.read_cached(offsets) == [record for _, record in sample]


def test_neighbours_cost_one_look_at_their_block(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    plain = rig.log.block_of_record

    def look(offset: int, **given: Any) -> Any:
        looks.append(offset)
        return plain(offset, **given)

    monkeypatch.setattr(rig.log, "block_of_record", look)
    batches = [each for each in log.read_batches(rig.log, 0, rig.log.end_offset) if len(each.sizes) > 100]
    first, other = batches[:2]
    records = ArrivalRecordReader(rig.log)
    records.read([*first.offsets, *other.offsets, *first.offsets])
    assert len(looks) == 2


def test_of_a_proven_block_single_records_are_read_alone(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    generator, records = seeded("single"), ArrivalRecordReader(rig.log)
    wanted = list(zip(offsets_of(rig), (each.record for each in rig.sent), strict=True))
    records.read([offset for offset, _ in wanted])
    looks: list[int] = []
    plain = rig.log.block_of_record

    def look(offset: int, **given: Any) -> Any:
        looks.append(offset)
        return plain(offset, **given)

    monkeypatch.setattr(rig.log, "block_of_record", look)
    for sample in (generator.sample(wanted, 10), wanted, wanted[::-1]):
        offsets, expected = [offset for offset, _ in sample], [record for _, record in sample]
        assert records.read(offsets) == records.read_cached(offsets) == expected
        assert [records.read([offset])[0] for offset in offsets] == expected
    assert not looks


def test_neighbours_of_a_proven_block_cost_one_call(rig: Rig) -> None:
    offsets, records = offsets_of(rig), ArrivalRecordReader(rig.log)
    records.read(offsets)
    records.read(offsets[:1])  # the block in memory is another one now
    (batch, *_) = [each for each in log.read_batches(rig.log, 0, rig.log.end_offset) if len(each.sizes) > 100]
    reads = rig.disk.faults.counts["read"]
    assert len(records.read(batch.offsets[10:20])) == 10
    assert rig.disk.faults.counts["read"] == reads + 1


def test_many_blocks_are_not_proven_while_others_wait(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one call that must not wait does is bounded; what a worker proved then is known to both."""
    proven = VerifiedBlockCache()
    inline, slow = ArrivalRecordReader(rig.log, proven), ArrivalRecordReader(rig.log, proven)
    blocks = {block.offset: offset for offset in offsets_of(rig) if (block := rig.log.block_of_record(offset))}
    offsets = list(blocks.values())
    assert len(offsets) > log.VERIFIED_PER_CALL_MAX
    assert inline.read_cached(offsets) is None
    found = slow.read(offsets)
    monkeypatch.setattr(rig.log, "block_of_record", lambda *_, **__: None)
    assert inline.read_cached(offsets) == found


def test_a_limit_of_bytes_ends_after_the_record_that_passes_it(rig: Rig) -> None:
    records, offsets = ArrivalRecordReader(rig.log), offsets_of(rig)[:50]
    sizes = [len(each.record) for each in rig.sent[:50]]
    for limit in (0, 1, sizes[0], sizes[0] + 1, 5_000, sum(sizes), sum(sizes) + 1):
        enough = next((n + 1 for n in range(50) if sum(sizes[: n + 1]) >= limit), 50)
        for found in (records.read(offsets, limit), records.read_cached(offsets, limit)):
            assert found == [each.record for each in rig.sent[:enough]]


def test_what_would_wait_for_the_disk_is_not_read() -> None:
    rig = Rig()
    rig.send(some(5, 3))
    rig.send(some(6, 2))
    rig.log.force()
    offsets, records = offsets_of(rig), ArrivalRecordReader(rig.log)
    rig.disk.is_cached = False
    assert records.read_cached(offsets[:2]) is None
    records.read(offsets[:1])  # in a worker: the block is known from now on
    assert records.read_cached(offsets[:3]) == [each.record for each in rig.sent[:3]]
    assert records.read_cached(offsets) is None
    records.read(offsets[3:])
    assert records.read_cached(offsets[:3]) is None  # proven, but not in memory any more
    rig.disk.is_cached = True
    assert records.read_cached(offsets) == [each.record for each in rig.sent]


def test_no_changed_byte_is_taken_for_the_record(caplog: pytest.LogCaptureFixture) -> None:
    """Header and body alike: the block's checksum covers both. The damage is named, the other blocks are read."""
    rig, generator = Rig(), seeded("flipped records")
    rig.send(some(5, 40))
    rig.send(some(6, 1))
    offsets = offsets_of(rig)
    rig.log.close()
    data = rig.disk.read_file(f"{FOLDER}/{segment_name(0, ARRIVALS_SUFFIX)}")
    for _ in range(scaled(300)):
        number = generator.randrange(40)
        at = offsets[number] + generator.randrange(70)
        disk = rig.disk.crash()
        disk.damage(
            f"{FOLDER}/{segment_name(0, ARRIVALS_SUFFIX)}", at, bytes((data[at] ^ 1 << generator.randrange(8),))
        )
        records = ArrivalRecordReader(Rig(disk).log)
        assert records.read_cached([offsets[number]]) is None
        caplog.clear()
        with caplog.at_level(logging.ERROR):
            assert records.read([offsets[number], offsets[40]]) == [None, rig.sent[40].record]
        assert "cannot be read" in caplog.text


def test_no_byte_that_changed_since_its_block_was_proven_is_taken_for_the_record(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig, generator = Rig(), seeded("flipped later")
    rig.send(some(5, 40))
    rig.send(some(6, 1))
    rig.log.force()
    offsets, records = offsets_of(rig), ArrivalRecordReader(rig.log)
    path = f"{FOLDER}/{segment_name(0, ARRIVALS_SUFFIX)}"
    data = rig.disk.read_file(path)
    for _ in range(scaled(100)):
        number = generator.randrange(40)
        at = offsets[number] + generator.choice((0, 1, 2, 3, 4, 5, 6, 7, *range(20, 70)))
        records.read(offsets)
        rig.disk.damage(path, at, bytes((data[at] ^ 1 << generator.randrange(8),)))
        records.read(offsets[40:])  # the block in memory is another one now
        assert records.read_cached(offsets) is None
        caplog.clear()
        with caplog.at_level(logging.ERROR):
            assert records.read([offsets[number], offsets[40]]) == [None, rig.sent[40].record]
        assert "cannot be read" in caplog.text
        rig.disk.damage(path, at, data[at : at + 1])


def test_offsets_that_are_not_to_be_read_are_refused() -> None:
    rig = Rig()
    (first,) = rig.send(some(5, 3))
    (second,) = rig.send(some(5, 3))
    rig.log.force()
    (third,) = rig.send(some(5, 3))
    records = ArrivalRecordReader(rig.log)
    with pytest.raises(BeyondEnd):
        records.read([third.positions[0][1]])  # not forced
    with pytest.raises(NotARecord):
        records.read([second.positions[0][1] + 1])
    rig.log.truncate_before(first.end_offset)
    with pytest.raises(BelowStart):
        records.read([first.positions[0][1]])
    assert records.read([second.positions[0][1]]) == [rig.sent[3].record]
