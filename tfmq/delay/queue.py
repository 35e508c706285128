"""The delay queue, as the broker drives it: takes what arrived, fires what is due, answers about what waits.

It guarantees: no message fires before it is due, each fires once, those of one partition in the order of their turns
(due, number), and none before its arrival is on the disk. Whoever cancels gets one exact answer.

All calls come from the owner's thread, all callbacks in it, at once or later.
"""

from collections.abc import Callable, Sequence
from typing import Any

from journal.clock import Clock
from journal.header import Buffer
from journal.shapes import Appended
from tfmq.delay.note import Note
from tfmq.delay.requests import (
    DelaySettings,
    Described,
    Histogram,
    Landing,
    Listed,
    Query,
    Rescheduled,
    Run,
    Timers,
    Turn,
)
from tfmq.effects import Destination


class DelayQueue:
    """See the module.

    In the life of a broker: made, `recover(done)`, then `start()`; in each turn, after everybody else's requests and
    before partitions write, `write()` while `due`; at the end `stop(done)`.
    """

    def __init__(
        self,
        *,
        store_id: int,
        landing: Landing,
        state: Any,  # tfmq.delay.arrival_state.ArrivalState
        buckets: Any,  # tfmq.delay.buckets.Buckets
        checkpoint: Any,  # tfmq.delay.checkpoint
        destination: Destination,
        timers: Timers,
        clock: Clock,
        run: Run,
        settings: DelaySettings,
    ) -> None:
        raise NotImplementedError

    # Time

    def now_ms(self) -> int:
        """Broker time, ms since 1970: never goes back, and is never below anything that fired."""
        raise NotImplementedError

    def wall_ms(self) -> int:
        """The wall clock as `dues.effective` is to be told it: what broker time is ahead of it is noted, so that
        messages for a time of the wall clock are known again when that steps."""
        raise NotImplementedError

    # Arriving

    def expect(self, due_min: int) -> int:
        """Dues were given to messages that are about to be written, none below `due_min`: until `arrived` or `failed`
        with the ticket that is answered, nothing from there on fires. In the same call as `now_ms()` was asked.
        """
        raise NotImplementedError

    def arrived(self, ticket: int, note: Note, records: Buffer, answer: Appended) -> None:
        """They are written to the arrivals, not forced yet. `answer` is that of the records behind the note;
        `records` need stay only during the call."""
        raise NotImplementedError

    def failed(self, ticket: int) -> None:
        """They were not written, or nobody knows: then the log is stopped, and `resumed` finds out."""
        raise NotImplementedError

    # Asking

    def cancel(self, key: int, turn: Turn, done: Callable[[str | None, BaseException | None], None]) -> None:
        """`done("cancelled" | "delivered" | "unknown", None)` once that is on the disk, or `done(None, error)`: then
        nobody knows, unless the error's outcome says otherwise, and the same call finds out."""
        raise NotImplementedError

    def reschedule(
        self,
        key: int,
        turn: Turn,
        wire_due: bytes,
        done: Callable[[Rescheduled | None, BaseException | None], None],
    ) -> None:
        """Another due (one word as `dues.effective` takes them) for a message that waits, in one append; errors as for
        `cancel`."""
        raise NotImplementedError

    def describe(
        self, key: int, turn: Turn, done: Callable[[Described | None, BaseException | None], None]
    ) -> None:
        """What became of a message, or where it waits."""
        raise NotImplementedError

    def list(self, query: Query, done: Callable[[Listed | None, BaseException | None], None]) -> None:
        """Messages that wait, in the order of their turns."""
        raise NotImplementedError

    def histogram(
        self,
        edges: Sequence[int],
        keys: Callable[[int], bool] | None,
        done: Callable[[Histogram | None, BaseException | None], None],
    ) -> None:
        """How many wait between each of `edges` and the next; `keys` as in `Query`."""
        raise NotImplementedError

    def status(self) -> dict[str, Any]:
        """pending, near, horizon_ms, lateness, behind, waits_for, dropped ..., for people."""
        raise NotImplementedError

    # The broker's life

    def recover(self, done: Callable[[BaseException | None], None]) -> None:
        """Finds what is pending since the checkpoint. Fires nothing yet; the partitions are open."""
        raise NotImplementedError

    def start(self) -> None:
        """From now on what is due fires."""
        raise NotImplementedError

    @property
    def due(self) -> bool:
        """Whether `write` has something to do."""
        raise NotImplementedError

    def write(self) -> bool:
        """Hands effects to the targets that can take one; whether there was anything to do."""
        raise NotImplementedError

    def resumed(self, key: int) -> None:
        """A target, or the arrivals (`ARRIVALS_KEY`), takes writes again."""
        raise NotImplementedError

    def topic_gone(self, incarnation: int) -> None:
        """Messages for its partitions have nobody to go to any more: they are dropped and counted."""
        raise NotImplementedError

    def stop(self, done: Callable[[], None]) -> None:
        """Fires nothing more, waits for what is under way, writes the checkpoint: `done()`."""
        raise NotImplementedError
