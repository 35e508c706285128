"""The book of schedules: one row a name, under an id that never comes again."""

import pytest

from tfmq.broker.catalog_state import SCHEDULE_ROW_BYTES, ScheduleRow, ScheduleTable

ROW = ScheduleRow(20, "daily", "0 9 * * *", "UTC", "orders", None, b"att", b"payload", "one", 5, 17, 2, 5)


def book(*rows: ScheduleRow) -> ScheduleTable:
    return ScheduleTable(rows)


def test_a_schedule_is_found_by_name_and_by_id_until_it_is_gone() -> None:
    made = ScheduleTable()
    made.add(*ROW[:-1])
    assert made.find("daily") == made.find_by_id(20) == ROW and list(made) == [ROW] and len(made) == 1
    made.remove(20)
    assert made.find("daily") is made.find_by_id(20) is None and not list(made)


def test_its_state_changes_without_its_words() -> None:
    made = book(ROW)
    made.set_state(20, 18, 0, 99, True)
    assert made.find("daily") == ROW._replace(incarnation=18, partition=0, through_ms=99, paused=True)


def test_what_comes_late_for_one_that_is_gone_changes_nothing() -> None:
    made = book(ROW)
    made.remove(20)
    made.remove(20)
    made.set_state(20, 18, 0, 99, True)
    assert not list(made) and made.size_bytes == 0


def test_made_anew_under_its_name_it_takes_the_place_of_the_old_one() -> None:
    made = book(ROW)
    made.add(*ROW._replace(id=21, payload=b"")[:-1])
    found = made.find("daily")
    assert found is not None and found.id == 21 and made.find_by_id(20) is None and len(made) == 1
    assert made.size_bytes == SCHEDULE_ROW_BYTES + len(b"att")


def test_an_id_that_comes_twice_is_damage() -> None:
    made = book(ROW)
    with pytest.raises(ValueError, match="20"):
        made.add(*ROW._replace(name="other")[:-1])


def test_the_bytes_of_all_are_counted() -> None:
    tombstone = ROW._replace(id=21, name="other", payload=None, attribute=b"")
    made = book(ROW, tombstone)
    assert made.size_bytes == 2 * SCHEDULE_ROW_BYTES + len(b"att" + b"payload")
    assert (ROW.size_bytes, tombstone.size_bytes) == (SCHEDULE_ROW_BYTES + 10, SCHEDULE_ROW_BYTES)


def test_the_same_words_are_the_same_wherever_it_is_bound_to() -> None:
    assert ROW.same_definition(
        ROW._replace(id=99, made_ms=7, incarnation=3, partition=1, through_ms=8, paused=True)
    )
    for changed in (
        {"cron": "0 8 * * *"},
        {"timezone": "Europe/Berlin"},
        {"topic": "bills"},
        {"partition_wanted": 2},
        {"attribute": b""},
        {"payload": None},
        {"misfire": "all"},
    ):
        assert not ROW.same_definition(ROW._replace(**changed))
