"""What `tfmq log` works on: a segment file, a partition's folder, the folder of transactions or a file in it, or a data
folder, of a server that is not running."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from journal import names
from journal.disk import Disk, RealDisk
from journal.errors import Locked
from journal.journal_audit import is_journal

LOCK = "lock"
CATALOG_FOLDER, CATALOG_SUFFIX = "meta", ".catalog"
CATALOG_NAMES = frozenset(("version", "reserve", "new-journal"))
"""What lies there besides the log: docs/formats/catalog.md."""


def is_segment(path: Path) -> bool:
    return path.is_file() and names.parse_segment_name(path.name, suffix_of(path)) is not None


def suffix_of(path: Path) -> str:
    """The ending of the segments at `path`: the catalog has its own."""
    folder = path if path.is_dir() else path.parent
    return CATALOG_SUFFIX if folder.name == CATALOG_FOLDER else names.SEGMENT_SUFFIX


def is_house_name(path: Path) -> bool:
    """Whether the broker, and not the journal, puts a file of this name there."""
    return path.parent.name == CATALOG_FOLDER and path.name in CATALOG_NAMES


def segments_of(path: Path) -> list[Path]:
    """The segment files at `path`, in order of their offsets; of a data folder, partition by partition."""
    if is_segment(path):
        return [path]
    found = sorted(p for p in path.iterdir() if is_segment(p)) if path.is_dir() else []
    return found or [s for folder in partitions_of(path) for s in segments_of(folder)]


def is_journal_file(path: Path) -> bool:
    return path.is_file() and names.parse_journal_name(path.name) is not None


def journal_of(path: Path) -> Path | None:
    """The folder of the transaction journal at `path`, or in the data folder `path`; None if there is none."""
    if is_journal_file(path):
        return path.parent
    found = (
        folder for folder in (path, path / names.TRANSACTIONS_FOLDER) if is_journal(RealDisk(), str(folder))
    )
    return next(found, None)


def journal_files_of(path: Path) -> list[Path]:
    """The files of the transaction journal at `path`, in order."""
    if is_journal_file(path):
        return [path]
    folder = journal_of(path)
    return sorted(file for file in folder.iterdir() if is_journal_file(file)) if folder is not None else []


def partitions_of(path: Path) -> list[Path]:
    """The folders of partitions in a data folder, the catalog's among them."""
    if not path.is_dir():
        return []
    kept = [p for p in path.iterdir() if p.is_dir() and any(is_segment(s) for s in p.iterdir())]
    return sorted(kept)


def checked(path: Path) -> Path:
    """`path`, if there is something to look at; else a sentence."""
    if not path.exists():
        raise click.ClickException(f"{path} is not there")
    if not segments_of(path) and journal_of(path) is None:
        raise click.ClickException(
            f"{path} is no segment file, no partition's folder, no folder of transactions and no data folder:"
            " nothing to look at"
        )
    return path


@contextmanager
def locked(path: Path, disk: Disk | None = None) -> Iterator[Disk]:
    """The disk, with the lock of the data folder around `path`, where there is one; refused while a server runs."""
    disk = disk or RealDisk()
    near = (path, path.parent, path.parent.parent) if path.is_file() else (path, path.parent)
    place = next((folder / LOCK for folder in near if (folder / LOCK).exists()), None)
    if place is None:
        yield disk
        return
    try:
        lock = disk.lock(str(place))
    except Locked as error:
        raise click.ClickException(
            f"a server is running on {place.parent}: stop it first, or look at a copy"
        ) from error
    try:
        yield disk
    finally:
        lock.release()
