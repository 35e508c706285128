"""Redrive of dead letters to a topic, each exactly once, also if the redrive is killed.

Each batch of letters is redriven in four steps: claim the letters, so that no other redrive sends them; record a
producer sequence for each letter; send the letters; record that the broker stored them. A letter between the second and
the last step is in transit: it may have been sent. The next redrive first sends the letters in transit again with the
same sequences, and the broker stores each once (`tfmq.client.send.idempotent_send`).

A run, in this module, is a list of letters in transit with consecutive sequences of one producer; a batch that is sent
is a run. Only responses of the broker decide whether a letter is stored. So a redrive may be killed at any point: the
next one asks the broker whether the letter is stored. A letter for which the broker cannot answer remains in transit.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from journal.crc32 import crc32
from tfmq.client.connection.connection import ClientConnection
from tfmq.client.connection.requests import MetadataCache, Topic, fetch_topics, request_with_retries
from tfmq.client.operation import Operation, Wait
from tfmq.client.send import idempotent_send
from tfmq.client.send.idempotent_send import ProducerPartition, RecordContent
from tfmq.dead_letters import model
from tfmq.dead_letters.model import FIRST_PAGE, PAGE_LETTERS, Letter, PagePosition, Selection
from tfmq.dead_letters.open import ask_broker_id
from tfmq.dead_letters.store import TOPIC_PREFIX, LetterStore, Step
from tfmq.dead_letters.topic_store import has_message
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
from tfmq.ids import remaining_sequences
from tfmq.message import replace_counts
from tfmq.protocol.commands import BY_LATEST, Ping

LOOP_LIMIT: Final = 3
"""Number of redrives after which a message is skipped, because it will probably fail again."""
BATCH_BYTES: Final = 1 << 20
BATCHES_PER_SECOND: Final = 10
"""Batches per second if the caller limits the rate. Small batches at short intervals avoid bursts."""
TIMEOUT_SECONDS: Final = 60.0
"""How long one batch is tried. After that the batch's letters remain in transit until the next redrive."""


class Wish(NamedTuple):
    """What a caller wants to redrive, and where to.

    `selection`: which letters. Only dead letters are sent; if the selection has ids, waiting letters are sent, too ·
    `to_topic`: send to this topic instead of the original topics · `rate`: maximum letters per second · `limit`:
    maximum letters in all · `loop_limit`: a letter is skipped if its message was redriven this many times before ·
    `dry`: count the letters, send nothing · `force`: also send letters that belong to another broker.
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

    `sent`: number of letters that the broker stored · `resumed`: those of `sent` that an earlier redrive left in
    transit · `looping`: number of letters skipped because of the loop limit · `unsendable`: a sentence for each letter
    that cannot be sent · `unsure`: a sentence for each letter that may or may not be stored · `targets`: topic ->
    number of letters sent to the topic (in a dry run, that would be sent) · `foreign`: number of skipped letters of
    other brokers, by broker id ("": unknown) · `broker`: id of the broker that was reached · `waiting`: number of
    waiting letters that the request would send if it had their ids, counted only if nothing was sent.
    """

    sent: int = 0
    resumed: int = 0
    looping: int = 0
    unsendable: list[str] = field(default_factory=list)
    unsure: list[str] = field(default_factory=list)
    targets: dict[str, int] = field(default_factory=dict)
    foreign: dict[str, int] = field(default_factory=dict)
    broker: str = ""
    waiting: int = 0

    def count(self, topic: str, number: int) -> None:
        if number:
            self.targets[topic] = self.targets.get(topic, 0) + number

    @property
    def selected(self) -> int:
        """Number of letters sent (in a dry run: counted), except the `resumed` ones: `limit` does not apply to them."""
        return sum(self.targets.values()) - self.resumed


