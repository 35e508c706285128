"""Folder of an archive: its files, and the plans and manifests of its steps; see docs/formats/archive.md.

ARCHIVE/topic=orders/date=2026-11-21/hour=09/00003-0000000005-00000000000000004096-00000000000000008192.parquet
ARCHIVE/_tfmq/@archive.json             identifies the folder as an archive
ARCHIVE/_tfmq/orders/00000007.plan      a started step: what it will contain
ARCHIVE/_tfmq/orders/00000007.json      a completed step: what it contains, file by file
ARCHIVE/_tfmq/orders/lock               only one run at a time

An archive grows in steps. A step is started by a plan and completed by a manifest. Each of them is a JSON file,
with the CRC-32 of the rest in `crc`, written atomically: to a temporary file, which is fsynced and renamed.
Manifests never change. So a reader sees a whole step or none of it, and an interrupted step is repeated exactly as
planned.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import uuid
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

from tfmq.errors import BadRequest, Busy, Damaged, NotSupported


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


VERSION: Final = 1

NO_ARCHIVE: Final = "{folder} is no archive of tfmq: {path} does not exist. Name the folder that `archive` wrote into."
MISSING: Final = (
    "The archive {folder} misses {path}, though step {later} exists: it was deleted or not copied. Restore it"
    " from a copy."
)
DAMAGED: Final = "{path} is damaged: {why}. Restore it from a copy of the archive."
UNKNOWN_FILE: Final = (
    "{path} is in the archive {folder}, but in no complete step: {manifest} was deleted or not copied, and its"
    " messages would be archived twice. Restore it from a copy."
)
OTHER_VERSION: Final = (
    "{path} has format version {version}, and this release of tfmq reads {known}: use a newer release."
)


class Gap(NamedTuple):
    """Offsets [start, end) of a partition that were deleted in the broker before they were archived."""

    partition: int
    incarnation: int
    start: int
    end: int


class ArchiveFile(NamedTuple):
    """One Parquet file: the rows of a piece that were appended in one hour.

    `start`, `end`: offsets of the piece. `size_bytes` and `crc` are of the whole file; `log_bytes` is the
    approximate size of its rows in the log. `first_offset`, `last_offset` and `first_ms`, `last_ms` (append
    times) are those of its first and last row.
    """

    path: str
    partition: int
    incarnation: int
    start: int
    end: int
    rows: int
    size_bytes: int
    crc: int
    log_bytes: int
    first_offset: int
    last_offset: int
    first_ms: int
    last_ms: int


class Plan(NamedTuple):
    """A step that is started: the pieces to archive, and the gaps before them.

    `partitions`: number of the topic's partitions; `node`: the broker's id, "" if unknown.
    """

    step: int
    topic: str
    partitions: int
    node: str
    pieces: tuple[ArchivePiece, ...]
    gaps: tuple[Gap, ...]


class Manifest(NamedTuple):
    """A completed step: its plan and the files that were written.

    `ends`: (incarnation, partition) -> offset up to which all steps so far archived, where the next step
    begins.
    """

    plan: Plan
    files: tuple[ArchiveFile, ...]
    ends: dict[tuple[int, int], int]

    @property
    def rows(self) -> int:
        return sum(each.rows for each in self.files)

    @property
    def size_bytes(self) -> int:
        return sum(each.size_bytes for each in self.files)


def encode_object(body: dict[str, Any]) -> bytes:
    return (json.dumps({**body, "crc": _crc(body)}, indent=1) + "\n").encode()


def decode_object(path: str, data: bytes) -> dict[str, Any]:
    """Decode an object and verify its CRC. Raises Damaged, NotSupported, both naming `path`."""
    try:
        body = json.loads(data)
        crc = body.pop("crc")
    except (ValueError, KeyError, AttributeError, TypeError):
        raise Damaged(DAMAGED.format(path=path, why="it is not a JSON object with a crc")) from None
    if crc != _crc(body):
        raise Damaged(DAMAGED.format(path=path, why="its crc is wrong"))
    if body.get("version") != VERSION:
        raise NotSupported(OTHER_VERSION.format(path=path, version=body.get("version"), known=VERSION))
    return dict(body)


def _crc(body: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())


def plan_to_json(plan: Plan) -> dict[str, Any]:
    pieces, gaps = [each._asdict() for each in plan.pieces], [each._asdict() for each in plan.gaps]
    return {"version": VERSION, **plan._asdict(), "pieces": pieces, "gaps": gaps}


def parse_plan(body: dict[str, Any]) -> Plan:
    pieces, gaps = (ArchivePiece(**each) for each in body["pieces"]), (Gap(**each) for each in body["gaps"])
    return Plan(body["step"], body["topic"], body["partitions"], body["node"], tuple(pieces), tuple(gaps))


def manifest_to_json(manifest: Manifest) -> dict[str, Any]:
    return {
        **plan_to_json(manifest.plan),
        "rows": manifest.rows,
        "files": [each._asdict() for each in manifest.files],
        "ends": [[*key, end] for key, end in sorted(manifest.ends.items())],
    }


def parse_manifest(body: dict[str, Any]) -> Manifest:
    return Manifest(
        parse_plan(body),
        tuple(ArchiveFile(**each) for each in body["files"]),
        {(incarnation, partition): end for incarnation, partition, end in body["ends"]},
    )


class ArchiveFolder:
    """The metadata files of an archive. `id` is permanent, also in copies of the archive."""

    def __init__(self, folder: Path, archive_id: str) -> None:
        self.folder, self.id = folder, archive_id

    @classmethod
    def open(cls, folder: Path) -> ArchiveFolder:
        """Open an archive. Raises BadRequest (no archive), Damaged, NotSupported."""
        path = folder / ARCHIVE_FILE
        if not path.is_file():
            raise BadRequest(NO_ARCHIVE.format(folder=folder, path=path))
        return cls(folder, decode_object(str(path), path.read_bytes())["id"])

    @classmethod
    def open_or_create(cls, folder: Path) -> ArchiveFolder:
        """Open the archive in `folder`, or create one.

        Raises BadRequest if the folder has other files or is not writable; Damaged, NotSupported.
        """
        create_output_folder(folder)
        if (folder / ARCHIVE_FILE).is_file():
            return cls.open(folder)
        strangers = [each.name for each in folder.iterdir()] if folder.is_dir() else []
        strangers = [name for name in strangers if name != METADATA_FOLDER]
        if strangers:
            raise BadRequest(
                f"{folder} is no archive of tfmq and not empty ({strangers[0]!r} is in it): name a new folder."
            )
        body = {"version": VERSION, "format": "tfmq archive", "id": uuid.uuid4().hex}
        write_atomically(folder / ARCHIVE_FILE, encode_object(body))
        return cls.open(folder)

    def topics(self) -> list[str]:
        """Return the topics that have a completed step."""
        house = self.folder / METADATA_FOLDER
        return sorted(each.name for each in house.iterdir() if each.is_dir() and any(each.glob("*.json")))

    def steps(self, topic: str) -> list[int]:
        """Return the numbers of all completed steps: 1, 2, ... Raises Damaged where one is missing."""
        folder = self.folder / metadata_folder(topic)
        names = [STEP_NAME.fullmatch(each.name) for each in folder.glob("*.json")]
        found = sorted(int(name[1]) for name in names if name is not None)
        for expected, step in enumerate(found, 1):
            if step != expected:
                path = manifest_path(topic, expected)
                raise Damaged(MISSING.format(folder=self.folder, path=path, later=step))
        return found

    def manifest(self, topic: str, step: int) -> Manifest:
        """Read the manifest of a completed step. Raises Damaged, NotSupported."""
        path = self.folder / manifest_path(topic, step)
        return parse_manifest(decode_object(str(path), path.read_bytes()))

    def check_no_lost_step(self, topic: str, last: Manifest | None) -> None:
        """Check that no file belongs to a step after `last`, whose manifest would be missing then.

        Checks the files from the day of the first message of `last` on. Call this only if no step is started.
        Raises Damaged.
        """
        files = last.files if last is not None else ()
        ends = last.ends if last is not None else {}
        since = date_folder(min((each.first_ms for each in files), default=0))
        days = (self.folder / topic_folder(topic)).glob("date=*")
        for path in sorted(path for day in days if day.name >= since for path in day.glob("*/*.parquet")):
            name = FILE_NAME.fullmatch(path.name)
            if name is None:
                continue
            partition, incarnation, start, _ = map(int, name.groups())
            if start >= ends.get((incarnation, partition), 0):
                lost = manifest_path(topic, last.plan.step + 1 if last is not None else 1)
                where = path.relative_to(self.folder)
                raise Damaged(UNKNOWN_FILE.format(path=where, folder=self.folder, manifest=lost))

    def started_plan(self, topic: str, step: int) -> Plan | None:
        """Return the plan of a step that is started and not completed, or None.

        Raises Damaged, NotSupported.
        """
        path = self.folder / plan_path(topic, step)
        return parse_plan(decode_object(str(path), path.read_bytes())) if path.is_file() else None

    def write_plan(self, plan: Plan) -> None:
        """Write the plan of a step. It is durable on return."""
        write_atomically(self.folder / plan_path(plan.topic, plan.step), encode_object(plan_to_json(plan)))

    def write_manifest(self, manifest: Manifest) -> None:
        """Complete a step: write its manifest, durable on return, and delete its plan."""
        topic, step = manifest.plan.topic, manifest.plan.step
        write_atomically(self.folder / manifest_path(topic, step), encode_object(manifest_to_json(manifest)))
        self.delete_plan(topic, step)

    def delete_plan(self, topic: str, step: int) -> None:
        (self.folder / plan_path(topic, step)).unlink(missing_ok=True)
