"""Several processes of `tfmq run`: started, started again when they die, begun anew when a source changes, ended.

Each has a process group of its own, so that Ctrl-C in a terminal reaches only this one, which passes it on, once. Each
ends by itself when this one is gone.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Final

from tfmq.cli.sources import Sources

LOOK_SECONDS: Final = 0.1
"""How soon a process that died is seen."""
PAUSE_SECONDS: Final = 1.0
PAUSE_SECONDS_MAX: Final = 30.0
"""Before one that died is started again; doubled each time it did not live for a minute."""
LIVED_SECONDS: Final = 60.0
WRONG_USAGE: Final = 2
"""A process that ends with it would do so each time."""
NEVER_BEGAN: Final = 64
"""Added to the exit code of a process that ended in front of its first message."""
SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


def command_of(target: str, workers: int, order: str, tracebacks: bool, quiet: bool) -> list[str]:
    """The command line of one process."""
    main = "import sys; from tfmq.cli.main import main; main(sys.argv[1:])"
    options = ["--workers", str(workers), "--order", order, "--watched"]
    options += [*([] if tracebacks else ["--no-tracebacks"]), *(["--quiet"] if quiet else [])]
    return [sys.executable, "-c", main, "run", *options, "--", target]


def checked(command: Sequence[str]) -> int:
    """The exit code of a process that only looks whether there is a consumer, and says why not: once, not each."""
    return subprocess.run(
        [*command[: command.index("--")], "--check", "--", command[-1]], check=False
    ).returncode


class Place:
    """One of the processes: who is there, or when the next one is started; `proven`: one before could begin."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.started = 0.0
        self.begin_at = 0.0
        self.pause = PAUSE_SECONDS
        self.over = self.proven = False


class Processes:
    """`say` gets sentences for a person. `folder`: begin anew when a source below it changes; None: never."""

    def __init__(
        self,
        command: Sequence[str],
        count: int,
        *,
        say: Callable[[str], None],
        folder: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._command = list(command)
        self._places = [Place() for _ in range(count)]
        self._say = say
        self._clock = clock
        self._sources = None if folder is None else Sources(folder)
        self._signals: list[int] = []
        self._stopping = False
        self._renewing = False
        self._code = 0

    def run(self) -> int:
        """Until all have ended of themselves, or a signal came; the exit code."""
        before = {number: signal.signal(number, self._came) for number in SIGNALS}
        try:
            while not all(place.over for place in self._places):
                self.look()
                time.sleep(LOOK_SECONDS)
        finally:
            for place in self._places:
                if place.process is not None:
                    place.process.kill()
                    place.process.wait()
            for number, handler in before.items():
                signal.signal(number, handler)
        return self._code

    def _came(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)

    def look(self) -> None:
        """Pass on what came, see who ended, start who is missing."""
        while self._signals:
            number = self._signals.pop(0)
            self._stopping = True
            self._send(number)
        if self._sources is not None and not self._stopping and self._sources.changed():
            self._say("A source changed: beginning anew.")
            self._renewing = True
            self._send(signal.SIGTERM)
        for place in self._places:
            self._attend(place)
        if self._renewing and all(place.process is None for place in self._places):
            self._renewing = False
            for place in self._places:
                place.over, place.begin_at, place.pause = False, 0.0, PAUSE_SECONDS

    def _send(self, number: int) -> None:
        for place in self._places:
            if place.process is not None:
                place.process.send_signal(number)

    def _attend(self, place: Place) -> None:
        process = place.process
        if process is None:
            if self._stopping:
                place.over = True
            elif not (place.over or self._renewing) and self._clock() >= place.begin_at:
                self._start(place)
            return
        code = process.poll()
        if code is not None:
            place.process = None
            assert process.stdin is not None
            process.stdin.close()
            self._ended(place, process.pid, code)

    def _start(self, place: Place) -> None:
        place.started = self._clock()
        place.process = subprocess.Popen(self._command, stdin=subprocess.PIPE, process_group=0)

    def _ended(self, place: Place, pid: int, code: int) -> None:
        lived = self._clock() - place.started >= LIVED_SECONDS
        began = lived or code <= NEVER_BEGAN
        code -= NEVER_BEGAN if code > NEVER_BEGAN else 0
        if self._stopping or self._renewing:
            self._code = self._code or max(0, code)
            return
        cannot_begin = self._sources is None and not (began or place.proven)
        place.proven = place.proven or began
        if code in (0, WRONG_USAGE) or cannot_begin:
            place.over = self._sources is None
            place.begin_at = float("inf")  # with --reload: the next change begins anew
            self._code = self._code or code
            if code and self._sources is None:
                self._stopping = True
                self._send(signal.SIGTERM)
            return
        if lived:
            place.pause = PAUSE_SECONDS
        self._say(f"Process {pid} ended with {code}; another one starts in {place.pause:g} s.")
        place.begin_at = self._clock() + place.pause
        place.pause = min(PAUSE_SECONDS_MAX, 2 * place.pause)
