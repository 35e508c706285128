"""Dead letters go to a topic again, each once, wherever the one who sends them is killed.

For each batch: claim the letters (nobody else sends them now), settle their places in a stream of one's own and write
them down (from now on they may have been sent), send, write down that they arrived. Whoever comes next begins with
those whose places are written down and of which nobody wrote that they arrived: it sends the same under the same
places, which the broker stores once (`tfmq.client.send.idempotent_send`).
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
"""A message that came back so often will come back again: somebody has to look at it first."""
BATCH_BYTES: Final = 1 << 20
BATCHES_PER_SECOND: Final = 10
"""With a rate, so many batches a second at most: no bursts."""
TIMEOUT_SECONDS: Final = 60.0
"""How long one batch is tried; then it stays under way, and the next redrive goes on with it."""


class Wish(NamedTuple):
    """`selection` of the letters (dead ones; with ids also waiting ones) · `to_topic` instead of where each came from ·
    `rate`: at most so many a second · `limit`: so many in all · `loop_limit`: those sent again so often are passed over
    · `dry`: only count · `force`: also those of another broker."""

    selection: Selection = Selection()
    to_topic: str | None = None
    rate: float | None = None
    limit: int | None = None
    loop_limit: int = LOOP_LIMIT
    dry: bool = False
    force: bool = False


@dataclass
class Report:
    """`sent`: in a topic now · `resumed`: of these had been under way · `looping`: passed over for the loop limit ·
    `unsendable`, `unsure`: a sentence for each · `targets`: topic -> how many · `foreign`: left, as they are of another
    broker: its id ("": not known) -> how many · `broker`: the one that was reached."""

    sent: int = 0
    resumed: int = 0
    looping: int = 0
    unsendable: list[str] = field(default_factory=list)
    unsure: list[str] = field(default_factory=list)
    targets: dict[str, int] = field(default_factory=dict)
    foreign: dict[str, int] = field(default_factory=dict)
    broker: str = ""

    def count(self, topic: str, number: int) -> None:
        """So many more for `topic`."""
        if number:
            self.targets[topic] = self.targets.get(topic, 0) + number


class Redrive:
    """See the module. `run` is one redrive; `wall_clock` gives seconds since 1970; `told(n)` when so many more are in
    their topics."""

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
        """First what is under way, then what is wished for. Raises what keeps it from going on; then what was begun
        stays under way, and `report` says how far it came."""
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

    # What is under way

    def _resume(self) -> Operation[None]:
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
        """With a run that somebody left; where a body is gone by now, its stream says what arrived of it."""
        if all(each.body is not None for each in run):
            return (yield from self._depart(run))
        fate = yield from close_run(self._link, run, self._until(), self._now_ms)
        yield from self._settled(run, fate)
        return fate

    # What is wished for

    def _send_page(self, letters: Sequence[Letter]) -> Operation[None]:
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
        """Whether it is of the broker that is sent to. One that does not say is, where that broker has its message, or
        the store itself."""
        if self._wish.force or letter.broker == self.report.broker:
            return True
        if letter.broker:
            return False
        if self._shelf.name.startswith(TOPIC_PREFIX):
            return True
        return (yield from stands_here(self._link, letter, self._until()))

    def _target(self, letter: Letter) -> Operation[tuple[str, int]]:
        """The partition that it came from; in another topic the one that the key, or the number, chooses."""
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
        """As many as are sent at once."""
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
        if letter.body is None:
            self.report.unsendable.append(
                f"{letter.id} cannot be sent: it was too large to be copied, and is not any more where it stood,"
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
        waiting = bool(self._wish.selection.ids)
        claim = model.Claim(self._now_ms(), self._token, waiting)
        claimed = yield from self._shelf.apply([(each.id, claim) for each in letters])
        won = [each for each, found in zip(letters, claimed, strict=True) if found is not None]
        if not won:
            return
        fate = yield from self._depart((yield from self._placed(target, won)))
        if fate.refused and len(won) > 1:  # the broker does not say which
            for each in won:
                yield from self._send_batch(target, [each])
        elif fate.refused:
            self.report.unsendable.append(f"{won[0].id} cannot be sent: {fate.refused}")

    def _placed(self, target: tuple[str, int], letters: Sequence[Letter]) -> Operation[list[Letter]]:
        """The letters with their places, written down; [] where somebody else came between."""
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
        if found:  # their places have a hole between them; another redrive may have sent some by now
            yield from self._settled(
                found, (yield from close_run(self._link, found, self._until(), self._now_ms))
            )
        return []

    def _stream(self, target: tuple[str, int], count: int) -> Operation[tuple[Stream, int]]:
        """The stream to `target` and its next sequence."""
        known = self._streams.get(target)
        if known is not None and sequences_left(known[1]) >= count:
            return known
        producer_id = yield from lease_id(self._link, self._until())
        topic, partition = target
        return Stream(topic, self._topics[topic].incarnation, partition, producer_id), 0

    def _depart(self, letters: Sequence[Letter]) -> Operation[Fate]:
        """Send a run, and write down what became of it."""
        if not letters:
            return Fate()
        fate = yield from send_run(self._link, letters, self._until(), self._now_ms)
        yield from self._settled(letters, fate)
        return fate

    def _settled(self, letters: Sequence[Letter], fate: Fate) -> Operation[None]:
        """Write down what became of a run."""
        yield from self._shelf.apply(fate.steps)
        journey = letters[0].journey
        assert journey is not None
        self.report.sent += fate.arrived
        self.report.count(journey.topic, fate.arrived)
        self.report.unsure += fate.unsure
        self._told(fate.arrived)
        if fate.arrived < len(
            letters
        ):  # its stream is closed, or nobody knows: what follows takes another id
            self._streams.pop((journey.topic, journey.partition), None)

    def _done(self) -> int:
        return sum(self.report.targets.values()) - self.report.resumed

    def _room(self) -> bool:
        return self._wish.limit is None or self._done() < self._wish.limit

    def _until(self) -> float:
        return self._link.now() + TIMEOUT_SECONDS

    def _now_ms(self) -> int:
        return round(self._wall_clock() * 1000)


def key_of(letter: Letter) -> bytes | str:
    """The very key of one that has a key: a table has it as text, which not all keys are."""
    known = letter.key or b""
    if letter.body is None:
        return known
    with suppress(DecodeFailed):
        known = letter.attribute().key or known
    return known


def runs_of(letters: Sequence[Letter]) -> Iterator[list[Letter]]:
    """Letters under way, by stream, cut where a sequence is missing, and where they would be too much at once."""

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


# A run of letters on its way to a topic: what became of each, by what the broker says and by nothing else.
#
# The places of the run are written down already. Whatever happens here, killed in any moment, the same can be done
# again: either the broker says that it has the records, or it is known that it never will, or they stay as they are.


class Fate(NamedTuple):
    """What is known of a run: `steps` for its store, how many `arrived` and `returned`; `unsure`, a sentence for each
    of which nobody knows; `refused`: what the broker says of one that it will never take, "" where it refused none."""

    steps: tuple[Step, ...] = ()
    arrived: int = 0
    returned: int = 0
    unsure: tuple[str, ...] = ()
    refused: str = ""

    def joined(self, other: Fate) -> Fate:
        """Of two runs together."""
        return Fate(
            self.steps + other.steps,
            self.arrived + other.arrived,
            self.returned + other.returned,
            self.unsure + other.unsure,
            self.refused or other.refused,
        )


def content_of_letter(letter: Letter) -> Content:
    """The record: payload, key, tag and properties as they were, with the counts of calls and redrives that travel with
    it. Raises `DecodeFailed`, `MessageTooLarge`."""
    assert letter.body is not None, "asked for with its body"
    attribute = letter.attribute()
    counted = recount_attribute(letter.body.attribute, letter.calls, attribute.redrives + 1)
    return Content(letter.body.payload, counted, attribute.tag)


def stream_of(journey: Journey) -> Stream:
    return Stream(journey.topic, journey.incarnation, journey.partition, journey.producer_id)


def send_run(
    link: Link, letters: Sequence[Letter], until: float, now_ms: Callable[[], int]
) -> Operation[Fate]:
    """Send letters whose places follow each other in one stream. Raises what leaves all of them as they are."""
    first = _journey(letters[0])
    stream = stream_of(first)
    contents = [content_of_letter(each) for each in letters]
    elsewhere = yield from _elsewhere(link, first, until)
    if elsewhere:
        return Fate(unsure=tuple(f"{each.id} {elsewhere}" for each in letters))
    try:
        offsets = yield from send_numbered(link, stream, first.sequence, contents, until)
    except BadRequest as error:
        if (
            len(letters) > 1
        ):  # perhaps a part of them is there: somebody who knew only of that part had sent it
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
    """What is to be said where this is not the broker that the places are of; "" where it is."""
    if link.hello is None:
        yield from ask(link, Ping(), until)
    if link.hello is None or journey.node in ("", link.hello.node):
        return ""
    return f"is under way to another broker ({journey.node}): redrive it with that one's address (--servers)"


def _one_by_one(
    link: Link, letters: Sequence[Letter], until: float, now_ms: Callable[[], int]
) -> Operation[Fate]:
    whole = Fate()
    for each in letters:
        whole = whole.joined((yield from send_run(link, [each], until, now_ms)))
    return whole


def close_run(
    link: Link, letters: Sequence[Letter], until: float, now_ms: Callable[[], int]
) -> Operation[Fate]:
    """Nothing more comes in the stream of these: what is there arrived, the rest never will."""
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
    steps: list[Step] = []
    for each, offset in zip(letters, offsets, strict=True):
        journey = _journey(each)
        steps.append((each.id, model.Arrive(now_ms, journey.producer_id, journey.sequence, offset)))
    return Fate(tuple(steps), arrived=len(steps))


def _returned(letters: Sequence[Letter], now_ms: int) -> Fate:
    steps: list[Step] = []
    for each in letters:
        journey = _journey(each)
        steps.append((each.id, model.Return(now_ms, each.token, journey.producer_id, journey.sequence)))
    return Fate(tuple(steps), returned=len(steps))


def _unsure(letters: Sequence[Letter], reason: str) -> tuple[str, ...]:
    return tuple(
        f"{each.id} may be in {_journey(each).topic}-{_journey(each).partition} already, and nobody can tell any more:"
        f" {reason.rstrip('.')}"
        for each in letters
    )


def _journey(letter: Letter) -> Journey:
    assert letter.journey is not None, "its place is settled"
    return letter.journey
