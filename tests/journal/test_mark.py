"""log.mark: what survives, and which readers a cut concerns."""

from __future__ import annotations

import errno

import pytest
from hypothesis import given
from hypothesis import strategies as st

from journal.dual_slot_file import SLOT_SIZE
from journal.errors import Corrupt, NewerFormat
from journal.log.checkpoint import (
    REASON_SIZE_MAX,
    STARTS_MAX,
    LogCheckpoint,
    LogCheckpointFile,
    WrongLog,
    add_epoch_start,
    decode_checkpoint,
    encode_checkpoint,
    next_epoch,
    truncated_since,
)
from tests.journal.logs import FOLDER, LOG_ID, make_disk

MARKS = LogCheckpoint(100, 5, 4000, 77, 1_700_000_000_000, 3, ((2, 50), (3, 900)), False, "why: ümläut")


def test_marks_come_back_as_they_were() -> None:
    for marks in (MARKS, MARKS._replace(stopped=None, clean=True), MARKS._replace(starts=(), stopped="")):
        assert decode_checkpoint(encode_checkpoint(LOG_ID, marks), "p", LOG_ID) == marks


def test_the_largest_marks_fit_a_slot() -> None:
    starts = tuple((n, n) for n in range(STARTS_MAX))
    marks = MARKS._replace(starts=starts, stopped="x" * REASON_SIZE_MAX * 3)
    assert len(encode_checkpoint(LOG_ID, marks)) < SLOT_SIZE - 64


def test_marks_of_another_log_a_newer_format_or_another_size_are_refused() -> None:
    data = encode_checkpoint(LOG_ID, MARKS)
    with pytest.raises(WrongLog):
        decode_checkpoint(data, "p", LOG_ID + 1)
    with pytest.raises(NewerFormat):
        decode_checkpoint(b"\x00\x09" + data[2:], "p", LOG_ID)
    for size in range(len(data)):
        with pytest.raises(Corrupt):
            decode_checkpoint(data[:size], "p", LOG_ID)


def test_settled_marks_survive_the_loss_of_either_slot() -> None:
    for slot in (0, 1):
        disk = make_disk()
        LogCheckpointFile(disk, FOLDER, LOG_ID).write_durably(MARKS)
        disk = disk.crash(keep="nothing")
        disk.damage(f"{FOLDER}/log.mark", slot * SLOT_SIZE, b"\xff" * 100)
        assert LogCheckpointFile(disk, FOLDER, LOG_ID).read() == MARKS


def test_an_unforced_note_may_be_lost_and_takes_nothing_with_it() -> None:
    disk = make_disk()
    file = LogCheckpointFile(disk, FOLDER, LOG_ID)
    file.write_durably(MARKS)
    file.write_unsynced(MARKS._replace(durable=5000))
    assert file.read() == MARKS._replace(durable=5000)
    assert LogCheckpointFile(disk.crash(keep="nothing"), FOLDER, LOG_ID).read() == MARKS


def test_a_failed_force_of_the_marks_is_told() -> None:
    disk = make_disk()
    disk.faults.fail("force", error=errno.EIO)
    with pytest.raises(OSError):
        LogCheckpointFile(disk, FOLDER, LOG_ID).write_durably(MARKS)


@given(st.lists(st.integers(0, 50), max_size=40))
def test_a_reader_is_sent_back_to_the_lowest_cut_since_its_epoch(cuts: list[int]) -> None:
    starts: tuple[tuple[int, int], ...] = ()
    for epoch, offset in enumerate(cuts, 1):
        starts = add_epoch_start(starts, epoch, offset)
    for epoch in range(len(cuts) + 1):
        assert truncated_since(starts, epoch) == (min(cuts[epoch:]) if cuts[epoch:] else None)


def test_starts_without_a_cut_are_forgotten_before_any_cut() -> None:
    starts = add_epoch_start((), 7, 5)
    epoch = next_epoch(7, 1_800_000_000_000, truncated=True)
    starts = add_epoch_start(starts, epoch, 8)
    cuts = list(starts)
    for number in range(1, 3 * STARTS_MAX):
        epoch = next_epoch(epoch, 1_800_000_000_000, truncated=False)
        starts = add_epoch_start(starts, epoch, 10 * number)
    assert len(starts) == STARTS_MAX and list(starts[:2]) == cuts and starts[-1] == (epoch, 10 * number)


def test_an_epoch_has_the_number_of_the_clock_and_rises_whatever_that_says() -> None:
    assert next_epoch(3, 1_800_000_000_000, truncated=True) == 1_800_000_001
    assert next_epoch(3, 1_800_000_000_000, truncated=False) == 1_800_000_000
    assert next_epoch(1_900_000_000, 1_800_000_000_000, truncated=False) == 1_900_000_002
    assert next_epoch(3, 1 << 62, truncated=False) < 1 << 32


def test_beyond_so_many_cuts_a_reader_goes_back_too_far_rather_than_not_far_enough() -> None:
    starts: tuple[tuple[int, int], ...] = ()
    for epoch in range(1, 3 * STARTS_MAX):
        starts = add_epoch_start(starts, epoch, epoch * 10)
    assert len(starts) == STARTS_MAX
    for epoch in range(3 * STARTS_MAX - 1):
        cut = truncated_since(starts, epoch)
        assert cut is not None and cut <= (epoch + 1) * 10
