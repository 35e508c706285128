"""File and folder names: the only place that builds or takes them apart.

    DATA/TOPIC-PARTITION/<32 digits>.zxQueue   a segment, named by the offset of its first byte
                         <32 digits>.index     its block index
                         <32 digits>.state     a snapshot of what the log's records taught, up to that offset
                         <32 digits>.torn      bytes that recovery cut off at that offset
                         log.mark              forced mark, epochs, stopped, clean
    DATA/transactions/<16 digits>.journal      a file of the transaction journal, by its number
                      <20 digits>.snapshot     what all entries before a place taught, by the checkpoint's number
                      checkpoint               which two snapshots count, and how far the journal is forced
                      <32 digits>.torn         bytes that recovery cut off at that place

A name that a peer chose (a topic, a group) becomes a path only after `valid_name`.
"""

from __future__ import annotations

import re
from typing import Final

SEGMENT_SUFFIX: Final = ".zxQueue"
INDEX_SUFFIX: Final = ".index"
STATE_SUFFIX: Final = ".state"
TORN_SUFFIX: Final = ".torn"
DAMAGED_SUFFIX: Final = ".damaged"
"""Behind a segment's name: the file as it was before a repair, kept until an operator removes it."""

REPAIRED_SUFFIX: Final = ".repaired"
"""Behind a segment's name: a repair that is not finished; it takes the segment's name when it is whole and
forced."""

MARK_NAME: Final = "log.mark"
LOCK_NAME: Final = "lock"

TRANSACTIONS_FOLDER: Final = "transactions"
JOURNAL_SUFFIX: Final = ".journal"
SNAPSHOT_SUFFIX: Final = ".snapshot"
CHECKPOINT_NAME: Final = "checkpoint"
NEW_SUFFIX: Final = ".new"
"""Behind a snapshot's name, until it is whole and forced."""

OFFSET_DIGITS: Final = 32
"""Names of one folder sort as their offsets do: zero-padded, with room for any u64."""

OFFSET_MAX: Final = (1 << 64) - 1
"""A file whose name says more is not ours."""

NAME_SIZE_MAX: Final = 249
"""A topic's folder is its name, a dash and a partition number; file systems take 255 bytes."""

PARTITION_MAX: Final = (1 << 24) - 1
"""A log's id leaves 24 bits for the partition."""

_JOURNAL_NAME = re.compile(r"([0-9]{16})\.journal")
_SNAPSHOT_NAME = re.compile(r"([0-9]{20})\.snapshot")
_OFFSET_NAME = re.compile(r"([0-9]{32})(\.[A-Za-z0-9._-]+)")
_ASIDE_NAME = re.compile(r".+\.damaged(\.[0-9]+)?")
_FOLDER = re.compile(r"([A-Za-z0-9._-]+)-(0|[1-9][0-9]{0,7})")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,249}")


def segment_name(offset: int, suffix: str = SEGMENT_SUFFIX) -> str:
    """The name of the segment whose first byte is at `offset`."""
    return f"{offset:0{OFFSET_DIGITS}d}{suffix}"


def parse_segment_name(name: str, suffix: str = SEGMENT_SUFFIX) -> int | None:
    """The offset in a segment's name; None if `name` is not exactly one of those."""
    match = _OFFSET_NAME.fullmatch(name)
    if match is None or match[2] != suffix or int(match[1]) > OFFSET_MAX:
        return None
    return int(match[1])


def index_name(offset: int) -> str:
    """The index of the segment that begins at `offset`."""
    return segment_name(offset, INDEX_SUFFIX)


def parse_index_name(name: str) -> int | None:
    """The offset in an index's name, else None."""
    return parse_segment_name(name, INDEX_SUFFIX)


def state_name(offset: int) -> str:
    """The snapshot that describes every record before `offset`."""
    return segment_name(offset, STATE_SUFFIX)


def parse_state_name(name: str) -> int | None:
    """The offset in a snapshot's name, else None."""
    return parse_segment_name(name, STATE_SUFFIX)


def torn_name(offset: int) -> str:
    """Where the bytes go that recovery cuts off at `offset`."""
    return segment_name(offset, TORN_SUFFIX)


def parse_torn_name(name: str) -> int | None:
    """The offset in the name of a cut-off tail, else None."""
    return parse_segment_name(name, TORN_SUFFIX)


def journal_name(number: int) -> str:
    """The file of the transaction journal with this number."""
    return f"{number:016d}{JOURNAL_SUFFIX}"


def parse_journal_name(name: str) -> int | None:
    """The number in the name of a file of the transaction journal, else None."""
    match = _JOURNAL_NAME.fullmatch(name)
    return None if match is None else int(match[1])


def snapshot_name(number: int) -> str:
    """The snapshot of the transaction journal's checkpoint with this number."""
    return f"{number:020d}{SNAPSHOT_SUFFIX}"


def parse_snapshot_name(name: str) -> int | None:
    """The checkpoint's number in a snapshot's name, else None."""
    match = _SNAPSHOT_NAME.fullmatch(name)
    return None if match is None else int(match[1])


def known_in_transactions(name: str) -> bool:
    """True if the journal may have put a file of this name into the folder of transactions, unfinished ones
    included."""
    for suffix in (NEW_SUFFIX, REPAIRED_SUFFIX, DAMAGED_SUFFIX):
        name = name.removesuffix(suffix)
    return (
        name == CHECKPOINT_NAME
        or parse_journal_name(name) is not None
        or parse_snapshot_name(name) is not None
        or parse_torn_name(name) is not None
    )


def mark_name() -> str:
    """The file of a log's marks, inside its folder."""
    return MARK_NAME


def partition_folder(topic: str, partition: int) -> str:
    """The folder of a partition, inside the data folder. `topic` has passed `valid_name`."""
    return f"{topic}-{partition}"


def parse_partition_folder(name: str) -> tuple[str, int] | None:
    """(topic, partition) of a partition's folder name; None if `partition_folder` does not make it."""
    match = _FOLDER.fullmatch(name)
    if match is None or not valid_name(match[1]) or int(match[2]) > PARTITION_MAX:
        return None
    return match[1], int(match[2])


def known_in_partition(name: str, suffix: str = SEGMENT_SUFFIX) -> bool:
    """True if the journal may have put a file of this name into a partition's folder, unfinished ones
    included."""
    if name.startswith(MARK_NAME):
        return True
    match = _OFFSET_NAME.fullmatch(name)
    known = (suffix, INDEX_SUFFIX, STATE_SUFFIX, TORN_SUFFIX)
    return match is not None and match[2].startswith(known)


def is_aside(name: str) -> bool:
    """True if a repair has put a file or folder of this name aside."""
    return _ASIDE_NAME.fullmatch(name) is not None


def valid_name(name: str) -> bool:
    """True if `name` may name a topic, group or client, and so be part of a path: never a folder above."""
    return _NAME.fullmatch(name) is not None and name not in (".", "..")


def join(folder: str, name: str) -> str:
    """A path below `folder`; all paths of the journal are strings with "/"."""
    return f"{folder}/{name}"
