"""A schedule's messages: whose they are, for which time, under which id; the same bytes whenever they are made."""

from typing import Any

import pytest

from journal.record.block_trailer import SOURCE_SCHEDULE
from journal.record.format import (
    FLAG_TOMBSTONE,
    SEQUENCE_COUNT,
    make_log_id,
    records_of,
    split_body,
    split_id,
    tag_hash,
)
from tests.broker.schedule_helpers import ms
from tfmq import limits
from tfmq.broker.catalog_state import SCHEDULE, SCHEDULE_STATE, ScheduleRow
from tfmq.broker.scheduler import RunningSchedule
from tfmq.errors import BadRequest, DecodeFailed
from tfmq.message import decode_attribute, encode_attribute

NINE = ms("2026-11-23T09:00+01:00")


def row(**changed: Any) -> ScheduleRow:
    made = ScheduleRow(
        20, "daily", "0 9 * * *", "Europe/Berlin", "orders", None, b"", b"go", "one", 5, 17, 2, 5
    )
    return made._replace(**changed)


def test_a_message_tells_its_schedule_and_its_time_beside_what_was_given() -> None:
    attribute = encode_attribute(None, "k", "new", {"n": "1"})
    batch = RunningSchedule(row(attribute=attribute)).batch(NINE)
    (record,) = records_of(bytes(batch.data))
    found, payload = split_body(memoryview(bytes(batch.data))[20:], record.flag)
    known = decode_attribute(bytes(found or b""))
    assert bytes(payload) == b"go" and (known.key, known.tag, known.born_ms) == ("k", "new", NINE)
    assert known.properties == {
        "n": "1",
        "schedule": "daily",
        "scheduled_for": "2026-11-23T09:00:00+01:00",
    }
    assert record.flag >> 16 == tag_hash("new") and not record.flag & FLAG_TOMBSTONE


def test_without_payload_it_is_a_tombstone() -> None:
    (record,) = records_of(bytes(RunningSchedule(row(payload=None)).batch(NINE).data))
    assert record.flag & FLAG_TOMBSTONE


def test_the_id_is_the_schedules_own_and_counts_minutes() -> None:
    run = RunningSchedule(row())
    for moment in (NINE, NINE + 60_000):
        batch = run.batch(moment)
        (record,) = records_of(bytes(batch.data))
        assert (
            split_id(record.id)
            == (20, moment // 60_000 % SEQUENCE_COUNT)
            == (batch.producer_id, batch.sequence)
        )
    assert bytes(run.batch(NINE).data) == bytes(RunningSchedule(row()).batch(NINE).data)


def test_several_times_are_one_append_under_the_place_of_the_last() -> None:
    effect = RunningSchedule(row()).append([NINE, NINE + 60_000])
    assert effect.key == make_log_id(17, 2) and len(effect.batches) == 2
    assert effect.source == (SOURCE_SCHEDULE, 20, NINE + 60_000, 0)


def test_its_entries_are_what_the_catalog_reads() -> None:
    run = RunningSchedule(row())
    assert run.add_entry() == (SCHEDULE, *row()[:-1])
    assert run.state_entry(paused=True, through_ms=9) == (SCHEDULE_STATE, 20, 17, 2, 9, True)


def test_what_makes_no_sense_is_refused_and_if_it_is_kept_already_said() -> None:
    own = encode_attribute(None, None, None, {"schedule": "x"})
    many = encode_attribute(None, None, None, {f"p{n}": "" for n in range(limits.PROPERTIES - 1)})
    for bad, error in (
        (row(cron="nonsense"), BadRequest),
        (row(timezone="Europe/Atlantis"), BadRequest),
        (row(attribute=b"\xc1"), DecodeFailed),
        (row(attribute=own), BadRequest),
        (row(attribute=many), BadRequest),
    ):
        with pytest.raises(error) as caught:
            RunningSchedule(bad)
        kept = RunningSchedule(bad, kept=True)
        assert kept.cron is None and kept.trouble == str(caught.value)
        assert kept.description(0, None, kept.trouble)["state"] == "waiting"
