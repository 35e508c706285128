"""How pipelines run Spark jobs: start tasks on executors, report the tasks' errors, and show their progress."""

from __future__ import annotations

import re
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeVar, cast

import click

from journal.errors import JournalError
from tfmq.cli.output import Output, age_text, call_repeatedly, size_text, terminal_width
from tfmq.errors import BY_CODE, CLASSES, StoreFailed, TfmqError

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession


TERMINAL_SECONDS: Final = 0.2
LINE_SECONDS: Final = 10.0
"""Pause between two lines of progress if standard error is not a terminal (but a file, or a cluster's log)."""
CLEAR_LINE: Final = "\r\x1b[K"


class Progress:
    """Counts the rows and bytes processed so far and prints them as a line. `add` may be called from any thread.

    `text`: beginning of the line, names the work · `total_bytes`: the whole amount of work, None if unknown ·
    `print_line`: prints a line; `add` calls this function at most once in `pause_seconds`.
    """

    def __init__(
        self,
        text: str,
        total_bytes: int | None,
        print_line: Callable[[str], None] = lambda line: None,
        pause_seconds: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.text, self.total_bytes = text, total_bytes
        self.rows = self.bytes = 0
        self._print, self._pause, self._clock = print_line, pause_seconds, clock
        self._started_at = self._printed_at = clock()
        self._line = ""
        self._lock = threading.Lock()

    def restart(self) -> None:
        """Measure the rate (bytes a second) from now on, for example without the time in which Spark started."""
        self._started_at = self._clock()

    def add(self, rows: int, size_bytes: int) -> None:
        with self._lock:
            self.rows += rows
            self.bytes += size_bytes
            now = self._clock()
            if now - self._printed_at < self._pause:
                return
            self._printed_at = now
            line = self.line()
            if line == self._line:
                return  # the same line was printed before
            self._line = line
        self._print(line)

    def line(self) -> str:
        """Return 'archiving: 1,200,000 messages, 140.0 MiB of 1.2 GiB, 95.1 MiB/s, about 11 s left'."""
        rate = self.bytes / max(self._clock() - self._started_at, 1e-3)
        whole = f" of {size_text(self.total_bytes)}" if self.total_bytes is not None else ""
        parts = [f"{self.text}: {self.rows:,} messages", f"{size_text(self.bytes)}{whole}"]
        if rate > 0:
            parts.append(f"{size_text(rate)}/s")
        if self.total_bytes is not None and rate > 0:
            left = max(0, self.total_bytes - self.bytes) / rate
            parts.append(f"about {age_text(max(1, round(left)))} left" if left else "finishing")
        return ", ".join(parts)


ShowProgress = Callable[[int], AbstractContextManager[Progress]]
"""Function that takes the size of some work in bytes, and returns a context manager whose block shows the progress."""


@contextmanager
def show_progress(output: Output, text: str, total_bytes: int | None) -> Iterator[Progress]:
    """Yield a `Progress` that prints to standard error; with --quiet or --json it prints nothing."""
    if output.quiet or output.json:
        yield Progress(text, total_bytes)
        return
    if not sys.stderr.isatty():
        yield Progress(text, total_bytes, lambda line: click.echo(line, err=True), LINE_SECONDS)
        return
    width = terminal_width() - 1
    try:
        yield Progress(
            text, total_bytes, lambda line: click.echo(CLEAR_LINE + line[:width], err=True, nl=False), TERMINAL_SECONDS
        )
    finally:
        click.echo(CLEAR_LINE, err=True, nl=False)


ERROR_PATTERN: Final = re.compile(r"(?:^\s*(?:[\w.]*\.)?|: tfmq\.[\w.]*)\b(\w+): (.+)$", re.MULTILINE)
"""Matches the last line of a Python traceback, or Spark's text for an error of a data source: (class, sentence)."""
CLASS_BY_NAME: Final = {each.__name__: each for each in CLASSES}


def find_tfmq_error(error: BaseException) -> TfmqError | None:
    """Return the last TfmqError named in the text of a Spark error; None if there is none."""
    found = None
    for match in ERROR_PATTERN.finditer(str(error)):
        kind = CLASS_BY_NAME.get(match[1])
        if kind is not None:
            found = kind(match[2].strip())
    return found


def java_reason(error: BaseException) -> str | None:
    """Return the first line of the message of the Java exception in `error`; None if `error` has no Java exception."""
    java = getattr(error, "java_exception", None)
    if java is None:
        return None
    text = str(java.getMessage() or java.toString())
    return text.splitlines()[0] if text else None


Item = TypeVar("Item")
Result = TypeVar("Result")

POLL_SECONDS: Final = 0.2


class TaskResult(NamedTuple, Generic[Result]):
    """Result of a task, and the rows and bytes that it processed."""

    result: Result
    rows: int
    size_bytes: int


class TaskFailure(NamedTuple):
    """A TfmqError of a task as plain values, because a pickled exception would lose its keyword arguments."""

    code: str
    sentence: str
    details: dict[str, Any]

    def to_error(self) -> TfmqError:
        return BY_CODE.get(self.code, TfmqError)(self.sentence, **self.details)


def attempt(work: Callable[[Item], TaskResult[Result]], item: Item) -> TaskResult[Result] | TaskFailure:
    """Return `work(item)`, or a TaskFailure for an error of tfmq or a file. After others, Spark repeats the task."""
    try:
        return work(item)
    except TfmqError as error:
        return TaskFailure(error.code, str(error), error.details)
    except (OSError, JournalError) as error:
        return TaskFailure(StoreFailed.code, f"A task could not read or write its file: {error}", {})


class SparkTaskRunner:
    """Runs tasks in a Spark session. `start` is called for the first task, so without tasks no Java process starts."""

    def __init__(self, start: Callable[[], SparkSession]) -> None:
        self._start = start
        self._session: SparkSession | None = None

    def __call__(
        self, work: Callable[[Item], TaskResult[Result]], items: Sequence[Item], progress: Progress, title: str
    ) -> list[Result]:
        """Run one Spark task for each item, and return the results in the order of `items`.

        Each task calls `work(item)`. `work` must be a function of a module, or a `partial` of one, because functions
        are pickled by their names. Items and results pass through the driver and must not have messages in them: tasks
        read and write files themselves. Raises the first error of a task.
        """
        if not items:
            return []
        if self._session is None:
            self._session = self._start()
            progress.restart()
        context = self._session.sparkContext
        group = f"tfmq-{uuid.uuid4().hex}"
        rows, size_bytes = context.accumulator(0), context.accumulator(0)

        def task(item: Item) -> TaskResult[Result] | TaskFailure:
            done = attempt(work, item)
            if isinstance(done, TaskResult):
                rows.add(done.rows)
                size_bytes.add(done.size_bytes)
            return done

        def job() -> list[TaskResult[Result] | TaskFailure]:
            context.setJobGroup(group, title, interruptOnCancel=True)
            return context.parallelize(items, len(items)).map(task).collect()

        with ThreadPoolExecutor(1, "tfmq-job") as pool:
            running = pool.submit(job)
            try:
                with report_progress(progress, lambda: (rows.value, size_bytes.value)):
                    found = running.result()
            except BaseException as error:
                context.cancelJobGroup(group)
                if (ours := find_tfmq_error(error)) is not None:
                    raise ours from None
                raise
        for each in found:
            if isinstance(each, TaskFailure):
                raise each.to_error()
        return [each.result for each in cast("list[TaskResult[Result]]", found)]


@contextmanager
def report_progress(progress: Progress, done: Callable[[], tuple[int, int]]) -> Iterator[None]:
    """Update `progress` every POLL_SECONDS in the `with` block. `done()`: the (rows, bytes) processed so far."""
    before = (0, 0)

    def add_growth() -> None:
        nonlocal before
        now = done()
        progress.add(now[0] - before[0], now[1] - before[1])
        before = now

    with call_repeatedly(POLL_SECONDS, add_growth, "tfmq progress"):
        yield
    add_growth()


STAGE_POLL_SECONDS: Final = 0.5


@contextmanager
def watch_progress(context: SparkContext, progress: Progress) -> Iterator[None]:
    """Context that advances `progress` by the share of ended tasks in the first stage of the query that runs in it.

    For queries whose tasks do not report their progress themselves.
    """
    tracker: Any = context.statusTracker()
    stage: int | None = None

    def add_ended_tasks() -> None:
        nonlocal stage
        active = tracker.getActiveStageIds()
        stage = min(active) if stage is None and active else stage
        info = tracker.getStageInfo(stage) if stage is not None else None
        if info is not None and info.numTasks:
            done = (progress.total_bytes or 0) * info.numCompletedTasks // info.numTasks
            progress.add(0, max(0, done - progress.bytes))

    try:
        with call_repeatedly(STAGE_POLL_SECONDS, add_ended_tasks, "tfmq progress"):
            yield
    finally:
        progress.add(0, (progress.total_bytes or 0) - progress.bytes)
