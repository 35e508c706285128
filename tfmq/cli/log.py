"""`tfmq log`: print, verify and repair the files of a data folder, without a server.

The argument PATH of the commands is a data folder, the folder of a partition, of the transactions or of the delayed
messages, or a file in one of these folders.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict
from itertools import chain, islice
from pathlib import Path
from typing import Any, Final

import click

from journal import filenames
from journal.disk import Disk, RealDisk
from journal.errors import Corrupt, Locked, NewerFormat
from journal.fsck.findings import VerifyReport, remove_originals
from journal.fsck.log_repair import repair
from journal.fsck.log_verify import DamagedRange, find_log_id, opened_segment, scan_segment, verify
from journal.fsck.wal_repair import repair_journal
from journal.fsck.wal_verify import JournalGap, JournalScan, is_journal, unrepaired_damage, verify_journal
from journal.record.block import Block
from journal.record.format import FLAG_FILLER, FLAG_TOMBSTONE, HEADER_SIZE, BadRecord, Record, records_of, split_body
from journal.wal.entry import OPERATION_NAMES, JournalEntry, LostEntries, Operation
from tfmq import ids
from tfmq.broker.catalog import SUFFIX as CATALOG_SUFFIX
from tfmq.broker.data_repair import (
    META_NAMES,
    CatalogScan,
    DataRepairResult,
    PendingTransactions,
    has_log,
    is_data_folder,
    lost_is_damage,
    lost_partition,
    repair_catalog,
    repair_data,
    repair_version,
    verify_catalog,
    verify_data,
)
from tfmq.cli.main import DAMAGE_FOUND
from tfmq.cli.output import (
    Output,
    json_text,
    offline_options,
    payload_fields,
    progress,
    size_text,
    time_text,
    with_noun,
)
from tfmq.data_dir import META_NAME, path_error_advice
from tfmq.delay.arrivals.header import HEADER_ID, KIND_NAMES, BadArrivalHeader, decode_header
from tfmq.delay.arrivals.log import ARRIVALS_SUFFIX as ARRIVALS_SUFFIX
from tfmq.delay.buckets.bucket import NO_BYTE_LIMIT, Bucket
from tfmq.delay.buckets.format import CHUNK_SIZE, ChunkColumns, ChunkHead, parse_bucket_name
from tfmq.delay.buckets.fsck import ARRIVALS_NAME, BucketScan, is_bucket_folder, repair_buckets, verify_buckets
from tfmq.delay.buckets.fsck import FOLDER_NAME as DELAY_FOLDER
from tfmq.errors import DecodeFailed
from tfmq.message import decode_attribute
from tfmq.replication.local_state import DEPOSED, LocalStateFile
from tfmq.replication.operations import LOCAL_FOLDER

PREVIEW = 60


@click.group()
def log() -> None:
    """The files of a data folder, without a server: dump, verify, repair."""


@log.command(epilog="\b\nExample:\n  tfmq log dump tfmq-data/orders-0 -n 5")
@click.argument("path", type=click.Path(path_type=Path, readable=False))
@click.option("-n", "count", type=click.IntRange(min=1), help="Stop after this many rows.")
@click.option(
    "--from",
    "first",
    type=click.IntRange(min=0),
    default=0,
    help="Begin at this offset (in the journal: LSN; of delayed messages: due time in ms).",
)
@click.option("--control", is_flag=True, help="Show block trailers too.")
@offline_options
def dump(path: Path, count: int | None, first: int, control: bool, output: Output) -> int:
    """Print the records of a segment file, a partition, the journal, the delayed messages or a data folder."""
    disk, segments, journal = RealDisk(), segments_of(check_path(path)), journal_of(path)
    rows: Iterator[dict[str, Any]] = (
        {"log": s.parent.name, **row} for s in segments for row in segment_rows(disk, s, control)
    )
    if journal is not None:
        entries = journal_rows(disk, journal, path if path.is_file() else None, control)
        rows = chain(rows, ({"log": journal.name, **row} for row in entries))
    delay = delay_of(path)
    if delay is not None:
        waiting = delayed_rows(disk, delay, path if path.is_file() else None, control)
        rows = chain(rows, ({"log": delay.name, **row} for row in waiting))
    folder = path if path.is_dir() else path.parent
    alone = folder in (journal, *(s.parent for s in segments)) or (folder == delay and not segments)
    damaged, log_shown = False, folder.name if alone else ""
    for row in islice((row for row in rows if start_position(row) >= first), count):
        damaged |= row["kind"] == "damaged"
        if row["log"] != log_shown and not output.json:
            log_shown = row["log"]
            click.echo(f"{log_shown}:")
        click.echo(json_text(row) if output.json else format_record(row))
    return DAMAGE_FOUND if damaged else 0


def start_position(row: dict[str, Any]) -> int:
    """Return the value of a row with which `--from` is compared: its LSN, due time, or offset."""
    found: int = row["place"] if "place" in row else row["due"] if "due" in row else row["offset"]
    return found


def make_row(kind: str, **fields: Any) -> dict[str, Any]:
    return {"kind": kind, **fields}


def segment_rows(disk: Disk, path: Path, control: bool) -> Iterator[dict[str, Any]]:
    """Yield a row for every record of a segment, in order, and for every unreadable range."""
    base = int(path.name.split(".")[0])
    if not path.stat().st_size:
        return  # an empty log is no error here; verify reports missing data
    log_id = find_log_id(disk, str(path))
    if log_id is None:
        size = path.stat().st_size
        yield make_row("damaged", offset=base, next=base + size, reason="no whole block in it")
        return
    with opened_segment(disk, str(path.parent), base, log_id, suffix_of(path)) as segment:
        for part in scan_segment(segment):
            if isinstance(part, DamagedRange):
                yield make_row("damaged", offset=base + part.first, next=base + part.next, reason=part.reason)
            else:
                yield from block_rows(part, control)


def block_rows(block: Block, control: bool) -> Iterator[dict[str, Any]]:
    ordinal = block.control.first_ordinal
    for record in records_of(block.data):
        offset = block.offset + record.position
        if record.flag & FLAG_FILLER:
            yield make_row("filler", offset=offset, ordinal=ordinal, count=record.checksum)
            ordinal += record.checksum
            continue
        arrival = arrival_fields(record, block.data)
        if arrival is not None:
            yield make_row("note", offset=offset, ordinal=ordinal, **arrival)
            ordinal += 1
            continue
        body = block.data[record.position + HEADER_SIZE : record.position + record.size]
        yield make_row("record", offset=offset, ordinal=ordinal, **record_content(record, body))
        ordinal += 1
    if control:
        fields = {ROW_KEYS.get(k, k): v for k, v in block.control._asdict().items() if k not in ("offset", "version")}
        yield make_row("control", offset=block.next - BLOCK_TRAILER_BYTES, **fields)


ROW_KEYS = {"durable_offset": "forced", "positions": "places"}
"""Name of a field in the code -> its key in rows. The keys are earlier names, so that scripts continue to work."""
BLOCK_TRAILER_BYTES = 100  # a block trailer, header and body: docs/formats/record.md


def record_content(record: Record, body: memoryview) -> dict[str, Any]:
    """Return the fields of a row that show a record's content; for an invalid body, its bytes and the reason."""
    row: dict[str, Any] = {"id": ids.format_id(record.id)}
    try:
        attribute, payload = split_body(body, record.flag)
    except BadRecord as error:
        return row | payload_fields(bytes(body)) | {"reason": error.reason}
    if attribute is not None:
        try:
            found = decode_attribute(attribute)
        except DecodeFailed as error:
            row |= {"attribute": bytes(attribute), "reason": str(error)}
        else:
            row |= {"born_ms": found.born_ms, "key": found.key, "tag": found.tag}
            row["properties"] = dict(found.properties)
    return row | payload_fields(None if record.flag & FLAG_TOMBSTONE else bytes(payload))


