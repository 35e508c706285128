"""Names of an archive's files, atomic file writes, and locks; see docs/formats/archive.md.

ARCHIVE/topic=orders/date=2026-11-21/hour=09/00003-0000000005-00000000000000004096-00000000000000008192.parquet
ARCHIVE/_tfmq/@archive.json             identifies the folder as an archive
ARCHIVE/_tfmq/orders/00000007.plan      a started step: what it will contain
ARCHIVE/_tfmq/orders/00000007.json      a completed step: what it contains, file by file
ARCHIVE/_tfmq/orders/lock               only one run at a time
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, NamedTuple

from tfmq.errors import BadRequest, Busy


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file atomically, creating its folders.

    Its bytes and its name are durable on return.
    """
    create_folder(path.parent)
    beside = temporary_path(path)
    with beside.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    rename_durably(beside, path)


def temporary_path(path: Path) -> Path:
    """Return a unique temporary name in the folder of `path`."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}{TEMPORARY_SUFFIX}")


def rename_durably(temporary: Path, path: Path) -> None:
    """Rename a file that is already fsynced; the new name is durable on return."""
    temporary.replace(path)
    fsync_folder(path.parent)


def create_output_folder(folder: Path) -> None:
    """Create the folder that the user named with --to. Raises BadRequest if it is not writable."""
    try:
        create_folder(folder)
        why = "" if os.access(folder, os.W_OK | os.X_OK) else os.strerror(errno.EACCES)
    except OSError as error:
        why = f"{error.filename}: {error.strerror}" if error.filename != str(folder) else str(error.strerror)
    if why:
        raise BadRequest(
            f"Nothing can be written into the folder {folder}: {why}. Name one with --to in which you may write."
        )


def create_folder(folder: Path) -> None:
    """Create a folder and its parents. Each is durable on return."""
    if folder.is_dir():
        return
    create_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    fsync_folder(folder.parent)


def fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def delete_temporary_files(folder: Path) -> int:
    """Delete temporary files of killed runs below `folder`; return how many.

    The caller must hold the lock.
    """
    found = [each for each in folder.rglob(f".*{TEMPORARY_SUFFIX}") if each.is_file()]
    for each in found:
        each.unlink(missing_ok=True)
    return len(found)


@contextmanager
def hold_lock(path: Path, what: str) -> Iterator[None]:
    """Hold the lock file `path` in the block. Raises Busy with the sentence `what`.

    The operating system releases the lock when the process ends, also when it is killed.
    """
    create_folder(path.parent)
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise Busy(what) from error
        yield


METADATA_FOLDER: Final = "_tfmq"
"""Folder of the metadata. Readers of Parquet skip names that begin with "_" or "."."""
ARCHIVE_FILE: Final = f"{METADATA_FOLDER}/@archive.json"
""""@" is not valid in a topic name, so no topic's folder has this name."""
HOUR_MS: Final = 3_600_000
STEP_NAME: Final = re.compile(r"(\d{8})\.(plan|json)")
FILE_NAME: Final = re.compile(r"(\d{5,})-(\d{10,})-(\d{20})-(\d{20})\.parquet")
"""Partitions have at least five digits, incarnations at least ten."""
TEMPORARY_SUFFIX: Final = ".part"
"""Suffix of temporary files; their names begin with a dot."""


class ArchivePiece(NamedTuple):
    """A range of one partition that one task archives: the records with start <= offset < end."""

    partition: int
    incarnation: int
    log_id: int
    start: int
    end: int


def file_path(topic: str, hour: int, piece: ArchivePiece) -> str:
    """Return the path of a piece's Parquet file for one hour, relative to the archive.

    `hour`: the hour of the append times, counted from 1970 in UTC.
    """
    moment = datetime.fromtimestamp(hour * HOUR_MS / 1000, UTC)
    return f"topic={topic}/date={moment:%Y-%m-%d}/hour={moment:%H}/{file_name(piece)}"


def file_name(piece: ArchivePiece) -> str:
    """Return the file name of a piece, which is the same for each hour."""
    return f"{piece.partition:05d}-{piece.incarnation:010d}-{piece.start:020d}-{piece.end:020d}.parquet"


def topic_folder(topic: str) -> str:
    return f"topic={topic}"


def date_folder(append_ms: int) -> str:
    """Return the folder name of a day, below the topic's folder; names sort by date."""
    return f"date={datetime.fromtimestamp(append_ms / 1000, UTC):%Y-%m-%d}"


def metadata_folder(topic: str) -> str:
    return f"{METADATA_FOLDER}/{topic}"


def plan_path(topic: str, step: int) -> str:
    return f"{METADATA_FOLDER}/{topic}/{step:08d}.plan"


def manifest_path(topic: str, step: int) -> str:
    return f"{METADATA_FOLDER}/{topic}/{step:08d}.json"


def aside_folder(topic: str) -> str:
    """Return the folder for files of a step that could not be completed as planned."""
    return f"{METADATA_FOLDER}/{topic}/aside"


def lock_path(topic: str) -> str:
    return f"{METADATA_FOLDER}/{topic}/lock"
