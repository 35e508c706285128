"""Addresses as they are shown: what is to stay between a person and a database is not in them."""

import pytest

from tfmq.offsets.storage import url_without_passwords


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
