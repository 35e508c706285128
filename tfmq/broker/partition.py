"""One partition: what waits to be written, what waits to be forced, and whom to wake when its marks move.

Work enters by `put` and is written in that order, many items in one append. Nothing is answered before the
write, and where it asks for it the force, that the answer promises. While file work runs in a worker the
queue waits.
"""

import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Protocol

from journal.errors import Full
from journal.header import HEADER_SIZE
from journal.log import Log
from journal.shapes import Appended, Batch, Source
from tfmq.broker import faults
from tfmq.broker.caller import Run
from tfmq.broker.producers import Producers
from tfmq.broker.timers import Timers
from tfmq.errors import NOT_DONE, UNKNOWN, DiskFull, StorageStopped, TfmqError, UnknownTopic

logger = logging.getLogger("tfmq.broker")

GONE = "The topic {name} was deleted."

SEGMENT_PART: Final = 2
"""An append takes at most half a segment, control records included, unless one batch alone is larger."""

Waiter = Callable[[BaseException | None], None]


class Work(Protocol):
    """Something to be written. Exactly one of `appended` and `refused` is called."""

    size_bytes: int
    alone: bool
    """It is an append of its own: its source goes into the control record."""
    source: Source

    def batches(self, partition: "Partition", staged: "Staged") -> list[Batch] | None:
        """What to append now; None if the work was settled without (a repeat, a refusal).

        Raises `NotYet` if that cannot be told before what is staged has been written.
        """
        ...

    def appended(self, partition: "Partition", answers: list[Appended]) -> None:
        """It is written; not forced yet."""
        ...

    def refused(self, error: BaseException) -> None:
        """It was not written."""
        ...

    def keep(self, *, staged: bool = False) -> None:
        """It waits beyond this turn: from now on its bytes are its own, and the memory they came in is free.

        `staged`: its batches have bytes of their own already, and it is not asked for them again.
        """
        ...


class NotYet(Exception):
    """Write what is staged, then ask again."""


class Staged:
    """Work gathered for one append: per item its batches, and per producer the sequence that comes next."""

    def __init__(self) -> None:
        self.items: list[tuple[Work, list[Batch]]] = []
        self.size_bytes = 0
        self.next_sequences: dict[int, int] = {}
        self.tail = b""
        """The last bytes, which the next batch follows at once."""

    def add(self, work: Work, batches: list[Batch]) -> None:
        self.items.append((work, batches))
        self.size_bytes += work.size_bytes
        for batch in batches:
            self.next_sequences[batch.producer_id] = batch.sequence + batch.count
            self.tail = tail_of(batch)

    def keep(self) -> None:
        """As `Work.keep`, for all that is staged."""
        for number, (work, batches) in enumerate(self.items):
            own = [batch._replace(data=bytes(batch.data)) for batch in batches]
            self.items[number] = (work, own)
            work.keep(staged=True)


