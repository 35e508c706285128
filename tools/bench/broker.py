"""A tfmq-server process of our own for a benchmark, with its memory and processor time; stops with its context."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

START_SECONDS = 60.0
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass
class Broker:
    """A running server: its address, process id, data folder and the seconds from exec to `ready`."""

    address: str
    process: "subprocess.Popen[str]"
    data: Path
    start_seconds: float

    def rss_mb(self) -> float:
        """Resident memory now, in MB."""
        return self._status_mb("VmRSS:")

    def peak_rss_mb(self) -> float:
        """The most resident memory that it has had, in MB."""
        return self._status_mb("VmHWM:")

    def _status_mb(self, name: str) -> float:
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1]) * 1024 / 1e6
        return float("nan")

    def cpu_seconds(self) -> float:
        """Processor time used so far, user and system."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS_PER_SECOND


SERVER = "tfmq.server.main"


def start(data: Path, *settings: str, program: str = SERVER) -> Broker:
    """Start a server on `data`; `settings` are `section.key=value`, `program` is a module."""
    command = [sys.executable, "-m", program, "--data", str(data), "--listen", "127.0.0.1:0"]
    command += ["--set", "http.listen="]
    for setting in settings:
        command += ["--set", setting]
    begun = time.perf_counter()
    with (data.parent / "server.log").open("ab") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    assert process.stdout is not None
    words = process.stdout.readline().split()
    if len(words) != 2:
        raise RuntimeError(f"the server did not start: {(data.parent / 'server.log').read_text()[-600:]}")
    return Broker(words[1], process, data, time.perf_counter() - begun)


@contextmanager
def broker(*settings: str, data: Path | None = None, program: str = SERVER) -> Iterator[Broker]:
    """A server on a temporary folder (or on `data`), stopped at the end."""
    with tempfile.TemporaryDirectory(prefix="tfmq-bench-") as folder:
        server = start(data or Path(folder) / "data", *settings, program=program)
        try:
            yield server
        finally:
            server.process.terminate()
            try:
                server.process.wait(START_SECONDS)
            except subprocess.TimeoutExpired:
                server.process.kill()
                server.process.wait()
