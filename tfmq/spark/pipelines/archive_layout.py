"""Files that are there whole or not at all, and stay; and the lock of a folder."""

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


def put(path: Path, data: bytes) -> None:
    """A file with these bytes in its place, on the disk with its name. Folders are made."""
    make_folder(path.parent)
    beside = beside_of(path)
    with beside.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    settle(beside, path)


def beside_of(path: Path) -> Path:
    """A name for what will be `path` when it is whole; nobody else has it."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}{TEMPORARY}")


def settle(beside: Path, path: Path) -> None:
    """Give a forced file its name, for good."""
    beside.replace(path)
    force_folder(path.parent)


def make_named(folder: Path) -> None:
    """A folder that the user named for what is written. Raises BadRequest where none can be there or written in."""
    try:
        make_folder(folder)
        why = "" if os.access(folder, os.W_OK | os.X_OK) else os.strerror(errno.EACCES)
    except OSError as error:
        why = f"{error.filename}: {error.strerror}" if error.filename != str(folder) else str(error.strerror)
    if why:
        raise BadRequest(
            f"Nothing can be written into the folder {folder}: {why}. Name one with --to in which you may write."
        )


def make_folder(folder: Path) -> None:
    """With those above it, each forced into the one that holds it."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    force_folder(folder.parent)


def force_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sweep(folder: Path) -> int:
    """Remove what runs that were killed left half written below it; how many files. Under the lock only."""
    found = [each for each in folder.rglob(f".*{TEMPORARY}") if each.is_file()]
    for each in found:
        each.unlink(missing_ok=True)
    return len(found)


@contextmanager
def locked(path: Path, what: str) -> Iterator[None]:
    """One process at a time; the lock ends with the process, however that ends. Raises Busy with `what`."""
    make_folder(path.parent)
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise Busy(what) from error
        yield


# Where the files of an archive are; docs/formats/archive.md is its page.
#
# ARCHIVE/topic=orders/date=2026-11-21/hour=09/00003-0000000005-00000000000000004096-00000000000000008192.parquet
# ARCHIVE/_tfmq/@archive.json             what this folder is
# ARCHIVE/_tfmq/orders/00000007.plan      a step that is begun: what it will hold
# ARCHIVE/_tfmq/orders/00000007.json      a step that is done: what it holds, file by file
# ARCHIVE/_tfmq/orders/lock               one run at a time

HOUSE: Final = "_tfmq"
"""Readers of Parquet pass over names that begin with _ or a dot."""
ARCHIVE_FILE: Final = f"{HOUSE}/@archive.json"
"""No topic has such a name, so none has its folder there."""
HOUR_MS: Final = 3_600_000
STEP_NAME: Final = re.compile(r"(\d{8})\.(plan|json)")
FILE_NAME: Final = re.compile(r"(\d{5,})-(\d{10,})-(\d{20})-(\d{20})\.parquet")
"""Partitions have five digits or more, incarnations ten or more."""
TEMPORARY: Final = ".part"
"""Ends the name of a file that is not whole yet, which begins with a dot."""


class Piece(NamedTuple):
    """A range of one partition, which is archived by one task: the records that begin in [start, end)."""

    partition: int
    incarnation: int
    log_id: int
    start: int
    end: int


def hour_of(append_ms: int) -> int:
    """Hours since 1970, UTC."""
    return append_ms // HOUR_MS


def file_path(topic: str, hour: int, piece: Piece) -> str:
    """Where the rows of a piece lie that were appended in that hour, relative to the archive."""
    moment = datetime.fromtimestamp(hour * HOUR_MS / 1000, UTC)
    return f"topic={topic}/date={moment:%Y-%m-%d}/hour={moment:%H}/{file_name(piece)}"


def file_name(piece: Piece) -> str:
    """The same in each hour."""
    return f"{piece.partition:05d}-{piece.incarnation:010d}-{piece.start:020d}-{piece.end:020d}.parquet"


def topic_folder(topic: str) -> str:
    return f"topic={topic}"


def date_folder(append_ms: int) -> str:
    """Of a day, below the topic's; they sort as the days do."""
    return f"date={datetime.fromtimestamp(append_ms / 1000, UTC):%Y-%m-%d}"


def house_folder(topic: str) -> str:
    return f"{HOUSE}/{topic}"


def plan_path(topic: str, step: int) -> str:
    return f"{HOUSE}/{topic}/{step:08d}.plan"


def manifest_path(topic: str, step: int) -> str:
    return f"{HOUSE}/{topic}/{step:08d}.json"


def aside_folder(topic: str) -> str:
    """Where files go of a step that could not be finished as it was planned."""
    return f"{HOUSE}/{topic}/aside"


def lock_path(topic: str) -> str:
    return f"{HOUSE}/{topic}/lock"
