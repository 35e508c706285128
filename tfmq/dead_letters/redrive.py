"""Redrive of dead letters to a topic, each exactly once, also if the redrive is killed.

For each batch: claim the letters, so that no other redrive sends them; record their producer sequences, after
which they may have been sent; send; record that they are stored. The next redrive starts with letters whose
sequences are recorded and which are not recorded as stored: it sends them with the same sequences, and the
broker stores each once (`tfmq.dead_letters.idempotent_send`).

A run is a list of letters with consecutive producer sequences. What became of a run is taken from the
broker's responses only, so it can be repeated after a crash at any point: the broker has the records, or it
is certain that it never will, or they remain in transit.
"""

from __future__ import annotations

import itertools
import uuid
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from tfmq.client.connection.connection import Link
from tfmq.client.connection.requests import Cluster, Topic, ask, find_topics
from tfmq.client.operation import Operation, Wait
from tfmq.client.send.idempotent_send import (
    Content,
    Stream,
    close_stream,
    find_records,
    lease_id,
    locate_end,
    send_numbered,
)
from tfmq.dead_letters import model
from tfmq.dead_letters.model import (
    DEAD,
    PAGE_LETTERS,
    REDRIVING,
    START,
    WAITING,
    Journey,
    Letter,
    Page,
    Selection,
)
from tfmq.dead_letters.open import find_broker
from tfmq.dead_letters.store import TOPIC_PREFIX, Shelf, Step
from tfmq.dead_letters.topic_store import stands_here
from tfmq.errors import (
    BadRequest,
    Damaged,
    DecodeFailed,
    MessageTooLarge,
    OffsetOutOfRange,
    SequenceGap,
    StaleProducer,
    UnknownProducer,
    UnknownTopic,
)
from tfmq.ids import sequences_left
from tfmq.message import recount_attribute
from tfmq.protocol.commands import BY_LATEST, Ping

LOOP_LIMIT: Final = 3
"""Redrives of a message after which it is skipped, because it will probably fail again."""
BATCH_BYTES: Final = 1 << 20
BATCHES_PER_SECOND: Final = 10
"""Maximum batches per second where a rate is set, to avoid bursts."""
TIMEOUT_SECONDS: Final = 60.0
"""How long one batch is tried.

After that it remains in transit, and the next redrive resumes it.
"""


class Wish(NamedTuple):
    """What to redrive.

    `selection` of letters (dead ones; with ids also waiting ones) · `to_topic`: instead of the original
    topics · `rate`: maximum letters per second · `limit`: maximum letters in all · `loop_limit`: letters
    redriven so often are skipped · `dry`: only count · `force`: also letters of another broker.
    """

    selection: Selection = Selection()
    to_topic: str | None = None
    rate: float | None = None
    limit: int | None = None
    loop_limit: int = LOOP_LIMIT
    dry: bool = False
    force: bool = False


@dataclass
class Report:
    """Result of a redrive.

    `sent`: letters now in a topic · `resumed`: of these, letters that were in transit before · `looping`:
    skipped because of the loop limit · `unsendable`, `unsure`: a sentence for each · `targets`: topic ->
    count · `foreign`: skipped letters of other brokers: broker id ("": unknown) -> count · `broker`: id of
    the broker that was reached.
    """

    sent: int = 0
    resumed: int = 0
    looping: int = 0
    unsendable: list[str] = field(default_factory=list)
    unsure: list[str] = field(default_factory=list)
    targets: dict[str, int] = field(default_factory=dict)
    foreign: dict[str, int] = field(default_factory=dict)
    broker: str = ""

    def count(self, topic: str, number: int) -> None:
        """Add `number` to the count of `topic`."""
        if number:
            self.targets[topic] = self.targets.get(topic, 0) + number


