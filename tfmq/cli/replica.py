"""`tfmq replica`: the servers of a replicated broker, and what they have stored: restore, verify, snapshot."""

from __future__ import annotations

import os
import secrets
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from datetime import datetime
from typing import Any, Final

import click

from journal.disk import Disk, RealDisk
from journal.errors import Full, Locked
from journal.filenames import LOCK_NAME, join
from tfmq.cli import replica_servers
from tfmq.cli.main import DAMAGE_FOUND, WRONG_USAGE
from tfmq.cli.option_types import Moment
from tfmq.cli.output import Output, iso_text, json_text, offline_options, progress, size_text, time_text, with_noun
from tfmq.data_dir import IGNORED_NAMES
from tfmq.replication.chain import find_newest_entry, read_manifest
from tfmq.replication.entries import Position
from tfmq.replication.errors import (
    InvalidObject,
    NewerObject,
    NoReplica,
    ReplicationError,
    StoreRefused,
    StoreUnavailable,
)
from tfmq.replication.materialize import Start, find_start, is_incomplete, materialize
from tfmq.replication.operations import LOCAL_FOLDER
from tfmq.replication.snapshot import FolderSource, Snapshotter
from tfmq.replication.store import Store
from tfmq.replication.stores.open_store import open_store
from tfmq.replication.verify import Finding, Range, count_bytes, verify

THREADS: Final = 4
SNAPSHOT_SECONDS_MAX: Final = 1800.0
"""How long an upload may take: half of the grace period of sweeps whose history is an hour, the shortest permitted."""


@click.group(epilog="\b\nExample:\n  tfmq replica restore s3://bucket/orders restored --at 2026-11-29T12:00")
def replica() -> None:
    """Replicated brokers: status, promote, restore, verify, snapshot."""


replica.add_command(replica_servers.status)
replica.add_command(replica_servers.promote)


@replica.command(epilog="\b\nExample:\n  tfmq replica restore s3://bucket/orders restored --at -2h")
@click.argument("url")
@click.argument("data", type=click.Path())
@click.option("--at", type=Moment(), help="As it was at this time, as in 2026-11-29T12:00 or -2h; else the newest.")
@offline_options
def restore(url: str, data: str, at: datetime | None, output: Output) -> None:
    """Make the data folder DATA from the replica at URL.

    DATA must be empty, or not exist. If the command is interrupted, the same command goes on where it stopped. The
    servers may be running; nothing in the store is changed. Start the restored folder as a server of its own, without
    replicate.url or with another one.
    """
    if not data:
        raise click.UsageError("DATA is empty: name the folder that is to be made.")
    at_ms = None if at is None else round(at.timestamp() * 1000)
    disk = RealDisk()
    with opened(url) as store, explained():
        start = find_start(store) if at_ms is None else find_moment(store, at_ms)
        with new_data_folder(disk, data), goes_on_when_repeated(data), ThreadPoolExecutor(THREADS) as threads:
            size = start.manifest.content.size_bytes
            with progress(output, f"restoring {data}", size) as advance:
                found = materialize(store, disk, data, threads, start, progress=advance)
    row = {
        "data": data,
        "term": found.position.term,
        "slot": found.position.slot,
        "at": iso_text(found.time_ms),
        "kept_bytes": found.kept_bytes,
        "downloaded_bytes": found.downloaded_bytes,
        "entries": found.entry_count,
        "damage": found.damage or None,
    }
    if found.damage:
        output.info(f"a newer snapshot could not be used, an earlier one was: {found.damage}")
    kept = f", {size_text(found.kept_bytes)} were there" if found.kept_bytes else ""
    downloaded = f"snapshot: {size_text(found.downloaded_bytes)} downloaded{kept}"
    applied = f"{with_noun(found.entry_count, 'entry', 'entries')} applied"
    output.report(row, f"{data} is as it was at {time_text(found.time_ms, exact=True)}; {downloaded}; {applied}")


