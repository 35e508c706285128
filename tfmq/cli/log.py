"""`tfmq log`: look into segment files, verify them, mend them; without a server."""

from collections.abc import Iterator
from dataclasses import asdict
from itertools import chain, islice
from pathlib import Path
from typing import Any

import click

from journal.disk import Disk, RealDisk
from journal.fsck.log_repair import remove_originals, repair
from journal.fsck.log_verify import Report, Stretch, find_log_id, survey, verify
from journal.fsck.wal_repair import repair_journal
from journal.fsck.wal_verify import verify_journal
from journal.log.segment import Segment
from journal.record.block import Block
from journal.record.format import (
    FLAG_FILLER,
    FLAG_TOMBSTONE,
    HEADER_SIZE,
    BadRecord,
    Record,
    records_of,
    split_body,
)
from tfmq import ids
from tfmq.broker.data_repair import (
    DataRepaired,
    Mended,
    is_data_folder,
    lost_is_damage,
    lost_partition,
    repair_catalog,
    repair_data,
    repair_version,
    verify_catalog,
    verify_data,
)
from tfmq.cli import log_delay
from tfmq.cli.log_arrivals import line_of_note, note_fields
from tfmq.cli.log_delay import line_of_delayed, rows_of_buckets
from tfmq.cli.log_transactions import line_of_entry, repair_row, rows_of_journal
from tfmq.cli.offline import (
    CATALOG_FOLDER,
    checked,
    delay_of,
    in_words,
    is_house_name,
    is_segment,
    journal_of,
    locked,
    partitions_of,
    segments_of,
    size_of,
    suffix_of,
)
from tfmq.cli.output import (
    Output,
    counted,
    dumps,
    offline_options,
    payload_fields,
    progress,
    size_text,
    time_text,
)
from tfmq.delay.buckets.fsck import repair_buckets, verify_buckets
from tfmq.errors import DecodeFailed
from tfmq.message import decode_attribute

DAMAGE_FOUND = 4
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
    help="Begin at this offset (of the journal: place; of delayed messages: due time in ms).",
)
@click.option("--control", is_flag=True, help="Show control records too.")
@offline_options
def dump(path: Path, count: int | None, first: int, control: bool, output: Output) -> int:
    """Print the records of a segment file, a partition, the journal, the delayed messages or a data folder."""
    disk, segments, journal = RealDisk(), segments_of(checked(path)), journal_of(path)
    rows: Iterator[dict[str, Any]] = (
        {"log": s.parent.name, **row} for s in segments for row in rows_of(disk, s, control)
    )
    if journal is not None:
        entries = rows_of_journal(disk, journal, path if path.is_file() else None, control)
        rows = chain(rows, ({"log": journal.name, **row} for row in entries))
    delay = delay_of(path)
    if delay is not None:
        waiting = rows_of_buckets(disk, delay, path if path.is_file() else None, control)
        rows = chain(rows, ({"log": delay.name, **row} for row in waiting))
    folder = path if path.is_dir() else path.parent
    alone = folder in (journal, *(s.parent for s in segments)) or (folder == delay and not segments)
    damaged, log_shown = False, folder.name if alone else ""
    for row in islice((row for row in rows if begins_at(row) >= first), count):
        damaged |= row["kind"] == "damaged"
        if row["log"] != log_shown and not output.json:
            log_shown = row["log"]
            click.echo(f"{log_shown}:")
        click.echo(dumps(row) if output.json else line_of(row))
    return DAMAGE_FOUND if damaged else 0


def begins_at(row: dict[str, Any]) -> int:
    """What `--from` is compared with: an offset, a place, or a due time."""
    found: int = row["place"] if "place" in row else row["due"] if "due" in row else row["offset"]
    return found


def rows_of(disk: Disk, path: Path, control: bool) -> Iterator[dict[str, Any]]:
    """Every record of a segment, in order; a stretch that cannot be read is a row of its own."""
    base = int(path.name.split(".")[0])
    if not path.stat().st_size:
        return  # nothing came yet; where there should be something, verify knows
    log_id = find_log_id(disk, str(path))
    if log_id is None:
        yield {
            "kind": "damaged",
            "offset": base,
            "next": base + path.stat().st_size,
            "reason": "no whole block in it",
        }
        return
    segment = Segment.open(disk, str(path.parent), base, log_id, writable=False, suffix=suffix_of(path))
    try:
        for part in survey(segment):
            if isinstance(part, Stretch):
                first, following = base + part.first, base + part.next
                yield {"kind": "damaged", "offset": first, "next": following, "reason": part.reason}
            else:
                yield from block_rows(part, control)
    finally:
        segment.close()


