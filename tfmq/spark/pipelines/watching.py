"""How far a query of Spark is, by the tasks of the stage that reads: told to a progress while it runs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from tfmq.spark.pipelines.progress import Progress

if TYPE_CHECKING:
    from pyspark import SparkContext

LOOK_SECONDS: Final = 0.5


@contextmanager
def watched(context: SparkContext, progress: Progress) -> Iterator[None]:
    """While the block runs, `progress` goes towards its total as tasks of the first stage end."""
    ended = threading.Event()
    thread = threading.Thread(
        target=_watch, args=(context, progress, ended), name="tfmq progress", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        progress.add(0, (progress.total_bytes or 0) - progress.bytes)


def _watch(context: SparkContext, progress: Progress, ended: threading.Event) -> None:
    tracker: Any = context.statusTracker()
    stage = None
    while not ended.wait(LOOK_SECONDS):
        active = tracker.getActiveStageIds()
        stage = min(active) if stage is None and active else stage
        info = tracker.getStageInfo(stage) if stage is not None else None
        if info is not None and info.numTasks:
            done = (progress.total_bytes or 0) * info.numCompletedTasks // info.numTasks
            progress.add(0, max(0, done - progress.bytes))
