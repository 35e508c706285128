"""Files that are there whole or not at all, and stay; and the lock of a folder."""

from __future__ import annotations

import errno
import fcntl
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tfmq.errors import BadRequest, Busy
from tfmq.spark.pipelines.layout import TEMPORARY


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
