"""The files of the page: read once, and served with the hash of their contents as their version."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Final, NamedTuple

FOLDER: Final = Path(__file__).parent / "static"
INDEX: Final = "index.html"
TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
NAMES: Final = (
    INDEX,
    "page.css",
    "icon.svg",
    "main.js",
    "api.js",
    "chart.js",
    "dead_letters.js",
    "delayed.js",
    "dialog.js",
    "dom.js",
    "groups.js",
    "overview.js",
    "payload.js",
    "topics.js",
    "transactions.js",
)
"""Every file of the page. A file that is not listed here is not served."""


class StaticFile(NamedTuple):
    """One file. `etag` changes with the contents."""

    body: bytes
    content_type: str
    etag: str


@functools.cache
def static_file(name: str) -> StaticFile:
    """Return a file of NAMES."""
    path = FOLDER / name
    body = path.read_bytes()
    return StaticFile(body, TYPES[path.suffix], f'"{hashlib.sha256(body).hexdigest()[:32]}"')
