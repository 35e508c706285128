"""The interface of storages: claiming where it is known, reading where not; whom an error fences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from tfmq.errors import Fenced
from tfmq.offsets.storage import (
    ClaimingStorage,
    OffsetStorage,
    PartitionName,
    StoredOffset,
    claim,
    fenced,
    fenced_partitions,
    under,
)

A, B = PartitionName("orders", 0), PartitionName("orders", 1)


class Plain:
    """A storage as one was written before there was `claim`."""

    def read(self, group: str, partitions: Sequence[PartitionName]) -> Mapping[PartitionName, StoredOffset]:
        return {A: StoredOffset(7)}

    def save(self, group: str, generation: int, offsets: Mapping[PartitionName, StoredOffset]) -> None:
        """Not needed here."""

    def close(self) -> None:
        """Nothing to give back."""


class Claiming(Plain):
    def claim(
        self, group: str, generation: int, partitions: Sequence[PartitionName]
    ) -> Mapping[PartitionName, StoredOffset]:
        return {A: StoredOffset(7, generation=generation)}


def test_a_storage_without_claim_is_read() -> None:
    assert isinstance(Plain(), OffsetStorage) and not isinstance(Plain(), ClaimingStorage)
    assert claim(Plain(), "billing", 3, [A]) == {A: StoredOffset(7)}


def test_a_storage_with_claim_is_asked_to_claim() -> None:
    assert isinstance(Claiming(), ClaimingStorage)
    assert claim(Claiming(), "billing", 3, [A]) == {A: StoredOffset(7, generation=3)}


def test_an_error_says_which_partitions_are_lost_and_to_which_generation() -> None:
    error = fenced("offsets.json", "billing", {B: 9})
    assert fenced_partitions(error, [A, B]) == {B}
    with pytest.raises(Fenced, match=r"offsets\.json: .* billing .* orders-1 \(generation 9\)"):
        raise error


def test_an_error_that_names_no_partition_is_about_all_that_were_asked() -> None:
    assert fenced_partitions(Fenced(), [A, B]) == {A, B}


def test_a_row_is_kept_under_its_own_generation_or_that_of_the_save() -> None:
    assert under(7, StoredOffset(5)) == StoredOffset(5, generation=7)
    assert under(7, StoredOffset(5, generation=3)).generation == 3
