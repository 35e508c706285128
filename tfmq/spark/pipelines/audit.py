"""audit: every segment of every data folder, checked in parallel, and the logs of a folder compared with each other.

    python -m tfmq.spark.pipelines.audit DATA [DATA ...]

docs/pipelines.md says what it finds. It reads files only; a broker may run meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from journal.disk import Disk, RealDisk
from tfmq.broker.catalog_state import TopicRow
from tfmq.spark.pipelines.audit_catalog import missing_folders, topics_of
from tfmq.spark.pipelines.audit_chain import Chain, chain, vanished
from tfmq.spark.pipelines.audit_facts import Facts
from tfmq.spark.pipelines.audit_findings import Finding
from tfmq.spark.pipelines.audit_journal import JournalPlan, expected, plan_journal, spans_of
from tfmq.spark.pipelines.audit_judging import Known, Standing
from tfmq.spark.pipelines.audit_piece import PieceFound
from tfmq.spark.pipelines.audit_plan import PIECE_BYTES, AuditedLog, check_folders, plan
from tfmq.spark.pipelines.audit_result import Result, conclude
from tfmq.spark.pipelines.audit_spark import Checked, read_journals
from tfmq.spark.pipelines.command import Job, leave, pipeline_options
from tfmq.spark.pipelines.progress import Progress

if TYPE_CHECKING:
    from pyspark import SparkContext

DAMAGED = 4
"""The exit code where something was found."""
COLUMNS = ("kind", "data", "topic", "partition", "segment", "first", "next", "text", "do")


def audit(
    context: SparkContext, folders: Sequence[str], progress: Progress, piece_bytes: int = PIECE_BYTES
) -> Result:
    """Audits these data folders. Raises BadRequest for one that is none, OSError."""
    begun = time.perf_counter()
    disk = RealDisk()
    folders = list(dict.fromkeys(folder.rstrip("/") or "/" for folder in folders))
    topics = {data: topics_of(disk, data) for data in folders}
    made = plan(disk, folders, piece_bytes)
    progress.total_bytes = sum(piece.size for piece in made.pieces)
    checked = Checked(context, made.logs, {data: number for number, data in enumerate(folders)})
    try:
        checked.check(made.pieces, progress)
        chains = chained(made.logs, checked.found)
        facts, known, findings = journals_of(context, folders, made.logs)
        standings = {each.log.number: Standing(each.applied, each.windows) for each in chains}
        verdicts = checked.judged(facts, standings, known)
    finally:
        checked.close()
    findings += made.findings
    for log in made.logs:
        findings += vanished(disk, log, [each for each in checked.found if each.piece.log == log.number])
    for data in folders:
        findings += missing(disk, data, topics[data], made.logs)
    return conclude(folders, made.logs, chains, verdicts, findings, time.perf_counter() - begun)


def journals_of(
    context: SparkContext, folders: Sequence[str], logs: Sequence[AuditedLog]
) -> tuple[list[Facts], dict[int, Known], list[Finding]]:
    """What the transaction journal of each folder demands, knows, and what is wrong with it."""
    journals = [plan_journal(RealDisk(), data) for data in folders]
    read = read_journals(context, [file for journal in journals for file in journal.files])
    facts: list[Facts] = []
    known: dict[int, Known] = {}
    findings: list[Finding] = []
    for number, journal in enumerate(journals):
        found = [each for file, each in read if file.data == journal.data]
        facts.append(expected(journal, found, number, log_ids(logs, journal)))
        known[number] = Known(journal.journal_id, spans_of(found))
        findings += journal.findings
        findings += (finding for each in found for finding in each.findings)
    return facts, known, findings


def missing(disk: Disk, data: str, topics: list[TopicRow], logs: Sequence[AuditedLog]) -> list[Finding]:
    """Folders that the catalog names and that are not there, also when it is asked again: topics are deleted."""
    mine = [log for log in logs if log.data == data]
    found = missing_folders(data, topics, mine)
    if found:
        still = {topic.incarnation for topic in topics_of(disk, data)}
        found = missing_folders(data, [topic for topic in topics if topic.incarnation in still], mine)
    return found


def chained(logs: Sequence[AuditedLog], found: Sequence[PieceFound]) -> list[Chain]:
    """What each log adds up to."""
    of_log: dict[int, list[PieceFound]] = {log.number: [] for log in logs}
    for each in found:
        of_log[each.piece.log].append(each)
    return [chain(log, of_log[log.number]) for log in logs]


def log_ids(logs: Sequence[AuditedLog], journal: JournalPlan) -> dict[int, int]:
    """Log id -> number, of the topics' logs in the journal's data folder."""
    mine = (log for log in logs if log.data == journal.data and log.partition >= 0)
    return {log.log_id: log.number for log in mine if log.log_id is not None}


@click.command(
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="\b\nExample:\n  python -m tfmq.spark.pipelines.audit /var/lib/tfmq",
)
@click.argument("folders", metavar="DATA...", nargs=-1, required=True)
@pipeline_options("audit")
def command(folders: tuple[str, ...], job: Job) -> int:
    """Check every segment in the data folders DATA of brokers, which may be running.

    Exit code 0: nothing is wrong; 4: something was found.
    """
    check_folders(RealDisk(), folders)
    with job.spark() as session, job.progress("auditing", None) as progress:
        result = audit(session.sparkContext, folders, progress)
    if job.output.json:
        job.output.object(result.row())
    else:
        job.output.rows([finding.row() for finding in result.findings], COLUMNS, result.sentence())
        if result.findings:
            job.output.say(result.sentence())
    return DAMAGED if result.findings or result.untold else 0


if __name__ == "__main__":
    leave(command, "audit")
