"""A Spark driver in a process of its own, with its JVM and its Python workers: rigs give it work, and kill it.

It runs `tools.rigs.spark_driver`, to which one line is one piece of work; each is answered by one line. What it
started is found by its session id, which all of its processes share, so `kill` leaves none behind.
"""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar

from tfmq.embedded import terminate_with_parent
from tools.rigs import spark_session

START_SECONDS = 120.0
WORK_SECONDS = 180.0
END_SECONDS = 60.0


class Failed(RuntimeError):
    """The work failed in Spark; the text is what Spark says."""


class Died(RuntimeError):
    """The driver ended before it answered."""


class LiveDriver:
    """`start`, `do`, `kill` (SIGKILL to all that belongs to it), `stop`. Its files, its log too, are in `folder`.

    `master`: as in Spark; local[2,4] has tasks that fail retried, at most three times.
    """

    alive: ClassVar["set[LiveDriver]"] = set()
    """Those that were started and not ended: what a test that failed has to clear away."""

    def __init__(
        self,
        folder: Path,
        master: str = "local[2,4]",
        more: Mapping[str, str] | None = None,
        paths: tuple[Path, ...] = (),
    ) -> None:
        self.folder, self.master, self.more, self.paths = folder, master, dict(more or {}), paths
        self.log = folder / "driver.log"
        self.process: subprocess.Popen[str] | None = None
        self._said: queue.Queue[dict[str, Any] | None] = queue.Queue()

    def start(self) -> None:
        """Start it and wait until it takes work. Raises Died with the end of its log when it does not."""
        self.folder.mkdir(parents=True, exist_ok=True)
        settings = {**spark_session.settings(self.folder, self.master), **self.more}
        self._said = queue.Queue()
        self.alive.add(self)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tools.rigs.spark_driver", json.dumps(settings)],
                cwd=self.folder,
                env=os.environ | spark_session.environment(self.folder, *self.paths),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
                preexec_fn=terminate_with_parent(),
            )
        threading.Thread(target=self._read, args=(self.process, self._said), daemon=True).start()
        self.answer(START_SECONDS)

    @staticmethod
    def _read(process: "subprocess.Popen[str]", said: "queue.Queue[dict[str, Any] | None]") -> None:
        assert process.stdout is not None
        with suppress(ValueError):
            for line in process.stdout:
                if line.startswith("{"):
                    said.put(json.loads(line))
        said.put(None)

    def begin(self, work: Mapping[str, Any]) -> None:
        """Give it work, without waiting for the answer."""
        process = self._running()
        assert process.stdin is not None
        process.stdin.write(json.dumps(work) + "\n")
        process.stdin.flush()

    def answer(self, seconds: float = WORK_SECONDS) -> dict[str, Any]:
        """What it says next. Raises Failed when Spark failed, Died when the driver ended."""
        try:
            said = self._said.get(timeout=seconds)
        except queue.Empty:
            raise TimeoutError(f"no answer in {seconds:.0f} s: {self.last_words()}") from None
        if said is None:
            raise Died(self.last_words())
        if "failed" in said:
            raise Failed(said["failed"])
        return said

    def do(self, work: Mapping[str, Any], seconds: float = WORK_SECONDS) -> dict[str, Any]:
        """Give it work and wait for the answer, as `answer` does."""
        self.begin(work)
        return self.answer(seconds)

    def last_words(self) -> str:
        """The end of its log."""
        return self.log.read_text(errors="replace")[-3000:]

    def processes(self) -> list[int]:
        """All of its processes: the driver, its JVM, the Python workers and their daemon."""
        return processes_of(self._running().pid)

    def workers(self) -> list[int]:
        """The Python processes that run tasks: children of the daemon that forks them."""
        mine = self.processes()
        daemons = [process for process in mine if "pyspark.daemon" in command_of(process)]
        parents = {process: parent_of(process) for process in mine}
        return [process for process in mine if parents[process] in daemons]

    def kill(self) -> None:
        """SIGKILL to each of its processes, until there is none."""
        process = self._running()
        until = time.monotonic() + END_SECONDS
        process.kill()
        while left := processes_of(process.pid, zombies=False):
            for each in left:
                with suppress(ProcessLookupError):
                    os.kill(each, signal.SIGKILL)
            if time.monotonic() > until:
                raise RuntimeError(f"processes {left} of the driver did not end")
            time.sleep(0.005)
        process.wait(END_SECONDS)
        self._ended()

    def stop(self) -> None:
        """Have it end by itself, which closes its Spark; what is left of it then is killed."""
        process = self._running()
        assert process.stdin is not None
        with suppress(BrokenPipeError):
            process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
        self.kill()

    def _ended(self) -> None:
        process = self._running()
        self.alive.discard(self)
        with suppress(BrokenPipeError, ValueError):
            assert process.stdin is not None
            process.stdin.close()

    def _running(self) -> "subprocess.Popen[str]":
        assert self.process is not None
        return self.process

    def __enter__(self) -> "LiveDriver":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self in self.alive:
            self.kill()


def stat_of(process: int) -> list[str]:
    """State, parent, group, session, ... of a process; [] if there is none."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def parent_of(process: int) -> int:
    """The process that started it, 0 if it is gone."""
    return int((stat_of(process) or ["", "0"])[1])


def command_of(process: int) -> str:
    """Its command line, "" if it is gone."""
    try:
        return Path(f"/proc/{process}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def processes_of(session: int, *, zombies: bool = True) -> list[int]:
    """All processes of a session, without those that only wait to be asked how they ended if not `zombies`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            stat = stat_of(int(entry.name))
            if stat and int(stat[3]) == session and (zombies or stat[0] != "Z"):
                found.append(int(entry.name))
    return sorted(found)
