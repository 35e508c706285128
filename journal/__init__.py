"""Storage library: logs of checksummed records in segment files.

No network, independent of the broker.

    from journal import open_log, records

    with open_log("orders") as log:
        log.append_payloads([b"first", b"second"])
        log.force()
        print([record.payload for record in records(log)])

Names are loaded on first use: a client that only encodes records never loads the log.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from journal.clock import Clock as Clock
    from journal.clock import SystemClock as SystemClock
    from journal.disk import Disk as Disk
    from journal.disk import RealDisk as RealDisk
    from journal.errors import JournalError as JournalError
    from journal.fsync import Forcer as Forcer
    from journal.log.checkpoint import State as State
    from journal.log.log import Log as Log
    from journal.log.readonly import StoredRecord as StoredRecord
    from journal.log.readonly import open_log as open_log
    from journal.log.readonly import records as records
    from journal.log.recovery_rules import Recovery as Recovery
    from journal.log.segments import LogOptions as LogOptions
    from journal.record.batch import PLAIN as PLAIN
    from journal.record.batch import Appended as Appended
    from journal.record.batch import Batch as Batch
    from journal.record.batch import Chunk as Chunk
    from journal.record.batch import Source as Source
    from journal.record.block import Block as Block
    from journal.record.block import blocks_of as blocks_of

_HOME = {
    "Appended": "journal.record.batch",
    "Batch": "journal.record.batch",
    "Block": "journal.record.block",
    "Chunk": "journal.record.batch",
    "Clock": "journal.clock",
    "Disk": "journal.disk",
    "Forcer": "journal.fsync",
    "JournalError": "journal.errors",
    "Log": "journal.log.log",
    "LogOptions": "journal.log.segments",
    "PLAIN": "journal.record.batch",
    "RealDisk": "journal.disk",
    "Recovery": "journal.log.recovery_rules",
    "Source": "journal.record.batch",
    "State": "journal.log.checkpoint",
    "SystemClock": "journal.clock",
    "StoredRecord": "journal.log.readonly",
    "blocks_of": "journal.record.block",
    "open_log": "journal.log.readonly",
    "records": "journal.log.readonly",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    """A public name, from the module that defines it."""
    if name not in _HOME:
        raise AttributeError(f"journal has no public name {name!r}")
    return getattr(import_module(_HOME[name]), name)
