"""Dead letters in a topic: encoded events, the index replayed from them, and the store.

docs/dead-letters.md documents the record format. `LetterIndex` keeps every letter in memory without body and
tracebacks, and the offsets of its events in the topic. Body and tracebacks are read from these events on demand.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from types import UnionType
from typing import Any, Final, TypeVar, get_origin, get_type_hints

from tfmq.bounded_msgpack import Malformed, pack, unpack
from tfmq.client.connection.connection import ClientConnection
from tfmq.client.connection.requests import MetadataCache, fetch_topics
from tfmq.client.consumer.message import ReceivedMessage
from tfmq.client.operation import Event, Operation, Wait
from tfmq.client.send import idempotent_send
from tfmq.client.send.idempotent_send import ProducerPartition, RecordContent
from tfmq.client.worker.dead_letter_store import Failure
from tfmq.dead_letters import model
from tfmq.dead_letters.model import FIRST_PAGE, PAGE_LETTERS, Letter, PagePosition, Selection
from tfmq.dead_letters.state_machine import apply_event
from tfmq.dead_letters.store import TOPIC_PREFIX, Step
from tfmq.errors import Damaged, OffsetOutOfRange, StoreFailed, UnknownProducer, UnknownTopic
from tfmq.ids import pack_id, remaining_sequences
from tfmq.message import BORN_MS_MAX, encode_attribute
from tfmq.protocol.commands import BY_EARLIEST


class LetterIndex:
    """Current letters by id, replayed from the events of the topic in the order of the log."""

    def __init__(self) -> None:
        self.letters: dict[str, Letter] = {}
        self.event_offsets: dict[str, list[int]] = {}
        """Letter id -> offsets of the letter's events, without events that had no effect."""
        self._waiting: dict[str, Letter] = {}

    def apply(self, message: ReceivedMessage[Any]) -> Letter | None:
        """Apply the event in `message`. Return the new letter, or None if the event had no effect."""
        found = decode_event(message)
        if found is None:
            return None
        id, event = found
        letter = apply_event(self.letters.get(id), event)
        if letter is None:
            return None
        self.letters[id] = without_body(letter)
        self.event_offsets.setdefault(id, []).append(message.offset)
        if letter.state in (model.WAITING, model.RETRYING):
            self._waiting[id] = self.letters[id]
        else:
            self._waiting.pop(id, None)
        return letter

    def delete_before(self, before: int) -> None:
        """Remove letters whose events are all before offset `before`: retention deleted these events."""
        for id in [id for id, offsets in self.event_offsets.items() if offsets[-1] < before]:
            del self.letters[id], self.event_offsets[id]
            self._waiting.pop(id, None)

    def next_due_id(self, group: str, now_ms: int, broker: str = "") -> str | None:
        found = [(time, id) for time, id in self._due_times(group, broker) if time <= now_ms]
        return min(found)[1] if found else None

    def next_due_ms(self, group: str, broker: str = "") -> int | None:
        return min((time for time, _ in self._due_times(group, broker)), default=None)

    def find_foreign_waiting(self, group: str, broker: str, after: PagePosition, count: int) -> list[Letter]:
        waiting = (each for each in self._waiting.values() if each.group == group)
        return _page(after, count, (each for each in waiting if each.broker not in ("", broker)))

    def find(self, selection: Selection, after: PagePosition, count: int) -> list[Letter]:
        return _page(after, count, filter(selection.holds, self.letters.values()))

    def _due_times(self, group: str, broker: str) -> list[tuple[int, str]]:
        """Return (due time or end of lease, id) of each waiting or leased letter that records `broker` or no broker."""
        return [
            (each.next_ms if each.state == model.WAITING else each.lease_ms, each.id)
            for each in self._waiting.values()
            if each.group == group and each.broker in ("", broker)
        ]


def _page(after: PagePosition, count: int, letters: Iterable[Letter]) -> list[Letter]:
    left = [each for each in letters if (each.kept_ms, each.id) > after]
    return sorted(left, key=lambda each: (each.kept_ms, each.id))[:count]


def without_body(letter: Letter) -> Letter:
    """Return the letter without its body and tracebacks, to save memory."""
    failures = tuple(each._replace(traceback="") for each in letter.failures)
    return replace(letter, body=None, failures=failures)


# Records of events. The payload is a msgpack array: version, kind of the event, letter id, time in ms, and the fields
# of that kind. Key: the letter id; tag: the kind. A reader ignores unknown kinds, versions and additional fields.

