"""The fake broker with messages that wait: rows that a test makes up, under real handles, by the rules of the wire."""

from itertools import pairwise
from typing import Any

from tests.client.fake_broker import FakeBroker
from tfmq.protocol import commands
from tfmq.protocol.delayed_handle import Handle, format_handle

STORE_ID, LOG_ID = 0x5EED, 7 << 24
NOW_MS = 1_700_000_000_123
LOOKED_MAX = 400
"""Messages that one page of a list looks at."""


class Waiting:
    """One delayed message."""

    count = 0

    def __init__(self, due_ms: int, topic: str = "orders", state: str = "pending", **fields: Any) -> None:
        Waiting.count += 1
        self.due_ms, self.number, self.topic, self.state = due_ms, Waiting.count, topic, state
        self.fields = fields
        self.instead: Waiting | None = None

    @property
    def handle(self) -> str:
        return format_handle(Handle(STORE_ID, LOG_ID, self.due_ms, self.number))

    def row(self) -> dict[str, Any]:
        return {
            "handle": self.handle,
            "state": self.state,
            "due_ms": self.due_ms,
            "topic": self.topic,
            "partition": 0,
            "key": None,
            "tag": None,
            "size": 2_048,
            "born_ms": NOW_MS - 1_000,
            **self.fields,
        }


class DelayedBroker(FakeBroker):
    """Messages that wait are `rows`, in any order."""

    def __init__(self, *waiting: Waiting) -> None:
        super().__init__()
        self.rows = list(waiting)
        self.delay: dict[str, Any] = {}

    def status(self, request: commands.Status) -> Any:
        pending = sum(each.state == "pending" for each in self.rows)
        return commands.StatusReply({"delay": {"pending": pending, "now_ms": NOW_MS, **self.delay}})

    def list_delayed(self, request: commands.ListDelayed) -> Any:
        turns = sorted((each.due_ms, each.number, each) for each in self.rows if each.state == "pending")
        handles = [each.handle for _, _, each in turns]
        start = handles.index(request.after) + 1 if request.after else 0
        looked = [each for _, _, each in turns[start : start + LOOKED_MAX]]
        rows = [each.row() for each in looked if self._wanted(each, request)][: request.limit]
        last = rows[-1]["handle"] if len(rows) == request.limit else looked[-1].handle if looked else ""
        more = bool(last) and handles.index(last) + 1 < len(handles)
        return commands.ListDelayedReply(rows, more, last if more else "")

    @staticmethod
    def _wanted(each: Waiting, request: commands.ListDelayed) -> bool:
        key = each.fields.get("key")
        return (
            request.topic in ("", each.topic)
            and request.partition in (None, each.fields.get("partition", 0))
            and request.key in (None, key.encode() if isinstance(key, str) else key)
            and request.first_due <= each.due_ms < request.end_due
        )

    def describe_delayed(self, request: commands.DescribeDelayed) -> Any:
        found = self._find(request.handle)
        return commands.DescriptionReply(found.row() if found else {"handle": request.handle, "state": "unknown"})

    def cancel_delayed(self, request: commands.CancelDelayed) -> Any:
        found = self._find(request.handle)
        if found is not None and found.state == "pending":
            found.state = "cancelled"
        return commands.StateReply(found.state if found else "unknown")

    def reschedule_delayed(self, request: commands.RescheduleDelayed) -> Any:
        found = self._find(request.handle)
        if found is None or found.state != "pending":
            return commands.RescheduleDelayedReply(found.state if found else "unknown", "")
        relative = request.due & commands.DUE_RELATIVE
        due_ms = NOW_MS + (request.due & commands.DUE_MAX) if relative else request.due
        found.state, found.instead = "rescheduled", Waiting(due_ms, found.topic, **found.fields)
        self.rows.append(found.instead)
        return commands.RescheduleDelayedReply("rescheduled", found.instead.handle)

    def delayed_histogram(self, request: commands.DelayedHistogram) -> Any:
        dues = [each.due_ms for each in self.rows if each.state == "pending" and request.topic in ("", each.topic)]
        edges = request.edges
        counts = [sum(low <= due < high for due in dues) for low, high in pairwise(edges)]
        return commands.DelayedHistogramReply(counts, len(dues))

    def _find(self, handle: str) -> Waiting | None:
        return next((each for each in self.rows if each.handle == handle), None)
