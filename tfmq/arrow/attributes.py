"""Keys and tags out of a column of attributes; docs/protocol.md has the attribute's table."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from journal.record.format import Buffer
from tfmq.arrow.fields import Array, byte_strings
from tfmq.arrow.layout import Layout, Span, layout_of
from tfmq.errors import DecodeFailed
from tfmq.message import Attribute, decode_attribute

NAMES: Final = ("key", "tag")


class Unreadable(DecodeFailed):
    """The attribute of row `row` cannot be read."""

    def __init__(self, row: int, reason: str) -> None:
        super().__init__(reason)
        self.row = row


class Attributes:
    """The attributes at `begins` to `ends` of `data`, in order; rows not `having` one are null."""

    def __init__(self, data: Buffer, begins: Array, ends: Array, having: Array) -> None:
        self._data = data
        self._begins = begins
        self._ends = ends
        self._having = having

    @cached_property
    def layout(self) -> Layout:
        """Where their fields are."""
        return layout_of(self._data, self._begins, self._ends, self._having)

    def column(self) -> pa.BinaryArray:
        """Their bytes."""
        if not self._having.any():
            return pa.nulls(len(self._having), pa.binary())
        return byte_strings(self._data, self._begins, self._ends, self._having)

    def fields(self, *names: str, lenient: bool = False) -> dict[str, pa.Array]:
        """Columns of NAMES: the key (text as its UTF-8), the tag; null where there is none.

        What is no attribute raises `Unreadable`; `lenient`: it has neither.
        """
        types = {"key": pa.binary(), "tag": pa.string()}
        if not self._having.any():
            return {name: pa.nulls(len(self._having), types[name]) for name in names}
        layout = self.layout
        rest = np.flatnonzero(~layout.plain)
        if not _is_text(self._data, layout):
            rest = np.flatnonzero(self._having)
        slow = self._decoded(rest, lenient)
        found = {}
        for name in names:
            span = layout.keys if name == "key" else layout.tags
            column = byte_strings(self._data, span.begins, span.ends, span.there).cast(types[name])
            if len(rest):
                mask = np.zeros(len(self._having), dtype=bool)
                mask[rest] = True
                column = pc.replace_with_mask(column, pa.array(mask), pa.array(slow[name], types[name]))
            found[name] = column
        return found

    def _decoded(self, rows: Array, lenient: bool) -> dict[str, list[Any]]:
        """Key and tag of `rows` by the decoder of the messages, each distinct attribute once."""
        known: dict[bytes, Attribute] = {}
        keys: list[bytes | None] = []
        tags: list[str | None] = []
        view = memoryview(self._data)
        for row in rows.tolist():
            data = bytes(view[int(self._begins[row]) : int(self._ends[row])])
            attribute = known.get(data)
            if attribute is None:
                try:
                    attribute = known[data] = decode_attribute(data) if data else Attribute()
                except DecodeFailed as error:
                    if not lenient:
                        raise Unreadable(row, str(error)) from None
                    attribute = known[data] = Attribute()
            key = attribute.key
            keys.append(key.encode() if isinstance(key, str) else key)
            tags.append(attribute.tag)
        return {"key": keys, "tag": tags}


def _is_text(data: Buffer, layout: Layout) -> bool:
    """True if all that is text is UTF-8."""
    return _text_holds(data, layout.keys) and _text_holds(data, layout.tags)


def _text_holds(data: Buffer, span: Span) -> bool:
    rows = np.flatnonzero(span.text)
    if not len(rows):
        return True
    try:
        byte_strings(data, span.begins[rows], span.ends[rows]).cast(pa.string())
    except pa.ArrowInvalid:
        return False
    return True
