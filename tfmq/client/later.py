"""Names that are settled for a later release, on both faces: whoever types one is told so, not that it is unknown."""

from __future__ import annotations

from typing import NoReturn

from tfmq.errors import NotSupported


def later(what: str, instead: str) -> NoReturn:
    """Raises `NotSupported`."""
    raise NotSupported(f"{what} needs a later release; {instead}.")
