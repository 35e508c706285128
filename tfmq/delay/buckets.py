"""The delayed messages on the disk: buckets, each a file with what is due in one span of time (`spans`).

Threads: the *owner* reads the set; `spill`, `split`, `commit` and `close` may run in a worker, one at a time;
`load`, `read`, `rows`, `histogram` in any, also beside those.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

from journal.disk import Disk
from tfmq.delay.columns import Columns, Numbers
from tfmq.delay.spans import Span

Pending: TypeAlias = Callable[[int, Numbers, Numbers], "bool | Sequence[int]"]
"""pending(log id, dues, numbers): True or False for all of them, or a truth value for each (bytes do): whether they are
still to be fired. What is settled, cancelled or gone is not."""


class Spilled(NamedTuple):
    """What a spill did. `durable` False: the disk was full when the checkpoint was to be written: `commit` later.

    `moved_numbers` (rising) and `moved_locators`: where those below `moved_below` lie now (slot << 48 | position).
    """

    count: int
    size_bytes: int
    durable: bool
    moved_numbers: Numbers
    moved_locators: Numbers


class Row(NamedTuple):
    """A pending message in a list."""

    due: int
    number: int
    log_id: int
    topic: str
    size: int
    absolute: bool
    locator: int


class Bucket:
    """One file. `slot` (1 to 65,535) names it in locators while it is there."""

    span: Span
    slot: int
    count: int
    size: int


class Buckets:
    """See the module. Made by `Buckets.open`."""

    store_id: int
    broker_ms: int
    """Broker time as the last checkpoint had it."""
    stopped: str | None
    """Why nothing is written any more, until the next start; what was forced is still served."""
    spilled_offset: int
    spilled_number: int
    """Arrivals before this offset (with numbers below this) are in buckets, or were settled: the next spill goes on here."""
    durable_offset: int
    """Arrivals before this one may be truncated."""

    @classmethod
    def open(
        cls,
        disk: Disk,
        folder: str,
        *,
        new_id: Callable[[], int],
        randomness: Callable[[int], bytes],
        new_only: bool = False,
    ) -> Buckets:
        """Opens the set in `folder` (DATA/delay, which exists), or makes one (`new_id` is called only then).

        Raises Corrupt (nothing was changed), NewerFormat, Full (only where one is made), OSError.
        """
        ...

    @property
    def leaves(self) -> Sequence[Bucket]:
        """Every bucket that counts, by time; their spans never overlap."""
        ...

    def leaf(self, due: int) -> Bucket | None:
        """The bucket whose span holds `due`."""
        ...

    def next_after(self, due: int) -> Bucket | None:
        """The first bucket with a span that ends behind `due`: the one to load when the horizon is there."""
        ...

    def by_slot(self, slot: int) -> Bucket:
        """The bucket of a locator, also a retired one until it is released. KeyError."""
        ...

    def spill(
        self,
        batches: Iterable[object],
        to_offset: int,
        to_number: int,
        now_ms: int,
        pending: Pending,
        moved_below: int = 0,
    ) -> Spilled:
        """Puts arrivals from `spilled_offset` up to `to_offset` (numbers below `to_number`) into buckets.

        Written, forced together, then the checkpoint. Raises Full (all is as it was; try again later), OSError and
        Stopped (it stops). In a worker.
        """
        ...

    def load(self, bucket: Bucket) -> Iterator[Columns]:
        """A chunk at a time; damaged ones are left out and named in `bucket.damage`. Raises OSError. In a worker."""
        ...

    def read(self, slot: int, positions: Sequence[int], numbers: Sequence[int]) -> list[bytes | None]:
        """The records at these positions, verified to be those of these numbers; None: damaged, and named.

        Fastest where positions rise and lie close together. Raises OSError. In a worker.
        """
        ...

    def read_cached(
        self, slot: int, positions: Sequence[int], numbers: Sequence[int]
    ) -> list[bytes | None] | None:
        """As `read`; None where that would wait for the disk."""
        ...

    def full(self) -> list[Bucket]:
        """Those with more than SPLIT_ENTRIES, which `split` should cut."""
        ...

    def cascade_due(self, now_ms: int) -> list[Bucket]:
        """Coarse ones whose time comes within two of the finer spans, which `split` should cut."""
        ...

    def split(self, bucket: Bucket, pending: Pending) -> list[Bucket]:
        """Cuts a bucket into finer ones, forced and in the checkpoint; it is retired then, and may be read until
        `release`: locators into it stay good. Raises as `spill`. In a worker.
        """
        ...

    def retire(self, bucket: Bucket) -> None:
        """Everything in it is settled and that is forced: it counts no more. The next `commit` removes the file."""
        ...

    def release(self, bucket: Bucket) -> None:
        """Nobody has a locator into this retired bucket any more: the next `commit` removes the file."""
        ...

    def commit(self, broker_ms: int) -> None:
        """Writes the checkpoint, forced, then removes the files of what was retired. Raises as `spill`. In a worker."""
        ...

    def rows(
        self,
        first_turn: tuple[int, int],
        end_due: int,
        log_ids: Collection[int] | None = None,
    ) -> Iterator[Row]:
        """Messages from that turn on up to below `end_due`, in the order of their turns; of these logs only.

        Without asking what is settled or cancelled. Reads columns only, a bucket at a time. In a worker.
        """
        ...

    def histogram(self, edges: Sequence[int], log_ids: Collection[int] | None = None) -> list[int]:
        """How many are due from each edge up to below the next one; edges rise; one count less than edges."""
        ...

    def close(self, broker_ms: int) -> None:
        """A last checkpoint, then the files are closed. Raises as `commit`."""
        ...