class RedriveOperation:
    """One redrive of letters in an open store, sent over a connection; `run` is called once.

    `wall_clock` returns seconds since 1970. `on_sent(n)` is called when `n` more letters are stored in their topics.
    `report` is filled during the run, so a caller that passes one can also read it after an error.
    """

    def __init__(
        self,
        letters: LetterStore,
        link: ClientConnection,
        request: Wish,
        *,
        wall_clock: Callable[[], float],
        on_sent: Callable[[int], object] = lambda sent: None,
        report: Report | None = None,
    ) -> None:
        if request.rate is not None and not 0 < request.rate < float("inf"):
            raise BadRequest(f"{request.rate:g} is no rate: give a number of messages a second, above 0.")
        self.report = Report() if report is None else report
        self._letters = letters
        self._link = link
        self._request = request
        self._wall_clock = wall_clock
        self._on_sent = on_sent
        self._token = uuid.uuid4().hex
        self._cluster = MetadataCache(link.now)
        self._topics: dict[str, Topic] = {}
        self._producers: dict[tuple[str, int], tuple[ProducerPartition, int]] = {}
        self._next_at = 0.0

    def run(self) -> Operation[Report]:
        """Send the letters in transit again, then send the selected letters.

        If an error is raised, letters may remain in transit, and `report` has what was done before the error.
        """
        started_ms = self._now_ms()
        self.report.broker = yield from ask_broker_id(self._link, self._deadline())
        if not self._request.dry:
            yield from self._resume()
        until_ms = self._request.selection.until_ms
        until_ms = started_ms + 1 if until_ms is None else min(until_ms, started_ms + 1)
        states = (model.DEAD, model.WAITING) if self._request.selection.ids else (model.DEAD,)
        chosen = self._request.selection._replace(states=states, until_ms=until_ms)
        page = FIRST_PAGE
        while self._request.limit is None or self.report.selected < self._request.limit:
            letters = yield from self._letters.find(chosen, page, PAGE_LETTERS, whole=not self._request.dry)
            if not letters:
                break
            page = PagePosition(letters[-1].kept_ms, letters[-1].id)
            yield from self._send_page(letters)
        if not (self.report.targets or chosen.ids):
            yield from self._count_waiting(chosen)
        return self.report

    def _count_waiting(self, chosen: Selection) -> Operation[None]:
        page = FIRST_PAGE
        waiting = chosen._replace(states=(model.WAITING,))
        while letters := (yield from self._letters.find(waiting, page, PAGE_LETTERS)):
            page = PagePosition(letters[-1].kept_ms, letters[-1].id)
            self.report.waiting += len(letters)

    def _resume(self) -> Operation[None]:
        """Send letters in transit again. Claimed letters without a sequence were never sent: make them dead again."""
        page = FIRST_PAGE
        under_way = Selection(states=(model.REDRIVING,))
        while letters := (yield from self._letters.find(under_way, page, PAGE_LETTERS, whole=True)):
            page = PagePosition(letters[-1].kept_ms, letters[-1].id)
            unsent = [each for each in letters if each.journey is None]
            yield from self._letters.apply(
                [(each.id, model.ReturnEvent(self._now_ms(), each.token)) for each in unsent]
            )
            for run in group_runs([each for each in letters if each.journey is not None]):
                self.report.resumed += (yield from self._resume_run(run)).arrived

    def _resume_run(self, run: Sequence[Letter]) -> Operation[RedriveResult]:
        """Send a run again. If a body is lost, close the run's producer instead; then the broker tells what it has."""
        if all(each.body is not None for each in run):
            return (yield from self._send_run(run))
        fate = yield from close_run(self._link, run, self._deadline(), self._now_ms)
        yield from self._record_result(run, fate)
        return fate

    def _send_page(self, letters: Sequence[Letter]) -> Operation[None]:
        """Send a page of letters, grouped by target partition; a dry run only counts them."""
        own = []
        for each in letters:
            if (yield from self._belongs_to_broker(each)):
                own.append(each)
            else:
                self.report.foreign[each.broker] = self.report.foreign.get(each.broker, 0) + 1
        able = [each for each in own if each.redrives < self._request.loop_limit]
        self.report.looping += len(own) - len(able)
        if self._request.limit is not None:
            able = able[: self._request.limit - self.report.selected]
        by_target: dict[tuple[str, int], list[Letter]] = {}
        for each in able:
            target = yield from self._choose_target(each)
            by_target.setdefault(target, []).append(each)
        rate = self._request.rate
        most = PAGE_LETTERS if rate is None else max(1, int(rate / BATCHES_PER_SECOND))
        for target, meant in by_target.items():
            if self._request.dry:
                self.report.count(target[0], len(meant))
                continue
            for batch in split_batches(filter(self._is_sendable, meant), most):
                yield from self._wait_for_rate(len(batch))
                yield from self._send_batch(target, batch)

    def _belongs_to_broker(self, letter: Letter) -> Operation[bool]:
        """Return whether to send the letter: `force` is set, or the letter belongs to the reached broker.

        A letter without a broker id belongs to the broker of the topic in which the letter is stored. If it is stored
        in a database, it belongs to the broker that has its message.
        """
        if self._request.force or letter.broker == self.report.broker:
            return True
        if letter.broker:
            return False
        if self._letters.name.startswith(TOPIC_PREFIX):
            return True
        return (yield from has_message(self._link, letter, self._deadline()))

    def _choose_target(self, letter: Letter) -> Operation[tuple[str, int]]:
        """Return the topic and partition to which the letter is sent. Raises UnknownTopic if the topic is missing.

        In its own topic a letter keeps its partition, if the topic still has it. Otherwise the hash of the key selects
        the partition. Without a key, the letter's partition number modulo the number of partitions selects it.
        """
        name = self._request.to_topic or letter.topic
        if name not in self._topics:
            found = yield from fetch_topics(self._link, self._cluster, [name])
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
        key = exact_key(letter)
        data = key.encode() if isinstance(key, str) else key
        return name, crc32(data) % count

    def _is_sendable(self, letter: Letter) -> bool:
        """Return whether a letter can be sent; if not, add the reason to the report."""
        if letter.body is None:
            self.report.unsendable.append(
                f"{letter.id} cannot be sent: it was too large to be copied, and is deleted at its own location,"
                f" {letter.origin}."
            )
            return False
        try:
            encode_letter(letter)
        except (DecodeFailed, MessageTooLarge) as error:
            self.report.unsendable.append(f"{letter.id} cannot be sent: {error}")
            return False
        return True

    def _wait_for_rate(self, count: int) -> Operation[None]:
        if self._request.rate is None:
            return
        while (wait := self._next_at - self._link.now()) > 0:
            yield Wait((), wait)
        self._next_at = max(self._next_at, self._link.now()) + count / self._request.rate

    def _send_batch(self, target: tuple[str, int], letters: Sequence[Letter]) -> Operation[None]:
        """Claim and send a batch. If the broker rejects it, send its letters one by one."""
        waiting = bool(self._request.selection.ids)
        claim = model.ClaimEvent(self._now_ms(), self._token, waiting)
        claimed = yield from self._letters.apply([(each.id, claim) for each in letters])
        won = [each for each, found in zip(letters, claimed, strict=True) if found is not None]
        if not won:
            return
        fate = yield from self._send_run((yield from self._assign_sequences(target, won)))
        if fate.refused and len(won) > 1:  # The broker's response does not name the rejected letter.
            for each in won:
                yield from self._send_batch(target, [each])
        elif fate.refused:
            self.report.unsendable.append(f"{won[0].id} cannot be sent: {fate.refused}")

    def _assign_sequences(self, target: tuple[str, int], letters: Sequence[Letter]) -> Operation[list[Letter]]:
        """Record consecutive sequences and return the changed letters; [] if another redrive has claimed a letter."""
        stream, first = yield from self._producer(target, len(letters))
        end = yield from idempotent_send.locate_log_end(self._link, stream, BY_LATEST, self._deadline())
        node = self._link.hello.node if self._link.hello is not None else ""
        steps = []
        for sequence, each in enumerate(letters, first):
            journey = model.RedrivePosition(*stream, sequence, end, node)
            steps.append((each.id, model.DepartEvent(self._now_ms(), self._token, journey)))
        placed = yield from self._letters.apply(steps)
        found = [
            replace(each, token=self._token, journey=step[1].journey)
            for each, step, now in zip(letters, steps, placed, strict=True)
            if now is not None
        ]
        if len(found) == len(letters):
            self._producers[target] = (stream, first + len(letters))
            return found
        if found:  # The sequences of `found` have a gap, and another redrive may have sent some of these letters.
            yield from self._record_result(
                found, (yield from close_run(self._link, found, self._deadline(), self._now_ms))
            )
        return []

    def _producer(self, target: tuple[str, int], count: int) -> Operation[tuple[ProducerPartition, int]]:
        """Return a producer of the target with at least `count` unused sequences, and the first unused sequence."""
        known = self._producers.get(target)
        if known is not None and remaining_sequences(known[1]) >= count:
            return known
        producer_id = yield from idempotent_send.lease_producer_id(self._link, self._deadline())
        topic, partition = target
        return ProducerPartition(topic, self._topics[topic].incarnation, partition, producer_id), 0

    def _send_run(self, letters: Sequence[Letter]) -> Operation[RedriveResult]:
        if not letters:
            return RedriveResult()
        fate = yield from send_run(self._link, letters, self._deadline(), self._now_ms)
        yield from self._record_result(letters, fate)
        return fate

    def _record_result(self, letters: Sequence[Letter], fate: RedriveResult) -> Operation[None]:
        """Apply the events of `fate` to the store, and add its counts to the report."""
        yield from self._letters.apply(fate.steps)
        journey = letters[0].journey
        assert journey is not None
        self.report.sent += fate.arrived
        self.report.count(journey.topic, fate.arrived)
        self.report.unsure += fate.unsure
        self._on_sent(fate.arrived)
        if fate.arrived < len(letters):
            # The producer is closed or in an unknown state, so the next run must use another producer.
            self._producers.pop((journey.topic, journey.partition), None)

    def _deadline(self) -> float:
        return self._link.now() + TIMEOUT_SECONDS

    def _now_ms(self) -> int:
        return round(self._wall_clock() * 1000)


