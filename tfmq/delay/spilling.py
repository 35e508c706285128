"""What of an arrived batch goes into buckets, each record sealed under its number; what of a chunk is pending still."""

from array import array
from collections.abc import Callable, Collection, Sequence
from itertools import compress
from typing import NamedTuple, TypeAlias

from tfmq.delay.arrivals import ArrivedBatch
from tfmq.delay.columns import Columns, Messages, Numbers, Target, same_target, sealed

Pending: TypeAlias = Callable[[int, Numbers, Numbers], "bool | Sequence[int]"]
"""pending(log id, dues, numbers): True or False for all of them, or a truth value for each (bytes do): whether they are
still to be fired. What is settled, cancelled or gone is not."""


class Spilled(NamedTuple):
    """What a spill did: so many messages in so many bytes of chunks."""

    count: int  # type: ignore[assignment]
    size_bytes: int


def messages_of(batch: ArrivedBatch, pending: Pending) -> Messages:
    """What of a batch is pending, sealed for a bucket."""
    count = len(batch.sizes)
    numbers = array("Q", range(batch.first_number, batch.first_number + count))
    keep = pending(batch.log_id, batch.dues, numbers)
    table = [Target(batch.log_id, batch.topic)]
    if keep is False:
        return Messages(array("Q"), array("Q"), array("I"), array("I"), b"", table, [])
    data = sealed(batch.data, batch.sizes, batch.first_number)
    messages = Messages(batch.dues, numbers, same_target(count), batch.sizes, batch.absolute, table, data)
    return messages if keep is True or all(keep) else messages.kept(keep)


def pending_rows(
    columns: Columns, pending: Pending, log_ids: Collection[int] | None = None
) -> bytes | bytearray:
    """A byte for each message of a chunk: 1 where it is still to be fired, and is for one of these logs."""
    dues, numbers, targets = columns.dues, columns.numbers, columns.targets
    alone = len(columns.table) == 1
    keep = bytearray(len(dues))
    for index, (key, _) in enumerate(columns.table):
        if log_ids is not None and key not in log_ids:
            continue
        mine = b"\1" * len(dues) if alone else bytes(map(index.__eq__, targets))
        of_dues = dues if alone else array("Q", compress(dues, mine))
        if not len(of_dues):
            continue
        answer = pending(key, of_dues, numbers if alone else array("Q", compress(numbers, mine)))
        if answer is True:
            answer = b"\1" * len(of_dues)
        if answer is False:
            continue
        if alone:
            return bytes(map(bool, answer))
        for row, kept in zip(compress(range(len(dues)), mine), answer, strict=True):
            keep[row] = bool(kept)
    return keep
