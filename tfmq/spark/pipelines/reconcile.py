"""Reconcile pipeline: compares messages produced, consumed by each group, and stored as dead letters.

    python -m tfmq.spark.pipelines.reconcile --servers broker:8367 --dead-letters /var/lib/billing/dead.db

docs/pipelines.md describes what is compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import click

from tfmq.admin import Admin
from tfmq.arrow.decoder import Decoder
from tfmq.arrow.schema import project
from tfmq.cli.output import did_you_mean, escape_unprintable, with_noun
from tfmq.client.connection.addresses import without_password
from tfmq.dead_letters import model
from tfmq.dead_letters.admin import Desk, default_stores
from tfmq.dead_letters.model import Letter, Selection
from tfmq.errors import OffsetOutOfRange, TfmqError
from tfmq.spark.log_reader import LogReader, SourceAddress, open_log_reader
from tfmq.spark.pipelines.command import HELP, Job, pipeline_options, resolve_broker, run_and_exit, timeout_option
from tfmq.spark.pipelines.spark_jobs import SparkTaskRunner, TaskResult, show_progress
from tfmq.spark.ranges import OffsetRange, PartitionLog

CLAIMS_PER_TASK: Final = 500
COLUMNS: Final = project(("offset", "id"))


class LetterClaim(NamedTuple):
    """A dead letter's statement that message `id` is at `offset` of a partition. `resent`: a redrive sent it there."""

    offset: int
    id: int
    group: str
    letter: str
    resent: bool


class ClaimCheck(NamedTuple):
    """Claims about one partition, in the order of offsets, to be checked by one task."""

    address: SourceAddress
    log: PartitionLog
    claims: tuple[LetterClaim, ...]


def plan_claim_checks(
    address: SourceAddress, logs: Iterable[PartitionLog], kept: Sequence[LetterSummary]
) -> list[ClaimCheck]:
    """Return the checks of what the dead letters `kept` say: at which offset of a partition their message is.

    A dead letter that was sent again also says where. Partitions that are not in `logs` are left out.
    """
    known = {(log.topic, log.incarnation, log.partition): log for log in logs}
    claims: dict[PartitionLog, list[LetterClaim]] = {}
    for letter in kept:
        claimed = [((letter.topic, letter.incarnation, letter.partition), letter.offset, letter.message_id, False)]
        if letter.sent is not None:
            topic, incarnation, partition, offset, id = letter.sent
            claimed.append(((topic, incarnation, partition), offset, id, True))
        for key, offset, id, resent in claimed:
            if key in known:
                claims.setdefault(known[key], []).append(LetterClaim(offset, id, letter.group, letter.id, resent))
    return [
        ClaimCheck(address, log, tuple(sorted(found)[first : first + CLAIMS_PER_TASK]))
        for log, found in claims.items()
        for first in range(0, len(found), CLAIMS_PER_TASK)
    ]


def check_claims(claim_check: ClaimCheck) -> TaskResult[list[Fault]]:
    """Read the message of each claim; return a discrepancy for each wrong one. Deleted messages are no discrepancy."""
    faults: list[Fault] = []
    log = claim_check.log
    size = 0
    with open_log_reader(claim_check.address) as logs:
        decoder = Decoder(log.topic, log.partition, log.log_id, COLUMNS)
        for claim in claim_check.claims:
            found, read = _read_id(logs, decoder, log, claim.offset)
            size += read
            if found is not None and found != claim.id:
                faults.append(_wrong_claim(log, claim, found))
    return TaskResult(faults, len(claim_check.claims), size)


def _read_id(logs: LogReader, decoder: Decoder, log: PartitionLog, offset: int) -> tuple[int | None, int]:
    """Return (id of the message at `offset`, bytes read). Id 0: no message begins there; None: it is deleted."""
    bounds = logs.bounds(log)
    if offset < bounds.first:
        return None, 0
    if offset >= bounds.end or logs.next_message_offset(log, offset) != offset:
        return 0, 0
    read = 0
    try:
        for chunk in logs.read_blocks(OffsetRange(log, offset, offset + 1), 1):
            read += len(chunk.data)
            rows = decoder.decode(chunk.data, chunk.offset, offset, offset + 1)
            if len(rows):
                return int(rows.column("id")[0].as_py()), read
    except OffsetOutOfRange:
        return None, read
    return 0, read


