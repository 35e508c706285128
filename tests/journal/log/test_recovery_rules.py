"""The two tables of recovery, each row by its label: what must be on the disk for it, and what follows."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from journal.errors import Corrupt, NewerFormat
from journal.filenames import index_name, log_checkpoint_name, log_snapshot_name, segment_name
from journal.log.checkpoint import LogCheckpointFile, WrongLog
from journal.log.log import Log
from journal.log.recovery_rules import (
    FILES_GONE,
    FOLDER_RULES,
    TAIL_RULES,
    FolderFacts,
    SegmentFileFacts,
    TailAction,
    TailFacts,
    decide,
)
from journal.record.block_trailer import TRAILER_BODY, TRAILER_SIZE, decode_trailer
from journal.record.format import HEADER, make_log_id
from journal.testing import Moment
from tests.journal.logs import FOLDER as PATH
from tests.journal.logs import LOG_ID, Bench, make_disk
from tests.scale import seeded

ONE = 20 + 50 + TRAILER_SIZE
"""Bytes of an append of one record of 50 bytes."""


def tail(place: int, append: int, end: int, forced: int = 0, later: int | None = None, zeros: bool = False) -> str:
    return decide(TAIL_RULES, TailFacts(place, append, end, forced, later, zeros)).label


def test_every_tail_has_a_row_and_fsynced_data_is_never_cut() -> None:
    places = [
        (place, append, end, forced, later, zeros)
        for end in range(4)
        for place in range(end + 1)
        for append in range(place + 1)
        for forced in range(6)
        for later in (None, *range(place + 1, end + 1))
        for zeros in (False, True)
    ]
    for found in (TailFacts(*place) for place in places):
        row = decide(TAIL_RULES, found)
        if row.decision in (TailAction.CUT, TailAction.CUT_ZEROS):
            assert found.durable <= found.append_end, f"{row.label} cuts what is forced: {found}"
        if row.decision is TailAction.KEEP:
            assert found.position == found.end
        if row.decision is TailAction.SKIP:
            assert found.next_block is not None


def test_the_rows_of_the_tail_table() -> None:
    assert tail(9, 9, 9) == "whole"
    assert tail(5, 5, 9, forced=7, later=8) == "rot before forced data"
    assert tail(5, 3, 9, forced=4, later=8) == "rot before forced data"
    assert tail(5, 5, 9, forced=7) == "forced data lost"
    assert tail(5, 5, 9, zeros=True) == "zeros at the tail"
    assert tail(9, 5, 9) == "unfinished append"
    assert tail(5, 5, 9) == "torn tail"
    assert tail(5, 5, 9, forced=5, later=8) == "torn tail"
    assert {row.label for row in TAIL_RULES} == {
        "whole", "rot before forced data", "forced data lost", "zeros at the tail", "unfinished append", "torn tail",
    }  # fmt: skip


def folder(
    *files: tuple[int, int],
    mark: str = "good",
    clean: bool = False,
    first: int = 0,
    forced: int = 0,
    traces: bool = False,
) -> str:
    found = FolderFacts(mark, clean, first, forced, first, tuple(SegmentFileFacts(*file) for file in files), traces)
    return decide(FOLDER_RULES, found).label


def test_the_rows_of_the_folder_table() -> None:
    assert folder(mark="none") == "empty folder"
    assert folder(clean=True, traces=True) == "nothing missing"
    assert folder() == folder(forced=100) == folder(clean=True, forced=100) == "all segments missing"
    assert folder(mark="damaged") == folder(mark="none", traces=True) == "all segments missing"
    assert folder((0, 0), mark="none") == "unfinished creation"
    assert folder((0, 0), mark="none", traces=True) == "mark missing"
    assert folder((0, 10), mark="damaged") == "mark damaged"
    assert folder((0, 10), mark="none") == "mark missing"
    assert folder((10, 10)) == "missing segment"
    assert folder((0, 10), (20, 10)) == "gap between segments"
    assert folder((0, 10), forced=20) == "end missing"
    assert folder((0, 10), (10, 10), first=10, forced=20) == "unfinished truncation"
    assert folder((0, 10), clean=True, forced=8) == "clean but longer"
    assert folder((0, 10), clean=True, forced=10) == "clean"
    assert folder((0, 10), (10, 0)) == "unfinished roll"
    assert folder((0, 10)) == "not closed"
    assert len(FOLDER_RULES) == 14


@pytest.fixture
def bench() -> Bench:
    bench = Bench(segment_bytes=5 * ONE)
    bench.open()
    return bench


def sent(bench: Bench, count: int) -> Bench:
    """`count` forced appends of one record."""
    for _ in range(count):
        bench.send()
    bench.log.force()
    return bench


def segment(bench: Bench, number: int = -1) -> str:
    return bench.path(bench.names(".zxQueue")[number])


def change(bench: Bench, path: str, how: Callable[[bytes], bytes]) -> None:
    bench.disk.write_file(path, how(bench.disk.read_file(path)))


def reads(log: Log, offset: int) -> Corrupt:
    with pytest.raises(Corrupt) as error:
        log.read(offset, 1 << 20)
    return error.value


def goes_on(bench: Bench) -> None:
    """Appends go on after the end, and are read."""
    end = bench.log.end_offset
    bench.sequence += 100
    bench.log.append_payloads([b"after"])
    bench.log.force()
    assert bench.log.read(end, 1 << 20).start == end
    bench.log.close()
    assert bench.open().end_offset == end + 20 + 5 + TRAILER_SIZE


def test_empty_folder() -> None:
    bench = Bench(make_disk())
    log = bench.open()
    assert log.recovery.labels == ["empty folder"]
    assert (log.first_offset, log.end_offset, log.count) == (0, 0, 0)


def test_clean(bench: Bench) -> None:
    sent(bench, 3).log.close()
    log = bench.open()
    assert log.recovery.labels == ["clean"] and log.recovery.walked_bytes == 0
    assert log.count == 3 and bench.state.loads == 1 and len(bench.state.runs) == 3
    goes_on(bench)


def test_not_closed_but_whole(bench: Bench) -> None:
    sent(bench, 3)
    epoch = bench.log.epoch
    log = bench.kill()
    assert log.recovery.labels == ["not closed", "whole"] and log.epoch > epoch
    goes_on(bench)


def test_torn_tail(bench: Bench) -> None:
    sent(bench, 2).send()
    change(bench, segment(bench), lambda data: data[:-7])
    log = bench.kill()
    assert log.recovery.labels == ["not closed", "torn tail"]
    assert log.recovery.cut_bytes == ONE - 7 and log.end_offset == 2 * ONE
    assert log.recovery.torn_path == bench.path(f"{2 * ONE:032d}.torn")
    goes_on(bench)


def test_unfinished_append(bench: Bench) -> None:
    bench = Bench()
    bench.open()
    sent(bench, 1)
    bench.send(3000)
    whole = bench.disk.read_file(segment(bench))
    first = decode_block_end(whole, ONE)
    change(bench, segment(bench), lambda data: data[:first])
    log = bench.kill()
    assert log.recovery.labels == ["not closed", "unfinished append"]
    assert log.end_offset == ONE and len(bench.state.runs) == 1


def decode_block_end(data: bytes, start: int) -> int:
    """Where the control block that begins at `start` ends."""
    mark = HEADER.pack(TRAILER_BODY.size, 0, LOG_ID, 0x40)[8:]
    return data.index(mark, start) - 8 + TRAILER_SIZE


def test_zeros_at_the_tail(bench: Bench) -> None:
    sent(bench, 2)
    change(bench, segment(bench), lambda data: data + bytes(5000))
    log = bench.kill()
    assert log.recovery.labels[1:] == ["zeros at the tail"]
    assert log.end_offset == 2 * ONE and log.recovery.torn_path is None
    goes_on(bench)


def test_rot_before_forced_data(bench: Bench) -> None:
    sent(bench, 3).send()
    bench.disk.damage(segment(bench), ONE + 25, b"\xff")
    log = bench.kill()
    assert log.recovery.labels[1:] == ["rot before forced data", "whole"]
    error = reads(log, ONE)
    assert (error.first, error.next) == (ONE, 2 * ONE)
    assert log.read(0, 1 << 20).next == ONE
    assert log.read(2 * ONE, 1 << 20).next == 4 * ONE
    assert log.offset_of_ordinal(1) == (2 * ONE, 2)
    goes_on(bench)


def test_rot_of_a_block_trailer_before_forced_data(bench: Bench) -> None:
    sent(bench, 3).send()
    bench.disk.damage(segment(bench), 2 * ONE - 50, b"\xff\xff")
    log = bench.kill()
    assert [(first, next) for first, next, _ in log.damage] == [(ONE, 2 * ONE)]
    assert log.end_offset == 4 * ONE


def test_forced_data_lost(bench: Bench) -> None:
    sent(bench, 3)
    bench.log._writer.rewrite_checkpoint_unsynced()
    change(bench, segment(bench), lambda data: data[: ONE + 10] + b"\xee" * (len(data) - ONE - 10))
    log = bench.kill()
    assert log.recovery.labels[1:] == ["forced data lost"]
    assert log.end_offset == 3 * ONE and log.end_ordinal == 3
    assert (reads(log, ONE).first, reads(log, ONE).next) == (ONE, 3 * ONE)
    goes_on(bench)


def test_end_missing(bench: Bench) -> None:
    sent(bench, 3)
    bench.log._writer.rewrite_checkpoint_unsynced()
    change(bench, segment(bench), lambda data: data[:ONE])
    log = bench.kill()
    assert log.recovery.labels[0] == "end missing"
    assert log.end_offset == 3 * ONE and (reads(log, ONE).first, reads(log, ONE).next) == (ONE, 3 * ONE)
    assert bench.names(".zxQueue")[-1] == segment_name(3 * ONE)
    goes_on(bench)


@pytest.mark.parametrize("left", [2 * ONE, ONE + 17, 0])
def test_end_missing_before_a_snapshot_is_damage_at_once(bench: Bench, left: int) -> None:
    """The snapshot teaches what the lost bytes said, so that nothing is walked: they are missing all the same."""
    sent(bench, 3).log.close()
    change(bench, segment(bench), lambda data: data[:left])
    whole = left // ONE * ONE
    for _ in range(2):
        log = bench.open()
        assert [(first, next) for first, next, _ in log.damage] == [(whole, 3 * ONE)]
        assert reads(log, whole).next == 3 * ONE
        log.close()


@pytest.mark.parametrize("name", [log_checkpoint_name(), segment_name(0), index_name(0), log_snapshot_name(3 * ONE)])
def test_a_folder_where_a_file_belongs_is_named_before_anything_is_changed(bench: Bench, name: str) -> None:
    sent(bench, 3).log.close()
    if bench.disk.exists(bench.path(name)):
        bench.disk.unlink(bench.path(name))
    bench.disk.make_folder(bench.path(name))
    changes = bench.disk.number
    with pytest.raises(IsADirectoryError) as refused:
        bench.open()
    assert (refused.value.filename, bench.disk.number) == (bench.path(name), changes)


def test_missing_segment(bench: Bench) -> None:
    sent(bench, 12)
    bench.disk.unlink(segment(bench, 0))
    log = bench.kill()
    assert log.recovery.labels[0] == "missing segment"
    assert (reads(log, 0).first, reads(log, 0).next) == (0, 5 * ONE)
    assert log.read(5 * ONE, 1 << 20).data
    goes_on(bench)


def test_gap_between_segments(bench: Bench) -> None:
    sent(bench, 12)
    change(bench, segment(bench, 0), lambda data: data[: 3 * ONE + 17])
    log = bench.kill()
    assert log.recovery.labels[0] == "gap between segments"
    assert (reads(log, 3 * ONE).first, reads(log, 4 * ONE).next) == (3 * ONE, 5 * ONE)
    assert log.read(0, 1 << 20).next == 3 * ONE
    assert log.read(5 * ONE, 1 << 20).next == 10 * ONE
    goes_on(bench)


def test_all_segments_missing(bench: Bench) -> None:
    sent(bench, 3).log.close()
    bench.disk.unlink(segment(bench))
    log = bench.open()
    assert log.recovery.labels == ["all segments missing"]
    assert (log.end_offset, log.end_ordinal) == (3 * ONE, 3)
    assert reads(log, 0).next == 3 * ONE
    assert log.stopped is not None and log.stopped.startswith(FILES_GONE)
    log.resume()
    goes_on(bench)


@pytest.mark.parametrize("left", ["mark", "damaged mark", "index"])
def test_a_file_that_is_gone_before_anything_says_what_it_held_stops_the_log(bench: Bench, left: str) -> None:
    """Until the first rewrite of the mark, a second after the first force, that has not even the end."""
    sent(bench, 3)
    bench.log.force()
    bench.disk.unlink(segment(bench))
    path = bench.path(log_checkpoint_name())
    if left == "damaged mark":
        bench.disk.write_file(path, bytes(100) + b"x" * 100)
    elif left == "index":
        bench.disk.unlink(path)
        bench.disk.write_file(bench.path(index_name(0)), b"")
    for _ in range(2):
        log = bench.kill()
        assert log.stopped is not None and log.stopped.startswith(FILES_GONE)
    log.resume()
    assert log.recovery.labels[0] == "not closed"
    goes_on(bench)


def test_nothing_missing(bench: Bench) -> None:
    """A copy may leave an empty file out."""
    bench.log.close()
    bench.disk.unlink(segment(bench))
    assert bench.open().recovery.labels == ["nothing missing"]
    goes_on(bench)


@pytest.mark.parametrize("keep", ["nothing", "everything", "some"])
def test_unfinished_creation(keep: str) -> None:
    """A crash at any moment of the making of a log leaves one that is new: no mark without a file."""
    bench, moments = Bench(), []
    bench.disk.after = lambda kind, path: moments.append(Moment(bench.disk))
    bench.open()
    bench.disk.after = None
    labels = set()
    for number, moment in enumerate(moments):
        bench.disk, bench.sequence = moment.crash(seeded(keep, number), keep=keep), 0
        log = bench.open()
        labels.add(log.recovery.labels[0])
        assert log.stopped is None
        goes_on(bench)
    assert labels <= {"empty folder", "unfinished creation", "not closed"}
    assert keep != "everything" or "unfinished creation" in labels


def test_unfinished_roll(bench: Bench) -> None:
    sent(bench, 5)
    bench.disk.write_file(bench.path(segment_name(5 * ONE)), b"")
    log = bench.kill()
    assert log.recovery.labels == ["unfinished roll", "whole"]
    assert log.end_offset == 5 * ONE and log.segment_count == 2
    goes_on(bench)


def test_unfinished_truncation(bench: Bench) -> None:
    sent(bench, 12)
    old = bench.disk.read_file(segment(bench, 0))
    bench.log.truncate_before(5 * ONE)
    bench.disk.write_file(bench.path(segment_name(0)), old)
    log = bench.kill()
    assert log.recovery.labels[0] == "unfinished truncation"
    assert log.first_offset == 5 * ONE and bench.names(".zxQueue")[0] == segment_name(5 * ONE)
    assert log.damage == []
    goes_on(bench)


def test_clean_but_longer(bench: Bench) -> None:
    sent(bench, 3).log.close()
    change(bench, segment(bench), lambda data: data + b"someone's")
    log = bench.open()
    assert log.recovery.labels == ["clean but longer", "torn tail"] and log.end_offset == 3 * ONE
    goes_on(bench)


def test_mark_missing(bench: Bench) -> None:
    sent(bench, 12)
    epoch = bench.log.epoch
    bench.disk.unlink(bench.path("log.mark"))
    log = bench.kill()
    assert log.recovery.labels == ["mark missing", "whole"]
    assert log.count == 12 and log.epoch > epoch
    goes_on(bench)


def test_mark_damaged_stops_the_log_since_it_may_have_been_stopped(bench: Bench) -> None:
    sent(bench, 3)
    change(bench, bench.path("log.mark"), lambda data: b"\xff" * len(data))
    log = bench.kill()
    assert log.recovery.labels[0] == "mark damaged" and log.stopped is not None
    log.resume()
    assert bench.read_all() == bench.expected(0, 3)
    goes_on(bench)


def test_one_slot_of_the_mark_damaged_is_no_loss(bench: Bench) -> None:
    sent(bench, 3).log.stop("an operator said so")
    for slot in (0, 4096):
        disk = bench.disk.crash(keep="everything")
        disk.damage(bench.path("log.mark"), slot, b"\xff" * 60)
        other = Bench(disk)
        assert other.open().stopped == "an operator said so"


def test_newest_snapshot_damaged(bench: Bench) -> None:
    sent(bench, 12)
    names = bench.names(".state")
    assert len(names) == 2
    change(bench, bench.path(names[-1]), lambda data: data[:-1] + b"?")
    log = bench.kill()
    assert "snapshot damaged" in log.recovery.labels and "state lost" not in log.recovery.labels
    assert len(bench.state.runs) == 12


def test_all_snapshots_damaged_but_all_records_there(bench: Bench) -> None:
    sent(bench, 12)
    for name in bench.names(".state"):
        change(bench, bench.path(name), lambda data: data[:-1] + b"?")
    log = bench.kill()
    assert log.recovery.labels.count("snapshot damaged") == 2
    assert len(bench.state.runs) == 12 and log.recovery.walked_bytes == 12 * ONE


def test_a_damaged_index_is_made_anew(bench: Bench) -> None:
    bench = Bench()
    bench.open()
    for _ in range(5):
        bench.send(3000)
    bench.log.close()
    change(bench, bench.path(bench.names(".index")[0]), lambda data: b"?" * len(data))
    log = bench.open()
    assert log.offset_of_ordinal(14_999)[1] == 14_999
    assert bench.read_all() == bench.expected(0, 15_000)


def test_a_newer_format_is_refused(bench: Bench) -> None:
    sent(bench, 3)
    bench.log._writer.rewrite_checkpoint_unsynced()
    raw = bytearray(bench.disk.read_file(segment(bench)))
    from zlib import crc32

    at = 3 * ONE - TRAILER_SIZE
    assert decode_trailer(bytes(raw), at, LOG_ID)
    raw[at + 20 : at + 22] = (2).to_bytes(2, "big")
    raw[at + 4 : at + 8] = crc32(bytes(raw[at + 20 : at + TRAILER_SIZE])).to_bytes(4, "big")
    bench.disk.write_file(segment(bench), bytes(raw))
    with pytest.raises(NewerFormat):
        bench.kill()
    assert bench.disk.read_file(segment(bench)) == bytes(raw)


def test_the_folder_of_another_incarnation_is_refused_and_left_alone(bench: Bench) -> None:
    sent(bench, 3)
    for _ in range(2):
        before = {name: bench.disk.read_file(bench.path(name)) for name in bench.disk.list(PATH)}
        with pytest.raises(WrongLog):
            bench.open(log_id=make_log_id(78, 3))
        assert before == {name: bench.disk.read_file(bench.path(name)) for name in bench.disk.list(PATH)}
        if bench.disk.exists(bench.path("log.mark")):
            bench.disk.unlink(bench.path("log.mark"))


def test_a_snapshot_of_an_older_incarnation_does_not_count(bench: Bench) -> None:
    sent(bench, 3).log.close()
    name = log_snapshot_name(3 * ONE)
    old = bench.disk.read_file(bench.path(name))
    other = Bench()
    other.open(log_id=make_log_id(99, 3))
    other.disk.write_file(other.path(name), old)
    log = other.open(log_id=make_log_id(99, 3))
    assert "snapshot damaged" in log.recovery.labels and log.end_offset == 0


def test_marks_say_clean_only_while_nothing_was_written(bench: Bench) -> None:
    sent(bench, 3).log.close()
    marks = LogCheckpointFile(bench.disk, PATH, LOG_ID)
    found = marks.read()
    assert found is not None and found.clean
    bench.open()
    bench.send()
    found = marks.read()
    assert found is not None and not found.clean
