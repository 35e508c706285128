"""`tfmq log` for the transaction journal: its rows, for a person and for a program."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from journal.disk import Disk
from journal.fsck.wal_repair import JournalRepaired
from journal.fsck.wal_verify import Gap, JournalSurvey
from journal.wal.entry import OPERATION_NAMES, AppendMsg, Entry, Filler, Operation
from tfmq import ids
from tfmq.cli.output import time_text


def rows_of_journal(disk: Disk, folder: Path, file: Path | None, control: bool) -> Iterator[dict[str, Any]]:
    """Every entry of the journal in `folder`, or of one `file` of it, in order; what cannot be read is a row, too.

    With `control` each file, and before them the checkpoint and its snapshots, have rows of their own.
    """
    survey = JournalSurvey(disk, str(folder))
    try:
        if control and file is None:
            yield from _checkpoint_rows(survey)
        for each in survey.files:
            if file is not None and each.path != str(file):
                continue
            if control:
                yield {"kind": "file", "place": each.first, "number": each.number, "size": each.size}
            if each.number in survey.head_faults:
                reason = survey.head_faults[each.number]
                yield {
                    "kind": "damaged",
                    "place": each.first,
                    "next": each.first,
                    "reason": f"head: {reason}",
                }
            for part in survey.parts(each):
                yield row_of(part)
    finally:
        survey.close()


def _checkpoint_rows(survey: JournalSurvey) -> Iterator[dict[str, Any]]:
    checkpoint = survey.checkpoint
    if checkpoint is None:
        yield {"kind": "damaged", "place": 0, "next": 0, "reason": f"checkpoint: {survey.checkpoint_fault}"}
        return
    yield {"kind": "checkpoint", "place": checkpoint.forced, "journal": checkpoint.journal_id}
    for pointer in checkpoint.snapshots:
        head = survey.snapshots.get(pointer.number)
        files = [file.number for file in head.files] if head is not None else None
        yield {"kind": "snapshot", "place": pointer.place, "number": pointer.number, "files": files}


def row_of(part: Entry | Gap) -> dict[str, Any]:
    """One entry, or a gap between whole ones."""
    if isinstance(part, Gap):
        return {"kind": "damaged", "place": part.first, "next": part.next, "reason": part.reason}
    row: dict[str, Any] = {"place": part.place, "size": part.size}
    content = part.content
    if isinstance(content, Filler):
        return {"kind": "filler", **row}
    if isinstance(content, Operation):
        name = OPERATION_NAMES.get(content.kind, f"operation {content.kind}")
        return {"kind": "operation", **row, "operation": name, "epoch": content.epoch, **_said(content)}
    return {"kind": "messages", **row, "epoch": content.epoch, **_messages(content)}


def _messages(content: AppendMsg) -> dict[str, Any]:
    return {
        "incarnation": ids.producer_of(content.log_id),
        "partition": ids.sequence_of(content.log_id),
        "producer": content.producer_id,
        "sequence": content.sequence,
        "count": content.count,
        "bytes": len(content.data),
        "moved_from": content.moved_from or None,
    }


def _said(content: Operation) -> dict[str, Any]:
    """What an operation says; its raw payload where that makes no sense."""
    from tfmq.transaction.journal_records import unpack

    try:
        found = unpack(*content)
    except ValueError as error:
        return {"payload": content.payload.hex(), "reason": str(error)}
    fields = {name: _plain(value) for name, value in found._asdict().items() if name != "epoch"}
    origin = fields.pop("origin", None)
    return {**(origin or {}), **fields}


def _plain(value: Any) -> Any:
    if hasattr(value, "_asdict"):
        return {name: _plain(each) for name, each in value._asdict().items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value.hex() if isinstance(value, bytes) else value


def line_of_entry(row: dict[str, Any]) -> str:
    """A row for a person."""
    place, kind = f"{row['place']:>12}", row["kind"]
    if kind == "damaged":
        return f"{place}  DAMAGED up to {row['next']}: {row['reason']}"
    if kind == "filler":
        return f"{place}  filler in the place of {row['size']} lost bytes"
    if kind == "messages":
        moved = f", moved from {row['moved_from']}" if row["moved_from"] else ""
        return (
            f"{place}  transaction {row['epoch']}: {row['count']} messages, {row['bytes']} bytes, for partition"
            f" {row['partition']} of incarnation {row['incarnation']}{moved}"
        )
    if kind == "operation":
        return f"{place}  {_operation_line(row)}"
    if kind == "checkpoint":
        return f"{place}  checkpoint of journal {row['journal']}: forced up to here"
    if kind == "snapshot":
        return f"{place}  snapshot {row['number']}, which needs files {row['files'] or 'unknown'}"
    return f"{place}  file {row['number']}, {row['size']} bytes"


def _operation_line(row: dict[str, Any]) -> str:
    of = f" of transaction {row['epoch']}" if row["epoch"] else ""
    xid = f" {row['xid']!r}" if row.get("xid") else ""
    group = f" of commit group {row['group']!r}, sequence {row['sequence']}" if "sequence" in row else ""
    at = ""
    if isinstance(row.get("time_ms"), int):
        at = f", {time_text(row['time_ms'])}"
    fault = f" ({row['reason']})" if "reason" in row else ""
    return f"{row['operation'].upper()}{of}{xid}{group}{at}{fault}"


def repair_row(done: JournalRepaired) -> dict[str, Any]:
    """One thing that a repair of the journal mended, in the columns of a repair."""
    return {
        "file": done.file, "first": done.first, "next": done.next, "kept": 0, "lost": 0, "lost_bytes": done.lost,
        "reason": done.reason, "note": done.note,
    }  # fmt: skip
