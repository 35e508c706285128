"""Numbers and byte strings that lie scattered in a buffer, gathered into arrays without a loop."""

from __future__ import annotations

import sys
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from journal.record.format import Buffer

Array = npt.NDArray[Any]

POSITION_MAX: Final = (1 << 31) - 1
"""Arrow's binary columns count bytes with 31 bits."""


def numbers(data: Buffer, positions: Array, type: str) -> Array:
    """The unsigned big-endian numbers ("u4", "u8") at `positions` of `data`, all of which must lie inside it."""
    size = np.dtype(type).itemsize
    if len(data) < size:
        return np.empty(0, dtype=type)
    every: Any = np.ndarray((len(data) - size + 1,), f"={type}", data, 0, (1,))
    found: Array = every[positions]
    return found.byteswap() if sys.byteorder == "little" else found


def byte_strings(data: Buffer, begins: Array, ends: Array, valid: Array | None = None) -> pa.BinaryArray:
    """`data[begin:end]` of each pair, as a column of its own memory; null where not `valid`.

    The pairs are in order and do not overlap: so the buffer can be seen as a column of what is wanted and what lies
    between, of which every second is taken.
    """
    count = len(begins)
    if not count:
        return pa.array([], pa.binary())
    edges = np.empty(2 * count, dtype=np.int32)
    edges[0::2] = begins
    edges[1::2] = ends
    alternating = pa.BinaryArray.from_buffers(
        pa.binary(), 2 * count - 1, [None, pa.py_buffer(edges), pa.py_buffer(data)]
    )
    found = alternating.filter(every_second(2 * count - 1))
    if valid is None or valid.all():
        return found
    _, offsets, values = found.buffers()
    return pa.BinaryArray.from_buffers(pa.binary(), count, [bitmap(valid), offsets, values])


def edges_of(column: pa.BinaryArray) -> tuple[Buffer, Array]:
    """(bytes, places) of a binary column, without a copy: value n lies from place n to place n + 1."""
    _, offsets, values = column.buffers()
    edges: Array = np.frombuffer(offsets, np.int32, len(column) + 1, 4 * column.offset)
    return memoryview(values if values is not None else b""), edges


def every_second(count: int) -> pa.BooleanArray:
    """True, False, True ..."""
    bits = pa.py_buffer(b"\x55" * (count // 8 + 1))
    return pa.BooleanArray.from_buffers(pa.bool_(), count, [None, bits])


def bitmap(valid: Array) -> pa.Buffer:
    """A validity bitmap as Arrow has it."""
    return pa.py_buffer(np.packbits(valid, bitorder="little").tobytes())
