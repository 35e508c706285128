"""`tfmq log` for the buckets of delayed messages: their rows, for a person and for a program."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from journal.disk import Disk
from journal.errors import Corrupt
from journal.record.format import HEADER_SIZE, records_of
from tfmq import ids
from tfmq.cli.output import counted, time_text
from tfmq.delay.buckets.bucket import ALL_BYTES, Bucket
from tfmq.delay.buckets.format import CHUNK_SIZE, Chunk, Columns, decode_columns
from tfmq.delay.buckets.fsck import BucketRepaired, BucketSurvey

PREVIEW = 60
READ_COUNT: Final = 1000
"""Messages read at a time."""


def rows_of_buckets(disk: Disk, folder: Path, file: Path | None, control: bool) -> Iterator[dict[str, Any]]:
    """Every delayed message in `folder`, or in one `file` of it, bucket by bucket, each as it lies in its file.

    What cannot be read is a row, too. With `control` the checkpoint, each file and each chunk have rows of their own.
    """
    survey = BucketSurvey(disk, str(folder))
    try:
        if file is None and survey.fault is not None:
            yield _damaged(survey.fault, 0)
        elif file is None and control and survey.checkpoint is not None:
            yield _checkpoint_row(survey)
        for _, bucket in survey.buckets():
            if file is None or bucket.path == str(file):
                yield from _bucket_rows(survey, bucket, control)
    finally:
        survey.close()


def _checkpoint_row(survey: BucketSurvey) -> dict[str, Any]:
    checkpoint = survey.checkpoint
    assert checkpoint is not None
    return {
        "kind": "checkpoint", "due": 0, "store": checkpoint.identity.store_id, "arrivals": checkpoint.offset,
        "number": checkpoint.number, "broker_ms": checkpoint.broker_ms, "buckets": len(checkpoint.buckets),
    }  # fmt: skip


def _bucket_rows(survey: BucketSurvey, bucket: Bucket, control: bool) -> Iterator[dict[str, Any]]:
    start = bucket.span.start
    if control:
        yield {
            "kind": "bucket",
            "due": start,
            "end": bucket.span.end,
            "size": bucket.size,
            "count": bucket.count,
        }
    for part in survey.parts(bucket):
        if isinstance(part, Corrupt):
            yield _damaged(part, start)
            continue
        if control:
            yield {
                "kind": "chunk", "due": start, "position": part.position, "size": part.size, "count": part.count,
                "arrivals": part.arrivals,
            }  # fmt: skip
        yield from _chunk_rows(survey, bucket, part)


def _chunk_rows(survey: BucketSurvey, bucket: Bucket, chunk: Chunk) -> Iterator[dict[str, Any]]:
    with survey.files.use(bucket.path) as file:
        data = file.pread(chunk.columns_size, chunk.position + CHUNK_SIZE)
    try:
        columns = decode_columns(data, chunk, bucket.span, bucket.seed, bucket.path)
    except Corrupt as error:
        yield _damaged(error, bucket.span.start)
        return
    for start in range(0, columns.length, READ_COUNT):
        positions, numbers = (
            columns.positions[start : start + READ_COUNT],
            columns.numbers[start : start + READ_COUNT],
        )
        for index, record in enumerate(bucket.read(survey.files, positions, numbers, ALL_BYTES), start):
            yield _message(columns, index, record, bucket)


def _message(columns: Columns, index: int, record: bytes | None, bucket: Bucket) -> dict[str, Any]:
    from tfmq.cli.log import content

    target = columns.table[columns.targets[index]]
    row: dict[str, Any] = {
        "due": columns.dues[index],
        "number": columns.numbers[index],
        "topic": target.topic,
        "partition": ids.sequence_of(target.log_id),
        "incarnation": ids.producer_of(target.log_id),
        "absolute": bool(columns.flags[index]),
        "size": columns.sizes[index],
    }
    if record is None:
        position = columns.positions[index]
        return {
            "kind": "damaged",
            **row,
            "file": bucket.path,
            "position": position,
            "reason": "its checksum fails",
        }
    (found,) = records_of(record)
    return {"kind": "delayed", **row, **content(found, memoryview(record)[HEADER_SIZE:])}


def _damaged(error: Corrupt, due: int) -> dict[str, Any]:
    return {
        "kind": "damaged", "due": due, "file": error.path, "position": error.first, "next": error.next,
        "reason": error.reason,
    }  # fmt: skip


def line_of_delayed(row: dict[str, Any]) -> str:
    """A row for a person."""
    kind, at = row["kind"], time_text(row["due"], exact=True)
    if kind == "damaged" and "number" in row:
        return f"{at}  {row['number']:>9}  DAMAGED, for {row['topic']}-{row['partition']}: {row['reason']}"
    if kind == "damaged":
        return f"{at}  DAMAGED from {row['position']} to {row['next']} of {row['file']}: {row['reason']}"
    if kind == "checkpoint":
        buckets = counted(row["buckets"], "bucket")
        return f"checkpoint of store {row['store']}: {buckets}, arrivals up to {row['arrivals']}"
    if kind == "bucket":
        end, count = time_text(row["end"], exact=True), counted(row["count"], "message")
        return f"{at}  bucket up to {end}: {count}, {row['size']} bytes"
    if kind == "chunk":
        return (
            f"{at}  chunk at {row['position']}: {counted(row['count'], 'message')}, {row['size']} bytes,"
            f" arrivals up to {row['arrivals']}"
        )
    payload = row["payload"] if "payload" in row else f"base64 {row['payload_base64']}"
    payload = "(tombstone)" if payload is None else payload
    key = f" [{row['key']}]" if row.get("key") else ""
    cut = payload if len(payload) <= PREVIEW else payload[:PREVIEW] + "…"
    return f"{at}  {row['number']:>9}  {row['topic']}-{row['partition']}  {row['id']}{key}  {cut}"


def repair_row(done: BucketRepaired) -> dict[str, Any]:
    """One thing that a repair of the buckets mended, in the columns of a repair."""
    return {
        "file": done.file, "first": 0, "next": 0, "kept": done.kept, "lost": done.lost, "reason": done.reason,
        "note": done.note,
    }  # fmt: skip
