"""Which troubles of a file or a database are waited for, and what a text shows of a URL."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from tfmq.databases import is_permanent_error, url_without_passwords


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
