"""A storage library: logs of checksummed records in segment files. No network, nothing of the broker.

    from journal import open_log, records

    with open_log("orders") as log:
        log.append_payloads([b"first", b"second"])
        log.force()
        print([record.payload for record in records(log)])

Names are loaded when they are first used: a client that only encodes records never loads the log.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from journal.block import Block as Block
    from journal.block import blocks_of as blocks_of
    from journal.clock import Clock as Clock
    from journal.clock import SystemClock as SystemClock
    from journal.disk import Disk as Disk
    from journal.disk import RealDisk as RealDisk
    from journal.errors import JournalError as JournalError
    from journal.force import Forcer as Forcer
    from journal.log import Log as Log
    from journal.options import LogOptions as LogOptions
    from journal.recovery import Recovery as Recovery
    from journal.shapes import PLAIN as PLAIN
    from journal.shapes import Appended as Appended
    from journal.shapes import Batch as Batch
    from journal.shapes import Chunk as Chunk
    from journal.shapes import Source as Source
    from journal.standalone import StoredRecord as StoredRecord
    from journal.standalone import open_log as open_log
    from journal.standalone import records as records
    from journal.state import State as State

_HOME = {
    "Appended": "journal.shapes",
    "Batch": "journal.shapes",
    "Block": "journal.block",
    "Chunk": "journal.shapes",
    "Clock": "journal.clock",
    "Disk": "journal.disk",
    "Forcer": "journal.force",
    "JournalError": "journal.errors",
    "Log": "journal.log",
    "LogOptions": "journal.options",
    "PLAIN": "journal.shapes",
    "RealDisk": "journal.disk",
    "Recovery": "journal.recovery",
    "Source": "journal.shapes",
    "State": "journal.state",
    "SystemClock": "journal.clock",
    "StoredRecord": "journal.standalone",
    "blocks_of": "journal.block",
    "open_log": "journal.standalone",
    "records": "journal.standalone",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    """A public name, from the module that defines it."""
    if name not in _HOME:
        raise AttributeError(f"journal has no public name {name!r}")
    return getattr(import_module(_HOME[name]), name)
