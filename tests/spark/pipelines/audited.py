"""Data folders for audits: made by a real broker or by the journal itself, audited here without Spark."""

from collections.abc import Sequence
from pathlib import Path

from journal import LogOptions
from journal.disk import RealDisk
from journal.log.readonly import open_log
from journal.record.batch import Batch, Source
from journal.record.format import make_log_id, make_record
from tfmq.broker.catalog_state import TopicRow
from tfmq.spark.pipelines.audit import Result, chained, conclude, log_ids, missing
from tfmq.spark.pipelines.audit_check import PieceFound, check, joined, split, vanished
from tfmq.spark.pipelines.audit_compare import Known, Standing, judge, located
from tfmq.spark.pipelines.audit_journal import expected, plan_journal, read_file, spans_of
from tfmq.spark.pipelines.audit_plan import Finding, Plan, plan, topics_of

INCARNATION = 20
SEGMENT_BYTES = 21_000
PARTS = 3


def batch(producer: int, sequence: int, sizes: Sequence[int]) -> Batch:
    """Records of one producer, with payloads of these sizes."""
    records = [
        make_record(bytes([65 + n % 20]) * size, producer << 24 | sequence + n)
        for n, size in enumerate(sizes)
    ]
    return Batch(b"".join(records), (), producer, sequence, len(records))


def write_log(
    data: Path, partition: int, appends: Sequence[tuple[list[Batch], Source | None]], topic: str = "orders"
) -> Path:
    """The folder of a partition, with these appends in small segments, closed clean."""
    folder = data / f"{topic}-{partition}"
    folder.parent.mkdir(exist_ok=True)
    options = LogOptions(segment_bytes=SEGMENT_BYTES)
    with open_log(str(folder), options, log_id=make_log_id(INCARNATION, partition)) as log:
        for batches, source in appends:
            log.append(batches, *([source] if source is not None else []))
    (folder / "lock").unlink()
    return folder


def audit_here(data: Path, piece_bytes: int = 8192) -> Result:
    """The whole audit of one data folder, in this process."""
    disk = RealDisk()
    topics = topics_of(disk, str(data))
    made = plan(disk, [str(data)], piece_bytes)
    found = [check(disk, made.logs[piece.log], piece, 0) for piece in made.pieces]
    return compared(data, topics, made, found)


def compared(data: Path, topics: list[TopicRow], made: Plan, found: list[PieceFound]) -> Result:
    """What follows when all pieces are checked; `topics` were there before."""
    disk = RealDisk()
    chains = chained(made.logs, found)
    journal = plan_journal(disk, str(data))
    read = [read_file(disk, file) for file in journal.files]
    facts = joined([*(each.facts for each in found), expected(journal, read, 0, log_ids(made.logs, journal))])
    standings = {each.log.number: Standing(each.applied, each.windows) for each in chains}
    known = {0: Known(journal.journal_id, spans_of(read))}
    verdicts = [judge(part, standings, known) for _, part in split(facts, PARTS)]
    verdicts = [
        each._replace(repeats=[located(disk, made.logs, repeat) for repeat in each.repeats])
        for each in verdicts
    ]
    folders = missing(disk, str(data), topics, made.logs)
    for log in made.logs:
        folders += vanished(disk, log, [each for each in found if each.piece.log == log.number])
    more = [
        *made.findings,
        *folders,
        *journal.findings,
        *(finding for each in read for finding in each.findings),
    ]
    return conclude([str(data)], made.logs, chains, verdicts, more, 1.0)


def told(result: Result) -> list[tuple[str, int, int, int]]:
    """Of each finding what and where."""
    return [where(finding) for finding in result.findings]


def where(finding: Finding) -> tuple[str, int, int, int]:
    return finding.kind, finding.partition, finding.first, finding.next


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.zxQueue"))
