"""A progress moves while Spark's tasks end, and is whole at the end."""

import threading
from typing import Any

from tfmq.spark.pipelines.spark_jobs import Progress, watch_progress


def test_a_progress_goes_on_with_the_tasks_and_ends_at_its_total(spark: Any) -> None:
    moved = threading.Event()
    progress = Progress("reading", 1000, lambda line: moved.set())
    gate = threading.Event()
    context = spark.sparkContext
    with watch_progress(context, progress):
        for _ in range(200):
            context.parallelize(range(4), 4).map(lambda n: n).collect()
            if gate.wait(0.01) or moved.is_set():
                break
    assert progress.bytes == 1000
