"""What a transaction or a timer does to the broker. `Append` is all there is so far."""

from collections.abc import Sequence
from typing import NamedTuple

from journal.shapes import Batch, Source


class Append(NamedTuple):
    """Batches for one partition from `source`, in one atomic append that names the source's position.

    It bypasses the rule of contiguous sequences: what its producers sent was checked where it first landed.
    """

    topic: str
    incarnation: int
    partition: int
    batches: Sequence[Batch]
    source: Source
