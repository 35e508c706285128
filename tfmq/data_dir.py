"""Whether a broker may take a folder for its data: one of a broker's, an empty one, or one that is not there yet."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple
from zlib import crc32

from journal.errors import Corrupt, NewerFormat
from journal.filenames import LOCK_NAME, mark_name, parse_partition_folder, parse_segment_name
from tfmq.errors import NOT_DONE, ConfigError

META_NAME: Final = "meta"
VERSION_NAME: Final = "version"
"""In `meta`: the JSON that names format and node."""
FORMAT: Final = 1
"""The layout of the data folder as a whole."""
STARTING_NAME: Final = "starting"
MARKS: Final = frozenset({META_NAME, LOCK_NAME, STARTING_NAME})
"""A broker, or who starts one, makes these before anything else: where one of them is, there must be a catalog."""
OWN: Final = frozenset({META_NAME, "transactions", "delay"})
"""A folder with one of these is a broker's, and so is one with a partition (`is_log`). `lock` and `starting` alone are
not enough: other programs have files of these names too."""
FOLDER_NAMES: Final = (META_NAME, "transactions", "delay", "delay/arrivals", "archive")
"""In a data folder, beside those of partitions."""
HARMLESS: Final = frozenset(
    {
        LOCK_NAME,
        STARTING_NAME,
        "address",
        "server.log",
        "server.log.1",
        "lost+found",
        ".snapshot",
        ".gitignore",
        ".gitkeep",
    }
)
"""What may stand in a folder that counts as empty: what a start makes before DATA/meta, a log that the shell opened, a
disk of its own, a folder that is kept in a repository."""


_CHECKED = re.compile(rb'(\{.*), "crc": "([0-9a-f]{8})"\}\n?', re.DOTALL)

LOST: Final = "its folder was gone at a start"
"""How the reason of a partition's stop begins when its folder was not there."""


class Version(NamedTuple):
    """What DATA/meta/version says. `checked`: it has a checksum, which files of older releases have not."""

    node: str
    checked: bool


def encode_version(node: str) -> bytes:
    """The file: format, node, and the CRC-32 of the text before the last comma."""
    text = json.dumps({"format": FORMAT, "node": node})[:-1].encode()
    return b'%s, "crc": "%08x"}\n' % (text, crc32(text))


def decode_version(data: bytes, path: str) -> Version:
    """Raises Corrupt; NewerFormat for a later format. The checksum stays where it is in every format, so that a flipped
    bit is not taken for a newer one.
    """
    checked = _CHECKED.fullmatch(data)
    if checked is not None and crc32(checked[1]) != int(checked[2], 16):
        raise Corrupt(path, 0, len(data), "it fails its checksum")
    try:
        fields = json.loads(data)
        found, node = int(fields["format"]), str(fields["node"])
    except (ValueError, KeyError, TypeError) as error:
        raise Corrupt(path, 0, len(data), "it is not the JSON that names format and node") from error
    if checked is None and set(fields) != {"format", "node"}:
        raise Corrupt(path, 0, len(data), "it has other fields than format and node, and no checksum")
    if found > FORMAT:
        raise NewerFormat(path, found, FORMAT)
    return Version(node, checked is not None)


def check_data_folder(path: str) -> None:
    """Raises `ConfigError` for a folder with somebody else's things in it, and OSError if it cannot be looked at."""
    try:
        names = sorted(os.listdir(path))
    except (FileNotFoundError, NotADirectoryError):
        return  # it will be made, or the sentence for that is another's
    if is_brokers(names, lambda name: os.listdir(os.path.join(path, name))):
        return
    others = [name for name in names if name not in HARMLESS]
    if others:
        raise ConfigError(
            f"The folder {path} has other things in it ({_some(others)}) and is no data folder of a broker: name an"
            " empty one, or one that is not there yet.",
            outcome=NOT_DONE,
        )


