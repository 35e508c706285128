"""The topics that a data folder's catalog knows, and the partitions whose folders are not there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Final

from journal import filenames
from journal.disk import Disk
from journal.errors import JournalError
from journal.log.checkpoint import Snapshots
from journal.log.segment import Segment
from journal.record.block import Block
from journal.record.format import make_log_id
from tfmq.broker.catalog_state import OPEN, Register, TopicRow
from tfmq.spark.pipelines.audit_findings import FOLDER, Finding
from tfmq.spark.pipelines.audit_plan import CATALOG_FOLDER, AuditedLog

CATALOG_LOG_ID: Final = 1 << 24
CATALOG_SUFFIX: Final = ".catalog"


def topics_of(disk: Disk, data: str) -> list[TopicRow]:
    """The topics that are all there, by the newest snapshot of the catalog and what follows it; [] where it is damaged
    or missing, which the audit of its own log tells. Ask before the folders are listed: later topics are not meant."""
    folder = filenames.join(data, CATALOG_FOLDER)
    register = Register()
    try:
        if not disk.exists(folder):
            return []
        snapshot, _ = Snapshots(disk, folder, CATALOG_LOG_ID).newest(filenames.OFFSET_MAX)
        if snapshot is not None:
            register.load(snapshot.state)
        for block in _blocks(disk, folder, 0 if snapshot is None else snapshot.offset):
            register.apply(block)
    except (JournalError, ValueError, OSError):
        return []
    return [topic for topic in register.topics.values() if topic.state == OPEN]


def _blocks(disk: Disk, folder: str, offset: int) -> Iterator[Block]:
    found = (filenames.parse_segment_name(child, CATALOG_SUFFIX) for child in disk.list(folder))
    for base in sorted(base for base in found if base is not None):
        with closing(
            Segment.open(disk, folder, base, CATALOG_LOG_ID, writable=False, suffix=CATALOG_SUFFIX)
        ) as segment:
            if segment.end > offset:
                yield from segment.blocks(max(0, offset - base))


def missing_folders(data: str, topics: list[TopicRow], logs: list[AuditedLog]) -> list[Finding]:
    """Partitions of these topics without a folder of their own among `logs`, those of the data folder `data`."""
    there = {(log.topic, log.partition): log for log in logs}
    findings = []
    for topic in topics:
        for partition in range(topic.partitions):
            log = there.get((topic.name, partition))
            folder = filenames.partition_folder(topic.name, partition)
            wanted = make_log_id(topic.incarnation, partition)
            if log is None:
                text = f"the folder {folder} is missing; the catalog has the topic with {topic.partitions} partitions"
            elif log.log_id not in (wanted, None):
                text = f"the folder {folder} is of log {log.log_id:#x}, the catalog says {wanted:#x}"
            else:
                continue
            findings.append(Finding(FOLDER, data, topic.name, partition, "", 0, 0, text))
    return findings