def format_record(row: dict[str, Any]) -> str:
    """Format any row of `dump` as a line."""
    if "place" in row:
        return format_entry(row)
    if "due" in row:
        return format_delayed(row)
    if row["kind"] == "damaged":
        return f"{row['offset']:>12}  DAMAGED up to {row['next']}: {row['reason']}"
    if row["kind"] == "note":
        return format_arrival(row)
    if row["kind"] == "filler":
        return f"{row['offset']:>12}  {row['ordinal']:>9}  filler for {row['count']} lost records"
    if row["kind"] == "control":
        return (
            f"{row['offset']:>12}  {'':>9}  control: {row['records']} records, {row['size']} bytes,"
            f" appended {time_text(row['append_time'])}, epoch {row['epoch']}, forced up to {row['forced']}"
        )
    return f"{row['offset']:>12}  {row['ordinal']:>9}  {message_text(row)}"


def message_text(row: dict[str, Any]) -> str:
    payload = row["payload"] if "payload" in row else f"base64 {row['payload_base64']}"
    payload = "(tombstone)" if payload is None else payload
    key = f" [{row['key']}]" if row.get("key") else ""
    cut = payload if len(payload) <= PREVIEW else payload[:PREVIEW] + "…"
    return f"{row['id']}{key}  {cut}"


