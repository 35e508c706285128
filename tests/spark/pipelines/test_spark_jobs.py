"""What a progress line says, and when one is shown."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from tests.spark.pipelines.messages import run_inline
from tfmq.cli.output import Output
from tfmq.errors import Damaged, OffsetOutOfRange, StoreFailed, TfmqError
from tfmq.spark.pipelines.spark_jobs import (
    Progress,
    SparkTaskRunner,
    TaskResult,
    attempt,
    find_tfmq_error,
    java_reason,
    show_progress,
    watch_progress,
)

MIB = 1 << 20


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_line_has_rows_bytes_rate_and_rest() -> None:
    clock = Clock()
    progress = Progress("archiving", 100 * MIB, clock=clock)
    clock.now += 10
    progress.add(1_000_000, 25 * MIB)
    assert progress.line() == ("archiving: 1,000,000 messages, 25.0 MiB of 100.0 MiB, 2.5 MiB/s, about 30 s left")
    progress.add(0, 75 * MIB)
    assert progress.line().endswith("10.0 MiB/s, finishing")


def test_what_came_before_the_work_does_not_count() -> None:
    clock = Clock()
    progress = Progress("archiving", 100 * MIB, clock=clock)
    clock.now += 1000
    progress.restart()
    clock.now += 10
    progress.add(1, 50 * MIB)
    assert progress.line().endswith("5.0 MiB/s, about 10 s left")


def test_without_a_total_no_rest_is_made_up() -> None:
    clock = Clock()
    progress = Progress("reading", None, clock=clock)
    clock.now += 1
    progress.add(5, 2048)
    assert progress.line() == "reading: 5 messages, 2.0 KiB, 2.0 KiB/s"


def test_lines_come_no_more_often_than_asked() -> None:
    clock, lines = Clock(), []
    progress = Progress("archiving", None, lines.append, 10.0, clock)
    for _ in range(25):
        clock.now += 1
        progress.add(1, 1)
    assert len(lines) == 2


def test_a_line_that_says_nothing_new_does_not_come() -> None:
    clock, lines = Clock(), []
    progress = Progress("reading", 100, lines.append, 10.0, clock)
    for size in (0, 0, 0, 100):
        clock.now += 11
        progress.add(0, size)
    assert [line.split(", ")[1] for line in lines] == ["0 B of 100 B", "100 B of 100 B"]


def test_without_a_terminal_nothing_is_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tfmq.spark.pipelines.spark_jobs.LINE_SECONDS", 0.0)
    for output, said in (
        (Output(None, True, False), False),
        (Output(None, False, True), False),
        (Output(None, False, False), True),
    ):
        with show_progress(output, "archiving", None) as progress:
            progress.add(3, 3)
        assert ("archiving: 3 messages" in capsys.readouterr().err) is said


# Our sentence out of Spark's error.

TEXT = """An error occurred while calling o123.collectToPython.
: org.apache.spark.SparkException: Job aborted due to stage failure
Traceback (most recent call last):
  File "worker.py", line 1, in main
tfmq.errors.OffsetOutOfRange: Partition 3 of orders begins at 4096.

	at org.apache.spark.api.python.BasePythonRunner
"""


def test_our_sentence_is_found_with_its_class() -> None:
    found = find_tfmq_error(RuntimeError(TEXT))
    assert type(found) is OffsetOutOfRange
    assert str(found) == "Partition 3 of orders begins at 4096."


def test_an_error_of_other_code_stays_theirs() -> None:
    assert find_tfmq_error(RuntimeError("ValueError: no")) is None
    assert isinstance(find_tfmq_error(RuntimeError("tfmq.errors.TfmqError: x")), TfmqError)


def test_our_sentence_is_found_after_what_spark_says_of_a_data_source() -> None:
    found = find_tfmq_error(
        RuntimeError(f"[PYTHON_DATA_SOURCE_ERROR] Failed to plan: {TEXT.splitlines()[4]}\nSQLSTATE: 38000")
    )
    assert type(found) is OffsetOutOfRange
    assert str(found) == "Partition 3 of orders begins at 4096."


def test_what_java_says_is_its_first_line() -> None:
    class Java:
        def getMessage(self) -> str:
            return "Could not parse Master URL: 'x'\nmore"

    error = RuntimeError("x")
    assert java_reason(error) is None
    error.java_exception = Java()  # type: ignore[attr-defined]
    assert java_reason(error) == "Could not parse Master URL: 'x'"


# Work spread by Spark: results in order, progress, errors of ours as themselves.


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


@pytest.mark.long
def test_spark_gives_results_in_order_and_progress_of_all(spark: Any) -> None:
    progress = Progress("trial", None)
    tasks = SparkTaskRunner(lambda: spark)
    assert tasks(doubled, list(range(8)), progress, "trial") == [0, 2, 4, 6, 8, 10, 12, 14]
    assert (progress.rows, progress.bytes) == (8, 280)


def test_the_error_of_a_task_is_raised_as_what_it_is(spark: Any) -> None:
    with pytest.raises(OffsetOutOfRange, match=r"^Thirteen is gone\.$"):
        SparkTaskRunner(lambda: spark)(doubled, [1, 13], Progress("trial", None), "trial")


def test_who_has_nothing_to_do_starts_no_session() -> None:
    def start() -> Any:
        raise Damaged("started")

    tasks = SparkTaskRunner(start)
    with pytest.raises(Damaged, match="started"):
        tasks(doubled, [1], Progress("trial", None), "trial")
    assert tasks(doubled, [], Progress("trial", None), "trial") == []


# A progress moves while Spark's tasks end, and is whole at the end.


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
