"""What the transaction journal demands of the partitions, and that it is silent about what it has forgotten."""

from pathlib import Path

from journal.disk import RealDisk
from tests.spark.pipelines.audited import batch, write_log
from tfmq.spark.pipelines.audit_check import DECISION, EXPECTED, FORBIDDEN
from tfmq.spark.pipelines.audit_journal import (
    UNKNOWN_NUMBER,
    JournalFileContents,
    JournalMessages,
    JournalPlan,
    expected_facts,
    join_spans,
    plan_journal,
)

PLAN = JournalPlan("/data", 9, [], [])
LOGS = {77: 4}
ROW = tuple[int, ...]


def file(
    messages: list[JournalMessages],
    decisions: list[tuple[int, tuple[int, ...]]],
    rolled: tuple[int, ...] = (),
    spans: tuple[tuple[int, int], ...] = ((44, 9000),),
    totals: dict[int, int] | None = None,
) -> JournalFileContents:
    """`totals`: how many messages each epoch had, if it is not what is still there."""
    here = {epoch: sum(m.count for m in messages if m.epoch == epoch) for _, of in decisions for epoch in of}
    said = here if totals is None else totals
    return JournalFileContents(messages, decisions, list(rolled), list(spans), [], list(said.items()))


def rows(*found: JournalFileContents) -> list[ROW]:
    """(kind, log, first id, count, decision's place, epoch, extra) of each fact that is no decision."""
    facts = expected_facts(PLAN, found, 0, LOGS)
    kept = facts.select(facts.kind != DECISION)
    return sorted(
        tuple(map(int, row))
        for row in zip(kept.kind, kept.log, kept.key, kept.count, kept.offset, kept.next, kept.extra, strict=True)
    )


def test_messages_of_a_decision_are_wanted_and_numbered_over_all_its_partitions() -> None:
    messages = [
        JournalMessages(100, 5, 77, 500, 3),
        JournalMessages(200, 5, 78, 600, 4),
        JournalMessages(300, 5, 77, 503, 2),
    ]
    found = file(messages, [(400, (5,))])
    assert rows(found) == [(EXPECTED, 4, 500, 3, 400, 5, 3), (EXPECTED, 4, 503, 2, 400, 5, 9)]
    facts = expected_facts(PLAN, [found], 0, LOGS)
    assert [int(each) for each in facts.of_kind(DECISION).key] == [400]


def test_members_of_a_commit_group_are_numbered_in_the_order_of_the_decision() -> None:
    messages = [JournalMessages(100, 5, 77, 500, 3), JournalMessages(200, 6, 77, 600, 4)]
    found = file(messages, [(400, (6, 5))])
    assert rows(found) == [(EXPECTED, 4, 500, 3, 400, 5, 7), (EXPECTED, 4, 600, 4, 400, 6, 4)]


def test_what_was_rolled_back_or_is_open_is_forbidden() -> None:
    messages = [JournalMessages(100, 5, 77, 500, 3), JournalMessages(200, 6, 77, 600, 4)]
    assert rows(file(messages, [], rolled=(5,))) == [(FORBIDDEN, 4, 500, 3, 0, 5, 1), (FORBIDDEN, 4, 600, 4, 0, 6, 0)]


def test_a_copy_that_was_carried_forward_counts_once() -> None:
    messages = [JournalMessages(100, 5, 77, 500, 3), JournalMessages(100, 5, 77, 500, 3, copied=True)]
    assert rows(file(messages, [(400, (5,))], totals={5: 3})) == [(EXPECTED, 4, 500, 3, 400, 5, 3)]


def test_where_only_a_copy_is_left_the_order_of_a_decision_is_not_known() -> None:
    messages = [JournalMessages(200, 5, 77, 600, 4), JournalMessages(500, 5, 77, 500, 3, copied=True)]
    assert rows(file(messages, [(900, (5,))])) == [
        (EXPECTED, 4, 500, 3, 900, 5, UNKNOWN_NUMBER),
        (EXPECTED, 4, 600, 4, 900, 5, UNKNOWN_NUMBER),
    ]


def test_where_files_are_gone_nothing_is_undecided_and_no_number_is_known() -> None:
    early = file([JournalMessages(100, 5, 77, 500, 3)], [], spans=((44, 1000),))
    late = file(
        [JournalMessages(8000, 7, 77, 700, 1), JournalMessages(8100, 6, 77, 600, 4)],
        [(8400, (6,))],
        spans=((5000, 9000),),
        totals={6: 9},
    )
    assert rows(early, late) == [(EXPECTED, 4, 600, 4, 8400, 6, UNKNOWN_NUMBER), (FORBIDDEN, 4, 700, 1, 0, 7, 0)]


def test_a_decision_whose_first_messages_were_removed_with_their_file_has_no_numbers() -> None:
    """As soon as they are applied, while the rest is: with a number too low it would be missed in the partition."""
    rest = [JournalMessages(5200, 5, 77, 503, 2), JournalMessages(5300, 6, 77, 600, 4)]
    found = file(rest, [(5400, (5,)), (5500, (6,))], spans=((5044, 9000),), totals={5: 5, 6: 4})
    assert rows(found) == [(EXPECTED, 4, 503, 2, 5400, 5, UNKNOWN_NUMBER), (EXPECTED, 4, 600, 4, 5500, 6, 4)]


def test_spans_of_files_that_follow_each_other_are_joined_over_their_heads() -> None:
    first, second = file([], [], spans=((44, 1000),)), file([], [], spans=((1044, 1500), (1600, 2000)))
    assert join_spans([second, first]) == [(44, 1500), (1600, 2000)]


def test_a_folder_without_a_journal_demands_nothing(tmp_path: Path) -> None:
    write_log(tmp_path / "data", 0, [([batch(50, 0, [80] * 4)], None)])
    made = plan_journal(RealDisk(), str(tmp_path / "data"))
    assert (made.journal_id, made.files, made.findings) == (0, [], [])