@log.command(
    "verify",
    short_help="Verify blocks, indexes and checkpoints.",
    epilog="\b\nExample:\n  tfmq log verify tfmq-data --records",
)
@click.argument("path", type=click.Path(path_type=Path, readable=False))
@click.option("--records", is_flag=True, help="Verify the checksum of each record too (slower).")
@offline_options
def verify_command(path: Path, records: bool, output: Output) -> int:
    """Check every block, index and checkpoint; exit code 4 when something is damaged.

    Damage is data that is known to have been durable and cannot be read. A row with the weight "note" reports something
    else that the next start or a repair corrects: an index, a snapshot, or one of the two slots of a checkpoint; no
    message is lost with it. After a crash there may also be a torn tail (an incomplete write at the end of a log),
    which the next start truncates, or a newest file that is missing or empty. If the files do not show whether
    acknowledged messages are lost, the note says so. If there are only notes, the exit code is 0.
    """
    with explain_path_errors(path):
        if not path.is_file():
            refuse_deposed(path)
        is_data = is_data_folder(RealDisk(), str(path))
        total = size_of(path if is_data else check_path(path))
    with lock_data_folder(path) as disk, progress(output, f"verifying {path}", total) as advance:
        moved = FileProgress(advance)
        found = verify_data(disk, str(path), records=records, progress=moved) if is_data else None
        reports = list(verify_path(disk, path, records, moved)) if found is None else found
    findings = [asdict(finding) for report in reports for finding in report.findings]
    damaged = any(report.damaged for report in reports)
    if output.json:
        sums = {name: sum(getattr(r, name) for r in reports) for name in ("segments", "bytes", "blocks", "records")}
        click.echo(json_text({"path": str(path), **sums, "damaged": damaged, "findings": findings}))
    else:
        print_reports(output, reports, findings)
    return DAMAGE_FOUND if damaged else 0


def verify_path(disk: Disk, path: Path, records: bool, moved: FileProgress) -> Iterator[VerifyReport]:
    """Yield a report for each log, the journal and the buckets at `path`. `moved` is called with the progress."""
    folders = [path] if is_segment(path) or is_log_folder(path) else partitions_of(path)
    for folder in folders:
        report = lost_is_damage(verify(disk, str(folder), records=records, suffix=suffix_of(folder), progress=moved))
        report.findings = [f for f in report.findings if not is_broker_file(Path(f.file))]
        if is_meta(disk, folder):
            report.findings += verify_catalog(disk, str(folder.parent))
        yield report
    journal = journal_of(path)
    if journal is not None:
        yield verify_journal(disk, str(journal), records=records, progress=moved)
    delay = delay_of(path)
    if delay is not None:
        yield verify_buckets(disk, str(delay), records=records, progress=moved)


class FileProgress:
    """Callback that advances a progress bar while files are read. A call gets the number of bytes of a file that are
    done, and advances the bar by the bytes since the last call."""

    def __init__(self, advance: Any) -> None:
        self.advance, self._current_path, self._done_bytes = advance, "", 0

    def __call__(self, path: str, done: int, total: int) -> None:
        if path != self._current_path:
            self._current_path, self._done_bytes = path, 0
        self.advance(done - self._done_bytes)
        self._done_bytes = done


