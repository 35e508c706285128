"""The table of what a start does: each row by its label."""

from __future__ import annotations

import pytest

from tfmq.delay.buckets.format import TimeSpan, bucket_name
from tfmq.delay.buckets.recovery import (
    DECISIONS,
    Decision,
    FileState,
    ListedBucket,
    decide_files,
    is_bucket_file_name,
)

ONE = ListedBucket(TimeSpan(1 << 16, 16), 100, 3)
NAME = bucket_name(ONE.span)
OTHER = bucket_name(TimeSpan(5 << 16, 16))


@pytest.mark.parametrize(
    ("listed", "sizes", "label", "decision"),
    [
        ([ONE], {NAME: 100}, "whole", Decision.USE),
        ([ONE], {NAME: 101}, "unlisted chunks", Decision.CUT),
        ([ONE], {NAME: 99}, "too short", Decision.USE),
        ([ONE], {}, "missing", Decision.REFUSE),
        ([], {OTHER: 5}, "unlisted", Decision.REMOVE),
        ([], {"checkpoint.new": 5}, "unfinished", Decision.REMOVE),
        ([], {f"{NAME}.repaired": 5}, "unfinished", Decision.REMOVE),
        ([], {f"{NAME}.damaged.repaired": 5}, "unfinished", Decision.REMOVE),
        ([], {f"{NAME}.damaged": 5}, "foreign", Decision.LEAVE),
        ([], {"notes.txt": 5}, "foreign", Decision.LEAVE),
        ([], {"notes.repaired": 5}, "foreign", Decision.LEAVE),
    ],
)
def test_each_thing_that_is_found_has_its_row(
    listed: list[ListedBucket], sizes: dict[str, int], label: str, decision: Decision
) -> None:
    (found,) = decide_files(listed, sizes)
    assert found.row == (label, decision)
    assert found.listed == (listed[0] if listed else None)


def test_every_row_can_be_met_and_labels_differ() -> None:
    assert set(DECISIONS) == set(FileState) and len({row.label for row in DECISIONS.values()}) == len(
        DECISIONS
    )


def test_the_checkpoint_itself_is_no_finding() -> None:
    assert decide_files([], {"checkpoint": 8192}) == []


def test_names_of_the_house_are_known() -> None:
    for name in (
        "checkpoint",
        "checkpoint.new",
        "checkpoint.damaged",
        NAME,
        f"{NAME}.repaired",
        f"{NAME}.damaged",
    ):
        assert is_bucket_file_name(name)
    assert not is_bucket_file_name("other") and not is_bucket_file_name("x.bucket")