def block_rows(block: Block, control: bool) -> Iterator[dict[str, Any]]:
    ordinal = block.control.first_ordinal
    for record in records_of(block.data):
        offset = block.offset + record.position
        if record.flag & FLAG_FILLER:
            yield {"kind": "filler", "offset": offset, "ordinal": ordinal, "count": record.checksum}
            ordinal += record.checksum
            continue
        note = note_fields(record, block.data)
        if note is not None:
            yield {"kind": "note", "offset": offset, "ordinal": ordinal, **note}
            ordinal += 1
            continue
        body = block.data[record.position + HEADER_SIZE : record.position + record.size]
        yield {"kind": "record", "offset": offset, "ordinal": ordinal, **content(record, body)}
        ordinal += 1
    if control:
        fields = {k: v for k, v in block.control._asdict().items() if k not in ("offset", "version")}
        yield {"kind": "control", "offset": block.next - CONTROL_ROW_BYTES, **fields}


CONTROL_ROW_BYTES = 100  # a control record, header and body: docs/formats/record.md


def content(record: Record, body: memoryview) -> dict[str, Any]:
    """What a record says; where its inside makes no sense, its raw body as the payload and why."""
    row: dict[str, Any] = {"id": ids.print_id(record.id)}
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


def line_of(row: dict[str, Any]) -> str:
    """A row for a person."""
    if "place" in row:
        return line_of_entry(row)
    if "due" in row:
        return line_of_delayed(row)
    if row["kind"] == "damaged":
        return f"{row['offset']:>12}  DAMAGED up to {row['next']}: {row['reason']}"
    if row["kind"] == "note":
        return line_of_note(row)
    if row["kind"] == "filler":
        return f"{row['offset']:>12}  {row['ordinal']:>9}  filler in the place of {row['count']} lost"
    if row["kind"] == "control":
        return (
            f"{row['offset']:>12}  {'':>9}  control: {row['records']} records, {row['size']} bytes,"
            f" appended {time_text(row['append_time'])}, epoch {row['epoch']}, forced up to {row['forced']}"
        )
    payload = row["payload"] if "payload" in row else f"base64 {row['payload_base64']}"
    payload = "(tombstone)" if payload is None else payload
    key = f" [{row['key']}]" if row.get("key") else ""
    cut = payload if len(payload) <= PREVIEW else payload[:PREVIEW] + "…"
    return f"{row['offset']:>12}  {row['ordinal']:>9}  {row['id']}{key}  {cut}"


@log.command(
    "verify",
    short_help="Check every block, index and mark.",
    epilog="\b\nExample:\n  tfmq log verify tfmq-data --records",
)
@click.argument("path", type=click.Path(path_type=Path, readable=False))
@click.option("--records", is_flag=True, help="Check each record's own checksum too (slower).")
@offline_options
def verify_command(path: Path, records: bool, output: Output) -> int:
    """Check every block, index and mark; exit code 4 when something is damaged."""
    with in_words(path):
        is_data = is_data_folder(RealDisk(), str(path))
        total = size_of(path if is_data else checked(path))
    with locked(path) as disk, progress(output, f"verifying {path}", total) as advance:
        moved = Moved(advance)
        found = verify_data(disk, str(path), records=records, progress=moved) if is_data else None
        reports = list(reports_of(disk, path, records, moved)) if found is None else found
    findings = [asdict(finding) for report in reports for finding in report.findings]
    damaged = any(report.damaged for report in reports)
    if output.json:
        sums = {
            name: sum(getattr(r, name) for r in reports)
            for name in ("segments", "bytes", "blocks", "records")
        }
        click.echo(dumps({"path": str(path), **sums, "damaged": damaged, "findings": findings}))
    else:
        show(output, reports, findings)
    return DAMAGE_FOUND if damaged else 0


def reports_of(disk: Disk, path: Path, records: bool, moved: "Moved") -> Iterator[Report]:
    """A report for each kind of segment in what `path` names, one for the transaction journal, one for the buckets."""
    folders = (
        [path]
        if is_segment(path) or any(p.parent == path for p in segments_of(path))
        else partitions_of(path)
    )
    for folder in folders:
        report = lost_is_damage(
            verify(disk, str(folder), records=records, suffix=suffix_of(folder), progress=moved)
        )
        report.findings = [f for f in report.findings if not is_house_name(Path(f.file))]
        if is_meta(disk, folder):
            report.findings += verify_catalog(disk, str(folder.parent))
        yield report
    journal = journal_of(path)
    if journal is not None:
        yield verify_journal(disk, str(journal), records=records, progress=moved)
    delay = delay_of(path)
    if delay is not None:
        yield verify_buckets(disk, str(delay), records=records, progress=moved)


class Moved:
    """Turns 'so far of this file' into steps for the bar."""

    def __init__(self, advance: Any) -> None:
        self.advance, self.path, self.done = advance, "", 0

    def __call__(self, path: str, done: int, total: int) -> None:
        if path != self.path:
            self.path, self.done = path, 0
        self.advance(done - self.done)
        self.done = done


def show(output: Output, reports: list[Report], findings: list[dict[str, Any]]) -> None:
    columns = ("weight", "file", "first", "next", "field", "what")
    if findings:
        output.rows(findings, columns, "")
    segments, records = sum(r.segments for r in reports), sum(r.records for r in reports)
    size = size_text(sum(r.bytes for r in reports))
    bad = sum(f["weight"] == "damage" for f in findings)
    places = counted(bad, "damaged place")
    verdict = f"{places}; `tfmq log repair` mends what can be mended" if bad else "no damage"
    output.say(f"{counted(segments, 'segment')}, {size}, {counted(records, 'record')}: {verdict}")


