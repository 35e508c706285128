"""One member of the rebalancing rig: reads, transforms and sends, with the offsets in the same transaction.

`python -m tools.rigs.rebalancing_worker ADDRESS NAME SEED WAY DIARY`. WAY is how it is handed its messages: "poll",
"loop" or "run". Each message of the source goes, unchanged, to the partition of the target that has its number, so
that the target is what the source is, in order. Between the steps of a transaction it rests now and then: there it is
killed or frozen most. When a transaction comes to nothing, the work on all that was handed out is void: it leaves its
consumer and takes another, or goes back to what its group has saved. SIGTERM ends it in order. The diary has a line
for each end of a transaction.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import tfmq
from tfmq.errors import TfmqError
from tools.rigs.memory_in_use import write_in_use

SOURCE: Final = "source"
TARGET: Final = "target"
GROUP: Final = "pipe"
SESSION_SECONDS: Final = 1.0
"""The shortest that there is: who is frozen for longer is taken for dead."""
ANSWER_SECONDS: Final = 60.0
POLL_SECONDS: Final = 0.5
BATCH_MAX: Final = 20
WORKERS: Final = 3
REST_CHANCE: Final = 0.15
REST_SECONDS: Final = 0.2
AGAIN_SECONDS: Final = 0.1
"""Who is new does not wait for a broker that is away."""
LEAVE_CHANCE: Final = 0.5
WAYS: Final = ("poll", "loop", "run")
STARTED: Final = "started"
BEGUN: Final = "begun"
ENDED: Final = "ended"
COMMITTED: Final = "committed"


class Worker:
    def __init__(self, address: str, name: str, seed: str, way: str, diary: Path) -> None:
        self._address = address
        self._way = way
        self._random = random.Random(f"{seed}/{name}")
        self._diary = os.open(diary, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._producer = tfmq.Producer(address, timeout=ANSWER_SECONDS)
        self._consumer: tfmq.Consumer[Any] | None = None
        self._halted = False

    def work(self) -> None:
        """Until it is told to end."""
        signal.signal(signal.SIGTERM, self._halt)
        self._say(STARTED)
        while not self._halted:
            self._consumer = consumer = tfmq.Consumer(
                self._address,
                topics=SOURCE,
                group=GROUP,
                commits="manual",
                dead_letters=None,
                retries=0,
                session=SESSION_SECONDS,
                timeout=ANSWER_SECONDS,
                fetch_bytes=1 << 14,
            )
            try:
                with consumer:
                    if not self._halted:
                        getattr(self, f"_{self._way}")(consumer)
            except TfmqError as error:
                self._say(error.code)
                time.sleep(AGAIN_SECONDS)
        self._producer.close()
        self._say(ENDED)

    def _halt(self, *_: object) -> None:
        self._halted = True
        if self._consumer is not None:
            self._consumer.stop()

    def _say(self, word: str) -> None:
        os.write(self._diary, f"{word}\n".encode())

    # The three ways

    def _poll(self, consumer: tfmq.Consumer[Any]) -> None:
        while not self._halted:
            messages = consumer.poll(POLL_SECONDS, self._random.randint(1, BATCH_MAX))
            if messages:
                self._guarded(consumer, messages)

    def _loop(self, consumer: tfmq.Consumer[Any]) -> None:
        for message in consumer:
            self._guarded(consumer, [message])

    def _run(self, consumer: tfmq.Consumer[Any]) -> None:
        """Here an error ends the run, and with it the membership: nothing of this consumer goes on."""
        workers = self._random.randint(1, WORKERS)
        consumer.run(lambda message: self._transform(consumer, [message]), workers=workers, signals=False)
        self._halted = True

    def _guarded(self, consumer: tfmq.Consumer[Any], messages: Sequence[Any]) -> None:
        try:
            self._transform(consumer, messages)
        except TfmqError as error:
            if self._halted or error.outcome == "unknown" or self._random.random() < LEAVE_CHANCE:
                raise
            self._say(error.code)  # and goes on: what was in the transaction comes again

    def _transform(self, consumer: tfmq.Consumer[Any], messages: Sequence[Any]) -> None:
        self._say(BEGUN)
        with self._producer.transaction() as tx:
            # First: a transaction that fails before this does not know the consumer, and the messages would be lost.
            tx.commit_offsets(consumer)
            self._rest()
            for message in messages:
                tx.send(TARGET, message.payload, partition=message.partition)
            self._rest()
        self._say(COMMITTED)

    def _rest(self) -> None:
        if self._random.random() < REST_CHANCE:
            time.sleep(self._random.uniform(0, REST_SECONDS))


def main() -> None:
    address, name, seed, way, diary = sys.argv[1:]
    write_in_use()
    Worker(address, name, seed, way, Path(diary)).work()


if __name__ == "__main__":
    main()
