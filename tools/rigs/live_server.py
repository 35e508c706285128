"""A tfmq-server process that rigs start, kill and start again on the same folder and port."""

import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

START_SECONDS = 60.0


class LiveServer:
    """`start`, `kill` (SIGKILL), `stop` (SIGTERM); `address` stays the same after the first start."""

    program: Sequence[str] = (sys.executable, "-m", "tfmq.server.main")
    alive: ClassVar["set[LiveServer]"] = set()
    """Those that were started and not ended: what a test that failed has to clear away."""

    def __init__(self, data: Path, *settings: str) -> None:
        self.data, self.settings, self.address = data, settings, "127.0.0.1:0"
        self.log = data.parent / "server.log"
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Start it and wait until it is ready. Raises RuntimeError with the end of its log when it is not."""
        command = [*self.program, "--data", str(self.data), "--listen", self.address]
        for setting in ("http.listen=", *self.settings):
            command += ["--set", setting]
        self.alive.add(self)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        guard = threading.Timer(START_SECONDS, self.process.kill)
        guard.start()
        assert self.process.stdout is not None
        words = self.process.stdout.readline().split()
        guard.cancel()
        if len(words) != 2 or words[0] != "ready":
            raise RuntimeError(f"the server did not start: {self.log.read_text()[-2000:]}")
        self.address = words[1]

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self._end(self._running().kill)

    def stop(self) -> int:
        """SIGTERM; the exit code. A server that does not stop in time is killed, which is an error here."""
        return self._end(self._running().terminate)

    def _running(self) -> "subprocess.Popen[str]":
        assert self.process is not None
        return self.process

    def _end(self, signal: "object") -> int:
        process = self._running()
        assert callable(signal)
        signal()
        try:
            return process.wait(START_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise RuntimeError(f"the server did not stop: {self.log.read_text()[-2000:]}") from None
        finally:
            self.alive.discard(self)
            if process.stdout is not None:
                process.stdout.close()