def _wrong_claim(log: PartitionLog, claim: LetterClaim, found: int) -> Fault:
    what = "was sent again to" if claim.resent else "is of a message at"
    there = "no message begins there" if not found else f"there stands message {found:#x}"
    text = f"letter {claim.letter} {what} offset {claim.offset} of {log.name} with the id {claim.id:#x}; {there}"
    return Fault(WRONG, claim.group, log.topic, log.partition, text)


OPEN_STATES: Final = (model.FAILING, model.WAITING, model.RETRYING)
UNKNOWN: Final = -1

WRONG, NOTE = "wrong", "note"


class GroupPosition(NamedTuple):
    """Committed offset and lag of a group in a partition. `offset` -1: nothing is committed; `lag` -1: unknown."""

    broker: str
    group: str
    topic: str
    incarnation: int
    partition: int
    first_offset: int
    end_offset: int
    first_ordinal: int
    end_ordinal: int
    offset: int
    lag: int


class LetterSummary(NamedTuple):
    """The fields of a dead letter that are compared with the messages in its partition.

    `store`: name of the store that has the letter · `id`: id of the letter · `sent`: where the message of a redriven
    letter must be now, as (topic, incarnation, partition, offset, message id); None for other letters.
    """

    store: str
    id: str
    group: str
    topic: str
    incarnation: int
    partition: int
    offset: int
    ordinal: int
    message_id: int
    state: str
    sent: tuple[str, int, int, int, int] | None = None


class Fault(NamedTuple):
    """A discrepancy. `weight`: "wrong", or "note" if the discrepancy is temporary or intended."""

    weight: str
    group: str
    topic: str
    partition: int
    text: str


class Row(NamedTuple):
    """Message counts of one partition for one group; -1 if unknown.

    `produced`: messages that were ever appended · `there`: messages still in the log · `consumed`: messages before the
    group's offset · `lag`: messages after the group's offset · `handled`: consumed messages without a dead letter ·
    `waiting`: dead letters that will be handled again · `dead`: dead letters that need an operator, or that a redrive
    has claimed · `settled`: dead letters that were redriven, handled later or dropped.
    """

    broker: str
    group: str
    topic: str
    partition: int
    produced: int
    there: int
    consumed: int
    lag: int
    handled: int
    waiting: int
    dead: int
    settled: int


class Balance(NamedTuple):
    """Result of the pipeline: the counts of each group and partition, and the discrepancies."""

    rows: list[Row]
    faults: list[Fault]


def make_balance(
    positions: Sequence[GroupPosition], letter_summaries: Sequence[LetterSummary], incarnations: Mapping[int, str]
) -> Balance:
    """Count the messages of each group and partition, and find discrepancies between offsets and dead letters.

    `incarnations`: incarnation -> name, of the topics that exist.
    """
    faults: list[Fault] = []
    letters: dict[tuple[str, int, int], list[LetterSummary]] = {}
    for letter in _unique_letters(letter_summaries, faults):
        letters.setdefault((letter.group, letter.incarnation, letter.partition), []).append(letter)
    rows = []
    for position in positions:
        mine = letters.pop((position.group, position.incarnation, position.partition), [])
        rows.append(_make_row(position, mine))
        faults.extend(_find_faults(position, mine))
    for (group, incarnation, partition), left in sorted(letters.items()):
        faults.append(_orphaned_letters(group, partition, left, incarnations.get(incarnation)))
    return Balance(rows, faults)


def _unique_letters(kept: Iterable[LetterSummary], faults: list[Fault]) -> Iterable[LetterSummary]:
    """Return each letter once; add a discrepancy to `faults` for a letter that is in two stores."""
    found: dict[str, LetterSummary] = {}
    for letter in kept:
        other = found.setdefault(letter.id, letter)
        if other is not letter and other.store != letter.store:
            text = f"letter {letter.id} is in {other.store} ({other.state}) and in {letter.store} ({letter.state})"
            faults.append(Fault(WRONG, letter.group, letter.topic, letter.partition, text))
    return found.values()


def _make_row(position: GroupPosition, letters: Sequence[LetterSummary]) -> Row:
    consumed = consumed_count(position)
    passed = [letter for letter in letters if consumed == UNKNOWN or letter.ordinal < consumed]
    count = Counter(letter.state for letter in letters)
    return Row(
        *(position.broker, position.group, position.topic, position.partition),
        position.end_ordinal,
        position.end_ordinal - position.first_ordinal,
        consumed,
        position.lag,
        UNKNOWN if consumed == UNKNOWN else consumed - len(passed),
        sum(count[state] for state in OPEN_STATES),
        sum(count[state] for state in (model.DEAD, model.REDRIVING)),
        sum(count[state] for state in (model.REDRIVEN, model.HANDLED, model.DROPPED)),
    )