class Redrive:
    """One redrive.

    `wall_clock` returns seconds since 1970; `on_sent(n)` is called when `n` more letters are in their topics.
    """

    def __init__(
        self,
        shelf: Shelf,
        link: Link,
        wish: Wish,
        *,
        wall_clock: Callable[[], float],
        told: Callable[[int], object] = lambda sent: None,
        report: Report | None = None,
    ) -> None:
        if wish.rate is not None and not 0 < wish.rate < float("inf"):
            raise BadRequest(f"{wish.rate:g} is no rate: give a number of messages a second, above 0.")
        self.report = Report() if report is None else report
        self._shelf = shelf
        self._link = link
        self._wish = wish
        self._wall_clock = wall_clock
        self._told = told
        self._token = uuid.uuid4().hex
        self._cluster = Cluster(link.now)
        self._topics: dict[str, Topic] = {}
        self._streams: dict[tuple[str, int], tuple[Stream, int]] = {}
        self._next_at = 0.0

    def run(self) -> Operation[Report]:
        """Resume letters in transit, then send the selected ones.

        Raises what prevents it from continuing; then letters may remain in transit, and `report` has what was
        done.
        """
        started_ms = self._now_ms()
        self.report.broker = yield from find_broker(self._link, self._until())
        if not self._wish.dry:
            yield from self._resume()
        until_ms = self._wish.selection.until_ms
        until_ms = started_ms + 1 if until_ms is None else min(until_ms, started_ms + 1)
        states = (DEAD, WAITING) if self._wish.selection.ids else (DEAD,)
        chosen = self._wish.selection._replace(states=states, until_ms=until_ms)
        page = START
        while self._room():
            letters = yield from self._shelf.find(chosen, page, PAGE_LETTERS, whole=not self._wish.dry)
            if not letters:
                break
            page = Page(letters[-1].kept_ms, letters[-1].id)
            yield from self._send_page(letters)
        return self.report

    # Letters in transit

    def _resume(self) -> Operation[None]:
        """Resume all letters in transit; claimed ones without a sequence are dead again."""
        page = START
        under_way = Selection(states=(REDRIVING,))
        while letters := (yield from self._shelf.find(under_way, page, PAGE_LETTERS, whole=True)):
            page = Page(letters[-1].kept_ms, letters[-1].id)
            unsent = [each for each in letters if each.journey is None]
            yield from self._shelf.apply(
                [(each.id, model.Return(self._now_ms(), each.token)) for each in unsent]
            )
            for run in runs_of([each for each in letters if each.journey is not None]):
                self.report.resumed += (yield from self._go_on(run)).arrived

    def _go_on(self, run: Sequence[Letter]) -> Operation[Fate]:
        """Resume a run; if a body is lost, close its producer and find out which letters are stored."""
        if all(each.body is not None for each in run):
            return (yield from self._depart(run))
        fate = yield from close_run(self._link, run, self._until(), self._now_ms)
        yield from self._settled(run, fate)
        return fate

    # Selected letters

    def _send_page(self, letters: Sequence[Letter]) -> Operation[None]:
        """Send a page of letters, grouped by target partition."""
        own = []
        for each in letters:
            if (yield from self._is_own(each)):
                own.append(each)
            else:
                self.report.foreign[each.broker] = self.report.foreign.get(each.broker, 0) + 1
        able = [each for each in own if each.redrives < self._wish.loop_limit]
        self.report.looping += len(own) - len(able)
        if self._wish.limit is not None:
            able = able[: self._wish.limit - self._done()]
        by_target: dict[tuple[str, int], list[Letter]] = {}
        for each in able:
            target = yield from self._target(each)
            by_target.setdefault(target, []).append(each)
        for target, meant in by_target.items():
            if self._wish.dry:
                self.report.count(target[0], len(meant))
                continue
            for batch in self._batches(meant):
                yield from self._pace(len(batch))
                yield from self._send_batch(target, batch)

    def _is_own(self, letter: Letter) -> Operation[bool]:
        """Return whether the letter belongs to the broker that is sent to.

        One without a broker id does if the broker has its message, or the store itself.
        """
        if self._wish.force or letter.broker == self.report.broker:
            return True
        if letter.broker:
            return False
        if self._shelf.name.startswith(TOPIC_PREFIX):
            return True
        return (yield from stands_here(self._link, letter, self._until()))

    def _target(self, letter: Letter) -> Operation[tuple[str, int]]:
        """Return topic and partition to send to.

        That is the original partition; in another topic the key decides, or else the partition number. Raises
        UnknownTopic.
        """
        name = self._wish.to_topic or letter.topic
        if name not in self._topics:
            found = yield from find_topics(self._link, self._cluster, [name])
            if not found:
                raise UnknownTopic(
                    f"There is no topic {name}: create it (tfmq topic create {name}), or name another (--to)."
                )
            self._topics[name] = found[0]
        count = len(self._topics[name].partitions)
        if name == letter.topic and letter.partition < count:
            return name, letter.partition
        if letter.key is None:
            return name, letter.partition % count
        key = key_of(letter)
        data = key.encode() if isinstance(key, str) else key
        return name, zlib.crc32(data) % count

    def _batches(self, letters: Sequence[Letter]) -> Iterator[list[Letter]]:
        """Split the letters into batches; those that cannot be sent are reported."""
        most = PAGE_LETTERS if self._wish.rate is None else max(1, int(self._wish.rate / BATCHES_PER_SECOND))
        batch: list[Letter] = []
        size = 0
        for each in letters:
            if not self._sendable(each):
                continue
            own = max(0, each.payload_bytes)
            if batch and (len(batch) >= most or size + own > BATCH_BYTES):
                yield batch
                batch, size = [], 0
            batch.append(each)
            size += own
        if batch:
            yield batch

    def _sendable(self, letter: Letter) -> bool:
        """Return whether a letter can be sent; report it otherwise."""
        if letter.body is None:
            self.report.unsendable.append(
                f"{letter.id} cannot be sent: it was too large to be copied, and is deleted at its own location,"
                f" {letter.origin}."
            )
            return False
        try:
            content_of_letter(letter)
        except (DecodeFailed, MessageTooLarge) as error:
            self.report.unsendable.append(f"{letter.id} cannot be sent: {error}")
            return False
        return True

    def _pace(self, count: int) -> Operation[None]:
        """Wait until the rate allows `count` more."""
        if self._wish.rate is None:
            return
        while (wait := self._next_at - self._link.now()) > 0:
            yield Wait((), wait)
        self._next_at = max(self._next_at, self._link.now()) + count / self._wish.rate

    def _send_batch(self, target: tuple[str, int], letters: Sequence[Letter]) -> Operation[None]:
        """Claim and send a batch. If the broker rejects it, send its letters one by one."""
        waiting = bool(self._wish.selection.ids)
        claim = model.Claim(self._now_ms(), self._token, waiting)
        claimed = yield from self._shelf.apply([(each.id, claim) for each in letters])
        won = [each for each, found in zip(letters, claimed, strict=True) if found is not None]
        if not won:
            return
        fate = yield from self._depart((yield from self._placed(target, won)))
        if fate.refused and len(won) > 1:  # the broker does not say which letter it rejects
            for each in won:
                yield from self._send_batch(target, [each])
        elif fate.refused:
            self.report.unsendable.append(f"{won[0].id} cannot be sent: {fate.refused}")

    def _placed(self, target: tuple[str, int], letters: Sequence[Letter]) -> Operation[list[Letter]]:
        """Record producer sequences for the letters, and return these.

        [] if another redrive interfered.
        """
        stream, first = yield from self._stream(target, len(letters))
        end = yield from locate_end(self._link, stream, BY_LATEST, self._until())
        node = self._link.hello.node if self._link.hello is not None else ""
        steps = []
        for sequence, each in enumerate(letters, first):
            journey = Journey(*stream, sequence, end, node)
            steps.append((each.id, model.Depart(self._now_ms(), self._token, journey)))
        placed = yield from self._shelf.apply(steps)
        found = [
            replace(each, token=self._token, journey=step[1].journey)
            for each, step, now in zip(letters, steps, placed, strict=True)
            if now is not None
        ]
        if len(found) == len(letters):
            self._streams[target] = (stream, first + len(letters))
            return found
        if found:  # Their sequences have a gap, and another redrive may have sent some of them by now.
            yield from self._settled(
                found, (yield from close_run(self._link, found, self._until(), self._now_ms))
            )
        return []

    def _stream(self, target: tuple[str, int], count: int) -> Operation[tuple[Stream, int]]:
        """Return a producer for the target partition, and its next sequence."""
        known = self._streams.get(target)
        if known is not None and sequences_left(known[1]) >= count:
            return known
        producer_id = yield from lease_id(self._link, self._until())
        topic, partition = target
        return Stream(topic, self._topics[topic].incarnation, partition, producer_id), 0

    def _depart(self, letters: Sequence[Letter]) -> Operation[Fate]:
        """Send a run and record the result."""
        if not letters:
            return Fate()
        fate = yield from send_run(self._link, letters, self._until(), self._now_ms)
        yield from self._settled(letters, fate)
        return fate

    def _settled(self, letters: Sequence[Letter], fate: Fate) -> Operation[None]:
        """Record the result of a run, in the store and in the report."""
        yield from self._shelf.apply(fate.steps)
        journey = letters[0].journey
        assert journey is not None
        self.report.sent += fate.arrived
        self.report.count(journey.topic, fate.arrived)
        self.report.unsure += fate.unsure
        self._told(fate.arrived)
        if fate.arrived < len(letters):
            # The producer is closed or in an unknown state, so the next run must use another one.
            self._streams.pop((journey.topic, journey.partition), None)

    def _done(self) -> int:
        """Return the number of selected letters that were sent."""
        return sum(self.report.targets.values()) - self.report.resumed

    def _room(self) -> bool:
        """Return whether the limit allows more letters."""
        return self._wish.limit is None or self._done() < self._wish.limit

    def _until(self) -> float:
        """Return the deadline for a request, by the connection's clock."""
        return self._link.now() + TIMEOUT_SECONDS

    def _now_ms(self) -> int:
        """Return the time in ms since 1970."""
        return round(self._wall_clock() * 1000)


