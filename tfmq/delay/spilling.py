"""What of an arrived batch goes into buckets: what is pending, each record sealed under its number."""

from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from tfmq.delay.arrivals import ArrivedBatch
from tfmq.delay.columns import Messages, Numbers, Target, same_target, sealed

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
