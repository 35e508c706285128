"""A broker that is away while handlers run: it is said soon, and an end of the run does not wait for it for long."""

from __future__ import annotations

import logging
from typing import Final

from tfmq.client.link import Link
from tfmq.client.waiting import Operation, Wait
from tfmq.errors import NOT_DONE, ConnectionFailed

log = logging.getLogger("tfmq.consumer")

TELL_SECONDS: Final = 2.0
"""How often a run looks whether there is a connection."""
LOOK_AWAY_SECONDS: Final = 0.5
"""Likewise while it ends."""
AWAY_SECONDS: Final = 5.0
"""So long the end of a run waits for a broker that is away: longer than a restart of it. What supervisors give a
process is 10 s and more."""


class Away:
    """Since when there has been no connection, by looks at `link`."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._since: float | None = None

    def long(self) -> bool:
        """Whether it has been so for `AWAY_SECONDS`."""
        if self._link.state == "ready":
            self._since = None
        elif self._since is None:
            self._since = self._link.now()
        return self._since is not None and self._link.now() >= self._since + AWAY_SECONDS

    def give_up(self, unsaved: bool) -> None:
        """The run ends without the broker. Raises `ConnectionFailed` where something was to be `unsaved`."""
        if unsaved:
            raise ConnectionFailed(
                f"The broker was away for the last {AWAY_SECONDS:g} s of the run: what was handled last could not be"
                f" saved, and is handled again. {self._reason()}",
                outcome=NOT_DONE,
            )
        log.warning(
            "The broker is away, so the group was not left; all that was handled is saved. %s", self._reason()
        )

    def tell(self) -> Operation[None]:
        """Never ends: says it when the broker is away, and when it is back."""
        told = False
        while True:
            yield Wait((), TELL_SECONDS)
            if self._link.state == "ready" or not self._link.connections:
                if told:
                    log.info("The broker is back.")
                told = False
            elif not told:
                log.warning("The broker is away; the run goes on when it is back. %s", self._reason())
                told = True

    def _reason(self) -> str:
        return str(self._link.last_error or "")