def exact_key(letter: Letter) -> bytes | str:
    """Return the exact key from the letter's body; without a body, `letter.key`, which a database keeps as text."""
    known = letter.key or b""
    if letter.body is None:
        return known
    with suppress(DecodeFailed):
        known = letter.attribute().key or known
    return known


def group_runs(letters: Sequence[Letter]) -> Iterator[list[Letter]]:
    """Split letters in transit into runs: consecutive sequences of one producer, up to PAGE_LETTERS and BATCH_BYTES."""

    def place(letter: Letter) -> tuple[tuple[str, ProducerPartition], int]:
        assert letter.journey is not None
        return (letter.journey.node, ProducerPartition(*letter.journey[:4])), letter.journey.sequence

    for _, group in itertools.groupby(sorted(letters, key=place), key=lambda each: place(each)[0]):
        yield from split_batches(group, PAGE_LETTERS, lambda before, each: place(each)[1] != place(before)[1] + 1)


def split_batches(
    letters: Iterable[Letter], most: int, is_gap: Callable[[Letter, Letter], bool] = lambda before, each: False
) -> Iterator[list[Letter]]:
    """Split letters into batches of at most `most` letters and BATCH_BYTES; also split where `is_gap(before, each)`."""
    batch: list[Letter] = []
    size = 0
    for each in letters:
        own = max(0, each.payload_bytes)
        if batch and (len(batch) >= most or size + own > BATCH_BYTES or is_gap(batch[-1], each)):
            yield batch
            batch, size = [], 0
        batch.append(each)
        size += own
    if batch:
        yield batch


