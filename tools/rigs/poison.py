"""One consumer process of the poison rig: messages that fail in every way, and a log of each call that a kill spares.

`python -m tools.rigs.poison ADDRESS TOPIC STORE FOLDER NUMBER`. By its payload, which is its number, a message always
fails (0), is rejected (1), succeeds (2), is put off and fails then (3), each modulo 4; the last of each forty ends its
process. Its calls stand in FOLDER/calls, with the NUMBER of the process and whether it puts off, written before each
one. Offsets are saved seldom, so that a kill brings messages back that were dead already. Pauses and leases are short:
nobody waits for the good of a person here. The process ends by itself when all messages are processed and nothing
waits.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any, Final

import tfmq
from tfmq.client.consumer.message import ReceivedMessage
from tfmq.client.worker import runner
from tfmq.dead_letters import retry_loop as waits
from tfmq.dead_letters.admin import Desk
from tfmq.dead_letters.model import RETRYING, WAITING
from tfmq.dead_letters.store import GroupDeadLetterStore
from tfmq.errors import TfmqError

GROUP: Final = "rig"
CALLS_MAX: Final = 3
PUT_OFF_SECONDS: Final = 0.05
POLL_SECONDS: Final = 0.05
PAUSE_SECONDS: Final = 0.01
"""Between two calls of a lane."""
WAIT_MS, WAIT_MS_MAX = 10, 500
"""Between two calls of a letter that was put off."""
LEASE_SECONDS: Final = 1.0
"""What a killed process had taken is not waited for longer."""
SAVE_SECONDS: Final = 0.5
SESSION_SECONDS: Final = 1.0
"""A killed process is replaced at once; its partition must not wait long for it."""
KINDS: Final = ("fails", "rejected", "handled", "put off")
DEADLY: Final = 40
EXIT_CODE: Final = 9
NOWHERE: Final[dict[str, Any]] = {"offset": -1, "processed_offset": -1}
"""Of a partition that the consumer has not, or not yet."""


class Poisoned(Exception):
    """What the handler raises."""


class Worker:
    """See the module."""

    def __init__(self, address: str, topic: str, store: str, folder: Path, number: int) -> None:
        self._topic, self._store, self._number = topic, store, number
        self._calls = os.open(folder / "calls", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._consumer: tfmq.Consumer[Any] = tfmq.Consumer(
            address,
            topics=topic,
            group=GROUP,
            dead_letters=store,
            retries=CALLS_MAX - 1,
            session=SESSION_SECONDS,
            save_every=SAVE_SECONDS,
        )

    def run(self) -> None:
        """Until all is processed and nothing waits."""
        threading.Thread(target=self._stop_at_the_end, daemon=True).start()
        print("started", flush=True)
        self._consumer.run(self._handle)
        print("done", flush=True)

    def _handle(self, message: ReceivedMessage[Any]) -> None:
        number = int(message.text)
        kind = kind_of(number)
        put_off = kind == "put off" and not self._was_put_off(message)
        os.write(self._calls, f"{number} {self._number} {int(put_off)}\n".encode())
        if kind == "deadly":
            os._exit(EXIT_CODE)
        if kind == "rejected":
            raise tfmq.Reject("not wanted")
        if put_off:
            raise tfmq.RetryLater(PUT_OFF_SECONDS)
        if kind != "handled":
            raise Poisoned(f"number {number}")

    def _was_put_off(self, message: ReceivedMessage[Any]) -> bool:
        """Those that are handled again are out of order: behind them something else was processed. Where that is read
        again, behind a kill, they are put off until it is: that costs them no call."""
        return message.next_offset <= int(self._row()["processed_offset"])

    def _row(self) -> Any:
        return self._consumer.stats()["partitions"].get(f"{self._topic}-0", NOWHERE)

    def _stop_at_the_end(self) -> None:
        while True:
            time.sleep(POLL_SECONDS)
            try:
                row = self._row()
                behind = self._consumer.lag() == 0 and row["processed_offset"] == row["offset"] > 0
                over = behind and not self._some_wait()
            except TfmqError:  # the broker is away
                continue
            if over:
                self._consumer.stop()
                return

    def _some_wait(self) -> bool:
        """Whatever broker they name: there is one here."""
        with Desk(self._store) as desk:
            return any(state in (WAITING, RETRYING) for _, state in desk.counts())


def kind_of(number: int) -> str:
    """How the message of that number fails."""
    return "deadly" if number % DEADLY == DEADLY - 1 else KINDS[number % len(KINDS)]


def main() -> None:
    runner.HANDLER_PAUSE_SECONDS = PAUSE_SECONDS  # type: ignore[misc]
    waits.FIRST_MS, waits.MAX_MS = WAIT_MS, WAIT_MS_MAX  # type: ignore[misc]
    GroupDeadLetterStore.lease_seconds = LEASE_SECONDS
    address, topic, store, folder, number = sys.argv[1:]
    Worker(address, topic, store, Path(folder), int(number)).run()


if __name__ == "__main__":
    main()
