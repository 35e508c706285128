"""Work spread by Spark: results in order, progress, errors of ours as themselves."""

from __future__ import annotations

from typing import Any

import pytest

from tfmq.errors import Damaged, OffsetOutOfRange, StoreFailed
from tfmq.spark.pipelines.spark_jobs import (
    Progress,
    SparkTaskRunner,
    TaskResult,
    attempt,
    run_inline,
    run_tasks,
)


def doubled(item: int) -> TaskResult[int]:
    if item == 13:
        raise OffsetOutOfRange("Thirteen is gone.", first=14, end=20)
    if item == 14:
        raise FileNotFoundError(2, "No such file or directory", "/mnt/x")
    return TaskResult(2 * item, 1, 10 * item)


def test_an_error_travels_as_a_value_with_its_details() -> None:
    failure = attempt(doubled, 13)
    error: Any = failure.to_error()  # type: ignore[union-attr]
    assert type(error) is OffsetOutOfRange
    assert (str(error), error.first, error.end) == ("Thirteen is gone.", 14, 20)
    with pytest.raises(StoreFailed, match=r"A task could not read or write its file: .*'/mnt/x'"):
        run_inline(doubled, [14], Progress("x", None), "x")


def test_spark_gives_results_in_order_and_progress_of_all(spark: Any) -> None:
    progress = Progress("trial", None)
    assert run_tasks(spark, doubled, list(range(8)), progress, "trial") == [0, 2, 4, 6, 8, 10, 12, 14]
    assert (progress.rows, progress.bytes) == (8, 280)


def test_the_error_of_a_task_is_raised_as_what_it_is(spark: Any) -> None:
    with pytest.raises(OffsetOutOfRange, match=r"^Thirteen is gone\.$"):
        run_tasks(spark, doubled, [1, 13], Progress("trial", None), "trial")


def test_who_has_nothing_to_do_starts_no_session() -> None:
    def start() -> Any:
        raise Damaged("started")

    tasks = SparkTaskRunner(start)
    with pytest.raises(Damaged, match="started"):
        tasks(doubled, [1], Progress("trial", None), "trial")
    assert run_inline(doubled, [], Progress("trial", None), "trial") == []
