"""A pipe that lets a thread leave its `poll`; made when it is first polled."""

from __future__ import annotations

import contextlib
import os

_DRAIN_BYTES = 4096


class WakePipe:
    """`descriptor` is what to poll; `ring` makes it readable, `drain` quiet again."""

    def __init__(self) -> None:
        self._read = self._write = -1

    @property
    def descriptor(self) -> int:
        """The end to poll for reading."""
        if self._read < 0:
            self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        return self._read

    def ring(self) -> None:
        """From any thread or signal handler. Nothing happens where nobody ever polled."""
        if self._write >= 0:
            with contextlib.suppress(BlockingIOError):  # a full pipe wakes as well
                os.write(self._write, b"w")

    def drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while len(os.read(self._read, _DRAIN_BYTES)) == _DRAIN_BYTES:
                pass

    def close(self) -> None:
        """Twice is harmless; `descriptor` makes a new one."""
        ends = (self._read, self._write)
        self._read = self._write = -1
        for descriptor in ends:
            if descriptor >= 0:
                os.close(descriptor)
