"""Where the files of an archive are; docs/formats/archive.md is its page.

ARCHIVE/topic=orders/date=2026-11-21/hour=09/00003-0000000005-00000000000000004096-00000000000000008192.parquet
ARCHIVE/_tfmq/@archive.json             what this folder is
ARCHIVE/_tfmq/orders/00000007.plan      a step that is begun: what it will hold
ARCHIVE/_tfmq/orders/00000007.json      a step that is done: what it holds, file by file
ARCHIVE/_tfmq/orders/lock               one run at a time
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Final, NamedTuple

HOUSE: Final = "_tfmq"
"""Readers of Parquet pass over names that begin with _ or a dot."""
ARCHIVE_FILE: Final = f"{HOUSE}/@archive.json"
"""No topic has such a name, so none has its folder there."""
HOUR_MS: Final = 3_600_000
STEP_NAME: Final = re.compile(r"(\d{8})\.(plan|json)")
FILE_NAME: Final = re.compile(r"(\d{5,})-(\d{10,})-(\d{20})-(\d{20})\.parquet")
"""Partitions have five digits or more, incarnations ten or more."""
TEMPORARY: Final = ".part"
"""Ends the name of a file that is not whole yet, which begins with a dot."""


class Piece(NamedTuple):
    """A range of one partition, which is archived by one task: the records that begin in [start, end)."""

    partition: int
    incarnation: int
    log_id: int
    start: int
    end: int


def hour_of(append_ms: int) -> int:
    """Hours since 1970, UTC."""
    return append_ms // HOUR_MS


def file_path(topic: str, hour: int, piece: Piece) -> str:
    """Where the rows of a piece lie that were appended in that hour, relative to the archive."""
    moment = datetime.fromtimestamp(hour * HOUR_MS / 1000, UTC)
    return f"topic={topic}/date={moment:%Y-%m-%d}/hour={moment:%H}/{file_name(piece)}"


def file_name(piece: Piece) -> str:
    """The same in each hour."""
    return f"{piece.partition:05d}-{piece.incarnation:010d}-{piece.start:020d}-{piece.end:020d}.parquet"


def topic_folder(topic: str) -> str:
    return f"topic={topic}"


def date_folder(append_ms: int) -> str:
    """Of a day, below the topic's; they sort as the days do."""
    return f"date={datetime.fromtimestamp(append_ms / 1000, UTC):%Y-%m-%d}"


def house_folder(topic: str) -> str:
    return f"{HOUSE}/{topic}"


def plan_path(topic: str, step: int) -> str:
    return f"{HOUSE}/{topic}/{step:08d}.plan"


def manifest_path(topic: str, step: int) -> str:
    return f"{HOUSE}/{topic}/{step:08d}.json"


def aside_folder(topic: str) -> str:
    """Where files go of a step that could not be finished as it was planned."""
    return f"{HOUSE}/{topic}/aside"


def lock_path(topic: str) -> str:
    return f"{HOUSE}/{topic}/lock"
