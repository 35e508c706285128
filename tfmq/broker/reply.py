"""Who calls the engine: what the broker asks of a reply and of a session, and nothing more of the server.

The server implements both over sockets, the tests over lists. Every call happens in the engine's own thread.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

from journal import errors as journal
from tfmq import errors
from tfmq.errors import NOT_DONE, Outcome, TfmqError

Body: TypeAlias = bytes | memoryview
"""The raw bytes behind a request's header."""

Buffers: TypeAlias = Body | Sequence[Body]
"""The raw bytes behind a reply's header: one piece, or several that the server sends one behind the other."""

Run: TypeAlias = Callable[[Callable[[], Any], Callable[[Any, BaseException | None], None]], None]
"""run(work, done): `work()` in a worker thread, then `done(result, error)` in the engine's thread, later or
at once.
"""

Randomness: TypeAlias = Callable[[int], bytes]
"""randomness(n): n random bytes, as `os.urandom`."""


class Reply(Protocol):
    """The one answer to one request. Exactly one of `ok` and `error` is called, once, at once or later.

    A PRODUCE with acks=none gets its call too; the server sends nothing then.
    """

    @property
    def correlation(self) -> int:
        """The request's number in its session; CANCEL names it."""
        ...

    def body_done(self) -> None:
        """The request's body is not needed any more (it is written): its memory may be used again.

        Called at most once, before `ok` or `error`; either of these says it too.
        """
        ...

    def ok(self, *fields: Any, body: Buffers = b"") -> None:
        """The reply's fields in the order of the command's table, and its body, which stays unchanged for
        ever.
        """
        ...

    def error(self, error: BaseException) -> None:
        """An error reply; what is not a `TfmqError` becomes `internal_error`."""
        ...


class Session(Protocol):
    """One connection that has said hello. Hashed by identity."""

    @property
    def identity(self) -> str:
        """The client's name and address, for people: logs, lists of members."""
        ...

    @property
    def operator(self) -> bool:
        """Whether the client says that an operator uses it (`Admin`, the command line): for the log, not a right."""
        ...

    @property
    def number(self) -> int:
        """Which connection it is, counted from the broker's start as they came: a later one has a higher number."""
        ...

    def on_close(self, callback: Callable[[], None]) -> None:
        """`callback()` once, in the engine's thread, when the connection is gone; at once if it is gone
        already.
        """
        ...

    def pause(self) -> None:
        """Read no more from this peer for now: what it sent waits for the disk."""
        ...

    def resume(self) -> None:
        """Read again."""
        ...


# The border between the journal and a client: what each journal error is called out there. The only such
# table.
#
# Order matters: the first class that fits decides. Sentences for people never carry paths; the server's log
# has them.

STOPPING = "The broker is stopping. Connect again when it is back."
UNREADABLE = "The broker's disk could not be read. Its log names the file; try again, or look at the disk."
ARRIVALS_STOPPED = (
    "No delayed message can be taken, cancelled or moved, because the disk failed under the log where they arrive. Mend"
    " the disk, then start the broker again; other sends go on meanwhile."
)
NO_FILES = (
    "The broker has as many open files as it may have. Raise its limit (ulimit -n), or delete topics that nobody"
    " needs; then try again."
)


NO_MEMORY = "The broker is out of memory. Raise its limit, or ask for less at a time; then try again."


def is_of_files(error: BaseException) -> bool:
    """Whether a client's error says that no descriptor is left."""
    return isinstance(error, errors.Busy) and error.sentence == NO_FILES


def _of_system(error: OSError) -> TfmqError:
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return errors.Busy(NO_FILES)
    return errors.ServerError(UNREADABLE, errno=error.errno or 0)


def _of_room(error: journal.Full) -> TfmqError:
    """No space, or no descriptor: what the caller must do differs."""
    if isinstance(error.__cause__, OSError) and error.__cause__.errno in (errno.EMFILE, errno.ENFILE):
        return errors.Busy(NO_FILES)
    return errors.DiskFull()


ROWS: tuple[tuple[type[Exception], Callable[[Any], TfmqError]], ...] = (
    (journal.BelowStart, lambda e: errors.OffsetOutOfRange(first=e.first, end=-1, offset=e.offset)),
    (journal.BeyondEnd, lambda e: errors.OffsetOutOfRange(first=-1, end=e.end, offset=e.offset)),
    (journal.NotARecord, lambda e: errors.NotARecord(offset=e.offset)),
    (journal.CutAway, lambda e: errors.LogTruncated(cut=e.cut, offset=e.offset)),
    (journal.Corrupt, lambda e: errors.Damaged(first=e.first, next=e.next, reason=e.reason)),
    (journal.BadBatch, lambda e: errors.BadRequest(f"The batch breaks a rule of the format: {e.reason}.")),
    (journal.TooLarge, lambda e: errors.MessageTooLarge(size_bytes=e.size_bytes, max_bytes=e.max_bytes)),
    (journal.Full, _of_room),
    (journal.Stopped, lambda e: errors.StorageStopped(reason=e.reason)),
    (journal.Closed, lambda e: errors.Busy(STOPPING)),
    (journal.JournalError, lambda e: errors.ServerError()),
    (OSError, _of_system),
)


def client_error(error: BaseException, outcome: Outcome | None = None) -> TfmqError:
    """The error that a client gets for `error`; `outcome` where the caller knows better than the class."""
    if isinstance(error, TfmqError):
        known = error
    else:
        known = _translated(error)
        # Never sent; the server's log shows it.
        known.__cause__ = error
    if outcome is not None:
        known.outcome = outcome
    return known


def of_read(error: BaseException) -> TfmqError:
    """What a reader gets for `error`: a read without memory changed nothing, and may be asked for again."""
    return errors.Busy(NO_MEMORY) if isinstance(error, MemoryError) else not_done(error)


def of_arrivals(error: BaseException) -> TfmqError:
    """`client_error` of the log where delayed messages arrive, whose stop no topic's resumption lifts."""
    known = client_error(error)
    if isinstance(known, errors.StorageStopped):
        return errors.StorageStopped(ARRIVALS_STOPPED, outcome=known.outcome, **known.details)
    return known


def not_done(error: BaseException) -> TfmqError:
    """`client_error` where nothing has happened yet; what is a client's error already knows its outcome."""
    return client_error(error, None if isinstance(error, TfmqError) else NOT_DONE)


def _translated(error: BaseException) -> TfmqError:
    for kind, build in ROWS:
        if isinstance(error, kind):
            return build(error)
    return errors.ServerError()