def print_reports(output: Output, reports: list[VerifyReport], findings: list[dict[str, Any]]) -> None:
    columns = ("weight", "file", "first", "next", "field", "what")
    if findings:
        output.print_rows(findings, columns, "")
    segments, records = sum(r.segments for r in reports), sum(r.records for r in reports)
    size = size_text(sum(r.bytes for r in reports))
    bad = sum(f["weight"] == "damage" for f in findings)
    count = with_noun(bad, "damaged place")
    verdict = f"{count}; `tfmq log repair` repairs what can be repaired" if bad else "no damage"
    notes = len(findings) - bad
    open_notes = sum(f["weight"] != "damage" and f["may_lose"] for f in findings)
    if notes:
        verdict += f", {with_noun(notes, 'note')}: what the next start or `tfmq log repair` corrects"
        if open_notes:
            count = with_noun(open_notes, "place")
            verdict += f"; {count} where acknowledged messages may be lost, which the files do not say"
        else:
            verdict += " without losing a message"
    output.info(f"{with_noun(segments, 'segment')}, {size}, {with_noun(records, 'record')}: {verdict}")


@log.command(
    "repair",
    short_help="Repair a partition, the journal, the delayed messages or a data folder.",
    epilog="\b\nExample:\n  tfmq log repair tfmq-data/orders-0 --dry-run",
)
@click.argument("path", type=click.Path(path_type=Path, readable=False))
@click.option("--dry-run", is_flag=True, help="Print what would be kept and lost; change nothing.")
@click.option("--remove-originals", "remove", is_flag=True, help="Remove the originals that earlier repairs kept.")
@offline_options
def repair_command(path: Path, dry_run: bool, remove: bool, output: Output) -> int:
    """Repair damaged segments, checkpoints, the catalog, the transaction journal and the delayed messages.

    Lost records of a partition or of the journal become a gap that readers skip. The catalog, the list of topics, is
    rebuilt from its snapshot and from the folders. The command prints what is lost and what cannot be determined.
    """
    with explain_path_errors(path):
        refuse_deposed(path)
        is_data = is_data_folder(RealDisk(), str(path))
        if not is_data and check_path(path).is_file():
            raise click.UsageError(f"{path} is a file: give its folder, which is repaired as a whole")
    with lock_data_folder(path, changes=not dry_run) as disk:
        if remove:
            removed = [name for folder in sorted(kept_originals(path)) for name in remove_originals(disk, str(folder))]
            output.info(f"removed {with_noun(len(removed), 'kept original')}")
            return 0
        done = (repair_data if is_data else repair_path)(disk, str(path), dry_run=dry_run)
    report_repair(output, done, dry_run)
    for error in done.failed:
        click.echo(f"tfmq: not mended: {error}", err=True)
    return DAMAGE_FOUND if done.failed else 0


def kept_originals(path: Path) -> set[Path]:
    folders = [path] if is_log_folder(path) else partitions_of(path)
    others = (path, path / META_NAME, journal_of(path), delay_of(path))
    return {*folders, *(other for other in others if other is not None and other.is_dir())}


def repair_path(disk: Disk, path: str, *, dry_run: bool) -> DataRepairResult:
    top = Path(path)
    if is_meta(disk, top):
        data = str(top.parent)
        catalog = repair_catalog(disk, data, dry_run=dry_run)
        return DataRepairResult([*catalog, *repair_version(disk, data, dry_run=dry_run)])
    folders = [top] if is_log_folder(top) else partitions_of(top)
    journal, delay = journal_of(top), delay_of(top)
    logs = [
        each
        for f in folders
        for each in repair(
            disk,
            str(f),
            dry_run=dry_run,
            suffix=suffix_of(f),
            pending=PendingTransactions(disk, str(f.parent.parent if f.name == ARRIVALS_NAME else f.parent)),
        )
    ]
    entries = repair_journal(disk, str(journal), dry_run=dry_run) if journal is not None else []
    buckets = []
    if delay is not None:
        store_id = CatalogScan(disk, str(delay.parent)).state.delay_store
        buckets = repair_buckets(disk, str(delay), dry_run=dry_run, store_id=store_id)
    lost = [each for folder in folders if (each := lost_partition(disk, str(folder))) is not None]
    if journal is not None and not (dry_run and entries):
        lost += filter(None, [unrepaired_damage(disk, str(journal))])
    return DataRepairResult([], logs, entries, buckets, lost)


def is_meta(disk: Disk, folder: Path) -> bool:
    return folder.name == META_NAME and is_data_folder(disk, str(folder.parent))


