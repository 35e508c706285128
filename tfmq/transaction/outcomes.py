"""Outcomes (committed or rolled back) of ended transactions by name, stored for days to reply to late requests.

What it means that there is no outcome of a transaction is decided by `TransactionStore.certainly_not_committed`, which
also needs to know which epochs were assigned.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from struct import Struct
from typing import Any, Final, NamedTuple

from tfmq.transaction.states import COMMITTED, ROLLED_BACK, State

DIGEST_SIZE: Final = 16
"""Bytes of the digest of a name. The hash has a secret key, so that clients cannot construct collisions."""

OUTCOME_ROW: Final = Struct(f">{DIGEST_SIZE}sQQ")
ROW_SIZE: Final = OUTCOME_ROW.size
_TAIL: Final = Struct(">QQ")
EPOCH_SIZE: Final = 8

LOCAL_PREFIX: Final = "local:"
"""Prefix of the names that the broker gives to local transactions; a client cannot give such a name."""

LOCAL_OUTCOMES_MAX: Final = 100_000
"""Maximum of stored outcomes of local transactions. They are needed for minutes only, to answer repeated requests."""
LOCAL_OUTCOME_MS: Final = 3_600_000

ALL_EPOCHS: Final = (1 << 63) - 1
"""Value of `expired_epoch` above every epoch: the outcome of any transaction may be missing."""

STATES: Final = (COMMITTED, ROLLED_BACK)
STATE_BITS: Final = 8

NEWEST_MAX: Final = 2048
"""Maximum of outcomes in the dict of `Outcomes` (250 bytes each). A full dict becomes an `OutcomeRun`, in 0.6 ms."""
NEWEST_SHARE: Final = 16
"""The dict has at most 1/NEWEST_SHARE of `outcomes_max`, because it becomes a run, and a run expires as a whole."""

MERGED_RUNS: Final = 16
"""Number of sealed runs that are merged into one. So a lookup in a million outcomes searches 45 runs (0.2 ms)."""
MERGED_SHARE: Final = 12
"""A merged run has at most 1/MERGED_SHARE of `outcomes_max`, because a run expires as a whole."""


class Outcome(NamedTuple):
    """How a transaction ended. `state`: "committed" or "rolled_back". `time_ms`: wall clock time of the end."""

    epoch: int
    state: State
    time_ms: int


class OutcomeRun(NamedTuple):
    """A sealed run: an immutable sequence of outcomes, sorted by digest. `merged`: the run was made of several runs."""

    merged: bool
    newest_ms: int
    rows: bytes

    def find(self, digest: bytes) -> Iterator[Outcome]:
        """Yield every outcome with this digest, by rising epoch."""
        rows = self.rows
        count = len(rows) // ROW_SIZE
        at = bisect_left(range(count), digest, key=lambda n: rows[n * ROW_SIZE : n * ROW_SIZE + DIGEST_SIZE])
        while at < count and rows.startswith(digest, at * ROW_SIZE):
            yield _decode_outcome(rows, at * ROW_SIZE)
            at += 1


class Outcomes:
    """Bounded table of outcomes, rebuilt by replaying the journal.

    An outcome takes 32 bytes: the digest of the name with a secret `key`, the epoch, time and state. The newest
    outcomes are in a small dict, older ones in sealed runs: sorted rows that never change. Small runs are merged. A run
    is removed as a whole, `retention_ms` after its newest outcome; above `outcomes_max`, the oldest run is removed. The
    same outcomes in the same order result in the same table, also after a restart from a snapshot. `key` must be set
    before the first use.
    """

    def __init__(self, *, outcomes_max: int, retention_ms: int) -> None:
        self._outcomes_max = outcomes_max
        self._retention_ms = retention_ms
        self._dict_max = max(1, min(NEWEST_MAX, outcomes_max // NEWEST_SHARE))
        self.clear()

    def clear(self) -> None:
        self.key = b""
        self._dict: dict[bytes, bytes] = {}
        self._dict_count = 0
        self._dict_newest_ms = 0
        self._runs: list[OutcomeRun] = []
        self.expired_epoch = 0
        """Highest epoch whose outcome may have been removed, because it expired or because entries were lost."""
        self._sealed_count = 0

    def __len__(self) -> int:
        return self._sealed_count + self._dict_count

    def find(self, xid: str, epoch: int = 0) -> Outcome | None:
        """Return the outcome of the transaction `xid` with this epoch (0: the latest one); None if it is not stored."""
        digest = self._digest(xid)
        for found in self._search(digest):
            if not epoch or found.epoch == epoch:
                return found
        return None

    def add_outcome(self, xid: str, epoch: int, state: State, time_ms: int) -> None:
        """Store one outcome. For one name, each call must have a higher epoch than the call before."""
        digest = self._digest(xid)
        word = time_ms << STATE_BITS | STATES.index(state)
        self._dict[digest] = self._dict.get(digest, b"") + _TAIL.pack(epoch, word)
        self._dict_count += 1
        self._dict_newest_ms = max(self._dict_newest_ms, time_ms)
        if self._dict_count >= self._dict_max:
            self._seal_dict()

    def expire(self, now_ms: int) -> None:
        while self._runs and self._runs[0].newest_ms + self._retention_ms < now_ms:
            self._remove_oldest_run()

    def mark_entries_lost(self) -> None:
        """Record that a journal repair has removed entries, so that the outcome of any transaction may be missing."""
        self.expired_epoch = ALL_EPOCHS

    def mark_epochs_leased(self, end: int) -> None:
        """Record that epochs below `end` are leased. After a loss of entries, only their outcomes may be missing."""
        if self.expired_epoch == ALL_EPOCHS:
            self.expired_epoch = end - 1

    def _digest(self, xid: str) -> bytes:
        return blake2b(xid.encode(), digest_size=DIGEST_SIZE, key=self.key).digest()

    def _search(self, digest: bytes) -> Iterator[Outcome]:
        tails = self._dict.get(digest, b"")
        for position in range(len(tails) - _TAIL.size, -1, -_TAIL.size):
            yield _decode_outcome(tails, position - DIGEST_SIZE)
        for run in reversed(self._runs):
            yield from reversed(list(run.find(digest)))

    def _seal_dict(self) -> None:
        """Move the outcomes of the dict to a new sealed run; remove the oldest runs above the limit of outcomes."""
        size = _TAIL.size
        rows = [
            digest + tails[position : position + size]
            for digest, tails in self._dict.items()
            for position in range(0, len(tails), size)
        ]
        rows.sort()
        self._runs.append(OutcomeRun(False, self._dict_newest_ms, b"".join(rows)))
        self._sealed_count += len(rows)
        self._dict.clear()
        self._dict_count = self._dict_newest_ms = 0
        self._merge_runs()
        while self._sealed_count > self._outcomes_max - self._dict_max and len(self._runs) > 1:
            self._remove_oldest_run()

    def _merge_runs(self) -> None:
        """Merge the newest MERGED_RUNS runs into one, if none of them is merged and MERGED_SHARE permits the result."""
        runs = self._runs[-MERGED_RUNS:]
        size = sum(len(run.rows) for run in runs) // ROW_SIZE
        if len(runs) < MERGED_RUNS or runs[0].merged or size * MERGED_SHARE > self._outcomes_max:
            return
        rows = [
            run.rows[position : position + ROW_SIZE] for run in runs for position in range(0, len(run.rows), ROW_SIZE)
        ]
        rows.sort()
        self._runs[-MERGED_RUNS:] = [OutcomeRun(True, max(run.newest_ms for run in runs), b"".join(rows))]

    def _remove_oldest_run(self) -> None:
        rows = self._runs.pop(0).rows
        self._sealed_count -= len(rows) // ROW_SIZE
        epochs = (rows[at : at + EPOCH_SIZE] for at in range(DIGEST_SIZE, len(rows), ROW_SIZE))
        self.expired_epoch = max(self.expired_epoch, int.from_bytes(max(epochs)))

    # Snapshots

    def dump(self) -> tuple[Any, ...]:
        return (self.key, list(self._dict.items()), self._dict_newest_ms, list(self._runs), self.expired_epoch)

    def load(self, fields: Sequence[Any]) -> None:
        self.clear()
        key, newest, newest_ms, runs = fields[:4]
        self.key, self._dict_newest_ms = bytes(key), int(newest_ms)
        self._dict = {bytes(digest): bytes(tails) for digest, tails in newest}
        self._dict_count = sum(len(tails) // _TAIL.size for tails in self._dict.values())
        self._runs = [OutcomeRun(bool(merged), int(time_ms), bytes(rows)) for merged, time_ms, rows in runs]
        if any(len(run.rows) % ROW_SIZE for run in self._runs):
            raise ValueError("a run of outcomes ends inside a row")
        self._sealed_count = sum(len(run.rows) // ROW_SIZE for run in self._runs)
        self.expired_epoch = int(fields[4]) if len(fields) > 4 else ALL_EPOCHS


def _decode_outcome(rows: bytes, at: int) -> Outcome:
    """Decode the outcome of the row at position `at`; the digest bytes are not read."""
    epoch, word = _TAIL.unpack_from(rows, at + DIGEST_SIZE)
    return Outcome(epoch, STATES[word & ((1 << STATE_BITS) - 1)], word >> STATE_BITS)
