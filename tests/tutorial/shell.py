"""A shell for commands that are typed one by one, each after the output of the one before."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from queue import Empty, Queue
from types import TracebackType

SECONDS = 100.0
"""Nothing on a page takes so long, on however busy a machine."""
GRACE_SECONDS = 10.0
LOOK_SECONDS = 0.05
JOB_ENDED = re.compile(r"\[\d+\][-+ ] |bash: line \d+: +\d+ Killed ")
DONE = "-- that was it --"


class Shell:
    """bash with job control in `folder`; errors are printed with the rest, as on a terminal. What is still running in
    the background when it is left is ended.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str], seconds: float = SECONDS) -> None:
        self._seconds = seconds
        self._shell = subprocess.Popen(
            ["bash", "--norc"],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._lines: Queue[str] = Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> Shell:
        self._reader.start()
        self._say("set -m")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._shell.stdin is not None
        self._shell.stdin.close()
        for number in (signal.SIGTERM, signal.SIGKILL):
            deadline = time.monotonic() + GRACE_SECONDS
            while (running := self._session()) and time.monotonic() < deadline:
                for process in running:
                    with suppress(ProcessLookupError):
                        os.kill(process, number)
                time.sleep(LOOK_SECONDS)
        self._shell.wait(SECONDS)

    def _session(self) -> list[int]:
        """The processes that it began, and theirs, as long as they run."""
        found = []
        for entry in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                state, _, _, session = entry.read_text().rpartition(")")[2].split()[:4]
                if int(session) == self._shell.pid and state != "Z":
                    found.append(int(entry.parent.name))
        return found

    def type(self, command: str, lines: int) -> list[str]:
        """What is printed until the command has ended and `lines` lines are there; it must do well."""
        self._say(f"{command}\nprintf '\\n%s %d\\n' '{DONE}' $?")
        printed: list[str] = []
        deadline = time.monotonic() + self._seconds
        ended = False
        while not ended or len(printed) < lines:
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except Empty:
                break
            if line.startswith(DONE):
                ended = True
                if line != f"{DONE} 0":
                    raise AssertionError("\n".join([f"$ {command}", *printed, line]))
            elif line and not JOB_ENDED.match(line):
                printed.append(line)
        return printed

    def _say(self, text: str) -> None:
        assert self._shell.stdin is not None
        self._shell.stdin.write(f"{text}\n")
        self._shell.stdin.flush()

    def _read(self) -> None:
        assert self._shell.stdout is not None
        for line in self._shell.stdout:
            self._lines.put(line.rstrip("\n"))
