"""A user's filter over a batch: what it says yes to is kept; where it fails, what stands before that comes first."""

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from tfmq.client.positions import Batch, Place
from tfmq.client.received import ReceivedMessage
from tfmq.errors import BadRequest


def filtered(batch: Batch, where: Callable[[ReceivedMessage[Any]], object]) -> tuple[Batch, Place | None]:
    """`batch` without what `where` says no to. Where it raises, the part before that message, and the place at which to
    read on, so that it is asked again; for the first message that is raised here."""
    kept: list[ReceivedMessage[Any]] = []
    for number, message in enumerate(batch.messages):
        try:
            wanted = where(message)
            if wanted is not True and wanted is not False:
                _refuse_awaitable(wanted)
            if wanted:
                kept.append(message)
        except Exception:
            if not number:
                raise
            place = Place(message.offset, message.ordinal, message.origin.epoch)
            return Batch(batch.name, kept, place), place
    return batch._replace(messages=kept), None


def _refuse_awaitable(wanted: object) -> None:
    """It would be a yes to every message. Raises BadRequest."""
    if isinstance(wanted, Awaitable):
        if isinstance(wanted, Coroutine):
            wanted.close()  # else Python warns of it, somewhere else
        raise BadRequest(f"where= said neither yes nor no, but gave a {type(wanted).__name__} to be awaited.")
