"""What an audit says in the end: sums, findings in the order of folders and offsets, a sentence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from journal.record.format import split_id
from tfmq.cli.output import counted, size_text
from tfmq.spark.pipelines.audit_chain import Chain
from tfmq.spark.pipelines.audit_findings import NO_DECISION, REPEATED, ROLLED_BACK, TORN, UNDECIDED, Finding
from tfmq.spark.pipelines.audit_judging import Excess, Lack, Repeat, Stray, Verdict
from tfmq.spark.pipelines.audit_plan import AuditedLog


class Result(NamedTuple):
    """`bytes`, `blocks`, `messages` are sound; `tail_bytes` behind the forced marks are not whole (a broker writes
    there, or a start cuts them off); `pending` messages are committed and on their way; `seconds` without Spark's
    start. `untold`: findings beyond those that are listed."""

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

    def row(self) -> dict[str, Any]:
        """As JSON has it."""
        return {**self._asdict(), "findings": [finding.row() for finding in self.findings]}

    def sentence(self) -> str:
        """For a person."""
        rate = self.bytes / max(self.seconds, 1e-9)
        said = (
            f"{counted(len(self.folders), 'data folder')}, {counted(self.logs, 'log')},"
            f" {counted(self.segments, 'segment')}: {counted(self.messages, 'record')} in {size_text(self.bytes)}"
            f" are sound, in {self.seconds:.1f} s ({size_text(rate)}/s)"
        )
        if self.tail_bytes:
            said += f"; {counted(self.tail_bytes, 'byte')} behind what was forced are left out"
        if self.pending:
            said += f"; {counted(self.pending, 'committed message')} on the way to their partitions"
        found = len(self.findings) + self.untold
        return f"{said}; {counted(found, 'finding') if found else 'nothing is wrong'}"


def conclude(
    folders: list[str],
    logs: Sequence[AuditedLog],
    chains: Sequence[Chain],
    verdicts: Sequence[Verdict],
    more: Iterable[Finding],
    seconds: float,
) -> Result:
    """Everything together; `more`: findings that came from elsewhere."""
    findings = [*more, *(finding for chain in chains for finding in chain.findings)]
    for verdict in verdicts:
        findings.extend(_repeated(logs, each) for each in verdict.repeats)
        findings.extend(_torn(logs, each) for each in verdict.lacks)
        findings.extend(_excess(logs, each) for each in verdict.excesses)
        findings.extend(_stray(logs, each) for each in verdict.strays)
    findings.sort(key=lambda each: (each.data, each.topic, each.partition, each.first, each.kind))
    return Result(
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


def _base(log: AuditedLog, offset: int) -> int | None:
    return next((each.base for each in reversed(log.segments) if each.base <= offset), None)


def _ids(first_id: int, count: int) -> str:
    producer, sequence = split_id(first_id)
    last = f" to {sequence + count - 1}" if count > 1 else ""
    return f"{sequence}{last} of producer {producer}"


def _repeated(logs: Sequence[AuditedLog], found: Repeat) -> Finding:
    log, other = logs[found.log], logs[found.other_log]
    text = (
        f"{counted(found.count, 'message')}, number {_ids(found.first_id, found.count)}, are also in {other.folder} at"
        f" offsets {found.other_offset} to {found.other_next}"
    )
    return log.finding(REPEATED, _base(log, found.offset), found.offset, found.next, text)


def _torn(logs: Sequence[AuditedLog], found: Lack) -> Finding:
    text = (
        f"transaction {found.epoch}, committed at place {found.place}: {counted(found.missing, 'message')} from number"
        f" {_ids(found.first_id, 1)} on are not in this partition"
    )
    return logs[found.log].finding(TORN, None, 0, 0, text)


def _excess(logs: Sequence[AuditedLog], found: Excess) -> Finding:
    kind = ROLLED_BACK if found.rolled_back else UNDECIDED
    said = "was rolled back" if found.rolled_back else "has no decision"
    text = (
        f"transaction {found.epoch} {said}, and {counted(found.count, 'message')} of it from number"
        f" {_ids(found.first_id, 1)} on stand in this partition"
    )
    return logs[found.log].finding(kind, None, 0, 0, text)


def _stray(logs: Sequence[AuditedLog], found: Stray) -> Finding:
    log = logs[found.log]
    text = f"an append of the transaction decided at place {found.place}, where the journal has no decision"
    return log.finding(NO_DECISION, _base(log, found.offset), found.offset, found.next, text)
