"""Offsets that transactions commit, on their way into the catalog: in the order of their places, each once.

What comes in a turn is one change, all or none; the next waits until it is written, because the highest place
that was applied counts and none may pass one that was not.
"""

from collections.abc import Callable
from functools import partial
from typing import Final

from tfmq.apply_target import OFFSETS_KEY, CommitOffsets, Mark
from tfmq.broker.catalog import Catalog
from tfmq.broker.register import TX_OFFSETS
from tfmq.errors import UNKNOWN, StorageStopped

JOINED_PLACES: Final = 10_000
"""Offsets in one change, unless one effect alone has more: some 400 KB, far below a segment of the catalog."""

Done = Callable[[Mark | None, BaseException | None], None]


class OffsetEffects:
    """The queue. `put` during a turn, `write` at its end, before the catalog's own."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._queue: list[tuple[CommitOffsets, Done]] = []
        self._writing = False

    @property
    def due(self) -> bool:
        """Whether `write` has something to do."""
        return bool(self._queue) and not self._writing

    def put(self, effect: CommitOffsets, done: Done) -> None:
        """`done(mark, None)` when it is written, also if it was before; `done(None, error)` when it was not."""
        applied = self._catalog.register.applied.get(effect.source.id)
        stopped = self._catalog.log.stopped
        if applied is None or effect.source[2:] > applied:
            self._queue.append((effect, done))
        elif stopped is not None:
            done(None, StorageStopped(reason=stopped, outcome=UNKNOWN))
        else:
            done(self._mark(), None)

    def write(self) -> bool:
        """Hands what is queued to the catalog; whether there was anything to do."""
        if not self.due:
            return False
        count = self._joined()
        queue, self._queue = self._queue[:count], self._queue[count:]
        entries = [entry(effect) for effect, _ in queue]
        self._writing = True
        self._catalog.submit(entries[0], partial(self._written, queue), *entries[1:], forced=False)
        return True

    def _joined(self) -> int:
        """How many of the queue are one change."""
        places = 0
        for count, (effect, _) in enumerate(self._queue):
            places += sum(len(group.places) for group in effect.groups)
            if count and places > JOINED_PLACES:
                return count
        return len(self._queue)

    def _mark(self) -> Mark:
        return Mark(OFFSETS_KEY, self._catalog.log.end_offset, ())

    def _written(self, queue: list[tuple[CommitOffsets, Done]], error: BaseException | None) -> None:
        self._writing = False
        if error is not None:
            queue, self._queue = [*queue, *self._queue], []
        mark = self._mark() if error is None else None
        for _, done in queue:
            done(mark, error)


def entry(effect: CommitOffsets) -> tuple[object, ...]:
    """The effect as an entry of the catalog."""
    groups = [(each.group, each.generation, each.places) for each in effect.groups]
    return TX_OFFSETS, effect.source.id, effect.source.high, effect.source.low, groups
