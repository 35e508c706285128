"""Functions that pack, split and format message ids; ranges of producer ids.

A message id is the producer id (40 bits, never 0) and the producer sequence of the record (24 bits). It is unique in a
broker and never reused. A log id is built the same way from the topic's incarnation and the partition
(`journal.record.format.make_log_id`).
"""

from typing import NamedTuple

PRODUCER_BITS = 40
SEQUENCE_BITS = 24
PRODUCER_MAX = (1 << PRODUCER_BITS) - 1
SEQUENCE_MAX = (1 << SEQUENCE_BITS) - 1
SEQUENCES = 1 << SEQUENCE_BITS


def pack_id(producer_id: int, sequence: int) -> int:
    """Return the 64-bit id of a record. Raises ValueError for numbers out of range."""
    if not 0 < producer_id <= PRODUCER_MAX:
        raise ValueError(f"a producer id lies in 1..{PRODUCER_MAX}, not {producer_id}")
    if not 0 <= sequence <= SEQUENCE_MAX:
        raise ValueError(f"a sequence lies in 0..{SEQUENCE_MAX}, not {sequence}")
    return producer_id << SEQUENCE_BITS | sequence


def producer_of(record_id: int) -> int:
    return record_id >> SEQUENCE_BITS


def sequence_of(record_id: int) -> int:
    return record_id & SEQUENCE_MAX


def format_id(record_id: int) -> str:
    """Format a message id as sixteen hexadecimal digits, so that texts sort like the numbers."""
    return f"{record_id:016x}"


class IdRange(NamedTuple):
    """A range of producer ids that is assigned to one client: `count` ids from `first` on."""

    first: int
    count: int  # type: ignore[assignment]

    def split(self, wanted: int = 1) -> tuple["IdRange", "IdRange"]:
        """Split the range into (at most `wanted` ids, the remaining ids)."""
        taken = min(wanted, self.count)
        return IdRange(self.first, taken), IdRange(self.first + taken, self.count - taken)


def remaining_sequences(next_sequence: int) -> int:
    """Return how many more records a producer id can number before it needs a successor id."""
    return SEQUENCES - next_sequence
