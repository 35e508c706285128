"""Where dead letters are kept, as users write it: PATH, a SQLAlchemy URL, or "topic:NAME"."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import Final, NamedTuple

from tfmq import limits
from tfmq.errors import BadRequest
from tfmq.offsets.storage import shown_url

_NODE: Final = re.compile(r"[0-9A-Za-z_-]{0,64}")
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


OWN_STORE: Final = "~/.local/state/tfmq/NODE/GROUP.db"
"""What a consumer's `dead_letters` says unless it is told: `own_path` of its group and its broker."""


def default_path(group: str, folder: Path | None = None, broker: str = "") -> str:
    """The store of a group of `broker` that was told of none: ~/.local/state/tfmq/NODE/GROUP.db, or one in `folder`;
    without a broker the one that earlier releases used for all brokers, ~/.local/state/tfmq/GROUP.db."""
    return str((folder or state_folder()) / broker / f"{group}{SUFFIX}")


def own_path(group: str, broker: str) -> str:
    """`default_path`; a store that an earlier release made is used further, as long as there is no newer one."""
    found, earlier = default_path(group, broker=broker), default_path(group)
    return earlier if os.path.isfile(earlier) and not os.path.exists(found) else found


def broker_name(node: str) -> str:
    """A broker's id as it stands in letters and paths: as it is, or, where a broker calls itself something that is no
    name of a folder, its hash."""
    if _NODE.fullmatch(node):
        return node
    return hashlib.sha256(node.encode(errors="replace")).hexdigest()[:32]
