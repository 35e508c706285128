"""Addresses of databases as they may be shown and logged: without what a person wrote into them in confidence."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable

from tfmq.errors import Fenced

_USER: Final = re.compile(r"//([^:/@]*):.*@", re.DOTALL)
"""Up to the last @: a password that should have been escaped has some of its own."""
_USER_ALONE: Final = re.compile(r"^([^:/@]*):.*@", re.DOTALL)
_OPTION: Final = re.compile(
    r"([?&;][^=&;]*(?:pass|pwd|secret|token|credential|odbc_connect)[^=&;]*=)[^&;]*", re.IGNORECASE
)


def shown_url(text: str) -> str:
    """`text` without passwords, wherever they stand in a URL, and also where it is not quite one."""
    masked = _USER.sub(r"//\1:***@", text) if "//" in text else _USER_ALONE.sub(r"\1:***@", text)
    return _OPTION.sub(r"\1***", masked)


# Which troubles of a file or a database do not get better by waiting: whoever waited for them would wait for ever.

HOPELESS: Final = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG}
)
"""Of an operating system."""
CANTOPEN: Final = 14
SQLITE: Final = frozenset({3, 8, 23, 26, 1544})
"""Of SQLite: no right, a file that takes no writes, no authorization, no database, a folder that takes no writes."""
POSTGRESQL: Final = frozenset({"28000", "28P01", "3D000", "3F000", "42501"})
"""Of PostgreSQL: no such user or a wrong password, no such database, no such schema, no right."""


def is_hopeless(error: BaseException, path: str | os.PathLike[str] | None = None) -> bool:
    """Whether `error` comes again whatever the time. `path`: the file of an SQLite, which does not say why it cannot
    be opened: too many open files pass, a folder that is not there does not."""
    if isinstance(error, OSError):
        return error.errno in HOPELESS
    origin: Any = getattr(error, "orig", None)  # of SQLAlchemy, which a file of offsets does without
    number = getattr(origin, "sqlite_errorcode", None)
    if number is not None and number & 0xFF == CANTOPEN:
        return path is not None and not str(path).startswith("file:") and not _can_be(Path(path))
    return number in SQLITE or getattr(origin, "sqlstate", None) in POSTGRESQL


def _can_be(path: Path) -> bool:
    """Whether a file could be opened, or made, there."""
    if path.exists():
        return path.is_file() and os.access(path, os.R_OK | os.W_OK)
    return path.parent.is_dir() and os.access(path.parent, os.W_OK | os.X_OK)


def driver_remedy(drivername: str, error: Exception) -> str:
    """What to do where the driver of a URL of SQLAlchemy is not installed: a sentence without its end."""
    module = getattr(error, "name", None)
    if drivername.startswith("postgresql"):
        written = "" if module == "psycopg" else ", and write the URL with postgresql+psycopg://"
        return f'pip install "tfmq[postgresql]"{written}'
    return f"pip install {module}" if module else "install its package with pip"


# What a storage of offsets keeps, and the plug-in interface of all storages.
#
# A storage keeps, by group and partition, a `StoredOffset`. Its generation is the number under which the partition was
# granted, or a later one of the same member; numbers come from a durable counter, so whoever gets a partition has a
# higher one than everybody before. A storage that refuses lower ones keeps a member that lost the partition, and does
# not know it yet, from saving. The default, the broker itself, is not a plug-in: see `tfmq.client.consumer.membership`.

NO_OFFSET: Final = -1
"""The offset of a row that was claimed, and never saved."""


class PartitionName(NamedTuple):
    """One partition of one topic."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"


class StoredOffset(NamedTuple):
    """Where a group goes on in one partition: at byte `offset`, behind `index` messages of the record there (0
    outside compressed batches), in the topic of that `incarnation`, as read at that `epoch` of its log, saved by
    the member to whom the partition was granted under `generation` (0, in a save: under that of the save)."""

    offset: int
    index: int = 0  # type: ignore[assignment]  # hides tuple.index, which nobody needs here
    incarnation: int = 0
    epoch: int = -1
    generation: int = 0


@runtime_checkable
class OffsetStorage(Protocol):
    """A place for offsets. Its methods may wait for a disk or a network; no two are called at the same time.

    `claim` (see `ClaimingStorage`) is what makes it safe against members that lost a partition and do not know it;
    a storage without it is read instead, and fences from the first save of the new owner on.
    """

    def read(self, group: str, partitions: Sequence[PartitionName]) -> Mapping[PartitionName, StoredOffset]:
        """What is kept of these partitions; those without an offset are left out."""
        ...

    def save(self, group: str, generation: int, offsets: Mapping[PartitionName, StoredOffset]) -> None:
        """Keeps `offsets`, each under its own generation (see `under`), and returns when a power cut cannot take them
        back.

        Each partition is for itself: where a higher generation is kept, nothing of it is changed. For those it raises
        `Fenced` (see `fenced`) when all others are kept. Any other error: it is not known what was kept.
        """
        ...

    def close(self) -> None:
        """Gives everything back; twice is harmless."""
        ...


@runtime_checkable
class ClaimingStorage(OffsetStorage, Protocol):
    """A storage that knows a new owner before its first save."""

    def claim(
        self, group: str, generation: int, partitions: Sequence[PartitionName]
    ) -> Mapping[PartitionName, StoredOffset]:
        """Makes `generation` the kept one of each of these partitions, in one step with reading it; those without an
        offset are left out. From then on a save of a lower generation is refused.

        Raises `Fenced` (see `fenced`) for partitions where a higher generation is kept; all others are claimed.
        """
        ...


def under(generation: int, row: StoredOffset) -> StoredOffset:
    """`row` as a save under `generation` keeps it: under the generation of its own, if it has one."""
    return row if row.generation else row._replace(generation=generation)


def claim(
    storage: OffsetStorage, group: str, generation: int, partitions: Sequence[PartitionName]
) -> Mapping[PartitionName, StoredOffset]:
    """As `ClaimingStorage.claim`; a storage that cannot do that is read."""
    if isinstance(storage, ClaimingStorage):
        return storage.claim(group, generation, partitions)
    return storage.read(group, partitions)


def fenced(where: str, group: str, kept: Mapping[PartitionName, int]) -> Fenced:
    """The error of a storage, named by `where`, that keeps a higher generation of the partitions in `kept`."""
    names = ", ".join(f"{name} (generation {kept[name]})" for name in sorted(kept))
    return Fenced(
        f"{where}: another member of group {group} has taken over {names}. (After a broker was set up anew: remove the"
        " group's offsets there, they are of the one before.)",
        partitions=[list(name) for name in sorted(kept)],
    )


def fenced_partitions(error: Fenced, asked: Iterable[PartitionName]) -> Collection[PartitionName]:
    """Which of the partitions that were `asked` for `error` is about: all, where it names none."""
    named = error.details.get("partitions")
    return frozenset(asked) if named is None else frozenset(PartitionName(*each) for each in named)
