"""What `tfmq log` works on: a segment file, a partition's folder, the folder of transactions or of delayed messages, a
file in them, or a data folder, of a server that is not running."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import click

from journal import filenames
from journal.disk import Disk, RealDisk
from journal.errors import Locked
from journal.fsck.wal_verify import is_journal
from tfmq.data_dir import misplaced
from tfmq.delay.arrivals.log import ARRIVALS_SUFFIX as ARRIVALS_SUFFIX
from tfmq.delay.buckets.format import parse_bucket_name
from tfmq.delay.buckets.fsck import ARRIVALS_NAME, is_delay
from tfmq.delay.buckets.fsck import FOLDER_NAME as DELAY_FOLDER

LOCK = "lock"
CATALOG_FOLDER, CATALOG_SUFFIX = "meta", ".catalog"
HOUSE_NAMES = frozenset({"version", "reserve", "new-journal", "new-delay"})
"""Beside the catalog: its format, bytes kept for a full disk, and words of the operator."""


def is_segment(path: Path) -> bool:
    return path.is_file() and filenames.parse_segment_name(path.name, suffix_of(path)) is not None


def suffix_of(path: Path) -> str:
    """The ending of the segments at `path`: the catalog and the arrivals of delayed messages have their own."""
    folder = path if path.is_dir() else path.parent
    own = {CATALOG_FOLDER: CATALOG_SUFFIX, ARRIVALS_NAME: ARRIVALS_SUFFIX}
    return own.get(folder.name, filenames.SEGMENT_SUFFIX)


def is_house_name(path: Path) -> bool:
    """Whether the broker, and not the journal, puts a file of this name there."""
    return path.parent.name == CATALOG_FOLDER and path.name in HOUSE_NAMES


def segments_of(path: Path) -> list[Path]:
    """The segment files at `path`, in order of their offsets; of a data folder, partition by partition."""
    if is_segment(path):
        return [path]
    found = sorted(p for p in path.iterdir() if is_segment(p)) if path.is_dir() else []
    return found or [s for folder in partitions_of(path) for s in segments_of(folder)]


def is_journal_file(path: Path) -> bool:
    return path.is_file() and filenames.parse_journal_name(path.name) is not None


def journal_of(path: Path) -> Path | None:
    """The folder of the transaction journal at `path`, or in the data folder `path`; None if there is none."""
    if is_journal_file(path):
        return path.parent
    disk, folders = RealDisk(), (path, path / filenames.TRANSACTIONS_FOLDER)
    found = (f for f in folders if is_journal(disk, str(f)) and not is_delay(disk, str(f)))
    return next(found, None)


def journal_files_of(path: Path) -> list[Path]:
    """The files of the transaction journal at `path`, in order."""
    if is_journal_file(path):
        return [path]
    folder = journal_of(path)
    return sorted(file for file in folder.iterdir() if is_journal_file(file)) if folder is not None else []


def is_bucket_file(path: Path) -> bool:
    return path.is_file() and parse_bucket_name(path.name) is not None


def delay_of(path: Path) -> Path | None:
    """The folder of the buckets of delayed messages at `path`, or in the data folder `path`; None if there is none."""
    if is_bucket_file(path):
        return path.parent
    return next((f for f in (path, path / DELAY_FOLDER) if is_delay(RealDisk(), str(f))), None)


def bucket_files_of(path: Path) -> list[Path]:
    """The buckets at `path`, by time."""
    if is_bucket_file(path):
        return [path]
    folder = delay_of(path)
    return sorted(file for file in folder.iterdir() if is_bucket_file(file)) if folder is not None else []


def partitions_of(path: Path) -> list[Path]:
    """The folders of partitions in a data folder, those of the catalog and of the arrivals among them."""
    if not path.is_dir():
        return []
    arrivals = path / DELAY_FOLDER / ARRIVALS_NAME
    folders = [p for p in path.iterdir() if p.is_dir()] + [arrivals] * arrivals.is_dir()
    return sorted(folder for folder in folders if any(is_segment(s) for s in folder.iterdir()))


def checked(path: Path) -> Path:
    """`path`, if there is something to look at; else a sentence."""
    if not path.exists():
        raise click.ClickException(f"{path} is not there")
    if not segments_of(path) and journal_of(path) is None and delay_of(path) is None:
        raise click.ClickException(
            f"{path} is no segment file, no partition's folder, no folder of transactions or of delayed messages"
            " and no data folder: nothing to look at"
        )
    return path


def size_of(path: Path) -> int:
    """The bytes that a check of `path` reads, about."""
    if path.is_file():
        return path.stat().st_size
    suffixes = {
        filenames.SEGMENT_SUFFIX,
        filenames.JOURNAL_SUFFIX,
        CATALOG_SUFFIX,
        ARRIVALS_SUFFIX,
        ".bucket",
    }
    total = 0
    for folder, _, files in os.walk(path):
        for name in files:
            if Path(name).suffix in suffixes:
                with suppress(OSError):  # the check itself names it
                    total += (Path(folder) / name).stat().st_size
    return total


@contextmanager
def in_words(path: Path) -> Iterator[None]:
    """What is in the way in a folder is a sentence that says what to do."""
    try:
        yield
    except OSError as error:
        said = misplaced(error, str(path))
        if said is None:
            raise
        raise click.ClickException(said) from error


@contextmanager
def locked(path: Path, disk: Disk | None = None) -> Iterator[Disk]:
    """The disk, with the lock of the data folder around `path`, where there is one; refused while a server runs."""
    disk = disk or RealDisk()
    folder = path.parent if path.is_file() else path
    near = [folder, folder.parent] + [folder.parent.parent] * (folder.name == ARRIVALS_NAME)
    place = next((folder / LOCK for folder in near if (folder / LOCK).exists()), None)
    if place is None:
        with in_words(path):
            yield disk
        return
    try:
        with in_words(path):
            lock = disk.lock(str(place))
    except Locked as error:
        raise click.ClickException(
            f"a server is running on {place.parent}: stop it first, or look at a copy"
        ) from error
    try:
        with in_words(path):
            yield disk
    finally:
        lock.release()
