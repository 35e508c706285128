"""One question to the broker, asked again while it fails for a passing reason: what longer operations are made of."""

from collections.abc import Generator
from typing import Any, Final

from tfmq.client.link import Link
from tfmq.client.waiting import Wait
from tfmq.errors import Busy, TfmqError

PAUSE_SECONDS: Final = 0.05
PAUSE_SECONDS_MAX: Final = 2.0
"""Between two tries, doubled each time; the link's own back-off comes before it where there is no connection."""
CALL_SECONDS: Final = 30.0
"""How long one try waits for its answer."""


def ask(
    link: Link, request: Any, until: float, *, unattended: bool = False, while_busy: bool = True
) -> Generator[Wait, None, Any]:
    """The reply to `request`. Raises what is not retriable at once, what is retriable at `until` (the link's clock).

    A link that never reached a broker gives up by itself after its patience, and that is raised at once, too.
    `unattended`: nobody waits, a keeper reads the answer. Without `while_busy`, `Busy` is raised at once. Asking again
    must do no harm: not for PRODUCE.
    """
    pause = PAUSE_SECONDS
    while True:
        seconds = max(0.0, min(CALL_SECONDS, until - link.now()))
        call = link.call(request, seconds=seconds, unattended=unattended)
        try:
            while not call.done:
                yield Wait((call,))
            return call.result()
        except TfmqError as error:
            hopeless = (
                not error.retriable or not link.connections or (isinstance(error, Busy) and not while_busy)
            )
            if hopeless or link.now() + pause >= until:
                raise
        finally:
            link.abandon(call)
        yield Wait((), pause)
        pause = min(pause * 2, PAUSE_SECONDS_MAX)
