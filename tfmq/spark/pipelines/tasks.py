"""Work that Spark spreads over its executors: one task an item, results on the driver, progress while it runs.

What tasks read and write goes past Spark: only items and small results travel. An error that is expected comes back as
a value, so that its sentence stays what it is; only what nobody foresaw fails the task, and Spark tries it again.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeVar, cast

from journal.errors import JournalError
from tfmq.errors import BY_CODE, StoreFailed, TfmqError
from tfmq.spark.pipelines.spark_errors import error_in

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tfmq.spark.pipelines.progress import Progress

Item = TypeVar("Item")
Result = TypeVar("Result")

LOOK_SECONDS: Final = 0.2


class Done(NamedTuple, Generic[Result]):
    """What a task came to: its result, and how much it did."""

    result: Result
    rows: int
    size_bytes: int


class Failure(NamedTuple):
    """An error that travels: pickled exceptions lose what is given by name."""

    code: str
    sentence: str
    details: dict[str, Any]

    def error(self) -> TfmqError:
        return BY_CODE.get(self.code, TfmqError)(self.sentence, **self.details)


def attempted(work: Callable[[Item], Done[Result]], item: Item) -> Done[Result] | Failure:
    """The work, or the error that it met."""
    try:
        return work(item)
    except TfmqError as error:
        return Failure(error.code, str(error), error.details)
    except (OSError, JournalError) as error:
        return Failure(StoreFailed.code, f"A task could not read or write its file: {error}", {})


def run_tasks(
    session: SparkSession,
    work: Callable[[Item], Done[Result]],
    items: Sequence[Item],
    progress: Progress,
    title: str,
) -> list[Result]:
    """The results, in the order of the items. `work` is pickled by its name. Raises the first error of a task."""
    if not items:
        return []
    context = session.sparkContext
    group = f"tfmq-{uuid.uuid4().hex}"
    rows, size_bytes = context.accumulator(0), context.accumulator(0)

    def task(item: Item) -> Done[Result] | Failure:
        done = attempted(work, item)
        if isinstance(done, Done):
            rows.add(done.rows)
            size_bytes.add(done.size_bytes)
        return done

    def job() -> list[Done[Result] | Failure]:
        context.setJobGroup(group, title, interruptOnCancel=True)
        return context.parallelize(items, len(items)).map(task).collect()

    with ThreadPoolExecutor(1, "tfmq-job") as pool:
        running = pool.submit(job)
        try:
            follow(running, lambda: (rows.value, size_bytes.value), progress)
            found = running.result()
        except BaseException as error:
            context.cancelJobGroup(group)
            if (ours := error_in(error)) is not None:
                raise ours from None
            raise
    for each in found:
        if isinstance(each, Failure):
            raise each.error()
    return [each.result for each in cast("list[Done[Result]]", found)]


def follow(running: Future[Any], tally: Callable[[], tuple[int, int]], progress: Progress) -> None:
    """Until it ends, add to `progress` what the tally gained."""
    before = (0, 0)
    while True:
        ended = bool(wait([running], LOOK_SECONDS).done)
        now = tally()
        progress.add(now[0] - before[0], now[1] - before[1])
        before = now
        if ended:
            return


def inline(
    work: Callable[[Item], Done[Result]], items: Sequence[Item], progress: Progress, title: str
) -> list[Result]:
    """The same in this thread, without Spark."""
    results = []
    for item in items:
        done = attempted(work, item)
        if isinstance(done, Failure):
            raise done.error()
        progress.add(done.rows, done.size_bytes)
        results.append(done.result)
    return results


class SparkTasks:
    """Runs tasks in a session that is asked for with the first ones: who has nothing to do starts no Java."""

    def __init__(self, start: Callable[[], SparkSession]) -> None:
        self._start = start
        self._lock = threading.Lock()
        self._session: SparkSession | None = None

    def __call__(
        self, work: Callable[[Item], Done[Result]], items: Sequence[Item], progress: Progress, title: str
    ) -> list[Result]:
        with self._lock:
            if self._session is None:
                self._session = self._start()
                progress.restart()
        return run_tasks(self._session, work, items, progress, title)
