"""What an archive says of itself: steps, each begun as a plan and done as a manifest; docs/formats/archive.md.

Each is one JSON object with a CRC-32 of the rest in `crc`, put in its place whole: written beside it, forced, renamed.
Manifests are never changed. So whoever reads sees a step or does not, and what is planned is done as planned, however
often it is begun anew.
"""

from __future__ import annotations

import json
import uuid
import zlib
from pathlib import Path
from typing import Any, Final, NamedTuple

from tfmq.errors import BadRequest, Damaged, NotSupported
from tfmq.spark.pipelines import archive_layout
from tfmq.spark.pipelines.archive_layout import Piece, make_named, put

VERSION: Final = 1

NO_ARCHIVE: Final = (
    "{folder} is no archive of tfmq: {path} is not there. Name the folder that `archive` wrote into."
)
MISSING: Final = (
    "The archive {folder} misses {path}, though step {later} is there: it was deleted or not copied. Bring it back"
    " from a copy."
)
DAMAGED: Final = "{path} is damaged: {why}. Bring it back from a copy of the archive."
NOBODYS: Final = (
    "{path} is in the archive {folder}, and no step that is done has it: {manifest} was deleted or not copied, and its"
    " messages would come twice. Bring it back from a copy."
)
OTHER_VERSION: Final = (
    "{path} has format version {version}, and this release of tfmq reads {known}: take a newer one."
)


class Gap(NamedTuple):
    """Offsets [start, end) of a partition that the broker had no more when they were to be archived."""

    partition: int
    incarnation: int
    start: int
    end: int