VERSION: Final = 1
HISTORY_BYTES: Final = 256 << 10
"""Space in a record for everything except the message's body. The letter's history is bounded and far smaller."""

EVENT_KINDS: Final[Mapping[type[Any], str]] = {
    model.KeepEvent: "keep",
    model.BeginEvent: "begin",
    model.NoteEvent: "note",
    model.PassEvent: "pass",
    model.TakeEvent: "take",
    model.RenewEvent: "renew",
    model.HandledEvent: "handled",
    model.FailedEvent: "failed",
    model.PutOffEvent: "put_off",
    model.GiveBackEvent: "give_back",
    model.RetryEvent: "retry",
    model.DropEvent: "drop",
    model.AdoptEvent: "adopt",
    model.ClaimEvent: "claim",
    model.DepartEvent: "depart",
    model.ArriveEvent: "arrive",
    model.ReturnEvent: "return",
}
_BY_KIND: Final = {kind: shape for shape, kind in EVENT_KINDS.items()}
_LETTER: Final = (
    "group topic incarnation partition offset next_offset ordinal message_id appended_ms epoch payload_bytes"
    " calls calls_left redrives key tag broker"
).split()


def encode_event(id: str, event: model.Event, bytes_max: int) -> RecordContent:
    """Encode an event, but without the letter's body if a record of `bytes_max` has no room for the body."""
    kind = EVENT_KINDS[type(event)]
    fields = [list(each) if isinstance(each, tuple) else each for each in event[1:]]
    if isinstance(event, model.KeepEvent):
        fields = [event.next_ms, *_encode_letter(event.letter, bytes_max), event.begun]
    elif isinstance(event, model.BeginEvent | model.NoteEvent):
        fields = [*event[2:], *_encode_letter(event.letter, bytes_max)]
    payload = pack([VERSION, kind, id, event.at_ms, *fields])
    return RecordContent(payload, encode_attribute(event.at_ms, id, kind), kind)


def decode_event(message: ReceivedMessage[Any]) -> tuple[str, model.Event] | None:
    """Decode a record to letter id and event; None for invalid data, unknown version or kind."""
    try:
        found = unpack(message.payload or b"")
        version, kind, id, at_ms, *fields = found
        if version != VERSION or kind not in _BY_KIND:
            return None
        event = _decode_event_fields(_BY_KIND[kind], int(at_ms), fields, str(id))
        _check_fields(event)
        return str(id), event
    except (Malformed, TypeError, ValueError, IndexError):
        return None


@cache
def _field_types(shape: Any) -> dict[str, Any]:
    """Return name -> type of the fields of the class `shape` that are checked: those with a plain type or a union."""
    hints = get_type_hints(shape)
    return {name: kind for name, kind in hints.items() if get_origin(kind) in (None, UnionType)}


def _check_fields(found: Any) -> None:
    """Raise TypeError or ValueError for an invalid field. The check is needed: any client can write to the topic."""
    for name, kind in _field_types(found.__class__).items():
        value = getattr(found, name)
        if not isinstance(value, kind):
            raise TypeError(f"{name}={value!r}")
        if name.endswith("_ms") and not -1 <= value <= BORN_MS_MAX:
            raise ValueError(f"{name}={value!r}")
        if isinstance(value, Letter | Failure | model.RedrivePosition | model.LetterBody):
            _check_fields(value)
    if isinstance(found, Letter):
        for each in found.failures:
            _check_fields(each)


def _encode_letter(letter: Letter, bytes_max: int) -> list[Any]:
    """Return the encoded form of a letter, without the body if a record of `bytes_max` has no room for the body."""
    body = letter.body
    assert body is not None, "kept with its body"
    size = len(body.payload or b"") + len(body.attribute or b"")
    stored = list(body) if size + HISTORY_BYTES <= bytes_max else None
    failures = [list(each) for each in letter.failures]
    return [[getattr(letter, name) for name in _LETTER], failures, stored]


def _decode_letter(fields: list[Any], id: str) -> Letter:
    """Decode the result of `_encode_letter`. Raises TypeError, ValueError, IndexError for malformed fields."""
    known, failures, stored = fields[:3]
    given = dict(zip(_LETTER, known, strict=False))
    body = None if stored is None else model.LetterBody(*stored[:2])
    return Letter(id=id, **given, failures=tuple(Failure(*each[:3]) for each in failures), body=body)