@replica.command(
    "verify",
    short_help="Verify what is stored: snapshots and entries.",
    epilog="\b\nExample:\n  tfmq replica verify s3://bucket/orders",
)
@click.argument("url")
@offline_options
def verify_command(url: str, output: Output) -> int:
    """Read everything at URL that a restore or a server may need; exit code 4 when something is damaged.

    For each object that is missing or damaged the command says which times cannot be restored because of it. The next
    snapshot stores chunks again that are missing.
    """
    with opened(url) as store, explained(), ThreadPoolExecutor(THREADS) as threads:
        with progress(output, "verifying the replica", count_bytes(store)) as advance:
            found = verify(store, threads, advance)
        name = store.name
    if output.json:
        fields = {"manifests": found.manifests, "chunks": found.chunks, "entries": found.entries, "bytes": found.bytes}
        history = {"from": iso_text(found.first_ms), "to": iso_text(found.last_ms)}
        rows = [_finding_row(finding) for finding in found.findings]
        damaged = {"damaged": found.is_damaged, "findings": rows, "more_findings": found.findings_left_out}
        click.echo(json_text({"url": name, **fields, **history, **damaged}))
    else:
        rows = [
            {"object": each.key or name, "what": each.what, "lost": _lost_text(each.lost)} for each in found.findings
        ]
        if rows:
            output.print_rows(rows, ("object", "what", "lost"), "")
        history_text = f"from {time_text(found.first_ms)} to {time_text(found.last_ms)}"
        snapshots, entries = with_noun(found.manifests, "snapshot"), with_noun(found.entries, "entry", "entries")
        count = with_noun(len(rows) + found.findings_left_out, "damaged object")
        verdict = count if found.is_damaged else "no damage"
        output.info(f"{snapshots}, {entries}, {size_text(found.bytes)}, {history_text}: {verdict}")
    return DAMAGE_FOUND if found.is_damaged else 0


def _finding_row(finding: Finding) -> dict[str, Any]:
    lost = [
        {"from": iso_text(each.from_ms), "to": None if each.to_ms is None else iso_text(each.to_ms)}
        for each in finding.lost
    ]
    return {"object": finding.key, "what": finding.what, "lost": lost}


def _lost_text(lost: tuple[Range, ...]) -> str:
    return "; ".join(_range_text(each) for each in lost) or "nothing"


def _range_text(lost: Range) -> str:
    if lost.to_ms is None:
        return f"all after {time_text(lost.from_ms)}" if lost.from_ms else "all"
    return f"{time_text(lost.from_ms)} to {time_text(lost.to_ms)}"


@replica.command(
    short_help="Store a snapshot of the newest state.",
    epilog="\b\nExample:\n  tfmq replica snapshot s3://bucket/orders",
)
@click.argument("url")
@offline_options
def snapshot(url: str, output: Output) -> None:
    """Store a snapshot of the newest state at URL, so that a new standby or a restore needs fewer entries.

    The primary does that by itself, now and then. The command makes the folder in a temporary one ($TMPDIR), which
    needs room for it, and uploads what has changed since the last snapshot. The servers may be running.
    """
    disk = RealDisk()
    with (
        opened(url) as store,
        explained(),
        tempfile.TemporaryDirectory(prefix="tfmq-snapshot-") as folder,
        ThreadPoolExecutor(THREADS) as threads,
    ):
        start = find_start(store)
        with progress(output, "reading the newest state", start.manifest.content.size_bytes) as advance:
            found = materialize(store, disk, folder, threads, start, progress=advance)
        snapshotter = Snapshotter(
            store,
            threads,
            clock=time.monotonic,
            random_bytes=secrets.token_bytes,
            pause=time.sleep,
            limit_seconds=SNAPSHOT_SECONDS_MAX,
        )
        with progress(
            output, "storing a snapshot", sum(file.size for file in FolderSource(disk, folder).files)
        ) as done:
            content = snapshotter.upload(FolderSource(disk, folder), done)
        manifest = snapshotter.store_manifest(found.position, found.time_ms, content)
    row = {
        "manifest": manifest.key,
        "term": found.position.term,
        "slot": found.position.slot,
        "at": iso_text(found.time_ms),
        "bytes": content.size_bytes,
        "uploaded_bytes": snapshotter.uploaded_bytes,
    }
    size, uploaded = size_text(content.size_bytes), size_text(snapshotter.uploaded_bytes)
    output.report(row, f"snapshot of {time_text(found.time_ms, exact=True)}: {size}, {uploaded} uploaded")


