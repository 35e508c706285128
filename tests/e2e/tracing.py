"""Faults in the system calls of a live server, by strace: the Nth call fails, or is slow."""

import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tools.rigs.live_server import LiveServer

ATTACH_SECONDS = 20.0

# Linux AIO forces inside the kernel, where strace cannot reach.
WITHOUT_AIO = (
    "import journal.linux_aio; journal.linux_aio.AioFsyncQueue.open = classmethod(lambda cls: None);"
    "from tfmq.server.main import main; main()"
)


class ThreadedServer(LiveServer):
    """A server as on a system that has no Linux AIO: its forces are system calls of its threads."""

    program = (sys.executable, "-c", WITHOUT_AIO)


class Tracer:
    """`strace` attached to every thread of a process; `calls` are the lines that it wrote so far."""

    def __init__(self, log: Path) -> None:
        self.log = log

    def calls(self, word: str = "") -> list[str]:
        """The traced calls, those with `word` in them."""
        return [line for line in self.log.read_text().splitlines() if word in line]

    def wait_for(self, word: str, seconds: float = ATTACH_SECONDS) -> None:
        """Until a call with `word` was seen."""
        until = time.monotonic() + seconds
        while not self.calls(word):
            assert time.monotonic() < until, f"no {word} in {self.log.read_text()[-1000:]}"
            time.sleep(0.01)


@contextmanager
def injected(process: subprocess.Popen[str], folder: Path, *faults: str, path: Path | None = None) -> Iterator[Tracer]:
    """`faults` as strace's inject option takes them, from now to the end of the block; with `path` only for calls on
    that file. Skips the test where that cannot be had.
    """
    if shutil.which("strace") is None:
        pytest.skip("cannot be had here: strace is not installed")
    log = folder / f"strace-{time.monotonic_ns()}"
    log.touch()
    names = ",".join(dict.fromkeys(fault.split(":")[0] for fault in faults))
    command = ["strace", "-f", "-p", str(process.pid), "-o", str(log), "-e", f"trace={names}"]
    for fault in faults:
        command += ["-e", f"inject={fault}"]
    if path is not None:
        command += ["-P", str(path.resolve())]
    tracer = subprocess.Popen(command, stderr=subprocess.PIPE)
    try:
        attached(tracer)
        yield Tracer(log)
    finally:
        tracer.send_signal(signal.SIGTERM)
        tracer.wait(ATTACH_SECONDS)
        assert tracer.stderr is not None
        tracer.stderr.close()


def attached(tracer: subprocess.Popen[bytes]) -> None:
    """Waits until strace says that it is attached."""
    assert tracer.stderr is not None
    until, said = time.monotonic() + ATTACH_SECONDS, b""
    while b"attached" not in said:
        ready, _, _ = select.select([tracer.stderr], [], [], max(0.0, until - time.monotonic()))
        more = os.read(tracer.stderr.fileno(), 4096) if ready else b""
        said += more
        if not more:
            if b"not permitted" in said:
                pytest.skip(f"cannot be had here: {said.decode().strip()}")
            raise AssertionError(f"strace did not attach: {said!r}")
