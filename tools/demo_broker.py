"""What the parts of the demo share: the broker that is killed and restarted, the lines printed, reading a topic.

Each wait ends after `WAIT_SECONDS` without anything new, so a busy machine makes the demo slower and nothing else.
"""

from __future__ import annotations

import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

import tfmq

WAIT_SECONDS: Final = 180.0
STOP_SECONDS: Final = 60.0
SAY_SECONDS: Final = 5.0
"""Without a terminal, how far a step has come is printed at most this often."""
PORTS: Final = range(20_000, 32_000)
"""Below the ports that Linux gives to outgoing connections: nothing takes the broker's port while it is down."""


class DemoFailed(Exception):
    """The demo cannot go on; the sentence says why."""


class Row(NamedTuple):
    """A promise, what was counted, and whether the promise was kept (None: a count that nothing was promised about)."""

    text: str
    number: int
    kept: bool | None


class Broker:
    """A tfmq-server process that can be killed and started again on its folder and port."""

    def __init__(self, data: Path, log: Path, *settings: str) -> None:
        self.data, self.log, self._settings = data, log, settings
        self.address = f"127.0.0.1:{free_port()}"
        self.process: subprocess.Popen[str] | None = None

    def start(self, state: str = "ready") -> float:
        """Start it; returns the seconds until it printed this state. Raises DemoFailed if it does not."""
        begun = time.monotonic()
        command = [sys.executable, "-m", "tfmq.server.main", "--data", str(self.data), "--listen", self.address]
        for setting in ("http.listen=", *self._settings):
            command += ["--set", setting]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        self.wait_for(state)
        return time.monotonic() - begun

    def wait_for(self, state: str) -> None:
        """Wait until it prints this state, `ready` or `standby`. Raises DemoFailed if it prints another or ends."""
        assert self.process is not None and self.process.stdout is not None
        if self.process.stdout.readline().split() != [state, self.address]:
            raise DemoFailed(f"the broker did not start; {self.log} says why")

    def kill(self) -> None:
        """End it with SIGKILL, which it cannot notice."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """End it with SIGTERM, and with SIGKILL if that takes too long."""
        if self.process is None or self.process.poll() is not None:
            return
        self.process.terminate()
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()


class Steps:
    """Prints one line for each step, with the seconds since the start; on a terminal also bars."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self.console, self.clock = console, clock
        self.progress = Progress(
            TextColumn("          {task.description:<28}"),
            BarColumn(30),
            TextColumn("{task.completed:>7,.0f} of {task.total:,.0f}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._begun = clock()

    def say(self, text: str) -> None:
        """One line; `text` may have rich's markup."""
        self.console.print(f"{self.clock() - self._begun:6.1f} s  {text}", highlight=False, soft_wrap=True)

    def counting(self, text: str, total: int) -> Counting:
        return Counting(self, text, total)


class Counting:
    """How far one step has come: a bar on a terminal, elsewhere a line every `SAY_SECONDS`. For one thread each."""

    def __init__(self, steps: Steps, text: str, total: int) -> None:
        self._steps, self._text, self._total = steps, text, total
        self._count, self._said_at = 0, steps.clock()
        self._task = steps.progress.add_task(text, total=total)

    def add(self, count: int = 1) -> None:
        """`count` more are done."""
        self._count += count
        self._steps.progress.advance(self._task, count)
        now = self._steps.clock()
        if self._count < self._total and now - self._said_at >= SAY_SECONDS and not self._steps.console.is_terminal:
            self._said_at = now
            self._steps.say(f"{self._text}: {self._count:,} of {self._total:,}")

    def end(self) -> None:
        """Remove the bar; a line about the whole step is printed in its place."""
        self._steps.progress.remove_task(self._task)


class Task:
    """A thread whose error is raised where its end is waited for, not printed."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self._error = error

    def join(self) -> None:
        self._thread.join()
        if self._error is not None:
            raise self._error


def read_all(address: str | list[str], topic: str) -> list[tfmq.ReceivedMessage]:
    """Every message of the topic, up to its present end."""
    found: list[tfmq.ReceivedMessage] = []
    until = time.monotonic() + WAIT_SECONDS
    with tfmq.Consumer(address, topics=topic, start="earliest", timeout=WAIT_SECONDS) as consumer:
        while left := consumer.lag():
            if messages := consumer.poll(timeout=1.0, max_messages=10_000):
                found += messages
                until = time.monotonic() + WAIT_SECONDS
            elif time.monotonic() > until:
                raise DemoFailed(f"{left:,} messages of {topic} cannot be read")
    return found


def free_port() -> int:
    """A port on loopback that nothing listens on now, and that stays free while its server is down."""
    for port in random.sample(PORTS, 100):
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise DemoFailed(f"no free port between {PORTS.start} and {PORTS.stop} on 127.0.0.1")
