"""Whether produced, consumed and dead-lettered add up, without a broker: every way in which they do not."""

import pytest

from tfmq.dead_letters.model import DEAD, HANDLED, REDRIVEN, WAITING
from tfmq.spark.pipelines.reconcile import (
    NOTE,
    WRONG,
    Balance,
    GroupPosition,
    LetterSummary,
    Row,
    make_balance,
)

TOPICS = {20: "orders"}


def standing(consumed: int = 60, *, first: int = 0, end: int = 100, **changed: int) -> GroupPosition:
    """Of a partition with 10 bytes a message."""
    made = GroupPosition(
        "broker", "billing", "orders", 20, 0, 10 * first, 10 * end, first, end, 10 * consumed, end - consumed
    )
    return made._replace(**changed)


def letter(ordinal: int, state: str = DEAD, **changed: object) -> LetterSummary:
    made = LetterSummary(
        "dead.db", f"letter{ordinal}", "billing", "orders", 20, 0, 10 * ordinal, ordinal, 7, state
    )
    return made._replace(**changed)


def only(found: Balance) -> tuple[str, str]:
    (fault,) = found.faults
    return fault.weight, fault.text


def test_a_row_has_what_was_produced_consumed_and_kept() -> None:
    states = (DEAD, WAITING, HANDLED, REDRIVEN, DEAD)
    found = make_balance([standing(first=10)], [letter(n, state) for n, state in enumerate(states)], TOPICS)
    assert found.rows == [Row("broker", "billing", "orders", 0, 100, 90, 60, 40, 55, 1, 2, 2)]
    assert found.faults == []


def test_a_group_that_saved_nothing_has_consumed_nothing() -> None:
    (row,) = make_balance([standing(offset=-1, lag=100)], [], TOPICS).rows
    assert (row.consumed, row.lag, row.handled) == (0, 100, 0)


def test_what_nobody_can_tell_is_no_number() -> None:
    (row,) = make_balance([standing(lag=-1)], [], TOPICS).rows
    assert (row.consumed, row.handled) == (-1, -1)


@pytest.mark.parametrize(
    ("place", "letters", "weight", "text"),
    [
        (standing(offset=1001), [], WRONG, "goes on at offset 1001, and the partition ends at 1000"),
        (standing(offset=90, first=10), [], WRONG, "retention took messages that it had not handled"),
        (standing(), [letter(100)], WRONG, "of messages behind the partition's end"),
        (standing(), [letter(60)], NOTE, "of messages that the group has not saved as done"),
        (standing(), [letter(3, partition=1)], WRONG, "the broker knows of no such group here"),
        (standing(), [letter(3, group="other")], WRONG, "the broker knows of no such group here"),
        (standing(), [letter(3, incarnation=21)], NOTE, "of a topic that is not there any more"),
        (
            standing(),
            [letter(3), letter(3, store="b.db")],
            WRONG,
            "letter letter3 is in dead.db (dead) and in b.db",
        ),
    ],
)
def test_each_thing_that_does_not_add_up_is_told_alone(
    place: GroupPosition, letters: list[LetterSummary], weight: str, text: str
) -> None:
    found = only(make_balance([place], letters, TOPICS))
    assert found[0] == weight and text in found[1]


def test_the_last_message_consumed_and_the_first_one_not() -> None:
    assert make_balance([standing()], [letter(59)], TOPICS).faults == []
    assert make_balance([standing(100)], [letter(99)], TOPICS).faults == []
    assert make_balance([standing(offset=1000, lag=0)], [], TOPICS).faults == []


def test_json_has_all_rows_and_faults() -> None:
    found = make_balance([standing()], [letter(60)], TOPICS).to_json()
    assert found["rows"][0]["produced"] == 100 and found["faults"][0]["weight"] == NOTE
