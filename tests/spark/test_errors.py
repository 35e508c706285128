"""Sentences of what cannot be read: the partition, what is lost, what to do."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from tfmq.errors import (
    ConnectionFailed,
    Damaged,
    LogTruncated,
    OffsetOutOfRange,
    StorageStopped,
    TimedOut,
    UnknownPartition,
    UnknownTopic,
)
from tfmq.spark.errors import describe_read_error, hide_traceback, unreachable_error
from tfmq.spark.loss_policy import LOGGED_LOSSES_MAX, LossPolicy
from tfmq.spark.ranges import PartitionLog

LOG = PartitionLog("orders", 2, 7, 7 << 24 | 2)


def test_what_retention_took_is_named_with_what_is_left() -> None:
    error = describe_read_error(OffsetOutOfRange(first=500, end=900), LOG, 100)
    assert isinstance(error, OffsetOutOfRange) and (error.first, error.end) == (500, 900)
    assert "orders-2: offsets 100 to 500 were removed" in str(error) and "it holds 500 to 900" in str(error)


def test_an_offset_after_the_end_is_named() -> None:
    assert "orders-2: offset 1000 is after the durable end" in str(
        describe_read_error(OffsetOutOfRange(first=0, end=900), LOG, 1000)
    )


def test_a_cut_and_damage_keep_their_numbers() -> None:
    cut = describe_read_error(LogTruncated(cut=70), LOG, 100)
    assert isinstance(cut, LogTruncated) and cut.cut == 70 and "orders-2" in str(cut) and "70" in str(cut)
    damage = describe_read_error(Damaged(first=10, next=20), LOG, 12)
    assert isinstance(damage, Damaged) and (damage.first, damage.next) == (10, 20)
    assert "orders-2: offsets 10 to 20 are damaged" in str(damage)


def test_a_topic_made_anew_is_distinguished_from_one_that_is_gone() -> None:
    anew = describe_read_error(UnknownTopic("x", incarnation=9), LOG)
    gone = describe_read_error(UnknownTopic("x"), LOG)
    assert type(anew) is type(gone) is UnknownTopic
    assert "created again" in str(anew) and "checkpoint" in str(anew)
    assert "does not exist any more" in str(gone)


def test_other_errors_stay_as_they_are() -> None:
    for error in (StorageStopped("stopped"), UnknownPartition("no 2")):
        assert describe_read_error(error, LOG, 3) is error


def test_who_gave_up_says_where_and_after_how_long() -> None:
    lost = unreachable_error(ConnectionFailed("Nothing listens at x:1."), LOG, 77, 30.0)
    assert type(lost) is ConnectionFailed
    assert str(lost) == "Nothing listens at x:1. orders-2 was read up to offset 77; given up after 30 s."
    assert type(unreachable_error(TimedOut("late"), LOG, 77, 30.0)) is TimedOut


# What a user reads: the sentence, without frames where Spark makes the text, and losses.


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


def test_an_unexpected_error_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
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
