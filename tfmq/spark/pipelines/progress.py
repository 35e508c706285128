"""How far a pipeline is: rows, bytes, rate, estimated rest; on a terminal one line that changes, elsewhere a line ever
so often.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import click

from tfmq.cli.output import Output, age_text, size_text, terminal_width

TERMINAL_SECONDS: Final = 0.2
LINE_SECONDS: Final = 10.0
"""Between two lines where standard error is no terminal (a file, a cluster's log)."""
CLEAR_LINE: Final = "\r\x1b[K"


class Progress:
    """What is done so far; `add` may be called from any thread.

    `total_bytes`: what there is to do, None where nobody knows. `say` shows a line.
    """

    def __init__(
        self,
        text: str,
        total_bytes: int | None,
        say: Callable[[str], None] = lambda line: None,
        pause_seconds: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.text, self.total_bytes = text, total_bytes
        self.rows = self.bytes = 0
        self._say, self._pause, self._clock = say, pause_seconds, clock
        self._begun = self._said = clock()
        self._line = ""
        self._lock = threading.Lock()

    @property
    def seconds(self) -> float:
        """Since it began."""
        return self._clock() - self._begun

    def restart(self) -> None:
        """The time counts from now: what came before, as the start of Spark, says nothing of the rate."""
        self._begun = self._clock()

    def add(self, rows: int, size_bytes: int) -> None:
        """So much more is done."""
        with self._lock:
            self.rows += rows
            self.bytes += size_bytes
            now = self._clock()
            if now - self._said < self._pause:
                return
            self._said = now
            line = self.line()
            if line == self._line:
                return  # the same again says nothing
            self._line = line
        self._say(line)

    def line(self) -> str:
        """'archiving: 1,200,000 messages, 140.0 MiB of 1.2 GiB, 95.1 MiB/s, about 11 s left'."""
        seconds = max(self.seconds, 1e-3)
        rate = self.bytes / seconds
        whole = f" of {size_text(self.total_bytes)}" if self.total_bytes is not None else ""
        parts = [f"{self.text}: {self.rows:,} messages", f"{size_text(self.bytes)}{whole}"]
        if rate > 0:
            parts.append(f"{size_text(rate)}/s")
        if self.total_bytes is not None and rate > 0:
            left = max(0, self.total_bytes - self.bytes) / rate
            parts.append(f"about {age_text(max(1, round(left)))} left" if left else "finishing")
        return ", ".join(parts)


@contextmanager
def shown(output: Output, text: str, total_bytes: int | None) -> Iterator[Progress]:
    """A progress that is seen on standard error, except with --quiet or --json."""
    if output.quiet or output.json:
        yield Progress(text, total_bytes)
        return
    if not sys.stderr.isatty():
        yield Progress(text, total_bytes, lambda line: click.echo(line, err=True), LINE_SECONDS)
        return
    width = terminal_width() - 1
    try:
        yield Progress(
            text,
            total_bytes,
            lambda line: click.echo(CLEAR_LINE + line[:width], err=True, nl=False),
            TERMINAL_SECONDS,
        )
    finally:
        click.echo(CLEAR_LINE, err=True, nl=False)