def consumed_count(position: GroupPosition) -> int:
    """Return the number of messages before a group's offset; -1 if the lag is unknown or messages there are deleted."""
    if position.offset < 0:
        return 0
    if position.lag < 0 or position.offset < position.first_offset:
        return UNKNOWN
    return position.end_ordinal - position.lag


def _find_faults(position: GroupPosition, letters: Sequence[LetterSummary]) -> Iterable[Fault]:
    name = position.group, position.topic, position.partition
    if position.offset > position.end_offset:
        text = (
            f"the group goes on at offset {position.offset}, and the partition ends at {position.end_offset}: it was"
            " cut, or put back from an older backup"
        )
        yield Fault(WRONG, *name, text)
    if 0 <= position.offset < position.first_offset:
        text = (
            f"the group goes on at offset {position.offset}, and the partition begins at {position.first_offset}:"
            " retention took messages that it had not handled"
        )
        yield Fault(WRONG, *name, text)
    consumed = consumed_count(position)
    if consumed == UNKNOWN:
        return
    early = [letter for letter in letters if letter.ordinal >= consumed]
    beyond = [letter for letter in early if letter.ordinal >= position.end_ordinal]
    if beyond:
        text = (
            f"{with_noun(len(beyond), 'letter')}, the first {beyond[0].id}, of messages after the partition's end: it"
            " was cut, or put back from an older backup"
        )
        yield Fault(WRONG, *name, text)
    elif early:
        text = (
            f"{with_noun(len(early), 'letter')}, the first {early[0].id}, of messages that the group has not saved as"
            " done: it is at work, was set back, or meets them again when it goes on"
        )
        yield Fault(NOTE, *name, text)


def _orphaned_letters(group: str, partition: int, letters: Sequence[LetterSummary], topic: str | None) -> Fault:
    """Return the discrepancy for letters of a group without an offset in `partition`. `topic` None: no such topic."""
    count = with_noun(len(letters), "letter")
    open_ones = sum(letter.state in (*OPEN_STATES, model.DEAD) for letter in letters)
    if topic is None:
        text = f"{count}, {open_ones} of them open, of a topic that is not there any more, or in another broker"
        return Fault(NOTE, group, letters[0].topic, partition, text)
    text = f"{count}, {open_ones} of them open, and the broker knows of no such group here: was it forgotten?"
    return Fault(WRONG, group, topic, partition, text)


EXIT_WRONG: Final = 4
ROW_COLUMNS: Final = (
    "group", "topic", "partition", "produced", "there", "consumed", "lag", "handled", "waiting", "dead", "settled",
)  # fmt: skip
FAULT_COLUMNS: Final = ("weight", "group", "topic", "partition", "text")


@click.command(context_settings=HELP, epilog="\b\nExample:\n  python -m tfmq.spark.pipelines.reconcile --group billing")
@click.option("--servers", "brokers", metavar="HOST:PORT", multiple=True, help="A broker; repeat for several.")
@click.option("--group", "groups", metavar="NAME", multiple=True, help="Only this group; repeat for several.")
@click.option(
    "--dead-letters", "stores", metavar="STORE", multiple=True,
    help="A path, a SQLAlchemy URL or topic:NAME, as `dead_letters=` of a consumer [this user's own stores].",
)  # fmt: skip
@timeout_option
@pipeline_options("reconcile")
def reconcile(
    brokers: tuple[str, ...], groups: tuple[str, ...], stores: tuple[str, ...], timeout: float, job: Job
) -> int:
    """Compare what was produced with what groups consumed and with their dead letters.

    Exit code 0: no discrepancies; 4: something is wrong.
    """
    addresses = [SourceAddress(resolve_broker(broker)) for broker in dict.fromkeys(brokers or (None,))]
    with job.tasks() as tasks:
        found = reconcile_brokers(addresses, groups, stores or default_stores(), timeout, tasks, job)
    print_balance(job, found)
    return EXIT_WRONG if any(fault.weight == WRONG for fault in found.faults) else 0


