"""File and folder names: the only module that builds or parses them.

    DATA/TOPIC-PARTITION/<32 digits>.zxQueue   a segment, named by the offset of its first byte
                         <32 digits>.index     its index
                         <32 digits>.state     a snapshot of the state of the log up to that offset
                         <32 digits>.torn      bytes that recovery truncated at that offset
                         log.mark              checkpoint: durable offset, epochs, stopped, clean
    DATA/transactions/<16 digits>.journal      a file of the transaction journal, by its number
                      <20 digits>.snapshot     a snapshot of its state, by the checkpoint's number
                      checkpoint               the two valid snapshots, and the durable LSN
                      <32 digits>.torn         bytes that recovery truncated at that LSN

A name chosen by a peer (a topic, a group) becomes part of a path only after `is_valid_name`.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Final

SEGMENT_SUFFIX: Final = ".zxQueue"
INDEX_SUFFIX: Final = ".index"
LOG_SNAPSHOT_SUFFIX: Final = ".state"
TORN_SUFFIX: Final = ".torn"
DAMAGED_SUFFIX: Final = ".damaged"
"""Appended to a file's name: the file before a repair, kept until an operator removes it."""

REPAIRED_SUFFIX: Final = ".repaired"
"""Appended to a file's name: an unfinished repair, renamed when it is complete and fsynced."""

LOG_CHECKPOINT_NAME: Final = "log.mark"
LOCK_NAME: Final = "lock"

TRANSACTIONS_FOLDER: Final = "transactions"
JOURNAL_SUFFIX: Final = ".journal"
SNAPSHOT_SUFFIX: Final = ".snapshot"
CHECKPOINT_NAME: Final = "checkpoint"
NEW_SUFFIX: Final = ".new"
"""Appended to a snapshot's name until it is complete and fsynced."""

OFFSET_DIGITS: Final = 32
"""Zero-padded, with room for any u64: names in one folder sort by offset."""

OFFSET_MAX: Final = (1 << 64) - 1
"""A file with a higher number in its name does not belong to the log."""

NAME_SIZE_MAX: Final = 249
"""A topic's folder is its name, a dash and a partition number; file systems allow 255 bytes."""

PARTITION_MAX: Final = (1 << 24) - 1
"""A log's id leaves 24 bits for the partition."""

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


index_name = partial(segment_name, suffix=INDEX_SUFFIX)
"""Name of the index of the segment that starts at an offset."""

log_snapshot_name = partial(segment_name, suffix=LOG_SNAPSHOT_SUFFIX)
"""Name of the snapshot that covers every record before an offset."""

parse_log_snapshot_name = partial(parse_segment_name, suffix=LOG_SNAPSHOT_SUFFIX)

torn_name = partial(segment_name, suffix=TORN_SUFFIX)
"""Name of the file for the bytes that recovery truncates at an offset."""

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
    # Unfinished files and files that a repair has set aside have a suffix after their name.
    for suffix in (NEW_SUFFIX, REPAIRED_SUFFIX, DAMAGED_SUFFIX):
        name = name.removesuffix(suffix)
    return (
        name == CHECKPOINT_NAME
        or parse_journal_name(name) is not None
        or parse_snapshot_name(name) is not None
        or parse_torn_name(name) is not None
    )


def log_checkpoint_name() -> str:
    return LOG_CHECKPOINT_NAME


def partition_folder(topic: str, partition: int) -> str:
    """Name of a partition's folder in the data folder. `topic` has passed `is_valid_name`."""
    return f"{topic}-{partition}"


def parse_partition_folder(name: str) -> tuple[str, int] | None:
    """(topic, partition) of a partition's folder name.

    None if `partition_folder` does not make it.
    """
    match = _FOLDER.fullmatch(name)
    if match is None or not is_valid_name(match[1]) or int(match[2]) > PARTITION_MAX:
        return None
    return match[1], int(match[2])


def is_partition_file(name: str, suffix: str = SEGMENT_SUFFIX) -> bool:
    """True if the journal may have created a file of this name in a partition's folder.

    Including unfinished files.
    """
    if name.startswith(LOG_CHECKPOINT_NAME):
        return True
    match = _OFFSET_NAME.fullmatch(name)
    known = (suffix, INDEX_SUFFIX, LOG_SNAPSHOT_SUFFIX, TORN_SUFFIX)
    return match is not None and match[2].startswith(known)


def is_trace(name: str) -> bool:
    """True if `name` is that of a snapshot or an index.

    A log has such a file only if it has had a segment.
    """
    match = _OFFSET_NAME.fullmatch(name)
    return match is not None and match[2] in (INDEX_SUFFIX, LOG_SNAPSHOT_SUFFIX)


def is_set_aside(name: str) -> bool:
    """True if a repair has set aside a file or folder of this name."""
    return _ASIDE_NAME.fullmatch(name) is not None


def is_valid_name(name: str) -> bool:
    """True if `name` may name a topic, group or client, and so be part of a path."""
    # "." and ".." would refer to other folders.
    return _NAME.fullmatch(name) is not None and name not in (".", "..")


def join(folder: str, name: str) -> str:
    """Join a path with "/", as all paths of the journal."""
    return f"{folder}/{name}"
