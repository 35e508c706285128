"""What the machine itself does in this run: loopback, disk, one append with its fsync, one echo."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from tools.bench import disk
from tools.bench.figures import Figure, alternately, median, spread
from tools.bench.single import COUNT, FRAME_BYTES, echo, echo_seconds, on_processor

LOOPBACK_SECONDS = 2.0
READ_BYTES = 1 << 18
GROUP_BYTES = 1 << 20
DISK_BYTES = 1 << 29

SENDER = """
import socket, sys
link = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
data = bytes(1 << 20)
try:
    while True:
        link.sendall(data)
except OSError:
    pass
"""


def loopback_mb_per_second() -> float:
    """MB a second that this process receives by TCP from another one."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender = subprocess.Popen([sys.executable, "-c", SENDER, str(listener.getsockname()[1])])
        try:
            link, _ = listener.accept()
            with link:
                buffer, received = bytearray(READ_BYTES), 0
                begun = time.perf_counter()
                while (seconds := time.perf_counter() - begun) < LOOPBACK_SECONDS:
                    received += link.recv_into(buffer)
        finally:
            sender.kill()
            sender.wait()
    return received / 1e6 / seconds


def pinned_echo_seconds(port: int) -> float:
    with on_processor(0):
        return echo_seconds(port)


def measure(runs: int, peers: bool) -> list[Figure]:
    """Loopback in MB/s, the disk in MB/s and in us, an echo in us, as the scheduler places its ends and on two."""
    folder = Path(tempfile.gettempdir())
    with ExitStack() as stack:
        port = stack.enter_context(echo())
        with on_processor(1):
            pinned_port = stack.enter_context(echo())
        loopback, written, forced, echoed, pinned = alternately(
            runs,
            loopback_mb_per_second,
            lambda: disk.sequential_mb_per_second(GROUP_BYTES, DISK_BYTES, folder),
            lambda: 1e6 * median(disk.force_seconds(FRAME_BYTES, COUNT, str(folder))),
            lambda: 1e6 * echo_seconds(port),
            lambda: 1e6 * pinned_echo_seconds(pinned_port),
        )
    return [
        Figure("the machine", "TCP over loopback, one connection", median(loopback), "MB/s", note=spread(loopback)),
        Figure("the machine", "write + fdatasync of 1 MiB", median(written), "MB/s", note=spread(written)),
        Figure("the machine", f"append + fdatasync of {FRAME_BYTES} bytes", median(forced), "us", note=spread(forced)),
        Figure("the machine", "raw Twisted echo", median(echoed), "us", note=spread(echoed)),
        Figure("the machine", "raw Twisted echo, pinned", median(pinned), "us", note=spread(pinned)),
    ]
