"""One schedule as it runs: its row in the catalog, its times, and the records that are made of it."""

from __future__ import annotations

from typing import Any, Final

from journal.record.batch import Batch, Source
from journal.record.block_trailer import SOURCE_SCHEDULE
from journal.record.format import FLAG_TOMBSTONE, SEQUENCE_COUNT, make_id, make_log_id, make_record, tag_flag
from tfmq import limits
from tfmq.apply_target import Append, SourceName
from tfmq.broker.register import SCHEDULE, SCHEDULE_STATE
from tfmq.broker.schedule_book import ScheduleRow
from tfmq.delay.cron import MINUTE_MS, Cron, zone_text
from tfmq.errors import BadRequest, TfmqError
from tfmq.message import Attribute, decode_attribute, encode_attribute

NAME_PROPERTY: Final = "schedule"
TIME_PROPERTY: Final = "scheduled_for"
"""Properties that each message of a schedule has: whose it is, and for which time, as its time zone writes it."""

ACTIVE, PAUSED, WAITING = "active", "paused", "waiting"


class ScheduleRun:
    """See the module. Raises `BadRequest`, `DecodeFailed` for a row that makes no sense; where it is `kept` already,
    it only never sends, and says why.
    """

    def __init__(self, row: ScheduleRow, kept: bool = False) -> None:
        self.row = row
        self.next_ms: int | None = None
        """When it is looked at next, by the wall clock."""
        self.sure_ms = 0
        """Its messages for times up to here are on the disk, in its partition as it is bound now."""
        self.passed_ms = 0
        """Times up to here were left out; never later than now."""
        self.trouble = ""
        """Why what is due is not sent, in one sentence."""
        self.sending = False
        self.changing = False
        """A change of it is on its way to the catalog: meanwhile nothing is sent."""
        self.cron: Cron | None = None
        """None if the zone is not known here any more, or the like."""
        self._attribute: Attribute | None = None
        try:
            self.cron = Cron(row.cron, row.timezone)
            self._attribute = decode_attribute(row.attribute) if row.attribute else None
            self._refuse_own_properties()
        except TfmqError as error:
            if not kept:
                raise
            self.cron, self.trouble = None, str(error)

    def _refuse_own_properties(self) -> None:
        given = self._attribute.properties if self._attribute is not None else {}
        for name in (NAME_PROPERTY, TIME_PROPERTY):
            if name in given:
                raise BadRequest(f"The property {name} is the schedule's own: give yours another name.")
        if len(given) + 2 > limits.PROPERTIES:
            raise BadRequest(
                f"A schedule's message has {limits.PROPERTIES - 2:d} properties at most, and two of its own."
            )

    def now_is(self, row: ScheduleRow) -> None:
        """Its row is this from now on."""
        if (row.incarnation, row.partition) != (self.row.incarnation, self.row.partition):
            self.sure_ms = 0
        self.row = row

    @property
    def key(self) -> int:
        """The id of the log that it sends to."""
        return make_log_id(self.row.incarnation, self.row.partition)

    @property
    def source(self) -> SourceName:
        return SOURCE_SCHEDULE, self.row.id

    @property
    def message_key(self) -> bytes | str | None:
        return None if self._attribute is None else self._attribute.key

    def append(self, moments_ms: list[int]) -> Append:
        """One message for each of these times, in one append."""
        row = self.row
        source = Source(*self.source, moments_ms[-1], 0)
        batches = [self.batch(moment) for moment in moments_ms]
        return Append(row.topic, row.incarnation, row.partition, batches, source)

    def batch(self, moment_ms: int) -> Batch:
        """The message for that time: the same bytes whenever it is made."""
        row, given = self.row, self._attribute
        own = {NAME_PROPERTY: row.name, TIME_PROPERTY: zone_text(moment_ms, row.timezone)}
        tag = given.tag if given is not None else None
        properties = {**given.properties, **own} if given is not None else own
        attribute = encode_attribute(moment_ms, self.message_key, tag, properties)
        flag = tag_flag(tag or "") | (FLAG_TOMBSTONE if row.payload is None else 0)
        sequence = moment_ms // MINUTE_MS % SEQUENCE_COUNT
        record = make_record(row.payload or b"", make_id(row.id, sequence), flag, attribute)
        return Batch(record, (), row.id, sequence, 1)

    def made_entry(self) -> tuple[Any, ...]:
        """What makes it in the catalog."""
        return (SCHEDULE, *self.row[:-1])

    def state_entry(self, **changed: Any) -> tuple[Any, ...]:
        """What changes its state in the catalog."""
        row = self.row._replace(**changed)
        return SCHEDULE_STATE, row.id, row.incarnation, row.partition, row.through_ms, row.paused

    def state(self, trouble: str) -> str:
        return PAUSED if self.row.paused else WAITING if trouble else ACTIVE

    def described(self, last_ms: int, next_ms: int | None, trouble: str) -> dict[str, Any]:
        """It as replies tell of it."""
        row, given = self.row, self._attribute
        return {
            "name": row.name,
            "id": row.id,
            "cron": row.cron,
            "timezone": row.timezone,
            "topic": row.topic,
            "partition": row.partition,
            "misfire": row.misfire,
            "state": self.state(trouble),
            "trouble": trouble,
            "next_ms": next_ms or 0,
            "last_ms": last_ms,
            "made_ms": row.made_ms,
            "size": len(row.payload or b""),
            "tag": given.tag or "" if given is not None else "",
            "properties": len(given.properties) if given is not None else 0,
        }

    def content(self) -> dict[str, Any]:
        """What it sends, for the reply about it alone."""
        return {"payload": self.row.payload, "attribute": self.row.attribute}
