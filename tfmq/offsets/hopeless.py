"""Which troubles of a file or a database do not get better by waiting: whoever waited for them would wait for ever."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any, Final

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
