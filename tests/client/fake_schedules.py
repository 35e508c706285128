"""What the fake broker does with schedules: keeps them by name, gives ids, knows a repeat by its words, lists in pages.

Nothing is ever due.
"""

from __future__ import annotations

from typing import Any

from tfmq.errors import BadRequest, NotAllowed, UnknownSchedule, UnknownTopic
from tfmq.protocol import commands

NEXT_MS = 1_795_424_400_000
PAGE = 2


class FakeSchedules:
    """What the fake broker adds to itself."""

    incarnations: dict[str, int]
    next_id: int

    def __init__(self) -> None:
        self.schedules: dict[str, tuple[int, commands.AddSchedule]] = {}
        self.paused_schedules: set[str] = set()

    def add_schedule(self, request: commands.AddSchedule) -> Any:
        known = self.schedules.get(request.name)
        if len(request.cron.split()) != 5 and not request.cron.startswith("@"):
            raise BadRequest("That is no cron expression.")
        if request.topic not in self.incarnations:
            raise UnknownTopic()
        if known is not None and known[1] != request:
            raise NotAllowed()
        if known is None:
            self.next_id += 1
            self.schedules[request.name] = (self.next_id, request)
        return commands.AddScheduleReply(self.reply_schedule(request.name), known is None)

    def list_schedules(self, request: commands.ListSchedules) -> Any:
        names = sorted(each for each in self.schedules if each > request.after)
        names = [each for each in names if request.name in ("", each)]
        rows = [self.reply_schedule(each) for each in names[:PAGE]]
        if request.name and rows:
            rows[0] |= {"payload": b"go", "attribute": self.schedules[request.name][1].attribute}
        return commands.ListSchedulesReply(rows, len(names) > PAGE)

    def pause_schedule(self, request: commands.PauseSchedule) -> Any:
        if request.name not in self.schedules:
            raise UnknownSchedule()
        self.paused_schedules.add(request.name)
        return commands.ScheduleReply(self.reply_schedule(request.name))

    def resume_schedule(self, request: commands.ResumeSchedule) -> Any:
        self.paused_schedules.discard(request.name)
        return commands.ScheduleReply(self.reply_schedule(request.name))

    def remove_schedule(self, request: commands.RemoveSchedule) -> Any:
        found = self.schedules.get(request.name)
        if found is None or found[0] != request.id:
            return commands.RemoveScheduleReply(False)
        del self.schedules[request.name]
        return commands.RemoveScheduleReply(True)

    def reply_schedule(self, name: str) -> dict[str, Any]:
        id, asked = self.schedules[name]
        return {
            "name": name,
            "id": id,
            "cron": asked.cron,
            "timezone": asked.timezone,
            "topic": asked.topic,
            "partition": 0,
            "state": "paused" if name in self.paused_schedules else "active",
            "trouble": "",
            "next_ms": NEXT_MS,
            "last_ms": 0,
            "size": 2,
            "news": "of a later release",
            "tag": None,
        }
