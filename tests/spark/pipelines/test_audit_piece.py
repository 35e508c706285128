"""Any bit that is flipped anywhere in a segment is found, and nothing else."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from journal import LogOptions
from journal.disk import RealDisk
from journal.log.checkpoint import LogCheckpointFile
from journal.log.readonly import open_log
from journal.record.batch import Source
from journal.record.block_trailer import TRAILER_SIZE
from journal.record.format import make_log_id
from tests.spark.pipelines import broken
from tests.spark.pipelines.audited import (
    INCARNATION,
    audit_here,
    batch,
    compared,
    reported,
    segments,
    write_journal,
    write_log,
)
from tfmq.spark.pipelines.audit_check import check_piece
from tfmq.spark.pipelines.audit_plan import BLOCK, CUT, ORDER, UNREADABLE, make_plan

TRANSACTION = 1


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two producers, records of one size and of many, plain appends and those of transactions."""
    data = tmp_path_factory.mktemp("piece") / "data"
    appends = []
    for n in range(14):
        batches = [batch(50, 40 * n, [80] * 40), batch(51, 30 * n, [(7 * i + n) % 90 for i in range(30)])]
        appends.append((batches, Source(TRANSACTION, 9, 1000 + n, 70) if n % 3 == 0 else None))
    write_log(data, 0, appends)
    return data


def test_a_sound_log_has_no_findings(data: Path) -> None:
    result = audit_here(data)
    folder = data / "orders-0"
    assert reported(result) == [] and result.messages == 14 * 70 and result.tail_bytes == 0
    assert result.bytes == sum(path.stat().st_size for path in segments(folder)) and result.segments > 2


@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_is_found_wherever_it_is_and_nothing_else(data: Path, place: float, bit: int) -> None:
    paths = segments(data / "orders-0")
    at = int(place * sum(path.stat().st_size for path in paths))
    path = next(path for path in reversed(paths) if int(path.stem) <= at)
    sound = path.read_bytes()
    spoiled = bytearray(sound)
    spoiled[at - int(path.stem)] ^= 1 << bit
    path.write_bytes(spoiled)
    try:
        result = audit_here(data)
    finally:
        path.write_bytes(sound)
    (finding,) = result.findings
    assert (finding.kind, finding.topic, finding.segment) == (BLOCK, "orders", path.name)
    assert finding.first <= at < finding.next and finding.advice


def test_the_record_that_is_damaged_is_named(tmp_path: Path) -> None:
    folder = write_log(tmp_path / "data", 0, [([batch(50, 0, [80] * 40)], None)])
    (path,) = segments(folder)
    data = bytearray(path.read_bytes())
    data[100 * 7 + 50] ^= 4
    path.write_bytes(data)
    (finding,) = audit_here(tmp_path / "data").findings
    assert "message 7 of producer 50 at offset 700 fails its own" in finding.text
    assert (finding.first, finding.next) == (0, 4000 + TRAILER_SIZE)


def test_the_tail_after_the_durable_offset_is_no_damage(tmp_path: Path) -> None:
    folder = write_log(tmp_path / "data", 0, [([batch(50, 0, [80] * 40)], None)])
    (path,) = segments(folder)
    sound = path.read_bytes()
    path.write_bytes(sound + sound[:777])
    result = audit_here(tmp_path / "data")
    assert (reported(result), result.tail_bytes, result.messages) == ([], 777, 40)


def test_a_file_that_cannot_be_read_is_reported(tmp_path: Path) -> None:
    folder = write_log(tmp_path / "data", 0, [([batch(50, 0, [80] * 40)], None)])
    (path,) = segments(folder)
    path.unlink()
    path.mkdir()
    findings = {each.kind: each for each in audit_here(tmp_path / "data").findings}
    assert findings[UNREADABLE].segment == path.name and "directory" in findings[UNREADABLE].text


