"""Stores what a primary records as the entries of its term, in order, and says what is stored."""

from __future__ import annotations

import heapq
import itertools
import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NamedTuple, Protocol

from journal.clock import Clock
from tfmq.replication.entries import CUT_BYTES, EntryKind, Position, encode_entry, entry_key
from tfmq.replication.errors import Deposed, ReplicationError
from tfmq.replication.store import Store
from tfmq.replication.task import CallLater, Run

logger = logging.getLogger("tfmq.replication")

WINDOW: Final = 8
"""Maximum entries whose puts are under way."""
HEARTBEAT_CHECK_SECONDS: Final = 0.05
"""Pause before the next look whether a heartbeat is due, while entries are under way."""
RETRY_SECONDS: Final = 0.05
RETRY_SECONDS_MAX: Final = 2.0
"""First and longest pause before a put that failed is repeated."""


class Body(Protocol):
    """Recorded operations that are to become an entry, or a part of one. `last_operation`: its number."""

    @property
    def parts(self) -> Sequence[bytes | bytearray]: ...
    @property
    def operation_count(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...
    @property
    def last_operation(self) -> int: ...


class Recorder(Protocol):
    """The part of RecordingDisk that an `EntryWriter` uses."""

    def take(self) -> Sequence[Body]:
        """Return the closed bodies, in order, each once."""


class Unstored(NamedTuple):
    """An entry whose put is under way or is to be repeated."""

    position: Position
    data: Callable[[], bytes]
    last: int
    size_bytes: int
    time_ms: int
    began: float
    """When the first put began, in monotonic seconds."""


class EntryWriter:
    """Stores the entries of a term. All methods are called in the owner's thread, which gets the results of `run`.

    `run` executes calls of the store in workers of its own, so that they never wait for file work. An entry whose put
    failed is repeated until it is stored or another server has ended the term: then `deposed(error)` is called once,
    and nothing is stored any more.
    """

    def __init__(
        self,
        store: Store,
        recorder: Recorder,
        run: Run,
        clock: Clock,
        call_later: CallLater,
        *,
        next_position: Position,
        time_ms: int,
        stored_at: float,
        heartbeat_seconds: float,
        deposed: Callable[[Deposed], None],
        window: int = WINDOW,
    ) -> None:
        self._store, self._recorder, self._run, self._clock, self._call_later = store, recorder, run, clock, call_later
        self._term, self._next_slot = next_position
        self.time_ms = time_ms
        """The time of the last entry, ms since 1970."""
        self._heartbeat_seconds = heartbeat_seconds
        self._deposed = deposed
        self._window = window
        self._bodies: deque[Body] = deque()
        self._under_way: dict[int, Unstored] = {}
        """Entries that are not stored for certain, by slot."""
        self._stored_above: dict[int, Unstored] = {}
        """Entries that are stored while one below is not, by slot."""
        self._waiters: list[tuple[int, int, Callable[[], None]]] = []
        """Heap of (operation number, order, callback)."""
        self._order = itertools.count()
        self._marks: dict[int, Callable[[Position], None]] = {}
        self._submitted_number = 0
        """The number of the last operation in an entry."""
        self._failures = 0
        self._last_error = ""
        self._is_ended = self._is_held = self._is_reserved = False
        self._is_fenced = False
        """Whether this server has ended its term itself: an entry after its FENCE would be stored, and not count."""
        self._submitted_at = clock.monotonic()
        self.stored_slot = self._next_slot - 1
        """All entries up to this slot are stored."""
        self.stored_time_ms = time_ms
        """The time of the entry in `stored_slot`."""
        self.stored_number = 0
        """All operations up to this number are stored."""
        self.stored_at = stored_at
        """When the put of the entry in `stored_slot` began, in monotonic seconds."""
        self.unstored_bytes = 0
        """Bytes of operations that were taken from the recorder and are not stored."""
        self.stored_bytes = 0
        """Bytes of all entries that this writer has stored."""

    def start(self) -> None:
        """Begin to store, and to send heartbeats."""
        self._beat()
        self.pump()

    def stop(self) -> None:
        """Start no further put, and call no waiter."""
        self._is_ended = True
        self._waiters.clear()

    @property
    def is_idle(self) -> bool:
        """Whether everything that was recorded and cut is stored."""
        return not self._bodies and not self._under_way

    @property
    def trouble(self) -> str:
        """Why the last put failed; "" while the store works."""
        return self._last_error

    @property
    def position(self) -> Position:
        """The last entry up to which all are stored."""
        return Position(self._term, self.stored_slot)

    def when_stored(self, number: int, callback: Callable[[], None]) -> None:
        """Call `callback()` once all operations up to `number` are stored, at once if they are."""
        if number <= self.stored_number:
            callback()
        elif not self._is_ended:
            heapq.heappush(self._waiters, (number, next(self._order), callback))

    def mark(self, number: int, callback: Callable[[Position], None]) -> None:
        """Let an entry end with the operation `number`, where a body was just cut; call `callback` with its position.

        If there is such an entry already, its position is passed at once. No body after `number` may have been taken.
        """
        if number <= self._submitted_number:
            callback(Position(self._term, self._next_slot - 1))
        else:
            self._marks[number] = callback

    def hold(self) -> None:
        """Take no bodies from the recorder until `put_reserved`: what is recorded meanwhile follows that entry."""
        self._is_held = True

    def reserve(self) -> Position:
        """Return the position that `put_reserved` will use, and store nothing else meanwhile. `hold` was called."""
        self._is_reserved = True
        self.time_ms = max(self.time_ms, self._clock.wall_ms())
        return Position(self._term, self._next_slot)

    def unreserve(self) -> None:
        """Let heartbeats be stored again, because `put_reserved` will not be called for this position."""
        self._is_reserved = False

    def put_reserved(self, kind: EntryKind, body: bytes) -> None:
        """Store an entry at the reserved position. Then bodies are taken again."""
        self._is_held = self._is_reserved = False
        self._submit(kind, (body,), 0, 0, 0)
        self.pump()

    def discard_bodies(self) -> None:
        """Forget what was taken and is not under way, because a BASE will follow. `hold` was called."""
        self.unstored_bytes -= sum(body.size_bytes for body in self._bodies)
        self._bodies.clear()
        self._marks.clear()

    def pump(self) -> None:
        """Store what the recorder has closed. Called whenever that may have changed."""
        if self._is_ended or self._is_held or self._is_fenced:
            return
        for body in self._recorder.take():
            self._bodies.append(body)
            self.unstored_bytes += body.size_bytes
        while self._bodies and len(self._under_way) < self._window:
            self._store_bodies()

    def put(self, kind: EntryKind, body: bytes) -> Position:
        """Store an entry that is not of operations, after all that were taken so far. Return its position.

        A FENCE is the last one: nothing is stored after it, and who waits for more than what is before it waits for
        ever.
        """
        while self._bodies:
            self._store_bodies()
        self._is_fenced = kind == EntryKind.FENCE
        return self._submit(kind, (body,), 0, 0, 0)

    def _store_bodies(self) -> None:
        """Make one entry of the first bodies: of several if the store is slower than the bodies are closed."""
        bodies = [self._bodies.popleft()]
        size = bodies[0].size_bytes
        while self._bodies and size + self._bodies[0].size_bytes <= CUT_BYTES:
            if bodies[-1].last_operation in self._marks:
                break
            bodies.append(self._bodies.popleft())
            size += bodies[-1].size_bytes
        parts = [part for body in bodies for part in body.parts]
        last = self._submitted_number = bodies[-1].last_operation
        count = sum(body.operation_count for body in bodies)
        position = self._submit(EntryKind.OPERATIONS, parts, count, last, size)
        marked = self._marks.pop(last, None)
        if marked is not None:
            marked(position)

    def _submit(
        self, kind: EntryKind, parts: Sequence[bytes | bytearray], count: int, last: int, size: int
    ) -> Position:
        position = Position(self._term, self._next_slot)
        self._next_slot += 1
        # A clock that was set back must not make an entry older than the one before it.
        self.time_ms = max(self.time_ms, self._clock.wall_ms())
        encoded = Encoded(partial(encode_entry, kind, position, self.time_ms, parts, count))
        self._submitted_at = self._clock.monotonic()
        entry = Unstored(position, encoded.get, last, size, self.time_ms, self._submitted_at)
        self._under_way[position.slot] = entry
        self._start_put(entry)
        return position

    def _start_put(self, entry: Unstored) -> None:
        if not self._is_ended:
            self._run(partial(store_entry, self._store, entry.position, entry.data), partial(self._ended, entry))

    def _ended(self, entry: Unstored, is_stored: bool | None, error: BaseException | None) -> None:
        if self._is_ended:
            return
        if error is not None:
            # Also after an unknown error: without a further put, this server would not learn of its deposition.
            self._failures += 1
            reason = str(error) if isinstance(error, ReplicationError) else repr(error)
            if reason != self._last_error:
                self._last_error = reason
                logger.error("%s cannot be stored, and is tried again: %s", entry_key(entry.position), reason)
            pause = min(RETRY_SECONDS_MAX, RETRY_SECONDS * 2 ** min(self._failures, 10))
            self._call_later(pause, partial(self._start_put, entry))
        elif not is_stored:
            self.stop()
            self._deposed(Deposed(f"{entry_key(entry.position)} was stored by another server"))
        else:
            self._stored(entry)

    def _stored(self, entry: Unstored) -> None:
        if self._last_error:
            logger.info("the store %s works again", self._store.name)
        self._failures, self._last_error = 0, ""
        del self._under_way[entry.position.slot]
        self._stored_above[entry.position.slot] = entry
        while (next_one := self._stored_above.pop(self.stored_slot + 1, None)) is not None:
            self.stored_slot += 1
            self.stored_at, self.stored_time_ms = next_one.began, next_one.time_ms
            self.stored_number = max(self.stored_number, next_one.last)
            self.unstored_bytes -= next_one.size_bytes
            self.stored_bytes += next_one.size_bytes
        while self._waiters and self._waiters[0][0] <= self.stored_number and not self._is_ended:
            heapq.heappop(self._waiters)[2]()
        self.pump()

    def _beat(self) -> None:
        """Store an empty entry if there was none for `heartbeat_seconds`: standbys see that this server lives."""
        if self._is_ended or self._is_fenced:
            return
        due = self._submitted_at + self._heartbeat_seconds
        if not self._under_way and not self._is_reserved and self._clock.monotonic() >= due:
            self._submit(EntryKind.OPERATIONS, (), 0, 0, 0)
            due = self._submitted_at + self._heartbeat_seconds
        self._call_later(max(HEARTBEAT_CHECK_SECONDS, due - self._clock.monotonic()), self._beat)


class Encoded:
    """The bytes of an entry, which are made in the worker that stores them, once."""

    def __init__(self, encode: Callable[[], bytes]) -> None:
        self._encode: Callable[[], bytes] | None = encode
        self._data = b""

    def get(self) -> bytes:
        if self._encode is not None:
            self._data, self._encode = self._encode(), None
        return self._data


def store_entry(store: Store, position: Position, data: Callable[[], bytes]) -> bool:
    """Store an entry. Return False if another one is there. Any thread. Raises StoreUnavailable, StoreRefused."""
    key, encoded = entry_key(position), data()
    # An earlier call that seemed to fail may have stored it.
    return store.put_new(key, encoded) or store.get(key) == encoded
