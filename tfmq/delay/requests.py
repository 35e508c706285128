"""What the broker asks the delay queue, what it is answered, and what the queue needs of the broker: plain tuples."""

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

from journal.log.log import Log
from journal.record.batch import Appended, Batch

PENDING: Final = "pending"
CANCELLED: Final = "cancelled"
DELIVERED: Final = "delivered"
RESCHEDULED: Final = "rescheduled"
UNKNOWN: Final = "unknown"

Run: TypeAlias = Callable[[Callable[[], Any], Callable[[Any, BaseException | None], None]], None]
"""run(fn, done): `fn()` anywhere, then `done(result, error)` in the owner's thread."""


class Timers(Protocol):
    """Calls at monotonic times: `tfmq.broker.timers.Timers`."""

    def now(self) -> float: ...
    def after(self, seconds: float, call: Callable[[], None], *, deferrable: bool = False) -> Any: ...
    def cancel(self, timer: Any) -> None: ...


class Turn(NamedTuple):
    """A delayed message's place among all: they fire in this order."""

    due: int
    number: int


class DelaySettings(NamedTuple):
    """`tick_ms`: how often is looked who is due. `outcome_seconds`: so long after its time it is known what became of a
    message."""

    tick_ms: int = 10
    outcome_seconds: int = 86_400


class Landing(Protocol):
    """The log where delayed messages arrive, as the broker keeps it: appends wait for the end of the turn and for file
    work that is under way; forces are shared with everybody.
    """

    @property
    def log(self) -> Log: ...

    def append(
        self,
        batches: Sequence[Batch],
        done: Callable[[Sequence[Appended] | None, BaseException | None], None],
    ) -> None:
        """Appends in one write, behind all that came before: `done(one answer a batch, None)`, or `done(None, error)`
        with the errors of a send: nothing was written, unless the error's outcome says "unknown"."""
        ...

    def when_forced(self, offset: int, waiter: Callable[[BaseException | None], None]) -> None:
        """`waiter(None)` once the log is on the disk up to `offset`, `waiter(error)` if it stops before."""
        ...

    def truncate_before(self, offset: int, done: Callable[[Any, BaseException | None], None]) -> None:
        """Gives up what lies before, in a worker, with no append beside it."""
        ...


class Pending(NamedTuple):
    """A message that waits. `attribute`: its record's, as `tfmq.message` reads it; None without."""

    key: int
    due: int
    number: int
    size_bytes: int
    attribute: bytes | None


class Query(NamedTuple):
    """Which of those that wait: with first_due <= due < end_due, behind the turn `after`, at most `limit`.

    `keys`: whether a log's id is asked for; None: all. `message_key`: only messages with this key; None: all.
    """

    first_due: int
    end_due: int
    after: Turn | None
    limit: int
    keys: Callable[[int], bool] | None = None
    message_key: bytes | None = None


class Listed(NamedTuple):
    """`rows` in the order of their turns. `more`: there are others behind `after`, the last turn that was looked at."""

    rows: Sequence[Pending]
    more: bool
    after: Turn | None


class Described(NamedTuple):
    """`state`: pending, cancelled, delivered, rescheduled (`turn` is where it is now) or unknown."""

    state: str
    turn: Turn
    pending: Pending | None = None


class Rescheduled(NamedTuple):
    """`state`: rescheduled (`turn` is the new one), delivered, cancelled or unknown."""

    state: str
    turn: Turn | None = None


class Histogram(NamedTuple):
    """How many wait between each edge and the next, and in all."""

    counts: Sequence[int]
    pending: int
