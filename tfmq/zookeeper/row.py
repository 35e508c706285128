"""What is in the nodes of one offset, to and from bytes.

The node of the layout has `0-OFFSET`. Below it, `tfmq` has all of the stored offset; both are written in one
transaction of ZooKeeper. Somebody else's tool may set the first one alone: then that is where the group goes on.
"""

from __future__ import annotations

import json
from typing import Any, Final

from tfmq.errors import Damaged
from tfmq.offsets.storage import NO_OFFSET, StoredOffset

BYTES_MAX: Final = 4096
"""Far more than a row needs; larger ones are not ours."""


def offset_data(stored: StoredOffset) -> bytes:
    """The node that everybody reads; empty where nothing was saved."""
    return b"" if stored.offset == NO_OFFSET else b"0-%d" % stored.offset


def row_data(stored: StoredOffset) -> bytes:
    """The node below it."""
    return json.dumps(stored._asdict()).encode()


def stored_offset(path: str, offset: bytes | None, row: bytes | None) -> StoredOffset | None:
    """What the two nodes say; None: nothing is there. Raises Damaged, naming `path`, for what says nothing."""
    if offset is None:
        return None
    kept = StoredOffset(NO_OFFSET) if row is None else _row(path, row)
    shown = _offset(path, offset)
    if shown == kept.offset:
        return kept
    return StoredOffset(shown, 0, kept.incarnation, -1, kept.generation)


def _offset(path: str, data: bytes) -> int:
    """MetaMorphosis writes the id of a message and a dash before the offset; the offset alone is taken, too."""
    text = data.decode("ascii", "replace").rpartition("-")[2] if len(data) <= BYTES_MAX else "?"
    if not data:
        return NO_OFFSET
    if not text.isdecimal():
        raise Damaged(f"The node {path} holds no offset but {data[:40]!r}; it looks like 0-12345.")
    return int(text)


def _row(path: str, data: bytes) -> StoredOffset:
    try:
        found = json.loads(data) if len(data) <= BYTES_MAX else None
    except ValueError:
        found = None
    if not isinstance(found, dict) or not all(
        type(found.get(field)) is int for field in StoredOffset._fields
    ):
        raise Damaged(
            f"The node {path}/tfmq holds no offset but {data[:40]!r}; delete it to begin anew there."
        )
    return StoredOffset(*(_number(found, field) for field in StoredOffset._fields))


def _number(found: dict[str, Any], field: str) -> int:
    return int(found[field])