def _decode_event_fields(shape: Any, at_ms: int, fields: list[Any], id: str) -> model.Event:
    """Create the event of class `shape`. Raises TypeError, ValueError, IndexError for fields that do not match."""
    if shape is model.KeepEvent:
        return model.KeepEvent(at_ms, _decode_letter(fields[1:], id), fields[0], any(fields[4:5]))
    if shape is model.BeginEvent:
        return model.BeginEvent(at_ms, _decode_letter(fields, id))
    if shape is model.NoteEvent:
        return model.NoteEvent(at_ms, _decode_letter(fields[1:], id), bool(fields[0]))
    fields = fields[: len(shape._fields) - 1]
    if shape in (model.FailedEvent, model.PutOffEvent):
        fields[1] = Failure(*fields[1][:3])
    if shape is model.DepartEvent:
        fields[1] = model.RedrivePosition(*fields[1][: len(model.RedrivePosition._fields)])
    event: model.Event = shape(at_ms, *fields)
    return event


Result = TypeVar("Result")

TIMEOUT_SECONDS: Final = 30.0
"""How long a method retries while the broker does not respond. The caller may then repeat the call."""
INDEX_AGE_MAX: Final = 1.0
"""Seconds for which `next_due_ms` does not read the topic again, because `next_due_id` has just read it."""
PARTITION: Final = 0