def test_places_of_transactions_that_go_back_are_reported(tmp_path: Path) -> None:
    places = [(1000, 40), (1010, 40), (1005, 40)]
    appends = [([batch(50, 40 * n, [80] * 40)], Source(TRANSACTION, 9, *place)) for n, place in enumerate(places)]
    write_log(tmp_path / "data", 0, appends)
    (finding,) = audit_here(tmp_path / "data").findings
    assert finding.kind == ORDER and finding.first == 2 * (4000 + TRAILER_SIZE)


# Appends of several blocks: each block names the source position that is reached with the whole append.

COMMITTED = [batch(50, 0, [500] * 40), batch(50, 40, [500] * 150), batch(51, 0, [500] * 150), batch(51, 150, [500] * 9)]


@pytest.fixture
def applied(tmp_path: Path) -> Path:
    """Four transactions in three appends: the second append has two transactions in four blocks, in its own segment."""
    data = tmp_path / "data"
    data.mkdir()
    first, _, third, fourth = write_journal(data, 0, COMMITTED)
    appends = [([COMMITTED[0]], first), (COMMITTED[1:3], third), ([COMMITTED[3]], fourth)]
    folder = write_log(data, 0, appends)
    assert [len(broken.blocks_of(path)) for path in segments(folder)] == [1, 4, 1]
    assert reported(audit_here(data)) == []
    return data


@pytest.mark.parametrize("piece_bytes", [8192, 1 << 20])
def test_an_unfinished_append_is_not_applied_yet(applied: Path, piece_bytes: int) -> None:
    """A broker writes it at this moment, or was killed while it did."""
    folder = applied / "orders-0"
    _, path, last = segments(folder)
    last.unlink()
    checkpoint_file = LogCheckpointFile(RealDisk(), str(folder), make_log_id(INCARNATION, 0))
    checkpoint = checkpoint_file.read()
    assert checkpoint is not None
    checkpoint_file.write_durably(checkpoint._replace(durable=int(path.stem), clean=False))
    sound = path.read_bytes()
    ends = [block.next - int(path.stem) for block in broken.blocks_of(path)]
    assert ends[-1] == len(sound)
    for size in sorted({0, 1, *(end + more for end in ends for more in (-1, 0, 1) if end + more <= len(sound))}):
        path.write_bytes(sound[:size])
        result = audit_here(applied, piece_bytes)
        assert reported(result) == [], size
        assert result.messages + result.pending == sum(each.count for each in COMMITTED)


@pytest.mark.parametrize("number", range(4))
def test_damage_in_an_append_of_several_transactions_is_reported_once(applied: Path, number: int) -> None:
    path = segments(applied / "orders-0")[1]
    block = broken.blocks_of(path)[number]
    broken.flip_bit(path, block.offset - int(path.stem) + 100)
    assert reported(audit_here(applied)) == [(BLOCK, 0, block.offset, block.next)]


@pytest.mark.parametrize("number", range(3))
def test_an_append_of_several_transactions_that_was_cut_is_reported_once(applied: Path, number: int) -> None:
    path = segments(applied / "orders-0")[1]
    block, end = broken.blocks_of(path)[number], int(path.stem) + path.stat().st_size
    broken.cut(path, block.next - int(path.stem))
    assert reported(audit_here(applied)) == [(CUT, 0, block.next, end)]


@pytest.mark.parametrize("checked", range(5))
def test_retention_between_the_pieces_of_a_segment_tears_no_transaction(applied: Path, checked: int) -> None:
    folder = applied / "orders-0"
    disk = RealDisk()
    made = make_plan(disk, [str(applied)], 8192)
    assert [piece.base for piece in made.pieces] == [0, 20_900, 20_900, 20_900, 177_300]
    found = [check_piece(disk, made.logs[piece.log], piece, 0) for piece in made.pieces[:checked]]
    with open_log(str(folder), LogOptions(), log_id=make_log_id(INCARNATION, 0)) as log:
        log.truncate_before(177_300)
    found += [check_piece(disk, made.logs[piece.log], piece, 0) for piece in made.pieces[checked:]]
    assert [each.file_missing for each in found] == [checked <= n < 4 for n in range(5)]
    assert reported(compared(applied, [], made, found)) == []
