"""The data folder of a broker: recognition, format version, address file, and advice for damaged folders.

A broker accepts a data folder, an empty folder, or a path that does not exist yet.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from journal.crc32 import crc32
from journal.errors import Corrupt, NewerFormat
from journal.filenames import LOCK_NAME, log_checkpoint_name, parse_partition_folder, parse_segment_name
from journal.log.recovery_rules import FILES_GONE
from tfmq.errors import NOT_DONE, ConfigError

META_NAME: Final = "meta"
VERSION_NAME: Final = "version"
"""Name of the JSON file in `meta` that has the format version and the node id."""
FORMAT: Final = 1  # of the data folder's layout
STARTING_NAME: Final = "starting"
START_FILES: Final = frozenset({META_NAME, LOCK_NAME, STARTING_NAME})
"""Names that the first start of a broker creates. If a data folder has one of them, it must also have a catalog."""
OWN_FOLDERS: Final = frozenset({META_NAME, "transactions", "delay"})
"""A folder is a data folder if it has one of these or a partition. The names `lock` and `starting` alone prove nothing,
because other programs have such files too."""
FOLDER_NAMES: Final = (META_NAME, "transactions", "delay", "delay/arrivals", "archive")  # besides partitions
IGNORED_NAMES: Final = frozenset(
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
"""A folder with only these names counts as empty. They are files that a start creates before DATA/meta, a log file that
the shell opened, folders that a mounted disk has, and files of a version control system."""


_CHECKSUM_PATTERN = re.compile(rb'(\{.*), "crc": "([0-9a-f]{8})"\}\n?', re.DOTALL)

FOLDER_MISSING: Final = "its folder was gone at a start"
"""The reason of a partition's stop begins with this text if the partition's folder was missing."""
LOSSES: Final = (FOLDER_MISSING, FILES_GONE)
"""The reason of a log's stop begins with one of these texts if the log has lost all its messages."""


class VersionFile(NamedTuple):
    """The content of DATA/meta/version. Files of older releases have no checksum."""

    node: str
    has_checksum: bool


def encode_version(node: str) -> bytes:
    text = json.dumps({"format": FORMAT, "node": node})[:-1].encode()
    return b'%s, "crc": "%08x"}\n' % (text, crc32(text))


def decode_version(data: bytes, path: str) -> VersionFile:
    """Decode the version file. Raises Corrupt; NewerFormat for a later format.

    The checksum is checked first. It has the same position in every format, so that a flipped bit in the format number
    is reported as damage, not as a newer format.
    """
    checked = _CHECKSUM_PATTERN.fullmatch(data)
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
    return VersionFile(node, checked is not None)


def check_data_folder(path: str) -> None:
    """Raise ConfigError for a folder with files of other programs, OSError if it cannot be read."""
    try:
        names = sorted(os.listdir(path))
    except (FileNotFoundError, NotADirectoryError):
        return  # The folder will be created, or the caller reports the error.
    if is_broker_folder(names, lambda name: os.listdir(os.path.join(path, name))):
        return
    others = [name for name in names if name not in IGNORED_NAMES]
    if others:
        named = others[0] if len(others) == 1 else f"{others[0]} and {len(others) - 1:,} more"
        raise ConfigError(
            f"The folder {path} has other files in it ({named}) and is no data folder of a broker: name"
            " an empty folder, or one that does not exist yet.",
            outcome=NOT_DONE,
        )


def is_broker_folder(names: Iterable[str], children: Callable[[str], Iterable[str]]) -> bool:
    """Return whether the folder with the entries `names` is a data folder, even an incomplete one.

    `children` lists the entries of a subfolder. A folder such as `dbus-1` is named like a partition but may belong to
    another program, so it must contain a log. Raises OSError.
    """
    if OWN_FOLDERS.intersection(names):
        return True
    for name in names:
        if parse_partition_folder(name) is not None:
            try:
                if is_partition_folder(children(name)):
                    return True
            except (FileNotFoundError, NotADirectoryError):
                continue  # a file, or a broken link
    return False


def is_partition_folder(names: Iterable[str]) -> bool:
    """Return whether a folder with the entries `names` contains the log of a partition."""
    return any(name == log_checkpoint_name() or parse_segment_name(name) is not None for name in names)


def path_error_advice(error: BaseException, data: str) -> str | None:
    """Return advice on a path in the data folder `data`, to which `error` belongs; None without advice.
    There is advice if the path has the wrong type (file or folder), is a broken link, or may not be accessed."""
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
            f"{_blocking_component(path)} is no folder, and a folder belongs there. Move it away and put the folder"
            f" back, or run `tfmq log repair {data}`, which puts it aside and says what is lost with the folder."
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


def _blocking_component(path: str) -> str:
    """Return the first part of `path` that is no folder. The system's error names only the whole path."""
    above = os.path.dirname(path)
    while above not in ("", "/") and not os.path.isdir(above):
        path, above = above, os.path.dirname(above)
    return path


def new_journal_advice(meta: str) -> str:
    """Return advice for a DATA/transactions that is missing or belongs to other data. `meta`: the path of DATA/meta."""
    return (
        "Put back the folder that belongs to this data; or, if the transactions that were prepared are to be"
        f" forgotten, move this one away and make an empty file {meta}/new-journal, then start again"
    )


def new_delay_advice(meta: str) -> str:
    """Return advice for a DATA/delay that is missing or belongs to other data. `meta`: the path of DATA/meta."""
    return (
        "Put back the folder that belongs to this data; or, if the messages that wait in it are to be given up, move"
        f" this one away and make an empty file {meta}/new-delay, then start again"
    )


logger = logging.getLogger("tfmq.server")

ADDRESS_NAME: Final = "address"


def write_address(data: str, address: str) -> None:
    """Write DATA/address, by which `file:PATH` clients find this broker: one line, `HOST:PORT PROCESS`.

    The file exists from the time at which the broker is ready until a clean stop begins. If the broker is killed, the
    file remains. A reader detects that by DATA/lock, which is then not locked, or is locked by another process. The
    file is replaced atomically. Errors of the disk are only logged: clients that know the address can still connect.
    """
    path = os.path.join(data, ADDRESS_NAME)
    beside = f"{path}.{os.getpid()}"
    try:
        with open(beside, "w", encoding="ascii") as file:
            file.write(f"{address} {os.getpid()}\n")
        os.replace(beside, path)
    except OSError as error:
        logger.warning("%s could not be written, so file:%s does not find this broker: %s", path, data, error)


def remove_address(data: str) -> None:
    path = os.path.join(data, ADDRESS_NAME)
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
    except OSError as error:
        logger.warning("%s could not be removed: %s", path, error)
