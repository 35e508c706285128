"""Builds and parses all names of files and folders; no other module does. docs/architecture.md lists these names.

A name chosen by a peer (a topic, a group) becomes part of a path only if `is_valid_name` returns True for it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

SEGMENT_SUFFIX: Final = ".zxQueue"
INDEX_SUFFIX: Final = ".index"
LOG_SNAPSHOT_SUFFIX: Final = ".state"
TORN_SUFFIX: Final = ".torn"
DAMAGED_SUFFIX: Final = ".damaged"
"""Suffix of a damaged file that a repair has replaced. The damaged file is kept until an operator removes it."""

REPAIRED_SUFFIX: Final = ".repaired"
"""Suffix of a file that a repair is writing. It is renamed when it is complete and fsynced."""

LOG_CHECKPOINT_NAME: Final = "log.mark"
LOCK_NAME: Final = "lock"

TRANSACTIONS_FOLDER: Final = "transactions"
JOURNAL_SUFFIX: Final = ".journal"
SNAPSHOT_SUFFIX: Final = ".snapshot"
CHECKPOINT_NAME: Final = "checkpoint"
NEW_SUFFIX: Final = ".new"
"""Suffix of a snapshot until it is complete and fsynced."""

OFFSET_DIGITS: Final = 32
"""Number of digits, with leading zeros, of an offset in a file name. So names sort by offset, up to the highest u64."""

OFFSET_MAX: Final = (1 << 64) - 1
"""The highest offset. A file with a higher number in its name does not belong to a log."""

NAME_SIZE_MAX: Final = 249
"""Maximum bytes of a topic's name. The name of a partition's folder also has a dash and the partition number, and the
file system permits 255 bytes."""

PARTITION_MAX: Final = (1 << 24) - 1
"""Highest number of a partition: the id of a log has 24 bits for the partition."""

_JOURNAL_NAME = re.compile(r"([0-9]{16})\.journal")
_SNAPSHOT_NAME = re.compile(r"([0-9]{20})\.snapshot")
_OFFSET_NAME = re.compile(r"([0-9]{32})(\.[A-Za-z0-9._-]+)")
_ASIDE_NAME = re.compile(r".+\.damaged(\.[0-9]+)?")
_FOLDER = re.compile(r"([A-Za-z0-9._-]+)-(0|[1-9][0-9]{0,7})")
_NAME = re.compile(rf"[A-Za-z0-9._-]{{1,{NAME_SIZE_MAX}}}")


def segment_name(offset: int, suffix: str = SEGMENT_SUFFIX) -> str:
    """Name of the segment whose first byte is at `offset`."""
    return f"{offset:0{OFFSET_DIGITS}d}{suffix}"


def parse_segment_name(name: str, suffix: str = SEGMENT_SUFFIX) -> int | None:
    """Offset in a segment's name; None if `name` is not exactly a segment's name."""
    match = _OFFSET_NAME.fullmatch(name)
    if match is None or match[2] != suffix or int(match[1]) > OFFSET_MAX:
        return None
    return int(match[1])


def numbers_in(names: Iterable[str], parse: Callable[[str], int | None]) -> list[int]:
    """Return the numbers that `parse` finds in `names`, sorted; a name for which `parse` returns None is skipped."""
    return sorted(number for number in map(parse, names) if number is not None)


def segment_offsets(names: Iterable[str], suffix: str = SEGMENT_SUFFIX) -> list[int]:
    """Return the offsets of the segments whose file names are in `names`, sorted."""
    return numbers_in(names, partial(parse_segment_name, suffix=suffix))


index_name = partial(segment_name, suffix=INDEX_SUFFIX)
"""Name of the index of the segment that starts at an offset."""

log_snapshot_name = partial(segment_name, suffix=LOG_SNAPSHOT_SUFFIX)
"""Name of the snapshot that covers every record before an offset."""

parse_log_snapshot_name = partial(parse_segment_name, suffix=LOG_SNAPSHOT_SUFFIX)

torn_name = partial(segment_name, suffix=TORN_SUFFIX)
"""Name of the file for the bytes that recovery truncates at an offset and keeps for an analysis."""

parse_torn_name = partial(parse_segment_name, suffix=TORN_SUFFIX)


def journal_name(number: int) -> str:
    return f"{number:016d}{JOURNAL_SUFFIX}"


def parse_journal_name(name: str) -> int | None:
    match = _JOURNAL_NAME.fullmatch(name)
    return None if match is None else int(match[1])


def snapshot_name(number: int) -> str:
    return f"{number:020d}{SNAPSHOT_SUFFIX}"


def parse_snapshot_name(name: str) -> int | None:
    match = _SNAPSHOT_NAME.fullmatch(name)
    return None if match is None else int(match[1])


def is_transactions_file(name: str) -> bool:
    """True if the journal may have created a file of this name in the folder of transactions."""
    # An unfinished file, or a damaged file that a repair has replaced, has a further suffix after its usual name.
    for suffix in (NEW_SUFFIX, REPAIRED_SUFFIX, DAMAGED_SUFFIX):
        name = name.removesuffix(suffix)
    parsers = (parse_journal_name, parse_snapshot_name, parse_torn_name)
    return name == CHECKPOINT_NAME or any(parse(name) is not None for parse in parsers)


def log_checkpoint_name() -> str:
    return LOG_CHECKPOINT_NAME


def partition_folder(topic: str, partition: int) -> str:
    return f"{topic}-{partition}"


def parse_partition_folder(name: str) -> tuple[str, int] | None:
    """(topic, partition) of a partition's folder name; None if `partition_folder` would never return `name`."""
    match = _FOLDER.fullmatch(name)
    if match is None or not is_valid_name(match[1]) or int(match[2]) > PARTITION_MAX:
        return None
    return match[1], int(match[2])


def is_partition_file(name: str, suffix: str = SEGMENT_SUFFIX) -> bool:
    """True if the journal may have created a file of this name, complete or unfinished, in a partition's folder."""
    if name.startswith(LOG_CHECKPOINT_NAME):
        return True
    match = _OFFSET_NAME.fullmatch(name)
    known = (suffix, INDEX_SUFFIX, LOG_SNAPSHOT_SUFFIX, TORN_SUFFIX)
    return match is not None and match[2].startswith(known)


def is_trace(name: str) -> bool:
    """True if `name` is the name of a snapshot or an index: if a log has such a file, it has had a segment."""
    match = _OFFSET_NAME.fullmatch(name)
    return match is not None and match[2] in (INDEX_SUFFIX, LOG_SNAPSHOT_SUFFIX)


def is_set_aside(name: str) -> bool:
    return _ASIDE_NAME.fullmatch(name) is not None


def is_valid_name(name: str) -> bool:
    """True if `name` is permitted as the name of a topic, group or client, which may become part of a path."""
    # "." and ".." would refer to other folders.
    return _NAME.fullmatch(name) is not None and name not in (".", "..")


def join(folder: str, name: str) -> str:
    return f"{folder}/{name}"