class TopicLetterStore:
    """Dead letters in a topic of the broker, for consumers without a disk of their own.

    The topic is a log of events, all in its first partition, so that all events have one order. A letter is the result
    of applying its events in that order (`LetterIndex`). To change a letter, the store appends an event and then reads
    the log up to that event: of two conflicting events the first in the log takes effect, the second has no effect. An
    event whose response was lost may still be appended later. Such a late event does no harm. If it has the token of a
    lease or redrive, it has no effect after the lease or redrive has ended; any other event takes effect only once.

    If two methods are called at the same time, the second waits. `create`: create the topic if it is missing.
    """

    def __init__(self, link: ClientConnection, topic: str, *, create: bool = True) -> None:
        self.name = f"{TOPIC_PREFIX}{topic}"
        self._link = link
        self._topic = topic
        self._create = create
        self._cluster = MetadataCache(link.now)
        self._method_ended: Event | None = None
        self._reset()

    def _reset(self) -> None:
        """Discard index, read offset and producer id, as for a topic that was never read."""
        self._index = LetterIndex()
        self._offset = -1
        self._index_read_at = -INDEX_AGE_MAX
        self._producer: ProducerPartition | None = None
        self._sequence = 0
        self._cluster.clear()

    def apply(self, steps: Sequence[Step]) -> Operation[list[Letter | None]]:
        """Append the events; return for each event the letter after it, or None if the event has no effect.

        If all are `KeepEvent`s, the topic is not read, since every state accepts a `KeepEvent`. Each letter is then
        returned as if no letter of the message had been stored before.
        """
        return (yield from self._run_alone(partial(self._append_and_read, steps))) if steps else []

    def _append_and_read(self, steps: Sequence[Step], until: float) -> Operation[list[Letter | None]]:
        """Append the events that would have an effect now, then read the log up to these events for their results.

        If events of other clients come before an appended event in the log, the appended event may have no effect.
        """
        if all(isinstance(event, model.KeepEvent) for _, event in steps):
            yield from self._append(steps, until)
            return [apply_event(None, event) for _, event in steps]
        yield from self._read_new_events(until)
        wanted = [step for step in steps if apply_event(self._index.letters.get(step[0]), step[1]) is not None]
        if not wanted:
            return [None] * len(steps)
        numbers = yield from self._append(wanted, until)
        found = yield from self._read_new_events(until, numbers)
        if any(each not in found for each in numbers):
            raise StoreFailed(
                f"{self.name} does not return what was appended to it: see tfmq topic show {self._topic}."
            )
        results = {step[0]: found[number] for step, number in zip(wanted, numbers, strict=True)}
        return [results.get(id) for id, _ in steps]

    def find(
        self, selection: Selection, after: PagePosition = FIRST_PAGE, count: int = PAGE_LETTERS, *, whole: bool = False
    ) -> Operation[list[Letter]]:
        yield from self._refresh_index()
        found = self._index.find(selection, after, count)
        if not whole:
            return found
        read = []
        for each in model.fit_page(found):
            try:
                letter = yield from self.get(each.id)
            except StoreFailed as failed:
                if failed.retriable:
                    raise
                letter = each  # The body of this letter is lost. Return the letter without it, and the other letters.
            if letter is not None:
                read.append(letter)
        return read

    def next_due_id(self, group: str, now_ms: int, broker: str = "") -> Operation[str | None]:
        yield from self._refresh_index()
        return self._index.next_due_id(group, now_ms, broker)

    def next_due_ms(self, group: str, broker: str = "") -> Operation[int | None]:
        if self._link.now() - self._index_read_at >= INDEX_AGE_MAX:
            yield from self._refresh_index()
        return self._index.next_due_ms(group, broker)

    def find_foreign_waiting(
        self, group: str, broker: str, after: PagePosition = FIRST_PAGE
    ) -> Operation[list[Letter]]:
        yield from self._refresh_index()
        return self._index.find_foreign_waiting(group, broker, after, PAGE_LETTERS)

    def failing_offsets(self, group: str, incarnation: int, partition: int) -> Operation[list[int]]:
        yield from self._refresh_index()
        key = (model.FAILING, group, incarnation, partition)
        return [
            each.offset
            for each in self._index.letters.values()
            if (each.state, each.group, each.incarnation, each.partition) == key
        ]

    def count_by_state(self) -> Operation[dict[tuple[str, str], int]]:
        yield from self._refresh_index()
        counted: dict[tuple[str, str], int] = {}
        for each in filter(Selection().holds, self._index.letters.values()):
            counted[each.group, each.state] = counted.get((each.group, each.state), 0) + 1
        return counted

    def get(self, id: str) -> Operation[Letter | None]:
        """Return a letter, read from its events. A body that no event has is read from the message's own topic."""
        yield from self._refresh_index()
        offsets = list(self._index.event_offsets.get(id, ()))
        if not offsets or self._producer is None:
            return None
        return (
            yield from load_full_letter(self._link, self._producer, id, offsets, self._link.now() + TIMEOUT_SECONDS)
        )

    def exists(self) -> Operation[bool]:
        found = yield from fetch_topics(self._link, self._cluster, [self._topic])
        return bool(found)

    def delete_expired(self, now_ms: int) -> Operation[int]:
        """Remove from memory the letters whose events the topic's retention deleted. Always returns 0."""
        return (yield from self._run_alone(self._delete_expired))

    def _delete_expired(self, until: float) -> Operation[int]:
        if self._producer is not None:
            start = yield from idempotent_send.locate_log_end(self._link, self._producer, BY_EARLIEST, until)
            self._index.delete_before(start)
        return 0

    def close(self) -> None:
        """Do nothing: the connection belongs to the caller."""

    def _run_alone(self, work: Callable[[float], Operation[Result]]) -> Operation[Result]:
        """Run `work(deadline)` when no other method of this store is running; other methods wait until `work` ends."""
        while self._method_ended is not None:
            yield Wait((self._method_ended,))
        self._method_ended = ended = Event()
        try:
            return (yield from work(self._link.now() + TIMEOUT_SECONDS))
        finally:
            self._method_ended = None
            ended.complete()

    def _refresh_index(self) -> Operation[None]:
        yield from self._run_alone(self._read_new_events)

    def _find_partition(self, until: float) -> Operation[ProducerPartition]:
        """Return the store's partition. If the topic is missing, create it, or without `create` raise UnknownTopic."""
        if self._producer is None:
            found = yield from fetch_topics(self._link, self._cluster, [self._topic], create=self._create)
            if not found:
                raise UnknownTopic(f"There is no topic {self._topic}: no consumer stored dead letters in it yet.")
            self._producer = ProducerPartition(self._topic, found[0].incarnation, PARTITION, 0)
        return self._producer

    def _read_new_events(self, until: float, watched: Collection[int] = ()) -> Operation[dict[int, Letter | None]]:
        """Apply new events to the index. Return record id -> letter after that event, for the record ids `watched`."""
        results: dict[int, Letter | None] = {}
        wanted = frozenset(watched)
        while True:
            try:
                stream = yield from self._find_partition(until)
                if self._offset < 0:
                    self._offset = yield from idempotent_send.locate_log_end(self._link, stream, BY_EARLIEST, until)
                chunk = yield from idempotent_send.fetch_messages(self._link, stream, self._offset, until)
            # Retention deleted events before they were applied to the index. Their letters have expired with them.
            except OffsetOutOfRange:
                self._offset = -1
                continue
            except UnknownTopic:
                again = self._producer is not None and self._create and not watched
                self._reset()
                if not again:
                    raise
                continue
            for message in chunk.messages:
                letter = self._index.apply(message)
                if message.id in wanted:
                    results[message.id] = letter
            self._offset = chunk.next_offset
            if chunk.at_end:
                self._index_read_at = self._link.now()
                return results

    def _append(self, steps: Sequence[Step], until: float) -> Operation[list[int]]:
        """Append events durably, all or none. Return the ids of their records.

        If the broker no longer knows the producer id or the topic, the append is repeated once with a new producer id.
        """
        self._index_read_at = -INDEX_AGE_MAX
        try:
            return (yield from self._append_once(steps, until))
        except UnknownProducer:
            # The broker expired the idle producer id, and did not store this append.
            self._drop_producer_id()
        except UnknownTopic:  # The topic was deleted, and perhaps created again.
            self._reset()
        return (yield from self._append_once(steps, until))

    def _append_once(self, steps: Sequence[Step], until: float) -> Operation[list[int]]:
        stream = yield from self._find_partition(until)
        if not stream.producer_id or remaining_sequences(self._sequence) < len(steps):
            stream = stream._replace(producer_id=(yield from idempotent_send.lease_producer_id(self._link, until)))
            self._producer, self._sequence = stream, 0
        most = self._link.limits["message_bytes"]
        contents = [encode_event(id, event, most) for id, event in steps]
        first, sent = self._sequence, False
        try:
            yield from idempotent_send.send_idempotent(self._link, stream, first, contents, until)
            sent = True
        finally:
            if not sent and self._producer is not None:
                # It is unknown whether the append is stored, so the next append must use another producer id.
                self._drop_producer_id()
        self._sequence = first + len(contents)
        return [pack_id(stream.producer_id, first + number) for number in range(len(contents))]

    def _drop_producer_id(self) -> None:
        assert self._producer is not None, "found before"
        self._producer, self._sequence = self._producer._replace(producer_id=0), 0


