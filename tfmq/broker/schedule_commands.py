"""Schedule commands: add, list, pause, resume, remove. `tfmq.broker.scheduler` sends the messages."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from journal.crc32 import crc32
from tfmq.broker.apply_target import BrokerApplyTarget
from tfmq.broker.catalog import Catalog, IdAllocator
from tfmq.broker.catalog_state import SCHEDULE_GONE, ScheduleRow
from tfmq.broker.reply import Body, Reply, Run, Session, client_error
from tfmq.broker.runtime import Runtime
from tfmq.broker.scheduler import MISFIRE_RULES, PAUSED, WAITING, RunningSchedule, Scheduler
from tfmq.broker.topics import Topic, Topics, no_partition
from tfmq.errors import BadRequest, MessageTooLarge, NotAllowed, UnknownPartition, UnknownSchedule
from tfmq.protocol.commands import AddSchedule, ListSchedules, PauseSchedule, RemoveSchedule, ResumeSchedule

logger = logging.getLogger("tfmq.broker")

ErrorCallback = Callable[[BaseException | None], None]
Finish = Callable[..., None]
"""finish(error, *fields): ends a change of a schedule. Replies with `error`, or if that is None, with `fields`."""


class ScheduleCommands:
    """The commands for schedules. Changes of one schedule are made one after the other.

    The catalog stores the schedules. The block trailers of the target partition record for which times a schedule has
    sent messages. A change is durable in the catalog before the reply. A schedule is bound to one partition of one
    incarnation of its topic. If the topic is deleted and created again, the schedule is bound to the new incarnation,
    and sends to it only messages whose time is after the binding.
    """

    def __init__(
        self,
        runtime: Runtime,
        *,
        catalog: Catalog,
        apply_target: BrokerApplyTarget,
        topics: Topics,
        leases: IdAllocator,
        run: Run,
    ) -> None:
        self._runtime, self._catalog, self._topics, self._leases = runtime, catalog, topics, leases
        self._clock, self._limits = runtime.clock, runtime.limits
        self._table = catalog.state.schedules
        self._running: dict[str, RunningSchedule] = {}
        self._changing: dict[str, deque[Callable[[], None]]] = {}
        self._adding: dict[str, int] = {}
        """Name -> size in bytes, for each schedule that is being added. These sizes count in the limits."""
        self.scheduler = Scheduler(runtime, apply_target=apply_target, topics=topics, run=run, bind=self._bind)

    def start(self) -> None:
        """Start all schedules of the catalog, so that their messages are sent."""
        for row in self._table:
            run = self._running[row.name] = RunningSchedule(row, kept=True)
            if run.trouble:
                logger.error("the schedule %s cannot run: %s", row.name, run.trouble)
            self.scheduler.add(run)
        for topic in self._topics.values():
            self.topic_created(topic)
        self.scheduler.timer.start()

    def topic_created(self, topic: Topic) -> None:
        """After a topic was created or has grown, bind its schedules that are not bound to this incarnation yet."""
        for run in self._running.values():
            if run.row.topic == topic.name and run.row.incarnation != topic.incarnation:
                self._bind(run)

    def status(self) -> dict[str, Any]:
        """Return the "schedules" part of STATUS."""
        states = [run.state(self.scheduler.trouble(run)) for run in self._running.values()]
        return {"schedules": len(states), "paused": states.count(PAUSED), "waiting": states.count(WAITING)}

    # ADD_SCHEDULE

    def add(self, request: AddSchedule, body: Body, reply: Reply, session: Session) -> None:
        """Add a schedule. Reply with it, and whether it is new. Raises MessageTooLarge, BadRequest (invalid field)."""
        payload = None if request.tombstone else bytes(body)
        size = len(request.attribute) + len(body)
        if size > self._limits["schedule_payload_bytes"]:
            raise MessageTooLarge(
                f"The schedule's payload, key, tag and properties have {size} bytes, the broker takes"
                f" {self._limits['schedule_payload_bytes']} (limits.schedule_payload_bytes)."
            )
        if request.misfire not in MISFIRE_RULES:
            raise BadRequest(f"There is no misfire rule {request.misfire!r}: it is {', '.join(MISFIRE_RULES)}.")
        now = self._clock.wall_ms()
        row = ScheduleRow(0, *request[:5], request.attribute, payload, request.misfire, now, 0, 0, now)
        self._serialize(request.name, reply, partial(self._add, RunningSchedule(row)))

    def _add(self, asked: RunningSchedule, finish: Finish) -> None:
        row = asked.row
        known = self._running.get(row.name)
        if known is not None and known.row.same_definition(row):
            finish(None, self._describe_fully(known), False)
            return
        self._check_limits(row, known)
        self._check_new_topic(row)
        topic = self._topics.topic(row.topic)
        number = chosen_partition(asked, topic)
        self._adding[row.name] = row.size_bytes

        def leased(id: int, error: BaseException | None) -> None:
            if error is not None:
                finish(error)
                return
            run = RunningSchedule(row._replace(id=id, incarnation=topic.incarnation, partition=number))
            try:
                self.scheduler.check_batches(run, [run.batch(0)])
            except Exception as error:
                finish(error)
                return
            self._catalog.submit(run.add_entry(), partial(added, run))

        def added(run: RunningSchedule, error: BaseException | None) -> None:
            if error is not None:
                finish(error)
                return
            self._running[row.name] = run
            self.scheduler.add(run)
            now = self._topics.get(row.topic)
            if now is not None and now.incarnation != run.row.incarnation:
                self._bind(run)
            finish(None, self._describe_fully(run), True)

        self._leases.allocate(1, leased)

    def _check_new_topic(self, row: ScheduleRow) -> None:
        if self._topics.get(row.topic) is not None or row.partition_wanted is None:
            return
        count, wanted = self._runtime.partitions_default(row.topic, {}), row.partition_wanted
        if wanted >= count:
            with_count = "1 partition" if count == 1 else f"{count} partitions"
            raise UnknownPartition(
                f"There is no topic {row.topic}, and a new one gets {with_count} (topics.partitions), no number"
                f" {wanted}. Create it first: tfmq topic create {row.topic} --partitions {wanted + 1}.",
                partitions=count,
            )

    def _check_limits(self, row: ScheduleRow, known: RunningSchedule | None) -> None:
        if known is not None:
            raise NotAllowed(
                f"There is another schedule {row.name} already: remove it first (tfmq schedule remove {row.name}), or"
                " choose another name."
            )
        if len(self._running) + len(self._adding) >= self._limits["schedules"]:
            raise NotAllowed(f"The broker has {len(self._running)} schedules, its limit (limits.schedules).")
        size = self._table.size_bytes + sum(self._adding.values()) + row.size_bytes
        if size > self._limits["schedules_bytes"]:
            raise NotAllowed("All schedules together would be larger than the broker's limit (limits.schedules_bytes).")

    # LIST_SCHEDULES

    def list(self, request: ListSchedules, reply: Reply) -> None:
        """Reply with one page of schedules in the order of their names, and whether more follow."""
        names = sorted(name for name in self._running if name > request.after)
        if request.name:
            names = [name for name in names if name == request.name]
        page = names[: request.limit]
        describe = self._describe_fully if request.name else self._describe
        reply.ok([describe(self._running[name]) for name in page], len(names) > len(page))

    def _describe(self, run: RunningSchedule) -> dict[str, Any]:
        firing = self.scheduler
        return run.description(firing.last_sent(run), firing.next_shown(run), firing.trouble(run))

    def _describe_fully(self, run: RunningSchedule) -> dict[str, Any]:
        """Return a schedule with its payload and attribute, for a reply about one schedule only."""
        return self._describe(run) | {"payload": run.row.payload, "attribute": run.row.attribute}

    # PAUSE_SCHEDULE, RESUME_SCHEDULE, REMOVE_SCHEDULE, and the binding to a topic

    def pause(self, request: PauseSchedule, reply: Reply) -> None:
        """Pause a schedule. Reply when the pause is durable; from then on, no append of the schedule is started."""

        def pause(finish: Finish) -> None:
            run = self._find_run(request.name)
            reply_described = partial(self._finish_described, run, finish)
            if run.row.paused:
                reply_described(None)
            else:
                self._change(run, reply_described, paused=True)

        self._serialize(request.name, reply, pause)

    def resume(self, request: ResumeSchedule, reply: Reply) -> None:
        """Resume a schedule. No message is sent for times that passed during the pause: they do not count as missed."""

        def resume(finish: Finish) -> None:
            run, now = self._find_run(request.name), self._clock.wall_ms()
            reply_described = partial(self._finish_described, run, finish)
            if self.scheduler.is_clock_behind(run):
                self._restart_with_new_id(run, now, finish)
            elif run.row.paused:
                self._change(run, reply_described, paused=False, through_ms=now)
            else:
                reply_described(None)

        self._serialize(request.name, reply, resume)

    def _restart_with_new_id(self, run: RunningSchedule, now: int, finish: Finish) -> None:
        """Restart a schedule under a new id, because the clock is before the last time for which a message was sent.

        Each append has the schedule's id as its source, and the scheduled time as its position in that source. A log
        accepts only increasing positions of a source, so under the old id no message for earlier times could be sent.
        """

        def leased(id: int, error: BaseException | None) -> None:
            if error is not None:
                finish(error)
                return
            new = RunningSchedule(run.row._replace(id=id, through_ms=now, paused=False))
            run.is_changing = True
            self._catalog.submit(new.add_entry(), partial(made, new))

        def made(new: RunningSchedule, error: BaseException | None) -> None:
            run.is_changing = False
            if error is not None:
                self.scheduler.plan(run)
                finish(error)
                return
            self.scheduler.timer.remove(run)
            self._running[run.row.name] = new
            self.scheduler.add(new)
            finish(None, self._describe_fully(new))

        self._leases.allocate(1, leased)

    def remove(self, request: RemoveSchedule, reply: Reply) -> None:
        """Remove the schedule with the requested name and id (0: any id). Reply whether a schedule was removed."""

        def remove(finish: Finish) -> None:
            run = self._running.get(request.name)
            if run is None or request.id not in (0, run.row.id):
                finish(None, False)
                return
            run.is_changing = True
            self._catalog.submit((SCHEDULE_GONE, run.row.id), partial(removed, run, finish))

        def removed(run: RunningSchedule, finish: Finish, error: BaseException | None) -> None:
            run.is_changing = False
            if error is None:
                self.scheduler.timer.remove(run)
                del self._running[request.name]
            else:
                self.scheduler.plan(run)
            finish(error, True)

        self._serialize(request.name, reply, remove)

    def _bind(self, run: RunningSchedule) -> None:
        """Bind a schedule to its topic's current incarnation, without messages for times before the binding."""

        def bind(finish: Finish) -> None:
            topic = self._topics.get(run.row.topic)
            if self._running.get(run.row.name) is not run:
                finish(None)
                return
            if topic is None or topic.incarnation == run.row.incarnation:
                self.scheduler.plan(run)
                finish(None)
                return
            now = self._clock.wall_ms()
            try:
                number = chosen_partition(run, topic)
            except UnknownPartition as error:
                self.scheduler.skip_due(run, str(error))
                finish(None)
                return
            bound_now = partial(bound, finish)
            self._change(run, bound_now, incarnation=topic.incarnation, partition=number, through_ms=now)

        def bound(finish: Finish, error: BaseException | None) -> None:
            if error is not None:
                self.scheduler.retry_later(run, error)
            else:
                run.trouble = ""
            finish(None)

        self._serialize(run.row.name, None, bind)

    # Changes in the catalog, one after the other for each schedule

    def _find_run(self, name: str) -> RunningSchedule:
        run = self._running.get(name)
        if run is None:
            raise UnknownSchedule(f"There is no schedule {name}. Look at the list: tfmq schedule list.")
        return run

    def _change(self, run: RunningSchedule, then: ErrorCallback, **changed: Any) -> None:
        """Change fields of the schedule in the catalog. The schedule sends no message until the change is durable."""
        run.is_changing = True

        def written(error: BaseException | None) -> None:
            run.is_changing = False
            if error is None:
                run.replace_row(run.row._replace(**changed))
            self.scheduler.plan(run)
            then(error)

        self._catalog.submit(run.state_entry(**changed), written)

    def _finish_described(self, run: RunningSchedule, finish: Finish, error: BaseException | None) -> None:
        finish(error, self._describe_fully(run))

    def _serialize(self, name: str, reply: Reply | None, change: Callable[[Finish], None]) -> None:
        """Call `change(finish)` when all earlier changes of the schedule `name` are complete.

        `change` either raises an error at once, or calls `finish(error, *fields of the reply)` when the change is
        complete. `finish` sends `reply`, which is None if no client waits for the change.
        """

        def begin() -> None:
            try:
                change(finish)
            except Exception as error:
                finish(error)
                if reply is None:
                    raise

        def finish(error: BaseException | None, *fields: Any) -> None:
            self._adding.pop(name, None)
            if reply is not None and error is not None:
                reply.error(client_error(error))
            elif reply is not None:
                reply.ok(*fields)
            waiting = self._changing[name]
            if waiting:
                waiting.popleft()()
            else:
                del self._changing[name]

        waiting = self._changing.get(name)
        if waiting is not None:
            waiting.append(begin)
            return
        self._changing[name] = deque()
        begin()


def chosen_partition(run: RunningSchedule, topic: Topic) -> int:
    """Return the number of the partition to which the schedule sends. Raises UnknownPartition.

    This is the partition that the client requested. If the client requested none, it is chosen by a hash of the message
    key, as a producer does, or by a hash of the schedule's name if there is no key.
    """
    wanted = run.row.partition_wanted
    if wanted is None:
        text = run.row.name if run.message_key is None else run.message_key
        return crc32(text.encode() if isinstance(text, str) else text) % len(topic.partitions)
    if wanted >= len(topic.partitions):
        raise no_partition(topic, wanted)
    return wanted
