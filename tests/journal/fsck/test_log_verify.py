"""What the offline check finds, and what it leaves alone: it changes nothing."""

import itertools

import pytest

from journal.dual_slot_file import SLOT_SIZE
from journal.filenames import index_name, log_checkpoint_name, log_snapshot_name, segment_name
from journal.fsck.findings import DAMAGE, NOTE, Finding, VerifyReport
from journal.fsck.log_verify import verify
from journal.log.checkpoint import LogCheckpoint, LogCheckpointFile, Snapshot, encode_snapshot
from journal.log.segment import Segment
from journal.record.block import blocks_of
from journal.record.format import FLAG_TRAILER, HEADER, make_filler
from journal.testing.memory_disk import SimulatedDisk
from tests.journal.blocks import LOG_ID, closed, flipped, log_bytes, records
from tests.scale import scaled, seeded

DATA, FOLDER = "/data", "/data/orders-3"


@pytest.fixture
def disk() -> SimulatedDisk:
    """Two sealed segments with index, mark and snapshot; 1800 records in all."""
    made = SimulatedDisk()
    made.make_folder(DATA)
    made.make_folder(FOLDER)
    end = write_segment(made, [records(600, sequence=600 * n, size=100) for n in range(2)], 0, 0)
    last = write_segment(made, [records(600, sequence=1200, size=100)], end, 1200)
    LogCheckpointFile(made, FOLDER, LOG_ID).write_durably(LogCheckpoint(0, 0, last, 1800, 1001, 1))
    made.write_file(
        f"{FOLDER}/{log_snapshot_name(end)}", encode_snapshot(LOG_ID, Snapshot(end, 1200, 1001, {}, b"state"))
    )
    return made


def write_segment(disk: SimulatedDisk, groups: list[list[bytes]], base: int, ordinal: int) -> int:
    data, starts = log_bytes(groups, base, ordinal, time=1000 + ordinal)
    segment = Segment.create(disk, FOLDER, base, LOG_ID)
    for start, end in itertools.pairwise([*starts, len(data)]):
        segment.append([data[start:end]], [b.control for b in blocks_of(data[start:end], base + start, LOG_ID)])
    segment.seal()
    segment.close()
    return base + len(data)


def segment_path(disk: SimulatedDisk, number: int) -> str:
    return f"{FOLDER}/{[name for name in disk.list(FOLDER) if name.endswith('.zxQueue')][number]}"


def spoil(disk: SimulatedDisk, path: str, position: int, data: bytes = b"\xaa") -> None:
    old = disk.read_file(path)
    disk.write_file(path, old[:position] + data + old[position + len(data) :])


def only(report: VerifyReport) -> Finding:
    (finding,) = report.findings
    return finding


@pytest.mark.parametrize("path", [DATA, FOLDER, DATA + "/"])
@pytest.mark.parametrize("with_records", [True, False])
def test_a_sound_log_has_no_findings(disk: SimulatedDisk, path: str, with_records: bool) -> None:
    before = {name: disk.read_file(f"{FOLDER}/{name}") for name in disk.list(FOLDER)}
    report = verify(disk, path, records=with_records)
    assert report.findings == []
    assert (report.segments, report.blocks, report.records, report.damaged) == (2, 3, 1800, False)
    assert {name: disk.read_file(f"{FOLDER}/{name}") for name in disk.list(FOLDER)} == before
    assert not disk.open_files


def test_a_lone_file_can_be_checked(disk: SimulatedDisk) -> None:
    report = verify(disk, segment_path(disk, 1))
    assert (report.findings, report.records) == ([], 600)


def test_progress_is_reported(disk: SimulatedDisk) -> None:
    reported: list[tuple[str, int, int]] = []
    verify(disk, DATA, progress=lambda *call: reported.append(call))
    assert [call[1] == call[2] for call in reported] == [False, True, True]


def test_nothing_to_check_is_an_error(disk: SimulatedDisk) -> None:
    disk.make_folder("/empty")
    for path in ("/empty", "/missing", f"{FOLDER}/{log_checkpoint_name()}"):
        with pytest.raises(FileNotFoundError):
            verify(disk, path)


def test_a_damaged_block_is_named_with_its_offsets(disk: SimulatedDisk) -> None:
    path = segment_path(disk, 0)
    spoil(disk, path, 72_100 + 50)
    finding = only(verify(disk, DATA))
    assert (finding.file, finding.first, finding.next, finding.weight) == (path, 72_100, 144_200, DAMAGE)
    assert "checksum" in finding.what


def test_one_damaged_byte_anywhere_in_a_segment_is_found(disk: SimulatedDisk) -> None:
    rng = seeded("verify")
    path = segment_path(disk, 0)
    data = disk.read_file(path)
    for _ in range(scaled(100)):
        disk.write_file(path, flipped(data, rng.randrange(len(data) * 8)))
        assert verify(disk, DATA).damaged


