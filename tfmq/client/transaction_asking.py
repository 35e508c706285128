"""One request of a transaction, asked again while the broker is busy."""

from __future__ import annotations

from typing import Any, Final

from tfmq.client.call import Call
from tfmq.client.link import Link
from tfmq.client.waiting import Operation, Wait
from tfmq.errors import Busy
from tfmq.packing import Buffer

PAUSE_SECONDS: Final = 0.01
PAUSE_SECONDS_MAX: Final = 1.0
"""Between two tries, doubled each time."""


def answered(
    link: Link, request: Any, *body: Buffer, until: float, unattended: bool = False, repeat: bool = True
) -> Operation[Call]:
    """The call, done: with its reply, or with an error that is not `Busy` unless it is `until` (the link's clock) by
    then. The link sends it again over a new connection (`repeat`), so it must be one that the broker knows again.
    """
    pause = PAUSE_SECONDS
    while True:
        seconds = max(0.0, until - link.now())
        call = link.call(request, *body, seconds=seconds, unattended=unattended, repeat=repeat)
        try:
            while not call.done:
                yield Wait((call,))
        finally:
            link.abandon(call)
        if not isinstance(call.error, Busy) or link.now() + pause >= until:
            return call
        yield Wait((), pause)
        pause = min(pause * 2, PAUSE_SECONDS_MAX)
