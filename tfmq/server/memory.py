"""How the C library keeps memory that was freed: long enough that the next request finds it warm.

Left alone, glibc hands every larger buffer back to the system at once and takes it again for the next reply,
page by page: half of the processor time of a fetch (measured: 190 against 80 ns a record of 100 bytes, 1,400
against 500 ns for 1 KB). So larger buffers stay with the process while it works, and `give_back` returns what
is left over when it is quiet. Elsewhere than on glibc both do nothing.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final

TRIM_THRESHOLD: Final = -1
MAP_THRESHOLD: Final = -3
"""Numbers of two parameters of glibc's mallopt, from its malloc.h."""
KEPT_BYTES: Final = 32 << 20
"""Free memory at the heap's end that is kept: a turn's reads and replies, well inside the memory of a server
under load.
"""
MAPPED_BYTES: Final = 16 << 20
"""Only a buffer as large as the largest frame gets a mapping of its own, which goes back when it is freed."""


def keep_freed() -> bool:
    """Keep up to KEPT_BYTES of freed memory; whether the C library does."""
    mallopt = _function("mallopt", ctypes.c_int, ctypes.c_int)
    if mallopt is None:
        return False
    return bool(mallopt(MAP_THRESHOLD, MAPPED_BYTES) and mallopt(TRIM_THRESHOLD, KEPT_BYTES))


def give_back() -> bool:
    """Return to the system what is free; whether there was anything."""
    trim = _function("malloc_trim", ctypes.c_size_t)
    return trim is not None and bool(trim(0))


def _function(name: str, *arguments: Any) -> Any:
    """A function of the C library; None where it has none of that name."""
    function = getattr(ctypes.CDLL(None), name, None)
    if function is not None:
        function.argtypes = list(arguments)
        function.restype = ctypes.c_int
    return function