class Partition:
    """A log with its queue. `name` is the topic's; all calls come from the engine's thread."""

    def __init__(
        self,
        name: str,
        incarnation: int,
        number: int,
        log: Log,
        producers: Producers,
        *,
        force: Callable[[Log, int, Waiter], None],
        run: Run,
        timers: Timers,
        append_bytes_max: int,
    ) -> None:
        self.name, self.incarnation, self.number = name, incarnation, number
        self.log = log
        self.producers = producers
        self.parked: dict[Any, Callable[[], None]] = {}
        self.gone = False
        self.working = False
        self._queue: deque[Work] = deque()
        self._force, self._run, self._timers = force, run, timers
        self._append_bytes_max = min(append_bytes_max, log.options.segment_bytes // SEGMENT_PART)
        self._waiting: dict[int, list[Waiter]] = {}
        self._asked = 0
        self._flush_armed = False
        self._idle: list[Callable[[], None]] = []
        self._half_known = False
        self._told: str | None = None
        """The trouble that stands in the server's log already."""

    @property
    def state(self) -> str:
        """ "open", "stopped" (takes no writes) or "damaged" (a range of it cannot be read)."""
        if self.log.stopped is not None:
            return "stopped"
        return "damaged" if self.log.damage else "open"

    # Writing

    def put(self, work: Work) -> bool:
        """Queues work for the next `write`; whether it is the first in the queue."""
        self._queue.append(work)
        if self.working:
            work.keep()
        return len(self._queue) == 1

    def write(self) -> None:
        """Writes all that is queued, unless file work is under way; its end goes on with the queue."""
        while self._queue and not self.working:
            staged = self._gather()
            if not staged.items:
                continue
            work = self._file_work(staged)
            if work is None:
                continue
            self.working = True
            staged.keep()
            for waiting in self._queue:
                waiting.keep()
            self._run(work, partial(self._worked, staged))

    def _file_work(self, staged: Staged) -> Callable[[], None] | None:
        """What must run in a worker before the append; None if it was appended, or refused, at once."""
        try:
            work = self.log.before_append(staged.size_bytes)
        except Exception as error:
            self._refuse(staged, faults.not_done(error))
            return None
        if work is None:
            self._append(staged)
        return work

    def _worked(self, staged: Staged, result: Any, error: BaseException | None) -> None:
        self.working = False
        if error is not None:
            self._refuse(staged, faults.not_done(error))
        else:
            self._append(staged)
        self.write()
        self._tell_idle()

    def _gather(self) -> Staged:
        staged = Staged()
        while self._queue:
            work = self._queue[0]
            if staged.items and not self._fits(work, staged):
                break
            try:
                batches = self._checked(work, staged)
            except NotYet:
                break
            except Exception as error:
                self._queue.popleft().refused(faults.not_done(error))
                continue
            self._queue.popleft()
            if batches is not None:
                staged.add(work, batches)
        return staged

    def _fits(self, work: Work, staged: Staged) -> bool:
        size = staged.size_bytes + work.size_bytes
        return size <= self._append_bytes_max and not work.alone and not staged.items[0][0].alone

    def _checked(self, work: Work, staged: Staged) -> list[Batch] | None:
        if self.gone:
            raise UnknownTopic(GONE.format(name=self.name))
        if self._half_known:
            raise StorageStopped(reason=self.log.stopped or "", outcome=UNKNOWN)
        batches = work.batches(self, staged)
        if batches is None:
            return None
        if self.log.stopped is not None:
            raise StorageStopped(reason=self.log.stopped, outcome=NOT_DONE)
        before = staged.tail
        for batch in batches:
            self.log.check(batch, before)
            before = tail_of(batch)
        return batches

    def _append(self, staged: Staged) -> None:
        batches = [batch for _, each in staged.items for batch in each]
        source = staged.items[0][0].source
        try:
            if self.gone:
                raise UnknownTopic(GONE.format(name=self.name))
            answers = self._to_log(batches, source)
        except Exception as error:
            self._refuse(staged, _append_error(error))
            return
        self._appended(staged, answers)

    def _to_log(self, batches: list[Batch], source: Source) -> list[Appended]:
        if batches:
            return self.log.append(batches, source, checked=True)
        return [self.log.append_control(source)]

    def _appended(self, staged: Staged, answers: list[Appended]) -> None:
        if self._told is not None:
            self._told = None
            logger.info("%s-%d takes messages again", self.name, self.number)
        self.wake()  # whoever reads what is only written comes first: it waits longest
        at = 0
        for work, batches in staged.items:
            count = len(batches) or 1
            work.appended(self, answers[at : at + count])
            at += count
        self._flush()
        if self.parked and self.log.forced_offset < self.log.end_offset:
            self.ask_force()

    def _refuse(self, staged: Staged, error: TfmqError) -> None:
        self._tell_trouble(error)
        for work, _ in staged.items:
            work.refused(error)

    # Forcing

    def when_forced(self, offset: int, waiter: Waiter) -> None:
        """`waiter(None)` once the log is on the disk up to `offset`, or `waiter(error)`; at once if it is."""
        if self.log.waits_for_space and offset >= self.log.end_offset:
            # The producers know what lies behind the end, and it is not on the disk for sure.
            waiter(Full("the end of the log waits for space to be made durable"))
            return
        if offset <= self.log.forced_offset:
            waiter(None)
            return
        waiting = self._waiting.get(offset)
        if waiting is not None:
            waiting.append(waiter)
            return
        self._waiting[offset] = [waiter]
        self._asked = max(self._asked, offset)
        self._force(self.log, offset, partial(self._forced, offset))

    def ask_force(self) -> None:
        """Forces what is written, unless that is asked for already."""
        if self.log.end_offset > max(self._asked, self.log.forced_offset):
            self.when_forced(self.log.end_offset, _nobody)

    def _forced(self, offset: int, error: BaseException | None) -> None:
        if error is not None:
            self._asked = 0
            if self.gone:
                error = UnknownTopic(GONE.format(name=self.name))
            self._tell_trouble(error)
        self.wake()
        for waiter in self._waiting.pop(offset):
            waiter(error)

    def _flush(self) -> None:
        """Forces after N messages, or arms the alarm for T seconds."""
        due = self.log.flush_due(self._timers.now())
        if due is None:
            return
        if due <= self._timers.now():
            self.ask_force()
        elif not self._flush_armed:
            self._flush_armed = True
            self._timers.after(due - self._timers.now(), self._flush_alarm)

    def _flush_alarm(self) -> None:
        self._flush_armed = False
        if not self.gone and self.log.stopped is None:
            self._flush()

    # Waking

    def wake(self) -> None:
        """Lets everything that is parked here look again."""
        for look in list(self.parked.values()):
            look()

    def retire(self, done: Callable[[], None]) -> None:
        """The topic goes: whatever waits gets the error; `done()` when no worker works on the log any more."""
        self.gone = True
        if not self.working:
            self.write()
        self.wake()
        self.when_idle(done)

    def when_idle(self, done: Callable[[], None]) -> None:
        """`done()` when no file work of this partition runs."""
        self._idle.append(done)
        self._tell_idle()

    def exclusively(self, work: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        """Runs `work` in a worker with no append beside it; the queue waits."""

        def begin() -> None:
            self.working = True
            for waiting in self._queue:
                waiting.keep()
            self._run(work, end)

        def end(result: Any, error: BaseException | None) -> None:
            self.working = False
            done(result, error)
            self.write()
            self._tell_idle()

        self.when_idle(begin)

    def resume(self, done: Callable[[Any, BaseException | None], None]) -> None:
        """Lifts the stop of the log. One that fails half-way has forgotten what producers sent: until the next,
        nobody is told that something is not there."""

        def ended(result: Any, error: BaseException | None) -> None:
            self._half_known = error is not None
            done(result, error)

        self.exclusively(self.log.resume, ended)

    def _tell_trouble(self, error: BaseException) -> None:
        """Puts a stop or a full disk into the server's log, once until it is over."""
        reason = self.log.stopped
        if reason is None and isinstance(error, DiskFull):
            reason = "no space is left on its disk"
        if reason is None or reason == self._told:
            return
        self._told = reason
        advice = "it goes on as soon as there is some"
        if self.log.stopped is not None:
            advice = f"mend the disk, then: tfmq topic resume {self.name} --partition {self.number}"
        logger.error("%s-%d takes no messages: %s; %s", self.name, self.number, reason, advice)

    def _tell_idle(self) -> None:
        while self._idle and not self.working:
            self._idle.pop(0)()


def tail_of(batch: Batch) -> bytes:
    """The end of a checked batch, as long as a header."""
    return bytes(batch.data[-HEADER_SIZE:])


def _append_error(error: BaseException) -> TfmqError:
    """What a sender is told of a failed append: whether it happened is known only if the log refused it
    whole.
    """
    known = faults.client_error(error)
    if isinstance(known, StorageStopped):
        known.outcome = UNKNOWN
    return known


def _nobody(error: BaseException | None) -> None:
    """Whoever asked only wanted the marks to move; a failed force has stopped the log, which says so."""
