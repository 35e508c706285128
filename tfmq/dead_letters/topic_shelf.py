"""Dead letters in a topic of the broker, for consumers that have no disk of their own.

The topic is a log of events, all in its first partition, so that they have one order; what a letter is, is what its
events add up to (`Fold`). Who wants to change a letter appends the event and reads on until it comes by: of two who
want the same the log says who was first, and the other is told so. An event whose answer was lost may be appended, and
come by later; it does nothing then that was not wanted: an event bears the token of who wanted it, or is done once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from tfmq.client.cluster import Cluster
from tfmq.client.link import Link
from tfmq.client.numbered import Content, Stream, lease_id, locate_end, read_chunk, send_numbered
from tfmq.client.operations import find_topics
from tfmq.client.waiting import Flag, Operation, Wait
from tfmq.dead_letters import events
from tfmq.dead_letters.address import TOPIC_PREFIX
from tfmq.dead_letters.course import after
from tfmq.dead_letters.fold import Fold
from tfmq.dead_letters.letter import Letter
from tfmq.dead_letters.selection import PAGE_LETTERS, START, Page, Selection, fitting
from tfmq.dead_letters.shelf import Step
from tfmq.dead_letters.topic_events import content_of
from tfmq.dead_letters.whole import whole_letter
from tfmq.errors import OffsetOutOfRange, StoreFailed, UnknownProducer, UnknownTopic
from tfmq.ids import pack_id, sequences_left
from tfmq.protocol.commands import BY_EARLIEST

TIMEOUT_SECONDS: Final = 30.0
"""How long one verb asks a broker that does not answer; then its caller is told, and may ask again."""
LOOK_SECONDS: Final = 1.0
"""When the next one is due is asked right behind what is due now: one look at the broker serves both."""
PARTITION: Final = 0


class TopicShelf:
    """See the module. One verb at a time; the others wait. `create`: make the topic where it is missing."""

    def __init__(self, link: Link, topic: str, *, create: bool = True) -> None:
        self.name = f"{TOPIC_PREFIX}{topic}"
        self._link = link
        self._topic = topic
        self._create = create
        self._cluster = Cluster(link.now)
        self._busy: Flag | None = None
        self._forget()

    def _forget(self) -> None:
        """Nothing is known of the topic."""
        self._fold = Fold()
        self._offset = -1
        self._looked_at = -LOOK_SECONDS
        self._stream: Stream | None = None
        self._sequence = 0
        self._cluster.clear()

    # The verbs

    def apply(self, steps: Sequence[Step]) -> Operation[list[Letter | None]]:
        """What is kept is appended without a look: whatever was there, it will be kept."""
        if not steps:
            return []
        yield from self._turn()
        try:
            until = self._link.now() + TIMEOUT_SECONDS
            if all(isinstance(event, events.Keep) for _, event in steps):
                yield from self._append(steps, until)
                return [after(None, event) for _, event in steps]
            return (yield from self._changed(steps, until))
        finally:
            self._pass_on()

    def _changed(self, steps: Sequence[Step], until: float) -> Operation[list[Letter | None]]:
        yield from self._catch_up(until)
        wanted = [step for step in steps if after(self._fold.letters.get(step[0]), step[1]) is not None]
        if not wanted:
            return [None] * len(steps)
        numbers = yield from self._append(wanted, until)
        found = yield from self._catch_up(until, numbers)
        if any(each not in found for each in numbers):
            raise StoreFailed(
                f"{self.name} does not give back what was appended to it: see tfmq topic show {self._topic}."
            )
        behind = {step[0]: found[number] for step, number in zip(wanted, numbers, strict=True)}
        return [behind.get(id) for id, _ in steps]

    def find(
        self, selection: Selection, after: Page = START, count: int = PAGE_LETTERS, *, whole: bool = False
    ) -> Operation[list[Letter]]:
        yield from self._look()
        found = self._fold.find(selection, after, count)
        if not whole:
            return found
        read = []
        for each in fitting(found):
            try:
                letter = yield from self.get(each.id)
            except StoreFailed as failed:
                if failed.retriable:
                    raise
                letter = each  # its body is gone: that is no reason to show nobody the others
            if letter is not None:
                read.append(letter)
        return read

    def due(self, group: str, now_ms: int, broker: str = "") -> Operation[str | None]:
        yield from self._look()
        return self._fold.due(group, now_ms, broker)

    def next_due_ms(self, group: str, broker: str = "") -> Operation[int | None]:
        if self._link.now() - self._looked_at >= LOOK_SECONDS:
            yield from self._look()
        return self._fold.next_due_ms(group, broker)

    def waiting_for_others(self, group: str, broker: str, after: Page = START) -> Operation[list[Letter]]:
        yield from self._look()
        return self._fold.waiting_for_others(group, broker, after, PAGE_LETTERS)

    def counts(self) -> Operation[dict[tuple[str, str], int]]:
        yield from self._look()
        counted: dict[tuple[str, str], int] = {}
        for each in filter(Selection().holds, self._fold.letters.values()):
            counted[each.group, each.state] = counted.get((each.group, each.state), 0) + 1
        return counted

    def get(self, id: str) -> Operation[Letter | None]:
        """Read again from its events, and from where the message stands if its body was too large for one."""
        yield from self._look()
        places = list(self._fold.places.get(id, ()))
        if not places or self._stream is None:
            return None
        return (
            yield from whole_letter(self._link, self._stream, id, places, self._link.now() + TIMEOUT_SECONDS)
        )

    def is_there(self) -> Operation[bool]:
        """Whether the broker has the topic."""
        found = yield from find_topics(self._link, self._cluster, [self._topic])
        return bool(found)

    def prune(self, now_ms: int) -> Operation[int]:
        """The topic's retention does it; what it took is forgotten here, too."""
        yield from self._turn()
        try:
            if self._stream is not None:
                until = self._link.now() + TIMEOUT_SECONDS
                self._fold.forget((yield from locate_end(self._link, self._stream, BY_EARLIEST, until)))
        finally:
            self._pass_on()
        return 0

    def close(self) -> None:
        """The link is another's."""

    # One at a time

    def _turn(self) -> Operation[None]:
        while self._busy is not None:
            yield Wait((self._busy,))
        self._busy = Flag()

    def _pass_on(self) -> None:
        busy, self._busy = self._busy, None
        if busy is not None:
            busy.settle()

    def _look(self) -> Operation[None]:
        """Know what is there by now."""
        yield from self._turn()
        try:
            yield from self._catch_up(self._link.now() + TIMEOUT_SECONDS)
        finally:
            self._pass_on()

    # Reading

    def _found(self, until: float) -> Operation[Stream]:
        """The partition, as a stream whose id is taken when something is sent."""
        if self._stream is None:
            found = yield from find_topics(self._link, self._cluster, [self._topic], create=self._create)
            if not found:
                raise UnknownTopic(
                    f"There is no topic {self._topic}: no consumer kept dead letters in it yet."
                )
            self._stream = Stream(self._topic, found[0].incarnation, PARTITION, 0)
        return self._stream

    def _catch_up(self, until: float, watched: Collection[int] = ()) -> Operation[dict[int, Letter | None]]:
        """Take all events that are there; what those of the records `watched` did."""
        behind: dict[int, Letter | None] = {}
        wanted = frozenset(watched)
        while True:
            try:
                stream = yield from self._found(until)
                if self._offset < 0:
                    self._offset = yield from locate_end(self._link, stream, BY_EARLIEST, until)
                chunk = yield from read_chunk(self._link, stream, self._offset, until)
            except OffsetOutOfRange:  # retention was faster; what it took has had its effect, or is gone
                self._offset = -1
                continue
            except UnknownTopic:
                again = self._stream is not None and self._create and not watched
                self._forget()
                if not again:
                    raise
                continue
            for message in chunk.messages:
                letter = self._fold.take(message)
                if message.id in wanted:
                    behind[message.id] = letter
            self._offset = chunk.next_offset
            if chunk.at_end:
                self._looked_at = self._link.now()
                return behind

    # Writing

    def _append(self, steps: Sequence[Step], until: float) -> Operation[list[int]]:
        """Appended and forced, all or none: the ids of their records."""
        self._looked_at = -LOOK_SECONDS
        try:
            return (yield from self._sent(steps, until))
        except UnknownProducer:
            self._drop_id()  # idle for so long that the broker forgot it, and had nothing of this under it
        except UnknownTopic:  # deleted, perhaps made again
            self._forget()
        return (yield from self._sent(steps, until))

    def _sent(self, steps: Sequence[Step], until: float) -> Operation[list[int]]:
        stream = yield from self._found(until)
        if not stream.producer_id or sequences_left(self._sequence) < len(steps):
            stream = stream._replace(producer_id=(yield from lease_id(self._link, until)))
            self._stream, self._sequence = stream, 0
        contents = self._contents(steps)
        first, sent = self._sequence, False
        try:
            yield from send_numbered(self._link, stream, first, contents, until)
            sent = True
        finally:
            if not sent and self._stream is not None:
                self._drop_id()  # nobody knows whether it is there: what follows goes under another one
        self._sequence = first + len(contents)
        return [pack_id(stream.producer_id, first + number) for number in range(len(contents))]

    def _contents(self, steps: Sequence[Step]) -> list[Content]:
        most = self._link.limits["message_bytes"]
        return [content_of(id, event, most) for id, event in steps]

    def _drop_id(self) -> None:
        assert self._stream is not None, "found before"
        self._stream, self._sequence = self._stream._replace(producer_id=0), 0
