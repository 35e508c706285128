"""Folder of an archive: its files, and the plans and manifests of its steps; see docs/formats/archive.md.

ARCHIVE/topic=orders/date=2026-11-21/hour=09/00003-0000000005-00000000000000004096-00000000000000008192.parquet
ARCHIVE/_tfmq/@archive.json             identifies the folder as an archive
ARCHIVE/_tfmq/orders/00000007.plan      the plan of a started step: what the step will contain
ARCHIVE/_tfmq/orders/00000007.json      the manifest of a completed step: what the step contains, file by file
ARCHIVE/_tfmq/orders/lock               locked by the only run that may archive the topic

An archive grows in steps. A plan starts a step, and a manifest completes the step. Plan and manifest are JSON files
whose field `crc` is the CRC-32 of the other fields. Each file is written atomically: to a temporary file, which is
fsynced and renamed. Manifests never change. So a reader sees a whole step or nothing of it, and an interrupted step is
repeated exactly as planned.
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
    """Write a file atomically, creating its folders. Its bytes and its name are durable on return."""
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
    """Create a folder and its missing parents. All created folders are durable on return."""
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


def delete_temporary_files(folder: Path) -> None:
    """Delete the temporary files below `folder` that killed runs have left. The caller must hold the topic's lock."""
    for each in folder.rglob(f".*{TEMPORARY_SUFFIX}"):
        if each.is_file():
            each.unlink(missing_ok=True)


@contextmanager
def hold_lock(path: Path, what: str) -> Iterator[None]:
    """Lock the file `path` for the `with` block. If another process holds the lock, raise Busy with the text `what`."""
    create_folder(path.parent)
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise Busy(what) from error
        yield


METADATA_FOLDER: Final = "_tfmq"
"""Folder of plans, manifests and locks. Programs that read Parquet folders skip names that begin with "_" or "."."""
ARCHIVE_FILE: Final = f"{METADATA_FOLDER}/@archive.json"
"""File that identifies an archive. "@" is not valid in a topic's name, so no topic's folder can have this name."""
HOUR_MS: Final = 3_600_000
STEP_NAME: Final = re.compile(r"(\d{8})\.(plan|json)")
FILE_NAME: Final = re.compile(r"(\d{5,})-(\d{10,})-(\d{20})-(\d{20})\.parquet")
"""Name of a Parquet file: partition (five digits or more), incarnation (ten or more), start and end of the piece."""
TEMPORARY_SUFFIX: Final = ".part"
"""Suffix of the names of temporary files, which also begin with a dot."""


class ArchivePiece(NamedTuple):
    """A range of one partition that one task archives: the records with start <= offset < end."""

    partition: int
    incarnation: int
    log_id: int
    start: int
    end: int


def file_path(topic: str, hour: int, piece: ArchivePiece) -> str:
    """Return the path of a piece's file for one hour (the number of hours since 1970, UTC), relative to the archive."""
    moment = datetime.fromtimestamp(hour * HOUR_MS / 1000, UTC)
    return f"topic={topic}/date={moment:%Y-%m-%d}/hour={moment:%H}/{file_name(piece)}"


def file_name(piece: ArchivePiece) -> str:
    """Return the name of a piece's files: each hour has a file of this name in the folder of the hour."""
    return f"{piece.partition:05d}-{piece.incarnation:010d}-{piece.start:020d}-{piece.end:020d}.parquet"


def topic_folder(topic: str) -> str:
    return f"topic={topic}"


def date_folder(append_ms: int) -> str:
    """Return the name of the folder for the day of `append_ms`, below the topic's folder. The names sort by date."""
    return f"date={datetime.fromtimestamp(append_ms / 1000, UTC):%Y-%m-%d}"


def metadata_folder(topic: str) -> str:
    return f"{METADATA_FOLDER}/{topic}"


def plan_path(topic: str, step: int) -> str:
    return f"{METADATA_FOLDER}/{topic}/{step:08d}.plan"


def manifest_path(topic: str, step: int) -> str:
    return f"{METADATA_FOLDER}/{topic}/{step:08d}.json"


def aside_folder(topic: str) -> str:
    """Return the folder into which files of a step are moved if the step cannot be completed as planned."""
    return f"{METADATA_FOLDER}/{topic}/aside"


def lock_path(topic: str) -> str:
    return f"{METADATA_FOLDER}/{topic}/lock"


VERSION: Final = 1
DAMAGED: Final = "{path} is damaged: {why}. Restore it from a copy of the archive."


class Gap(NamedTuple):
    """Offsets [start, end) of a partition that were deleted in the broker before they were archived."""

    partition: int
    incarnation: int
    start: int
    end: int


