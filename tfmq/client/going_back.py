"""What came to nothing is handed out again: of transactions that were rolled back, and of partitions that were lost.

Behind a rollback nothing of its partitions is handed out until the broker has said where the group stands: what this
consumer knows of that need not be the last that was saved. A `seek` meanwhile has its way.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import TYPE_CHECKING, Final

from tfmq.client.assignment import place_of
from tfmq.client.positions import UNKNOWN, PartitionName, Place
from tfmq.client.received import ReceivedMessage
from tfmq.client.waiting import Operation, Wait
from tfmq.errors import BadRequest, TfmqError
from tfmq.offsets.storage import StoredOffset

if TYPE_CHECKING:
    from tfmq.client.consuming import Consuming

log = logging.getLogger("tfmq.consumer")

RETRY_SECONDS: Final = 1.0
"""Before the broker is asked again where the group stands."""


def void_lost(core: Consuming, message: ReceivedMessage | None = None) -> None:
    """What is about to be told as lost, and came back since, is handed out again: who is told drops it all."""
    if message is not None and not isinstance(message, ReceivedMessage):
        raise BadRequest(
            f"What is committed is a message that this consumer gave, or with no argument all of them; not {message!r}."
        )
    for name in core.positions.lost_and_back(message):
        forget = core.go_to if name in core.fetcher.feeds else core.positions.seek
        forget(name, core.positions.processed(name))


def go_back(core: Consuming, names: Collection[PartitionName]) -> None:
    """Under the driver's lock. What handlers of `run` have is left alone: they are called with it again."""
    positions = core.positions
    found = [name for name in names if name in core.fetcher.feeds and positions.ledgers.get(name) is None]
    for name in found:
        offset = positions.saved(name)
        core.go_to(name, positions.start_of(name) if offset is None else Place(offset, UNKNOWN, UNKNOWN))
        core.held.add(name)
    if found and not core.closed:
        core.tasks.start(_going_back(core, found), core.failed)
        _look_around(core)


def _going_back(core: Consuming, names: Collection[PartitionName]) -> Operation[None]:
    positions = core.positions
    try:
        stored = yield from _stored(core, names)
        for name in core.held.intersection(names, stored, core.fetcher.feeds):
            row = stored[name]
            if row.incarnation == positions.incarnation(name) and row.offset != positions.saved(name):
                place = place_of(name, row)
                positions.note_saved({name: place})
                core.go_to(name, place)
    finally:
        core.held.difference_update(names)
    _look_around(core)


def _stored(
    core: Consuming, names: Collection[PartitionName]
) -> Operation[dict[PartitionName, StoredOffset]]:
    while True:
        try:
            return (yield from core.offsets.read(names))
        except TfmqError as error:
            if not error.retriable:
                raise
            log.warning("Group %s waits for its offsets: %s", core.options.group, error)
        yield Wait((), RETRY_SECONDS)


def _look_around(core: Consuming) -> None:
    """Whoever waits, in any thread, does; what is to be asked leaves now."""
    core.fetching.send()
    core.attend()
    core.handover.told()
