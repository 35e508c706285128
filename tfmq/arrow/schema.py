"""The Arrow schema of a topic; docs/arrow.md describes each column."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Final

import pyarrow as pa

from tfmq.errors import BadRequest

SCHEMA: Final = pa.schema(
    [
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("timestamp", pa.timestamp("us", tz="UTC")),
        ("tag", pa.string()),
        ("attributes", pa.binary()),
        ("id", pa.int64()),
    ]
)
"""All columns, in order.

Arrow declares all of them as nullable, but only `key`, `value` (of a tombstone), `tag` and `attributes` can be null.
"""


def project(names: Iterable[str]) -> pa.Schema:
    """Return a schema of the columns `names`, in that order. Raises: BadRequest for an unknown or repeated name."""
    fields = []
    for name in names:
        if name not in SCHEMA.names:
            near = get_close_matches(name, SCHEMA.names, 1)
            meant = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(SCHEMA.names)}."
            raise BadRequest(f"A topic has no column {name!r}: {meant}")
        field = SCHEMA.field(name)
        if field in fields:
            raise BadRequest(f"The column {name!r} is asked for twice.")
        fields.append(field)
    return pa.schema(fields)
