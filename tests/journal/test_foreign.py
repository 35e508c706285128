"""A segment of another process: opened late, closed to make room, never changed."""

from __future__ import annotations

from collections import OrderedDict

import pytest

from journal.filenames import index_name, join
from journal.log.index import OnDiskIndex
from journal.log.readonly import OPEN_MAX, OpenFiles, ReadOnlyFile, ReadOnlySegment
from journal.record.format import Incomplete
from journal.testing import SimulatedDisk
from tests.journal.logs import FOLDER, LOG_ID, Bench


@pytest.fixture
def disk() -> SimulatedDisk:
    made = SimulatedDisk()
    made.make_folder("/x")
    for number in range(OPEN_MAX + 3):
        made.create(f"/x/{number}").close()
        made.write_file(f"/x/{number}", b"%d" % number * 10)
    return made


def test_it_is_opened_by_the_first_read_and_few_are_open_at_once(disk: SimulatedDisk) -> None:
    pool: OpenFiles = OrderedDict()
    files = [ReadOnlyFile(disk, f"/x/{number}", pool) for number in range(OPEN_MAX + 3)]
    assert not pool
    for file in files:
        assert file.pread(1, 0) == file.path[-1:].encode() or int(file.path[3:]) > 9
    assert list(pool) == files[3:]
    assert files[0].size() == 10 and files[0] in pool and files[3] not in pool
    files[0].close()
    files[0].close()
    assert files[0] not in pool


def test_a_size_that_is_given_needs_no_file(disk: SimulatedDisk) -> None:
    file = ReadOnlyFile(disk, "/x/none", OrderedDict(), 77)
    assert file.size() == 77
    with pytest.raises(FileNotFoundError):
        file.pread(1, 0)


def test_it_is_never_written(disk: SimulatedDisk) -> None:
    file = ReadOnlyFile(disk, "/x/1", OrderedDict())
    for change in (lambda: file.pwritev([b"x"], 0), file.force, lambda: file.truncate(0)):
        with pytest.raises(OSError, match="only read"):
            change()
    assert disk.read_file("/x/1") == b"1" * 10


def segment_of(bench: Bench, end: int) -> ReadOnlySegment:
    return ReadOnlySegment(bench.disk, FOLDER, 0, LOG_ID, end=end, pool=OrderedDict(), suffix=".zxQueue")


def test_its_index_is_searched_in_the_file_until_it_is_distrusted() -> None:
    bench = Bench()
    bench.open()
    for _ in range(40):
        bench.send(3, 20_000)
    bench.log._segment_set.active.write_index()
    end = bench.log.end_offset
    segment = segment_of(bench, end)
    assert isinstance(segment.index, OnDiskIndex) and segment.has_index
    place = segment.index.by_position(500_000)
    path = join(FOLDER, index_name(0))
    assert (
        not segment.discard_index_file("/elsewhere")
        and segment.discard_index_file(path)
        and not segment.discard_index_file(path)
    )
    assert not isinstance(segment.index, OnDiskIndex) and segment.index.by_position(500_000) == place
    before = bench.disk.read_file(path)
    segment.write_index(), segment.close()
    assert bench.disk.read_file(path) == before


def test_it_grows_and_a_file_that_ends_too_early_is_told() -> None:
    bench = Bench()
    bench.open()
    for _ in range(4):
        bench.send(3, 20_000)
    first = bench.log.read(0, 1, upto="written").next
    segment = segment_of(bench, first)
    with pytest.raises(FileNotFoundError):
        segment.index  # noqa: B018 - small ones have none yet
    assert segment.discard_index_file(join(FOLDER, index_name(0)))
    assert segment.index.end == first
    assert len(segment.pread(1 << 20, 0)) == first
    bench.log._segment_set.active.write_index()
    segment.set_end(bench.log.end_offset)
    assert isinstance(segment.index, OnDiskIndex), "looked for again"
    assert len(segment.pread(1 << 20, 0)) == bench.log.end_offset
    segment.set_end(bench.log.end_offset + 1)
    with pytest.raises(Incomplete, match="shorter than the log"):
        list(segment.blocks())