def key_of(letter: Letter) -> bytes | str:
    """Return the exact key of a letter.

    A database stores it as text, which is lossy for some keys.
    """
    known = letter.key or b""
    if letter.body is None:
        return known
    with suppress(DecodeFailed):
        known = letter.attribute().key or known
    return known


def runs_of(letters: Sequence[Letter]) -> Iterator[list[Letter]]:
    """Group letters in transit into runs: one producer, no gap in the sequences, limited size."""

    def place(letter: Letter) -> tuple[tuple[str, Stream], int]:
        assert letter.journey is not None
        return (letter.journey.node, Stream(*letter.journey[:4])), letter.journey.sequence

    for _, group in itertools.groupby(sorted(letters, key=place), key=lambda each: place(each)[0]):
        run: list[Letter] = []
        size = 0
        for each in group:
            own = max(0, each.payload_bytes)
            if run and (place(each)[1] != place(run[-1])[1] + 1 or size + own > BATCH_BYTES):
                yield run
                run, size = [], 0
            run.append(each)
            size += own
        if run:
            yield run


class Fate(NamedTuple):
    """Result of sending or closing a run.

    `steps`: events for the store; `arrived`, `returned`: numbers of letters stored and not stored; `unsure`:
    a sentence for each letter where that is unknown; `refused`: why the broker rejects a letter for ever, or
    "".
    """

    steps: tuple[Step, ...] = ()
    arrived: int = 0
    returned: int = 0
    unsure: tuple[str, ...] = ()
    refused: str = ""

    def joined(self, other: Fate) -> Fate:
        """Return the sum of two results."""
        return Fate(
            self.steps + other.steps,
            self.arrived + other.arrived,
            self.returned + other.returned,
            self.unsure + other.unsure,
            self.refused or other.refused,
        )


