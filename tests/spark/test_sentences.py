"""What a user reads: the sentence, without frames where Spark makes the text, and losses."""

import logging
from collections.abc import Iterator

import pytest

from tfmq.errors import OffsetOutOfRange, UnknownTopic
from tfmq.spark.errors import LOGGED_LOSSES_MAX, LossPolicy, hide_traceback


@hide_traceback
def fails(sentence: str) -> None:
    try:
        int("x")
    except ValueError as error:
        raise UnknownTopic(sentence) from error


@hide_traceback
def rows(count: int) -> Iterator[int]:
    yield from range(count)
    raise UnknownTopic("no more rows")


@hide_traceback
def breaks() -> None:
    raise ZeroDivisionError


def test_only_the_sentence_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_PYTHON_RUNTIME", "PYTHON_WORKER")
    monkeypatch.setenv("SPARK_HIDE_TRACEBACK", "")
    import os

    with pytest.raises(UnknownTopic, match="no such topic") as caught:
        fails("no such topic")
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__
    assert os.environ["SPARK_HIDE_TRACEBACK"] == "1"


def test_what_nobody_foresaw_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_PYTHON_RUNTIME", "PYTHON_WORKER")
    monkeypatch.setenv("SPARK_HIDE_TRACEBACK", "")
    import os

    with pytest.raises(ZeroDivisionError):
        breaks()
    assert os.environ["SPARK_HIDE_TRACEBACK"] == ""


def test_outside_of_sparks_workers_nothing_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPARK_PYTHON_RUNTIME", raising=False)
    monkeypatch.setenv("SPARK_HIDE_TRACEBACK", "")
    import os

    with pytest.raises(UnknownTopic):
        fails("no such topic")
    assert os.environ["SPARK_HIDE_TRACEBACK"] == ""


def test_rows_come_before_the_error() -> None:
    got = []
    with pytest.raises(UnknownTopic, match="no more rows"):
        for each in rows(3):
            got.append(each)
    assert got == [0, 1, 2]


def test_a_loss_stops_the_query_and_says_how_to_go_on() -> None:
    with pytest.raises(OffsetOutOfRange, match=r"^Gone\. The query stops, because failOnDataLoss is true"):
        LossPolicy(True).handle_loss(OffsetOutOfRange("Gone."))


def test_a_loss_that_is_allowed_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    losses = LossPolicy(False)
    with caplog.at_level(logging.WARNING, "tfmq.spark"):
        losses.handle_loss(OffsetOutOfRange("Gone."))
        losses.handle_loss(OffsetOutOfRange("Gone."))
        losses.handle_loss(OffsetOutOfRange("More is gone."))
    assert [record.message.split(" The query")[0] for record in caplog.records] == ["Gone.", "More is gone."]


def test_what_was_said_is_not_remembered_without_a_bound() -> None:
    losses = LossPolicy(False)
    for number in range(LOGGED_LOSSES_MAX + 10):
        losses.handle_loss(OffsetOutOfRange(f"{number} is gone."))
    assert len(losses._logged) <= LOGGED_LOSSES_MAX
