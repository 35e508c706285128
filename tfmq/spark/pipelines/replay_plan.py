"""Which files of an archive a replay sends in which step; the same each time, also when the archive has grown.

Steps are numbered from 1. A step never spans two steps of the archive, so what is archived later adds steps behind
those that were known. Within a step a partition's files are one part, sent in order.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from tfmq.spark.pipelines.manifest import ArchiveFile, Manifest

STEP_BYTES: Final = 256 << 20
"""Of messages, about; one commit each. Not an option: other steps would be another replay."""


class Choice(NamedTuple):
    """What of an archived topic is meant: `partitions` (() all), append times in [`since_ms`, `until_ms`) (None: no
    bound).
    """

    topic: str
    partitions: tuple[int, ...] = ()
    since_ms: int | None = None
    until_ms: int | None = None

    def takes(self, file: ArchiveFile) -> bool:
        """Whether some of its rows may be meant."""
        return (
            (not self.partitions or file.partition in self.partitions)
            and (self.since_ms is None or file.last_ms >= self.since_ms)
            and (self.until_ms is None or file.first_ms < self.until_ms)
        )


class Part(NamedTuple):
    """What one task sends: files of one partition, in order of offsets."""

    partition: int
    files: tuple[ArchiveFile, ...]

    @property
    def log_bytes(self) -> int:
        return sum(each.log_bytes for each in self.files)


class Step(NamedTuple):
    """What one commit sends."""

    number: int
    parts: tuple[Part, ...]

    @property
    def log_bytes(self) -> int:
        return sum(each.log_bytes for each in self.parts)


def steps(manifests: Iterable[Manifest], choice: Choice, step_bytes: int = STEP_BYTES) -> Iterator[Step]:
    """All steps of a replay. `manifests`: of all of the archive's steps, in order.

    A topic that was made anew has its earlier life in earlier steps, also within one step of the archive.
    """
    number = 0
    for manifest in manifests:
        files = [each for each in manifest.files if choice.takes(each)]
        for incarnation in sorted({each.incarnation for each in files}):
            life = [each for each in files if each.incarnation == incarnation]
            for parts in _shared(life, step_bytes):
                number += 1
                yield Step(number, parts)


def _shared(files: list[ArchiveFile], step_bytes: int) -> Iterator[tuple[Part, ...]]:
    """Parts of one step after the other, with some of each partition."""
    waiting: dict[int, list[ArchiveFile]] = {}
    for each in sorted(files, key=lambda file: (file.partition, file.first_offset)):
        waiting.setdefault(each.partition, []).append(each)
    while waiting:
        share = step_bytes // len(waiting)
        parts = []
        for partition in sorted(waiting):
            queue, size = waiting[partition], 0
            taken: list[ArchiveFile] = []
            while queue and (not taken or size + queue[0].log_bytes <= share):
                size += queue[0].log_bytes
                taken.append(queue.pop(0))
            parts.append(Part(partition, tuple(taken)))
            if not queue:
                del waiting[partition]
        yield tuple(parts)


def replay_name(archive_id: str, choice: Choice, node: str, topic: str, incarnation: int) -> str:
    """The name under which the broker knows how far a replay is: the same archive, choice and target, the same name."""
    asked = json.dumps([archive_id, *choice, node, topic, incarnation])
    return hashlib.sha256(asked.encode()).hexdigest()[:32]