class ArchiveFile(NamedTuple):
    """One Parquet file: the rows of a piece that were appended in one hour.

    `size_bytes` and `crc` are of the whole file. `log_bytes`: of its rows in the log, about. `first_offset`,
    `last_offset` and `first_ms`, `last_ms` (append times) are those of its first and last row.
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
    """A step that is begun. `partitions`: how many the topic had; `node`: of which broker, "" where that is unknown."""

    step: int
    topic: str
    partitions: int
    node: str
    pieces: tuple[Piece, ...]
    gaps: tuple[Gap, ...]


class Manifest(NamedTuple):
    """A step that is done. `ends`: (incarnation, partition) -> where the next step goes on, over all steps so far."""

    plan: Plan
    files: tuple[ArchiveFile, ...]
    ends: dict[tuple[int, int], int]

    @property
    def rows(self) -> int:
        return sum(each.rows for each in self.files)

    @property
    def size_bytes(self) -> int:
        return sum(each.size_bytes for each in self.files)


# One object in a file


def packed(body: dict[str, Any]) -> bytes:
    """The bytes of an object, with its own check."""
    return (json.dumps({**body, "crc": _crc(body)}, indent=1) + "\n").encode()


def unpacked(path: str, data: bytes) -> dict[str, Any]:
    """The object in these bytes. Raises Damaged, NotSupported, both naming `path`."""
    try:
        body = json.loads(data)
        crc = body.pop("crc")
    except (ValueError, KeyError, AttributeError, TypeError):
        raise Damaged(DAMAGED.format(path=path, why="it is no JSON object with a crc")) from None
    if crc != _crc(body):
        raise Damaged(DAMAGED.format(path=path, why="its contents do not fit its crc"))
    if body.get("version") != VERSION:
        raise NotSupported(OTHER_VERSION.format(path=path, version=body.get("version"), known=VERSION))
    return dict(body)


def _crc(body: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())


def plan_body(plan: Plan) -> dict[str, Any]:
    return {
        "version": VERSION,
        "step": plan.step,
        "topic": plan.topic,
        "partitions": plan.partitions,
        "node": plan.node,
        "pieces": [each._asdict() for each in plan.pieces],
        "gaps": [each._asdict() for each in plan.gaps],
    }


def plan_of(body: dict[str, Any]) -> Plan:
    return Plan(
        body["step"],
        body["topic"],
        body["partitions"],
        body["node"],
        tuple(Piece(**each) for each in body["pieces"]),
        tuple(Gap(**each) for each in body["gaps"]),
    )


def manifest_body(manifest: Manifest) -> dict[str, Any]:
    return {
        **plan_body(manifest.plan),
        "rows": manifest.rows,
        "files": [each._asdict() for each in manifest.files],
        "ends": [[*key, end] for key, end in sorted(manifest.ends.items())],
    }


def manifest_of(body: dict[str, Any]) -> Manifest:
    return Manifest(
        plan_of(body),
        tuple(ArchiveFile(**each) for each in body["files"]),
        {(incarnation, partition): end for incarnation, partition, end in body["ends"]},
    )


# The folder


class ArchiveFolder:
    """An archive's own files. `id` names it for ever, wherever it is copied to."""

    def __init__(self, folder: Path, archive_id: str) -> None:
        self.folder, self.id = folder, archive_id

    @classmethod
    def opened(cls, folder: Path) -> ArchiveFolder:
        """Raises BadRequest (no archive is there), Damaged, NotSupported."""
        path = folder / archive_layout.ARCHIVE_FILE
        if not path.is_file():
            raise BadRequest(NO_ARCHIVE.format(folder=folder, path=path))
        return cls(folder, unpacked(str(path), path.read_bytes())["id"])

    @classmethod
    def made(cls, folder: Path) -> ArchiveFolder:
        """The archive that is there, or a new one. Raises BadRequest where the folder has other files or takes none."""
        make_named(folder)
        if (folder / archive_layout.ARCHIVE_FILE).is_file():
            return cls.opened(folder)
        strangers = [each.name for each in folder.iterdir()] if folder.is_dir() else []
        strangers = [name for name in strangers if name != archive_layout.HOUSE]
        if strangers:
            raise BadRequest(
                f"{folder} is no archive of tfmq and not empty ({strangers[0]!r} is in it): name a new folder."
            )
        body = {"version": VERSION, "format": "tfmq archive", "id": uuid.uuid4().hex}
        put(folder / archive_layout.ARCHIVE_FILE, packed(body))
        return cls.opened(folder)

    def topics(self) -> list[str]:
        """Those with a step that is done."""
        house = self.folder / archive_layout.HOUSE
        return sorted(each.name for each in house.iterdir() if each.is_dir() and any(each.glob("*.json")))

    def steps(self, topic: str) -> list[int]:
        """The numbers of all steps that are done, 1, 2, ... Raises Damaged where one is missing."""
        folder = self.folder / archive_layout.house_folder(topic)
        names = [archive_layout.STEP_NAME.fullmatch(each.name) for each in folder.glob("*.json")]
        found = sorted(int(name[1]) for name in names if name is not None)
        for expected, step in enumerate(found, 1):
            if step != expected:
                path = archive_layout.manifest_path(topic, expected)
                raise Damaged(MISSING.format(folder=self.folder, path=path, later=step))
        return found

    def manifest(self, topic: str, step: int) -> Manifest:
        """Raises Damaged, NotSupported."""
        path = self.folder / archive_layout.manifest_path(topic, step)
        return manifest_of(unpacked(str(path), path.read_bytes()))

    def require_whole(self, topic: str, last: Manifest | None) -> None:
        """That no step was done behind `last`, whose manifest was lost: files of the time since its first message.

        Ask where no step is begun. Raises Damaged.
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
                raise Damaged(NOBODYS.format(path=where, folder=self.folder, manifest=lost))

    def begun(self, topic: str, step: int) -> Plan | None:
        """The plan of a step that is not done, if it is begun. Raises Damaged, NotSupported."""
        path = self.folder / archive_layout.plan_path(topic, step)
        return plan_of(unpacked(str(path), path.read_bytes())) if path.is_file() else None

    def begin(self, plan: Plan) -> None:
        """On the disk when it returns."""
        put(self.folder / archive_layout.plan_path(plan.topic, plan.step), packed(plan_body(plan)))

    def finish(self, manifest: Manifest) -> None:
        """The step is done, on the disk when it returns; its plan goes."""
        topic, step = manifest.plan.topic, manifest.plan.step
        put(self.folder / archive_layout.manifest_path(topic, step), packed(manifest_body(manifest)))
        self.tidy(topic, step)

    def tidy(self, topic: str, step: int) -> None:
        """Without the plan of a step that is done."""
        (self.folder / archive_layout.plan_path(topic, step)).unlink(missing_ok=True)
