"""Where dead letters are kept, as users write it: PATH, a SQLAlchemy URL, or "topic:NAME"."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final, NamedTuple

from tfmq import limits
from tfmq.errors import BadRequest
from tfmq.urls import shown_url

TOPIC_PREFIX: Final = "topic:"
SUFFIX: Final = ".db"
_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9_]*(\+[A-Za-z0-9_]+)?://")


class Address(NamedTuple):
    """`kind`: "path", "url" or "topic" · `value`: the path, the URL, the topic's name."""

    kind: str
    value: str

    def __str__(self) -> str:
        """As it may be shown and logged: a URL without its password."""
        if self.kind == "topic":
            return f"{TOPIC_PREFIX}{self.value}"
        return shown_url(self.value) if self.kind == "url" else self.value


def parse_address(where: str | os.PathLike[str]) -> Address:
    """What `where` names. Raises `BadRequest` for what names no store."""
    if isinstance(where, os.PathLike):
        return Address("path", os.fspath(where))
    if not isinstance(where, str) or not where:
        raise BadRequest(f"dead_letters={where!r} names no store: {ALLOWED}.")
    if where.startswith(TOPIC_PREFIX):
        name = where.removeprefix(TOPIC_PREFIX)
        if not limits.valid_name(name):
            raise BadRequest(f"{name!r} is not a topic's name: 1 to 249 of A-Z a-z 0-9 . _ -")
        return Address("topic", name)
    if _URL.match(where):
        return Address("url", where)
    return Address("path", where)


ALLOWED: Final = "it takes a path, a SQLAlchemy URL (sqlite:///..., postgresql+psycopg://...) or topic:NAME"


def state_folder() -> Path:
    """Where programs of this user keep what is theirs: $XDG_STATE_HOME, else ~/.local/state."""
    told = os.environ.get("XDG_STATE_HOME")
    return (Path(told) if told else Path.home() / ".local" / "state") / "tfmq"


OWN_STORE: Final = "~/.local/state/tfmq/GROUP.db"
"""What a consumer's `dead_letters` says unless it is told: `default_path` of its group."""


def default_path(group: str, folder: Path | None = None) -> str:
    """The store of a group that was told of none: ~/.local/state/tfmq/GROUP.db, or the one in `folder`."""
    return str((folder or state_folder()) / f"{group}{SUFFIX}")
