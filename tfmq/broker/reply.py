"""Interfaces that the server implements (`Reply`, `Session`, `Run`), and the conversion of errors for clients.

The server implements the interfaces with sockets and threads, tests with lists. All methods are called in the broker's
thread.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeAlias

from journal import errors as journal
from tfmq import errors
from tfmq.errors import NOT_DONE, Outcome, TfmqError

Body: TypeAlias = bytes | memoryview
"""The raw bytes after a request's header."""

Buffers: TypeAlias = Body | Sequence[Body]
"""The raw bytes after a reply's header: one buffer, or several that are sent in order."""

Run: TypeAlias = Callable[[Callable[[], Any], Callable[[Any, BaseException | None], None]], None]
"""run(work, done): calls `work()` in a worker thread, and then, immediately or later, `done(result, error)` in the
broker's thread."""

Randomness: TypeAlias = Callable[[int], bytes]

Pause: TypeAlias = Callable[[float], None]
"""pause(seconds): lets the thread that calls it wait, like `time.sleep`."""
"""randomness(n): returns n random bytes, like `os.urandom`."""


class Reply(Protocol):
    """The single reply to one request. Exactly one of `ok` and `error` is called, once, even with acks=none."""

    @property
    def correlation(self) -> int:
        """The number that the client gave to the request in its session; CANCEL names a request by this number."""

    def body_done(self) -> None:
        """Release the memory of the request's body before the reply, at most once. `ok` and `error` also release it."""

    def appended(self) -> None:
        """Record that the request's batch is appended, and that the reply waits for its fsync.

        Called only for a PRODUCE with a trace context.
        """

    def ok(self, *fields: Any, body: Buffers = b"") -> None:
        """Send the reply with these fields, in the order of `tfmq.protocol.commands`, and the body.

        The caller must not modify `body` afterwards.
        """

    def error(self, error: BaseException) -> None:
        """Send an error reply. An exception that is no `TfmqError` is sent as `internal_error`."""


class Session(Protocol):
    """A client's connection after its HELLO. Hashed by object identity."""

    @property
    def identity(self) -> str:
        """The client's name, user and address, for logs and member lists."""

    @property
    def user(self) -> str:
        """The user that has logged in; "" where the broker has no users."""

    @property
    def operator(self) -> bool:
        """Whether an operator uses the client (`Admin`, command line). Used for log lines only, not for permissions."""

    @property
    def number(self) -> int:
        """Number of the connection, counted since the broker's start."""

    @property
    def is_closed(self) -> bool:
        """Whether the connection is closed."""

    @property
    def sent_bytes(self) -> int:
        """Bytes of the replies to this client that the system has accepted so far."""

    @property
    def synced_durability(self) -> int:
        """What replies to this session report as the durability of what is durable: `ACKS_SYNCED`, or
        `ACKS_REPLICATED` where the broker replicates synchronously and the client knows that value."""

    def on_close(self, callback: Callable[[], None]) -> None:
        """Call `callback()` once, in the broker's thread: when the connection is closed, or now if it is closed."""

    def pause(self) -> None:
        """Stop reading from this connection, because too many of its requests wait for the disk."""

    def resume(self) -> None:
        """Read from this connection again."""


STOPPING = "The broker is stopping. Connect again when it is back."
UNREADABLE = "The broker's disk could not be read. Its log names the file; try again, or check the disk."
ARRIVALS_STOPPED = (
    "No delayed message can be sent, cancelled or rescheduled, because the disk failed under the arrival log. Repair"
    " the disk, then start the broker again; other sends continue."
)
NO_FILES = (
    "The broker has as many open files as it may have. Raise its limit (ulimit -n), or delete topics that are not"
    " needed; then try again."
)

NO_MEMORY = "The broker is out of memory. Raise its limit, or ask for less at a time; then try again."


