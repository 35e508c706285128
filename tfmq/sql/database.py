"""Which database it is: the name by which those who use the same one find each other.

The name is made of the address without user, password and options, so that it may be shown and logged. It is in the
name of the group of producers that have none of their own, and, with the identity of the table (see `table`), in every
xid: only who can look into the table that decides a transaction answers for it.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from sqlalchemy.engine import URL, Engine

PREFIX = "tfmq.sql"
DIGEST_CHARACTERS = 16
RANDOM_BYTES = 16
GROUP_NAME_CHARACTERS = 60
"""Of the database's name in that of a group: to be recognised; the digest tells them apart."""

ADDRESS_OPTIONS = ("host", "port", "service", "dbname")
"""What an address may say behind its question mark about where the database is; all else stays out."""

TWO_PHASE_DRIVERS = frozenset({"psycopg", "psycopg2"})
"""Drivers of PostgreSQL whose two-phase commit SQLAlchemy steers."""


def address(url: URL) -> str:
    """Where it is, without who asks: equal for the same database."""
    name = url.database or ""
    if is_in_memory(url):
        return f"sqlite:memory:{os.getpid()}"
    if url.get_backend_name() == "sqlite":
        return f"sqlite:{Path(name.removeprefix('file:')).resolve()}"
    options = [f"{key}={url.query[key]}" for key in ADDRESS_OPTIONS if key in url.query]
    return f"{url.get_backend_name()}:{url.host or ''}:{url.port or ''}:{name}:{':'.join(options)}"


def is_in_memory(url: URL) -> bool:
    """Whether it is an SQLite that lives in this process only."""
    in_memory = url.database in (None, "", ":memory:") or url.query.get("mode") == "memory"
    return url.get_backend_name() == "sqlite" and in_memory


def digest(url: URL) -> str:
    """Some characters that stand for the address."""
    return _hashed(address(url))


def _hashed(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_CHARACTERS]


def group_name(url: URL) -> str:
    """The group of producers that use this database and have no group of their own."""
    name = (
        Path(url.database or "memory").stem
        if url.get_backend_name() == "sqlite"
        else url.database or "database"
    )
    return f"sql-{re.sub('[^A-Za-z0-9_-]', '-', name)[:GROUP_NAME_CHARACTERS]}-{digest(url)}"


def mark(url: URL, identity: str) -> str:
    """What the xids of a table begin with: its database's address and its own identity are in it."""
    return f"{PREFIX}.{_hashed(f'{address(url)}:{identity}')}."


def new_xid(url: URL, identity: str) -> str:
    """A name for a transaction that was never used before; PostgreSQL shows it in pg_prepared_xacts, too."""
    return mark(url, identity) + os.urandom(RANDOM_BYTES).hex()


def has_two_phase_driver(engine: Engine) -> bool:
    """Whether SQLAlchemy can prepare a transaction of this database, if the database lets it."""
    return engine.dialect.name == "postgresql" and engine.dialect.driver in TWO_PHASE_DRIVERS
