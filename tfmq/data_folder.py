"""Whether a broker may take a folder for its data: one of a broker's, an empty one, or one that is not there yet."""

from __future__ import annotations

import os
from typing import Final

from journal.names import LOCK_NAME, parse_partition_folder
from tfmq.error_base import NOT_DONE
from tfmq.errors import ConfigError

META_NAME: Final = "meta"
VERSION_NAME: Final = "version"
"""In `meta`: the JSON that names format and node."""
FORMAT: Final = 1
"""The layout of the data folder as a whole."""
STARTING_NAME: Final = "starting"
MARKS: Final = frozenset({META_NAME, LOCK_NAME, STARTING_NAME})
"""A broker, or who starts one, makes these before anything else: a folder with one of them is a broker's."""
HARMLESS: Final = frozenset(
    {"address", "server.log", "server.log.1", "lost+found", ".snapshot", ".gitignore", ".gitkeep"}
)
"""What may stand in a folder that counts as empty: a log that the shell opened, a disk of its own, a folder that is
kept in a repository."""


def check_data_folder(path: str) -> None:
    """Raises `ConfigError` for a folder with somebody else's things in it, and OSError if it cannot be looked at."""
    try:
        names = sorted(os.listdir(path))
    except (FileNotFoundError, NotADirectoryError):
        return  # it will be made, or the sentence for that is another's
    if MARKS.intersection(names) or any(parse_partition_folder(name) is not None for name in names):
        return
    others = [name for name in names if name not in HARMLESS]
    if others:
        raise ConfigError(
            f"The folder {path} has other things in it ({_some(others)}) and is no data folder of a broker: name an"
            " empty one, or one that is not there yet.",
            outcome=NOT_DONE,
        )


def _some(names: list[str]) -> str:
    """The first, so that its reader knows the folder again."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1:,} more"
