"""Errors carry what a caller needs to act, and say it in a sentence."""

from __future__ import annotations

import pytest

from journal import errors


@pytest.mark.parametrize(
    ("error", "fields", "words"),
    [
        (errors.Corrupt("a/b", 5, 9, "a bad CRC"), {"path": "a/b", "first": 5, "next": 9}, "from 5 to 9"),
        (errors.BadBatch("no records"), {"reason": "no records"}, "rejected: no records"),
        (errors.BelowStart(3, 8), {"offset": 3, "first": 8}, "starts at 8"),
        (errors.BeyondEnd(9, 8), {"offset": 9, "end": 8}, "ends at 8"),
        (errors.NotARecord(7), {"offset": 7}, "offset 7"),
        (errors.CutAway(9, 4), {"offset": 9, "cut": 4}, "continue at 4"),
        (errors.Stopped("EIO"), {"reason": "EIO"}, "stopped for writes: EIO"),
        (errors.Full("quota"), {"reason": "quota"}, "quota"),
        (errors.NewerFormat("x", 3, 2), {"found": 3, "known": 2}, "up to 2"),
        (errors.Locked("lock", "41"), {"path": "lock", "holder": "41"}, "by process 41"),
        (errors.Closed(), {}, "closed"),
        (errors.TooLarge("a record", 9, 8), {"size_bytes": 9, "max_bytes": 8}, "at most 8"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_error_says_what_happened(error: errors.JournalError, fields: dict[str, object], words: str) -> None:
    assert isinstance(error, errors.JournalError)
    assert words in str(error)
    assert {name: getattr(error, name) for name in fields} == fields


def test_what_is_about_a_whole_folder_names_no_range() -> None:
    assert str(errors.Corrupt("data/x", 0, 0, "it is missing")) == "data/x: it is missing"


def test_both_ends_of_the_range_are_one_family() -> None:
    assert issubclass(errors.BelowStart, errors.OutOfRange)
    assert issubclass(errors.BeyondEnd, errors.OutOfRange)


def test_a_lock_without_a_known_holder_names_none() -> None:
    assert "by process" not in str(errors.Locked("lock"))
