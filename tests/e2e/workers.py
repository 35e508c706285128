"""Programs in processes of their own: what they say, line by line, and how they are killed."""

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from types import TracebackType

SECONDS = 60.0


class Worker:
    """A Python program with arguments, between `with` and its end, killed at the latest then."""

    def __init__(self, program: str, *arguments: str) -> None:
        self.lines: list[str] = []
        self._said: queue.Queue[str] = queue.Queue()
        self._process = subprocess.Popen(
            [sys.executable, "-c", program, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._said.put(line.rstrip("\n"))
        self._said.put("")

    def wait_for(self, *words: str, seconds: float = SECONDS) -> None:
        """Until it says a line that begins with one of `words`."""
        until = time.monotonic() + seconds
        while True:
            line = self._said.get(timeout=max(0.0, until - time.monotonic()))
            self.lines.append(line)
            if line.startswith(words):
                return
            assert line or self._process.poll() is None, "\n".join(self.lines)

    def say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()
        self._process.wait(SECONDS)

    def stand_still(self) -> None:
        os.kill(self._process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)

    def __enter__(self) -> "Worker":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        self._reader.join(SECONDS)
        for end in (self._process.stdin, self._process.stdout):
            assert end is not None
            end.close()
