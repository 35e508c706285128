"""Sentences of what cannot be read: the partition, what is lost, what to do."""

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
from tfmq.spark.errors import describe_read_error, unreachable_error
from tfmq.spark.ranges import PartitionLog

LOG = PartitionLog("orders", 2, 7, 7 << 24 | 2)


def test_what_retention_took_is_named_with_what_is_left() -> None:
    error = describe_read_error(OffsetOutOfRange(first=500, end=900), LOG, 100)
    assert isinstance(error, OffsetOutOfRange) and (error.first, error.end) == (500, 900)
    assert "orders-2: offsets 100 to 500 were removed" in str(error) and "it holds 500 to 900" in str(error)


def test_an_offset_behind_the_end_is_named() -> None:
    assert "orders-2: offset 1000 is after the durable end" in str(
        describe_read_error(OffsetOutOfRange(first=0, end=900), LOG, 1000)
    )


def test_a_cut_and_damage_keep_their_numbers() -> None:
    cut = describe_read_error(LogTruncated(cut=70), LOG, 100)
    assert isinstance(cut, LogTruncated) and cut.cut == 70 and "orders-2" in str(cut) and "70" in str(cut)
    damage = describe_read_error(Damaged(first=10, next=20), LOG, 12)
    assert isinstance(damage, Damaged) and (damage.first, damage.next) == (10, 20)
    assert "orders-2: offsets 10 to 20 are damaged" in str(damage)


def test_a_topic_made_anew_is_told_from_one_that_is_gone() -> None:
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
