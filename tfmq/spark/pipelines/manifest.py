"""Plans and manifests of an archive, see docs/formats/archive.md.

An archive grows in steps. A step is started by a plan and completed by a manifest. Each of them is a JSON file,
with the CRC-32 of the rest in `crc`, written atomically: to a temporary file, which is fsynced and renamed.
Manifests never change. So a reader sees a whole step or none of it, and an interrupted step is repeated exactly as
planned.
"""

from __future__ import annotations

import json
import uuid
import zlib
from pathlib import Path
from typing import Any, Final, NamedTuple

from tfmq.errors import BadRequest, Damaged, NotSupported
from tfmq.spark.pipelines import archive_layout
from tfmq.spark.pipelines.archive_layout import ArchivePiece, create_output_folder, write_atomically

VERSION: Final = 1

NO_ARCHIVE: Final = (
    "{folder} is no archive of tfmq: {path} does not exist. Name the folder that `archive` wrote into."
)
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
    """Encode an object as JSON with its CRC."""
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
    return {
        "version": VERSION,
        "step": plan.step,
        "topic": plan.topic,
        "partitions": plan.partitions,
        "node": plan.node,
        "pieces": [each._asdict() for each in plan.pieces],
        "gaps": [each._asdict() for each in plan.gaps],
    }


def parse_plan(body: dict[str, Any]) -> Plan:
    return Plan(
        body["step"],
        body["topic"],
        body["partitions"],
        body["node"],
        tuple(ArchivePiece(**each) for each in body["pieces"]),
        tuple(Gap(**each) for each in body["gaps"]),
    )


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
        path = folder / archive_layout.ARCHIVE_FILE
        if not path.is_file():
            raise BadRequest(NO_ARCHIVE.format(folder=folder, path=path))
        return cls(folder, decode_object(str(path), path.read_bytes())["id"])

    @classmethod
    def open_or_create(cls, folder: Path) -> ArchiveFolder:
        """Open the archive in `folder`, or create one.

        Raises BadRequest if the folder has other files or is not writable; Damaged, NotSupported.
        """
        create_output_folder(folder)
        if (folder / archive_layout.ARCHIVE_FILE).is_file():
            return cls.open(folder)
        strangers = [each.name for each in folder.iterdir()] if folder.is_dir() else []
        strangers = [name for name in strangers if name != archive_layout.METADATA_FOLDER]
        if strangers:
            raise BadRequest(
                f"{folder} is no archive of tfmq and not empty ({strangers[0]!r} is in it): name a new folder."
            )
        body = {"version": VERSION, "format": "tfmq archive", "id": uuid.uuid4().hex}
        write_atomically(folder / archive_layout.ARCHIVE_FILE, encode_object(body))
        return cls.open(folder)

    def topics(self) -> list[str]:
        """Return the topics that have a completed step."""
        house = self.folder / archive_layout.METADATA_FOLDER
        return sorted(each.name for each in house.iterdir() if each.is_dir() and any(each.glob("*.json")))

    def steps(self, topic: str) -> list[int]:
        """Return the numbers of all completed steps: 1, 2, ... Raises Damaged where one is missing."""
        folder = self.folder / archive_layout.metadata_folder(topic)
        names = [archive_layout.STEP_NAME.fullmatch(each.name) for each in folder.glob("*.json")]
        found = sorted(int(name[1]) for name in names if name is not None)
        for expected, step in enumerate(found, 1):
            if step != expected:
                path = archive_layout.manifest_path(topic, expected)
                raise Damaged(MISSING.format(folder=self.folder, path=path, later=step))
        return found

    def manifest(self, topic: str, step: int) -> Manifest:
        """Read the manifest of a completed step. Raises Damaged, NotSupported."""
        path = self.folder / archive_layout.manifest_path(topic, step)
        return parse_manifest(decode_object(str(path), path.read_bytes()))

    def check_no_lost_step(self, topic: str, last: Manifest | None) -> None:
        """Check that no file belongs to a step after `last`, whose manifest would be missing then.

        Checks the files from the day of the first message of `last` on. Call this only if no step is started.
        Raises Damaged.
        """
        files = last.files if last is not None else ()
        ends = last.ends if last is not None else {}
        since = archive_layout.date_folder(min((each.first_ms for each in files), default=0))
        days = (self.folder / archive_layout.topic_folder(topic)).glob("date=*")
        for path in sorted(path for day in days if day.name >= since for path in day.glob("*/*.parquet")):
            name = archive_layout.FILE_NAME.fullmatch(path.name)
            if name is None:
                continue
            partition, incarnation, start, _ = map(int, name.groups())
            if start >= ends.get((incarnation, partition), 0):
                lost = archive_layout.manifest_path(topic, last.plan.step + 1 if last is not None else 1)
                where = path.relative_to(self.folder)
                raise Damaged(UNKNOWN_FILE.format(path=where, folder=self.folder, manifest=lost))

    def started_plan(self, topic: str, step: int) -> Plan | None:
        """Return the plan of a step that is started and not completed, or None.

        Raises Damaged, NotSupported.
        """
        path = self.folder / archive_layout.plan_path(topic, step)
        return parse_plan(decode_object(str(path), path.read_bytes())) if path.is_file() else None

    def write_plan(self, plan: Plan) -> None:
        """Write the plan of a step. It is durable on return."""
        write_atomically(
            self.folder / archive_layout.plan_path(plan.topic, plan.step), encode_object(plan_to_json(plan))
        )

    def write_manifest(self, manifest: Manifest) -> None:
        """Complete a step: write its manifest, durable on return, and delete its plan."""
        topic, step = manifest.plan.topic, manifest.plan.step
        write_atomically(
            self.folder / archive_layout.manifest_path(topic, step), encode_object(manifest_to_json(manifest))
        )
        self.delete_plan(topic, step)

    def delete_plan(self, topic: str, step: int) -> None:
        """Delete the plan of a completed step."""
        (self.folder / archive_layout.plan_path(topic, step)).unlink(missing_ok=True)