def is_of_files(error: BaseException) -> bool:
    """Return whether the error says that the process cannot open more files."""
    return isinstance(error, errors.Busy) and error.sentence == NO_FILES


def _from_os_error(error: OSError) -> TfmqError:
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return errors.Busy(NO_FILES)
    return errors.ServerError(UNREADABLE, errno=error.errno or 0)


def _from_full(error: journal.Full) -> TfmqError:
    if isinstance(error.__cause__, OSError) and error.__cause__.errno in (errno.EMFILE, errno.ENFILE):
        return errors.Busy(NO_FILES)
    return errors.DiskFull()


# Each error of `journal`, and a function that makes the error for the client from it. The first matching class is used.
# Error messages for clients never contain paths; the server's log has the paths.
JOURNAL_ERRORS: tuple[tuple[type[Exception], Callable[[Any], TfmqError]], ...] = (
    (journal.BelowStart, lambda e: errors.OffsetOutOfRange(first=e.first, end=-1, offset=e.offset)),
    (journal.BeyondEnd, lambda e: errors.OffsetOutOfRange(first=-1, end=e.end, offset=e.offset)),
    (journal.NotARecord, lambda e: errors.NotARecord(offset=e.offset)),
    (journal.CutAway, lambda e: errors.LogTruncated(cut=e.cut, offset=e.offset)),
    (journal.Corrupt, lambda e: errors.Damaged(first=e.first, next=e.next, reason=e.reason)),
    (journal.BadBatch, lambda e: errors.BadRequest(f"The batch breaks a rule of the format: {e.reason}.")),
    (journal.TooLarge, lambda e: errors.MessageTooLarge(size_bytes=e.size_bytes, max_bytes=e.max_bytes)),
    (journal.Full, _from_full),
    (journal.Stopped, lambda e: errors.StorageStopped(reason=e.reason)),
    (journal.Closed, lambda e: errors.Busy(STOPPING)),
    (journal.JournalError, lambda e: errors.ServerError()),
    (OSError, _from_os_error),
)


def client_error(error: BaseException, outcome: Outcome | None = None) -> TfmqError:
    """Return the error that a client gets for `error`. If `outcome` is not None, it replaces the error's outcome."""
    if isinstance(error, TfmqError):
        known = error
    else:
        known = _from_journal_error(error)
        # The cause is not sent to the client, but the server logs it.
        known.__cause__ = error
    if outcome is not None:
        known.outcome = outcome
    return known


def reply_when_done(
    reply: Reply,
    fields: Callable[..., Iterable[Any]],
    to_error: Callable[[BaseException], BaseException] = client_error,
) -> Callable[..., None]:
    """Return `done(*result, error)`: it replies with the error, or with `fields(*result)` if the error is None."""

    def done(*ended: Any) -> None:
        *result, error = ended
        if error is not None:
            reply.error(to_error(error))
        else:
            reply.ok(*fields(*result))

    return done


def of_read(error: BaseException) -> TfmqError:
    """Return the client's error for a failed read. For MemoryError this is Busy, so that the client tries again."""
    return errors.Busy(NO_MEMORY) if isinstance(error, MemoryError) else not_done_error(error)


def arrival_log_error(error: BaseException) -> TfmqError:
    """Return `client_error` for the arrival log. If the log is stopped, the error advises a restart of the broker."""
    known = client_error(error)
    if isinstance(known, errors.StorageStopped):
        return errors.StorageStopped(ARRIVALS_STOPPED, outcome=known.outcome, **known.details)
    return known


def not_done_error(error: BaseException) -> TfmqError:
    """Return `client_error` with the outcome "not done", except that a `TfmqError` keeps its own outcome."""
    return client_error(error, None if isinstance(error, TfmqError) else NOT_DONE)


def _from_journal_error(error: BaseException) -> TfmqError:
    for kind, build in JOURNAL_ERRORS:
        if isinstance(error, kind):
            return build(error)
    return errors.ServerError()
