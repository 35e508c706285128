"""Audit pipeline: checks all segments of data folders in parallel, and compares partitions with transaction journals.

    python -m tfmq.spark.pipelines.audit DATA [DATA ...]

docs/pipelines.md describes the findings. The audit only reads files, so brokers may be running.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click

from journal.disk import Disk, RealDisk
from journal.record.format import split_id
from tfmq.broker.catalog_state import TopicRow
from tfmq.cli.output import size_text, with_noun
from tfmq.spark.pipelines import audit_check, audit_compare, audit_journal, audit_plan
from tfmq.spark.pipelines.audit_check import Facts, LogSummary, PieceResult
from tfmq.spark.pipelines.audit_compare import AppliedState, ComparisonResult, JournalCoverage, locate_repeat
from tfmq.spark.pipelines.audit_journal import JournalPlan
from tfmq.spark.pipelines.audit_plan import AuditedLog, AuditPiece, Finding
from tfmq.spark.pipelines.command import HELP, Job, pipeline_options, run_and_exit
from tfmq.spark.pipelines.spark_jobs import Progress, report_progress, show_progress
from tfmq.spark.ranges import group_small

if TYPE_CHECKING:
    from pyspark import RDD, Broadcast, SparkContext


class AuditResult(NamedTuple):
    """Sums and findings of an audit; the findings are sorted by folder, topic, partition and offset.

    `bytes`, `blocks`, `messages`: amount of valid data · `tail_bytes`: size of incomplete blocks after the durable
    offsets, which a running broker is still writing, or which the next start will cut off · `pending`: number of
    messages that are committed but not applied to their partitions yet · `seconds`: duration without the start of
    Spark · `untold`: number of findings that are not listed in `findings`, because there are too many.
    """

    folders: list[str]
    logs: int
    segments: int
    bytes: int
    blocks: int
    messages: int
    tail_bytes: int
    pending: int
    untold: int
    seconds: float
    findings: list[Finding]

    def to_json(self) -> dict[str, Any]:
        return {**self._asdict(), "findings": [finding.to_json() for finding in self.findings]}

    def summary(self) -> str:
        rate = self.bytes / max(self.seconds, 1e-9)
        text = (
            f"{with_noun(len(self.folders), 'data folder')}, {with_noun(self.logs, 'log')},"
            f" {with_noun(self.segments, 'segment')}: {with_noun(self.messages, 'record')} in {size_text(self.bytes)}"
            f" are valid, in {self.seconds:.1f} s ({size_text(rate)}/s)"
        )
        if self.tail_bytes:
            text += f"; {with_noun(self.tail_bytes, 'byte')} after the durable offsets were not checked"
        if self.pending:
            text += f"; {with_noun(self.pending, 'committed message')} not applied yet"
        found = len(self.findings) + self.untold
        return f"{text}; {with_noun(found, 'finding') if found else 'nothing is wrong'}"


def make_result(
    folders: list[str],
    logs: Sequence[AuditedLog],
    chains: Sequence[LogSummary],
    verdicts: Sequence[ComparisonResult],
    more: Iterable[Finding],
    seconds: float,
) -> AuditResult:
    findings = [*more, *(finding for chain in chains for finding in chain.findings)]
    for verdict in verdicts:
        findings.extend(_repeat_finding(logs, each) for each in verdict.repeats)
        findings.extend(_missing_finding(logs, each) for each in verdict.missing)
        findings.extend(_uncommitted_finding(logs, each) for each in verdict.uncommitted)
        findings.extend(_undecided_finding(logs, each) for each in verdict.undecided)
    findings.sort(key=lambda each: (each.data, each.topic, each.partition, each.first, each.kind))
    return AuditResult(
        folders=folders,
        logs=len(logs),
        segments=sum(len(log.segments) for log in logs),
        bytes=sum(chain.bytes for chain in chains),
        blocks=sum(chain.blocks for chain in chains),
        messages=sum(chain.records for chain in chains),
        tail_bytes=sum(chain.tail_bytes for chain in chains),
        pending=sum(verdict.pending for verdict in verdicts),
        untold=sum(verdict.untold for verdict in verdicts),
        seconds=seconds,
        findings=findings,
    )


def _segment_base(log: AuditedLog, offset: int) -> int | None:
    return next((each.base for each in reversed(log.segments) if each.base <= offset), None)


def _ids_text(first_id: int, count: int) -> str:
    producer, sequence = split_id(first_id)
    last = f" to {sequence + count - 1}" if count > 1 else ""
    return f"{sequence}{last} of producer {producer}"


def _repeat_finding(logs: Sequence[AuditedLog], found: audit_compare.RepeatedMessages) -> Finding:
    log, other = logs[found.log], logs[found.other_log]
    text = (
        f"{with_noun(found.count, 'message')}, number {_ids_text(found.first_id, found.count)}, are also in"
        f" {other.folder} at offsets {found.other_offset} to {found.other_next}"
    )
    return log.make_finding(audit_plan.REPEATED, _segment_base(log, found.offset), found.offset, found.next, text)


def _missing_finding(logs: Sequence[AuditedLog], found: audit_compare.MissingMessages) -> Finding:
    text = (
        f"transaction {found.epoch}, committed at place {found.lsn}: {with_noun(found.missing, 'message')} from"
        f" number {_ids_text(found.first_id, 1)} on are not in this partition"
    )
    return logs[found.log].make_finding(audit_plan.TORN, None, 0, 0, text)


def _uncommitted_finding(logs: Sequence[AuditedLog], found: audit_compare.UncommittedMessages) -> Finding:
    kind = audit_plan.ROLLED_BACK if found.rolled_back else audit_plan.UNDECIDED
    outcome = "was rolled back" if found.rolled_back else "has no decision"
    text = (
        f"transaction {found.epoch} {outcome}, and {with_noun(found.count, 'message')} of it from number"
        f" {_ids_text(found.first_id, 1)} on stand in this partition"
    )
    return logs[found.log].make_finding(kind, None, 0, 0, text)


def _undecided_finding(logs: Sequence[AuditedLog], found: audit_compare.UndecidedAppend) -> Finding:
    log = logs[found.log]
    text = f"an append of the transaction decided at place {found.lsn}, where the journal has no decision"
    return log.make_finding(audit_plan.NO_DECISION, _segment_base(log, found.offset), found.offset, found.next, text)


LOCATED_REPEATS_MAX: Final = 100
"""Maximum number of repeats (messages that are stored twice) of which one task reads the exact offsets in the files."""


class AuditJobs:
    """Spark jobs of an audit: check pieces (parts of segments) in parallel, then compare their facts in parallel.

    A fact is a row of numbers about messages (`Facts`): a run of up to 65,536 messages of one producer is one row. So
    the jobs exchange little data, and never a message. Facts are stored in Spark until `close`; `found` has the results
    of all pieces, without their facts. `folders`: data folder -> number of the folder in facts.
    """

    def __init__(self, context: SparkContext, logs: Sequence[AuditedLog], folders: Mapping[str, int]) -> None:
        self._context = context
        self._logs = list(logs)
        self._folders = dict(folders)
        self._rdd: RDD[PieceResult] | None = None
        self._broadcasts: list[Broadcast[Any]] = []
        self.found: list[PieceResult] = []

    def check_pieces(self, pieces: Sequence[AuditPiece], progress: Progress) -> None:
        """Check all pieces in tasks, and set `found` to the results. If a task fails, the error of Spark is raised."""
        from pyspark import StorageLevel

        if not pieces:
            return
        logs, folders = self._broadcast(self._logs), self._folders
        done = self._context.accumulator(0)
        rows = self._context.accumulator(0)

        def checked(group: list[AuditPiece]) -> Iterator[PieceResult]:
            for piece in group:
                log = logs.value[piece.log]
                found = audit_check.check_piece(RealDisk(), log, piece, folders[log.data])
                done.add(piece.size)
                rows.add(found.records)
                yield found

        groups = group_pieces(pieces)
        rdd: Any = self._context.parallelize(groups, len(groups)).flatMap(checked)
        # What does not fit into memory goes to disk: pieces that are read again for `compare_facts` may lack segments
        # that retention has deleted since, and their messages would be reported as missing.
        rdd.persist(StorageLevel.MEMORY_AND_DISK)
        self._rdd = rdd
        with report_progress(progress, lambda: (rows.value, done.value)):
            self.found = rdd.map(lambda each: replace(each, facts=audit_check.NO_FACTS)).collect()

    def compare_facts(
        self, more: Sequence[Facts], applied_states: Mapping[int, AppliedState], known: Mapping[int, JournalCoverage]
    ) -> list[ComparisonResult]:
        """Compare the facts of all pieces and of the transaction journals (`more`), and return the faults of each part.

        `applied_states`: log number -> which commits were applied to the log · `known`: number of the data folder ->
        which LSN ranges its transaction journal still has.
        """
        context = self._context
        parts = max(1, context.defaultParallelism)
        mine: Any = context.parallelize(list(more), max(1, len(more)))
        if self._rdd is not None:
            mine = mine.union(self._rdd.map(lambda each: each.facts))
        logs, inputs = self._broadcast(self._logs), self._broadcast((dict(applied_states), dict(known)))

        def verdict(rows: Iterator[tuple[int, Facts]]) -> Iterator[ComparisonResult]:
            facts = audit_check.concatenate_facts([facts for _, facts in rows])
            found = audit_compare.compare_sides(facts, *inputs.value)
            near = [locate_repeat(RealDisk(), logs.value, each) for each in found.repeats[:LOCATED_REPEATS_MAX]]
            yield found._replace(repeats=[*near, *found.repeats[LOCATED_REPEATS_MAX:]])

        partitioned = mine.flatMap(lambda facts: audit_check.split_facts(facts, parts)).partitionBy(parts)
        verdicts: list[ComparisonResult] = partitioned.mapPartitions(verdict).collect()
        return verdicts

    def close(self) -> None:
        if self._rdd is not None:
            self._rdd.unpersist()
            self._rdd = None
        for each in self._broadcasts:
            each.unpersist()
        self._broadcasts.clear()

    def _broadcast(self, value: Any) -> Broadcast[Any]:
        self._broadcasts.append(self._context.broadcast(value))
        return self._broadcasts[-1]


def group_pieces(pieces: Sequence[AuditPiece], size: int = audit_plan.PIECE_BYTES) -> list[list[AuditPiece]]:
    """Group adjacent pieces into tasks of up to `size` bytes, or of one larger piece; the largest task is first."""
    groups = group_small(pieces, lambda piece: piece.size, size)
    return sorted(groups, key=lambda group: -sum(piece.size for piece in group))


EXIT_FINDINGS = 4
COLUMNS = ("kind", "data", "topic", "partition", "segment", "first", "next", "text", "do")


def audit_folders(context: SparkContext, folders: Sequence[str], progress: Progress) -> AuditResult:
    """Audit the data folders `folders`. Raises BadRequest (no data folder), OSError (a folder cannot be read)."""
    begun = time.perf_counter()
    disk = RealDisk()
    folders = list(dict.fromkeys(folder.rstrip("/") or "/" for folder in folders))
    topics = {data: audit_plan.read_catalog_topics(disk, data) for data in folders}
    made = audit_plan.make_plan(disk, folders)
    progress.total_bytes = sum(piece.size for piece in made.pieces)
    checked = AuditJobs(context, made.logs, {data: number for number, data in enumerate(folders)})
    try:
        checked.check_pieces(made.pieces, progress)
        chains = summarize_logs(made.logs, checked.found)
        facts, known, findings = read_journal_facts(context, folders, made.logs)
        applied_states = {each.log.number: AppliedState(each.applied, each.windows) for each in chains}
        verdicts = checked.compare_facts(facts, applied_states, known)
    finally:
        checked.close()
    findings += made.findings
    for log in made.logs:
        findings += audit_check.find_missing_files(disk, log, checked.found)
    for data in folders:
        findings += find_missing_partitions(disk, data, topics[data], made.logs)
    return make_result(folders, made.logs, chains, verdicts, findings, time.perf_counter() - begun)


def read_journal_facts(
    context: SparkContext, folders: Sequence[str], logs: Sequence[AuditedLog]
) -> tuple[list[Facts], dict[int, JournalCoverage], list[Finding]]:
    """Return the facts of all transaction journals, folder number -> LSN ranges that are still there, and findings."""
    journals = [audit_journal.plan_journal(RealDisk(), data) for data in folders]
    files = [file for journal in journals for file in journal.files]
    read: list[tuple[str, audit_journal.JournalFileContents]] = []
    if files:
        rdd = context.parallelize(files, len(files))  # a task for each file
        read = rdd.map(lambda file: (file.data, audit_journal.read_journal_file(RealDisk(), file))).collect()
    facts: list[Facts] = []
    known: dict[int, JournalCoverage] = {}
    findings: list[Finding] = []
    for number, journal in enumerate(journals):
        found = [each for data, each in read if data == journal.data]
        facts.append(audit_journal.expected_facts(journal, found, number, topic_log_ids(logs, journal)))
        known[number] = JournalCoverage(journal.journal_id, audit_journal.join_spans(found))
        findings += journal.findings
        findings += (finding for each in found for finding in each.findings)
    return facts, known, findings


def find_missing_partitions(disk: Disk, data: str, topics: list[TopicRow], logs: Sequence[AuditedLog]) -> list[Finding]:
    """Return findings for partitions of `topics` without a folder, unless the topic was deleted during the audit."""
    still = {topic.incarnation for topic in audit_plan.read_catalog_topics(disk, data)}
    still_there = [topic for topic in topics if topic.incarnation in still]
    return audit_plan.find_missing_folders(data, still_there, [log for log in logs if log.data == data])


def summarize_logs(logs: Sequence[AuditedLog], found: Sequence[PieceResult]) -> list[LogSummary]:
    of_log: dict[int, list[PieceResult]] = {log.number: [] for log in logs}
    for each in found:
        of_log[each.piece.log].append(each)
    return [LogSummary(log, of_log[log.number]) for log in logs]


def topic_log_ids(logs: Sequence[AuditedLog], journal: JournalPlan) -> dict[int, int]:
    """Return log id -> log number, for the topics' logs in the journal's data folder."""
    mine = (log for log in logs if log.data == journal.data and log.partition >= 0)
    return {log.log_id: log.number for log in mine if log.log_id is not None}


@click.command(context_settings=HELP, epilog="\b\nExample:\n  python -m tfmq.spark.pipelines.audit /var/lib/tfmq")
@click.argument("folders", metavar="DATA...", nargs=-1, required=True)
@pipeline_options("audit")
def audit(folders: tuple[str, ...], job: Job) -> int:
    """Check every segment in the data folders DATA of brokers, which may be running.

    Exit code 0: no findings; 4: some findings.
    """
    audit_plan.check_folders(RealDisk(), folders)
    with job.spark() as session, show_progress(job.output, "auditing", None) as progress:
        result = audit_folders(session.sparkContext, folders, progress)
    if job.output.json:
        job.output.print_object(result.to_json())
    else:
        job.output.print_rows([finding.to_json() for finding in result.findings], COLUMNS, result.summary())
        if result.findings:
            job.output.info(result.summary())
    return EXIT_FINDINGS if result.findings or result.untold else 0


if __name__ == "__main__":
    run_and_exit(audit, "audit")
