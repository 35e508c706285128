"""Work for Spark: even groups, and verdicts that do not depend on how facts are spread."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tfmq.spark.pipelines.audit import AuditJobs, group_pieces
from tfmq.spark.pipelines.audit_check import RUN, make_facts
from tfmq.spark.pipelines.audit_plan import AuditedLog, AuditPiece
from tfmq.spark.pipelines.spark_jobs import Progress

SIZE = 100


@given(sizes=st.lists(st.integers(1, 250), max_size=40))
def test_every_piece_is_in_one_group_and_small_ones_share_one(sizes: list[int]) -> None:
    pieces = [AuditPiece(n, 0, 0, size, False) for n, size in enumerate(sizes)]
    groups = group_pieces(pieces, SIZE)
    assert sorted(piece.log for group in groups for piece in group) == list(range(len(sizes)))
    sums = [sum(piece.size for piece in group) for group in groups]
    assert sums == sorted(sums, reverse=True)
    assert all(len(group) == 1 or total <= SIZE for group, total in zip(groups, sums, strict=True))


def test_facts_of_many_tasks_meet(spark: Any) -> None:
    logs = [AuditedLog(n, "/data", f"orders-{n}", "orders", n, ".zxQueue", None, None, ()) for n in range(2)]
    checked = AuditJobs(spark.sparkContext, logs, {"/data": 0})
    checked.check_pieces([], Progress("auditing", None))
    one = [make_facts(0, 0, [[producer << 24, RUN, 5, 100 * producer, 0, 0]]) for producer in range(50, 58)]
    other = [make_facts(0, 1, [[(producer << 24) + 3, RUN, 5, 7, 0, 0]]) for producer in (51, 56)]
    verdicts = checked.compare_facts([*one, *other], {}, {})
    found = sorted(
        (each.first_id >> 24, each.first_id & 0xFFFF, each.count) for v in verdicts for each in v.repeats
    )
    assert found == [(51, 3, 2), (56, 3, 2)]
    checked.close()