class ArchiveFile(NamedTuple):
    """One Parquet file: the rows of a piece (a range of one partition) that were appended in one hour.

    `start`, `end`: offsets of the piece · `size_bytes`, `crc`: size and CRC-32 of the file · `log_bytes`: approximate
    size of the rows in the log · `first_offset`, `last_offset`, `first_ms`, `last_ms`: offset and append time of the
    first and the last row in the file.
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
    """What one step of a run archives: `pieces`.

    `gaps`: ranges of offsets that were deleted before any run archived them. `node`: id of the broker, "" if unknown.
    """

    step: int
    topic: str
    partitions: int
    node: str
    pieces: tuple[ArchivePiece, ...]
    gaps: tuple[Gap, ...]


class Manifest(NamedTuple):
    """A completed step: its plan and files. `ends`: (incarnation, partition) -> offset where the next step begins."""

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
    """Decode a plan or manifest. Errors name `path`: Damaged (no JSON, wrong CRC), NotSupported (another version)."""
    try:
        body = json.loads(data)
        crc = body.pop("crc")
    except (ValueError, KeyError, AttributeError, TypeError):
        raise Damaged(DAMAGED.format(path=path, why="it is not a JSON object with a crc")) from None
    if crc != _crc(body):
        raise Damaged(DAMAGED.format(path=path, why="its crc is wrong"))
    if (version := body.get("version")) != VERSION:
        raise NotSupported(
            f"{path} has format version {version}, and this release of tfmq reads {VERSION}: use a newer release."
        )
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
    """Reads and writes plans and manifests of an archive. `id` is permanent, also in copies of the archive.

    A method that reads a file raises Damaged if the CRC is wrong, and NotSupported if the format version is unknown.
    """

    def __init__(self, folder: Path, archive_id: str) -> None:
        self.folder, self.id = folder, archive_id

    @classmethod
    def open(cls, folder: Path) -> ArchiveFolder:
        """Open an archive. Raises BadRequest if there is none in `folder`."""
        path = folder / ARCHIVE_FILE
        if not path.is_file():
            raise BadRequest(
                f"{folder} is no archive of tfmq: {path} does not exist. Name the folder that `archive` wrote into."
            )
        return cls(folder, decode_object(str(path), path.read_bytes())["id"])

    @classmethod
    def open_or_create(cls, folder: Path) -> ArchiveFolder:
        """Open the archive in `folder`, or create one. Raises BadRequest (it has other files, or is not writable)."""
        create_output_folder(folder)
        if (folder / ARCHIVE_FILE).is_file():
            return cls.open(folder)
        strangers = [each.name for each in folder.iterdir() if each.name != METADATA_FOLDER]
        if strangers:
            raise BadRequest(
                f"{folder} is no archive of tfmq and not empty ({strangers[0]!r} is in it): name a new folder."
            )
        body = {"version": VERSION, "format": "tfmq archive", "id": uuid.uuid4().hex}
        write_atomically(folder / ARCHIVE_FILE, encode_object(body))
        return cls.open(folder)

    def topics(self) -> list[str]:
        """Return the topics that have a completed step."""
        folders = (self.folder / METADATA_FOLDER).iterdir()
        return sorted(each.name for each in folders if each.is_dir() and any(each.glob("*.json")))

    def steps(self, topic: str) -> list[int]:
        """Return the numbers of all completed steps: 1, 2, ... Raises Damaged if one of these numbers is missing."""
        folder = self.folder / metadata_folder(topic)
        names = [STEP_NAME.fullmatch(each.name) for each in folder.glob("*.json")]
        found = sorted(int(name[1]) for name in names if name is not None)
        for expected, step in enumerate(found, 1):
            if step != expected:
                raise Damaged(
                    f"The archive {self.folder} misses {manifest_path(topic, expected)}, though step {step} exists: it"
                    " was deleted or not copied. Restore it from a copy."
                )
        return found

    def manifest(self, topic: str, step: int) -> Manifest:
        """Read the manifest of a completed step."""
        path = self.folder / manifest_path(topic, step)
        return parse_manifest(decode_object(str(path), path.read_bytes()))

    def manifests(self, topic: str) -> list[Manifest]:
        """Read the manifests of all completed steps, in order. Raises Damaged if one of them is missing."""
        return [self.manifest(topic, step) for step in self.steps(topic)]

    def check_no_lost_step(self, topic: str, last: Manifest | None) -> None:
        """Raise Damaged if a Parquet file belongs to a later step than `last`: then that step's manifest was lost.

        `last`: manifest of the last completed step, or None. Call this only if no step is started, because the files of
        a started step have no manifest yet. To save time, files of days before the first message in `last` are skipped.
        """
        step, files, ends = (last.plan.step, last.files, last.ends) if last is not None else (0, (), {})
        since = date_folder(min((each.first_ms for each in files), default=0))
        days = (self.folder / topic_folder(topic)).glob("date=*")
        for path in sorted(path for day in days if day.name >= since for path in day.glob("*/*.parquet")):
            name = FILE_NAME.fullmatch(path.name)
            if name is None:
                continue
            partition, incarnation, start, _ = map(int, name.groups())
            if start >= ends.get((incarnation, partition), 0):
                raise Damaged(
                    f"{path.relative_to(self.folder)} is in the archive {self.folder}, but in no complete step:"
                    f" {manifest_path(topic, step + 1)} was deleted or not copied, and its messages would be archived"
                    " twice. Restore it from a copy."
                )

    def started_plan(self, topic: str, step: int) -> Plan | None:
        """Return the plan of `step`; None if the step is not started, or is completed."""
        path = self.folder / plan_path(topic, step)
        return parse_plan(decode_object(str(path), path.read_bytes())) if path.is_file() else None

    def write_plan(self, plan: Plan) -> None:
        write_atomically(self.folder / plan_path(plan.topic, plan.step), encode_object(plan_to_json(plan)))

    def write_manifest(self, manifest: Manifest) -> None:
        """Complete a step: write its manifest, durable on return, and delete its plan."""
        topic, step = manifest.plan.topic, manifest.plan.step
        write_atomically(self.folder / manifest_path(topic, step), encode_object(manifest_to_json(manifest)))
        self.delete_plan(topic, step)

    def delete_plan(self, topic: str, step: int) -> None:
        (self.folder / plan_path(topic, step)).unlink(missing_ok=True)
