"""The records of a line's next rows. While many wait, they are read ahead: many at once, in the order of positions.

Messages that are due together lie anywhere in their files. One by one each costs a call; of some ten thousands many lie
close together, and come with one read.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from tfmq.delay.fetching import Fetched, Fetching
from tfmq.delay.pacing import SLICE_BYTES
from tfmq.delay.requests import Run
from tfmq.delay.rows import NO_PART, Part, Rows

AHEAD_MIN: Final = 8192
"""With fewer rows nothing is read ahead."""
AHEAD_BYTES: Final = 8 << 20
"""Nor more than this: with all that a line may have, some 16 MiB of memory where messages are small."""

Done = Callable[[Fetched | None, BaseException | None], None]


class Supply:
    """See the module. One owner's thread."""

    def __init__(self, fetching: Fetching, run: Run) -> None:
        self._fetching, self._run = fetching, run
        self._part = NO_PART
        self._records: Sequence[bytes | None] = ()
        """Those of the first rows of the part."""
        self._given = 0
        self._life = 0

    def clear(self) -> None:
        """What was read ahead is not wanted any more."""
        self._part, self._records, self._given = NO_PART, (), 0
        self._life += 1

    def fetch(self, part: Part, rows: Rows, record_bytes: int, done: Done) -> None:
        """`done(records of the first rows of `part`, None)`, at least one, or `done(None, error)`; at once or later.

        `part` lies in front of `rows`, whose records have about so many bytes.
        """
        ahead = self._take(part)
        if ahead is not None:
            done(ahead, None)
            return
        self.clear()
        if len(rows) >= AHEAD_MIN:
            whole = rows.head(max(len(part.numbers), AHEAD_BYTES // record_bytes))
            read = partial(self._fetching.read, whole.locators, whole.numbers, AHEAD_BYTES)
            self._run(read, partial(self._read_ahead, part, whole, done, self._life))
            return
        try:
            found = self._fetching.cached(part.locators, part.numbers, SLICE_BYTES)
        except Exception as error:
            done(None, error)
            return
        if found is not None:
            done(found, None)
        else:
            self._read(part, done)

    def _read(self, part: Part, done: Done) -> None:
        self._run(partial(self._fetching.read, part.locators, part.numbers, SLICE_BYTES), done)

    def _read_ahead(
        self,
        part: Part,
        whole: Part,
        done: Done,
        life: int,
        found: Fetched | None,
        error: BaseException | None,
    ) -> None:
        if found is None:
            # Something behind may be what cannot be read: that must not keep these waiting.
            self._read(part, done)
        elif life != self._life:
            done(Fetched(found.records[: len(part.numbers)]), None)
        else:
            self._part, self._records = whole, found.records
            done(self._take(part), None)

    def _take(self, part: Part) -> Fetched | None:
        """The records of the first rows of `part`, if they were read ahead: of exactly these messages."""
        numbers, count = self._part.numbers, len(self._records)
        try:
            start = numbers.index(part.numbers[0], self._given, count)
        except ValueError:
            return None
        end = min(start + len(part.numbers), count)
        size = end - start
        if (
            part.numbers[:size] != numbers[start:end]
            or part.locators[:size] != self._part.locators[start:end]
        ):
            return None
        self._given = start
        return Fetched(self._records[start:end])
