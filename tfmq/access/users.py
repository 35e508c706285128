"""The file of users: names, SCRAM keys, rights and quotas. No password is in it.

The file is JSON, written by `tfmq user`. It is replaced as a whole (a new file, fsynced, renamed), so a reader finds
the old or the new one. A file with something unknown in it is refused as a whole: rights that are not understood must
not be read as more or fewer than were meant.
"""

from __future__ import annotations

import base64
import binascii
import fcntl
import json
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Final, NamedTuple

from tfmq.access.quotas import QUOTA_MAX, Quotas
from tfmq.access.rights import RIGHTS_MAX, Right, Rights, parse_right
from tfmq.access.scram import Keys
from tfmq.errors import BadRequest, ConfigError
from tfmq.limits import NAME_RULE, is_valid_name

VERSION: Final = 1
USERS_MAX: Final = 10_000
FILE_BYTES_MAX: Final = 64 << 20
FILE_MODE: Final = 0o600
"""Only the owner reads the file: with its keys somebody could pretend to be the broker, and guess passwords."""


class User(NamedTuple):
    """One user. `keys`: what proves the password, see `scram`."""

    name: str
    keys: Keys
    rights: Rights
    quotas: Quotas = Quotas()


def check_user_name(name: object) -> str:
    """Return the name of a user. Raises `BadRequest` if it is none: the rule is that of topics and groups."""
    if not is_valid_name(name):
        raise BadRequest(f"{str(name)[:80]!r} cannot name a user: {NAME_RULE}.")
    return str(name)


def load_users(path: str) -> dict[str, User]:
    """Read the file of users. Raises `ConfigError` with one sentence if it cannot be read or is not understood."""
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_mode & stat.S_IWOTH:
                raise ConfigError(f"server.users is {path}: every user of this machine may change it: chmod 600 it.")
            data = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        advice = f" `tfmq user add NAME --file {path}` makes it." if isinstance(error, FileNotFoundError) else ""
        raise ConfigError(f"server.users is {path}: the file cannot be read: {error.strerror}.{advice}") from None
    if len(data) > FILE_BYTES_MAX:
        raise ConfigError(f"server.users is {path}: the file is too large, {FILE_BYTES_MAX >> 20} MiB are allowed.")
    try:
        content = json.loads(data)
        if not isinstance(content, dict) or content.get("version") != VERSION or set(content) != {"version", "users"}:
            raise BadRequest(f"it is not a file of users of version {VERSION}")
        users = content["users"]
        if not isinstance(users, dict) or len(users) > USERS_MAX:
            raise BadRequest(f"users must be an object with at most {USERS_MAX} entries")
        return {name: _read_user(name, row) for name, row in users.items()}
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"server.users is {path}: it is not JSON: {error}.") from None
    except BadRequest as error:
        raise ConfigError(f"server.users is {path}: {error.sentence.rstrip('.')}.") from None


def _read_user(name: str, row: Any) -> User:
    check_user_name(name)
    if not isinstance(row, dict) or not {"keys", "rights"} <= set(row) <= {"keys", "rights", "quotas"}:
        raise BadRequest(f"the user {name} must have keys and rights, and may have quotas, and nothing else")
    rights, quotas = row["rights"], row.get("quotas", {})
    if not isinstance(rights, list) or len(rights) > RIGHTS_MAX or not all(isinstance(each, str) for each in rights):
        raise BadRequest(f"the rights of {name} must be a list of at most {RIGHTS_MAX} texts")
    if not isinstance(quotas, dict) or not set(quotas) <= set(Quotas._fields):
        raise BadRequest(f"the quotas of {name} must have no keys but {', '.join(Quotas._fields)}")
    for key, value in quotas.items():
        if type(value) is not int or not 0 <= value <= QUOTA_MAX:
            raise BadRequest(f"{key} of {name} must be a whole number, 0 for no limit")
    try:
        parsed = Rights(map(parse_right, rights))
    except BadRequest as error:
        raise BadRequest(f"the rights of {name}: {error.sentence}") from None
    return User(name, _read_keys(name, row["keys"]), parsed, Quotas(**quotas))


def _read_keys(name: str, row: Any) -> Keys:
    fields = Keys._fields
    if not isinstance(row, dict) or set(row) != set(fields) or type(row["iterations"]) is not int:
        raise BadRequest(f"the keys of {name} must have {', '.join(fields)}")
    try:
        salt, stored, server = (
            base64.b64decode(row[field], validate=True) for field in ("salt", "stored_key", "server_key")
        )
    except (TypeError, ValueError, binascii.Error):
        raise BadRequest(f"the keys of {name} are not base64") from None
    return Keys(salt, row["iterations"], stored, server).checked(name)


def save_users(path: str, users: Mapping[str, User]) -> None:
    """Replace the file of users. Raises OSError; then the old file is unchanged."""
    content = {"version": VERSION, "users": {name: _row(user) for name, user in sorted(users.items())}}
    new = f"{path}.new"
    with suppress(FileNotFoundError):
        os.unlink(new)  # what a killed program left, perhaps with other rights
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        if os.path.exists(path):
            there = os.stat(path)
            os.chmod(new, there.st_mode & 0o777)
            os.chown(new, there.st_uid, there.st_gid)
        os.replace(new, path)
    except BaseException:
        os.unlink(new)
        raise
    folder = os.open(os.path.dirname(path) or ".", os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@contextmanager
def changing_users(path: str, *, create: bool = False) -> Iterator[dict[str, User]]:
    """Yield the users of the file, to be changed in the block, and save them after it; if it raises, change nothing.

    Meanwhile its folder is locked, so that of two programs that change the file one waits for the other. `create`:
    whether the file may be missing. Raises `ConfigError` as `load_users` does, and OSError.
    """
    path = os.path.realpath(path)  # A symbolic link stays one: the file that it names is replaced.
    # Not the file itself, because a program that waits for it would then have the lock of the file that was replaced.
    folder = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        users = load_users(path) if os.path.exists(path) or not create else {}
        yield users
        save_users(path, users)
    finally:
        os.close(folder)


def _row(user: User) -> dict[str, Any]:
    def text(key: bytes) -> str:
        return base64.b64encode(key).decode()

    keys = user.keys
    row: dict[str, Any] = {
        "keys": {
            "salt": text(keys.salt),
            "iterations": keys.iterations,
            "stored_key": text(keys.stored_key),
            "server_key": text(keys.server_key),
        },
        "rights": list(map(str, user.rights.all)),
    }
    quotas = {key: value for key, value in user.quotas._asdict().items() if value}
    return {**row, "quotas": quotas} if quotas else row


def with_rights(user: User, add: Mapping[Right, None], remove: Mapping[Right, None]) -> User:
    """Return the user with some rights more and others fewer."""
    kept = [each for each in user.rights.all if each not in remove]
    return user._replace(rights=Rights(dict.fromkeys([*kept, *add])))
