"""What the transaction journal demands of the partitions, and that it is silent about what it has forgotten."""

from pathlib import Path

from journal.disk import RealDisk
from tests.spark.pipelines.audited import batch, write_log
from tfmq.spark.pipelines.audit_check import DECISION, FORBIDDEN, WANTED
from tfmq.spark.pipelines.audit_journal import (
    NUMBER_UNKNOWN,
    JournalFound,
    JournalPlan,
    Message,
    expected,
    plan_journal,
    spans_of,
)

PLAN = JournalPlan("/data", 9, [], [])
LOGS = {77: 4}
ROW = tuple[int, ...]


def file(
    messages: list[Message],
    decisions: list[tuple[int, tuple[int, ...]]],
    rolled: tuple[int, ...] = (),
    spans: tuple[tuple[int, int], ...] = ((44, 9000),),
    totals: dict[int, int] | None = None,
) -> JournalFound:
    """`totals`: how many messages each epoch had, if it is not what is still there."""
    here = {epoch: sum(m.count for m in messages if m.epoch == epoch) for _, of in decisions for epoch in of}
    said = here if totals is None else totals
    return JournalFound(messages, decisions, list(rolled), list(spans), [], list(said.items()))


def rows(*found: JournalFound) -> list[ROW]:
    """(kind, log, first id, count, decision's place, epoch, extra) of each fact that is no decision."""
    facts = expected(PLAN, found, 0, LOGS)
    kept = facts.where(facts.kind != DECISION)
    return sorted(
        tuple(map(int, row))
        for row in zip(
            kept.kind, kept.log, kept.key, kept.count, kept.offset, kept.next, kept.extra, strict=True
        )
    )


def test_messages_of_a_decision_are_wanted_and_numbered_over_all_its_partitions() -> None:
    messages = [Message(100, 5, 77, 500, 3), Message(200, 5, 78, 600, 4), Message(300, 5, 77, 503, 2)]
    found = file(messages, [(400, (5,))])
    assert rows(found) == [(WANTED, 4, 500, 3, 400, 5, 3), (WANTED, 4, 503, 2, 400, 5, 9)]
    facts = expected(PLAN, [found], 0, LOGS)
    assert [int(each) for each in facts.of(DECISION).key] == [400]


def test_members_of_a_commit_group_are_numbered_in_the_order_of_the_decision() -> None:
    messages = [Message(100, 5, 77, 500, 3), Message(200, 6, 77, 600, 4)]
    found = file(messages, [(400, (6, 5))])
    assert rows(found) == [(WANTED, 4, 500, 3, 400, 5, 7), (WANTED, 4, 600, 4, 400, 6, 4)]


def test_what_was_rolled_back_or_is_open_is_forbidden() -> None:
    messages = [Message(100, 5, 77, 500, 3), Message(200, 6, 77, 600, 4)]
    assert rows(file(messages, [], rolled=(5,))) == [
        (FORBIDDEN, 4, 500, 3, 0, 5, 1),
        (FORBIDDEN, 4, 600, 4, 0, 6, 0),
    ]


def test_a_copy_that_was_carried_forward_counts_once() -> None:
    messages = [Message(100, 5, 77, 500, 3), Message(100, 5, 77, 500, 3, copied=True)]
    assert rows(file(messages, [(400, (5,))], totals={5: 3})) == [(WANTED, 4, 500, 3, 400, 5, 3)]


def test_where_only_a_copy_is_left_the_order_of_a_decision_is_not_known() -> None:
    messages = [Message(200, 5, 77, 600, 4), Message(500, 5, 77, 500, 3, copied=True)]
    assert rows(file(messages, [(900, (5,))])) == [
        (WANTED, 4, 500, 3, 900, 5, NUMBER_UNKNOWN),
        (WANTED, 4, 600, 4, 900, 5, NUMBER_UNKNOWN),
    ]


def test_where_files_are_gone_nothing_is_undecided_and_no_number_is_known() -> None:
    early = file([Message(100, 5, 77, 500, 3)], [], spans=((44, 1000),))
    late = file(
        [Message(8000, 7, 77, 700, 1), Message(8100, 6, 77, 600, 4)],
        [(8400, (6,))],
        spans=((5000, 9000),),
        totals={6: 9},
    )
    assert rows(early, late) == [
        (WANTED, 4, 600, 4, 8400, 6, NUMBER_UNKNOWN),
        (FORBIDDEN, 4, 700, 1, 0, 7, 0),
    ]


def test_a_decision_whose_first_messages_were_removed_with_their_file_has_no_numbers() -> None:
    """As soon as they are applied, while the rest is: with a number too low it would be missed in the partition."""
    rest = [Message(5200, 5, 77, 503, 2), Message(5300, 6, 77, 600, 4)]
    found = file(rest, [(5400, (5,)), (5500, (6,))], spans=((5044, 9000),), totals={5: 5, 6: 4})
    assert rows(found) == [(WANTED, 4, 503, 2, 5400, 5, NUMBER_UNKNOWN), (WANTED, 4, 600, 4, 5500, 6, 4)]


def test_spans_of_files_that_follow_each_other_are_joined_over_their_heads() -> None:
    first, second = file([], [], spans=((44, 1000),)), file([], [], spans=((1044, 1500), (1600, 2000)))
    assert spans_of([second, first]) == [(44, 1500), (1600, 2000)]


def test_a_folder_without_a_journal_demands_nothing(tmp_path: Path) -> None:
    write_log(tmp_path / "data", 0, [([batch(50, 0, [80] * 4)], None)])
    made = plan_journal(RealDisk(), str(tmp_path / "data"))
    assert (made.journal_id, made.files, made.findings) == (0, [], [])
