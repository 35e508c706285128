"""What happens to open producers when the interpreter exits: they are flushed, and losses are logged.

A producer that the program no longer refers to still delivers its messages, because `open_producers` refers to each
producer until it is closed. At exit all open producers are flushed for a limited time. Then the number of undelivered
messages is logged: the messages that fail at exit, and earlier failures whose results the program has not read.
"""

from __future__ import annotations

import atexit
import logging

from tfmq.client.producer.delivery import BlockingDeliveryOwner

log = logging.getLogger("tfmq.producer")

EXIT_SECONDS = 5.0
"""Time limit for flushing all open producers at exit, because an unreachable broker must not block the exit."""

open_producers: set[BlockingDeliveryOwner] = set()


def _close_all_at_exit() -> None:
    for producer in list(open_producers):
        try:
            count, error = producer.close_at_exit(EXIT_SECONDS / max(1, len(open_producers)))
        except Exception:
            log.exception("A producer could not be flushed at the end of the program.")
            continue
        if count:
            log.error(
                "%s not delivered when the program ended: close producers, or use `with`. %s: %s",
                "1 message was" if count == 1 else f"{count} messages were",
                "Its error" if count == 1 else "The first error",
                error,
            )


atexit.register(_close_all_at_exit)
