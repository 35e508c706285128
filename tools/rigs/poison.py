"""One consumer process of the poison rig: messages that fail in every way, and a log of each call that a kill spares.

`python -m tools.rigs.poison ADDRESS TOPIC STORE FOLDER COUNT`. By its payload, which is its number, a message always
fails (0), is rejected (1), succeeds (2), is put off and fails then (3), each modulo 4; the last of each forty ends its
process. Its calls stand in FOLDER/calls, written before each one; FOLDER/offset is saved seldom, so that a kill brings
messages back that were dead already. The process ends by itself when it has read COUNT messages and nothing waits.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import tfmq
from tfmq.client.dead_letters import DeadLetters, Failure
from tfmq.client.received import ReceivedMessage
from tfmq.client.waiting import Operation
from tfmq.dead_letters import Retrying, open_dead_letters
from tfmq.dead_letters.letter import FAILING

CALLS_MAX: Final = 3
PUT_OFF_SECONDS: Final = 0.05
SAVED_EVERY: Final = 7
POLL_SECONDS: Final = 0.05
BEGUN_FIRST: Final = 2 * SAVED_EVERY
"""So many messages behind a start may have ended the process before: their calls are counted before they begin."""
KINDS: Final = ("fails", "rejected", "handled", "put off")
DEADLY: Final = 40
EXIT_CODE: Final = 9


class Poisoned(Exception):
    """What the handler raises."""


class Worker:
    """See the module."""

    def __init__(self, address: str, topic: str, store: str, folder: Path) -> None:
        self._address, self._topic = address, topic
        self._offset = folder / "offset"
        self._calls = os.open(folder / "calls", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.store: DeadLetters = open_dead_letters(
            store, group="rig", calls_max=CALLS_MAX, wall_clock=time.time
        )
        self._retrying = Retrying(self.store, self._again, now=time.monotonic, wall_clock=time.time)

    def run(self, count: int) -> None:
        """Until all is read and nothing waits."""
        thread = threading.Thread(target=self._handle_again, daemon=True)
        thread.start()
        start: Any = int(self._offset.read_text()) if self._offset.exists() else "earliest"
        print("started", flush=True)
        with tfmq.Consumer(self._address, partitions=[(self._topic, 0)], start=start) as consumer:
            for met, message in enumerate(consumer):
                self._serve(message, met < BEGUN_FIRST)
                if message.ordinal % SAVED_EVERY == 0:
                    self._save(message.next_offset)
                if message.ordinal >= count - 1:
                    break
        while ended(self.store.seconds_until_due()) is not None:
            time.sleep(POLL_SECONDS)
        self._retrying.stop()
        thread.join()
        print("done", flush=True)

    def _serve(self, message: ReceivedMessage[Any], begun: bool) -> None:
        """The lane: call until the store says that it may be passed."""
        noted = begun
        while True:
            if begun and ended(self.store.begin(message)) != FAILING:
                return
            try:
                self._handle(message)
            except tfmq.RetryLater as later:
                ended(self.store.keep(message, [failed(later)], retry_after=later.seconds))
                return
            except tfmq.Reject as rejected:
                ended(self.store.keep(message, [failed(rejected)]))
                return
            except Poisoned as error:
                noted = True
                if ended(self.store.note(message, failed(error), begun=begun)) != FAILING:
                    return
            else:
                if noted:
                    ended(self.store.passed(message))
                return

    def _handle(self, message: ReceivedMessage[Any], again: bool = False) -> None:
        number = int(message.text)
        os.write(self._calls, f"{number} {os.getpid()}\n".encode())
        kind = kind_of(number)
        if kind == "deadly":
            os._exit(EXIT_CODE)
        if kind == "rejected":
            raise tfmq.Reject("not wanted")
        if kind == "put off" and not again:
            raise tfmq.RetryLater(PUT_OFF_SECONDS)
        if kind != "handled":
            raise Poisoned(f"number {number}")

    def _again(self, message: ReceivedMessage[Any]) -> Operation[None]:
        yield from ()
        self._handle(message, again=True)

    def _handle_again(self) -> None:
        """Drives the loop of those that wait; only waits, since the store needs no broker."""
        for wait in self._retrying.run():
            until = time.monotonic() + min(wait.seconds or 0.0, POLL_SECONDS)
            while time.monotonic() < until and not any(each.done for each in wait.targets):
                time.sleep(0.005)

    def _save(self, offset: int) -> None:
        draft = self._offset.with_suffix(".new")
        draft.write_text(str(offset))
        draft.replace(self._offset)


def kind_of(number: int) -> str:
    """How the message of that number fails."""
    return "deadly" if number % DEADLY == DEADLY - 1 else KINDS[number % len(KINDS)]


def failed(error: Exception) -> Failure:
    return Failure.of(error, round(time.time() * 1000))


def ended(operation: Operation[Any] | Iterator[Any]) -> Any:
    """What an operation comes to that never waits, as those of a database."""
    try:
        next(operation)
    except StopIteration as end:
        return end.value
    raise AssertionError("a store in a file does not wait")


def main() -> None:
    address, topic, store, folder, count = sys.argv[1:]
    Worker(address, topic, store, Path(folder)).run(int(count))


if __name__ == "__main__":
    main()