def test_a_bad_tail_of_the_last_segment_is_a_note_unless_it_was_fsynced(disk: SimulatedDisk) -> None:
    path = segment_path(disk, 1)
    disk.write_file(path, disk.read_file(path) + records(1)[0])
    finding = only(verify(disk, DATA))
    assert (finding.weight, finding.next - finding.first, finding.may_lose) == (NOTE, 30, True)
    disk.write_file(path, disk.read_file(path)[:1000])
    report = verify(disk, DATA)
    assert report.damaged
    assert {finding.field for finding in report.findings if finding.weight == DAMAGE} == {"control record", "forced"}


@pytest.mark.parametrize("path", [DATA, FOLDER, "segment"])
@pytest.mark.parametrize("known_by", ["mark", "snapshot", "nothing"])
@pytest.mark.parametrize("how", ["bit", "zeros", "all zeros", "unfinished"])
def test_a_bad_tail_is_damage_as_far_as_a_start_knows_it_to_be_durable(
    disk: SimulatedDisk, path: str, known_by: str, how: str
) -> None:
    segment = segment_path(disk, 1)
    data = disk.read_file(segment)
    base = int(segment.removeprefix(f"{FOLDER}/").split(".")[0])
    end = base + len(data)
    if known_by != "mark":
        LogCheckpointFile(disk, FOLDER, LOG_ID).write_durably(LogCheckpoint(0, 0, 0, 0, 1001, 1))
    if known_by == "snapshot":
        state = encode_snapshot(LOG_ID, Snapshot(end, 1800, 1001, {}, b"state"))
        disk.write_file(f"{FOLDER}/{log_snapshot_name(end)}", state)
    if how == "bit":
        spoil(disk, segment, len(data) - 10, bytes([data[-10] ^ 1]))
    elif how == "zeros":
        spoil(disk, segment, len(data) - 200, bytes(200))
    elif how == "all zeros":
        disk.write_file(segment, bytes(len(data)))
    else:
        disk.write_file(segment, closed(records(600), base, 1200, time=9000, more_follows=True)[: len(data)])
    report = verify(disk, segment if path == "segment" else path)
    (finding,) = (each for each in report.findings if each.file == segment)
    assert (finding.first, report.damaged) == (base, known_by != "nothing")
    assert finding.may_lose == ("a start truncates" in finding.what) == (known_by == "nothing")


def test_the_end_of_a_lone_file_that_is_not_the_last_is_damage(disk: SimulatedDisk) -> None:
    path = segment_path(disk, 0)
    spoil(disk, path, len(disk.read_file(path)) - 90, bytes(90))
    assert verify(disk, path).damaged


@pytest.mark.parametrize("how", ["deleted", "emptied"])
def test_a_log_that_was_not_closed_is_noted_where_its_newest_file_is_gone(disk: SimulatedDisk, how: str) -> None:
    path = segment_path(disk, 1)
    base = int(path.removeprefix(f"{FOLDER}/").split(".")[0])
    if how == "deleted":
        disk.unlink(path)
    else:
        disk.write_file(path, b"")
    marks = LogCheckpoint(0, 0, base, 1200, 1001, 1)
    LogCheckpointFile(disk, FOLDER, LOG_ID).write_durably(marks)
    finding = only(verify(disk, DATA))
    assert (finding.weight, finding.may_lose, finding.first) == (NOTE, True, base)
    assert "may be missing" in finding.what
    LogCheckpointFile(disk, FOLDER, LOG_ID).write_durably(marks._replace(clean=True))
    assert verify(disk, DATA).findings == []


def test_an_append_that_does_not_end_is_a_note(disk: SimulatedDisk) -> None:
    base = verify(disk, DATA).bytes
    path = segment_path(disk, 1)
    disk.write_file(path, disk.read_file(path) + closed(records(1), base, 1800, time=9000, more_follows=True))
    finding = only(verify(disk, DATA))
    assert (finding.field, finding.weight, finding.first) == ("more follows", NOTE, base)


def test_records_that_fail_themselves_are_found_on_request(disk: SimulatedDisk) -> None:
    bad = [
        HEADER.pack(10, 1, (7 << 24) + 1, 0) + bytes(10),
        HEADER.pack(0, 0, 5, 0),
        HEADER.pack(0, 0, 7 << 24, 0x800),
        HEADER.pack(4, 0xFC1F4F6F, 7 << 24, 1) + b"\x00\x00\x00\x09",
        make_filler(LOG_ID + 1, 20, 1),
    ]
    base = verify(disk, DATA).bytes
    path = segment_path(disk, 1)
    whole = disk.read_file(path)
    for record, field in zip(bad, ["checksum", "id", "flag", "checksum", "flag"], strict=True):
        disk.write_file(path, whole + closed([record], base, 1800, time=9000))
        assert verify(disk, DATA).findings == []
        finding = only(verify(disk, DATA, records=True))
        assert (finding.field, finding.first, finding.next) == (field, base, base + len(record))
    assert FLAG_TRAILER