def report_repair(output: Output, done: DataRepairResult, dry_run: bool) -> None:
    lost_bytes = ("lost_bytes",) if done.journal else ()
    columns = ("file", "first", "next", "kept", "lost", *lost_bytes, "reason", "note")
    found: list[Any] = [*done.folder, *done.logs, *done.journal, *done.buckets]
    rows = list(map(asdict, found))
    output.print_rows(rows, columns, "" if done.failed else "nothing to repair")
    verbs = ("would be kept", "would be lost") if dry_run else ("kept", "lost")
    if done.logs:
        kept, lost = sum(d.kept for d in done.logs), sum(d.lost for d in done.logs)
        output.info(
            f"{with_noun(len(done.logs), 'place')}: {with_noun(kept, 'record')} {verbs[0]}, {lost:,} {verbs[1]}"
        )
    if done.journal:
        lost = sum(entry.lost_bytes for entry in done.journal)
        output.info(f"transactions: {with_noun(len(done.journal), 'place')}, {with_noun(lost, 'byte')} {verbs[1]}")
    if done.buckets:
        kept, lost = sum(each.kept for each in done.buckets), sum(each.lost for each in done.buckets)
        files = with_noun(len(done.buckets), "file")
        output.info(f"delayed: {files}: {with_noun(kept, 'message')} {verbs[0]}, {lost:,} {verbs[1]}")


def arrival_fields(record: Record, data: memoryview) -> dict[str, Any] | None:
    """Return the row fields of `record` in the block `data`; None if `record` is no valid arrival header."""
    if record.id != HEADER_ID:
        return None
    try:
        header = decode_header(data[record.position : record.position + record.size])
    except (BadArrivalHeader, NewerFormat):
        return None
    row: dict[str, Any] = {"what": KIND_NAMES[header.kind]}
    if header.record_count:
        row |= {"topic": header.topic, "log_id": header.log_id, "count": header.record_count, "size": header.size_bytes}
        row |= {"first_due": header.dues.low, "last_due": header.dues.high, "absolute": sum(header.dues.absolute)}
    if header.old_turns.dues:
        row["cancelled"] = [list(turn) for turn in zip(*header.old_turns, strict=True)]
    return row


def format_arrival(row: dict[str, Any]) -> str:
    content = row["what"]
    if "count" in row:
        first, last = time_text(row["first_due"], exact=True), time_text(row["last_due"], exact=True)
        until = "" if first == last else f" to {last}"
        content += f" of {with_noun(row['count'], 'message')} for {row['topic']}, due {first}{until}"
    if "cancelled" in row:
        numbers = row["cancelled"]
        instead = " instead of" if "count" in row else " of"
        content += f"{instead} {with_noun(len(numbers), 'message')}, the first with number {numbers[0][1]}"
    return f"{row['offset']:>12}  {row['ordinal']:>9}  arrival: {content}"


READ_COUNT: Final = 1000  # messages per read


def delayed_rows(disk: Disk, folder: Path, file: Path | None, control: bool) -> Iterator[dict[str, Any]]:
    """Yield a row for every delayed message and every unreadable range, in the order of the files.

    `file`: only rows about this bucket (file of the messages due in one span of time); None: all buckets. `control`:
    also yield rows for the checkpoint, each bucket and each chunk (messages that were written together).
    """
    with closing(BucketScan(disk, str(folder))) as scan:
        checkpoint = scan.checkpoint
        if file is None and scan.fault is not None:
            yield _damaged_row(scan.fault, 0)
        elif file is None and control and checkpoint is not None:
            yield make_row(
                "checkpoint", due=0, store=checkpoint.identity.store_id, arrivals=checkpoint.spilled_offset,
                number=checkpoint.spilled_number, broker_ms=checkpoint.broker_ms, buckets=len(checkpoint.buckets),
            )  # fmt: skip
        for _, bucket in scan.buckets():
            if file is None or bucket.path == str(file):
                yield from _bucket_rows(scan, bucket, control)


def _bucket_rows(scan: BucketScan, bucket: Bucket, control: bool) -> Iterator[dict[str, Any]]:
    start = bucket.span.start
    if control:
        yield make_row("bucket", due=start, end=bucket.span.end, size=bucket.size, count=bucket.count)
    for part in scan.chunks(bucket):
        if isinstance(part, Corrupt):
            yield _damaged_row(part, start)
            continue
        if control:
            fields = {"due": start, "position": part.position, "size": part.size, "count": part.count}
            yield make_row("chunk", **fields, arrivals=part.arrival_offset)
        yield from _chunk_rows(scan, bucket, part)


