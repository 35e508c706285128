"""What became of transactions that are over, by name, for days: so that a late repeat gets the true answer.

An outcome takes 32 bytes: a keyed digest of the name, the epoch, time and state. The newest are a small dict; older
ones lie in sealed runs, sorted by digest, which are merged as they age and dropped whole: when the newest of a run is
older than outcomes are kept, and, the oldest run first, when there are too many.

It is a fold: the same outcomes recorded in the same order, over a snapshot or not, give the same memory.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from struct import Struct
from typing import Any, Final, NamedTuple

from tfmq.transaction.states import COMMITTED, ROLLED_BACK

DIGEST_SIZE: Final = 16
"""Names are not kept. With a key that nobody outside knows, two names never meet in one digest."""

ROW: Final = Struct(f">{DIGEST_SIZE}sQQ")
ROW_SIZE: Final = ROW.size
_TAIL: Final = Struct(">QQ")
EPOCH_SIZE: Final = 8

LOCAL_PREFIX: Final = "local:"
"""Names of local transactions begin so; the broker gives them, nobody else."""

EVERYTHING: Final = (1 << 63) - 1
"""No epoch is higher: all outcomes may be forgotten."""

STATES: Final = (COMMITTED, ROLLED_BACK)
STATE_BITS: Final = 8

NEWEST_MAX: Final = 2048
"""Outcomes in the dict, which takes 250 bytes for each; then they are sealed, which takes 0.6 ms."""
NEWEST_SHARE: Final = 16
"""A memory for few outcomes keeps at most this part of them in the dict: sealing and forgetting stay gradual."""

MERGED_RUNS: Final = 16
"""So many sealed runs are merged to one: a look-up asks some 45 runs of a million outcomes (0.2 ms), and a merge, of
32,768 rows, takes 12 ms."""
MERGED_SHARE: Final = 12
"""No merged run is more than this part of all that may be remembered, since it is forgotten as a whole."""


class Outcome(NamedTuple):
    """`state`: "committed" or "rolled_back". `time_ms`: when it was decided, wall clock."""

    epoch: int
    state: str
    time_ms: int


class Run(NamedTuple):
    """Sealed rows, sorted. `newest_ms`: the highest time among them."""

    merged: bool
    newest_ms: int
    rows: bytes

    def find(self, digest: bytes) -> Iterator[Outcome]:
        """Every row of that digest, by rising epoch."""
        rows = self.rows
        count = len(rows) // ROW_SIZE
        at = bisect_left(range(count), digest, key=lambda n: rows[n * ROW_SIZE : n * ROW_SIZE + DIGEST_SIZE])
        while at < count and rows.startswith(digest, at * ROW_SIZE):
            yield _outcome(rows, at * ROW_SIZE)
            at += 1


class Outcomes:
    """See the module. `key` is given by the journal's first entry, before anything is recorded."""

    def __init__(self, *, outcomes_max: int, keep_ms: int) -> None:
        self._outcomes_max = outcomes_max
        self._keep_ms = keep_ms
        self._newest_max = max(1, min(NEWEST_MAX, outcomes_max // NEWEST_SHARE))
        self.clear()

    def clear(self) -> None:
        """Nothing, as before the first entry."""
        self.key = b""
        self._newest: dict[bytes, bytes] = {}
        self._newest_count = 0
        self._newest_ms = 0
        self._runs: list[Run] = []
        """The oldest first."""
        self.forgotten = 0
        """No outcome of a higher epoch is forgotten."""
        self._sealed = 0

    def __len__(self) -> int:
        return self._sealed + self._newest_count

    def find(self, xid: str, epoch: int = 0) -> Outcome | None:
        """The outcome of that very epoch of `xid`, or of its latest one for 0; None if it is not remembered."""
        digest = self._digest(xid)
        for found in self._search(digest):
            if not epoch or found.epoch == epoch:
                return found
        return None

    def record(self, xid: str, epoch: int, state: str, time_ms: int) -> None:
        """One more. Epochs of one name only rise."""
        digest = self._digest(xid)
        word = time_ms << STATE_BITS | STATES.index(state)
        self._newest[digest] = self._newest.get(digest, b"") + _TAIL.pack(epoch, word)
        self._newest_count += 1
        self._newest_ms = max(self._newest_ms, time_ms)
        if self._newest_count >= self._newest_max:
            self._seal()

    def expire(self, now_ms: int) -> None:
        """Forgets what is older than outcomes are kept, by whole runs."""
        while self._runs and self._runs[0].newest_ms + self._keep_ms < now_ms:
            self._drop_oldest()

    def lost(self) -> None:
        """A repair gave up records: any outcome so far may have been among them."""
        self.forgotten = EVERYTHING

    def leased(self, end: int) -> None:
        """Epochs below `end` may be given out from here on; those above come later than whatever was lost."""
        if self.forgotten == EVERYTHING:
            self.forgotten = end - 1

    def _digest(self, xid: str) -> bytes:
        return blake2b(xid.encode(), digest_size=DIGEST_SIZE, key=self.key).digest()

    def _search(self, digest: bytes) -> Iterator[Outcome]:
        """Every outcome of a name, the latest first."""
        tails = self._newest.get(digest, b"")
        for position in range(len(tails) - _TAIL.size, -1, -_TAIL.size):
            yield _outcome(tails, position - DIGEST_SIZE)
        for run in reversed(self._runs):
            yield from reversed(list(run.find(digest)))

    def _seal(self) -> None:
        size = _TAIL.size
        rows = [
            digest + tails[position : position + size]
            for digest, tails in self._newest.items()
            for position in range(0, len(tails), size)
        ]
        rows.sort()
        self._runs.append(Run(False, self._newest_ms, b"".join(rows)))
        self._sealed += len(rows)
        self._newest.clear()
        self._newest_count = self._newest_ms = 0
        self._merge()
        while self._sealed > self._outcomes_max - self._newest_max and len(self._runs) > 1:
            self._drop_oldest()

    def _merge(self) -> None:
        """The runs that are not merged yet, which stand last, become one when there are enough."""
        runs = self._runs[-MERGED_RUNS:]
        size = sum(len(run.rows) for run in runs) // ROW_SIZE
        if len(runs) < MERGED_RUNS or runs[0].merged or size * MERGED_SHARE > self._outcomes_max:
            return
        rows = [
            run.rows[position : position + ROW_SIZE]
            for run in runs
            for position in range(0, len(run.rows), ROW_SIZE)
        ]
        rows.sort()
        self._runs[-MERGED_RUNS:] = [Run(True, max(run.newest_ms for run in runs), b"".join(rows))]

    def _drop_oldest(self) -> None:
        rows = self._runs.pop(0).rows
        self._sealed -= len(rows) // ROW_SIZE
        epochs = (rows[at : at + EPOCH_SIZE] for at in range(DIGEST_SIZE, len(rows), ROW_SIZE))
        self.forgotten = max(self.forgotten, int.from_bytes(max(epochs)))

    # Snapshots

    def dump(self) -> tuple[Any, ...]:
        """The memory as plain values, cheap to capture: what is sealed is shared."""
        return (self.key, list(self._newest.items()), self._newest_ms, list(self._runs), self.forgotten)

    def load(self, fields: Sequence[Any]) -> None:
        """Starts from what `dump` gave. Raises ValueError, TypeError or IndexError if it is none."""
        self.clear()
        key, newest, newest_ms, runs = fields[:4]
        self.key, self._newest_ms = bytes(key), int(newest_ms)
        self._newest = {bytes(digest): bytes(tails) for digest, tails in newest}
        self._newest_count = sum(len(tails) // _TAIL.size for tails in self._newest.values())
        self._runs = [Run(bool(merged), int(time_ms), bytes(rows)) for merged, time_ms, rows in runs]
        if any(len(run.rows) % ROW_SIZE for run in self._runs):
            raise ValueError("a run of outcomes ends inside a row")
        self._sealed = sum(len(run.rows) // ROW_SIZE for run in self._runs)
        self.forgotten = int(fields[4]) if len(fields) > 4 else EVERYTHING


def _outcome(rows: bytes, at: int) -> Outcome:
    """The outcome whose row begins at position `at`; its digest need not be there."""
    epoch, word = _TAIL.unpack_from(rows, at + DIGEST_SIZE)
    return Outcome(epoch, STATES[word & ((1 << STATE_BITS) - 1)], word >> STATE_BITS)
