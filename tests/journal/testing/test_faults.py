"""The call that was chosen fails, and no other."""

from __future__ import annotations

import errno

import pytest

from journal.errors import Full
from journal.testing.faults import Faults


def strikes(faults: Faults, kind: str, calls: int, path: str = "file") -> list[int]:
    """The numbers of the calls that failed, from 1."""
    failed = []
    for number in range(1, calls + 1):
        try:
            faults.check(kind, path)
        except (OSError, Full):
            failed.append(number)
    return failed


def test_nothing_fails_by_itself() -> None:
    assert strikes(Faults(), "write", 5) == []


def test_the_nth_call_fails_once() -> None:
    faults = Faults()
    rule = faults.fail("write", nth=3)
    assert strikes(faults, "write", 6) == [3]
    assert (rule.seen, rule.hit) == (6, 1)


def test_some_in_a_row_or_all_later_ones_fail() -> None:
    faults = Faults()
    faults.fail("write", nth=2, times=2)
    assert strikes(faults, "write", 6) == [2, 3]
    faults.clear()
    faults.fail("write", nth=4, times=None)
    assert strikes(faults, "write", 6) == [4, 5, 6]


def test_only_calls_of_that_kind_and_path_count() -> None:
    faults = Faults()
    faults.fail("write", path="b")
    assert strikes(faults, "force", 2, "b") == []
    assert strikes(faults, "write", 2, "a") == []
    assert strikes(faults, "write", 2, "b") == [1]
    assert faults.counts == {"force": 2, "write": 4}


def test_no_space_is_full_for_a_write_and_an_error_for_an_fsync() -> None:
    faults = Faults()
    faults.fail("write", error=errno.ENOSPC)
    faults.fail("force", error=errno.ENOSPC)
    with pytest.raises(Full):
        faults.check("write", "file")
    with pytest.raises(OSError, match="No space"):
        faults.check("force", "file")


def test_a_short_write_says_how_much_it_takes() -> None:
    faults = Faults()
    faults.short_write(7, nth=2)
    assert [faults.check("write", "file") for _ in range(3)] == [None, 7, None]


def test_a_hook_that_slows_the_disk_is_called_before_every_call() -> None:
    faults, asked = Faults(), []
    faults.before = lambda kind, path: asked.append((kind, path))
    faults.check("read", "a")
    assert asked == [("read", "a")]


def test_a_kind_of_call_that_there_is_not_is_refused() -> None:
    with pytest.raises(ValueError, match="'frce' is no call of a disk"):
        Faults().fail("frce")
