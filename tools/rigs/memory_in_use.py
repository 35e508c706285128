"""How many bytes a process has allocated and not freed, as glibc's allocator counts them.

Resident memory also has what allocators keep after a peak; that comes and goes with how peaks fall, and hides a small
leak as well as it looks like one. With `PYTHONMALLOC=malloc` (ENVIRONMENT) each object of Python is a block of glibc's
allocator, as are those of OpenSSL and SQLite, so the sum of the blocks in use is what the process holds.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, cast

ENVIRONMENT: Final = {
    "PYTHONMALLOC": "malloc",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "131072",
}
"""With fixed limits glibc returns large blocks at once. By default it keeps more, the more often one was freed."""
FILE_VARIABLE: Final = "TFMQ_TEST_MEMORY_FILE"
PERIOD_SECONDS: Final = 5.0


class _MallInfo(ctypes.Structure):
    """`struct mallinfo2` of glibc 2.33 and later (mallinfo(3))."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    ]


@functools.cache
def _mallinfo2() -> Callable[[], _MallInfo]:
    """The function of the C library, made once: each object for it would be garbage that the next count has in it."""
    function = ctypes.CDLL(None).mallinfo2
    function.restype = _MallInfo
    return cast(Callable[[], _MallInfo], function)


def bytes_in_use() -> int:
    """Return the bytes of all allocated blocks of this process, of all arenas and of blocks with their own mapping.

    Raises AttributeError where the C library is not glibc 2.33 or later.
    """
    found = _mallinfo2()()
    return int(found.uordblks) + int(found.hblkhd)


def write_in_use() -> None:
    """Write `bytes_in_use` into the file that FILE_VARIABLE names, again and again, from a thread; else do nothing."""
    if not (name := os.environ.get(FILE_VARIABLE)):
        return
    path = Path(name)
    bytes_in_use()  # where it cannot be had, the process fails at its start

    def run() -> None:
        while True:
            unfinished = path.with_name(f"{path.name}.new")
            unfinished.write_text(f"{os.getpid()} {bytes_in_use()}\n")
            unfinished.replace(path)
            time.sleep(PERIOD_SECONDS)

    threading.Thread(target=run, daemon=True).start()


def read_in_use(path: Path, pid: int) -> int | None:
    """Return what process `pid` has written last; None if it has not written yet."""
    try:
        writer, size = path.read_text().split()
    except OSError:
        return None
    return int(size) if int(writer) == pid else None
