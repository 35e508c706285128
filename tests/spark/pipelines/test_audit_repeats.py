"""Where the second one of two messages with one id stands, to the byte."""

from pathlib import Path

from journal.record.block_trailer import TRAILER_SIZE
from tests.spark.pipelines.audited import audit_here, batch, reported, write_log
from tfmq.spark.pipelines.audit_plan import REPEATED

APPEND = 4000 + TRAILER_SIZE


def test_a_repeat_in_the_same_partition_is_reported_with_its_place(tmp_path: Path) -> None:
    appends = [([batch(50, 40 * n, [80] * 40)], None) for n in range(20)]
    appends.insert(15, ([batch(50, 65, [80] * 7)], None))
    write_log(tmp_path / "data", 0, appends)
    (finding,) = audit_here(tmp_path / "data").findings
    assert (finding.kind, finding.first, finding.next) == (REPEATED, 15 * APPEND, 15 * APPEND + 700)
    first = APPEND + 25 * 100
    assert finding.text == (
        f"7 messages, number 65 to 71 of producer 50, are also in orders-0 at offsets {first} to {first + 700}"
    )


def test_a_repeat_in_another_partition_is_found(tmp_path: Path) -> None:
    write_log(tmp_path / "data", 0, [([batch(50, 40 * n, [80] * 40)], None) for n in range(20)])
    write_log(tmp_path / "data", 1, [([batch(51, 0, [80] * 40), batch(50, 120, [30])], None)])
    assert reported(audit_here(tmp_path / "data")) == [(REPEATED, 1, 4000, 4050)]