def content_of_letter(letter: Letter) -> Content:
    """Encode a letter as a record: the original message with updated counts.

    Raises DecodeFailed, MessageTooLarge.
    """
    assert letter.body is not None, "asked for with its body"
    attribute = letter.attribute()
    counted = recount_attribute(letter.body.attribute, letter.calls, attribute.redrives + 1)
    return Content(letter.body.payload, counted, attribute.tag)


def stream_of(journey: Journey) -> Stream:
    """Return the producer of a letter in transit."""
    return Stream(journey.topic, journey.incarnation, journey.partition, journey.producer_id)


def send_run(
    link: Link, letters: Sequence[Letter], until: float, now_ms: Callable[[], int]
) -> Operation[Fate]:
    """Send a run. Raises errors after which all its letters remain in transit."""
    first = _journey(letters[0])
    stream = stream_of(first)
    contents = [content_of_letter(each) for each in letters]
    elsewhere = yield from _elsewhere(link, first, until)
    if elsewhere:
        return Fate(unsure=tuple(f"{each.id} {elsewhere}" for each in letters))
    try:
        offsets = yield from send_numbered(link, stream, first.sequence, contents, until)
    except BadRequest as error:
        if len(letters) > 1:
            # Perhaps another redrive has sent a part of the run, the part that was recorded then.
            return (yield from _one_by_one(link, letters, until, now_ms))
        return (yield from close_run(link, letters, until, now_ms))._replace(refused=error.sentence)
    except MessageTooLarge as error:
        return (yield from close_run(link, letters, until, now_ms))._replace(refused=error.sentence)
    except (SequenceGap, StaleProducer, UnknownProducer):
        return (yield from close_run(link, letters, until, now_ms))
    except UnknownTopic:
        return Fate(unsure=_unsure(letters, f"topic {first.topic} was deleted since"))
    return _arrived(letters, offsets, now_ms())


