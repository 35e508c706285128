"""Why a server cannot start, in one sentence that says what to do, and with which exit code."""

from __future__ import annotations

import errno
import os

from journal.errors import Corrupt, Full, JournalError, Locked, NewerFormat
from tfmq.data_dir import misplaced
from tfmq.errors import ConfigError, TfmqError

NOT_DONE = 1
WRONG_USAGE = 2
TRANSACTIONS = "transactions"
"""The folder of their journal in the data folder."""


def exit_code(error: BaseException) -> int:
    """2 for a wrong configuration, else 1."""
    return WRONG_USAGE if isinstance(error, ConfigError) else NOT_DONE


def sentence(error: BaseException, data: str) -> str | None:
    """What to tell whoever starts the server; None for an error that only a traceback explains."""
    if isinstance(error, TfmqError):
        return error.sentence
    if isinstance(error, JournalError):
        return _of_journal(error, data)
    if isinstance(error, OSError):
        return _of_system(error, data)
    return None


def _of_journal(error: JournalError, data: str) -> str:
    if isinstance(error, Locked):
        who = f" (process {error.holder})" if error.holder else ""
        return (
            f"The data folder {data} is in use by another tfmq server{who}. Stop that one, or choose another "
            "folder with --data."
        )
    if isinstance(error, NewerFormat):
        return (
            f"The data folder {data} was written by a newer version of tfmq: {error.path} has format version "
            f"{error.found}, this one knows up to {error.known}. Start the newer version."
        )
    if isinstance(error, Full):
        return f"There is no space left on the disk of {data}. Make some, then start again."
    if isinstance(error, Corrupt) and os.path.basename(os.path.dirname(error.path)) == TRANSACTIONS:
        folder = os.path.dirname(error.path)
        return (
            f"The journal of transactions is damaged: {error}. Nothing was changed. `tfmq log verify {folder}` says"
            f" what is left of it, `tfmq log repair {data}` mends it and says what is lost; or restore the whole data"
            " folder from a backup (docs/operations.md)."
        )
    if isinstance(error, Corrupt) and "start again" in error.reason:
        return f"The data folder {data} is not whole: {error}. See docs/operations.md."
    if isinstance(error, Corrupt):
        return (
            f"The data folder {data} is damaged: {error}. `tfmq log repair {data}` mends it and says what is lost and"
            " what cannot be known; or restore the whole data folder from a backup (docs/operations.md)."
        )
    return f"The server cannot start on {data}: {error}."


def _of_system(error: OSError, data: str) -> str:
    path = error.filename or data
    if error.errno in (errno.EACCES, errno.EPERM):
        user = f"user {os.geteuid()}"
        return f"The server may not use {path}: {user} has no rights there. Change its owner, or use --data."
    if error.errno == errno.EROFS:
        return f"{path} is on a file system that is mounted read-only. Choose another folder with --data."
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"There is no space left on the disk of {data}. Make some, then start again."
    if error.errno in (errno.ENOTDIR, errno.EEXIST) and not os.path.isdir(data):
        return f"{data} is no folder. Choose another place for the data with --data."
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return "The limit of open files is too low for the logs of this data folder. Raise it (ulimit -n)."
    way_on = misplaced(error, data)
    if way_on is not None:
        return f"The server cannot start: {way_on}"
    return f"The server cannot start: {path}: {error.strerror or error}."
