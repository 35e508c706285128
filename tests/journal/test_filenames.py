"""Every name that is built can be taken apart again, and nothing else can."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from journal import filenames

OFFSETS = st.integers(0, 2**64 - 1)
TOPICS = st.from_regex(r"[A-Za-z0-9._-]{1,60}", fullmatch=True).filter(filenames.is_valid_name)


def test_a_segment_is_named_by_32_digits() -> None:
    assert filenames.segment_name(0) == "00000000000000000000000000000000.zxQueue"
    assert filenames.segment_name(4096) == "00000000000000000000000000004096.zxQueue"


@given(OFFSETS)
def test_offsets_come_back_from_names(offset: int) -> None:
    assert filenames.parse_segment_name(filenames.segment_name(offset)) == offset
    assert filenames.parse_log_snapshot_name(filenames.log_snapshot_name(offset)) == offset
    assert filenames.parse_torn_name(filenames.torn_name(offset)) == offset


@given(OFFSETS, OFFSETS)
def test_names_sort_as_offsets_do(one: int, other: int) -> None:
    assert (filenames.segment_name(one) < filenames.segment_name(other)) == (one < other)


@pytest.mark.parametrize(
    "name", ["", "1.zxQueue", "0" * 31 + ".zxQueue", "0" * 33 + ".zxQueue", "0" * 32, "٣" * 32 + ".zxQueue"]
)
def test_other_names_are_no_segments(name: str) -> None:
    assert filenames.parse_segment_name(name) is None


@given(TOPICS, st.integers(0, filenames.PARTITION_MAX))
def test_a_partition_comes_back_from_its_folder(topic: str, partition: int) -> None:
    assert filenames.parse_partition_folder(filenames.partition_folder(topic, partition)) == (topic, partition)


@pytest.mark.parametrize("name", ["orders", "orders-", "-1", "orders-01", "orders--", "a/b-1", "..-1x", "..-1"])
def test_other_folders_are_no_partitions(name: str) -> None:
    assert filenames.parse_partition_folder(name) is None


@pytest.mark.parametrize("name", ["a", "A.b_c-9", "x" * 249, "..."])
def test_good_names(name: str) -> None:
    assert filenames.is_valid_name(name)


@pytest.mark.parametrize("name", ["", ".", "..", "x" * 250, "a/b", "a\0", "a\n", "ä", "../x", " "])
def test_names_that_would_leave_the_folder_are_refused(name: str) -> None:
    assert not filenames.is_valid_name(name)


def test_a_path_is_joined_with_a_slash() -> None:
    assert filenames.join("data/a-1", filenames.log_checkpoint_name()) == "data/a-1/log.mark"


@given(st.integers(0, 10**16 - 1), st.integers(0, 10**20 - 1))
def test_files_of_the_transaction_journal_are_named_by_number(number: int, checkpoint: int) -> None:
    name, snapshot = filenames.journal_name(number), filenames.snapshot_name(checkpoint)
    assert filenames.parse_journal_name(name) == number and len(name) == 16 + len(".journal")
    assert filenames.parse_snapshot_name(snapshot) == checkpoint and len(snapshot) == 20 + len(".snapshot")
    assert filenames.parse_snapshot_name(name) is None and filenames.parse_journal_name(snapshot) is None


@pytest.mark.parametrize(
    "name", ["", "1.journal", "0" * 17 + ".journal", "٣" * 16 + ".journal", "0" * 16 + ".journal2"]
)
def test_other_names_are_no_files_of_the_transaction_journal(name: str) -> None:
    assert filenames.parse_journal_name(name) is None and filenames.parse_snapshot_name(name) is None


def test_the_folder_of_transactions_knows_its_own_names() -> None:
    known = [filenames.journal_name(1), filenames.snapshot_name(2), filenames.CHECKPOINT_NAME, filenames.torn_name(3)]
    known += [f"{known[0]}.damaged", f"{known[0]}.damaged.repaired", f"{known[1]}.new", "checkpoint.damaged"]
    assert all(map(filenames.is_transactions_file, known))
    strange = ["letter.txt", "checkpoint.old", "log.mark", filenames.segment_name(0)]
    assert not any(map(filenames.is_transactions_file, strange))