@log.command(
    "repair",
    short_help="Mend what is damaged in a partition, the journal, the delayed messages or a data folder.",
    epilog="\b\nExample:\n  tfmq log repair tfmq-data/orders-0 --dry-run",
)
@click.argument("path", type=click.Path(path_type=Path, readable=False))
@click.option("--dry-run", is_flag=True, help="Say what would be kept and lost; change nothing.")
@click.option("--remove-originals", "remove", is_flag=True, help="Remove what earlier repairs kept aside.")
@offline_options
def repair_command(path: Path, dry_run: bool, remove: bool, output: Output) -> int:
    """Mend damaged segments, marks, the catalog, the transaction journal and the delayed messages.

    What is lost of a partition or of the journal becomes a gap that readers pass over. A catalog is rebuilt from its
    snapshot and from the folders. It says what is lost and what cannot be known.
    """
    with in_words(path):
        is_data = is_data_folder(RealDisk(), str(path))
        if not is_data and checked(path).is_file():
            raise click.UsageError(f"{path} is a file: give its folder, which is mended as a whole")
    with locked(path) as disk:
        if remove:
            places = kept_in(path)
            gone = [name for place in sorted(places) for name in remove_originals(disk, str(place))]
            output.say(f"removed {counted(len(gone), 'kept original')}")
            return 0
        mended = repair_data if is_data else repair_part
        done = mended(disk, str(path), dry_run=dry_run)
    said_so(output, done, dry_run)
    for error in done.refused:
        click.echo(f"tfmq: not mended: {error}", err=True)
    return DAMAGE_FOUND if done.refused else 0


def kept_in(path: Path) -> set[Path]:
    """The folders at `path` in which repairs keep what they replace."""
    folders = [path] if any(p.parent == path for p in segments_of(path)) else partitions_of(path)
    others = (path, path / CATALOG_FOLDER, journal_of(path), delay_of(path))
    return {*folders, *(other for other in others if other is not None and other.is_dir())}


def repair_part(disk: Disk, path: str, *, dry_run: bool) -> DataRepaired:
    """What lies at `path`, which is a folder in a data folder."""
    place = Path(path)
    if is_meta(disk, place):
        data = str(place.parent)
        catalog = repair_catalog(disk, data, dry_run=dry_run)
        return DataRepaired([*catalog, *repair_version(disk, data, dry_run=dry_run)])
    folders = [place] if any(p.parent == place for p in segments_of(place)) else partitions_of(place)
    journal, delay = journal_of(place), delay_of(place)
    logs = [each for f in folders for each in repair(disk, str(f), dry_run=dry_run, suffix=suffix_of(f))]
    entries = repair_journal(disk, str(journal), dry_run=dry_run) if journal is not None else []
    buckets = repair_buckets(disk, str(delay), dry_run=dry_run) if delay is not None else []
    lost = [each for folder in folders if (each := lost_partition(disk, str(folder))) is not None]
    return DataRepaired([], logs, entries, buckets, lost)


def is_meta(disk: Disk, folder: Path) -> bool:
    return folder.name == CATALOG_FOLDER and is_data_folder(disk, str(folder.parent))


def said_so(output: Output, done: DataRepaired, dry_run: bool) -> None:
    columns = (
        "file",
        "first",
        "next",
        "kept",
        "lost",
        *(["lost_bytes"] if done.journal else []),
        "reason",
        "note",
    )
    rows = [
        *map(folder_row, done.folder),
        *map(asdict, done.logs),
        *map(repair_row, done.journal),
        *map(log_delay.repair_row, done.buckets),
    ]
    output.rows(rows, columns, "" if done.refused else "nothing to repair")
    verbs = ("would be kept", "would be lost") if dry_run else ("kept", "lost")
    if done.logs:
        kept, lost = sum(d.kept for d in done.logs), sum(d.lost for d in done.logs)
        output.say(
            f"{counted(len(done.logs), 'place')}: {counted(kept, 'record')} {verbs[0]}, {lost:,} {verbs[1]}"
        )
    if done.journal:
        lost = sum(entry.lost for entry in done.journal)
        output.say(f"transactions: {counted(len(done.journal), 'place')}, {counted(lost, 'byte')} {verbs[1]}")
    if done.buckets:
        kept, lost = sum(each.kept for each in done.buckets), sum(each.lost for each in done.buckets)
        mended = counted(len(done.buckets), "file")
        output.say(f"delayed: {mended}: {counted(kept, 'message')} {verbs[0]}, {lost:,} {verbs[1]}")


def folder_row(mended: Mended) -> dict[str, Any]:
    """One thing of the catalog or of the folder itself, in the columns of a repair."""
    return {
        "file": mended.file, "first": 0, "next": 0, "kept": 0, "lost": 0, "reason": mended.reason,
        "note": mended.note,
    }  # fmt: skip