def is_brokers(names: Iterable[str], children: Callable[[str], Iterable[str]]) -> bool:
    """Whether the folder with these names in it is a broker's, or what is left of one. `children` lists the folder NAME
    in it. A folder `dbus-1` is named like a partition and may be anybody's: it has to hold a log. Raises OSError.
    """
    if OWN.intersection(names):
        return True
    for name in names:
        if parse_partition_folder(name) is not None:
            try:
                if is_log(children(name)):
                    return True
            except (FileNotFoundError, NotADirectoryError):
                continue  # a file, or a link to nothing
    return False


def is_log(names: Iterable[str]) -> bool:
    """Whether the folder with these names in it holds the log of a partition."""
    return any(name == mark_name() or parse_segment_name(name) is not None for name in names)


def _some(names: list[str]) -> str:
    """The first, so that its reader knows the folder again."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1:,} more"


def misplaced(error: BaseException, data: str) -> str | None:
    """What to do about a path in the data folder `data` that is there and is not what belongs there; None for another
    error. Two sentences without a line's end.
    """
    if not isinstance(error, OSError) or not isinstance(error.filename, str):
        return None
    path = error.filename
    if error.errno == errno.EISDIR:
        return (
            f"{path} is a folder, and a file belongs there. Move it away and put the file back, or run"
            f" `tfmq log repair {data}`, which puts the folder aside and says what is lost with the file."
        )
    if error.errno == errno.ENOTDIR:
        return (
            f"{_no_folder(path)} is no folder, and a folder belongs there. Move it away and put the folder back, or run"
            f" `tfmq log repair {data}`, which puts it aside and says what is lost with the folder."
        )
    if error.errno == errno.ENOENT and os.path.islink(path):
        return (
            f"{path} is a link to {os.readlink(path)}, which is not there. Mount or bring back what it points to, or"
            " remove the link."
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        user = f"user {os.geteuid()} ({error.strerror})"
        return f"{path} may not be read or written by {user}. Change its owner or its rights."
    return None


def _no_folder(path: str) -> str:
    """The part of `path` that is in the way: the system names the whole path."""
    above = os.path.dirname(path)
    while above not in ("", "/") and not os.path.isdir(above):
        path, above = above, os.path.dirname(above)
    return path


def new_journal_advice(meta: str) -> str:
    """What to do where DATA/transactions is missing or does not fit; `meta` is DATA/meta."""
    return (
        "Put back the folder that belongs to this data; or, if the transactions that were prepared are to be"
        f" forgotten, move this one away and make an empty file {meta}/new-journal, then start again"
    )


def new_delay_advice(meta: str) -> str:
    """What to do where DATA/delay is missing or does not fit; `meta` is DATA/meta."""
    return (
        "Put back the folder that belongs to this data; or, if the messages that wait in it are to be given up, move"
        f" this one away and make an empty file {meta}/new-delay, then start again"
    )


# DATA/address: where the broker that runs on a data folder listens, for clients that were given the folder.
#
# One line, `HOST:PORT PROCESS`. It is there from "ready" until a clean stop begins; one that a kill left behind is told
# by DATA/lock, which nobody, or a process of another number, holds.

logger = logging.getLogger("tfmq.server")

NAME: Final = "address"


def write_address(data: str, address: str) -> None:
    """Say that this process listens at `address`. Readers see all of it or nothing. A disk that does not take it is
    logged: whoever knows the address still comes in."""
    path = os.path.join(data, NAME)
    beside = f"{path}.{os.getpid()}"
    try:
        with open(beside, "w", encoding="ascii") as file:
            file.write(f"{address} {os.getpid()}\n")
        os.replace(beside, path)
    except OSError as error:
        logger.warning("%s could not be written, so file:%s does not find this broker: %s", path, data, error)


def remove_address(data: str) -> None:
    """Nobody shall come any more."""
    path = os.path.join(data, NAME)
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
    except OSError as error:
        logger.warning("%s could not be removed: %s", path, error)