class RedriveResult(NamedTuple):
    """Result of sending a run, or of closing its producer.

    `steps`: the events to apply in the dead-letter store · `unsure`: a sentence for each letter that may or may not be
    stored · `refused`: why the broker permanently rejects a letter of the run, or "".
    """

    steps: tuple[Step, ...] = ()
    unsure: tuple[str, ...] = ()
    refused: str = ""

    @property
    def arrived(self) -> int:
        """Number of letters that are stored."""
        return sum(isinstance(event, model.ArriveEvent) for _, event in self.steps)

    def combine(self, other: RedriveResult) -> RedriveResult:
        return RedriveResult(self.steps + other.steps, self.unsure + other.unsure, self.refused or other.refused)


def encode_letter(letter: Letter) -> RecordContent:
    """Encode the original message with the letter's count of calls, and with one redrive more than before.

    Raises DecodeFailed if the attribute is invalid, MessageTooLarge if the attribute is too large with these counts.
    """
    assert letter.body is not None, "asked for with its body"
    attribute = letter.attribute()
    counted = replace_counts(letter.body.attribute, letter.calls, attribute.redrives + 1)
    return RecordContent(letter.body.payload, counted, attribute.tag)


def producer_of(journey: model.RedrivePosition) -> ProducerPartition:
    return ProducerPartition(journey.topic, journey.incarnation, journey.partition, journey.producer_id)


