"""Who calls the engine: what the broker asks of a reply and of a session, and nothing more of the server.

The server implements both over sockets, the tests over lists. Every call happens in the engine's own thread.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

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
