"""Our sentence out of Spark's error."""

from __future__ import annotations

from tfmq.errors import OffsetOutOfRange, TfmqError
from tfmq.spark.pipelines.spark_jobs import find_tfmq_error, java_reason

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


def test_an_error_of_somebody_else_stays_theirs() -> None:
    assert find_tfmq_error(RuntimeError("ValueError: no")) is None
    assert isinstance(find_tfmq_error(RuntimeError("tfmq.errors.TfmqError: x")), TfmqError)


def test_our_sentence_is_found_behind_what_spark_says_of_a_data_source() -> None:
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