def test_a_count_of_records_that_is_wrong_is_found_on_request(disk: SimulatedDisk) -> None:
    base = verify(disk, DATA).bytes
    path = segment_path(disk, 1)
    disk.write_file(path, disk.read_file(path) + closed([records(1)[0] + records(2)[1]], base, 1800, time=9000))
    assert only(verify(disk, DATA, records=True)).field == "records"


def test_segments_that_do_not_follow_each_other_are_found(disk: SimulatedDisk) -> None:
    disk.rename(segment_path(disk, 1), f"{FOLDER}/{segment_name(200_000)}")
    fields = [finding.field for finding in verify(disk, DATA).findings if finding.weight == DAMAGE]
    assert fields == ["name", "block"]  # its blocks are those of other offsets


def test_a_segment_of_another_log_is_found(disk: SimulatedDisk) -> None:
    path = segment_path(disk, 1)
    base = verify(disk, segment_path(disk, 0)).bytes
    disk.write_file(path, closed(records(600, sequence=1200, size=100), base, 1200, time=9000, log_id=LOG_ID + 1))
    assert "id" in [finding.field for finding in verify(disk, DATA).findings]


def test_a_wrong_index_is_a_note(disk: SimulatedDisk) -> None:
    path = f"{FOLDER}/{index_name(0)}"
    spoil(disk, path, 60)
    finding = only(verify(disk, DATA))
    assert (finding.file, finding.weight, finding.field) == (path, NOTE, "entry")
    disk.unlink(path)
    assert verify(disk, DATA).findings == []


def test_a_wrong_snapshot_is_a_note(disk: SimulatedDisk) -> None:
    path = f"{FOLDER}/{log_snapshot_name(verify(disk, segment_path(disk, 0)).bytes)}"
    spoil(disk, path, 20)
    finding = only(verify(disk, DATA))
    assert (finding.file, finding.weight, finding.field) == (path, NOTE, "snapshot")


def test_a_mark_that_cannot_be_read_is_damage(disk: SimulatedDisk) -> None:
    path = f"{FOLDER}/{log_checkpoint_name()}"
    disk.write_file(path, bytes([0x55]) * disk.size(path))
    finding = only(verify(disk, DATA))
    assert (finding.file, finding.weight, finding.field) == (path, DAMAGE, "mark")


@pytest.mark.parametrize("slot", [0, 1])
def test_a_slot_of_the_mark_that_is_not_whole_is_a_note(disk: SimulatedDisk, slot: int) -> None:
    path = f"{FOLDER}/{log_checkpoint_name()}"
    spoil(disk, path, slot * SLOT_SIZE + 30)
    finding = only(verify(disk, DATA))
    assert (finding.file, finding.weight, finding.field) == (path, NOTE, "slot")
    assert (finding.first, finding.next) == (slot * SLOT_SIZE, (slot + 1) * SLOT_SIZE)


def test_a_mark_without_a_segment_is_damage_unless_nothing_was_in_it(disk: SimulatedDisk) -> None:
    for name in disk.list(FOLDER):
        disk.unlink(f"{FOLDER}/{name}")
    mark = LogCheckpointFile(disk, FOLDER, LOG_ID)
    mark.write_durably(LogCheckpoint(0, 0, 0, 0, 1001, 1))
    finding = only(verify(disk, DATA))
    assert (finding.weight, finding.field) == (DAMAGE, "first") and "no segment file" in finding.what
    mark.write_durably(LogCheckpoint(0, 0, 0, 0, 1001, 1, clean=True))
    assert verify(disk, DATA).findings == []
    disk.unlink(f"{FOLDER}/{log_checkpoint_name()}")
    disk.write_file(f"{FOLDER}/{index_name(0)}", b"")
    finding = only(verify(disk, DATA))
    assert (finding.weight, finding.field) == (DAMAGE, "first")


def test_a_stopped_log_and_a_strange_name_are_notes(disk: SimulatedDisk) -> None:
    LogCheckpointFile(disk, FOLDER, LOG_ID).write_durably(
        LogCheckpoint(0, 0, 0, 0, 1001, 1, stopped="the disk said EIO")
    )
    disk.write_file(f"{FOLDER}/notes.txt", b"")
    found = {finding.field: finding for finding in verify(disk, DATA).findings}
    assert set(found) == {"stopped", "name"}
    assert "EIO" in found["stopped"].what
    assert {finding.weight for finding in found.values()} == {NOTE}


def test_missing_bytes_before_the_first_segment_are_found(disk: SimulatedDisk) -> None:
    disk.unlink(segment_path(disk, 0))
    assert "first" in [finding.field for finding in verify(disk, DATA).findings]
