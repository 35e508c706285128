"""Storage library: logs of checksummed records in segment files. docs/journal.md shows how to use it.

A public name is imported on its first use, so that a client that only encodes records does not import the log.
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
    from journal.log.options import LogOptions as LogOptions
    from journal.log.readonly import StoredRecord as StoredRecord
    from journal.log.readonly import open_log as open_log
    from journal.log.readonly import records as records
    from journal.log.recovery_rules import Recovery as Recovery
    from journal.record.batch import PLAIN as PLAIN
    from journal.record.batch import Appended as Appended
    from journal.record.batch import Batch as Batch
    from journal.record.batch import Chunk as Chunk
    from journal.record.batch import Source as Source
    from journal.record.block import Block as Block
    from journal.record.block import blocks_of as blocks_of

_NAMES = {
    "journal.clock": "Clock SystemClock",
    "journal.disk": "Disk RealDisk",
    "journal.errors": "JournalError",
    "journal.fsync": "Forcer",
    "journal.log.checkpoint": "State",
    "journal.log.log": "Log",
    "journal.log.options": "LogOptions",
    "journal.log.readonly": "StoredRecord open_log records",
    "journal.log.recovery_rules": "Recovery",
    "journal.record.batch": "PLAIN Appended Batch Chunk Source",
    "journal.record.block": "Block blocks_of",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    """Import the module that defines the public name `name`, and return the object."""
    if name not in _HOME:
        raise AttributeError(f"journal has no public name {name!r}")
    return getattr(import_module(_HOME[name]), name)
