"""For as long as the delay queue is being written: a broker without delayed delivery. Never committed."""

import inspect
from typing import Any

from tfmq.delay.buckets import Buckets
from tfmq.delay.queue import DelayQueue
from tfmq.errors import NotSupported

QUEUE_READY = "floor_ms" in inspect.signature(DelayQueue.__init__).parameters and hasattr(Buckets, "abandon")


class _Log:
    stopped = None

    def applied(self, *args: Any) -> None: ...
    def close(self) -> None: ...


class Quiet:
    stopped = True
    due = False
    now_ms = None
    log = _Log()
    partition: Any
    queue: Any

    def __init__(self) -> None:
        self.partition = self.queue = self

    def write(self) -> bool:
        return False

    def start(self) -> None: ...
    def topic_gone(self, incarnation: int) -> None: ...
    def resumed(self, key: int) -> None: ...
    def stop(self) -> None: ...
    def close(self) -> None: ...
    def abandon(self, reason: str) -> None: ...
    def status(self) -> dict[str, Any]:
        return {}

    def send(self, *args: Any) -> None:
        raise NotSupported()

    piece = succeed = cancel = reschedule = list = describe = histogram = send
