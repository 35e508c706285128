"""One request of a transaction, asked again while the broker is busy."""

from __future__ import annotations

from typing import Any, Final

from tfmq.bounded_msgpack import Buffer
from tfmq.client.call import Call
from tfmq.client.link import Link
from tfmq.client.waiting import Operation, Wait
from tfmq.errors import NOT_DONE, UNKNOWN, Busy, Closed, ConnectionFailed, TfmqError, TimedOut

PAUSE_SECONDS: Final = 0.01
PAUSE_SECONDS_MAX: Final = 1.0
"""Between two tries, doubled each time."""
PASSING: Final = (Busy, Closed, ConnectionFailed, TimedOut)
"""Refusals before anybody looked whether the request came before: they say nothing of an earlier sending."""


def answered(
    link: Link,
    request: Any,
    *body: Buffer,
    until: float,
    unattended: bool = False,
    repeat: bool = True,
    doubtful: bool = False,
) -> Operation[Call]:
    """The call, done: with its reply, or with an error that is not `Busy` unless it is `until` (the link's clock) by
    then. The link sends it again over a new connection (`repeat`), so it must be one that the broker knows again.

    `doubtful`: it was sent before, and nobody knows what became of that. Then, and where it went out more than once
    here, a refusal that says nothing of the earlier sending is "unknown". The call's `sends` count that one, too.
    """
    pause = PAUSE_SECONDS
    while True:
        seconds = max(0.0, until - link.now())
        try:
            call = link.call(request, *body, seconds=seconds, unattended=unattended, repeat=repeat)
        except PASSING as error:
            raise (_unknown(error) if doubtful else error) from None
        try:
            while not call.done:
                yield Wait((call,))
        finally:
            link.abandon(call)
        call.sends += doubtful
        doubtful = doubtful or call.sends > 1
        if not isinstance(call.error, Busy) or link.now() + pause >= until:
            if doubtful and isinstance(call.error, PASSING):
                call.error = _unknown(call.error)
            return call
        yield Wait((), pause)
        pause = min(pause * 2, PAUSE_SECONDS_MAX)


def _unknown(error: TfmqError) -> TfmqError:
    if error.outcome != NOT_DONE:
        return error
    told = type(error)(error.sentence, outcome=UNKNOWN)
    told.details, told.__cause__ = error.details, error.__cause__
    return told
