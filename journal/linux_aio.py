"""Forces that the system carries out by itself: the fdatasync of Linux AIO, without a thread of ours.

A thread that forces a file must be woken, and gets the interpreter's lock only when the owner rests; here the owner
hands the force to the kernel in one call, and an eventfd tells its end. What a force means, and how its error is told,
is the same (in the kernel both are `vfs_fsync`). Python's `os` lacks these calls, so they go through ctypes; where the
system does not have them, `ForceQueue.open` says None, and the caller forces in a thread.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import platform
import sys
from collections import deque
from collections.abc import Callable, Iterator
from struct import Struct
from typing import Any, Final, NamedTuple

from journal.disk import File, RealFile

Landed = Callable[[OSError | None], None]
"""Told once, in the owner's thread, how a force ended."""

FLIGHTS_MAX: Final = 64
"""Forces under way at once: a forcer has one, and there may be several forcers."""
WAIT_SECONDS: Final = 0.05
"""How long `Flight.wait` sleeps before it looks whether somebody else has taken note of the end."""


class _Calls(NamedTuple):
    """The numbers of the system calls, which ctypes needs."""

    setup: int
    destroy: int
    submit: int
    getevents: int


_MACHINES: Final = {"x86_64": _Calls(206, 207, 209, 208), "aarch64": _Calls(0, 1, 2, 4)}
_IOCB: Final = Struct("<QIiHhiQQqQIi")
_EVENT: Final = Struct("<QQqq")
_COMMAND_FDSYNC: Final = 3
_FLAG_EVENTFD: Final = 1
_TIME: Final = Struct("<qq")


class Flight:
    """One force under way. `done` once its end is known, then `error` says how it ended."""

    __slots__ = ("_queue", "done", "error", "landed", "path")

    def __init__(self, queue: ForceQueue, path: str, landed: Landed) -> None:
        self._queue = queue
        self.path = path
        self.landed = landed
        self.done = False
        self.error: OSError | None = None

    def wait(self) -> OSError | None:
        """Sleeps, in any thread, until the force has ended; its error. `landed` is called by the owner all the same."""
        while not self.done:
            self._queue.collect(WAIT_SECONDS)
        return self.error


Begin = Callable[[File, Landed], Flight | None]
"""`ForceQueue.begin`."""


class ForceQueue:
    """Forces of single files. The owner's thread calls all but `Flight.wait`. Made by `open`."""

    def __init__(self, calls: _Calls, context: int, descriptor: int) -> None:
        self._calls = calls
        self._context = context
        self._descriptor = descriptor
        self._numbers = itertools.count(1)
        self._flights: dict[int, Flight] = {}
        self._ended: deque[Flight] = deque()
        self._block = ctypes.create_string_buffer(_IOCB.size)
        self._blocks = (ctypes.c_void_p * 1)(ctypes.addressof(self._block))
        self._blocks_at = ctypes.addressof(self._blocks)

    @classmethod
    def open(cls) -> ForceQueue | None:
        """A queue; None where the system has no AIO, or forbids it."""
        calls = _MACHINES.get(platform.machine())
        if (
            not sys.platform.startswith("linux")
            or sys.byteorder != "little"
            or calls is None
            or _quick is None
        ):
            return None
        context = ctypes.c_ulong(0)
        if _quick(calls.setup, FLIGHTS_MAX, ctypes.addressof(context), 0, 0, 0) != 0:
            return None
        return cls(calls, context.value, os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))

    def fileno(self) -> int:
        """An eventfd: readable when a force has ended; read it, then take `ended`."""
        return self._descriptor

    @property
    def busy(self) -> bool:
        """Whether a force is under way, or has ended and was not taken."""
        return bool(self._flights or self._ended)

    def begin(self, file: File, landed: Landed) -> Flight | None:
        """Starts a force of what was written to `file`; `landed(error)` is to be called when it has ended.

        None, and nothing was begun, where the system does not take it: force it in another way.
        """
        if not isinstance(file, RealFile) or len(self._flights) >= FLIGHTS_MAX:
            return None
        number = next(self._numbers)
        command = (_COMMAND_FDSYNC, 0, file.fileno(), 0, 0, 0, 0, _FLAG_EVENTFD, self._descriptor)
        _IOCB.pack_into(self._block, 0, number, 0, 0, *command)
        flight = self._flights[number] = Flight(self, file.path, landed)
        if _quick(self._calls.submit, self._context, 1, self._blocks_at, 0, 0) != 1:
            del self._flights[number]
            return None
        return flight

    def ended(self) -> Iterator[Flight]:
        """Those that have ended since, each once; whoever takes them calls their `landed`."""
        self.collect(0.0)
        while self._ended:
            yield self._ended.popleft()

    def collect(self, seconds: float) -> None:
        """Takes note of forces that have ended; waits for one at most `seconds`. Any thread."""
        events = ctypes.create_string_buffer(_EVENT.size * FLIGHTS_MAX)
        time = ctypes.create_string_buffer(_TIME.pack(0, int(seconds * 1e9)))
        call = _slow if seconds else _quick
        least = 1 if seconds else 0
        count = call(
            self._calls.getevents,
            self._context,
            least,
            FLIGHTS_MAX,
            ctypes.addressof(events),
            ctypes.addressof(time),
        )
        if count < 0 and (code := ctypes.get_errno()) != errno.EINTR:
            raise OSError(code, f"the ends of forces cannot be learned: {os.strerror(code)}")
        for number in range(count):
            key, _, result, _ = _EVENT.unpack_from(events, number * _EVENT.size)
            flight = self._flights.pop(key)
            if result < 0:
                flight.error = OSError(-result, os.strerror(-result), flight.path)
            self._ended.append(flight)
            flight.done = True
        if count > 0 and seconds:
            # The owner may have been woken, and found nothing, while these were on their way to `_ended`.
            os.eventfd_write(self._descriptor, 1)

    def close(self) -> None:
        """Gives it back; nothing may be under way."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            _slow(self._calls.destroy, self._context, 0, 0, 0, 0)
            os.close(descriptor)


def _system_call(library: Any) -> Any:
    function = getattr(library, "syscall", None)
    if function is not None:
        function.argtypes = [ctypes.c_long] * 6
        function.restype = ctypes.c_long
    return function


_quick: Final = _system_call(ctypes.PyDLL(None, use_errno=True))
"""Keeps the interpreter's lock: for calls that never wait."""
_slow: Final = _system_call(ctypes.CDLL(None, use_errno=True))