def reconcile_brokers(
    addresses: Sequence[SourceAddress],
    groups: Sequence[str],
    stores: Sequence[str],
    timeout: float,
    tasks: SparkTaskRunner,
    job: Job,
) -> Balance:
    """Return the balance of `groups` (all groups if it is empty) in the brokers and dead-letter stores."""
    positions: list[GroupPosition] = []
    incarnations: dict[int, str] = {}
    known: list[str] = []
    servers = [str(address.servers) for address in addresses]
    for broker in servers:
        with Admin(broker, timeout=timeout) as admin:
            positions += read_group_positions(admin, without_password(broker), groups)
            incarnations |= {topic.incarnation: topic.name for topic in admin.topics()}
            known += [each.group for each in admin.groups()]
    for name in sorted(set(groups) - set(known)):
        raise TfmqError(f"There is no group {name!r}.{did_you_mean(name, known)}", outcome="not done")
    kept = [letter for store in stores for letter in read_letters(store, servers[0], groups)]
    found = make_balance(positions, kept, incarnations)
    checks = []
    for address in addresses if kept else ():
        with open_log_reader(address) as logs:
            there = [log for topic in logs.topics() for log in logs.partitions(topic)]
            checks += plan_claim_checks(address, there, kept)
    with show_progress(job.output, "reading letters' messages", None) as progress:
        for faults in tasks(check_claims, checks, progress, "reconcile"):
            found.faults.extend(faults)
    return found


def read_group_positions(admin: Admin, broker: str, groups: Sequence[str]) -> Iterator[GroupPosition]:
    """Yield the position in each partition of each group in `groups`, or of all groups if `groups` is empty."""
    # Group offsets must be read before the ends of partitions: in the other order, a group that consumes meanwhile
    # would seem to have consumed more messages than were produced.
    names = [each.group for each in admin.groups() if not groups or each.group in groups]
    offsets_by_group = {name: admin.group(name).offsets for name in sorted(names)}
    topics: dict[str, Any] = {}
    for name, rows in offsets_by_group.items():
        for row in rows:
            topic = row["topic"]
            if topic not in topics:
                topics[topic] = admin.topic(topic)
            partition = topics[topic].partitions[row["partition"]]
            moved = row["end_offset"] != partition.end_offset
            lag = row["lag"]
            if moved and lag >= 0 and row["offset"] >= 0:
                lag += partition.end_ordinal - admin.locate(topic, row["partition"], row["end_offset"]).ordinal
            elif row["offset"] < 0:
                lag = partition.messages
            yield GroupPosition(
                broker, name, topic, topics[topic].incarnation, row["partition"], partition.first_offset,
                partition.end_offset, partition.first_ordinal, partition.end_ordinal, row["offset"], lag,
            )  # fmt: skip


def read_letters(store: str, servers: str, groups: Sequence[str]) -> Iterator[LetterSummary]:
    """Yield the letters of `groups` (all groups if it is empty) in a store. Raises TfmqError for a missing store."""
    with Desk(store, servers) as desk:
        desk.check()
        for name in groups or (None,):
            for letter in desk.letters(Selection(group=name)):
                yield summarize_letter(desk.name, letter)


def summarize_letter(store: str, letter: Letter) -> LetterSummary:
    sent = None
    journey = letter.journey
    if journey is not None and letter.state == model.REDRIVEN and letter.sent_offset >= 0:
        id = journey.producer_id << 24 | journey.sequence
        sent = journey.topic, journey.incarnation, journey.partition, letter.sent_offset, id
    return LetterSummary(
        store, letter.id, letter.group, letter.topic, letter.incarnation, letter.partition, letter.offset,
        letter.ordinal, letter.message_id, letter.state, sent,
    )  # fmt: skip


def print_balance(job: Job, found: Balance) -> None:
    if job.output.json:
        rows, faults = [row._asdict() for row in found.rows], [each._asdict() for each in found.faults]
        job.output.print_object({"rows": rows, "faults": faults})
        return
    job.output.print_rows(
        [_printable_row(row) for row in found.rows], ROW_COLUMNS, "no group has committed an offset yet"
    )
    if found.faults:
        job.output.print_rows([_printable_row(fault) for fault in found.faults], FAULT_COLUMNS, "")
    wrong = sum(fault.weight == WRONG for fault in found.faults)
    job.output.info(f"{with_noun(wrong, 'discrepancy', 'discrepancies')}" if wrong else "no discrepancies")


def _printable_row(row: Row | Fault) -> dict[str, Any]:
    """Return a row with control characters escaped, because another user may have written to the dead-letter store."""
    return {
        name: escape_unprintable(value) if isinstance(value, str) else value for name, value in row._asdict().items()
    }


if __name__ == "__main__":
    run_and_exit(reconcile, "reconcile")
