"""Schedule commands: add, list, pause, resume, remove.

`tfmq.broker.scheduler` sends the messages.
"""

from __future__ import annotations

import logging
import zlib
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from journal.clock import Clock
from tfmq.broker.apply_target import BrokerDestination
from tfmq.broker.catalog import Catalog, Leases
from tfmq.broker.catalog_state import SCHEDULE_GONE, ScheduleRow
from tfmq.broker.reply import Body, Reply, Run, client_error
from tfmq.broker.scheduler import PAUSED, WAITING, ScheduleFiring, ScheduleRun
from tfmq.broker.timers import Timers
from tfmq.broker.topics import Topic, Topics, no_partition
from tfmq.delay.cron import RULES
from tfmq.errors import BadRequest, MessageTooLarge, NotAllowed, UnknownPartition, UnknownSchedule
from tfmq.protocol.commands import AddSchedule, ListSchedules, PauseSchedule, RemoveSchedule, ResumeSchedule

logger = logging.getLogger("tfmq.broker")

Then = Callable[[BaseException | None], None]
End = Callable[[], None]


class Schedules:
    """All schedules. The catalog stores the definitions, the partitions what was sent.

    Every change is durable in the catalog before its reply. A schedule is bound to one partition of one incarnation
    of its topic. If the topic is deleted and created again, the schedule is bound to the new incarnation from that
    time on, in the catalog too, so that messages of the old one are never sent to the new one. Changes of one
    schedule are serialized.
    """

    def __init__(
        self,
        *,
        catalog: Catalog,
        destination: BrokerDestination,
        topics: Topics,
        leases: Leases,
        timers: Timers,
        clock: Clock,
        run: Run,
        limits: Mapping[str, int],
    ) -> None:
        self._catalog, self._topics, self._leases = catalog, topics, leases
        self._clock, self._limits = clock, limits
        self._book = catalog.register.schedules
        self._runs: dict[str, ScheduleRun] = {}
        self._changing: dict[str, deque[Callable[[], None]]] = {}
        self._adding: dict[str, int] = {}
        """Sizes of the schedules that are being added."""
        self.firing = ScheduleFiring(
            destination=destination, topics=topics, timers=timers, clock=clock, run=run, bind=self._bind
        )

    def start(self) -> None:
        """Load all schedules and start sending."""
        for row in self._book:
            run = self._runs[row.name] = ScheduleRun(row, kept=True)
            if run.trouble:
                logger.error("the schedule %s cannot run: %s", row.name, run.trouble)
            self.firing.put(run)
        for topic in self._topics.all():
            self.topic_made(topic)
        self.firing.start()

    def stop(self) -> None:
        """Stop sending."""
        self.firing.stop()

    def topic_made(self, topic: Topic) -> None:
        """Bind schedules to a topic that was created or has more partitions."""
        for run in self._runs.values():
            if run.row.topic == topic.name and run.row.incarnation != topic.incarnation:
                self._bind(run)

    def resumed(self, log_id: int) -> None:
        """Retry schedules of a partition that accepts writes again."""
        self.firing.resumed(log_id)

    def status(self) -> dict[str, Any]:
        """Return the "schedules" part of STATUS."""
        states = [run.state(self.firing.trouble(run)) for run in self._runs.values()]
        return {
            "schedules": len(states),
            "paused": states.count(PAUSED),
            "waiting": states.count(WAITING),
        }

    # Adding

    def add(self, request: AddSchedule, body: Body, reply: Reply) -> None:
        """Add a schedule. Raises BadRequest, MessageTooLarge."""
        payload = None if request.tombstone else bytes(body)
        size = len(request.attribute) + len(body)
        if size > self._limits["schedule_payload_bytes"]:
            raise MessageTooLarge(
                f"The schedule's payload, key, tag and properties have {size} bytes, the broker takes"
                f" {self._limits['schedule_payload_bytes']} (limits.schedule_payload_bytes)."
            )
        if request.misfire not in RULES:
            raise BadRequest(f"There is no misfire rule {request.misfire!r}: it is {', '.join(RULES)}.")
        now = self._clock.wall_ms()
        row = ScheduleRow(0, *request[:5], request.attribute, payload, request.misfire, now, 0, 0, now)
        self._alone(request.name, reply, partial(self._add, ScheduleRun(row), reply))

    def _add(self, asked: ScheduleRun, reply: Reply, end: End) -> None:
        row = asked.row
        known = self._runs.get(row.name)
        if known is not None and known.row.says_the_same(row):
            reply.ok(self._whole(known), False)
            end()
            return
        topic = self._topics.topic(row.topic)
        number = chosen_partition(asked, topic)
        self._refuse_more(row, known)
        self._adding[row.name] = row.size_bytes
        finish = partial(self._finish, reply, end, row.name)

        def leased(id: int, error: BaseException | None) -> None:
            if error is not None:
                finish(error)
                return
            run = ScheduleRun(row._replace(id=id, incarnation=topic.incarnation, partition=number))
            try:
                self.firing.check(run, [run.batch(0)])
            except Exception as error:
                finish(error)
                return
            self._catalog.submit(run.made_entry(), partial(self._made, run, finish))

        self._leases.take(1, leased)

    def _made(self, run: ScheduleRun, finish: Callable[..., None], error: BaseException | None) -> None:
        if error is not None:
            finish(error)
            return
        self._runs[run.row.name] = run
        self.firing.put(run)
        self._bind_if_changed(run)
        finish(None, self._whole(run), True)

    def _refuse_more(self, row: ScheduleRow, known: ScheduleRun | None) -> None:
        if known is not None:
            raise NotAllowed(
                f"There is another schedule {row.name} already: remove it first (tfmq schedule remove {row.name}), or"
                " choose another name."
            )
        if len(self._runs) + len(self._adding) >= self._limits["schedules"]:
            raise NotAllowed(f"The broker has {len(self._runs)} schedules, its limit (limits.schedules).")
        size = self._book.size_bytes + sum(self._adding.values()) + row.size_bytes
        if size > self._limits["schedules_bytes"]:
            raise NotAllowed(
                "All schedules together would be larger than the broker's limit (limits.schedules_bytes)."
            )

    # Queries

    def list(self, request: ListSchedules, reply: Reply) -> None:
        """Reply with one page of schedules, by name."""
        names = sorted(name for name in self._runs if name > request.after)
        if request.name:
            names = [name for name in names if name == request.name]
        page = names[: request.limit]
        describe = self._whole if request.name else self._described
        reply.ok([describe(self._runs[name]) for name in page], len(names) > len(page))

    def _described(self, run: ScheduleRun) -> dict[str, Any]:
        firing = self.firing
        return run.described(firing.sent(run), firing.upcoming(run), firing.trouble(run))

    def _whole(self, run: ScheduleRun) -> dict[str, Any]:
        """Return a schedule with its content.

        Only for a reply about one schedule: lists could become too large.
        """
        return self._described(run) | run.content()

    # Changes

    def pause(self, request: PauseSchedule, reply: Reply) -> None:
        """Pause a schedule.

        The reply is sent when that is durable; no message is started afterwards.
        """
        self._alone(request.name, reply, partial(self._pause, request.name, reply))

    def _pause(self, name: str, reply: Reply, end: End) -> None:
        run = self._run(name)
        if run.row.paused:
            reply.ok(self._whole(run))
            end()
            return
        self._change(run, partial(self._answer, run, reply, end), paused=True)

    def resume(self, request: ResumeSchedule, reply: Reply) -> None:
        """Resume a schedule from now on.

        Times that passed during the pause are not treated as missed.
        """
        self._alone(request.name, reply, partial(self._resume, request.name, reply))

    def _resume(self, name: str, reply: Reply, end: End) -> None:
        run, now = self._run(name), self._clock.wall_ms()
        answer = partial(self._answer, run, reply, end)
        if self.firing.clock_behind(run):
            self._anew(run, now, reply, end)
        elif run.row.paused:
            self._change(run, answer, paused=False, through_ms=now)
        else:
            answer(None)

    def _anew(self, run: ScheduleRun, now: int, reply: Reply, end: End) -> None:
        """Restart a schedule under another id, because the clock is before its last sent time.

        The LSNs of one source only increase, so the old id could not send for the earlier times.
        """
        name = run.row.name
        finish = partial(self._finish, reply, end, name)

        def leased(id: int, error: BaseException | None) -> None:
            if error is not None:
                finish(error)
                return
            new = ScheduleRun(run.row._replace(id=id, through_ms=now, paused=False))
            run.changing = True
            self._catalog.submit(new.made_entry(), partial(made, new))

        def made(new: ScheduleRun, error: BaseException | None) -> None:
            run.changing = False
            if error is not None:
                self.firing.plan(run)
                finish(error)
                return
            self.firing.drop(run)
            self._runs[name] = new
            self.firing.put(new)
            finish(None, self._whole(new))

        self._leases.take(1, leased)

    def remove(self, request: RemoveSchedule, reply: Reply) -> None:
        """Remove a schedule. Reply whether one with that id existed."""
        self._alone(request.name, reply, partial(self._remove, request, reply))

    def _remove(self, request: RemoveSchedule, reply: Reply, end: End) -> None:
        run = self._runs.get(request.name)
        if run is None or request.id not in (0, run.row.id):
            reply.ok(False)
            end()
            return
        run.changing = True

        def gone(error: BaseException | None) -> None:
            run.changing = False
            if error is None:
                self.firing.drop(run)
                del self._runs[request.name]
            else:
                self.firing.plan(run)
            self._finish(reply, end, request.name, error, True)

        self._catalog.submit((SCHEDULE_GONE, run.row.id), gone)

    def _bind(self, run: ScheduleRun) -> None:
        """Bind a schedule to its topic's current incarnation, from now on."""
        self._alone(run.row.name, None, partial(self._bind_alone, run))

    def _bind_if_changed(self, run: ScheduleRun) -> None:
        topic = self._topics.find(run.row.topic)
        if topic is not None and topic.incarnation != run.row.incarnation:
            self._bind(run)

    def _bind_alone(self, run: ScheduleRun, end: End) -> None:
        topic = self._topics.find(run.row.topic)
        if self._runs.get(run.row.name) is not run:
            end()
            return
        if topic is None or topic.incarnation == run.row.incarnation:
            self.firing.plan(run)
            end()
            return
        now = self._clock.wall_ms()
        try:
            number = chosen_partition(run, topic)
        except UnknownPartition as error:
            self.firing.leave_out(run, str(error))
            end()
            return

        def bound(error: BaseException | None) -> None:
            if error is not None:
                self.firing.park(run, error)
            else:
                run.trouble = ""
            end()

        self._change(run, bound, incarnation=topic.incarnation, partition=number, through_ms=now)

    # Helpers

    def _run(self, name: str) -> ScheduleRun:
        """Return a running schedule. Raises UnknownSchedule."""
        run = self._runs.get(name)
        if run is None:
            raise UnknownSchedule(f"There is no schedule {name}. Look at the list: tfmq schedule list.")
        return run

    def _change(self, run: ScheduleRun, then: Then, **changed: Any) -> None:
        """Change the schedule's state in the catalog; nothing is sent until that is durable."""
        run.changing = True

        def forced(error: BaseException | None) -> None:
            run.changing = False
            if error is None:
                run.now_is(run.row._replace(**changed))
            self.firing.plan(run)
            then(error)

        self._catalog.submit(run.state_entry(**changed), forced)

    def _answer(self, run: ScheduleRun, reply: Reply, end: End, error: BaseException | None) -> None:
        if error is not None:
            reply.error(client_error(error))
        else:
            reply.ok(self._whole(run))
        end()

    def _finish(self, reply: Reply, end: End, name: str, error: BaseException | None, *fields: Any) -> None:
        self._adding.pop(name, None)
        if error is not None:
            reply.error(client_error(error))
        else:
            reply.ok(*fields)
        end()

    def _alone(self, name: str, reply: Reply | None, change: Callable[[End], None]) -> None:
        """Serialize changes of one name.

        `change(end)` calls `end` when it is complete, or raises immediately.
        """
        begin = partial(self._begin, name, reply, change)
        waiting = self._changing.get(name)
        if waiting is not None:
            waiting.append(begin)
            return
        self._changing[name] = deque()
        begin()

    def _begin(self, name: str, reply: Reply | None, change: Callable[[End], None]) -> None:
        try:
            change(partial(self._end, name))
        except Exception as error:
            self._end(name)
            if reply is None:
                raise
            reply.error(client_error(error))

    def _end(self, name: str) -> None:
        waiting = self._changing[name]
        if waiting:
            waiting.popleft()()
        else:
            del self._changing[name]


def chosen_partition(run: ScheduleRun, topic: Topic) -> int:
    """Return the target partition.

    It is the requested one, else chosen by the message key as producers do, else by the name.

    Raises UnknownPartition.
    """
    wanted = run.row.partition_wanted
    if wanted is None:
        text = run.row.name if run.message_key is None else run.message_key
        return zlib.crc32(text.encode() if isinstance(text, str) else text) % len(topic.partitions)
    if wanted >= len(topic.partitions):
        raise no_partition(topic, wanted)
    return wanted
