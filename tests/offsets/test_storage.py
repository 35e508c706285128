"""Which troubles of a file or a database are waited for."""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from pathlib import Path

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
    is_permanent_error,
    under,
    url_without_passwords,
)


class Refused(Exception):
    """What a driver raises, as SQLAlchemy wraps it."""

    def __init__(self, **says: object) -> None:
        self.orig = Exception("planted")
        for name, value in says.items():
            setattr(self.orig, name, value)


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EACCES, errno.EROFS, errno.EISDIR, errno.ENOTDIR])
def test_what_the_system_refuses_for_good(number: int) -> None:
    assert is_permanent_error(OSError(number, "planted"))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EMFILE, errno.EIO, errno.ECONNREFUSED])
def test_what_the_system_may_give_later(number: int) -> None:
    assert not is_permanent_error(OSError(number, "planted"))


def test_a_file_that_sqlite_cannot_open_is_looked_at(tmp_path: Path) -> None:
    refused = Refused(sqlite_errorcode=14)
    (tmp_path / "there").touch()
    for place in (".", "gone/x.db", "there/x.db"):
        assert is_permanent_error(refused, tmp_path / place)
    for place in ("there", "not-yet"):
        assert not is_permanent_error(refused, tmp_path / place), "there were too many open files, or so"
    assert not is_permanent_error(refused) and not is_permanent_error(refused, "file:/x.db?mode=rwc")


def test_what_databases_say() -> None:
    for code in (8, 26):
        assert is_permanent_error(Refused(sqlite_errorcode=code)), "no writes, no database"
    for code in (5, 10, 13):
        assert not is_permanent_error(Refused(sqlite_errorcode=code)), "busy, a disk's error, full"
    assert is_permanent_error(Refused(sqlstate="42501")) and not is_permanent_error(Refused(sqlstate="57P01"))
    assert not is_permanent_error(Refused()) and not is_permanent_error(ValueError())


# The interface of storages: claiming where it is known, reading where not; whom an error fences.

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


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://me:secret@host/db", "postgresql://me:***@host/db"),
        ("postgresql://me:sec@ret@host/db", "postgresql://me:***@host/db"),
        ("postgresql://:sec/r?et@host/db", "postgresql://:***@host/db"),
        ("postgresql//me:secret@host/db", "postgresql//me:***@host/db"),
        ("me:secret@host/db", "me:***@host/db"),
        ("postgresql://h/db?user=me&password=secret&x=1", "postgresql://h/db?user=me&password=***&x=1"),
        ("mysql://h/db?ssl_PassPhrase=secret", "mysql://h/db?ssl_PassPhrase=***"),
    ],
)
def test_passwords_are_masked_wherever_they_stand(url: str, shown: str) -> None:
    assert url_without_passwords(url) == shown


@pytest.mark.parametrize(
    "url", ["postgresql://me@host:5432/db", "sqlite:////var/a:b@c/x.db", "postgresql:///db?host=/run", "dead.db"]
)
def test_what_has_none_stays_as_it_is(url: str) -> None:
    assert url_without_passwords(url) == url