def _chunk_rows(scan: BucketScan, bucket: Bucket, chunk: ChunkHead) -> Iterator[dict[str, Any]]:
    with scan.files.opened(bucket.path) as file:
        data = file.pread(chunk.columns_size, chunk.position + CHUNK_SIZE)
    try:
        columns = bucket.decode_columns(data, chunk)
    except Corrupt as error:
        yield _damaged_row(error, bucket.span.start)
        return
    for start in range(0, len(columns.dues), READ_COUNT):
        page = slice(start, start + READ_COUNT)
        records = bucket.read(scan.files, columns.positions[page], columns.numbers[page], NO_BYTE_LIMIT)
        for index, record in enumerate(records, start):
            yield _message_row(columns, index, record, bucket)


def _message_row(columns: ChunkColumns, index: int, record: bytes | None, bucket: Bucket) -> dict[str, Any]:
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
        return make_row(
            "damaged", **row, file=bucket.path, position=columns.positions[index], reason="its checksum fails"
        )
    (found,) = records_of(record)
    return make_row("delayed", **row, **record_content(found, memoryview(record)[HEADER_SIZE:]))


def _damaged_row(error: Corrupt, due: int) -> dict[str, Any]:
    return make_row("damaged", due=due, file=error.path, position=error.first, next=error.next, reason=error.reason)


def format_delayed(row: dict[str, Any]) -> str:
    kind, at = row["kind"], time_text(row["due"], exact=True)
    if kind == "damaged" and "number" in row:
        return f"{at}  {row['number']:>9}  DAMAGED, for {row['topic']}-{row['partition']}: {row['reason']}"
    if kind == "damaged":
        return f"{at}  DAMAGED from {row['position']} to {row['next']} of {row['file']}: {row['reason']}"
    if kind == "checkpoint":
        buckets = with_noun(row["buckets"], "bucket")
        return f"checkpoint of store {row['store']}: {buckets}, arrivals up to {row['arrivals']}"
    if kind == "bucket":
        end, count = time_text(row["end"], exact=True), with_noun(row["count"], "message")
        return f"{at}  bucket up to {end}: {count}, {row['size']} bytes"
    if kind == "chunk":
        return (
            f"{at}  chunk at {row['position']}: {with_noun(row['count'], 'message')}, {row['size']} bytes,"
            f" arrivals up to {row['arrivals']}"
        )
    return f"{at}  {row['number']:>9}  {row['topic']}-{row['partition']}  {message_text(row)}"


def journal_rows(disk: Disk, folder: Path, file: Path | None, control: bool) -> Iterator[dict[str, Any]]:
    """Yield a row for every entry and every unreadable range of the transaction journal in `folder`, in order.

    `file`: only rows about this file; None: all files. `control`: also yield rows for the checkpoint, its snapshots and
    each file.
    """
    with closing(JournalScan(disk, str(folder))) as scan:
        if control and file is None:
            yield from _checkpoint_rows(scan)
        for each in scan.files:
            if file is not None and each.path != str(file):
                continue
            if control:
                yield make_row("file", place=each.first, number=each.number, size=each.size)
            if each.number in scan.head_faults:
                reason = f"head: {scan.head_faults[each.number]}"
                yield make_row("damaged", place=each.first, next=each.first, reason=reason)
            for part in scan.scan_file(each):
                yield entry_row(part)


def _checkpoint_rows(scan: JournalScan) -> Iterator[dict[str, Any]]:
    checkpoint = scan.checkpoint
    if checkpoint is None:
        yield make_row("damaged", place=0, next=0, reason=f"checkpoint: {scan.checkpoint_fault}")
        return
    yield make_row("checkpoint", place=checkpoint.durable_lsn, journal=checkpoint.journal_id)
    for pointer in checkpoint.snapshots:
        head = scan.snapshots.get(pointer.number)
        files = [file.number for file in head.files] if head is not None else None
        yield make_row("snapshot", place=pointer.lsn, number=pointer.number, files=files)