def _elsewhere(link: Link, journey: Journey, until: float) -> Operation[str]:
    """Return an error text if the letters are in transit to another broker, otherwise ""."""
    if link.hello is None:
        yield from ask(link, Ping(), until)
    if link.hello is None or journey.node in ("", link.hello.node):
        return ""
    return f"is in transit to another broker ({journey.node}): redrive it with that one's address (--servers)"


def _one_by_one(
    link: Link, letters: Sequence[Letter], until: float, now_ms: Callable[[], int]
) -> Operation[Fate]:
    """Send the letters as runs of one."""
    whole = Fate()
    for each in letters:
        whole = whole.joined((yield from send_run(link, [each], until, now_ms)))
    return whole


def close_run(
    link: Link, letters: Sequence[Letter], until: float, now_ms: Callable[[], int]
) -> Operation[Fate]:
    """Close the producer of a run: stored letters are redriven, the others will never be stored."""
    stream = stream_of(_journey(letters[0]))
    journeys = [_journey(each) for each in letters]
    try:
        last = yield from close_stream(link, stream, until)
        found = {each.sequence: -1 for each in journeys if each.sequence <= last}
    except UnknownProducer:
        since = min(each.from_offset for each in journeys)
        try:
            found = yield from find_records(link, stream, [each.sequence for each in journeys], since, until)
        except (OffsetOutOfRange, Damaged, UnknownTopic) as error:
            return Fate(unsure=_unsure(letters, str(error)))
    except UnknownTopic as error:
        return Fate(unsure=_unsure(letters, str(error)))
    there = [each for each in letters if _journey(each).sequence in found]
    others = [each for each in letters if _journey(each).sequence not in found]
    arrived = _arrived(there, [found[_journey(each).sequence] for each in there], now_ms())
    return arrived.joined(_returned(others, now_ms()))


def _arrived(letters: Sequence[Letter], offsets: Sequence[int], now_ms: int) -> Fate:
    """Return the result for letters that are stored."""
    steps: list[Step] = []
    for each, offset in zip(letters, offsets, strict=True):
        journey = _journey(each)
        steps.append((each.id, model.Arrive(now_ms, journey.producer_id, journey.sequence, offset)))
    return Fate(tuple(steps), arrived=len(steps))


def _returned(letters: Sequence[Letter], now_ms: int) -> Fate:
    """Return the result for letters that are certainly not stored."""
    steps: list[Step] = []
    for each in letters:
        journey = _journey(each)
        steps.append((each.id, model.Return(now_ms, each.token, journey.producer_id, journey.sequence)))
    return Fate(tuple(steps), returned=len(steps))


def _unsure(letters: Sequence[Letter], reason: str) -> tuple[str, ...]:
    """Return a sentence for each letter that may be stored."""
    return tuple(
        f"{each.id} may be in {_journey(each).topic}-{_journey(each).partition} already, which is unknown now:"
        f" {reason.rstrip('.')}"
        for each in letters
    )


def _journey(letter: Letter) -> Journey:
    """Return the redrive position of a letter in transit."""
    assert letter.journey is not None, "its place is settled"
    return letter.journey
