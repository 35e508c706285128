"""Databases that users name by URLs: URLs without passwords, missing drivers, errors that are permanent."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import Any, Final

_USER: Final = re.compile(r"//([^:/@]*):.*@", re.DOTALL)
"""User and password in a URL. Matches up to the last @, because a password may contain an @ that is not escaped."""
_USER_ALONE: Final = re.compile(r"^([^:/@]*):.*@", re.DOTALL)
_OPTION: Final = re.compile(
    r"([?&;][^=&;]*(?:pass|pwd|secret|token|credential|odbc_connect)[^=&;]*=)[^&;]*", re.IGNORECASE
)


def url_without_passwords(text: str) -> str:
    """Return `text` with all passwords masked, even if `text` is not a valid URL."""
    masked = _USER.sub(r"//\1:***@", text) if "//" in text else _USER_ALONE.sub(r"\1:***@", text)
    return _OPTION.sub(r"\1***", masked)


PERMANENT_ERRNOS: Final = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG}
)
"""Errors of the operating system that occur again if the call is repeated."""
SQLITE_CANTOPEN: Final = 14
PERMANENT_SQLITE_CODES: Final = frozenset({3, 8, 23, 26, 1544})
"""Errors of SQLite that occur again if the call is repeated: no permission, read-only, not a database."""
PERMANENT_SQLSTATES: Final = frozenset({"28000", "28P01", "3D000", "3F000", "42501"})
"""Errors of PostgreSQL that occur again if the call is repeated: login, missing database or schema, permission."""


def is_permanent_error(error: BaseException, path: str | os.PathLike[str] | None = None) -> bool:
    """Return whether the call that raised `error` will fail again if it is repeated.

    `path`: the file, if the database is SQLite. SQLite's error "cannot open" gives no reason, so the path is examined:
    a missing directory is a permanent error, too many open files are not.
    """
    if isinstance(error, OSError):
        return error.errno in PERMANENT_ERRNOS
    origin: Any = getattr(error, "orig", None)  # of SQLAlchemy, which is not imported here
    number = getattr(origin, "sqlite_errorcode", None)
    if number is not None and number & 0xFF == SQLITE_CANTOPEN:
        return path is not None and not str(path).startswith("file:") and not _is_accessible(Path(path))
    return number in PERMANENT_SQLITE_CODES or getattr(origin, "sqlstate", None) in PERMANENT_SQLSTATES


def _is_accessible(path: Path) -> bool:
    if path.exists():
        return path.is_file() and os.access(path, os.R_OK | os.W_OK)
    return path.parent.is_dir() and os.access(path.parent, os.W_OK | os.X_OK)


PACKAGES_OF_MODULES: Final = {"MySQLdb": "mysqlclient"}
"""Drivers whose package has another name than its module."""


def driver_install_hint(drivername: str, error: Exception) -> str:
    """Return the end of an error text: how to install the driver that a URL needs. `error`: raised by its import."""
    module = getattr(error, "name", None)
    if drivername.startswith("postgresql"):
        written = "" if module == "psycopg" else ", and write the URL with postgresql+psycopg://"
        return f'pip install "tfmq[postgresql]"{written}'
    module = PACKAGES_OF_MODULES.get(str(module), module)
    return f"pip install {module}" if module else "install its package with pip"
