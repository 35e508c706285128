"""`tfmq log dump` for the notes of the arrivals: what the records behind each of them are."""

from typing import Any

from journal.errors import NewerFormat
from journal.record.format import Record
from tfmq.cli.output import counted, time_text
from tfmq.delay.arrivals.header import KIND_NAMES, NOTE_ID, BadNote, decode_note


def note_fields(record: Record, data: memoryview) -> dict[str, Any] | None:
    """What the note `record` in a block's `data` says; None if it is an ordinary record, or does not decode."""
    if record.id != NOTE_ID:
        return None
    try:
        note = decode_note(data[record.position : record.position + record.size])
    except (BadNote, NewerFormat):
        return None
    row: dict[str, Any] = {"what": KIND_NAMES[note.kind]}
    if note.records:
        row |= {
            "topic": note.topic,
            "log_id": note.log_id,
            "count": note.records,
            "size": note.size_bytes,
            "first_due": note.dues.low,
            "last_due": note.dues.high,
            "absolute": sum(note.dues.absolute),
        }
    if note.old.dues:
        row["cancelled"] = [list(turn) for turn in zip(*note.old, strict=True)]
    return row


def line_of_note(row: dict[str, Any]) -> str:
    """A row for a person."""
    said = row["what"]
    if "count" in row:
        first, last = time_text(row["first_due"], exact=True), time_text(row["last_due"], exact=True)
        until = "" if first == last else f" to {last}"
        said += f" of {counted(row['count'], 'message')} for {row['topic']}, due {first}{until}"
    if "cancelled" in row:
        numbers = row["cancelled"]
        instead = " instead of" if "count" in row else " of"
        said += f"{instead} {counted(len(numbers), 'message')}, the first with number {numbers[0][1]}"
    return f"{row['offset']:>12}  {row['ordinal']:>9}  note: {said}"
