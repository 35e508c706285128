"""Data folders for audits: made by a real broker or by the journal itself, audited here without Spark."""

from collections.abc import Sequence
from pathlib import Path

from journal import LogOptions
from journal.clock import SystemClock
from journal.disk import RealDisk
from journal.filenames import TRANSACTIONS_FOLDER
from journal.log.readonly import open_log
from journal.record.batch import Batch, Source
from journal.record.block_trailer import SOURCE_TRANSACTION
from journal.record.format import make_log_id, make_record
from journal.wal.entry import AppendMsg, Operation
from journal.wal.store import JournalStore
from tests.journal.journals import RememberingState
from tfmq.broker.catalog_state import TopicRow
from tfmq.spark.pipelines.audit import AuditResult, find_missing_partitions, make_result, summarize_logs, topic_log_ids
from tfmq.spark.pipelines.audit_check import (
    PieceResult,
    check_piece,
    concatenate_facts,
    find_missing_files,
    split_facts,
)
from tfmq.spark.pipelines.audit_compare import AppliedState, JournalCoverage, compare_sides, locate_repeat
from tfmq.spark.pipelines.audit_journal import expected_facts, join_spans, plan_journal, read_journal_file
from tfmq.spark.pipelines.audit_plan import AuditPlan, Finding, make_plan, read_catalog_topics
from tfmq.transaction.journal_records import LocalCommitRecord, Origin, pack

INCARNATION = 20
JOURNAL_ID = 9
SEGMENT_BYTES = 21_000
PARTS = 3


def batch(producer: int, sequence: int, sizes: Sequence[int]) -> Batch:
    """Records of one producer, with payloads of these sizes."""
    records = [make_record(bytes([65 + n % 20]) * size, producer << 24 | sequence + n) for n, size in enumerate(sizes)]
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


def write_journal(data: Path, partition: int, transactions: Sequence[Batch]) -> list[Source]:
    """A transaction journal that commits each of these batches for a partition; the source position of each commit."""
    log_id = make_log_id(INCARNATION, partition)
    journal = JournalStore.open(
        RealDisk(),
        str(data / TRANSACTIONS_FOLDER),
        new_id=lambda: JOURNAL_ID,
        clock=SystemClock(),
        state=RememberingState(),
    )
    sources = []
    for epoch, (records, blocks, producer, sequence, count) in enumerate(transactions, 1):
        record = LocalCommitRecord(epoch, 0, Origin("", True, 0, 0, 0), ((log_id, "orders"),), (), count)
        message = AppendMsg(epoch, log_id, producer, sequence, count, blocks, records)
        _, lsn = journal.append([message, Operation(*pack(record))])
        sources.append(Source(SOURCE_TRANSACTION, JOURNAL_ID, lsn, count))
    journal.force()
    journal.abandon("written")
    return sources


def audit_here(data: Path, piece_bytes: int = 8192) -> AuditResult:
    """The whole audit of one data folder, in this process."""
    disk = RealDisk()
    topics = read_catalog_topics(disk, str(data))
    made = make_plan(disk, [str(data)], piece_bytes)
    found = [check_piece(disk, made.logs[piece.log], piece, 0) for piece in made.pieces]
    return compared(data, topics, made, found)


def compared(data: Path, topics: list[TopicRow], made: AuditPlan, found: list[PieceResult]) -> AuditResult:
    """What follows when all pieces are checked; `topics` were there before."""
    disk = RealDisk()
    chains = summarize_logs(made.logs, found)
    journal = plan_journal(disk, str(data))
    read = [read_journal_file(disk, file) for file in journal.files]
    facts = concatenate_facts(
        [*(each.facts for each in found), expected_facts(journal, read, 0, topic_log_ids(made.logs, journal))]
    )
    standings = {each.log.number: AppliedState(each.applied, each.windows) for each in chains}
    known = {0: JournalCoverage(journal.journal_id, join_spans(read))}
    verdicts = [compare_sides(part, standings, known) for _, part in split_facts(facts, PARTS)]
    verdicts = [
        each._replace(repeats=[locate_repeat(disk, made.logs, repeat) for repeat in each.repeats]) for each in verdicts
    ]
    folders = find_missing_partitions(disk, str(data), topics, made.logs)
    for log in made.logs:
        folders += find_missing_files(disk, log, found)
    more = [*made.findings, *folders, *journal.findings, *(finding for each in read for finding in each.findings)]
    return make_result([str(data)], made.logs, chains, verdicts, more, 1.0)


def reported(result: AuditResult) -> list[tuple[str, int, int, int]]:
    """Of each finding what and where."""
    return [where(finding) for finding in result.findings]


def where(finding: Finding) -> tuple[str, int, int, int]:
    return finding.kind, finding.partition, finding.first, finding.next


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.zxQueue"))