def send_run(
    link: ClientConnection, letters: Sequence[Letter], until: float, now_ms: Callable[[], int]
) -> Operation[RedriveResult]:
    """Send the letters of a run with their recorded sequences, and return which letters the broker stored.

    `until`: deadline by the connection's clock. If the broker rejects the run, the producer is closed, and the result
    has the reason. If an error is raised, all letters of the run remain in transit.
    """
    first = _redrive_position(letters[0])
    stream = producer_of(first)
    contents = [encode_letter(each) for each in letters]
    elsewhere = yield from _other_broker_text(link, first, until)
    if elsewhere:
        return RedriveResult(unsure=tuple(f"{each.id} {elsewhere}" for each in letters))
    try:
        offsets = yield from idempotent_send.send_idempotent(link, stream, first.sequence, contents, until)
    except BadRequest as error:
        if len(letters) > 1:
            # Another redrive may have sent some letters of this run before the others had sequences. Send each alone.
            whole = RedriveResult()
            for each in letters:
                whole = whole.combine((yield from send_run(link, [each], until, now_ms)))
            return whole
        return (yield from close_run(link, letters, until, now_ms))._replace(refused=error.sentence)
    except MessageTooLarge as error:
        return (yield from close_run(link, letters, until, now_ms))._replace(refused=error.sentence)
    except (SequenceGap, StaleProducer, UnknownProducer):
        return (yield from close_run(link, letters, until, now_ms))
    except UnknownTopic:
        return RedriveResult(unsure=_unsure_sentences(letters, f"topic {first.topic} was deleted since"))
    sequences = (_redrive_position(each).sequence for each in letters)
    return _run_result(letters, dict(zip(sequences, offsets, strict=True)), now_ms())


def _other_broker_text(link: ClientConnection, journey: model.RedrivePosition, until: float) -> Operation[str]:
    """Return "" if the broker of `journey` is unknown or the connected one; otherwise an error text."""
    if link.hello is None:
        yield from request_with_retries(link, Ping(), until)
    if link.hello is None or journey.node in ("", link.hello.node):
        return ""
    return f"is in transit to another broker ({journey.node}): redrive it with that one's address (--servers)"


def close_run(
    link: ClientConnection, letters: Sequence[Letter], until: float, now_ms: Callable[[], int]
) -> Operation[RedriveResult]:
    """Close the producer of a run, so that letters of the run that are not stored yet are never stored.

    The result's events make the stored letters redriven and the other letters dead again. If the broker cannot tell
    which letters are stored, all remain in transit, and `unsure` has a sentence for each.
    """
    journeys = [_redrive_position(each) for each in letters]
    stream = producer_of(journeys[0])
    try:
        last = yield from idempotent_send.close_producer(link, stream, until)
        found = {each.sequence: -1 for each in journeys if each.sequence <= last}
    except UnknownProducer:
        since = min(each.from_offset for each in journeys)
        try:
            sequences = [each.sequence for each in journeys]
            found = yield from idempotent_send.find_records(link, stream, sequences, since, until)
        except (OffsetOutOfRange, Damaged, UnknownTopic) as error:
            return RedriveResult(unsure=_unsure_sentences(letters, str(error)))
    except UnknownTopic as error:
        return RedriveResult(unsure=_unsure_sentences(letters, str(error)))
    return _run_result(letters, found, now_ms())


def _run_result(letters: Sequence[Letter], found: Mapping[int, int], at_ms: int) -> RedriveResult:
    """Return the result for a run of which the broker stored `found`: sequence -> offset (-1: unknown)."""
    steps: list[Step] = []
    for each, journey in zip(letters, map(_redrive_position, letters), strict=True):
        sent = (journey.producer_id, journey.sequence)
        if journey.sequence in found:
            steps.append((each.id, model.ArriveEvent(at_ms, *sent, found[journey.sequence])))
        else:
            steps.append((each.id, model.ReturnEvent(at_ms, each.token, *sent)))
    return RedriveResult(tuple(steps))


def _unsure_sentences(letters: Sequence[Letter], reason: str) -> tuple[str, ...]:
    return tuple(
        f"{each.id} may be in {_redrive_position(each).topic}-{_redrive_position(each).partition} already, which is"
        f" unknown now: {reason.rstrip('.')}"
        for each in letters
    )


def _redrive_position(letter: Letter) -> model.RedrivePosition:
    assert letter.journey is not None, "its place is settled"
    return letter.journey
