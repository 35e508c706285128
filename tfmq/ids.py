"""Identities: packs them, prints them, reads what was printed.

A record's id is the id of the producer's stream (40 bits, never 0) and the record's sequence in it (24 bits);
it is unique in a broker for ever. A log's id is built the same way from its topic's incarnation and its
partition.
"""

from typing import NamedTuple

PRODUCER_BITS = 40
SEQUENCE_BITS = 24
PRODUCER_MAX = (1 << PRODUCER_BITS) - 1
SEQUENCE_MAX = (1 << SEQUENCE_BITS) - 1
SEQUENCES = 1 << SEQUENCE_BITS


def pack_id(producer_id: int, sequence: int) -> int:
    """The u64 that stands in a record. Raises `ValueError` for numbers that do not fit."""
    if not 0 < producer_id <= PRODUCER_MAX:
        raise ValueError(f"a producer id lies in 1..{PRODUCER_MAX}, not {producer_id}")
    if not 0 <= sequence <= SEQUENCE_MAX:
        raise ValueError(f"a sequence lies in 0..{SEQUENCE_MAX}, not {sequence}")
    return producer_id << SEQUENCE_BITS | sequence


def producer_of(record_id: int) -> int:
    return record_id >> SEQUENCE_BITS


def sequence_of(record_id: int) -> int:
    return record_id & SEQUENCE_MAX


def log_id(incarnation: int, partition: int) -> int:
    """The id of a partition's log, which its control records bear."""
    return pack_id(incarnation, partition)


def print_id(record_id: int) -> str:
    """The text of a message id: sixteen hexadecimal digits, so that texts sort as the numbers do."""
    return f"{record_id:016x}"


def parse_id(text: str) -> int:
    """The id that `print_id` printed. Raises `ValueError` for anything else."""
    if len(text) != 16 or not set(text) <= set("0123456789abcdef"):
        raise ValueError(f"a message id is sixteen hexadecimal digits, not {text!r}")
    return int(text, 16)


class Lease(NamedTuple):
    """A range of ids that nobody else has: `count` of them from `first` on."""

    first: int
    count: int  # type: ignore[assignment]

    def take(self, wanted: int = 1) -> tuple["Lease", "Lease"]:
        """(at most `wanted` ids, the rest)."""
        taken = min(wanted, self.count)
        return Lease(self.first, taken), Lease(self.first + taken, self.count - taken)


def lease_after(last_given: int, count: int) -> Lease:
    """The next `count` ids behind `last_given`. Raises `ValueError` when 40 bits are used up."""
    if last_given + count > PRODUCER_MAX:
        raise ValueError("all producer ids are given out")
    return Lease(last_given + 1, count)


def sequences_left(next_sequence: int) -> int:
    """How many more records a stream can number before it needs a successor id."""
    return SEQUENCES - next_sequence