def find_moment(store: Store, at_ms: int) -> Start:
    """Return where a restore to `at_ms` begins. Raises ClickException if that is outside of the history."""
    newest = find_start(store)
    last_ms = _last_time(store, newest)
    if last_ms is None or at_ms <= last_ms:
        try:
            return find_start(store, at_ms=at_ms)
        except NoReplica:
            pass
    first = _first_time(store, newest.chain.manifests)
    is_later = last_ms is not None and at_ms > last_ms
    history = f"from {time_text(first, exact=True)} to {time_text(last_ms, exact=True)}"
    advice = "without --at you get the newest state" if is_later else "older entries were swept, or never made"
    raise click.ClickException(
        f"the history at {store.name} goes {history}, so there is nothing of {time_text(at_ms, exact=True)}: {advice}"
    )


def _last_time(store: Store, newest: Start) -> int | None:
    """Return the time of the newest entry; None if it is damaged."""
    try:
        entry = find_newest_entry(store, newest.chain)
    except NewerObject:
        raise
    except InvalidObject:
        return None
    return newest.manifest.time_ms if entry is None else entry.time_ms


def _first_time(store: Store, positions: tuple[Position, ...]) -> int | None:
    for position in positions:
        try:
            return read_manifest(store, position).time_ms
        except NewerObject:
            raise
        except InvalidObject:
            continue
    return None


@contextmanager
def opened(url: str) -> Iterator[Store]:
    with explained(), closing(open_store(url, must_exist=True)) as store:
        yield store


class DamageFound(click.ClickException):
    exit_code = DAMAGE_FOUND


class WrongStore(click.ClickException):
    exit_code = WRONG_USAGE


@contextmanager
def explained() -> Iterator[None]:
    """Context that replaces an error of the replication by its sentence with the exit code."""
    try:
        yield
    except (NoReplica, NewerObject) as error:
        raise click.ClickException(str(error)) from error
    except InvalidObject as error:
        raise DamageFound(f"{error}: `tfmq replica verify` says what can be restored") from error
    except StoreRefused as error:
        raise WrongStore(str(error)) from error
    except ReplicationError as error:
        raise click.ClickException(str(error)) from error


@contextmanager
def goes_on_when_repeated(data: str) -> Iterator[None]:
    """Context that adds to an error, or to Ctrl-C, that the same command completes what it has begun."""
    try:
        yield
    except KeyboardInterrupt:
        click.echo(f"tfmq: {data} is incomplete: repeat the command, and it goes on", err=True)
        raise
    except (Full, StoreUnavailable) as error:
        sentence = str(error).rstrip(".")
        raise click.ClickException(f"{sentence}. {data} is incomplete: repeat the command, and it goes on") from error


@contextmanager
def new_data_folder(disk: Disk, data: str) -> Iterator[None]:
    """Context in which the folder `data`, which is made if it is not there, is locked.

    Raises ClickException if it has anything but an interrupted restore.
    """
    if disk.exists(data) and not disk.is_folder(data):
        raise click.ClickException(f"{data} is no folder: name one that is empty or not there")
    if not disk.exists(data):
        parent = os.path.dirname(os.path.abspath(data))
        if not disk.is_folder(parent):
            raise click.ClickException(f"{data} cannot be made, because there is no folder {parent}: create that first")
        disk.make_folder(data)
        disk.force_folder(parent)
    elif not disk.exists(join(data, LOCK_NAME)):
        check_empty(disk, data)  # before a lock file is put into a folder of another program
    try:
        lock = disk.lock(join(data, LOCK_NAME))
    except Locked as error:
        raise click.ClickException(
            f"a server is running on {data}: name a folder that is empty or not there"
        ) from error
    try:
        check_empty(disk, data)
        yield
    finally:
        lock.release()


def check_empty(disk: Disk, data: str) -> None:
    """Raise ClickException if the folder `data` has anything but an interrupted restore."""
    names = [name for name in disk.list(data) if name not in IGNORED_NAMES and name != LOCAL_FOLDER]
    if names and not is_incomplete(disk, data):
        named = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1:,} more"
        raise click.ClickException(f"{data} is not empty ({named}): name a folder that is empty or not there")
