"""What this server calls itself."""

from __future__ import annotations

import functools


@functools.cache
def server_name() -> str:
    """ "tfmq 0.1.0"; read from the installed package, and only when somebody asks."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"tfmq {version('tfmq')}"
    except PackageNotFoundError:
        return "tfmq (not installed)"