def entry_row(part: JournalEntry | JournalGap) -> dict[str, Any]:
    if isinstance(part, JournalGap):
        return make_row("damaged", place=part.first, next=part.next, reason=part.reason)
    row: dict[str, Any] = {"place": part.lsn, "size": part.size}
    content = part.content
    if isinstance(content, LostEntries):
        return make_row("filler", **row)
    if isinstance(content, Operation):
        name = OPERATION_NAMES.get(content.kind, f"operation {content.kind}")
        row |= {"operation": name, "epoch": content.epoch, **_operation_fields(content)}
        return make_row("operation", **row)
    return make_row(
        "messages",
        **row,
        epoch=content.epoch,
        incarnation=ids.producer_of(content.log_id),
        partition=ids.sequence_of(content.log_id),
        producer=content.producer_id,
        sequence=content.sequence,
        count=content.count,
        bytes=len(content.data),
        moved_from=content.moved_from or None,
    )


def _operation_fields(content: Operation) -> dict[str, Any]:
    """Return the fields of a step of a transaction. For an invalid step, return its payload and the reason."""
    from tfmq.transaction.journal_records import unpack

    try:
        found = unpack(*content)
    except ValueError as error:
        return {"payload": content.payload.hex(), "reason": str(error)}
    fields = {name: _json_value(value) for name, value in found._asdict().items() if name != "epoch"}
    origin = fields.pop("origin", None)
    return {**(origin or {}), **fields}


def _json_value(value: Any) -> Any:
    if hasattr(value, "_asdict"):
        return {ROW_KEYS.get(name, name): _json_value(each) for name, each in value._asdict().items()}
    if isinstance(value, list | tuple):
        return [_json_value(each) for each in value]
    return value.hex() if isinstance(value, bytes) else value


def format_entry(row: dict[str, Any]) -> str:
    lsn, kind = f"{row['place']:>12}", row["kind"]
    if kind == "damaged":
        return f"{lsn}  DAMAGED up to {row['next']}: {row['reason']}"
    if kind == "filler":
        return f"{lsn}  filler for {row['size']} lost bytes"
    if kind == "messages":
        moved = f", moved from {row['moved_from']}" if row["moved_from"] else ""
        count = with_noun(row["count"], "message")
        return (
            f"{lsn}  transaction {row['epoch']}: {count}, {row['bytes']} bytes, for partition {row['partition']}"
            f" of incarnation {row['incarnation']}{moved}"
        )
    if kind == "operation":
        return f"{lsn}  {_format_operation(row)}"
    if kind == "checkpoint":
        return f"{lsn}  checkpoint of journal {row['journal']}: durable up to here"
    if kind == "snapshot":
        return f"{lsn}  snapshot {row['number']}, which needs files {row['files'] or 'unknown'}"
    return f"{lsn}  file {row['number']}, {row['size']} bytes"


def _format_operation(row: dict[str, Any]) -> str:
    of = f" of transaction {row['epoch']}" if row["epoch"] else ""
    xid = f" {row['xid']!r}" if row.get("xid") else ""
    group = f" of commit group {row['group']!r}, sequence {row['sequence']}" if "sequence" in row else ""
    at = ""
    if isinstance(row.get("time_ms"), int):
        at = f", {time_text(row['time_ms'])}"
    fault = f" ({row['reason']})" if "reason" in row else ""
    return f"{row['operation'].upper()}{of}{xid}{group}{at}{fault}"


LOCK = "lock"


def is_segment(path: Path) -> bool:
    return path.is_file() and filenames.parse_segment_name(path.name, suffix_of(path)) is not None


def suffix_of(path: Path) -> str:
    """Return the suffix of segment files at `path`. The catalog and the arrival log have suffixes of their own."""
    folder = path if path.is_dir() else path.parent
    own = {META_NAME: CATALOG_SUFFIX, ARRIVALS_NAME: ARRIVALS_SUFFIX}
    return own.get(folder.name, filenames.SEGMENT_SUFFIX)


def is_broker_file(path: Path) -> bool:
    """Return whether `path` is a file of DATA/meta that is no segment."""
    return path.parent.name == META_NAME and path.name in META_NAMES


def segments_of(path: Path) -> list[Path]:
    """Return the segment files at `path`, ordered by partition and offset."""
    if is_segment(path):
        return [path]
    found = sorted(p for p in path.iterdir() if is_segment(p)) if path.is_dir() else []
    return found or [s for folder in partitions_of(path) for s in segments_of(folder)]