EVENT_BYTES: Final = 64 << 10
"""Fetch size for one event; the broker returns a larger block completely."""


def load_full_letter(
    link: ClientConnection, partition: ProducerPartition, id: str, offsets: Iterable[int], until: float
) -> Operation[Letter | None]:
    """Read the letter `id` with body and tracebacks from its events at `offsets`; None if all are deleted.

    If no event has the body, it is read from the topic of the message. Raises StoreFailed if the message is deleted.
    """
    letter: Letter | None = None
    for offset in offsets:
        message = yield from _read_message(link, partition, offset, until)
        found = None if message is None else decode_event(message)
        if found is not None and found[0] == id:
            letter = apply_event(letter, found[1]) or letter
    if letter is None or letter.body is not None:
        return letter
    return replace(letter, body=(yield from _read_body(link, letter, until)))


def has_message(link: ClientConnection, letter: Letter, until: float) -> Operation[bool]:
    """Return whether the broker has the letter's message: same offset, id and append time."""
    try:
        message = yield from _read_original(link, letter, until)
    except Damaged:
        return False
    return message is not None and message.origin.append_ms == letter.appended_ms


def _read_body(link: ClientConnection, letter: Letter, until: float) -> Operation[model.LetterBody]:
    """Read the letter's body from the topic of the message. Raises StoreFailed if the message is deleted."""
    message = yield from _read_original(link, letter, until)
    if message is None:
        raise StoreFailed(
            f"The message of {letter.id} was too large to be copied, and is deleted at its own location,"
            f" {letter.origin}.",
            retriable=False,
        )
    return model.LetterBody(message.payload, message.attribute_bytes)


def _read_original(link: ClientConnection, letter: Letter, until: float) -> Operation[ReceivedMessage[Any] | None]:
    """Return the message of a dead letter from the topic where its handling failed; None if one of them is deleted."""
    original = ProducerPartition(letter.topic, letter.incarnation, letter.partition, 0)
    try:
        message = yield from _read_message(link, original, letter.offset, until)
    except UnknownTopic:
        return None
    return message if message is not None and message.id == letter.message_id else None


def _read_message(
    link: ClientConnection, partition: ProducerPartition, offset: int, until: float
) -> Operation[ReceivedMessage[Any] | None]:
    """Return the message at an offset of `partition`, or None if it is deleted."""
    try:
        chunk = yield from idempotent_send.fetch_messages(link, partition, offset, until, EVENT_BYTES)
    except OffsetOutOfRange:
        return None
    return next((each for each in chunk.messages if each.offset == offset), None)
