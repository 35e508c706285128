"""Transactional streams: who sent what into transactions, so that nothing is taken twice or with a gap.

A producer lends each transaction a stream of its own: a producer id whose sequences are contiguous over all
partitions, and whose transactions bear growing numbers. Per stream the next sequence and the last number, with
what became of it, are kept; they are folded from journal entries and survive restarts. Idle ones are forgotten,
and so are the longest idle of too many; what is forgotten leaves a floor, as in the partitions.
"""

from collections.abc import Callable
from typing import NamedTuple

LeasedMs = Callable[[int], int | None]
"""When (wall clock, ms) an id was leased, at the latest; None if it never was."""


class Ending(NamedTuple):
    """What a stream's last number led to. `state` "" while it is not decided, else "prepared", "committed" or
    "rolled_back".
    """

    epoch: int
    state: str


class Streams:
    """The streams, the longest idle first."""

    def __init__(self, *, streams_max: int, idle_ms: int, leased_ms: LeasedMs) -> None:
        self.floor = 0

    def find(self, producer_id: int, number: int, now_ms: int) -> Ending | None:
        """What the request `number` of the stream (TRANSACT, BEGIN) led to; None if it is new.

        Raises UnknownTransaction for a number below the last (its outcome is not remembered), UnknownProducer for
        an id that was forgotten or never leased.
        """
        ...

    def check(self, producer_id: int, epoch: int, sequence: int, count: int, now_ms: int) -> bool:
        """True if these records are in the transaction `epoch` already, or on the way there; False if they come next.

        Raises SequenceGap, UnknownProducer, BadRequest (some known and some not, or known from another transaction).
        """
        return False
