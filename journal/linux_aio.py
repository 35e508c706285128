"""Asynchronous fsync: fdatasync through Linux AIO, without a thread.

An fsync in a worker thread is slow: the worker must be woken, and gets the interpreter lock only when the calling
thread is idle. With AIO, one call passes the fsync to the kernel, and an eventfd becomes readable at its end. Effect
and errors are those of fdatasync. Python's `os` lacks the system calls of AIO, so they are made through ctypes.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import platform
import sys
from collections import deque
from collections.abc import Callable
from struct import Struct
from typing import Any, Final, NamedTuple

from journal.disk import File, RealFile

FsyncCallback = Callable[[OSError | None], None]
"""Called once, in the thread that owns the queue, with the error of the fsync or None."""

CONCURRENT_MAX: Final = 64
"""Maximum concurrent fsyncs of a queue: each forcer has at most one in progress, and there may be several forcers."""
WAIT_SECONDS: Final = 0.05
"""`AioFsync.wait` blocks this long before it checks whether another thread has collected the result."""


class _SystemCallNumbers(NamedTuple):
    """Numbers of the Linux AIO system calls on one kind of machine, for calls through ctypes."""

    setup: int
    destroy: int
    submit: int
    getevents: int


_MACHINES: Final = {"x86_64": _SystemCallNumbers(206, 207, 209, 208), "aarch64": _SystemCallNumbers(0, 1, 2, 4)}
_IOCB: Final = Struct("<QIiHhiQQqQIi")
_EVENT: Final = Struct("<QQqq")
_COMMAND_FDSYNC: Final = 3
_FLAG_EVENTFD: Final = 1
_TIME: Final = Struct("<qq")


class AioFsync:
    """One fsync that was passed to the kernel. When the fsync has ended, `done` is True, `error` its error or None."""

    __slots__ = ("_queue", "callback", "done", "error", "path")

    def __init__(self, queue: AioFsyncQueue, path: str, callback: FsyncCallback) -> None:
        self._queue = queue
        self.path = path
        self.callback = callback
        self.done = False
        self.error: OSError | None = None

    def wait(self) -> OSError | None:
        """Wait, in any thread, for the end of the fsync. Return its error or None. The owner calls `callback` later."""
        while not self.done:
            self._queue.collect(WAIT_SECONDS)
        return self.error


StartFsync = Callable[[File, FsyncCallback], AioFsync | None]
"""The type of `AioFsyncQueue.start`, which returns None if it could not start the fsync."""


class AioFsyncQueue:
    """Passes fsyncs of single files to the kernel. One thread, the owner's, makes all calls except `AioFsync.wait`."""

    def __init__(self, calls: _SystemCallNumbers, context: int, descriptor: int) -> None:
        self._calls = calls
        self._context = context
        self._descriptor = descriptor
        self._numbers = itertools.count(1)
        self.in_progress: dict[int, AioFsync] = {}
        """The fsyncs whose end was not found yet, by number."""
        self._ended: deque[AioFsync] = deque()
        self._block = ctypes.create_string_buffer(_IOCB.size)
        self._blocks = (ctypes.c_void_p * 1)(ctypes.addressof(self._block))
        self._blocks_at = ctypes.addressof(self._blocks)

    @classmethod
    def open(cls) -> AioFsyncQueue | None:
        """Open a queue; None if the system has no AIO or forbids it."""
        calls = _MACHINES.get(platform.machine())
        is_known = sys.platform.startswith("linux") and sys.byteorder == "little"
        if not is_known or calls is None or _call_holding_lock is None:
            return None
        context = ctypes.c_ulong(0)
        if _call_holding_lock(calls.setup, CONCURRENT_MAX, ctypes.addressof(context), 0, 0, 0) != 0:
            return None
        return cls(calls, context.value, os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))

    def fileno(self) -> int:
        """An eventfd, which is readable when an fsync has ended. The caller reads it, then calls `drain_ended`."""
        return self._descriptor

    @property
    def busy(self) -> bool:
        """True if an fsync is in progress, or if one has ended and `drain_ended` has not returned it yet."""
        return bool(self.in_progress or self._ended)

    def start(self, file: File, callback: FsyncCallback) -> AioFsync | None:
        """Start an fsync of everything written to `file`. Return None if the fsync could not be started."""
        if not isinstance(file, RealFile) or len(self.in_progress) >= CONCURRENT_MAX:
            return None
        number = next(self._numbers)
        command = (_COMMAND_FDSYNC, 0, file.fileno(), 0, 0, 0, 0, _FLAG_EVENTFD, self._descriptor)
        _IOCB.pack_into(self._block, 0, number, 0, 0, *command)
        in_flight = self.in_progress[number] = AioFsync(self, file.path, callback)
        if _call_holding_lock(self._calls.submit, self._context, 1, self._blocks_at, 0, 0) != 1:
            del self.in_progress[number]
            return None
        return in_flight

    def drain_ended(self) -> list[AioFsync]:
        """Return each ended fsync once. The caller must call the `callback` of each."""
        self.collect(0.0)
        return [self._ended.popleft() for _ in range(len(self._ended))]

    def collect(self, seconds: float) -> None:
        """Get the ended fsyncs from the kernel; wait up to `seconds` for the first. Any thread. Raises OSError."""
        events = ctypes.create_string_buffer(_EVENT.size * CONCURRENT_MAX)
        time = ctypes.create_string_buffer(_TIME.pack(0, int(seconds * 1e9)))
        call = _call_releasing_lock if seconds else _call_holding_lock
        addresses = (ctypes.addressof(events), ctypes.addressof(time))
        count = call(self._calls.getevents, self._context, 1 if seconds else 0, CONCURRENT_MAX, *addresses)
        if count < 0 and (code := ctypes.get_errno()) != errno.EINTR:
            raise OSError(code, f"the results of fsyncs cannot be read: {os.strerror(code)}")
        for number in range(count):
            key, _, result, _ = _EVENT.unpack_from(events, number * _EVENT.size)
            in_flight = self.in_progress.pop(key)
            if result < 0:
                in_flight.error = OSError(-result, os.strerror(-result), in_flight.path)
            self._ended.append(in_flight)
            in_flight.done = True
        if count > 0 and seconds:
            # The eventfd may have woken the owner before these fsyncs were in `_ended`. So the owner is woken again.
            os.eventfd_write(self._descriptor, 1)

    def close(self) -> None:
        """Close the queue; no fsync may be in progress."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            _call_releasing_lock(self._calls.destroy, self._context, 0, 0, 0, 0)
            os.close(descriptor)


def _system_call(library: Any) -> Any:
    function = getattr(library, "syscall", None)
    if function is not None:
        function.argtypes = [ctypes.c_long] * 6
        function.restype = ctypes.c_long
    return function


_call_holding_lock: Final = _system_call(ctypes.PyDLL(None, use_errno=True))
"""System call that keeps the interpreter lock, for calls that never wait."""
_call_releasing_lock: Final = _system_call(ctypes.CDLL(None, use_errno=True))
"""System call that releases the interpreter lock, so that other threads run while it waits."""
