"""Files side by side: one that is missing, one that was cut, wherever; and what retention took is no damage."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from journal import LogOptions
from journal.disk import RealDisk
from journal.log.readonly import open_log
from journal.record.format import make_log_id
from tests.spark.pipelines.audited import INCARNATION, audit_here, batch, compared, reported, segments, write_log
from tfmq.spark.pipelines.audit_check import (
    APPEND,
    RUN,
    RUN_COUNT_MAX,
    FactCollector,
    check_piece,
    concatenate_facts,
    make_facts,
    split_facts,
)
from tfmq.spark.pipelines.audit_plan import CUT, MISSING, ORDER, OVERLAP, UNREADABLE, make_plan


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    data = tmp_path_factory.mktemp("chain") / "data"
    write_log(data, 0, [([batch(50, 40 * n, [80] * 40)], None) for n in range(24)])
    return data


@given(number=st.integers(0, 5), left=st.floats(0, 1, exclude_max=True), indexed=st.booleans())
def test_a_cut_file_is_found_wherever_it_is_cut(data: Path, number: int, left: float, indexed: bool) -> None:
    paths = segments(data / "orders-0")
    path = paths[number % len(paths)]
    index = path.with_suffix(".index")
    sound, entries = path.read_bytes(), index.read_bytes() if index.exists() else None
    size = int(left * len(sound))
    path.write_bytes(sound[:size])
    if not indexed:
        index.unlink(missing_ok=True)
    try:
        result = audit_here(data)
    finally:
        path.write_bytes(sound)
        if entries is not None:
            index.write_bytes(entries)
    (finding,) = result.findings
    end = int(path.stem) + len(sound)
    assert finding.first <= int(path.stem) + size < finding.next == end
    if finding.kind != CUT:  # at a block's end, and nothing says that there was more: as if a file were missing
        assert finding.kind == MISSING and size and size % 4100 == 0 and (entries is None or not indexed)
    else:
        assert finding.segment == path.name


def test_each_missing_segment_is_found(data: Path, tmp_path: Path) -> None:
    paths = segments(data / "orders-0")
    assert len(paths) > 3
    for path in paths:
        copy = tmp_path / path.stem
        shutil.copytree(data, copy)
        (copy / "orders-0" / path.name).unlink()
        (finding,) = audit_here(copy).findings
        end = int(path.stem) + path.stat().st_size
        assert (finding.kind, finding.first, finding.next) == (MISSING, int(path.stem), end)
        assert path.name in finding.text


def test_a_log_of_which_all_segments_are_missing_is_found(data: Path, tmp_path: Path) -> None:
    shutil.copytree(data, tmp_path / "data")
    paths = segments(tmp_path / "data" / "orders-0")
    end = int(paths[-1].stem) + paths[-1].stat().st_size
    for path in paths:
        path.unlink()
    assert reported(audit_here(tmp_path / "data")) == [(MISSING, 0, 0, end)]


def test_what_retention_took_is_not_missing(tmp_path: Path) -> None:
    folder = write_log(tmp_path / "data", 0, [([batch(50, 40 * n, [80] * 40)], None) for n in range(24)])
    second = int(segments(folder)[2].stem)
    with open_log(str(folder), LogOptions(), log_id=make_log_id(INCARNATION, 0)) as log:
        log.truncate_before(second)
    assert int(segments(folder)[0].stem) == second
    assert reported(audit_here(tmp_path / "data")) == []


def test_a_file_that_reaches_into_the_next_is_reported(data: Path, tmp_path: Path) -> None:
    shutil.copytree(data, tmp_path / "data")
    first, second = segments(tmp_path / "data" / "orders-0")[:2]
    first.write_bytes(first.read_bytes() + second.read_bytes()[:4100])
    assert OVERLAP in [each[0] for each in reported(audit_here(tmp_path / "data"))]


def test_ordinals_that_do_not_go_on_from_file_to_file_are_reported(tmp_path: Path) -> None:
    folder = write_log(tmp_path / "data", 0, [([batch(50, 40 * n, [80] * 40)], None) for n in range(24)])
    other = write_log(tmp_path / "other", 0, [([batch(60, 20 * n, [180] * 20)], None) for n in range(24)])
    second, strange = segments(folder)[1], segments(other)[1]
    assert (second.name, second.stat().st_size) == (strange.name, strange.stat().st_size)
    shutil.copy(strange, second)
    kinds = [each[0] for each in reported(audit_here(tmp_path / "data"))]
    assert kinds and set(kinds) == {ORDER}


def test_a_file_that_vanishes_while_it_is_audited_is_reported_unless_retention_took_it(tmp_path: Path) -> None:
    data = tmp_path / "data"
    folder = write_log(data, 0, [([batch(50, 40 * n, [80] * 40)], None) for n in range(24)])
    disk = RealDisk()
    made = make_plan(disk, [str(data)], 8192)

    def now() -> list[tuple[str, int, int, int]]:
        return reported(
            compared(data, [], made, [check_piece(disk, made.logs[piece.log], piece, 0) for piece in made.pieces])
        )

    assert now() == []
    first, second, third = segments(folder)[:3]
    with open_log(str(folder), LogOptions(), log_id=make_log_id(INCARNATION, 0)) as log:
        log.truncate_before(int(second.stem))
    assert not first.exists() and now() == []
    begins, size = int(second.stem), second.stat().st_size
    second.unlink()
    assert now() == [(UNREADABLE, 0, begins, begins + size)] and third.exists()
    shutil.rmtree(folder)
    assert now() == []


# Facts: what a walk reports is what is reported again, whole, wherever it is split.

ROWS = st.lists(
    st.tuples(st.integers(0, (1 << 64) - 1), st.integers(0, 4), st.integers(1, 9), *[st.integers(0, 1 << 63)] * 3)
)


@given(rows=ROWS, parts=st.integers(1, 5))
def test_a_split_loses_nothing_and_keeps_a_producers_ids_together(rows: list[tuple[int, ...]], parts: int) -> None:
    facts = make_facts(3, 4, [list(row) for row in rows])
    pieces = split_facts(facts, parts)
    again = concatenate_facts([piece for _, piece in pieces])
    assert sorted(zip(*(map(int, column) for column in again), strict=True)) == sorted(
        (3, row[1], row[0], row[2], 4, *row[3:]) for row in rows
    )
    homes: dict[int, set[int]] = {}
    for number, piece in pieces:
        for key in piece.key:
            homes.setdefault(int(key) >> 24, set()).add(number)
    assert all(len(numbers) == 1 for numbers in homes.values())


def test_runs_of_one_producer_become_one_although_others_are_between() -> None:
    collector = FactCollector(0, 7)
    for n in range(3):
        collector.add_run(50 << 24 | n * 10, 10, 1000 * n, 1000 * n + 500)
        collector.add_run(51 << 24 | n * 10, 9, 1000 * n + 500, 1000 * n + 1000)
    facts = collector.to_facts()
    rows = list(zip(facts.kind, facts.key, facts.count, facts.offset, facts.next, strict=True))
    assert rows[0] == (RUN, 50 << 24, 30, 0, 2500)
    assert rows[1:] == [(RUN, 51 << 24 | n * 10, 9, 1000 * n + 500, 1000 * n + 1000) for n in range(3)]
    assert set(facts.log) == {7}


def test_a_long_run_is_reported_in_parts() -> None:
    collector = FactCollector(0, 0)
    for n in range(3):
        collector.add_run(50 << 24 | n * 40_000, 40_000, n, n + 1)
    assert list(collector.to_facts().count) == [40_000] * 3 and RUN_COUNT_MAX == 65_536


def test_blocks_of_one_append_are_one_fact() -> None:
    collector = FactCollector(0, 0)
    collector.add_append(9, 1000, 10, 0, 100)
    collector.add_append(9, 1000, 5, 100, 200)
    collector.add_append(9, 1010, 5, 200, 300)
    facts = collector.to_facts()
    rows = list(zip(facts.kind, facts.key, facts.count, facts.offset, facts.next, facts.extra, strict=True))
    assert rows == [(APPEND, 1000, 15, 0, 200, 9), (APPEND, 1010, 5, 200, 300, 9)]
