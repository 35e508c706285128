"""Lives with delayed messages in which calls on the disk fail: once, for a while, or until the disk is repaired.

Clients use the replies: "not done" is nothing, "unknown" may be either, until they ask again. In the end the
disk is mended, what has stopped is resumed, and the broker is started anew: then everything that was reported is true.
"""

from __future__ import annotations

import errno
import random

from journal.testing import Moment
from tests.broker.helpers import Answer, Stream
from tests.crash.delay_examination import resume
from tests.crash.delay_life import Boundary, Broken, Client, Life, Message, Step, now_of, pass_time, require
from tfmq.errors import TfmqError
from tfmq.protocol.commands import LeaseProducerIds

PATHS = ("/delay/", ".bucket", "/delay/checkpoint", "/arrivals/", "/orders-", "/bills-")
KINDS = ("write", "force", "create", "rename", "unlink", "truncate", "read", "open", "force_folder", "sync_file")
FULL_KINDS = ("write", "create", "rename")
MENDED_SECONDS = 90.0
STARTS_MAX = 30
"""More than there are files that an error may have met."""


class TolerantClient(Client):
    """One whose requests may fail. `failed` counts them by code."""

    def __init__(self) -> None:
        super().__init__()
        self.failed: dict[str, int] = {}
        self.unsure: list[Step] = []
        """Asked again when the disk is mended."""

    def take(self, step: Step) -> None:
        failure = step.answer.failure
        if failure is None:
            super().take(step)
            return
        self.failed[failure.code] = self.failed.get(failure.code, 0) + 1
        require(isinstance(failure, TfmqError), f"{step.name}: {failure!r}")
        if failure.outcome != "not done":
            self.unsure.append(step)
            return
        for index in step.messages:
            self._undone(step, self.messages[index])

    def _undone(self, step: Step, message: Message) -> None:
        """A cancel or a new time that was not done leaves the message as it was."""
        if step.name in ("cancel", "reschedule") and step.before is not None:
            message.low, message.turn = step.before
            message.doubt = False


class FailingLife(Life):
    """See the module."""

    def __init__(self, generator: random.Random) -> None:
        super().__init__(generator)
        self.broker.disk.after = None
        self.tolerant = TolerantClient()
        self.client = self.tolerant

    def fail(self) -> None:
        """Some later calls of some kind fail."""
        kind, path = self.random.choice(KINDS), self.random.choice(PATHS)
        full = kind in FULL_KINDS and self.random.random() < 0.6
        error = errno.ENOSPC if full else errno.EIO
        nth, times = self.random.randrange(1, 12), self.random.choice((1, 1, 3, 50))
        self.broker.disk.faults.fail(kind, nth=nth, times=times, error=error, path=path)

    def live(self, actions: int) -> None:
        """So many steps, with faults between; then the disk is mended."""
        table = [self.send] * 8 + [self.crowd] * 2 + [self.transact] * 2 + [self.cancel] * 4
        table += [self.reschedule] * 3 + [self.wait] * 8 + [self.work] * 5 + [self.work_some] * 3 + [self.fail] * 3
        for _ in range(actions):
            action = self.random.choice(table)
            self.action = action.__name__
            before = self._failures()
            action()
            self.client.look()
            if self._failures() != before:
                self._anew()
        self.mend()

    def _failures(self) -> int:
        return sum(self.tolerant.failed.values())

    def _anew(self) -> None:
        """A stream with a hole is given up: its client begins another one."""
        rest = [step for step in self.client.steps if step.name in ("send", "transact")]
        if not rest:
            answers = [self.broker.ask(LeaseProducerIds(1)) for _ in range(2)]
            self.broker.work()
            if all(answer.code == "ok" for answer in answers):
                self.producer, self.transactions = (Stream(answer.first) for answer in answers)

    def mend(self) -> None:
        """The disk is mended; an operator resumes what has stopped, and starts the broker once more."""
        self.broker.disk.faults.clear()
        self.broker.work()
        self._resume()
        self.work()
        self.client.look()
        lost, self.client.steps = self.client.steps, []
        self.broker.stop()
        self.client.steps = lost
        self.client.look()
        self._start()
        self.client.look()
        unsure, self.tolerant.unsure = self.tolerant.unsure, []
        for step in unsure:
            if step.name in ("cancel", "reschedule"):
                self._once_more(step)
                self.client.look()
        self.work()
        self.client.look()

    def _resume(self) -> None:
        resume(self.broker)
        pass_time(self.broker, MENDED_SECONDS, 1, self.random)

    def _start(self) -> None:
        """A disk reports an earlier error once more, at the next open or force of the file: that start is refused,
        or something stops after it; once every file has reported it, a start succeeds."""
        for _ in range(STARTS_MAX):
            try:
                self._go_on(self.broker.disk)
            except OSError:
                continue
            if not self._stopped():
                self.broker.disk.after = None
                self._resume()
                if not self._stopped():
                    return
            self.client.look()
            self.broker.stop()
        raise Broken("no start, although the disk is mended")

    def _stopped(self) -> bool:
        queue = self.broker.engine.broker.delay_commands.queue
        return self.broker.arrivals.stopped is not None or bool(queue.status()["stopped"])

    def _once_more(self, step: Step) -> None:
        """Asks again; a handle that a new time replaced still leads to the message."""
        (index,) = step.messages
        message = self.client.messages[index]
        if step.name == "reschedule" and not (message.cancelled or message.delivered):
            message.low, message.turn, message.doubt = min(message.low, now_of(self.broker)), None, True
        again = Step(step.name, step.messages, step.ask, Answer(0, None), step.before)
        self.client.steps.append(again)
        again.answer = step.ask(self.broker)
        self.broker.work()

    def boundary(self) -> Boundary:
        """The end of it."""
        moment = Moment(self.broker.disk)
        return Boundary(0, (), "the end", moment, self.client.known(), self.clock.wall_ms())
