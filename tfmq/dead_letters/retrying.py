"""Waiting messages are handled again at their time: the loop that a consumer runs beside its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from tfmq.client.dead_letters import DeadLetters
from tfmq.client.received import ReceivedMessage
from tfmq.client.waiting import Operation

POLL_SECONDS: Final = 5.0
"""How long a letter that `tfmq dlq retry` released, or another member put back, may wait to be seen."""

Handle = Callable[[ReceivedMessage[Any]], Operation[None]]
"""Calls the listener with a message, as an operation; raises what that raises (`Reject` and `RetryLater` too)."""


class Retrying:
    """One at a time. Start `run` as a task, or in a thread: `threading.Thread(target=driver.run, args=(x.run(),))`."""

    def __init__(self, store: DeadLetters, handle: Handle, *, wall_clock: Callable[[], float]) -> None:
        self.store = store
        self._handle = handle
        self._wall_clock = wall_clock

    def stop(self) -> None:
        """Take nothing more; what is being handled is finished, then `run` ends. Under the driver's lock."""
        raise AssertionError("being written")

    def run(self) -> Operation[None]:
        """Take what is due, handle it, say what became of it; until `stop`. Never raises what a handler raises."""
        raise AssertionError("being written")
