"""Addresses of databases as they may be shown and logged: without what a person wrote into them in confidence."""

from __future__ import annotations

import re
from typing import Final

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