def journal_of(path: Path) -> Path | None:
    """Return the folder of the transaction journal at `path`, or in the data folder `path`; None without one."""
    if path.is_file() and filenames.parse_journal_name(path.name) is not None:
        return path.parent
    disk, folders = RealDisk(), (path, path / filenames.TRANSACTIONS_FOLDER)
    found = (f for f in folders if is_journal(disk, str(f)) and not is_bucket_folder(disk, str(f)))
    return next(found, None)


def delay_of(path: Path) -> Path | None:
    """Return the folder with the buckets (delayed messages) at `path`, or in the data folder `path`; None if none."""
    if path.is_file() and parse_bucket_name(path.name) is not None:
        return path.parent
    return next((f for f in (path, path / DELAY_FOLDER) if is_bucket_folder(RealDisk(), str(f))), None)


def partitions_of(path: Path) -> list[Path]:
    """Return the folders of all logs in a data folder: partitions, catalog and arrival log."""
    if not path.is_dir():
        return []
    arrivals = path / DELAY_FOLDER / ARRIVALS_NAME
    folders = [p for p in path.iterdir() if p.is_dir()] + [arrivals] * arrivals.is_dir()
    return sorted(folder for folder in folders if is_log_folder(folder))


def is_log_folder(path: Path) -> bool:
    """Return whether `path` is the folder of a log, even if the log has lost its segments."""
    return has_log(RealDisk(), str(path), suffix_of(path))


def check_path(path: Path) -> Path:
    """Return `path`; raise ClickException if `tfmq log` cannot read anything there."""
    if not path.exists():
        raise click.ClickException(f"{path} is not there")
    alone = journal_of(path) is None and delay_of(path) is None
    if alone and not segments_of(path) and not is_log_folder(path) and not partitions_of(path):
        raise click.ClickException(
            f"{path} is no segment file, no partition's folder, no folder of transactions or of delayed messages"
            " and no data folder"
        )
    return path


def refuse_deposed(path: Path) -> None:
    """Raise ClickException if `path` is or is in a folder to which a deposed primary has moved what only it had.

    What the primary after it has too is not there, which would look like damage.
    """
    for folder in (path.absolute(), *path.absolute().parents):
        if folder.parent.name == LOCAL_FOLDER and folder.name.startswith(DEPOSED):
            raise click.ClickException(
                f"{folder} has only the files that this server had otherwise than the next primary, so it cannot be"
                " verified or repaired as a whole: print it with `tfmq log dump`, or verify single files"
            )


def size_of(path: Path) -> int:
    """Return the approximate number of bytes that a verification of `path` reads."""
    if path.is_file():
        return path.stat().st_size
    logs = {filenames.SEGMENT_SUFFIX, filenames.JOURNAL_SUFFIX, CATALOG_SUFFIX, ARRIVALS_SUFFIX, ".bucket"}
    total = 0
    for folder, _, files in os.walk(path):
        for file in (Path(folder, name) for name in files if Path(name).suffix in logs):
            with suppress(OSError):  # the verification reports this error
                total += file.stat().st_size
    return total


@contextmanager
def explain_path_errors(path: Path) -> Iterator[None]:
    """Context that replaces an OSError by a ClickException with the advice of `path_error_advice`, if there is any."""
    try:
        yield
    except OSError as error:
        advice = path_error_advice(error, str(path))
        if advice is None:
            raise
        raise click.ClickException(advice) from error


@contextmanager
def lock_data_folder(path: Path, *, changes: bool = False) -> Iterator[Disk]:
    """Context in which the data folder that contains `path` is locked. Yields the disk.

    A folder without a lock file is not locked. `changes`: files of the folder will be changed, which its replication
    has to know. Raises ClickException if a server uses the folder.
    """
    disk = RealDisk()
    folder = path.parent if path.is_file() else path
    near = [folder, folder.parent] + [folder.parent.parent] * (folder.name == ARRIVALS_NAME)
    lock = next((folder / LOCK for folder in near if (folder / LOCK).exists()), None)
    with ExitStack() as locks, explain_path_errors(path):
        if lock is not None:
            try:
                locks.callback(disk.lock(str(lock)).release)
            except Locked as error:
                raise click.ClickException(
                    f"a server is running on {lock.parent}: stop it first, or use a copy"
                ) from error
            if changes:
                LocalStateFile(disk, str(lock.parent)).note_change()
        yield disk
